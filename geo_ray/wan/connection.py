"""One authenticated TCP connection between two endpoints, while it lasts."""

from __future__ import annotations

import socket
from typing import Final

from geo_ray.clock import Clock
from geo_ray.errors import LinkDownError
from geo_ray.wan import sockets
from geo_ray.wan.frame_io import WireCount, recv_frame
from geo_ray.wan.frames import Frame, FrameKind, FrameLimits
from geo_ray.wan.handshake import Greeting
from geo_ray.wan.message import TRANSPORT
from geo_ray.wan.writer import Writer

_ALIVE_BYTES: Final = 16 * 1024  # of a payload within `peer_timeout_s` are a sign of life


class Connection:
    """A socket after its handshake. Later: one of several streams, or a TLS socket.

    Args:
        sock: the socket; blocking from here on.
        writer: sends its frames.
        greeting: the handshake's outcome.
        dialed: whether this side dialed it.
        count: what its handshake received.
        clock: for `silent_s`.

    Attributes:
        greeting: as given.
        dialed: as given.
        sent: bytes by class; the writer's.
        received: bytes by class.
        busy: the receiver is with the user's handler and cannot hear the peer.
        sending: the sender is with a frame.
        cause: why it ended, if it did.
    """

    def __init__(
        self,
        sock: socket.socket,
        writer: Writer,
        greeting: Greeting,
        *,
        dialed: bool,
        count: WireCount,
        clock: Clock,
    ) -> None:
        self.greeting = greeting
        self.dialed = dialed
        self.sent = writer.sent
        self.received: dict[str, int] = {TRANSPORT: count.wire_bytes}
        self.busy = False
        self.sending = False
        self.cause: Exception | None = None
        self._sock = sock
        self._writer = writer
        self._clock = clock
        self._count = count
        self._heard_at_s = clock.now_s()
        self._unheard_bytes = 0
        count.on_payload = self._on_payload
        sock.settimeout(None)

    def send(self, frame: Frame, traffic: str) -> None:
        """Send a frame; the sender's thread only.

        Raises:
            OSError: the connection is lost.
        """
        self._writer.send(frame, self.greeting.send_key, traffic)

    def receive(self, limits: FrameLimits) -> tuple[Frame, int]:
        """Wait for a frame; the receiver's thread only.

        Returns:
            The frame and its bytes on the wire; a message's are not accounted yet.

        Raises:
            TransportError: what arrived is no valid frame.
            OSError: the connection is lost.
        """
        before = self._count.wire_bytes
        frame = recv_frame(self._sock, self.greeting.recv_key, limits, count=self._count)
        self.heard()
        wire_bytes = self._count.wire_bytes - before
        if frame.kind is not FrameKind.MESSAGE:
            self.account(TRANSPORT, wire_bytes)
        return frame, wire_bytes

    def account(self, traffic: str, wire_bytes: int) -> None:
        """Add received bytes to a class."""
        self.received[traffic] = self.received.get(traffic, 0) + wire_bytes

    def heard(self) -> None:
        """The peer is alive."""
        self._unheard_bytes = 0
        self._heard_at_s = self._clock.now_s()

    def _on_payload(self, size_bytes: int) -> None:
        # Were a piece of a payload lost, heartbeats would trickle into its place.
        self._unheard_bytes += size_bytes
        if self._unheard_bytes >= _ALIVE_BYTES:
            self.heard()

    def silent_s(self) -> float:
        """How long nothing was heard of the peer, in seconds; 0 while nobody listens."""
        return 0.0 if self.busy else self._clock.now_s() - self._heard_at_s

    def flush(self, timeout_s: float) -> bool:
        """Wait until an emulated link has released everything."""
        return self._writer.flush(timeout_s)

    def end(self, cause: Exception | str) -> None:
        """Wake both of its threads; they then finish. The first cause counts."""
        if self.cause is None:
            self.cause = LinkDownError(cause) if isinstance(cause, str) else cause
        sockets.hang_up(self._sock)

    def finish_sending(self) -> None:
        """Tell the peer that nothing more will come; what it still says is received."""
        sockets.stop_sending(self._sock)

    def close(self) -> None:
        """Free the socket; for the receiver's thread, once `end` was called."""
        self._writer.close()
        self._sock.close()
