"""Numbered messages to one peer, cut into chunks: pure bookkeeping, no threads.

Every lane has its own numbers and its own order. A chunk is handed to one stream, and stays with
the outbox until the peer has acknowledged it: a stream that dies gives its chunks back, and they go
out again over another. A message stays until the peer has delivered it. `connection.py` sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from geo_ray.base.errors import FrameError
from geo_ray.transport.wire.frames import Frame, FrameKind, view_of
from geo_ray.transport.wire.message import ALL_LANES, LANES, Message, to_meta

Key = tuple[int, int, int]
"""Lane, number of the message, offset in its payload."""

_LEAST_BYTES: Final = 2800  # two segments with their frame; shorter chunks cost more than they save


@dataclass(slots=True)
class OutboxEntry:
    """A message in the outbox.

    Attributes:
        number: counts up from 1 per lane, direction and pair of incarnations.
        message: the message.
        view: bytes of its payload.
        next_offset: where the part begins that was never sent.
        is_open: whether a part was never sent; an empty message is one empty chunk.
    """

    number: int
    message: Message
    view: memoryview
    next_offset: int = 0
    is_open: bool = True

    @property
    def size_bytes(self) -> int:
        """Size of the payload in bytes."""
        return self.view.nbytes


@dataclass(slots=True)
class Chunk:
    """A chunk of a message that was sent and is not acknowledged.

    Attributes:
        entry: the message.
        offset: where it begins.
        size_bytes: its length.
        times_sent: how often the chunk was given to a stream.
        copies: how often since it was last given back; the number in flight.
        sent_s: when it was last given to a stream.
    """

    entry: OutboxEntry
    offset: int
    size_bytes: int
    times_sent: int = 0
    copies: int = 0
    sent_s: float = 0.0

    @property
    def key(self) -> Key:
        """The key that the peer's acknowledgement names."""
        return self.entry.message.lane, self.entry.number, self.offset

    def frame(self) -> Frame:
        """Return the chunk as a frame; a message's first chunk describes the message."""
        lane, number, offset = self.key
        meta = to_meta(lane, number, offset, self.entry.size_bytes, self.entry.message)
        payload = self.entry.view[offset : offset + self.size_bytes]
        if self.times_sent > 1:
            # The other copy may arrive while this one waits for its stream; then the message's
            # buffer is the caller's again.
            return Frame(FrameKind.CHUNK, meta, bytes(payload))
        return Frame(FrameKind.CHUNK, meta, payload)


@dataclass(slots=True)
class _Lane:
    entries: deque[OutboxEntry] = field(default_factory=deque)  # entries not delivered yet
    unsent: deque[OutboxEntry] = field(default_factory=deque)  # still to hand out
    again: dict[Key, Chunk] = field(default_factory=dict)  # chunks given back by streams that died
    last_number: int = 0
    ahead_bytes: int = 0  # payloads of entries begun and not delivered


