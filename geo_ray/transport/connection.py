"""A connection between two endpoints: one control stream, several data streams, one event loop.

The loop is a single thread that never blocks on a socket. It takes chunks from the session
(`SessionSide`) when a stream can accept them, so a fast stream carries more than a slow one.
`Stream` is one non-blocking socket, `ChunkSender` selects the stream of a chunk and retransmits,
`ChunkReceiver` acknowledges.
"""

from __future__ import annotations

import contextlib
import logging
import math
import selectors
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Final, Protocol

from geo_ray.base.clock import Clock
from geo_ray.base.errors import FrameError, LinkDownError, TransportError
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.emulation import CHUNK_BYTES, Shaper, regroup
from geo_ray.transport.flow import FlowControl, Heartbeat
from geo_ray.transport.outbox import Chunk, Key
from geo_ray.transport.security.tls import peer_serial
from geo_ray.transport.wire import sockets
from geo_ray.transport.wire.fields import Meta, count, counts
from geo_ray.transport.wire.frames import Frame, FrameKind, FrameLimits, FrameReader, Place, encode
from geo_ray.transport.wire.handshake import Greeting
from geo_ray.transport.wire.message import (
    ALL_LANES,
    CONTROL_LANE,
    DATA_LANES,
    RESEND,
    TRANSPORT,
    Piece,
    read_piece,
)
from geo_ray.transport.wire.sockets import TcpInfo, read_tcp_info


class SessionSide(Protocol):
    """The session's side that faces its connections; any thread may call."""

    flow: FlowControl

    def next_chunk(
        self, link_id: str, lanes: range, chunk_bytes: int, now_s: float, shares: int = 1
    ) -> Chunk | None:
        """See `Outbox.next_chunk`; None for a connection that was replaced."""

    def has_chunk(self, lanes: range) -> bool:
        """See `Outbox.has_chunk`."""

    def straggler(
        self,
        link_id: str,
        sent_before_s: float,
        times: int,
        now_s: float,
        but: Container[Key],
    ) -> Chunk | None:
        """See `Outbox.straggler`; None for a connection that was replaced."""

    def acknowledged(self, link_id: str, keys: list[Key], delivered: list[int]) -> list[Chunk]:
        """Process an ACK; return the newly acknowledged chunks, none if replaced."""

    def give_back(self, link_id: str, chunks: list[Chunk]) -> None:
        """See `Outbox.give_back`; does nothing for a connection that was replaced."""

    def in_flight_bytes(self, lanes: range) -> int:
        """See `Outbox.in_flight_bytes`."""

    def place(
        self, attempt: int, piece: Piece, size_bytes: int, divert: Callable[[], None]
    ) -> memoryview:
        """See `Assembly.place`."""

    def abandon(self, piece: Piece, divert: Callable[[], None]) -> None:
        """See `Assembly.abandon`."""

    def complete(self, attempt: int, piece: Piece, payload: memoryview) -> bool:
        """See `Assembly.complete`; whether the chunk was new."""

    def delivered(self) -> list[int]:
        """Return, by lane, the number up to which messages were delivered here."""

    def settled(self) -> None:
        """Note that all acknowledgements were sent to the peer."""

    def note_error(self, error: Exception) -> None:
        """Record why a stream could not be made, or ended."""


_TIMES_SENT: Final = 3
_LATE_FACTOR: Final = 2.5
_LATE_MIN_S: Final = 0.05
_BLEND: Final = 0.1


