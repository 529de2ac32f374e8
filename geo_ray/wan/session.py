"""Everything between two endpoints, over any number of connections: order, acks, duplicates."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from geo_ray.clock import Clock
from geo_ray.errors import (
    DeadlineExceededError,
    FrameError,
    LinkDownError,
    PeerRefusedError,
    TransportError,
)
from geo_ray.wan.books import Books
from geo_ray.wan.config import TransportConfig
from geo_ray.wan.connection import Connection
from geo_ray.wan.frames import Frame, FrameKind, check_sendable, view_of
from geo_ray.wan.heartbeat import Heartbeat
from geo_ray.wan.inbox import Callbacks, Inbox
from geo_ray.wan.incarnation import Incarnation
from geo_ray.wan.message import (
    RESEND,
    TRANSPORT,
    Identity,
    Message,
    PeerStats,
    from_frame,
    natural,
    to_frame,
)
from geo_ray.wan.meta import Meta
from geo_ray.wan.outbox import Outbox

_LARGEST: Final = 2**63
_LOGGER = logging.getLogger(__name__)


class Session:
    """State shared with one peer region.

    A connection is adopted after its handshake and `run` in the thread that made it; the newest
    one counts. Messages are numbered per direction; both ends say how far they got when they meet
    again, and the rest is sent once more.

    Args:
        identity: this endpoint.
        peer: the other region.
        config: limits and deadlines.
        callbacks: the user's.
        on_change: called when the session was connected or disconnected.
        clock: for heartbeats and silence.
    """

    def __init__(
        self,
        identity: Identity,
        peer: str,
        config: TransportConfig,
        callbacks: Callbacks,
        on_change: Callable[[], None],
        clock: Clock,
    ) -> None:
        self.peer = peer
        self._region = identity.region
        self._config = config
        self._limits = config.limits()
        self._on_change = on_change
        self._clock = clock
        self._inbox = Inbox(peer, callbacks)
        # Guards everything below; never held while a callback or a socket is busy.
        self._changed = threading.Condition()
        self._outbox = Outbox(config.max_outbox_messages, config.max_outbox_bytes)
        self._connection: Connection | None = None
        self._closed = False
        self._incarnation = Incarnation(peer)
        self._acked = 0  # what the peer was told on the present connection
        self._heartbeat = Heartbeat(config.heartbeat_s)
        self._books = Books()

    # ------------------------------------------------------------------ the user's side

    def send(self, message: Message, deadline_s: float) -> None:
        """Queue a message; see `Endpoint.send`."""
        size_bytes = view_of(message.payload).nbytes
        # An unsendable message must fail here: in the outbox it would end every connection.
        longest = to_frame(message, _LARGEST, _LARGEST)
        check_sendable(longest.meta, size_bytes, self._limits)
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._outbox.has_room(size_bytes), deadline_s
            )
            if self._closed:
                raise LinkDownError(f"the link to region {self.peer} is closed")
            if not self._outbox.has_room(size_bytes):
                raise DeadlineExceededError(
                    f"no room for a {message.kind!r} message to region {self.peer} within "
                    f"{deadline_s} s (send_deadline_s): {len(self._outbox)} messages with "
                    f"{self._outbox.size_bytes} bytes are not acknowledged"
                )
            self._outbox.add(message, size_bytes)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until the peer has acknowledged everything and was acknowledged itself."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            if not self._changed.wait_for(self._is_flushed, timeout_s):
                return False
            connection = self._connection
        return connection is None or connection.flush(max(0.0, deadline_s - time.monotonic()))

    def _is_flushed(self) -> bool:
        connection = self._connection
        owes_ack = connection is not None and (
            connection.sending or self._acked < self._inbox.received
        )
        return self._closed or not (self._outbox or owes_ack)

    def stats(self) -> PeerStats:
        """See `PeerStats`."""
        duplicates, connection = self._inbox.duplicates, self._connection
        with self._changed:
            books = self._books
            return PeerStats(
                connected=self._connection is not None,
                epoch=None if self._incarnation.epoch < 0 else self._incarnation.epoch,
                bytes_out=books.bytes_out(),
                bytes_in=books.bytes_in(),
                messages_out=books.messages_out,
                messages_in=books.messages_in,
                duplicates_in=duplicates,
                dropped_out=books.dropped_out,
                reconnects=max(0, books.connects - 1),
                rtt_s=self._heartbeat.rtt_s,
                rtt_min_s=self._heartbeat.rtt_min_s,
                outbox_messages=len(self._outbox),
                outbox_bytes=self._outbox.size_bytes,
                heard_s_ago=None if connection is None else connection.silent_s(),
                last_error=books.last_error,
            )

    def note_error(self, error: Exception) -> None:
        """Why a connection could not be made; shown by `stats`."""
        with self._changed:
            self._books.last_error = str(error)

    # ------------------------------------------------------------------ connections

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None

    def wait_disconnected(self) -> bool:
        """Wait until there is no connection; False if the session was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._connection is None)
            return not self._closed

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait for `close`, or until a connection was adopted; whether it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._connection is not None, timeout_s)
            return self._closed

    def admit(self, hello: Meta) -> Meta:
        """Look at a peer's hello that is not authenticated yet; changes nothing.

        Returns:
            This side's READY: how many of that incarnation's messages arrived.

        Raises:
            PeerRefusedError: another incarnation of the peer has taken over.
        """
        with self._changed:
            is_same = self._incarnation.is_same(hello)
            return {"received": self._inbox.received if is_same else 0}

    def adopt(self, connection: Connection) -> None:
        """Make an authenticated connection the session's; an older one ends.

        Raises:
            PeerRefusedError: the peer may not, or both sides dialed and the other dial won.
            FrameError: the peer's READY makes no sense.
            LinkDownError: the session is closed.
        """
        hello, received = connection.greeting.hello, natural(connection.greeting.ready, "received")
        with self._changed:
            if self._closed:
                raise LinkDownError(f"the link to region {self.peer} is closed")
            old = self._connection
            if old is not None and self._rank(old) > self._rank(connection):
                raise PeerRefusedError(f"region {self.peer} is connected already")
            if not self._incarnation.is_same(hello):
                self._begin_anew(hello)
            self._outbox.rewind(received)
            if old is not None:
                old.end("replaced by a newer connection")
            self._connection = connection
            self._acked = 0  # tell the peer at once how far this side got
            self._heartbeat.restart()
            self._books.open(connection)
            self._changed.notify_all()
        self._on_change()

    def _rank(self, connection: Connection) -> bool:
        """Of two dials in opposite directions, the one of the region that sorts first stays."""
        return connection.dialed == (self._region < self.peer)

    def _begin_anew(self, hello: Meta) -> None:
        had_predecessor = self._incarnation.replace(hello)
        self._inbox.begin_anew(self._incarnation.epoch)
        if not had_predecessor:
            return
        dropped = self._outbox.restart()
        self._books.dropped_out += dropped
        _LOGGER.warning(
            "region %s began anew with epoch %d; %d messages to its predecessor are dropped",
            self.peer, self._incarnation.epoch, dropped,
        )  # fmt: skip

    def run(self, connection: Connection) -> None:
        """Serve an adopted connection until it ends; frees its socket."""
        epoch = natural(connection.greeting.hello, "epoch")
        sender = threading.Thread(
            target=self._send_all, args=(connection,), name=f"wan-send-{self.peer}", daemon=True
        )
        sender.start()
        try:
            connection.busy = True
            self._inbox.tell_up(connection, epoch)
            connection.heard()
            connection.busy = False
            self._receive_all(connection, epoch)
        except (TransportError, OSError) as error:
            connection.end(error)
        finally:
            connection.end("closed")
            with self._changed:
                if self._connection is connection:
                    self._connection = None
                self._books.last_error = str(connection.cause)
                self._changed.notify_all()
            connection.close()
            sender.join()
            with self._changed:
                self._books.close(connection)
            self._inbox.tell_down(connection)
            self._on_change()

    def tick(self) -> None:
        """Send a heartbeat if it is time, and end a connection whose peer is silent."""
        limit_s = self._config.peer_timeout_s + 2 * self._config.heartbeat_s
        with self._changed:
            connection = self._connection
            if connection is None:
                return
            if self._heartbeat.tick(self._clock.now_s()):
                self._changed.notify_all()
        if (silent_s := connection.silent_s()) > limit_s:
            connection.end(f"region {self.peer} was silent for {silent_s:.1f} s")

    def finish(self) -> None:
        """Accept and send nothing more; the connection ends when the peer has seen that."""
        with self._changed:
            self._closed = True
            if self._connection is not None:
                self._connection.finish_sending()
            self._changed.notify_all()

    def wait_ended(self, timeout_s: float) -> None:
        """Wait until there is no connection."""
        with self._changed:
            self._changed.wait_for(lambda: self._connection is None, timeout_s)

    def end(self) -> None:
        """End the connection, if there is one, after `finish`."""
        with self._changed:
            if self._connection is not None:
                self._connection.end("closed by this side")

    # ------------------------------------------------------------------ frames

    def _send_all(self, connection: Connection) -> None:
        try:
            while (due := self._next_due(connection)) is not None:
                frame, traffic = due
                connection.send(frame, traffic)
        except (TransportError, OSError) as error:
            connection.end(error)

    def _next_due(self, connection: Connection) -> tuple[Frame, str] | None:
        with self._changed:
            connection.sending = False
            self._changed.notify_all()
            due = self._wait_due(connection)
            connection.sending = due is not None
            return due

    def _wait_due(self, connection: Connection) -> tuple[Frame, str] | None:
        """Wait for something to send; None once the connection is no longer the session's."""
        while self._connection is connection and not self._closed:
            beat = self._heartbeat.next_frame(self._clock.now_s())
            if beat is not None:
                return beat, TRANSPORT
            received = self._inbox.received
            entry = self._outbox.next_to_send()
            if entry is not None:
                self._acked = received
                is_new = entry.times_sent == 1
                self._books.messages_out += is_new
                frame = to_frame(entry.message, entry.number, received)
                return frame, entry.message.traffic if is_new else RESEND
            if self._acked < received:
                self._acked = received
                return Frame(FrameKind.ACK, {"up_to": received}), TRANSPORT
            self._changed.wait()
        return None

    def _receive_all(self, connection: Connection, epoch: int) -> None:
        while True:
            frame, wire_bytes = connection.receive(self._limits)
            if frame.kind is FrameKind.MESSAGE:
                self._receive_message(connection, epoch, frame, wire_bytes)
            elif frame.kind is FrameKind.ACK:
                self._acknowledge(natural(frame.meta, "up_to"), epoch)
            elif frame.kind is FrameKind.PING:
                with self._changed:
                    self._heartbeat.ping(frame.meta)
                    self._changed.notify_all()
            elif frame.kind is FrameKind.PONG:
                with self._changed:
                    self._heartbeat.pong(frame.meta, self._clock.now_s())
            else:
                raise FrameError(f"a {frame.kind.name} frame within a connection")

    def _receive_message(
        self, connection: Connection, epoch: int, frame: Frame, wire_bytes: int
    ) -> None:
        number, ack, message = from_frame(frame)
        self._acknowledge(ack, epoch)

        def on_taken() -> None:
            connection.account(message.traffic, wire_bytes)
            with self._changed:
                self._books.messages_in += 1
                self._changed.notify_all()

        connection.busy = True
        try:
            if not self._inbox.deliver(epoch, number, message, on_taken):
                connection.account(RESEND, wire_bytes)
        finally:
            connection.heard()
            connection.busy = False

    def _acknowledge(self, number: int, epoch: int) -> None:
        with self._changed:
            if epoch == self._incarnation.epoch:
                self._outbox.acknowledge(number)
                self._changed.notify_all()
