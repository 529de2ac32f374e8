"""One non-blocking socket of a connection, and the kernel's TCP counters for it.

`read_tcp_info` returns retransmissions, round trips and delivery rate. Linux only (`struct
tcp_info`, linux/tcp.h: the offset of a field never changes, new fields are appended).
"""

from __future__ import annotations

import contextlib
import math
import socket
import ssl
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from geo_ray.transport.emulation import CHUNK_BYTES, Shaper, regroup
from geo_ray.transport.outbox import Chunk, Key
from geo_ray.transport.security.tls import peer_serial
from geo_ray.transport.wire import sockets
from geo_ray.transport.wire.frame_io import FrameReader, Place
from geo_ray.transport.wire.frames import Frame, FrameKind, FrameLimits, encode
from geo_ray.transport.wire.handshake import Greeting
from geo_ray.transport.wire.message import TRANSPORT

_ASK_BYTES: Final = 512  # larger than the struct of any kernel
_NEEDED_BYTES: Final = 168  # up to tcpi_delivery_rate, Linux 4.9
_TIMEOUTS_BYTE: Final = 2
_RTT, _RTT_VAR, _CWND = 68, 72, 80
_TOTAL_RETRANS: Final = 100
_BYTES_ACKED: Final = 120
_MIN_RTT, _DATA_SEGS_OUT, _DELIVERY_RATE = 148, 156, 160
_DSACK_DUPS: Final = 216  # Linux 4.19
_APP_LIMITED_BYTE: Final = 7
_APP_LIMITED_BIT: Final = 0x01 if sys.byteorder == "little" else 0x80
_U32: Final = 2**32


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """The counters of one socket since it was connected; they wrap at 2^32.

    Attributes:
        segments_out: data segments sent, retransmissions included.
        retransmitted: of these, those that were sent again.
        spurious: of these, those that the other end had got already; 0 where unknown.
        rtt_s: the kernel's smoothed round trip, None before the first.
        rtt_var_s: its mean deviation.
        rtt_min_s: the shortest one of late; None if unknown.
        delivery_rate_mbps: latest, in 10^6 bit/s; a lower bound if ``app_limited``.
        app_limited: the sender had too little to send for the rate to say much.
        bytes_acked: acknowledged by the other end's kernel.
        window_segments: congestion window.
        timeouts: retransmission timeouts in a row that brought no answer of the other end's kernel;
            the pause before the next one doubles each time.
    """

    segments_out: int
    retransmitted: int
    spurious: int
    rtt_s: float | None
    rtt_var_s: float | None
    rtt_min_s: float | None
    delivery_rate_mbps: float
    app_limited: bool
    bytes_acked: int
    window_segments: int
    timeouts: int = 0

    def segments_since(self, earlier: TcpInfo | None) -> tuple[int, int]:
        """Return segments sent and lost since an earlier reading of the socket, or since its start.

        Retransmissions that were not spurious count as lost. This is the path's loss as TCP saw it:
        an unneeded probe of a tail counts as lost until the other end reports it.
        """
        sent = self.segments_out - (earlier.segments_out if earlier else 0)
        again = self.retransmitted - (earlier.retransmitted if earlier else 0)
        needless = self.spurious - (earlier.spurious if earlier else 0)
        lost = again % _U32 - needless % _U32
        return sent % _U32, max(0, lost)


def read_tcp_info(sock: socket.socket) -> TcpInfo | None:
    """Ask the kernel.

    Args:
        sock: a TCP socket, a TLS one included.

    Returns:
        None where the system has nothing like it, or the socket is closed.
    """
    if not sys.platform.startswith("linux") or not hasattr(socket, "TCP_INFO"):
        return None
    try:
        return parse(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ASK_BYTES))
    except OSError:
        return None


def parse(data: bytes) -> TcpInfo | None:
    """Read the kernel's struct; None if it lacks fields that are needed."""
    if len(data) < _NEEDED_BYTES:
        return None
    (cwnd,) = struct.unpack_from("=I", data, _CWND)
    (rate_bytes_s,) = struct.unpack_from("=Q", data, _DELIVERY_RATE)
    (bytes_acked,) = struct.unpack_from("=Q", data, _BYTES_ACKED)
    return TcpInfo(
        segments_out=_u32(data, _DATA_SEGS_OUT),
        retransmitted=_u32(data, _TOTAL_RETRANS),
        spurious=_u32(data, _DSACK_DUPS) if len(data) >= _DSACK_DUPS + 4 else 0,
        rtt_s=_seconds(_u32(data, _RTT)),
        rtt_var_s=_seconds(_u32(data, _RTT_VAR)) if _u32(data, _RTT) else None,
        rtt_min_s=_seconds(_u32(data, _MIN_RTT)),
        delivery_rate_mbps=rate_bytes_s * 8e-6,
        app_limited=bool(data[_APP_LIMITED_BYTE] & _APP_LIMITED_BIT),
        bytes_acked=bytes_acked,
        window_segments=cwnd,
        timeouts=data[_TIMEOUTS_BYTE],
    )