class ChunkSender:
    """Sends the chunks of a connection; only the loop's thread may use it.

    Args:
        link_id: id of the connection.
        session: session of the connection.
        write: gives a stream's buffers to the kernel; must not raise if the stream fails.

    Attributes:
        late_s: a chunk that was not acknowledged for that many seconds is sent again when streams
            are idle; learned from other chunks.
    """

    def __init__(self, link_id: str, session: SessionSide, write: Callable[[Stream], None]) -> None:
        self.late_s = 1.0
        self._link_id = link_id
        self._session = session
        self._write = write

    def run(self, control: Stream, streams: Sequence[Stream], now_s: float) -> None:
        """Send chunks as long as there are chunks, space and window.

        The window is the link's, whatever the streams. Control messages do not wait for data, but
        for a window's worth of their own: at most two windows are under way.

        Args:
            control: stream for control messages; it takes all chunks while there is no data stream.
            streams: data streams that take chunks.
            now_s: the time.
        """
        session, flow = self._session, self._session.flow
        size_bytes, shares = flow.chunk_bytes(len(streams)), flow.shares(len(streams))
        while control.has_capacity():
            chunk = None
            if flow.may_send(session.in_flight_bytes(CONTROL_LANE)):
                chunk = self._next(CONTROL_LANE, size_bytes, now_s)
            if chunk is None and not streams and flow.may_send(session.in_flight_bytes(ALL_LANES)):
                chunk = self._next(DATA_LANES, size_bytes, now_s)
            if chunk is None:
                break
            self._hand(control, chunk, now_s)
        ready = [stream for stream in streams if stream.has_capacity()]
        while ready:
            for stream in list(ready):
                if not flow.may_send(session.in_flight_bytes(ALL_LANES)):
                    return
                chunk = self._next(DATA_LANES, size_bytes, now_s, shares)
                if chunk is None:
                    chunk = self._late(stream, [control, *streams], now_s)
                if chunk is None:
                    return
                self._hand(stream, chunk, now_s)
                if not stream.has_capacity():
                    ready.remove(stream)

    def take_acks(self, meta: Meta, streams: Sequence[Stream], now_s: float) -> None:
        """Process an acknowledgement of the peer.

        Raises:
            FrameError: the acknowledgement is invalid.
        """
        flat, delivered = counts(meta, "chunks"), counts(meta, "delivered")
        if len(flat) % 3:
            raise FrameError("an acknowledgement is cut short")
        keys = list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))
        before_bytes = self._session.in_flight_bytes(ALL_LANES)
        acked = self._session.acknowledged(self._link_id, keys, delivered)
        for stream in streams:
            for key in keys:
                if stream.chunks.pop(key, None) is not None:
                    stream.progress_s = now_s
        if not acked:
            return
        for chunk in acked:
            if chunk.times_sent == 1:
                took_s = now_s - chunk.sent_s
                late_s = max(_LATE_MIN_S, _LATE_FACTOR * took_s)
                self.late_s += _BLEND * (late_s - self.late_s)
                self._session.flow.on_chunk(took_s)
        size_bytes = sum(chunk.size_bytes for chunk in acked)
        self._session.flow.on_acked(now_s, size_bytes, before_bytes)

    def _next(self, lanes: range, size_bytes: int, now_s: float, shares: int = 1) -> Chunk | None:
        return self._session.next_chunk(self._link_id, lanes, size_bytes, now_s, shares)

    def _late(self, stream: Stream, holders: list[Stream], now_s: float) -> Chunk | None:
        """Return a chunk that was in flight for too long, when there is nothing new to send."""
        before_s = now_s - self.late_s
        chunk = self._session.straggler(self._link_id, before_s, _TIMES_SENT, now_s, stream.chunks)
        if chunk is not None:
            for holder in holders:  # see `Chunk.frame`
                if chunk.key in holder.chunks and not holder.is_idle:
                    holder.keep_copies()
        return chunk

    def _hand(self, stream: Stream, chunk: Chunk, now_s: float) -> None:
        if not stream.chunks:
            stream.progress_s = now_s
        stream.chunks[chunk.key] = chunk
        traffic = chunk.entry.message.traffic if chunk.times_sent == 1 else RESEND
        stream.put(chunk.frame(), traffic)
        self._write(stream)


