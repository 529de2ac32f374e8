"""A last message in passes: as exact as asked for, as large as was said, and no byte is trusted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from geo_ray.base.errors import FrameError
from geo_ray.codecs import feedback
from geo_ray.codecs.base import Coded
from geo_ray.codecs.feedback import Encoder, open_coded
from geo_ray.codecs.int4 import Int4
from geo_ray.codecs.int8 import Int8
from geo_ray.codecs.topk import TopK

BLOCK = 256


def normal(num: int, seed: int = 0) -> Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed))


def by_hand(x: np.ndarray, count: int) -> np.ndarray:
    """The documented rule: each pass rounds, per block, what is left to 127ths of its largest."""
    total = np.zeros_like(x)
    for _ in range(count):
        rest = x - total
        for start in range(0, len(x), BLOCK):
            block = rest[start : start + BLOCK]
            scale = np.float32(np.abs(block).max() / np.float32(127))
            total[start : start + BLOCK] += np.round(block / scale).astype(np.float32) * scale
    return total


@pytest.mark.parametrize(("error", "count"), [(0.03, 1), (1e-4, 2), (1e-6, 3)])
def test_as_many_passes_as_the_error_needs(error: float, count: int) -> None:
    x_P = normal(10_000)
    coded = feedback.encode_passes(x_P, error)
    assert coded is not None and coded.kind == feedback.PASSES_KIND
    int8_bytes = Int8().encode(x_P, {}, 0).size_bytes
    assert coded.size_bytes == 8 + count * int8_bytes
    found_P = feedback.decode_passes(coded)
    assert float((found_P - x_P).norm() / x_P.norm()) <= error
    expected = by_hand(x_P.numpy(), count)
    assert np.abs(found_P.numpy() - expected).max() <= 2e-7 * np.abs(expected).max()


@pytest.mark.parametrize("error", [0.03, 0.01, 1e-4, 3e-5])
def test_the_planner_knows_the_bits(error: float) -> None:
    num = 1 << 20
    coded = feedback.encode_passes(normal(num), error)
    assert coded is not None
    assert 8 * coded.size_bytes / num == pytest.approx(feedback.bits_for_error(error), rel=1e-4)


def test_what_needs_more_passes_goes_in_full() -> None:
    x_P = normal(512)
    assert feedback.encode_passes(x_P, 1e-12) is None
    encoder = Encoder(Int4(), "s", residual_P=torch.ones(512))
    encoded = encoder.last(x_P, 1, 1e-12)
    assert encoded.coded is None and torch.equal(encoded.sent_P, x_P + 1)
    assert encoder.residual_P is None


@given(
    st.lists(st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False), max_size=600),
    st.sampled_from([0.5, 0.03, 1e-4, 1e-6]),
)
@settings(max_examples=60, deadline=None)
def test_any_finite_vector_is_as_exact_as_asked_for(values: list[float], error: float) -> None:
    x_P = torch.tensor(values, dtype=torch.float32)
    coded = feedback.encode_passes(x_P, error)
    if coded is not None:
        off_P = feedback.decode_passes(coded).double() - x_P.double()
        assert float(off_P.norm()) <= error * float(x_P.double().norm()) * (1 + 1e-6)


@pytest.mark.parametrize(
    "cut",
    [
        lambda data_B: data_B[:4],
        lambda data_B: data_B[:-1],
        lambda data_B: torch.cat([data_B, data_B[:1]]),
        lambda data_B: torch.cat([torch.zeros(8, dtype=torch.uint8), data_B[8:]]),
        lambda data_B: torch.cat([torch.full((8,), 255, dtype=torch.uint8), data_B[8:]]),
        lambda data_B: torch.cat([torch.tensor([9, *[0] * 7], dtype=torch.uint8), data_B[8:]]),
    ],
)
def test_bytes_that_make_no_sense_are_refused(cut) -> None:
    coded = feedback.encode_passes(normal(1000), 1e-4)
    assert coded is not None
    with pytest.raises(FrameError):
        feedback.decode_passes(Coded(feedback.PASSES_KIND, 1000, cut(coded.data_B)))


def test_only_a_lossy_codec_may_end_in_passes() -> None:
    coded = feedback.encode_passes(normal(100), 0.03)
    assert coded is not None
    assert open_coded(TopK(ratio=0.1), coded, 100).numel() == 100
    with pytest.raises(FrameError, match="no codec"):
        open_coded(None, coded, 100)
    with pytest.raises(FrameError, match="100 elements"):
        open_coded(TopK(ratio=0.1), coded, 99)


@pytest.mark.parametrize("codec", [Int8(), Int4(), TopK(ratio=0.05)])
def test_the_last_vector_pays_what_is_owed(codec) -> None:
    encoder = Encoder(codec, "s")
    handed_P, sent_P = torch.zeros(5000), torch.zeros(5000)
    for number in range(1, 6):
        x_P = normal(5000, number)
        handed_P += x_P
        sent_P += encoder.encode(x_P, number).sent_P
    encoded = encoder.last(normal(5000, 6), 6, 0.03)
    handed_P += normal(5000, 6)
    owed_P = handed_P - sent_P  # all that the last one had to say
    assert float((owed_P - encoded.sent_P).norm() / owed_P.norm()) <= 0.03 + 1e-5
    assert encoded.coded is not None
    usual = isinstance(codec, Int8)  # exact enough by itself
    assert encoded.coded.kind == (codec.kind if usual else feedback.PASSES_KIND)
    assert encoder.residual_P is not None  # in case that another one follows
    assert torch.allclose(encoder.residual_P, owed_P - encoded.sent_P, atol=1e-5)
