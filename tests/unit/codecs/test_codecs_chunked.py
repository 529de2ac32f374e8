"""SparseLoCo's layout against a slow reference, and its packed numbers against arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from geo_ray.base.errors import FrameError
from geo_ray.codecs.chunked_topk import (
    CHUNK,
    ChunkedTopK,
    marks,
    marks_elsewhere,
    pack_2,
    pack_12,
    unpack_2,
    unpack_12,
)


def gauss(num: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed))


def slowly(x_P: torch.Tensor, keep: int) -> np.ndarray:
    """Chunk by chunk and in float64, as the docstring says it."""
    out_P = np.zeros(x_P.numel())
    for start in range(0, x_P.numel(), CHUNK):
        x = x_P[start : start + CHUNK].double().numpy()
        at = np.sort(np.argsort(-np.abs(x), kind="stable")[:keep])
        at = at[x[at] != 0.0]
        if not at.size:
            continue
        values = x[at]
        repeated = np.concatenate([values, np.full(keep - at.size, values[0])])
        mean, sigma = repeated.mean(), repeated.std()
        lower = mean - 3 * sigma

        def bin_of(value, lower=lower, sigma=sigma):
            return 2 if sigma == 0 else min(max(int((value - lower) // (1.5 * sigma)), 0), 3)

        bins = [bin_of(value) for value in repeated]
        table = {
            b: np.mean([v for v, c in zip(repeated, bins, strict=True) if c == b]) for b in bins
        }
        out_P[start + at] = (
            [table[b] for b in bins[: at.size]]
            if at.size == keep
            else [table[bin_of(value)] for value in values]
        )
    return out_P


@pytest.mark.parametrize("num", [1, 10, 63, 64, 65, 4095, 4096, 4097, 8200, 70_000])
@pytest.mark.parametrize("keep", [4, 64])
def test_the_layout_decodes_to_what_the_reference_has(num, keep):
    for x_P in (gauss(num), gauss(num) ** 3, (torch.arange(num) % 50 == 7) * gauss(num)):
        codec = ChunkedTopK(keep=keep)
        out_P = codec.decode(codec.encode(x_P, {}, 0)).numpy()
        expected_P = slowly(x_P, keep)
        assert np.allclose(out_P, expected_P, rtol=2e-3, atol=1e-6 * float(x_P.abs().max()))


def test_sizes_are_those_of_the_docstring():
    for num, chunks in ((0, 0), (1, 1), (4096, 1), (4097, 2), (40_960, 10)):
        assert ChunkedTopK().encode(gauss(num), {}, 0).size_bytes == 16 + 120 * chunks


def test_equal_magnitudes_are_picked_from_the_front():
    codec = ChunkedTopK()
    for value in (1.0, -2.5):
        out_P = codec.decode(codec.encode(torch.full((2 * CHUNK,), value), {}, 0))
        assert torch.nonzero(out_P).view(-1).tolist() == [*range(64), *range(CHUNK, CHUNK + 64)]
        assert set(out_P.unique().tolist()) == {0.0, value}


def test_few_values_come_back_exactly():
    """Up to a value per bin nothing is lost but fp16's rounding; zeros are never made non-zero."""
    x_P = torch.zeros(3 * CHUNK)
    x_P[[5, 4096, 8190, 8191]] = torch.tensor([0.5, -2.0, 3.0, -3.0])
    out_P = ChunkedTopK().decode(ChunkedTopK().encode(x_P, {}, 0))
    assert torch.allclose(out_P, x_P, rtol=0.4)
    assert torch.equal(out_P != 0, x_P != 0)
    assert out_P[5] == 0.5


@pytest.mark.parametrize("keep", [4, 64, 1024])
def test_accelerators_pick_the_same(keep):
    x_CE = torch.cat(
        [gauss(3 * CHUNK), torch.ones(CHUNK), torch.zeros(CHUNK), gauss(CHUNK).round()]
    ).view(-1, CHUNK)
    expected = marks(x_CE.numpy(), keep)
    assert (expected.sum(1) == keep).all()
    assert np.array_equal(marks_elsewhere(x_CE, keep).numpy(), expected)


def test_a_position_beyond_the_end_is_refused():
    coded = ChunkedTopK().encode(gauss(4097), {}, 0)  # the second chunk has one element
    coded.data_B[16 + 96] = 1  # its first position
    with pytest.raises(FrameError, match="beyond"):
        ChunkedTopK().decode(coded)


def test_twelve_bits_lie_as_described():
    assert pack_12(np.array([0xABC, 0x123])).tolist() == [0xBC, 0x3A, 0x12]
    numbers = np.random.default_rng(0).permutation(4096)
    assert np.array_equal(unpack_12(pack_12(numbers)), numbers)


def test_two_bits_lie_as_described():
    assert pack_2(np.array([3, 0, 1, 2], np.uint8)).tolist() == [0b10010011]
    numbers = np.random.default_rng(0).integers(0, 4, 4000).astype(np.uint8)
    assert np.array_equal(unpack_2(pack_2(numbers)), numbers)


@pytest.mark.parametrize("keep", [0, -4, 3, 6, 1028, 2**60])
def test_picks_that_no_encoder_makes_are_refused(keep):
    coded = ChunkedTopK().encode(gauss(5000), {}, 0)
    coded.data_B[:8] = torch.tensor([keep]).view(torch.uint8)
    with pytest.raises(FrameError, match="picks"):
        ChunkedTopK().decode(coded)
