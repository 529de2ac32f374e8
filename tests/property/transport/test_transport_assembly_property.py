"""Whatever streams do, every message is delivered once, intact, in the order of its lane."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from geo_ray.transport.outbox import Chunk, Outbox
from geo_ray.transport.session import Assembly, HeldBytes
from geo_ray.transport.wire.message import CONTROL, DATA, LANES, Message, Piece, read_piece

MAX_MESSAGES = 6
CHUNK_BYTES = 7


@dataclass(eq=False)
class Wire:
    """One stream: chunks in order, the first one half received if it has a place."""

    chunks: list[Chunk] = field(default_factory=list)
    piece: Piece | None = None
    place: memoryview | None = None
    filled: int = 0
    is_diverted: bool = False

    def divert(self) -> None:
        self.is_diverted = True


class Pair:
    """An outbox, wires and an assembly, moved by one drawn number at a time."""

    def __init__(self, wires: int) -> None:
        # The receiver's bounds are the sender's: a valid sender is never refused.
        self.outbox = Outbox(MAX_MESSAGES, 10_000, 60)
        self.held = HeldBytes(60 * LANES + 3 * 100)
        self.assembly = Assembly(MAX_MESSAGES, 60, 1000, self.held)
        self.wires = [Wire() for _ in range(wires)]
        self.said: list[list[bytes]] = [[] for _ in range(LANES)]
        self.heard: list[list[bytes]] = [[] for _ in range(LANES)]
        self.handled = [0] * LANES
        self.time_s = 0.0

    # What can happen; each takes a number that chooses where.

    def say(self, draw: random.Random) -> None:
        lane = draw.randrange(LANES)
        payload = draw.randbytes(draw.choice((0, 1, 6, 7, 8, 20, 50, 100)))
        if self.outbox.has_capacity(len(payload)):
            number = len(self.said[lane])
            self.outbox.add(Message("test", {"n": number}, payload, "update", lane))
            self.said[lane].append(payload)

    def hand(self, draw: random.Random) -> None:
        wire, self.time_s = draw.choice(self.wires), self.time_s + 1.0
        chunk = self.outbox.next_chunk(range(CONTROL, LANES), CHUNK_BYTES, self.time_s)
        if chunk is None:
            held = {each.key for each in wire.chunks}
            chunk = self.outbox.straggler(self.time_s - 2.0, 3, self.time_s, held)
        if chunk is not None:
            wire.chunks.append(chunk)

    def receive(self, draw: random.Random) -> None:
        """Some bytes of a wire's first chunk arrive; its last ones complete it."""
        wire = draw.choice(self.wires)
        if not wire.chunks:
            return
        payload = bytes(wire.chunks[0].frame().payload)
        if wire.piece is None:
            wire.piece = read_piece(wire.chunks[0].frame().meta)
            wire.place = self.assembly.place(wire.piece, len(payload), wire.divert)
            wire.filled, wire.is_diverted = 0, False
        assert wire.place is not None
        if wire.is_diverted:  # as the frame reader does it
            wire.place, wire.is_diverted = memoryview(bytearray(len(payload))), False
        upto = min(len(payload), wire.filled + draw.choice((1, 3, 7)))
        wire.place[wire.filled : upto] = payload[wire.filled : upto]
        wire.filled = upto
        if upto < len(payload):
            return
        _, messages = self.assembly.complete(wire.piece, wire.place)
        for message in messages:
            assert message.meta == {"n": len(self.heard[message.lane])}
            self.heard[message.lane].append(bytes(message.payload))
        chunk, wire.piece, wire.place = wire.chunks.pop(0), None, None
        if draw.random() < 0.7:  # else it is lost with a connection
            self.outbox.acknowledge(chunk.key)

    def handle(self, draw: random.Random) -> None:
        """The handler of a lane's next message is called."""
        lane = draw.randrange(LANES)
        if self.handled[lane] < len(self.heard[lane]):
            self.assembly.delivered(lane, len(self.heard[lane][self.handled[lane]]))
            self.handled[lane] += 1

    def deliver(self, draw: random.Random) -> None:
        lane = draw.randrange(LANES)
        self.outbox.delivered(lane, self.handled[lane])

    def repeat(self, draw: random.Random) -> None:
        """A wire carries something a second time that it has carried before."""
        wire = draw.choice(self.wires)
        if wire.chunks:
            wire.chunks.append(draw.choice(wire.chunks))

    def swap(self, draw: random.Random) -> None:
        wire = draw.choice(self.wires)
        first = 0 if wire.piece is None else 1
        rest = wire.chunks[first:]
        draw.shuffle(rest)
        wire.chunks[first:] = rest

    def die(self, draw: random.Random) -> None:
        self.outbox.give_back(self._end(draw.choice(self.wires)))

    def reconnect(self, _: random.Random) -> None:
        for wire in self.wires:
            self._end(wire)
        self.outbox.rewind(list(self.handled))

    def _end(self, wire: Wire) -> list[Chunk]:
        lost = list(wire.chunks)
        if wire.piece is not None:
            self.assembly.abandon(wire.piece, wire.divert)
        position = self.wires.index(wire)
        self.wires[position] = Wire()
        return lost

    def finish(self) -> None:
        """Without further faults: all must arrive."""
        calm = random.Random(0)
        self.reconnect(calm)
        for _ in range(10_000):
            if not len(self.outbox):
                return
            self.hand(calm)
            self.receive(calm)
            self.handle(calm)
            for lane in range(LANES):
                self.outbox.delivered(lane, self.handled[lane])
        raise AssertionError("messages are stuck")