class Outbox:
    """The messages that one peer has not delivered yet.

    Args:
        max_messages: bound on the number of messages.
        max_bytes: bound on their payloads; a single larger one fits into an empty outbox.
        max_ahead_bytes: bound, per lane, on payloads that were begun and are not delivered; it
            bounds what the peer must hold. One message always passes.
    """

    def __init__(self, max_messages: int, max_bytes: int, max_ahead_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._max_ahead_bytes = max_ahead_bytes
        self._lanes = [_Lane() for _ in range(LANES)]
        self._in_flight: dict[Key, Chunk] = {}
        self.size_bytes = 0
        self._in_flight_bytes = [0] * LANES

    def in_flight_bytes(self, lanes: range = ALL_LANES) -> int:
        """Return the sent and unacknowledged bytes, each copy of a chunk counted."""
        return sum(self._in_flight_bytes[lanes.start : lanes.stop])

    def __len__(self) -> int:
        return sum(len(lane.entries) for lane in self._lanes)

    def has_capacity(self, size_bytes: int) -> bool:
        """Return whether a message with that payload fits."""
        fits = self.size_bytes + size_bytes <= self._max_bytes
        count = len(self)
        return not count or (count < self._max_messages and fits)

    def add(self, message: Message) -> int:
        """Append a message to its lane; returns its number there."""
        lane = self._lanes[message.lane]
        lane.last_number += 1
        entry = OutboxEntry(lane.last_number, message, view_of(message.payload))
        lane.entries.append(entry)
        lane.unsent.append(entry)
        self.size_bytes += entry.size_bytes
        return entry.number

    # ------------------------------------------------------------------ out

    def has_chunk(self, lanes: range) -> bool:
        """Whether `next_chunk` would return one."""
        return any(lane.again or self._may_begin(lane) for lane in self._lanes_of(lanes))

    def next_chunk(
        self, lanes: range, chunk_bytes: int, now_s: float, shares: int = 1
    ) -> Chunk | None:
        """Return the most urgent chunk, which then counts as sent; returned chunks come first.

        Args:
            lanes: the lanes to consider, the most urgent first.
            chunk_bytes: longest new chunk.
            now_s: remembered in the chunk.
            shares: the smallest number of chunks of a message, for as many streams.
        """
        for lane in self._lanes_of(lanes):
            chunk = self._again(lane) or self._fresh(lane, chunk_bytes, shares)
            if chunk is not None:
                self._hand_out(chunk, now_s)
                return chunk
        return None

    def straggler(
        self, sent_before_s: float, times: int, now_s: float, but: Container[Key]
    ) -> Chunk | None:
        """Return a chunk that was sent long ago, and count it as sent again.

        Args:
            sent_before_s: only chunks that were last sent before then.
            times: only chunks that were sent fewer times.
            now_s: remembered in the chunk.
            but: chunks to leave out.
        """
        for key, chunk in self._in_flight.items():
            is_late = chunk.sent_s < sent_before_s and chunk.times_sent < times
            if is_late and key not in but:
                self._hand_out(chunk, now_s)
                return chunk
        return None

    def _lanes_of(self, lanes: range) -> list[_Lane]:
        return [self._lanes[lane] for lane in lanes]

    def _may_begin(self, lane: _Lane) -> bool:
        if not lane.unsent:
            return False
        entry = lane.unsent[0]
        is_begun = entry.next_offset > 0
        fits = lane.ahead_bytes + entry.size_bytes <= self._max_ahead_bytes
        return is_begun or fits or lane.entries[0] is entry

    def _again(self, lane: _Lane) -> Chunk | None:
        return lane.again.pop(next(iter(lane.again))) if lane.again else None

    def _fresh(self, lane: _Lane, chunk_bytes: int, shares: int) -> Chunk | None:
        if not self._may_begin(lane):
            return None
        entry = lane.unsent[0]
        if not entry.next_offset:
            lane.ahead_bytes += entry.size_bytes
        offset = entry.next_offset
        part_bytes = max(_LEAST_BYTES, -(-entry.size_bytes // shares))
        size_bytes = min(chunk_bytes, part_bytes, entry.size_bytes - offset)
        entry.next_offset += size_bytes
        if entry.next_offset == entry.size_bytes:
            entry.is_open = False
            lane.unsent.popleft()
        return Chunk(entry, offset, size_bytes)

    def _hand_out(self, chunk: Chunk, now_s: float) -> None:
        chunk.times_sent += 1
        chunk.copies += 1
        chunk.sent_s = now_s
        self._in_flight[chunk.key] = chunk
        self._in_flight_bytes[chunk.entry.message.lane] += chunk.size_bytes

    def _land(self, key: Key) -> Chunk | None:
        """Remove a chunk, with all copies, from the chunks in flight."""
        chunk = self._in_flight.pop(key, None)
        if chunk is not None:
            self._in_flight_bytes[key[0]] -= chunk.copies * chunk.size_bytes
            chunk.copies = 0
        return chunk

    # ------------------------------------------------------------------ back

    def acknowledge(self, key: Key) -> Chunk | None:
        """Note that the peer has a chunk; return the chunk unless that was known."""
        chunk = self._land(key)
        if chunk is None and key[0] < LANES:  # its stream died after the chunk had arrived
            chunk = self._lanes[key[0]].again.pop(key, None)
        return chunk

    def give_back(self, chunks: list[Chunk]) -> None:
        """Resend the unacknowledged chunks of a dead stream."""
        for chunk in sorted(chunks, key=attrgetter("key")):
            if self._land(chunk.key) is not None:
                self._lanes[chunk.entry.message.lane].again[chunk.key] = chunk

    def delivered(self, lane_number: int, number: int) -> None:
        """Note that the peer has delivered every message of a lane up to ``number``.

        Raises:
            FrameError: fewer messages were sent.
        """
        lane = self._lanes[lane_number]
        unsent = len(lane.unsent)
        if number > lane.last_number - unsent:
            raise FrameError(
                f"the peer acknowledges message {number} of lane {lane_number}, but only "
                f"{lane.last_number - unsent} were sent"
            )
        while lane.entries and lane.entries[0].number <= number:
            entry = lane.entries.popleft()
            self.size_bytes -= entry.size_bytes
            lane.ahead_bytes -= entry.size_bytes
        done = [key for key in self._in_flight if key[0] == lane_number and key[1] <= number]
        for key in done:  # their acks got lost, or come later
            self.acknowledge(key)
        if lane.again:
            lane.again = {key: chunk for key, chunk in lane.again.items() if key[1] > number}

    def rewind(self, delivered: list[int]) -> None:
        """Make unacknowledged chunks due again, for a new connection.

        Args:
            delivered: by lane, the number up to which the peer has delivered.

        Raises:
            FrameError: fewer messages were sent, or the number of lanes differs.
        """
        if len(delivered) != LANES:
            raise FrameError(f"the peer has {len(delivered)} lanes instead of {LANES}")
        for lane, number in enumerate(delivered):
            self.delivered(lane, number)
        self.give_back(list(self._in_flight.values()))

    def restart(self) -> int:
        """Drop the messages to a peer's earlier attempt; return how many there were."""
        dropped = len(self)
        self._lanes = [_Lane() for _ in range(LANES)]
        self._in_flight.clear()
        self.size_bytes, self._in_flight_bytes = 0, [0] * LANES
        return dropped