_ACKS_PER_FRAME: Final = 900  # three numbers each
ACK_META_BYTES: Final = 32 * 1024  # largest header of an acknowledgement


class ChunkReceiver:
    """Receives the chunks of a connection and acknowledges them; only the loop's thread may use it.

    Args:
        session: session of the connection.
        attempt: the peer's incarnation.

    Attributes:
        owes: whether something is not acknowledged yet.
        due_s: when it must be acknowledged at the latest; infinite if nothing was received.
    """

    def __init__(self, session: SessionSide, attempt: int) -> None:
        self._session = session
        self._attempt = attempt
        self._placing: dict[Stream, tuple[Piece, Callable[[], None]]] = {}
        self.due_s = math.inf
        self._acks: list[int] = []  # lane, number, offset
        self._owed_bytes = 0
        self._acknowledged: list[int] = []  # numbers up to which delivery was acknowledged

    @property
    def owes(self) -> bool:
        """Return whether an acknowledgement is due."""
        return bool(self._acks) or self._acknowledged != self._session.delivered()

    def place(self, stream: Stream, kind: FrameKind, meta: Meta, size_bytes: int) -> memoryview:
        """Return the buffer for a frame's payload; see `FrameReader`."""
        if kind is not FrameKind.CHUNK:
            if size_bytes:
                raise FrameError(f"a {kind.name} frame with a payload of {size_bytes} bytes")
            return memoryview(b"")
        piece, divert = read_piece(meta), partial(Stream.divert, stream)
        self._placing[stream] = (piece, divert)
        return self._session.place(self._attempt, piece, size_bytes, divert)

    def take(self, stream: Stream, frame: Frame, wire_bytes: int) -> None:
        """Pass a complete chunk to the session."""
        piece, _ = self._placing.pop(stream)
        payload = frame.payload if isinstance(frame.payload, memoryview) else memoryview(b"")
        is_new = self._session.complete(self._attempt, piece, payload)
        stream.account_in(piece.traffic if is_new else RESEND, wire_bytes)
        self._acks += [piece.lane, piece.number, piece.offset]
        self._owed_bytes += payload.nbytes

    def forget(self, stream: Stream) -> None:
        """Let another stream receive what an ended stream was receiving."""
        placing = self._placing.pop(stream, None)
        if placing is not None:
            self._session.abandon(*placing)

    def acknowledge(self, control: Stream, now_s: float) -> None:
        """Acknowledge the chunks that have arrived, unless more are expected at once."""
        delay_s = self._session.flow.ack_delay_s(self._owed_bytes)
        self.due_s = min(self.due_s, now_s + delay_s) if self._acks else math.inf
        if now_s < self.due_s < math.inf:
            return
        self.due_s, self._owed_bytes = math.inf, 0
        numbers = self._session.delivered()
        cut = 3 * _ACKS_PER_FRAME
        while self._acks or numbers != self._acknowledged:
            some, self._acks, self._acknowledged = self._acks[:cut], self._acks[cut:], numbers
            meta: Meta = {"delivered": [*numbers], "chunks": [*some]}
            control.put(Frame(FrameKind.ACK, meta), TRANSPORT)


_RECORD_BYTES: Final = 16 * 1024  # most plain bytes of a TLS record
_GATHER: Final = 64  # buffers in one system call
_READ_BYTES: Final = 1024**2  # then the other streams have their turn


