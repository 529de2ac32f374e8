"""Puts chunks together to messages, whatever stream and order they come in: pure bookkeeping.

A message is held from its first chunk until its handler is called, and may be no more than an
honest sender has under way: a sender that ignores the rules is refused before it costs memory.

A payload is received straight into its place in the message's buffer. A second copy of a chunk,
sent because the first was late, goes to a buffer of its own and counts if it is complete first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from geo_ray.errors import FrameError
from geo_ray.transport.endpoint.held_bytes import HeldBytes
from geo_ray.transport.wire.message import LANES, Message, Piece
from geo_ray.util.reused_memory import ReusedMemory

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
