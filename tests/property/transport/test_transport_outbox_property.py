"""The outbox's books balance after every event, whatever comes in whatever order."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from geo_ray.transport.outbox import Chunk, Outbox
from geo_ray.transport.wire.message import LANES, Message

SIZES = st.sampled_from([0, 1, 9, 10, 11, 35, 80])
LANE = st.integers(0, LANES - 1)
NUMBER = st.integers(0, 2**31)


class OutboxBooks(RuleBasedStateMachine):
    """A plain model beside the outbox: which bytes the peer has, and which streams hold what."""

    @initialize(ahead=st.sampled_from([10, 40, 1000]))
    def begin(self, ahead: int) -> None:
        self.ahead_bytes = ahead
        self.outbox = Outbox(8, 200, ahead)
        self.now_s = 0.0
        self._forget()

    def _forget(self) -> None:
        self.streams: list[list[Chunk]] = [[], [], []]
        self.sizes: list[list[int]] = [[] for _ in range(LANES)]
        self.delivered = [0] * LANES
        self.arrived: Counter[tuple[int, int]] = Counter()  # bytes by lane and number
        self.has: set[tuple[int, int, int]] = set()  # what the peer has
        self.told: set[tuple[int, int, int]] = set()  # what it has acknowledged

    @rule(lane=LANE, size=SIZES)
    def add(self, lane: int, size: int) -> None:
        held = sum(len(sizes) for sizes in self.sizes) - sum(self.delivered)
        fits = held == 0 or (held < 8 and self._size_bytes() + size <= 200)
        assert self.outbox.has_capacity(size) == fits
        if fits:
            self.sizes[lane].append(size)
            message = Message("test", {}, bytes(size), "update", lane)
            assert self.outbox.add(message) == len(self.sizes[lane])

    @rule(stream=st.integers(0, 2), lanes=st.sampled_from([(0, 1), (0, 3), (1, 3)]))
    def next_chunk(self, stream: int, lanes: tuple[int, int]) -> None:
        self.now_s += 1.0
        could = self.outbox.has_chunk(range(*lanes))
        chunk = self.outbox.next_chunk(range(*lanes), 10, self.now_s)
        assert (chunk is not None) == could
        if chunk is not None:
            assert lanes[0] <= chunk.key[0] < lanes[1]
            assert chunk.key not in self.told  # only what is not acknowledged
            assert chunk.entry.number > self.delivered[chunk.key[0]]
            self.streams[stream].append(chunk)

    @rule(stream=st.integers(0, 2), age=st.integers(0, 5))
    def straggler(self, stream: int, age: int) -> None:
        self.now_s += 1.0
        held = {chunk.key for chunk in self.streams[stream]}
        before_s = self.now_s - age
        chunk = self.outbox.straggler(before_s, 3, self.now_s, held)
        if chunk is not None:
            assert chunk.key not in held | self.told and 1 < chunk.times_sent <= 3
            self.streams[stream].append(chunk)

    def _arrive(self, chunk: Chunk) -> None:
        if chunk.key not in self.has:
            self.has.add(chunk.key)
            self.arrived[chunk.key[:2]] += chunk.size_bytes

    @precondition(lambda self: any(self.streams))
    @rule(which=NUMBER, is_acknowledged=st.booleans())
    def arrives(self, which: int, is_acknowledged: bool) -> None:
        everything = [(stream, chunk) for stream in self.streams for chunk in stream]
        stream, chunk = everything[which % len(everything)]
        self._arrive(chunk)
        if is_acknowledged:
            stream.remove(chunk)
            is_news = self.outbox.acknowledge(chunk.key) is not None
            is_old = chunk.key in self.told or chunk.entry.number <= self.delivered[chunk.key[0]]
            assert is_news == (not is_old)
            self.told.add(chunk.key)

    @rule(lane=LANE)
    def delivers(self, lane: int) -> None:
        self._deliver(lane)
        self.outbox.delivered(lane, self.delivered[lane])

    def _deliver(self, lane: int) -> None:
        """As far as whole messages are there at the peer."""
        while self.delivered[lane] < len(self.sizes[lane]):
            number = self.delivered[lane] + 1
            is_whole = self.arrived[lane, number] == self.sizes[lane][number - 1]
            if not is_whole or (lane, number, 0) not in self.has:
                return
            self.delivered[lane] = number

    @rule(stream=st.integers(0, 2))
    def dies(self, stream: int) -> None:
        lost, self.streams[stream] = self.streams[stream], []
        self.outbox.give_back(lost)

    @rule()
    def reconnects(self) -> None:
        self.streams = [[], [], []]
        for lane in range(LANES):
            self._deliver(lane)
        self.outbox.rewind(list(self.delivered))
        assert self.outbox.in_flight_bytes() == 0

    @rule()
    def peer_begins_anew(self) -> None:
        held = sum(len(sizes) for sizes in self.sizes) - sum(self.delivered)
        assert self.outbox.restart() == held
        self._forget()

    # ------------------------------------------------------------------ what always holds

    def _size_bytes(self) -> int:
        return sum(
            sum(sizes[done:]) for sizes, done in zip(self.sizes, self.delivered, strict=True)
        )

    @invariant()
    def books_balance(self) -> None:
        assert self.outbox.size_bytes == self._size_bytes()
        assert len(self.outbox) == sum(map(len, self.sizes)) - sum(self.delivered)
        live = {chunk.key: chunk for stream in self.streams for chunk in stream}
        flying = sum(
            chunk.copies * chunk.size_bytes for key, chunk in live.items() if key not in self.told
        )
        assert 0 <= self.outbox.in_flight_bytes() <= flying

    @invariant()
    def no_lane_is_too_far_ahead(self) -> None:
        for lane in range(LANES):
            begun: dict[int, int] = {}
            for stream in self.streams:
                for chunk in stream:
                    if chunk.key[0] == lane and chunk.entry.number > self.delivered[lane]:
                        begun[chunk.entry.number] = chunk.entry.size_bytes
            assert sum(begun.values()) <= max(self.ahead_bytes, *begun.values(), 0)

    def teardown(self) -> None:
        """Without further trouble everything gets through, and nothing is left on the books."""
        if not hasattr(self, "outbox"):
            return
        self.reconnects()
        while len(self.outbox):
            chunk = self.outbox.next_chunk(range(LANES), 10, self.now_s)
            assert chunk is not None, "messages are stuck"
            assert chunk.key not in self.told
            self._arrive(chunk)
            self.outbox.acknowledge(chunk.key)
            self.told.add(chunk.key)
            for lane in range(LANES):
                self._deliver(lane)
                self.outbox.delivered(lane, self.delivered[lane])
        assert self.outbox.size_bytes == self.outbox.in_flight_bytes() == 0
        assert not self.outbox.has_chunk(range(LANES))
        assert self.delivered == [len(sizes) for sizes in self.sizes]


TestOutboxBooks = OutboxBooks.TestCase
TestOutboxBooks.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