class Stream:
    """A socket after its handshake, with its queued frames.

    Args:
        sock: plain or TLS; not blocking from here on.
        number: 0 for the stream that carries control, counted up for others.
        greeting: the handshake's outcome.
        shaper: an emulated link, or None.
        handshake_bytes: received so far.

    Attributes:
        number: as given.
        greeting: as given.
        chunks: chunks that were given to it and are not acknowledged.
        sent: bytes by class.
        received: bytes by class; a chunk's are added by the owner.
        is_draining: it gets nothing new; it closes when both sides have sent BYE.
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
        """Return whether its keys have reached their limit of bytes one way, or of time."""
        total_bytes = max(sum(self.sent.values()), sum(self.received.values()))
        return total_bytes >= most_bytes or now_s - self.opened_s >= most_s

    # ------------------------------------------------------------------ out

    @property
    def is_idle(self) -> bool:
        """Whether all bytes were given to the kernel."""
        return not self._queue

    def has_capacity(self) -> bool:
        """Whether another chunk may be put on it now."""
        if self.is_closed:
            return False
        return not self._queue if self._shaper is None else self._shaper.has_capacity()

    def ready_in_s(self, *, has_chunk: bool) -> float:
        """Return the seconds until an emulated link can act again, which no selector reports.

        Args:
            has_chunk: whether a chunk waits for space on the link.
        """
        if self._shaper is None:
            return math.inf
        wait_s = math.inf
        if self._queue and not self._is_blocked:
            wait_s = max(0.0, self._queue[0][0] - self._shaper.now_s())
        return min(wait_s, self._shaper.capacity_in_s()) if has_chunk else wait_s

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
        """Copy queued payloads, because their buffers may change."""
        self._queue = deque(
            (when_s, memoryview(bytes(part)), traffic) for when_s, part, traffic in self._queue
        )

    def write(self) -> bool:
        """Write what is due to the kernel; return whether it accepted everything.

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
            TransportError: a received frame is invalid.
            OSError: the connection is lost, or ended by the other side (`ConnectionError`).
        """
        reader = self._reader
        if reader is None:
            return
        total = 0
        while total < _READ_BYTES or self._has_pending():
            try:
                count = self._receive(reader.space())
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

    def _receive(self, space: memoryview) -> int:
        """Receive into a buffer; from TLS, which gives one record at a time, until it is full."""
        total = self.sock.recv_into(space)
        if not self._is_tls:
            return total
        with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
            while total < space.nbytes:
                count = self.sock.recv_into(space[total:])
                if not count:
                    break  # the end, which the next call will return as well
                total += count
        return total

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
        """Announce the end of sending; the peer's remaining frames are received."""
        sockets.stop_sending(self.sock)

    def close(self) -> None:
        """Free the socket."""
        self.is_closed = True
        sockets.hang_up(self.sock)
        with contextlib.suppress(OSError):
            self.sock.close()


def _first_record(parts: Iterator[memoryview]) -> Iterator[memoryview]:
    """Return the same bytes, the head joined with what fits into its TLS record.

    A header alone would be a separate record, and packet. The rest is not copied.
    """
    head = next(parts)
    payload = next(parts, memoryview(b""))
    cut = max(0, _RECORD_BYTES - head.nbytes)
    yield memoryview(b"".join((head, payload[:cut])))
    if payload.nbytes > cut:
        yield payload[cut:]
    yield from parts


_LOGGER = logging.getLogger(__name__)
_LONGEST_WAIT_S: Final = 0.5
_ASK_KERNEL_S: Final = 1.0
_DIALS_AT_ONCE: Final = 16
_LAST_CALL: Final = 1.1  # of the limits of a stream: then it ends whatever is under way
_REDIAL_S: Final = 1.0
_TEND_S: Final = 0.005
_CUT_TIMEOUTS: Final = 3  # consecutive; one or two result from lost packets
_LARGEST_CHUNK_BYTES: Final = 1024**2  # accepted from peers whose `chunk_bytes` is larger

Counts = list[dict[str, int]]


