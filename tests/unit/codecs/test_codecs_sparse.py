"""Codecs that send some elements: which ones, and where they say they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from geo_ray.base.errors import FrameError
from geo_ray.codecs import sparse
from geo_ray.codecs.base import Coded
from geo_ray.codecs.bisparse import BiSparse
from geo_ray.codecs.buffers import Reader, header, joined
from geo_ray.codecs.nonzeros import NonZeros
from geo_ray.codecs.randomk import RandomK, UnbiasedRandomK
from geo_ray.codecs.sparse import (
    count_of,
    largest_elsewhere,
    largest_positions,
    read_positions,
    write_positions,
)
from geo_ray.codecs.topk import TopK

ALL, BITMAP, SHORT, LONG, PLAIN = range(5)


def gauss(num: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed))


def by_sorting(x_P: torch.Tensor, count: int) -> np.ndarray:
    """The definition: largest magnitudes, of equal ones the earliest, no zeros."""
    x = x_P.abs().numpy()
    order = np.argsort(-x, kind="stable")[:count]
    return np.sort(order[x[order] > 0])


# ------------------------------------------------------------------ picking


@pytest.mark.parametrize("num", [1, 2, 100, 65_536, 65_537, 300_001])
@pytest.mark.parametrize("ratio", [1e-5, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0])
def test_exactly_the_largest_are_picked(num, ratio):
    x_P = gauss(num)
    count = count_of(ratio, num)
    assert np.array_equal(largest_positions(x_P, count), by_sorting(x_P, count))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda num: torch.ones(num), id="all equal"),
        pytest.param(lambda num: (torch.arange(num) % 3 - 1).float(), id="three values"),
        pytest.param(lambda num: torch.zeros(num), id="zeros"),
        pytest.param(lambda num: (torch.arange(num) % 7 == 0) * gauss(num), id="mostly zeros"),
        pytest.param(lambda num: (torch.arange(num) == 5) * 3.0, id="one"),
        pytest.param(lambda num: torch.arange(num).float(), id="rising"),
        pytest.param(lambda num: torch.full((num,), 1e-45), id="smallest"),
        pytest.param(lambda num: -(gauss(num) ** 9), id="heavy"),
    ],
)
@pytest.mark.parametrize("num", [1000, 300_001])
@pytest.mark.parametrize("ratio", [0.001, 0.2, 1.0])
def test_strange_vectors_are_picked_exactly_too(make, num, ratio):
    x_P, count = make(num), count_of(ratio, num)
    expected = by_sorting(x_P, count)
    assert np.array_equal(largest_positions(x_P, count), expected)
    assert np.array_equal(largest_elsewhere(x_P, count), expected)


def test_an_estimate_that_is_too_high_is_mended(monkeypatch):
    x_P = gauss(500_000)
    expected = by_sorting(x_P, 5000)
    for wrong in (100.0, 4.9, 1.0, 1e-30):
        monkeypatch.setattr(sparse, "_estimate", lambda x, count, wrong=wrong: wrong)
        assert np.array_equal(largest_positions(x_P, 5000), expected)


def test_outliers_where_no_sample_looks_are_found():
    x_P = torch.full((400_000,), 1e-6)
    x_P[123_456:123_466] = 1.0
    assert largest_positions(x_P, 10).tolist() == list(range(123_456, 123_466))


@pytest.mark.parametrize(("ratio", "num", "count"), [(0.01, 0, 0), (0.01, 1, 1), (1.0, 9, 9)])
def test_counts_are_at_least_one_of_something(ratio, num, count):
    assert count_of(ratio, num) == count


# ------------------------------------------------------------------ positions


@pytest.mark.parametrize(
    ("at", "num", "code", "size"),
    [
        ([], 0, ALL, 0),
        ([], 3, SHORT, 0),
        ([0, 1, 2], 3, ALL, 0),
        ([0, 2], 3, BITMAP, 1),
        (list(range(0, 8000, 4)), 8000, BITMAP, 1000),
        (list(range(0, 8000, 20)), 8000, SHORT, 400),
        ([254], 10_000, SHORT, 1),
        ([255], 10_000, SHORT, 2),
        ([510, 511], 10_000, SHORT, 4),
        (list(range(0, 10**6, 2000)), 10**6, LONG, 1000),
        ([65_534], 10**6, LONG, 2),
        ([131_070, 131_071], 10**6, LONG, 8),
        ([196_605, 196_606], 10**6, PLAIN, 8),
        ([999_999], 10**6, PLAIN, 4),
    ],
)
def test_the_smallest_code_is_taken(at, num, code, size):
    written_B = write_positions(torch.tensor(at, dtype=torch.int64), num)
    assert written_B.numel() == 24 + size
    assert written_B[8:16].view(torch.int64).item() == code
    reader = Reader("x", written_B)
    read = read_positions("x", reader, num)
    reader.done()
    assert (list(range(num)) if read is None else read.tolist()) == at


def test_positions_beyond_what_fp32_can_count_are_exact():
    at = torch.tensor([2**24 + 1, 2**24 + 3, 2**31 - 2])
    reader = Reader("x", write_positions(at, 2**31 - 1))
    assert torch.equal(read_positions("x", reader, 2**31 - 1), at)


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param((header(2, PLAIN, 0), torch.tensor([5, 5], dtype=torch.int32)), id="twice"),
        pytest.param((header(2, PLAIN, 0), torch.tensor([5, 4], dtype=torch.int32)), id="falling"),
        pytest.param((header(1, PLAIN, 0), torch.tensor([10], dtype=torch.int32)), id="beyond"),
        pytest.param((header(1, PLAIN, 0), torch.tensor([-1], dtype=torch.int32)), id="negative"),
        pytest.param((header(1, SHORT, 1), torch.tensor([10], dtype=torch.uint8)), id="far"),
        pytest.param((header(1, SHORT, 1), torch.tensor([255], dtype=torch.uint8)), id="open end"),
        pytest.param((header(2, SHORT, 1), torch.tensor([1], dtype=torch.uint8)), id="too few"),
        pytest.param((header(1, SHORT, -1),), id="negative words"),
        pytest.param((header(1, SHORT, 2**61),), id="many words"),
        pytest.param((header(2, BITMAP, 0), torch.tensor([1, 0], dtype=torch.uint8)), id="bits"),
        pytest.param((header(1, BITMAP, 9), torch.tensor([1, 0], dtype=torch.uint8)), id="odd"),
        pytest.param((header(9, ALL, 0),), id="not all"),
        pytest.param((header(11, ALL, 0),), id="more than all"),
        pytest.param((header(-1, PLAIN, 0),), id="negative count"),
        pytest.param((header(0, 5, 0),), id="unknown code"),
    ],
)
def test_positions_that_cannot_be_are_refused(parts):
    with pytest.raises(FrameError):
        read_positions("x", Reader("x", joined(*parts)), 10)


# ------------------------------------------------------------------ topk, nonzeros


@pytest.mark.parametrize("values", ["fp32", "fp16"])
def test_topk_keeps_the_largest_and_nothing_else(values):
    x_P = gauss(10_000)
    codec = TopK(ratio=0.01, values=values)
    out_P = codec.decode(codec.encode(x_P, {}, 0))
    kept = by_sorting(x_P, 100)
    assert np.array_equal(torch.nonzero(out_P).view(-1), kept)
    assert torch.allclose(out_P[kept], x_P[kept], rtol=0 if values == "fp32" else 2**-11, atol=0)


def test_topk_sends_little_more_than_a_byte_per_position():
    coded = TopK(ratio=0.01).encode(gauss(1_000_000), {}, 0)
    assert 10_000 * 5 < coded.size_bytes < 10_000 * 5.2
    coded = TopK(ratio=0.01, values="fp16").encode(gauss(1_000_000), {}, 0)
    assert 10_000 * 3 < coded.size_bytes < 10_000 * 3.2


def test_nonzeros_follow_what_there_is():
    sizes = []
    for every in (1, 2, 10, 100, 10_000):
        x_P = torch.zeros(100_000)
        x_P[::every] = 1.0
        sizes.append(NonZeros().encode(x_P, {}, 0).size_bytes)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 4 * 100_000 + 48


def test_a_few_zeros_are_sent_rather_than_all_positions():
    for zeros, size in ((1, 40_048), (312, 40_048), (313, 48 + 1250 + 4 * (10_000 - 313))):
        x_P = torch.ones(10_000)
        x_P[:zeros] = 0.0
        coded = NonZeros().encode(x_P, {}, 0)
        assert coded.size_bytes == size
        assert torch.equal(NonZeros().decode(coded), x_P)


def test_negative_zeros_are_as_cheap_and_kept():
    x_P = torch.zeros(10_000)
    x_P[::100] = gauss(100)
    size = NonZeros().encode(x_P, {}, 0).size_bytes
    for signed_P in (-x_P, x_P * -0.5):
        coded = NonZeros().encode(signed_P, {}, 0)
        assert coded.size_bytes == size < 600
        decoded_P = NonZeros().decode(coded)
        assert torch.equal(decoded_P.view(torch.int32), signed_P.view(torch.int32))


# ------------------------------------------------------------------ randomk


@pytest.mark.parametrize("num", [1, 7, 300])
def test_randomk_draws_each_element_alike_and_none_twice(num):
    codec, counts_P, rounds = RandomK(ratio=0.2), torch.zeros(num), 1000
    count = count_of(0.2, num)
    for seed in range(rounds):
        there_P = codec.decode(codec.encode(torch.ones(num), {}, seed)) != 0
        assert int(there_P.sum()) == count
        counts_P += there_P
    total = float(counts_P.sum()) / num
    assert float((counts_P - total).abs().max()) < 6 * total**0.5


def test_randomk_draws_the_same_on_every_release():
    out_P = RandomK(ratio=0.1).decode(RandomK(ratio=0.1).encode(torch.ones(100), {}, 42))
    assert torch.nonzero(out_P).view(-1).tolist() == [3, 19, 24, 34, 45, 58, 69, 79, 89, 95]


def test_randomk_sends_no_positions():
    assert RandomK(ratio=0.01).encode(gauss(100_000), {}, 1).size_bytes == 32 + 4 * 1000


def test_the_unbiased_one_is_right_on_average():
    x_P, codec = gauss(997), UnbiasedRandomK(ratio=0.1)
    mean_P, rounds = torch.zeros(997, dtype=torch.float64), 3000
    for seed in range(rounds):
        mean_P += codec.decode(codec.encode(x_P, {}, seed)) / rounds
    deviation_P = (x_P.double().square() * 10 / rounds).sqrt()
    assert float(((mean_P - x_P) / deviation_P).abs().max()) < 6


def test_what_randomk_cannot_have_drawn_is_refused():
    for count in (-1, 0, 101, 2**62):
        parts = header(1, count), header(0, 0), torch.ones(max(min(count, 200), 0))
        with pytest.raises(FrameError):
            RandomK().decode(Coded("randomk", 100, joined(*parts)))


# ------------------------------------------------------------------ bisparse


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_bisparse_is_the_rule_of_its_docstring(momentum):
    num, steps = 3000, 6
    codec, memory = BiSparse(ratio=0.01, momentum=momentum), {}
    u, v = np.zeros(num), np.zeros(num)
    for step in range(steps):
        x_P = gauss(num, seed=step)
        u = momentum * u + x_P.double().numpy()
        v = v + u
        at = np.sort(np.argsort(-np.abs(v), kind="stable")[:30])
        out_P = codec.decode(codec.encode(x_P, memory, 0))
        assert torch.nonzero(out_P).view(-1).tolist() == at.tolist()
        assert np.allclose(out_P.numpy()[at], v[at], rtol=1e-5)
        u[at] = v[at] = 0.0
    assert np.allclose(memory["v"].numpy(), v, atol=1e-5)
    assert np.allclose(memory["u"].numpy(), u, atol=1e-5)


def test_without_momentum_bisparse_loses_nothing():
    codec, memory = BiSparse(ratio=0.05, momentum=0.0), {}
    given_P, sent_P = torch.zeros(2000, dtype=torch.float64), torch.zeros(2000, dtype=torch.float64)
    for step in range(20):
        x_P = gauss(2000, seed=step)
        given_P += x_P
        sent_P += codec.decode(codec.encode(x_P, memory, 0))
    assert torch.allclose(given_P, sent_P + memory["v"], atol=1e-5)


def test_what_half_precision_loses_stays_with_the_sender():
    codec, memory = BiSparse(ratio=0.05, momentum=0.0, values="fp16"), {}
    x_P = gauss(2000)
    sent_P = codec.decode(codec.encode(x_P, memory, 0))
    assert torch.allclose(x_P, sent_P + memory["v"], atol=1e-7)
