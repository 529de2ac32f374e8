"""The state shared by two endpoints across connections: ordering, acknowledgements, duplicates.

This is bookkeeping only: `endpoint.py` is the overview, `connection.py` moves the bytes.
`Assembly` puts chunks together to messages and `Inbox` delivers them in order, once each. Chunks
may arrive over any stream and in any order. A payload is received directly into its place in the
message's buffer; a duplicate chunk goes to a separate buffer and counts if it completes first.
`HeldBytes` bounds the memory of undelivered messages of all peers, and a peer that sends more than
an honest one may have in flight is refused before it costs memory. `Incarnation` detects that a
peer has restarted; `TrafficCounters` counts the traffic with it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Container
from dataclasses import asdict, dataclass, field, replace
from typing import Final

import numpy as np

from geo_ray.base.errors import (
    DeadlineExceededError,
    FrameError,
    LinkDownError,
    PeerRefusedError,
    TransportError,
)
from geo_ray.base.memory import ReusedMemory
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.connection import Connection
from geo_ray.transport.flow import FlowControl
from geo_ray.transport.outbox import Chunk, Key, Outbox
from geo_ray.transport.security.tls import revoked
from geo_ray.transport.wire.fields import Meta, count, counts, text
from geo_ray.transport.wire.frames import check_sendable, view_of
from geo_ray.transport.wire.message import (
    LANES,
    EndpointIdentity,
    Message,
    PeerStats,
    Piece,
    check_message,
    to_meta,
)

_SHARE_OF_MEMORY: Final = 0.75


class HeldBytes:
    """Counts the payloads that an endpoint holds; any thread may call.

    Args:
        most_bytes: bound on them; None takes three quarters of this machine's memory.
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most_bytes = _machine_bytes() if most_bytes is None else most_bytes
        self._lock = threading.Lock()
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Return the bytes held now."""
        return self._held_bytes

    def take(self, size_bytes: int) -> None:
        """Count a message that begins to arrive; one always passes.

        Raises:
            TransportError: there is no space for it now.
        """
        with self._lock:
            held_bytes = self._held_bytes + size_bytes
            if self._held_bytes and held_bytes > self._most_bytes:
                raise TransportError(
                    f"messages of {held_bytes} bytes would wait for their handlers; limit "
                    f"{self._most_bytes} (max_held_bytes)",
                    fix="Raise `transport.max_held_bytes`, or let fewer regions send at a time.",
                )
            self._held_bytes = held_bytes

    def give_back(self, size_bytes: int) -> None:
        """Count a message that was delivered or dropped."""
        with self._lock:
            self._held_bytes -= size_bytes


def _machine_bytes() -> int:
    return int(_SHARE_OF_MEMORY * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


Divert = Callable[[], None]
"""Tells a stream to write the rest of the chunk it receives to another buffer."""


@dataclass(slots=True)
class _Partial:
    buffer: memoryview
    message: Message | None = None
    done: dict[int, int] = field(default_factory=dict)  # length by offset
    done_bytes: int = 0
    writers: dict[int, Divert] = field(default_factory=dict)  # by offset


@dataclass(slots=True)
class _Lane:
    complete: int = 0  # number up to which all messages are complete
    delivered: int = 0  # number up to which handlers were called
    held_bytes: int = 0  # payloads of messages that were begun and not delivered
    partial: dict[int, _Partial] = field(default_factory=dict)
    waiting: dict[int, Message] = field(default_factory=dict)  # complete, after a gap


class Assembly:
    """The incomplete messages of a peer.

    Args:
        max_ahead: how many messages of a lane may be begun beyond the last one delivered.
        max_ahead_bytes: their payloads, per lane; a single larger message passes.
        max_payload_bytes: largest payload of one message.
        held: memory held for all peers.
        reuse: whether the memory of a large message is kept for the next one.

    Attributes:
        duplicates: count of chunks that had arrived before.
    """

    def __init__(
        self,
        max_ahead: int,
        max_ahead_bytes: int,
        max_payload_bytes: int,
        held: HeldBytes,
        *,
        reuse: bool = True,
    ) -> None:
        self._max_ahead = max_ahead
        self._max_ahead_bytes = max_ahead_bytes
        self._held = held
        self._max_payload_bytes = max_payload_bytes
        self._lanes = [_Lane() for _ in range(LANES)]
        self._reused = ReusedMemory() if reuse else None
        self.duplicates = 0

    def place(self, piece: Piece, size_bytes: int, divert: Divert) -> memoryview:
        """Return the buffer for a chunk's payload of ``size_bytes`` bytes.

        Args:
            piece: the chunk's header.
            size_bytes: the chunk's length.
            divert: called if another copy of the chunk is complete first; from then on the buffer
                must not be written.

        Raises:
            FrameError: the chunk does not fit its message, or the sender is too far ahead.
        """
        partial = self._partial(piece, size_bytes)
        if partial is None or piece.offset in partial.done or piece.offset in partial.writers:
            return np.empty(size_bytes, np.uint8).data
        if size_bytes:
            partial.writers[piece.offset] = divert
        return partial.buffer[piece.offset : piece.offset + size_bytes]

    def abandon(self, piece: Piece, divert: Divert) -> None:
        """Free a chunk's buffer, because its stream died before the chunk was complete."""
        partial = self._lanes[piece.lane].partial.get(piece.number)
        if partial is not None and partial.writers.get(piece.offset) is divert:
            del partial.writers[piece.offset]

    def complete(self, piece: Piece, payload: memoryview) -> tuple[bool, list[Message]]:
        """Add a complete chunk.

        Args:
            piece: the chunk's header.
            payload: the buffer that `place` gave, filled.

        Returns:
            Whether the chunk was new, and the messages of its lane that are complete now, in order.

        Raises:
            FrameError: the chunk does not fit its message.
        """
        partial = self._partial(piece, payload.nbytes)
        if partial is None or piece.offset in partial.done:
            self.duplicates += 1
            return False, []
        target = partial.buffer[piece.offset : piece.offset + payload.nbytes]
        writer = partial.writers.pop(piece.offset, None)
        if payload.nbytes and not np.shares_memory(np.asarray(payload), np.asarray(target)):
            if writer is not None:
                writer()
            target[:] = payload
        partial.done[piece.offset] = payload.nbytes
        partial.done_bytes += payload.nbytes
        if piece.message is not None:
            partial.message = piece.message
        if partial.done_bytes < piece.size_bytes or partial.message is None:
            return True, []
        return True, self._finish(piece, partial)

    def delivered(self, lane_number: int, size_bytes: int) -> None:
        """Note that the handler of a lane's next message is called: it is held no longer here."""
        lane = self._lanes[lane_number]
        lane.delivered += 1
        lane.held_bytes -= size_bytes
        self._held.give_back(size_bytes)

    def restart(self) -> None:
        """Forget everything, because the peer restarted."""
        self._held.give_back(sum(lane.held_bytes for lane in self._lanes))
        self._lanes = [_Lane() for _ in range(LANES)]

    def _partial(self, piece: Piece, size_bytes: int) -> _Partial | None:
        """Return the message that a chunk belongs to; None if it is complete already."""
        if piece.offset + size_bytes > piece.size_bytes or (piece.size_bytes and not size_bytes):
            raise FrameError(
                f"a chunk of {size_bytes} bytes at {piece.offset} of a payload of "
                f"{piece.size_bytes}"
            )
        if piece.size_bytes > self._max_payload_bytes:
            raise FrameError(
                f"a payload has {piece.size_bytes} bytes; limit {self._max_payload_bytes}"
            )
        lane = self._lanes[piece.lane]
        if piece.number <= lane.complete or piece.number in lane.waiting:
            return None
        if piece.number > lane.delivered + self._max_ahead:
            raise FrameError(
                f"message {piece.number} of lane {piece.lane} follows {lane.delivered}; at most "
                f"{self._max_ahead} may be under way"
            )
        partial = lane.partial.get(piece.number)
        if partial is None:
            partial = lane.partial[piece.number] = self._begin(piece, lane)
        if partial.buffer.nbytes != piece.size_bytes:
            raise FrameError(f"two chunks disagree on the length of message {piece.number}")
        return partial

    def _begin(self, piece: Piece, lane: _Lane) -> _Partial:
        held_bytes = lane.held_bytes + piece.size_bytes
        if lane.held_bytes and held_bytes > self._max_ahead_bytes:
            raise FrameError(
                f"the peer has {held_bytes} bytes under way in lane {piece.lane}; limit "
                f"{self._max_ahead_bytes} (max_ahead_bytes, the same in every region)"
            )
        self._held.take(piece.size_bytes)
        lane.held_bytes = held_bytes
        # Not zeroed: memory is only taken as it is filled, or has been by an earlier message.
        reused = self._reused or ReusedMemory()
        return _Partial(reused.buffer(piece.size_bytes))

    def _finish(self, piece: Piece, partial: _Partial) -> list[Message]:
        end = 0
        for offset in sorted(partial.done):  # a sender could have let chunks overlap
            if offset != end:
                raise FrameError(f"message {piece.number} has overlapping chunks")
            end += partial.done[offset]
        lane = self._lanes[piece.lane]
        del lane.partial[piece.number]
        if partial.message is None:
            raise FrameError(f"message {piece.number} came without its first chunk")
        lane.waiting[piece.number] = replace(partial.message, payload=partial.buffer)
        ready = []
        while (message := lane.waiting.pop(lane.complete + 1, None)) is not None:
            lane.complete += 1
            ready.append(message)
        return ready


