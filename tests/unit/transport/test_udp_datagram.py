"""Datagrams: only whole, new ones of the session pass, and nothing is longer than a path takes."""

from __future__ import annotations

from random import Random

import pytest

from geo_ray.base.errors import FrameError
from geo_ray.codecs.base import BlockFormat
from geo_ray.codecs.dgt import Dgt, lossy_bytes
from geo_ray.transport.datagrams import (
    MAX_DATAGRAM_BYTES,
    REPLAY_WINDOW,
    TUNNEL_DATAGRAM_BYTES,
    BlockGroup,
    Opener,
    ReplayWindow,
    Sealer,
    Secret,
    blocks_per_datagram,
    new_session,
    session_of,
)


def group(count: int = 2, size: int = 5) -> BlockGroup:
    blocks = [bytes([i]) * size for i in range(count)]
    return BlockGroup(7, 2**40, 11, [100 + i for i in range(count)], blocks, 0)


def ends() -> tuple[Sealer, Opener, Secret]:
    secret = Secret.derived(new_session(), bytes(range(32)))
    return Sealer(secret), Opener(secret), secret


def test_blocks_come_out_as_they_went_in() -> None:
    sealer, opener, secret = ends()
    datagram = sealer.seal(group(3).pack(123456))
    assert session_of(datagram) == secret.session
    body = opener.open(datagram)
    assert body is not None
    back = BlockGroup.unpack(body)
    assert (back.attempt, back.seq, back.first_rank, list(back.ids)) == (
        7,
        2**40,
        11,
        [100, 101, 102],
    )
    assert [bytes(block) for block in back.blocks] == list(group(3).blocks)
    assert back.sent_us == 123456
    assert (opener.highest, opener.received) == (1, 1)


def test_the_content_is_not_readable() -> None:
    sealer, _, _ = ends()
    assert b"\x01" * 16 not in sealer.seal(group(2, 40).pack())


def test_no_altered_byte_passes() -> None:
    sealer, opener, secret = ends()
    datagram = sealer.seal(group().pack())
    for place in range(len(datagram)):
        bad = bytearray(datagram)
        bad[place] ^= 1
        if session_of(bytes(bad)) == secret.session:
            assert opener.open(bytes(bad)) is None
    assert opener.open(datagram) is not None, "the tries must not have used up its number"


def test_a_datagram_of_another_session_does_not_open() -> None:
    sealer, _, _ = ends()
    _, opener, _ = ends()
    assert opener.open(sealer.seal(group().pack())) is None


@pytest.mark.parametrize("size", [0, 1, 17, 33, MAX_DATAGRAM_BYTES + 1, 65000])
def test_other_lengths_are_of_no_session(size: int) -> None:
    assert session_of(bytes([1]) * size) is None


def test_another_version_is_of_no_session() -> None:
    sealer, _, _ = ends()
    assert session_of(b"\x02" + sealer.seal(group().pack())[1:]) is None


def test_a_repeated_datagram_passes_once() -> None:
    sealer, opener, _ = ends()
    first, second = sealer.seal(b"a"), sealer.seal(b"b")
    assert opener.open(second) == b"b"
    assert opener.open(first) == b"a"
    assert opener.open(first) is None and opener.open(second) is None
    assert (opener.received, opener.repeated, opener.highest) == (2, 2, 2)


def test_the_window_is_a_set_with_an_end() -> None:
    window, seen, rng = ReplayWindow(64), set(), Random(1)
    for _ in range(3000):
        number = max(1, window.highest + rng.randint(-80, 5))
        is_new = number not in seen and number > window.highest - 64
        assert window.is_new(number) == is_new
        if is_new:
            window.add(number)
            seen.add(number)


def test_a_jump_ahead_clears_the_window() -> None:
    window = ReplayWindow()
    window.add(1)
    window.add(1 + REPLAY_WINDOW)
    assert not window.is_new(1) and window.is_new(2) and not window.is_new(1 + REPLAY_WINDOW)


@pytest.mark.parametrize(
    ("size", "fit"), [(1168, 1), (1300, 1), (1336, 1), (1337, 0), (644, 1), (582, 2), (164, 6)]
)
def test_as_many_blocks_as_fit_a_datagram(size: int, fit: int) -> None:
    count = blocks_per_datagram(size)
    assert count == fit
    if count:
        sealer, _, _ = ends()
        most_bytes = TUNNEL_DATAGRAM_BYTES if size <= 1168 else MAX_DATAGRAM_BYTES
        assert len(sealer.seal(group(count, size).pack())) <= most_bytes
        if size > 650:
            with pytest.raises(FrameError):
                sealer.seal(group(count + 1, size).pack())


@pytest.mark.parametrize("form", ["fp32", "fp16", "int4"])
def test_datagrams_of_the_default_block_pass_every_tunnel(form: BlockFormat) -> None:
    size_bytes = lossy_bytes(form, Dgt().elements)
    count = blocks_per_datagram(size_bytes)
    sealer, _, _ = ends()
    assert count and len(sealer.seal(group(count, size_bytes).pack())) <= 1280 - 40 - 8


@pytest.mark.parametrize("cut", [0, 10, 26, 27, 34, -1])
def test_a_body_of_the_wrong_length_is_refused(cut: int) -> None:
    with pytest.raises(FrameError):
        BlockGroup.unpack(group().pack()[:cut])


def test_a_body_without_blocks_is_refused() -> None:
    body = bytearray(group(1, 5).pack())
    body[24] = 0
    with pytest.raises(FrameError):
        BlockGroup.unpack(bytes(body))