def _u32(data: bytes, offset: int) -> int:
    (value,) = struct.unpack_from("=I", data, offset)
    return int(value)


def _seconds(microseconds: int) -> float | None:
    """Return None for 0 and 2^32 - 1, which mean that there was no measurement yet."""
    return None if microseconds in (0, _U32 - 1) else microseconds * 1e-6


_RECORD_BYTES: Final = 16 * 1024  # most plain bytes of a TLS record
_GATHER: Final = 64  # buffers in one system call
_READ_BYTES: Final = 512 * 1024  # then the other streams have their turn


class Stream:
    """A socket after its handshake, with what waits to go out on it.

    Args:
        sock: plain or TLS; not blocking from here on.
        number: 0 for the stream that carries control, counted up for others.
        greeting: the handshake's outcome.
        shaper: an emulated link, or None.
        handshake_bytes: received so far.

    Attributes:
        number: as given.
        greeting: as given.
        chunks: chunks that were handed to it and are not acknowledged.
        sent: bytes by class.
        received: bytes by class; a chunk's are added by the owner.
        is_draining: nothing new is handed to it; it closes when both sides have said so.
        has_moved: whether the kernel took bytes of chunks since the owner last looked. Heartbeats
            do not count, because they may pass on a stream whose chunks do not arrive.
        progress_s: time of the last such bytes or acknowledgement; set by the owner.
        sent_bye: whether this side has sent BYE.
        received_bye: whether the other side has.
        is_closed: its socket is free.
        opened_s: time at which it was taken into use; set by the owner.
        peer_serial: of the other end's certificate; None without TLS.
    """

    def __init__(
        self,
        sock: socket.socket,
        number: int,
        greeting: Greeting,
        shaper: Shaper | None,
        handshake_bytes: int,
    ) -> None:
        self.number = number
        self.greeting = greeting
        self.chunks: dict[Key, Chunk] = {}
        self.sent: dict[str, int] = {}
        self.received: dict[str, int] = {TRANSPORT: handshake_bytes}
        self.has_moved = self.is_closed = False
        self.progress_s = self.opened_s = 0.0
        self.is_draining = self.sent_bye = self.received_bye = False
        self.sock = sock
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self.peer_serial = peer_serial(sock) if isinstance(sock, ssl.SSLSocket) else None
        self._shaper = shaper
        self._queue: deque[tuple[float, memoryview, str]] = deque()  # (when, bytes, class)
        self._reader: FrameReader | None = None
        self._is_blocked = False
        self._frames_out = 0
        self._tcp_info: TcpInfo | None = None
        sock.setblocking(False)

    def open(self, limits: FrameLimits, place: Place) -> None:
        """Begin to parse received bytes."""
        self._reader = FrameReader(self.greeting.recv_key, limits, place)

    def fileno(self) -> int:
        """For a selector."""
        return self.sock.fileno()

    @property
    def is_tls(self) -> bool:
        """Whether payloads are encrypted, and need no digest of their own."""
        return self._is_tls

    def is_spent(self, now_s: float, most_bytes: float, most_s: float) -> bool:
        """Whether its keys have served for as many bytes one way, or as long, as they may."""
        carried_bytes = max(sum(self.sent.values()), sum(self.received.values()))
        return carried_bytes >= most_bytes or now_s - self.opened_s >= most_s

    # ------------------------------------------------------------------ out

    @property
    def is_idle(self) -> bool:
        """Whether all bytes were given to the kernel."""
        return not self._queue

    def has_room(self) -> bool:
        """Whether another chunk may be put on it now."""
        if self.is_closed:
            return False
        return not self._queue if self._shaper is None else self._shaper.has_room()

    def ready_in_s(self, *, has_chunk: bool) -> float:
        """Return the seconds until an emulated link can act again, which no selector can tell.

        Args:
            has_chunk: whether something waits for room on the link.
        """
        if self._shaper is None:
            return math.inf
        wait_s = math.inf
        if self._queue and not self._is_blocked:
            wait_s = max(0.0, self._queue[0][0] - self._shaper.now_s())
        return min(wait_s, self._shaper.room_in_s()) if has_chunk else wait_s

    def limit_unsent(self, size_bytes: int) -> None:
        """See `sockets.limit_unsent`."""
        sockets.limit_unsent(self.sock, size_bytes)

    def put(self, frame: Frame, traffic: str) -> None:
        """Queue a frame; its payload must not change until it is sent."""
        key, number = self.greeting.send_key, self._frames_out
        self._frames_out += 1
        parts = encode(frame, key, digest_payload=not self._is_tls, number=number)
        if self._is_tls:
            parts = _first_record(parts)
        if self._shaper is None:
            self._queue.extend((0.0, part, traffic) for part in parts)
            return
        ready_s = self._shaper.now_s()
        for group in regroup(parts, CHUNK_BYTES):
            when_s = self._shaper.arrival_s(ready_s, sum(part.nbytes for part in group))
            self._queue.extend((when_s, part, traffic) for part in group)

    def keep_copies(self) -> None:
        """Copy what waits to go out, because its buffers may change."""
        self._queue = deque(
            (when_s, memoryview(bytes(part)), traffic) for when_s, part, traffic in self._queue
        )

    def write(self) -> bool:
        """Give the kernel what is due; return whether it took everything.

        Raises:
            OSError: the connection is lost.
        """
        now_s = 0.0 if self._shaper is None else self._shaper.now_s()
        while self._queue and self._queue[0][0] <= now_s:
            try:
                sent = self._send(now_s)
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                self._is_blocked = True
                return False
            self._account(sent)
        self._is_blocked = False
        return True

    def _send(self, now_s: float) -> int:
        if self._is_tls:  # TLS: the same bytes must be offered again
            return self.sock.send(self._queue[0][1])
        parts: list[memoryview] = []
        for when_s, part, _ in self._queue:
            if when_s > now_s or len(parts) == _GATHER:
                break
            parts.append(part)
        return self.sock.sendmsg(parts)

    def _account(self, sent: int) -> None:
        while sent:
            when_s, part, traffic = self._queue[0]
            self.has_moved = self.has_moved or traffic != TRANSPORT
            taken = min(sent, part.nbytes)
            self.sent[traffic] = self.sent.get(traffic, 0) + taken
            sent -= taken
            if taken == part.nbytes:
                self._queue.popleft()
            else:
                self._queue[0] = (when_s, part[taken:], traffic)

    def segments_since(self) -> tuple[int, int]:
        """TCP segments sent, and of them lost, since the last call; nothing where unknown."""
        info = read_tcp_info(self.sock)
        if info is None:
            return 0, 0
        earlier, self._tcp_info = self._tcp_info, info
        return info.segments_since(earlier)

    @property
    def timeouts(self) -> int:
        """See `TcpInfo.timeouts`; as of the last `segments_since`."""
        return 0 if self._tcp_info is None else self._tcp_info.timeouts

    # ------------------------------------------------------------------ in

    def read(self, on_bytes: Callable[[int], None]) -> Iterator[tuple[Frame, int]]:
        """Yield the frames that have arrived, with their bytes on the wire.

        Args:
            on_bytes: called with the number of bytes of each read, whether or not a frame is
                complete.

        Raises:
            TransportError: what arrived is no valid frame.
            OSError: the connection is lost, or ended by the other side (`ConnectionError`).
        """
        reader = self._reader
        if reader is None:
            return
        total = 0
        while total < _READ_BYTES or self._has_pending():
            try:
                count = self.sock.recv_into(reader.room())
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except ssl.SSLEOFError as error:
                raise ConnectionResetError("the peer ended the connection") from error
            if not count:
                raise ConnectionResetError("the peer ended the connection")
            total += count
            on_bytes(count)
            for frame, wire_bytes in reader.took(count):
                if frame.kind is not FrameKind.CHUNK:
                    self.account_in(TRANSPORT, wire_bytes)
                yield frame, wire_bytes

    def _has_pending(self) -> bool:
        """Whether TLS holds decrypted bytes that no selector knows of."""
        return isinstance(self.sock, ssl.SSLSocket) and self.sock.pending() > 0

    def account_in(self, traffic: str, wire_bytes: int) -> None:
        """Add received bytes to a class."""
        self.received[traffic] = self.received.get(traffic, 0) + wire_bytes

    def divert(self) -> None:
        """See `FrameReader.divert`."""
        if self._reader is not None:
            self._reader.divert()

    # ------------------------------------------------------------------ the end

    def finish_sending(self) -> None:
        """Tell the peer that nothing more will come; what it still sends is received."""
        sockets.stop_sending(self.sock)

    def close(self) -> None:
        """Free the socket."""
        self.is_closed = True
        sockets.hang_up(self.sock)
        with contextlib.suppress(OSError):
            self.sock.close()


def _first_record(parts: Iterator[memoryview]) -> Iterator[memoryview]:
    """Return the same bytes, the head joined with what fits into its TLS record.

    A head alone would be a record, and a packet, of its own. The rest stays uncopied.
    """
    head = next(parts)
    payload = next(parts, memoryview(b""))
    cut = max(0, _RECORD_BYTES - head.nbytes)
    yield memoryview(b"".join((head, payload[:cut])))
    if payload.nbytes > cut:
        yield payload[cut:]
    yield from parts