@dataclass(frozen=True, slots=True)
class Callbacks:
    """The callbacks of an endpoint's user; calls for one peer never overlap.

    Attributes:
        on_message: takes (peer's region, message), in order, each message once.
        on_peer: takes (peer's region, its attempt, whether it is connected now).
    """

    on_message: Callable[[str, Message], None]
    on_peer: Callable[[str, int, bool], None]


@dataclass(frozen=True, slots=True)
class _News:
    attempt: int
    message: Message | None = None
    is_up: bool = False


class Inbox:
    """Delivers a peer's messages over any number of its connections and incarnations.

    Args:
        peer: the peer's region.
        callbacks: the user's callbacks; an exception from one is logged and ends nothing.
        on_next: called with (attempt, message) of the message that comes next, before it counts as
            received: the peer may have sent another in its place when it does.
        on_taken: called with a message that counts as received, before the user's handler.
    """

    def __init__(
        self,
        peer: str,
        callbacks: Callbacks,
        on_next: Callable[[int, Message], None],
        on_taken: Callable[[Message], None],
    ) -> None:
        self._peer = peer
        self._callbacks = callbacks
        self._on_next = on_next
        self._on_taken = on_taken
        self._changed = threading.Condition()  # guards the rest; not held in a callback
        self._news: deque[_News] = deque()
        self._attempt = -1
        self._delivered = [0] * LANES
        self._closed = False

    @property
    def delivered(self) -> list[int]:
        """Return, by lane, the number of the last delivered message of the present incarnation."""
        with self._changed:
            return list(self._delivered)

    def restart(self, attempt: int) -> None:
        """Count from 1 for a new incarnation of the peer, and drop its predecessor's messages."""
        with self._changed:
            self._attempt, self._delivered = attempt, [0] * LANES

    def add(self, attempt: int, messages: list[Message]) -> None:
        """Queue complete messages, in the order of their lane."""
        self._append([_News(attempt, message) for message in messages])

    def report_peer(self, attempt: int, *, is_up: bool) -> None:
        """Queue the notification that the peer is connected or disconnected."""
        self._append([_News(attempt, is_up=is_up)])

    def close(self) -> None:
        """End `run` once it has delivered all queued messages."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def run(self) -> None:
        """Deliver messages until closed; only one thread may run it."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._news)
                if not self._news:
                    return
                news = self._news.popleft()
            if news.message is not None and not self._count(news.attempt, news.message):
                del news
                continue
            try:
                if news.message is not None:
                    self._on_taken(news.message)
                    self._callbacks.on_message(self._peer, news.message)
                else:
                    self._callbacks.on_peer(self._peer, news.attempt, news.is_up)
            except Exception:
                what = "a change" if news.message is None else f"message {news.message.kind!r}"
                _LOGGER.exception("the handler failed for %s of region %s", what, self._peer)
            del news  # not held while the next one is awaited: a payload may be a whole model

    def _count(self, attempt: int, message: Message) -> bool:
        """Count a message as received; return False for an obsolete one."""
        self._on_next(attempt, message)
        with self._changed:
            is_wanted = attempt == self._attempt and not self._closed
            if is_wanted:
                self._delivered[message.lane] += 1
            return is_wanted

    def _append(self, news: list[_News]) -> None:
        with self._changed:
            self._news.extend(news)
            self._changed.notify_all()