class Connection:
    """The control stream and data streams of one connection to a peer.

    Args:
        peer: the other region.
        session: session of the connection.
        control: the stream on which the handshake was made.
        dialed: whether this side dialed it, and hence dials the data streams.
        config: limits and deadlines.
        clock: for heartbeats and silence.
        dial_stream: starts a thread that dials the data stream with a given number, and calls
            `attach` and `dial_ended`.

    Attributes:
        dialed: as given.
        greeting: outcome of the control stream's handshake.
        cause: why the connection ended, if it did.
        heartbeat: heartbeats and round trips.
        owes: whether acknowledgements or frames still have to go out.
    """

    def __init__(
        self,
        peer: str,
        session: SessionSide,
        control: Stream,
        *,
        dialed: bool,
        config: TransportConfig,
        clock: Clock,
        dial_stream: Callable[[Connection, int], None],
    ) -> None:
        self.dialed = dialed
        self.greeting: Greeting = control.greeting
        self.cause: Exception | None = None
        self.heartbeat = Heartbeat(config.heartbeat_s)
        self.owes = True
        self._peer = peer
        self._session = session
        self._control = control
        self._config = config
        self._clock = clock
        self._dial_stream = dial_stream
        self._chunk_receiver = ChunkReceiver(session, count(control.greeting.hello, "attempt"))
        self._chunk_sender = ChunkSender(
            self.greeting.link_id, session, partial(self._guard, work=Stream.write)
        )
        self._data: list[Stream] = []
        # Bytes of all streams, closed ones too: only added to, so that no reader misses a stream's.
        self._tallies = [(control.sent, control.received)]
        self._last_number = 0
        self._has_met = False  # whether the peer's loop has sent anything
        self._redial_at_s = self._tend_at_s = 0.0
        self._is_tended = True
        self._spent: Stream | None = None  # to be replaced by another
        self._wish = 0  # number of streams that the peer asked for
        self._sent_wish = 0
        self._received_s = self._asked_s = self._turned_s = clock.now_s()
        self._finishing = self._finished = False
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        self._is_awake = False
        self._lock = threading.Lock()  # guards the two below, and `cause`
        self._attached: deque[Stream] = deque()
        self._dialing = 0

    # ------------------------------------------------------------------ any thread

    def wake(self) -> None:
        """Wake the loop, which then checks for changes."""
        if self._is_awake:
            return
        self._is_awake = True
        try:
            self._waker.send(b"\0")
        except OSError:  # full, or the connection has ended
            return

    def attach(self, stream: Stream) -> None:
        """Add a data stream after its handshake.

        Raises:
            LinkDownError: the connection has ended.
        """
        with self._lock:
            if self.cause is not None:
                raise LinkDownError(f"the connection to region {self._peer} has ended")
            self._attached.append(stream)
        self.wake()

    def dial_ended(self, error: Exception | None) -> None:
        """Note that a dial begun by `dial_stream` has ended."""
        with self._lock:
            self._dialing -= 1
        if error is not None:
            self._redial_at_s = self._clock.now_s() + _REDIAL_S
            self._session.note_error(error)

    def end(self, cause: Exception | str) -> None:
        """End the loop; the first cause is kept."""
        with self._lock:
            if self.cause is None:
                self.cause = LinkDownError(cause) if isinstance(cause, str) else cause
        self.wake()

    def finish(self) -> None:
        """Send the begun messages only; the connection ends when the peer has received them."""
        self._finishing = True
        self.wake()

    def since_received_s(self) -> float:
        """Return the seconds since anything was received from the peer."""
        return self._clock.now_s() - self._received_s

    @property
    def is_cut(self) -> bool:
        """Return whether the path seems to be down, so that TCP doubles its pauses.

        The kernel of a busy peer answers.
        """
        return self._control.timeouts >= _CUT_TIMEOUTS

    def stuck_s(self) -> float:
        """Return the seconds since the loop's last turn; it waits for at most half a second."""
        return self._clock.now_s() - self._turned_s

    @property
    def streams(self) -> int:
        """The number of open data streams."""
        return len(self._data)

    @property
    def peer_serials(self) -> set[int]:
        """The serial numbers of the certificates that the peer showed, one per stream or less."""
        serials = {stream.peer_serial for stream in [self._control, *self._data]}
        return {serial for serial in serials if serial is not None}

    @property
    def is_encrypted(self) -> bool:
        """Whether the connection is encrypted by TLS."""
        return self._control.is_tls

    def counts(self) -> tuple[Counts, Counts]:
        """Return the bytes by class, sent and received, of all streams so far."""
        tallies = list(self._tallies)
        return [dict(sent) for sent, _ in tallies], [dict(received) for _, received in tallies]

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        """Serve the connection until it ends; free all sockets."""
        try:
            self._selector.register(self._woken, selectors.EVENT_READ, None)
            self._session.flow.connected(one_address=sockets.has_one_address(self._control.sock))
            self._open(self._control)
            while self.cause is None:
                self._turn()
        except (TransportError, OSError) as error:
            self.end(error)
        except Exception as error:
            _LOGGER.exception("the loop of the connection to region %s failed", self._peer)
            self.end(f"an internal error: {type(error).__name__}: {error}")
        finally:
            self.end("an internal error")
            self._close()

    def _turn(self) -> None:
        self._turned_s = self._clock.now_s()
        for key, mask in self._selector.select(self._patience_s()):
            if key.data is None:
                # In this order: a byte that is sent in between must not be taken out, or the flag
                # would say for ever that one is there.
                self._woken.recv(4096)
                self._is_awake = False
            elif mask & selectors.EVENT_READ:
                self._guard(key.data, self._read)
        if self.cause is not None:
            return
        now_s = self._clock.now_s()
        self._take_attached()
        self._is_tended = now_s >= self._tend_at_s  # not in every turn, which is often only a chunk
        if self._is_tended:
            self._tend_at_s = now_s + _TEND_S
            self._check_responsive(now_s)
            self._ask_kernel(now_s)
            if not self._finishing:
                self._tend_streams(now_s)
        if not self._finishing:
            for frame in self.heartbeat.frames(now_s, self._session.flow.ping_every_s()):
                self._control.put(frame, TRANSPORT)
        self._chunk_receiver.acknowledge(self._control, now_s)
        self._guard(self._control, Stream.write)
        if not self._finishing:
            self._chunk_sender.run(self._control, self._live(), now_s)
        for stream in [self._control, *self._data]:
            self._guard(stream, self._flush)
        self._settle(now_s)

    def _patience_s(self) -> float:
        now_s, flow = self._clock.now_s(), self._session.flow
        until_s = min(
            now_s + _LONGEST_WAIT_S,
            self.heartbeat.due_s(flow.ping_every_s()),
            self._chunk_receiver.due_s,
        )
        if not self._is_tended:
            until_s = min(until_s, self._tend_at_s)
        if self._session.in_flight_bytes(ALL_LANES):
            until_s = min(until_s, now_s + self._chunk_sender.late_s / 2)
        wait_s = max(0.0, until_s - now_s)
        has_chunk = self._session.has_chunk(ALL_LANES)
        for stream in [self._control, *self._data]:
            wait_s = min(wait_s, stream.ready_in_s(has_chunk=has_chunk))
        return wait_s

    def _settle(self, now_s: float) -> None:
        """Report the results of a loop turn to the session, the peer and flow control."""
        streams = [self._control, *self._data]
        owed, self.owes = (
            self.owes,
            self._chunk_receiver.owes or not all(each.is_idle for each in streams),
        )
        if owed and not self.owes:
            self._session.settled()
        if self._finishing and not self.owes and not self._finished:
            self._finished = True
            for stream in streams:
                stream.finish_sending()
        in_flight_bytes, flow = self._session.in_flight_bytes(ALL_LANES), self._session.flow
        has_chunk = self._session.has_chunk(DATA_LANES)
        flow.look(
            now_s,
            len(self._data),
            is_busy=has_chunk or in_flight_bytes > 0,
            has_more=has_chunk,
            waits=has_chunk and flow.may_send(in_flight_bytes),
        )

    def _guard(self, stream: Stream, work: Callable[[Stream], object]) -> None:
        """Run an action on a stream; if a data stream fails, only that stream is closed."""
        try:
            work(stream)
        except (TransportError, OSError) as error:
            if stream is self._control:
                raise
            self._lose(stream, error)

    def _check_responsive(self, now_s: float) -> None:
        if (since_received_s := now_s - self._received_s) > self._config.unresponsive_after_s:
            raise LinkDownError(f"region {self._peer} sent nothing for {since_received_s:.1f} s")
        flow, streams = self._session.flow, [self._control, *self._data]
        since_s = now_s - flow.stall_limit_s
        stalled = [each for each in streams if each.chunks and each.progress_s < since_s]
        if stalled:
            flow.on_stall()
        for stream in stalled:
            self._guard(stream, _give_up)

    def _ask_kernel(self, now_s: float) -> None:
        """Read from TCP's own counters how many segments were lost."""
        if now_s - self._asked_s < _ASK_KERNEL_S:
            return
        self._asked_s = now_s
        counts = [stream.segments_since() for stream in [self._control, *self._data]]
        sent, lost = (sum(column) for column in zip(*counts, strict=True))
        self._session.flow.on_segments(now_s, sent, lost)
        self._limit_unsent()
        if self.dialed and not self._finishing:
            self._renew(now_s)

    def _renew(self, now_s: float) -> None:
        """Replace streams whose keys have reached their limit, one at a time.

        Ending the control stream ends the connection, which is redialed at once. This happens while
        nothing is in flight, if such a moment comes within a tenth of the time.
        """
        config = self._config
        limits = config.max_stream_bytes, config.max_stream_age_s
        patience = _LAST_CALL if self._session.in_flight_bytes(ALL_LANES) else 1.0
        if self._control.is_spent(now_s, *(patience * limit for limit in limits)):
            self.end("its keys have reached their limit; it is redialed")
            return
        if self._spent not in self._live():
            spent = (stream for stream in self._live() if stream.is_spent(now_s, *limits))
            self._spent = next(spent, None)

    # ------------------------------------------------------------------ streams

    def _open(self, stream: Stream) -> None:
        config = self._config
        meta_bytes = max(config.max_meta_bytes, ACK_META_BYTES)
        # A second copy of a chunk gets a separate buffer, so a chunk must not be a whole message.
        chunk_bytes = max(config.chunk_bytes, _LARGEST_CHUNK_BYTES)
        limits = FrameLimits(meta_bytes, chunk_bytes, not stream.is_tls)
        stream.open(limits, partial(self._chunk_receiver.place, stream))
        stream.opened_s = self._clock.now_s()
        self._selector.register(stream.sock, selectors.EVENT_READ, stream)

    def _take_attached(self) -> None:
        if not self._attached:
            return
        while self._attached:
            stream = self._attached.popleft()
            self._tallies.append((stream.sent, stream.received))
            self._data.append(stream)
            self._open(stream)
        self._limit_unsent()

    def _limit_unsent(self) -> None:
        size_bytes = self._session.flow.unsent_bytes(len(self._data))
        for stream in self._data:
            stream.limit_unsent(size_bytes)

    def _live(self) -> list[Stream]:
        return [stream for stream in self._data if not stream.is_draining]

    def _lose(self, stream: Stream, error: Exception | None) -> None:
        """Close a data stream and give back its chunks to the session."""
        if stream not in self._data:
            return
        self._data.remove(stream)
        self._selector.unregister(stream.sock)
        self._chunk_receiver.forget(stream)
        stream.close()
        if error is not None:
            self._session.give_back(self.greeting.link_id, list(stream.chunks.values()))
            self._session.note_error(error)
            self._redial_at_s = self._clock.now_s() + _REDIAL_S

    def _tend_streams(self, now_s: float) -> None:
        """Maintain the larger of both sides' wanted number of data streams."""
        mine = self._session.flow.streams
        if not self.dialed:
            if mine != self._sent_wish:
                self._sent_wish = mine
                self._control.put(Frame(FrameKind.STREAMS, {"want": mine}), TRANSPORT)
            return
        if not self._has_met:
            return  # it may not have adopted this connection, and would refuse its streams
        want = min(self._config.max_streams, max(mine, self._wish))
        if self._spent in self._live():
            if len(self._live()) > want and self._spent is not None:  # its successor is there
                self._send_bye(self._spent)
            else:
                want += 1
        for stream in sorted(self._live(), key=attrgetter("number"))[want:]:
            self._send_bye(stream)
        with self._lock:
            missing = want - len(self._live()) - self._dialing - len(self._attached)
            missing = max(0, min(missing, _DIALS_AT_ONCE - self._dialing))
            if now_s < self._redial_at_s:
                missing = 0
            self._dialing += missing
        for _ in range(missing):
            self._last_number += 1
            self._dial_stream(self, self._last_number)

    def _send_bye(self, stream: Stream) -> None:
        stream.is_draining = True
        stream.keep_copies()  # others may send the same
        if not stream.sent_bye:
            stream.sent_bye = True
            stream.put(Frame(FrameKind.BYE, {}), TRANSPORT)

    def _flush(self, stream: Stream) -> None:
        took_all = stream.is_idle or stream.write()
        if stream.has_moved:
            stream.has_moved, stream.progress_s = False, self._clock.now_s()
        wanted = selectors.EVENT_READ | (0 if took_all else selectors.EVENT_WRITE)
        if self._selector.get_key(stream.sock).events != wanted:
            self._selector.modify(stream.sock, wanted, stream)
        if stream.sent_bye and stream.received_bye and stream.is_idle:
            # All that it carried has arrived: its acknowledgements come over the control stream.
            self._lose(stream, None)

    # ------------------------------------------------------------------ in

    def _read(self, stream: Stream) -> None:
        for frame, wire_bytes in stream.read(self._on_bytes):
            if frame.kind is FrameKind.CHUNK:
                self._chunk_receiver.take(stream, frame, wire_bytes)
            elif stream is self._control:
                self._take_control(frame)
            elif frame.kind is FrameKind.BYE:
                stream.received_bye = True
                self._send_bye(stream)
            else:
                raise FrameError(f"a {frame.kind.name} frame on a data stream")

    def _on_bytes(self, _: int) -> None:
        self._received_s = self._clock.now_s()

    def _take_control(self, frame: Frame) -> None:
        self._has_met = True
        now_s = self._clock.now_s()
        if frame.kind is FrameKind.ACK:
            self._chunk_sender.take_acks(frame.meta, [self._control, *self._data], now_s)
        elif frame.kind is FrameKind.PING:
            self.heartbeat.ping(frame.meta)
        elif frame.kind is FrameKind.PONG:
            self._session.flow.on_rtt(now_s, self.heartbeat.pong(frame.meta, now_s))
        elif frame.kind is FrameKind.STREAMS:
            self._wish = count(frame.meta, "want")
        else:
            raise FrameError(f"a {frame.kind.name} frame within a connection")

    # ------------------------------------------------------------------ the end

    def discard(self) -> None:
        """Free the sockets of a connection that will not be run."""
        self.end("not wanted")
        self._close()

    def _close(self) -> None:
        with self._lock:
            streams = [self._control, *self._data, *self._attached]
            self._attached.clear()
        self._selector.close()
        for stream in streams:
            self._chunk_receiver.forget(stream)
            stream.close()
        self._is_awake = True
        self._waker.close()
        self._woken.close()


def _give_up(stream: Stream) -> None:
    """Give up a stream whose chunks do not arrive although the link is alive."""
    raise LinkDownError(f"stream {stream.number} makes no progress")