STEPS = ("say", "hand", "hand", "receive", "receive", "receive", "handle", "deliver") * 3 + (
    "repeat", "swap", "die", "reconnect",
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 5), st.integers(0, 2**32), st.integers(10, 400))
def test_each_message_is_delivered_once_in_order_and_intact(
    wires: int, seed: int, length: int
) -> None:
    draw = random.Random(seed)
    pair = Pair(wires)
    for _ in range(length):
        getattr(pair, draw.choice(STEPS))(draw)
        for said, heard in zip(pair.said, pair.heard, strict=True):
            assert heard == said[: len(heard)]
    pair.finish()
    assert pair.heard == pair.said
    assert pair.outbox.size_bytes == pair.outbox.in_flight_bytes() == pair.held.held_bytes == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(STEPS), max_size=60), st.integers(0, 2**32))
def test_the_same_for_sequences_that_shrink(steps: list[str], seed: int) -> None:
    draw = random.Random(seed)
    pair = Pair(3)
    for step in steps:
        getattr(pair, step)(draw)
    pair.finish()
    assert pair.heard == pair.said


@settings(max_examples=100, deadline=None)
@given(st.permutations(range(12)), st.lists(st.integers(0, 11), max_size=12))
def test_any_order_and_any_repetition_of_chunks_give_the_messages(
    order: list[int], again: list[int]
) -> None:
    payloads = [bytes([65 + n]) * (CHUNK_BYTES * 3 + n) for n in range(3)]  # four chunks each
    outbox = Outbox(MAX_MESSAGES, 10_000, 10_000)
    for n, payload in enumerate(payloads):
        outbox.add(Message("test", {"n": n}, payload, "update", DATA))
    size = CHUNK_BYTES + 1
    chunks = []
    while (chunk := outbox.next_chunk(range(LANES), size, 0.0)) is not None:
        chunks.append(chunk)
    assembly = Assembly(MAX_MESSAGES, 10**6, 1000, HeldBytes())
    heard = []
    for position in [*order, *again]:
        chunk = chunks[position % len(chunks)]
        frame = chunk.frame()
        piece = read_piece(frame.meta)
        place = assembly.place(piece, chunk.size_bytes, lambda: None)
        place[:] = bytes(frame.payload)
        heard += [bytes(message.payload) for message in assembly.complete(piece, place)[1]]
    assert heard == payloads
    assert assembly.duplicates == len(order) + len(again) - len(chunks)