class TrafficCounters:
    """Counters over all connections of a session; the session's lock guards them.

    Attributes:
        messages_out: messages sent, resends not counted.
        messages_in: messages delivered.
        dropped_out: messages whose addressee was replaced before it had them.
        connects: connections so far.
        last_error: why the last connection ended or could not be made.
    """

    def __init__(self) -> None:
        self.messages_out = 0
        self.messages_in = 0
        self.dropped_out = 0
        self.connects = 0
        self.last_error: str | None = None
        self._live: list[Connection] = []
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()

    def open(self, connection: Connection) -> None:
        """Include a new connection's bytes from now on."""
        self.connects += 1
        self._live.append(connection)

    def close(self, connection: Connection) -> None:
        """Add the final counts of a connection whose loop has ended."""
        self._live.remove(connection)
        sent, received = connection.counts()
        for each in sent:
            self._sent.update(each)
        for each in received:
            self._received.update(each)

    def bytes_sent(self) -> dict[str, int]:
        """Bytes sent by class."""
        return self._sum(self._sent, 0)

    def bytes_received(self) -> dict[str, int]:
        """Bytes received by class."""
        return self._sum(self._received, 1)

    def _sum(self, done: Counter[str], direction: int) -> dict[str, int]:
        total = Counter(done)
        for connection in self._live:
            for each in connection.counts()[direction]:
                total.update(each)
        return dict(sorted(total.items()))


