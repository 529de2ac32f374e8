"""Frames out of bytes that come in pieces: any sizes, and everything that can be wrong."""

from __future__ import annotations

import itertools
import random
import struct

import pytest

from geo_ray.base.errors import FrameError, PeerRefusedError
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.frames import (
    DIGEST_BYTES,
    HEADER,
    Frame,
    FrameKind,
    FrameLimits,
    FrameReader,
    encode,
)

KEY = b"k" * 32
LIMITS = FrameLimits(max_meta_bytes=64 * 1024, max_payload_bytes=1 << 20)
BYTES = random.Random(0).randbytes(1 << 17)

FRAMES = [
    Frame(FrameKind.PING, {"at_s": 1.5}),
    Frame(FrameKind.CHUNK, {"_n": 1, "name": "ü"}, BYTES[:9000]),
    Frame(FrameKind.CHUNK, {"_n": 2}, b"x"),
    Frame(FrameKind.ACK, {"chunks": list(range(3000))}),  # a meta longer than the reader's buffer
    Frame(FrameKind.CHUNK, {"_n": 3, "list": [1] * 2500}, BYTES[:4097]),
    Frame(FrameKind.BYE, {}),
]


class Taker:
    """Places payloads as a connection does, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.places: list[bytearray] = []

    def place(self, kind: FrameKind, meta: Meta, size_bytes: int) -> memoryview:
        self.asked.append(size_bytes)
        self.places.append(bytearray(size_bytes))
        return memoryview(self.places[-1])


def _raw(frame: Frame, number: int = 0, *, digest: bool = True, key: bytes = KEY) -> bytes:
    return b"".join(encode(frame, key, digest_payload=digest, number=number))


def _feed(reader: FrameReader, raw: bytes, sizes: itertools.cycle[int]) -> list[tuple[Frame, int]]:
    found: list[tuple[Frame, int]] = []
    at = 0
    while at < len(raw):
        space = reader.space()
        assert space.nbytes
        piece = raw[at : at + min(next(sizes), space.nbytes)]
        space[: len(piece)] = piece
        at += len(piece)
        found += reader.took(len(piece))
    return found


def _read(raw: bytes, limits: FrameLimits = LIMITS, size: int = 1 << 20) -> list[Frame]:
    reader = FrameReader(KEY, limits, Taker().place)
    return [frame for frame, _ in _feed(reader, raw, itertools.cycle([size]))]


def _same(found: list[Frame], wanted: list[Frame]) -> bool:
    return [(f.kind, f.meta, bytes(f.payload)) for f in found] == [
        (f.kind, f.meta, bytes(f.payload)) for f in wanted
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 35, 36, 37, 100, 1024, 4095, 4096, 4097, 1 << 20])
@pytest.mark.parametrize("digest", [True, False])
def test_frames_come_out_whole_whatever_pieces_they_come_in(size: int, digest: bool) -> None:
    limits = FrameLimits(LIMITS.max_meta_bytes, LIMITS.max_payload_bytes, digest)
    raws = [_raw(frame, number, digest=digest) for number, frame in enumerate(FRAMES)]
    found = _feed(FrameReader(KEY, limits, Taker().place), b"".join(raws), itertools.cycle([size]))
    assert _same([frame for frame, _ in found], FRAMES)
    assert [wire_bytes for _, wire_bytes in found] == [len(raw) for raw in raws]


@pytest.mark.parametrize("seed", range(20))
def test_frames_come_out_whole_from_pieces_of_random_sizes(seed: int) -> None:
    chance = random.Random(seed)
    frames = chance.choices(FRAMES, k=8)
    sizes = itertools.cycle([chance.choice((1, 2, 30, 5000, 70_000)) for _ in range(101)])
    raw = b"".join(map(_raw, frames, range(len(frames))))
    found = _feed(FrameReader(KEY, LIMITS, Taker().place), raw, sizes)
    assert _same([frame for frame, _ in found], frames)


def test_a_payload_is_received_in_place_and_later_data_is_not() -> None:
    taker = Taker()
    reader = FrameReader(KEY, LIMITS, taker.place)
    raw = _raw(FRAMES[1])
    head_bytes = len(raw) - 9000 - DIGEST_BYTES
    _feed(reader, raw[:head_bytes], itertools.cycle([1]))
    assert taker.asked == [9000] and reader.is_within_payload
    space = reader.space()
    assert space.nbytes == 9000  # the digest does not fit in
    space[:] = raw[head_bytes : head_bytes + 9000]
    assert not list(reader.took(9000)) and not reader.is_within_payload
    assert taker.places[0] == BYTES[:9000]
    assert _feed(reader, raw[-DIGEST_BYTES:], itertools.cycle([5]))[0][0].payload == BYTES[:9000]


@pytest.mark.parametrize("at", [0, 1, 8999])
def test_a_diverted_payload_leaves_its_place_alone_and_the_next_frame_is_read(at: int) -> None:
    taker = Taker()
    reader = FrameReader(KEY, LIMITS, taker.place)
    raw = _raw(FRAMES[1])
    begin = len(raw) - 9000 - DIGEST_BYTES + at
    assert not _feed(reader, raw[:begin], itertools.cycle([1 << 20]))
    taker.places[0][:] = b"!" * 9000  # another copy was complete first
    reader.divert()
    found = _feed(reader, raw[begin:] + _raw(FRAMES[2], 1), itertools.cycle([777]))
    assert bytes(taker.places[0]) == b"!" * 9000
    assert len(found) == 2 and _same([found[1][0]], [FRAMES[2]])


def test_diverting_between_frames_does_nothing() -> None:
    reader = FrameReader(KEY, LIMITS, Taker().place)
    reader.divert()
    frames = _feed(reader, _raw(FRAMES[2]), itertools.cycle([9]))
    assert _same([frame for frame, _ in frames], [FRAMES[2]])


# ------------------------------------------------------------------ wrong bytes


@pytest.mark.parametrize("size", [1, 13, 1 << 20])
def test_every_flipped_bit_is_noticed_and_no_payload_passes(size: int) -> None:
    frame = Frame(FrameKind.CHUNK, {"_n": 1}, b"payload!")
    raw = _raw(frame)
    rest = 8 * _raw(FRAMES[1])  # a meta that claims to be long is waited for within its limit
    assert len(rest) > LIMITS.max_meta_bytes
    for bit in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises((FrameError, PeerRefusedError)):
            _read(bytes(damaged) + rest, size=size)


@pytest.mark.parametrize("field", ["meta", "payload"])
@pytest.mark.parametrize("lie", [-1, 1, 100, 1 << 31])
def test_lies_about_lengths_are_found_before_anything_is_allocated(field: str, lie: int) -> None:
    frame = Frame(FrameKind.CHUNK, {"_n": 1}, BYTES[:1000])
    raw = bytearray(_raw(frame))
    at, form = (8, "!I") if field == "meta" else (12, "!Q")
    (length,) = struct.unpack_from(form, raw, at)
    struct.pack_into(form, raw, at, (length + lie) % (1 << 32))
    taker = Taker()
    reader = FrameReader(KEY, LIMITS, taker.place)
    with pytest.raises(FrameError):
        _feed(reader, bytes(raw), itertools.cycle([1 << 20]))
    assert not taker.asked  # nobody was asked for a place
    assert reader.space().nbytes <= 1 << 17


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (Frame(FrameKind.CHUNK, {"x": "y" * 65_600}), "meta has"),
        (Frame(FrameKind.CHUNK, {}, bytes((1 << 20) + 1)), "payload has"),
    ],
)
def test_an_honest_frame_over_a_limit_is_refused_by_its_header(frame: Frame, words: str) -> None:
    with pytest.raises(FrameError, match=words):
        _read(_raw(frame)[: HEADER.size])


def test_a_payload_without_digest_is_refused_where_one_is_demanded() -> None:
    with pytest.raises(FrameError, match="no tag"):
        _read(_raw(FRAMES[1], digest=False))


def test_another_key_is_refused() -> None:
    with pytest.raises(FrameError, match="digest is wrong"):
        _read(_raw(FRAMES[0], key=b"x" * 32))


def test_a_payload_of_another_frame_is_refused() -> None:
    one = _raw(Frame(FrameKind.CHUNK, {"_n": 1}, b"one one"))
    two = _raw(Frame(FrameKind.CHUNK, {"_n": 2}, b"two two"))
    tail_bytes = 7 + DIGEST_BYTES
    with pytest.raises(FrameError, match="payload's tag"):
        _read(one[:-tail_bytes] + two[-tail_bytes:])


@pytest.mark.parametrize("order", [(0, 0), (1,), (0, 2), (0, 1, 1), (0, 2, 1)])
def test_lost_repeated_or_swapped_frames_are_detected(order: tuple[int, ...]) -> None:
    raws = [_raw(frame, number) for number, frame in enumerate(FRAMES)]
    with pytest.raises(FrameError, match="lost on the way"):
        _read(b"".join(raws[number] for number in order))


def test_a_place_of_another_size_is_refused() -> None:
    reader = FrameReader(KEY, LIMITS, lambda *_: memoryview(bytearray(3)))
    with pytest.raises(FrameError, match="a place of 3"):
        _feed(reader, _raw(FRAMES[2]), itertools.cycle([1 << 20]))


def test_half_a_frame_is_waited_for() -> None:
    raw = _raw(FRAMES[4])
    for cut in (1, HEADER.size - 1, HEADER.size, 300, len(raw) - DIGEST_BYTES, len(raw) - 1):
        assert _read(raw[:cut]) == []
