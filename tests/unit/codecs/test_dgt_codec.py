"""Which blocks are reliable, in what order the others go, and that all formats read back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from geo_ray.base.errors import FrameError
from geo_ray.codecs.base import Coded, LossyBlocks
from geo_ray.codecs.dgt import (
    LARGEST_LOSSY_BYTES,
    Dgt,
    DgtHeader,
    band_of,
    pack_lossy,
    reliable_count,
    unpack_lossy,
)
from geo_ray.transport.datagrams import blocks_per_datagram


def vector(*levels: float, elements: int = 2) -> torch.Tensor:
    """Blocks of constant magnitude with changing signs."""
    signs = torch.tensor([1.0, -1.0]).repeat(elements)[:elements]
    return torch.cat([level * signs for level in levels])


def small(**options: object) -> Dgt:
    return Dgt.model_validate({"block_bytes": 8, **options})


def lossy_of(coded: Coded) -> LossyBlocks:
    assert coded.lossy is not None
    return coded.lossy


def test_the_strongest_blocks_are_reliable_and_the_others_follow_by_rank() -> None:
    coded = small(reliable_fraction=0.4).encode(vector(3, 1, 5, 2, 4), {}, 0)
    assert DgtHeader(coded).ids_R.tolist() == [2, 4]
    assert lossy_of(coded).ids_L.tolist() == [0, 3, 1]


def test_a_contribution_remembers_with_weight_alpha() -> None:
    codec, memory = small(alpha=0.3, reliable_fraction=0.5), {}
    codec.encode(vector(1, 4), memory, 0)
    codec.encode(vector(2, 1), memory, 0)
    want = torch.tensor([0.3 * 0.7 * 1 + 0.7 * 2, 0.3 * 0.7 * 4 + 0.7 * 1])
    assert torch.allclose(memory["contribution_N"], want)


def test_what_was_strong_stays_ahead_for_a_while() -> None:
    codec, memory = small(alpha=0.9, reliable_fraction=0.5), {}
    codec.encode(vector(1, 9), memory, 0)
    coded = codec.encode(vector(2, 1), memory, 0)
    assert DgtHeader(coded).ids_R.tolist() == [1]


def test_the_last_block_is_measured_without_its_filling() -> None:
    memory: dict[str, torch.Tensor] = {}
    small().encode(torch.tensor([1.0, 1.0, 3.0]), memory, 0)
    assert memory["contribution_N"].tolist() == pytest.approx([0.7 * 1.0, 0.7 * 3.0])


def test_zeros_are_not_sent() -> None:
    coded = small(reliable_fraction=0.5).encode(vector(0, 3, 0, 1), {}, 0)
    assert DgtHeader(coded).ids_R.tolist() == [1]
    assert lossy_of(coded).ids_L.tolist() == [3]
    nothing = small().encode(torch.zeros(7), {}, 0)
    assert nothing.lossy is None and DgtHeader(nothing).ids_R.numel() == 0


@pytest.mark.parametrize(
    ("reliable_fraction", "blocks", "want"),
    [(0.5, 0, 0), (0.01, 1, 1), (0.5, 1, 1), (0.5, 5, 3), (0.8, 10, 8), (1.0, 10, 10)],
)
def test_the_share_is_rounded_and_one_block_is_always_reliable(
    reliable_fraction: float, blocks: int, want: int
) -> None:
    assert reliable_count(reliable_fraction, blocks) == want


@pytest.mark.parametrize(
    ("loose", "bands", "want"),
    [
        (6, 3, [0, 0, 1, 1, 2, 2]),
        (7, 3, [0, 0, 0, 1, 1, 2, 2]),
        (4, 1, [0, 0, 0, 0]),
        (2, 2, [0, 1]),
    ],
)
def test_bands_are_equally_long_ranges_of_rank(loose: int, bands: int, want: list[int]) -> None:
    assert [band_of(rank, loose, bands) for rank in range(loose)] == want


def test_there_are_no_more_bands_than_loose_blocks() -> None:
    assert (
        lossy_of(small(bands=7, reliable_fraction=0.5).encode(vector(3, 2, 1, 0.5), {}, 0)).bands
        == 2
    )


def test_random_order_is_the_seeds_and_ignores_strength() -> None:
    x_P = vector(*range(1, 41))
    codec = small(order="random", reliable_fraction=0.5)
    first, again, other = (codec.encode(x_P, {}, seed) for seed in (1, 1, 2))
    assert torch.equal(first.data_B, again.data_B)
    assert not torch.equal(first.data_B, other.data_B)
    assert DgtHeader(first).ids_R.tolist() != list(range(20, 40))


def test_the_share_follows_the_loss_down_to_a_floor() -> None:
    codec, memory = small(reliable_fraction=0.8, adaptive=True, reliable_fraction_min=0.2), {}
    assert codec.present_fraction(memory) == 0.8
    shares = []
    for loss in (2.0, 2.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0):
        codec.observe(memory, loss)
        shares.append(codec.present_fraction(memory))
    assert shares[1] == pytest.approx(0.8)
    assert shares == sorted(shares, reverse=True) and shares[-1] == 0.2
    # One step of 0.5 after 2.0 counts a fifth: 0.8 * (0.8 * 2.0 + 0.2 * 0.5) / 2.0
    assert shares[2] == pytest.approx(0.8 * 1.7 / 2.0)


def test_a_loss_that_grows_never_asks_for_more_than_all() -> None:
    codec, memory = small(reliable_fraction=0.8, adaptive=True), {}
    for loss in (1.0, 9.0, 9.0, 9.0):
        codec.observe(memory, loss)
    assert codec.present_fraction(memory) == 1.0


def test_without_adaptive_the_loss_changes_nothing() -> None:
    codec, memory = small(reliable_fraction=0.8), {}
    codec.observe(memory, 1.0)
    codec.observe(memory, 0.0)
    assert not memory and codec.present_fraction(memory) == 0.8


def test_all_reliable_is_the_vector_itself() -> None:
    x_P = torch.randn(1001)
    for codec in (small(loose="reliable"), small(reliable_fraction=1.0)):
        coded = codec.encode(x_P, {}, 0)
        assert coded.lossy is None and torch.equal(codec.decode(coded), x_P)


@pytest.mark.parametrize("form", ["fp32", "fp16", "int4"])
@pytest.mark.parametrize("elements", [1, 2, 7, 320])
def test_lossy_formats_read_back_for_odd_lengths_and_the_largest_value(
    form: str, elements: int
) -> None:
    grid_LE = torch.randn(5, elements)
    grid_LE[0] = 0.0
    grid_LE[1, -1] = 1e4
    grid_LE[2, 0] = -1e-30
    back_LE = unpack_lossy(form, pack_lossy(form, grid_LE), elements)  # type: ignore[arg-type]
    top_L1 = grid_LE.abs().amax(dim=1, keepdim=True)
    reliable_fraction = {"fp32": 0.0, "fp16": 2.0**-11, "int4": 1 / 14 + 1e-6}[form]
    assert back_LE.shape == grid_LE.shape
    assert bool(((back_LE - grid_LE).abs() <= reliable_fraction * top_L1 + 1e-37).all())
    assert back_LE[1, -1] == pytest.approx(1e4, rel=1e-3)
    assert bool((back_LE[0] == 0).all())


def test_four_bits_hold_every_level_in_its_place() -> None:
    grid_LE = torch.tensor([[*range(-7, 8)]], dtype=torch.float32)
    packed_LK = pack_lossy("int4", grid_LE)
    assert packed_LK.shape == (1, 4 + 8)
    assert torch.equal(unpack_lossy("int4", packed_LK, 15), grid_LE)


@pytest.mark.parametrize("values", ["fp32", "fp16"])
def test_reliable_values_in_both_formats(values: str) -> None:
    x_P = torch.randn(999) * 1e6  # beyond what a half can hold
    codec = Dgt.model_validate({"block_bytes": 64, "reliable_fraction": 0.5, "values": values})
    coded = codec.encode(x_P, {}, 0)
    back_P = codec.decode(replace(coded, lossy=None))
    sent = back_P != 0
    assert int(sent.sum()) >= 480
    assert torch.allclose(back_P[sent], x_P[sent], rtol=1e-3 if values == "fp16" else 0)


def test_any_part_of_the_loose_blocks_decodes_and_the_parts_add_up() -> None:
    x_P, codec = torch.randn(101), small(reliable_fraction=0.3)
    coded = codec.encode(x_P, {}, 0)
    count = lossy_of(coded).ids_L.numel()
    odd = torch.arange(1, count, 2)
    even = torch.arange(0, count, 2)
    reliable_P = codec.decode(replace(coded, lossy=None))
    parts_P = sum(codec.decode(codec.subset(coded, places)) for places in (odd, even))
    assert torch.equal(reliable_P + parts_P, x_P)
    assert torch.equal(codec.decode(coded), x_P)


@pytest.mark.parametrize("form", ["fp32", "fp16", "int4"])
def test_bytes_may_lie_anywhere_in_memory_and_be_few(form: str) -> None:
    grid_LE = torch.randn(3, 5)
    packed_LK = pack_lossy(form, grid_LE)  # type: ignore[arg-type]
    moved_B = torch.cat([torch.zeros(1, dtype=torch.uint8), packed_LK.flatten()])[1:]
    moved_LK = moved_B.view(packed_LK.shape)
    want_LE = unpack_lossy(form, packed_LK, 5)  # type: ignore[arg-type]
    for rows in (3, 1, 0):
        back_LE = unpack_lossy(form, moved_LK[:rows], 5)  # type: ignore[arg-type]
        assert torch.equal(back_LE, want_LE[:rows])


def test_a_block_must_fit_a_datagram() -> None:
    with pytest.raises(ValidationError, match="smaller blocks or a shorter format"):
        Dgt(block_bytes=1304)
    assert Dgt(block_bytes=4 * 2592, loose_values="int4").elements == 2592
    assert blocks_per_datagram(LARGEST_LOSSY_BYTES) == 1


def test_scaled_merging_does_not_go_with_putting_back() -> None:
    with pytest.raises(ValidationError, match="late_scaled"):
        Dgt(late_scaled=True)


def test_it_decodes_whatever_the_senders_options_were() -> None:
    x_P = torch.randn(100)
    coded = Dgt(block_bytes=24, values="fp16", loose_values="int4").encode(x_P, {}, 0)
    assert torch.allclose(Dgt().decode(coded), x_P, atol=0.3)


def flipped(coded: Coded, place: int, value: int) -> Coded:
    data_B = coded.data_B.clone()
    data_B[place] = value
    return replace(coded, data_B=data_B)


def bad_lossy(coded: Coded, **changes: torch.Tensor) -> Coded:
    return replace(coded, lossy=replace(lossy_of(coded), **changes))


def test_bytes_that_make_no_sense_are_refused() -> None:
    codec = small(reliable_fraction=0.5)
    coded = codec.encode(vector(4, 3, 2, 1), {}, 0)
    lossy = lossy_of(coded)
    wrong = [
        flipped(coded, 0, 9),  # format of values
        flipped(coded, 8, 9),  # format of lossy blocks
        flipped(coded, 16, 0),  # no elements
        flipped(coded, 16, 1),  # other elements than the bytes have
        flipped(coded, 24, 3),  # more reliable blocks than marked
        flipped(coded, 31, 255),  # a negative count
        flipped(coded, 32, 200),  # more blocks than there are
        flipped(coded, 48, 0),  # no marks
        replace(coded, data_B=coded.data_B[:-1]),
        replace(coded, data_B=torch.cat([coded.data_B, coded.data_B])),
        replace(coded, num=-1),
        bad_lossy(coded, ids_L=torch.tensor([2, 2], dtype=torch.int32)),
        bad_lossy(coded, ids_L=torch.tensor([0, 2], dtype=torch.int32)),  # 0 is reliable
        bad_lossy(coded, ids_L=torch.tensor([2, 4], dtype=torch.int32)),
        bad_lossy(coded, ids_L=torch.tensor([-1, 2], dtype=torch.int32)),
        bad_lossy(coded, blocks_LK=lossy.blocks_LK[:, :-1]),
        bad_lossy(coded, blocks_LK=lossy.blocks_LK[:1]),
    ]
    for broken in wrong:
        with pytest.raises(FrameError):
            codec.decode(broken)