class Incarnation:
    """The newest start of a peer that has connected.

    Args:
        peer: the peer's region.

    Attributes:
        attempt: the attempt of that start; -1 before the first.
        least: starts of lower attempts are refused.
    """

    def __init__(self, peer: str) -> None:
        self.attempt = -1
        self.least = 0
        self._peer = peer
        self._instance = ""

    def is_same(self, hello: Meta) -> bool:
        """Return whether a hello comes from the known start; False for a newer one.

        Raises:
            PeerRefusedError: the hello comes from an older start, or from a second endpoint of the
                same attempt.
            FrameError: the hello is malformed.
        """
        attempt, instance = count(hello, "attempt"), text(hello, "instance")
        if attempt < self.least:
            raise PeerRefusedError(
                f"region {self._peer} comes with attempt {attempt}; attempt {self.least} is known"
            )
        if attempt < self.attempt:
            raise PeerRefusedError(
                f"region {self._peer} comes with attempt {attempt}, but its attempt {self.attempt} "
                "was here already"
            )
        if attempt == self.attempt and instance != self._instance:
            raise PeerRefusedError(
                f"two endpoints claim to be region {self._peer} in attempt {attempt}: "
                f"{instance!r:.100} and {self._instance!r}",
                fix="Give a restarted endpoint a higher attempt.",
            )
        return attempt == self.attempt

    def replace(self, hello: Meta) -> bool:
        """Make the hello's sender the present start; return whether there was another before."""
        had_one = self.attempt >= 0
        self.attempt, self._instance = count(hello, "attempt"), text(hello, "instance")
        return had_one


