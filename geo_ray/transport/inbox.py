"""Receiving side of a session: assembles chunks to messages and delivers them in order, once each.

Chunks may arrive over any stream and in any order. A payload is received directly into its place
in the message's buffer; a duplicate chunk goes to a separate buffer and counts if it completes
first. `HeldBytes` bounds the memory of undelivered messages of all peers, and a peer that sends
more than an honest one may have in flight is refused before it costs memory.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from geo_ray.base.errors import FrameError, TransportError
from geo_ray.base.memory import ReusedMemory
from geo_ray.transport.wire.message import LANES, Message, Piece

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
        """How much is held now."""
        return self._held_bytes

    def take(self, size_bytes: int) -> None:
        """Count a message that begins to arrive; one always passes.

        Raises:
            TransportError: there is no room for it now.
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
    """The parts of a peer's messages that are not complete yet.

    Args:
        max_ahead: how many messages of a lane may be begun beyond the last one delivered.
        max_ahead_bytes: their payloads, per lane; a single larger message passes.
        max_payload_bytes: largest payload of one message.
        held: what all peers together hold.

    Attributes:
        duplicates: count of chunks that had arrived before.
    """

    def __init__(
        self, max_ahead: int, max_ahead_bytes: int, max_payload_bytes: int, held: HeldBytes
    ) -> None:
        self._max_ahead = max_ahead
        self._max_ahead_bytes = max_ahead_bytes
        self._held = held
        self._max_payload_bytes = max_payload_bytes
        self._lanes = [_Lane() for _ in range(LANES)]
        self._reused = ReusedMemory()
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
        """Free a chunk's place, because its stream died before the chunk was complete."""
        partial = self._lanes[piece.lane].partial.get(piece.number)
        if partial is not None and partial.writers.get(piece.offset) is divert:
            del partial.writers[piece.offset]

    def complete(self, piece: Piece, payload: memoryview) -> tuple[bool, list[Message]]:
        """Take in a complete chunk.

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
        home = partial.buffer[piece.offset : piece.offset + payload.nbytes]
        writer = partial.writers.pop(piece.offset, None)
        if payload.nbytes and not np.shares_memory(np.asarray(payload), np.asarray(home)):
            if writer is not None:
                writer()
            home[:] = payload
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
        return _Partial(self._reused.buffer(piece.size_bytes))

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


_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Callbacks:
    """The callbacks of an endpoint's user; calls for one peer never overlap.

    Attributes:
        on_message: takes (peer's region, message), in order, each message once.
        on_peer: takes (peer's region, its epoch, whether it is connected now).
    """

    on_message: Callable[[str, Message], None]
    on_peer: Callable[[str, int, bool], None]


@dataclass(frozen=True, slots=True)
class _News:
    epoch: int
    message: Message | None = None
    is_up: bool = False


class Inbox:
    """Delivers a peer's messages over any number of its connections and incarnations.

    Args:
        peer: the peer's region.
        callbacks: the user's callbacks; an exception from one is logged and ends nothing.
        on_next: called with (epoch, message) of the message that comes next, before it counts as
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
        self._epoch = -1
        self._delivered = [0] * LANES
        self._closed = False

    @property
    def delivered(self) -> list[int]:
        """Return, by lane, the number of the last delivered message of the present incarnation."""
        with self._changed:
            return list(self._delivered)

    def begin_anew(self, epoch: int) -> None:
        """Count from 1 for a new incarnation of the peer, and drop its predecessor's messages."""
        with self._changed:
            self._epoch, self._delivered = epoch, [0] * LANES

    def add(self, epoch: int, messages: list[Message]) -> None:
        """Queue complete messages, in the order of their lane."""
        self._append([_News(epoch, message) for message in messages])

    def tell_peer(self, epoch: int, *, is_up: bool) -> None:
        """Queue the news that the peer is connected or disconnected."""
        self._append([_News(epoch, is_up=is_up)])

    def close(self) -> None:
        """End `run` once it has delivered what is queued."""
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
            if news.message is not None and not self._count(news.epoch, news.message):
                del news
                continue
            try:
                if news.message is not None:
                    self._on_taken(news.message)
                    self._callbacks.on_message(self._peer, news.message)
                else:
                    self._callbacks.on_peer(self._peer, news.epoch, news.is_up)
            except Exception:
                what = "a change" if news.message is None else f"message {news.message.kind!r}"
                _LOGGER.exception("the handler failed for %s of region %s", what, self._peer)
            del news  # not held while the next one is awaited: a payload may be a whole model

    def _count(self, epoch: int, message: Message) -> bool:
        """Count a message as received; return False for one that is not wanted any more."""
        self._on_next(epoch, message)
        with self._changed:
            is_wanted = epoch == self._epoch and not self._closed
            if is_wanted:
                self._delivered[message.lane] += 1
            return is_wanted

    def _append(self, news: list[_News]) -> None:
        with self._changed:
            self._news.extend(news)
            self._changed.notify_all()