_LARGEST: Final = 2**63
_LOGGER = logging.getLogger(__name__)


class Session:
    """The state shared with one peer region.

    A connection is adopted after its handshake and `run` in the thread that made it; the newest
    one counts. When the endpoints reconnect, each tells the other how far it got, and the rest is
    sent again.

    Args:
        identity: this endpoint.
        peer: the other region.
        config: limits and deadlines.
        callbacks: the user's.
        on_change: called when the session was connected or disconnected.
        is_shaped: whether the link to the peer is emulated.
        held: memory that the messages of all peers hold here.

    Attributes:
        peer: as given.
        flow: the link's flow control.
        inbox: messages that have come.
        is_revoked: whether the certificate that the peer showed last is revoked.
        is_forgotten: whether the peer has departed and is not waited for unless it returns.
    """

    def __init__(
        self,
        identity: EndpointIdentity,
        peer: str,
        config: TransportConfig,
        callbacks: Callbacks,
        on_change: Callable[[], None],
        *,
        is_shaped: bool,
        held: HeldBytes,
        reuse: bool = True,
    ) -> None:
        self.peer = peer
        self.flow = FlowControl(
            config, is_shaped=is_shaped, unix_offset_s=time.time() - time.monotonic()
        )
        self.inbox = Inbox(peer, callbacks, self._release, self._taken)
        self._region = identity.region
        self._config = config
        self._limits = config.limits()
        self._on_change = on_change
        # Guards everything below; never held while a callback or a socket is busy.
        self._changed = threading.Condition()
        self._outbox = Outbox(
            config.max_outbox_messages, config.max_outbox_bytes, config.max_ahead_bytes
        )
        self._assembly = Assembly(
            config.max_outbox_messages,
            config.max_ahead_bytes,
            config.max_payload_bytes,
            held,
            reuse=reuse,
        )
        self._connection: Connection | None = None
        self._peer_serials: set[int] = set()  # of the present connection, or the last one
        self.is_revoked = self.is_forgotten = False
        self._closed = False
        self._incarnation = Incarnation(peer)
        self._peer_delivered: list[int] = []
        self._counters = TrafficCounters()

    # ------------------------------------------------------------------ the user's side

    def send(self, message: Message, deadline_s: float) -> None:
        """Queue a message; see `Endpoint.send`."""
        # An unsendable message must fail here: in the outbox it would end every connection.
        check_message(message)
        size_bytes = view_of(message.payload).nbytes
        longest = to_meta(message.lane, _LARGEST, 0, _LARGEST, message)
        check_sendable(longest, size_bytes, self._limits)
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._outbox.has_capacity(size_bytes), deadline_s
            )
            if self._closed:
                raise LinkDownError(f"the link to region {self.peer} is closed")
            if not self._outbox.has_capacity(size_bytes):
                raise DeadlineExceededError(
                    f"no room for a {message.kind!r} message to region {self.peer} within "
                    f"{deadline_s} s (send_deadline_s): {len(self._outbox)} messages with "
                    f"{self._outbox.size_bytes} bytes are not acknowledged"
                )
            self._outbox.add(message)
            connection = self._connection
        if connection is not None:
            connection.wake()

    def flush(self, timeout_s: float) -> bool:
        """Wait until both sides have acknowledged all that they received."""
        with self._changed:
            return self._changed.wait_for(self._is_flushed, timeout_s)

    def _is_flushed(self) -> bool:
        connection = self._connection
        return self._closed or not (self._outbox or (connection is not None and connection.owes))

    def require(self, attempt: int) -> None:
        """Refuse connections of earlier starts of the peer from now on."""
        with self._changed:
            self._incarnation.least = max(self._incarnation.least, attempt)

    def forget(self) -> None:
        """Forget the peer; unacknowledged messages wait in case it returns."""
        self.is_forgotten = True

    def stats(self) -> PeerStats:
        """See `PeerStats`."""
        with self._changed:
            counters, connection = self._counters, self._connection
            heartbeat = None if connection is None else connection.heartbeat
            return PeerStats(
                connected=connection is not None,
                attempt=None if self._incarnation.attempt < 0 else self._incarnation.attempt,
                bytes_sent=counters.bytes_sent(),
                bytes_received=counters.bytes_received(),
                messages_out=counters.messages_out,
                messages_in=counters.messages_in,
                duplicates_in=self._assembly.duplicates,
                dropped_out=counters.dropped_out,
                reconnects=max(0, counters.connects - 1),
                rtt_s=None if heartbeat is None else heartbeat.rtt_s,
                rtt_min_s=None if heartbeat is None else heartbeat.rtt_min_s,
                streams=0 if connection is None else connection.streams,
                encrypted=connection is not None and connection.is_encrypted,
                window_bytes=int(self.flow.window.size_bytes),
                estimate=asdict(self.flow.estimate),
                outbox_messages=len(self._outbox),
                outbox_bytes=self._outbox.size_bytes,
                since_received_s=None if connection is None else connection.since_received_s(),
                last_error=counters.last_error,
            )

    def note_error(self, error: Exception) -> None:
        """Record why a connection or stream could not be made, or ended; `stats` shows it."""
        with self._changed:
            self._counters.last_error = str(error)

    # ------------------------------------------------------------------ connections

    @property
    def is_connected(self) -> bool:
        """Whether a connection is open."""
        return self._connection is not None

    def wait_disconnected(self) -> bool:
        """Wait until no connection is open; return False if the session was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._connection is None)
            return not self._closed

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait for `finish` or an adopted connection; return whether the session is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._connection is not None, timeout_s)
            return self._closed

    def admit(self, hello: Meta) -> Meta:
        """Check a peer's hello that is not authenticated yet; changes nothing.

        Returns:
            This side's READY: how many of that incarnation's messages were delivered.

        Raises:
            PeerRefusedError: another incarnation of the peer has taken over, or the hello is of a
                data stream to a connection that is no more.
        """
        with self._changed:
            is_same = self._incarnation.is_same(hello)
            if count(hello, "stream"):
                self._connection_of(hello)
                return {}
            return {"delivered": [*self.inbox.delivered]} if is_same else self.nothing_delivered()

    @staticmethod
    def nothing_delivered() -> Meta:
        """Return the READY for a peer that has not connected before."""
        return {"delivered": [0] * LANES}

    def connection_of(self, hello: Meta) -> Connection:
        """Return the connection that a data stream's hello names.

        Raises:
            PeerRefusedError: that connection has ended.
        """
        with self._changed:
            return self._connection_of(hello)

    def _connection_of(self, hello: Meta) -> Connection:
        connection = self._connection
        if connection is None or connection.greeting.link_id != hello.get("link"):
            raise PeerRefusedError(f"a data stream of region {self.peer} came too late")
        return connection

    def adopt(self, connection: Connection) -> None:
        """Make an authenticated connection the session's; an older one ends.

        Raises:
            PeerRefusedError: the peer may not, or both sides dialed and the other dial won.
            FrameError: the peer's READY is invalid.
            LinkDownError: the session is closed.
        """
        hello = connection.greeting.hello
        delivered = counts(connection.greeting.ready, "delivered")
        with self._changed:
            if self._closed:
                raise LinkDownError(f"the link to region {self.peer} is closed")
            old = self._connection
            if old is not None and self._rank(old) > self._rank(connection):
                raise PeerRefusedError(f"region {self.peer} is connected already")
            if not self._incarnation.is_same(hello):
                self._restart(hello)
            self._outbox.rewind(delivered)
            if old is not None:
                # Reported here: the old connection's thread may be later than the new one's.
                self.inbox.report_peer(count(old.greeting.hello, "attempt"), is_up=False)
                old.end("replaced by a newer connection")
            self._connection, self.is_forgotten = connection, False
            self._peer_serials, self.is_revoked = connection.peer_serials, False
            self.inbox.report_peer(self._incarnation.attempt, is_up=True)
            self._peer_delivered = []
            self._counters.open(connection)
            self._changed.notify_all()
        self._on_change()

    def _rank(self, connection: Connection) -> bool:
        """Rank two dials in opposite directions: the one of the region that sorts first stays."""
        return connection.dialed == (self._region < self.peer)

    def _restart(self, hello: Meta) -> None:
        had_predecessor = self._incarnation.replace(hello)
        self.inbox.restart(self._incarnation.attempt)
        self._assembly.restart()
        if not had_predecessor:
            return
        dropped = self._outbox.restart()
        self._counters.dropped_out += dropped
        _LOGGER.warning(
            "%s is another process now (attempt %d); dropped %d message(s) to the one before",
            self.peer, self._incarnation.attempt, dropped,
        )  # fmt: skip

    def run(self, connection: Connection) -> None:
        """Serve an adopted connection until it ends, however it ends, then free its sockets."""
        try:
            connection.run()
        finally:
            self._ended(connection)

    def cut_connection(self) -> Connection | None:
        """Return the connection if its path seems to be cut; see `Connection.is_cut`."""
        with self._changed:
            connection = self._connection
        return connection if connection is not None and connection.is_cut else None

    def give_up_revoked(self, is_revoked: Callable[[int], bool]) -> None:
        """End a connection to a peer whose certificate is revoked.

        Keys that were derived from it, such as those of datagrams, become invalid, also if the
        connection itself has ended before.
        """
        with self._changed:
            connection = self._connection
            if connection is not None:
                self._peer_serials = connection.peer_serials
            self.is_revoked = any(map(is_revoked, self._peer_serials))
        if connection is not None and self.is_revoked:
            connection.end(revoked(self.peer))

    def link_key(self, purpose: bytes, *, outgoing: bool, link_id: str | None) -> tuple[str, bytes]:
        """See `Endpoint.link_key`."""
        with self._changed:
            connection = self._connection
        if connection is None or link_id not in (None, connection.greeting.link_id):
            raise LinkDownError(f"the connection to region {self.peer} is another one now, or none")
        greeting = connection.greeting
        return greeting.link_id, greeting.derive_key(purpose, outgoing=outgoing)

    def give_up_stuck(self, limit_s: float) -> bool:
        """Give up a connection whose loop has not turned for that long; return whether it did."""
        with self._changed:
            connection = self._connection
            if connection is None or connection.stuck_s() <= limit_s:
                return False
            self._connection = None
            self.inbox.report_peer(self._incarnation.attempt, is_up=False)
            self._changed.notify_all()
        _LOGGER.error("the loop of the connection to region %s is stuck", self.peer)
        connection.end("its loop is stuck")
        self._on_change()
        return True

    def _ended(self, connection: Connection) -> None:
        with self._changed:
            if self._connection is connection:
                self._connection = None
                self.inbox.report_peer(self._incarnation.attempt, is_up=False)
            self._counters.last_error = str(connection.cause)
            self._counters.close(connection)
            is_last = self._closed and self._connection is None
            self._changed.notify_all()
        if is_last:
            self.inbox.close()
        self._on_change()

    def finish(self) -> None:
        """Accept and send no more messages; the connection ends when the peer has seen that."""
        with self._changed:
            self._closed = True
            if self._connection is not None:
                self._connection.finish()
            else:
                self.inbox.close()
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

    # ------------------------------------------------------------------ for the connection

    def next_chunk(
        self, link_id: str, lanes: range, chunk_bytes: int, now_s: float, shares: int = 1
    ) -> Chunk | None:
        """See `Outbox.next_chunk`; None for a connection that was replaced."""
        with self._changed:
            if not self._has(link_id):
                return None
            chunk = self._outbox.next_chunk(lanes, chunk_bytes, now_s, shares)
            if chunk is not None and not chunk.offset and chunk.times_sent == 1:
                self._counters.messages_out += 1
            return chunk

    def _has(self, link_id: str) -> bool:
        """Return whether the present connection has that link id."""
        return self._connection is not None and self._connection.greeting.link_id == link_id

    def has_chunk(self, lanes: range) -> bool:
        """See `Outbox.has_chunk`."""
        with self._changed:
            return self._outbox.has_chunk(lanes)

    def straggler(
        self,
        link_id: str,
        sent_before_s: float,
        times: int,
        now_s: float,
        but: Container[Key],
    ) -> Chunk | None:
        """See `Outbox.straggler`; None for a connection that was replaced."""
        with self._changed:
            if not self._has(link_id):
                return None
            return self._outbox.straggler(sent_before_s, times, now_s, but)

    def acknowledged(self, link_id: str, keys: list[Key], delivered: list[int]) -> list[Chunk]:
        """Process an ACK and return the newly acknowledged chunks.

        Raises:
            FrameError: the ACK is for more than was sent, or for other lanes.
        """
        if len(delivered) != LANES:
            raise FrameError(f"an acknowledgement of {len(delivered)} lanes instead of {LANES}")
        with self._changed:
            if not self._has(link_id):  # it may be for an earlier incarnation's messages
                return []
            acked = [self._outbox.acknowledge(key) for key in keys]
            if delivered != self._peer_delivered:
                for lane, number in enumerate(delivered):
                    self._outbox.delivered(lane, number)
                self._peer_delivered = delivered
            self._changed.notify_all()
        return [chunk for chunk in acked if chunk is not None]

    def give_back(self, link_id: str, chunks: list[Chunk]) -> None:
        """See `Outbox.give_back`; a connection that was replaced has given all back."""
        with self._changed:
            if self._has(link_id):
                self._outbox.give_back(chunks)

    def in_flight_bytes(self, lanes: range) -> int:
        """See `Outbox.in_flight_bytes`."""
        return self._outbox.in_flight_bytes(lanes)

    def place(
        self, attempt: int, piece: Piece, size_bytes: int, divert: Callable[[], None]
    ) -> memoryview:
        """See `Assembly.place`."""
        with self._changed:
            if attempt != self._incarnation.attempt:
                raise PeerRefusedError(f"region {self.peer} restarted")
            return self._assembly.place(piece, size_bytes, divert)

    def abandon(self, piece: Piece, divert: Callable[[], None]) -> None:
        """See `Assembly.abandon`."""
        with self._changed:
            self._assembly.abandon(piece, divert)

    def complete(self, attempt: int, piece: Piece, payload: memoryview) -> bool:
        """See `Assembly.complete`; whether the chunk was new."""
        with self._changed:
            if attempt != self._incarnation.attempt:
                return False
            is_new, messages = self._assembly.complete(piece, payload)
        if messages:
            self.inbox.add(attempt, messages)
        return is_new

    def delivered(self) -> list[int]:
        """Return, by lane, the number up to which messages were delivered here."""
        return self.inbox.delivered

    def settled(self) -> None:
        """Note that all acknowledgements were sent to the peer."""
        with self._changed:
            self._changed.notify_all()

    def _release(self, attempt: int, message: Message) -> None:
        with self._changed:
            if attempt == self._incarnation.attempt:
                self._assembly.delivered(message.lane, view_of(message.payload).nbytes)

    def _taken(self, _: Message) -> None:
        with self._changed:
            self._counters.messages_in += 1
            connection = self._connection
            self._changed.notify_all()
        if connection is not None:
            connection.wake()
