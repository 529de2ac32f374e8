"""Codecs over arbitrary vectors, positions and bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from geo_ray.base.errors import FrameError
from geo_ray.codecs.base import Coded
from geo_ray.codecs.bisparse import BiSparse
from geo_ray.codecs.blocks import blocks_in
from geo_ray.codecs.buffers import Reader
from geo_ray.codecs.int4 import Int4
from geo_ray.codecs.int8 import Int8
from geo_ray.codecs.registry import CODECS, codec_of
from geo_ray.codecs.sparse import largest_positions, read_positions, write_positions

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
VECTORS = hnp.arrays(np.float32, st.integers(0, 300), elements=FINITE).map(torch.from_numpy)
TAME = hnp.arrays(np.float32, st.integers(1, 300), elements=st.floats(-1e3, 1e3, width=32)).map(
    torch.from_numpy
)
each_kind = pytest.mark.parametrize("kind", CODECS)


@each_kind
@settings(max_examples=60, deadline=None)
@given(x_P=VECTORS, seed=st.integers(0, 2**63 - 1))
def test_any_vector_comes_back_finite_and_of_its_length(kind, x_P, seed):
    codec, before_P = codec_of(kind), x_P.clone()
    coded = codec.encode(x_P, {}, seed)
    out_P = codec.decode(coded)
    assert out_P.shape == x_P.shape
    assert torch.equal(x_P, before_P)
    if kind != "randomk_unbiased":  # its values may leave the range of fp32
        assert bool(out_P.isfinite().all())
    if not codec.traits.lossy:
        assert torch.equal(out_P.view(torch.int32), x_P.view(torch.int32))


@each_kind
@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=400), num=st.integers(0, 300))
def test_any_bytes_are_refused_or_decoded(kind, data, num):
    data_B = torch.frombuffer(bytearray(data + b"\0"), dtype=torch.uint8)[: len(data)]
    try:
        out_P = codec_of(kind).decode(Coded(kind, num, data_B))
    except FrameError:
        return
    assert out_P.shape == (num,) and out_P.dtype == torch.float32


@each_kind
@settings(max_examples=60, deadline=None)
@given(x_P=VECTORS, data=st.data())
def test_damaged_bytes_are_refused_or_decoded(kind, x_P, data):
    coded = codec_of(kind).encode(x_P, {}, 1)
    if not coded.data_B.numel():
        return
    place = data.draw(st.integers(0, coded.data_B.numel() - 1))
    coded.data_B[place] = data.draw(st.integers(0, 255))
    try:
        out_P = codec_of(kind).decode(coded)
    except FrameError:
        return
    assert out_P.shape == x_P.shape


@settings(deadline=None)
@given(num=st.integers(1, 5000), data=st.data())
def test_positions_come_back(num, data):
    at = data.draw(st.lists(st.integers(0, num - 1), unique=True, max_size=200).map(sorted))
    reader = Reader("x", write_positions(torch.tensor(at, dtype=torch.int64), num))
    read = read_positions("x", reader, num)
    reader.done()
    assert (list(range(num)) if read is None else read.tolist()) == at


@settings(deadline=None)
@given(at=st.lists(st.integers(0, 2**31 - 2), unique=True, max_size=50).map(sorted))
def test_far_positions_take_at_most_four_bytes_each(at):
    written_B = write_positions(torch.tensor(at, dtype=torch.int64), 2**31 - 1)
    assert written_B.numel() <= 24 + 4 * len(at)
    read = read_positions("x", Reader("x", written_B), 2**31 - 1)
    assert read is not None and read.tolist() == at


@settings(deadline=None)
@given(x_P=VECTORS, share=st.floats(0.0, 1.0))
def test_picks_are_the_largest(x_P, share):
    count = round(share * x_P.numel())
    at = largest_positions(x_P, count)
    assert at.tolist() == sorted(set(at.tolist()))
    nonzeros = int(torch.count_nonzero(x_P))
    assert at.numel() == min(count, nonzeros)
    left_P = x_P.abs().clone()
    left_P[at] = 0.0
    if at.numel():
        assert float(left_P.max()) <= float(x_P[at].abs().min())


@settings(deadline=None)
@given(x_P=TAME, block=st.sampled_from([16, 18, 64, 256]))
def test_no_element_is_off_by_more_than_half_a_step(x_P, block):
    for codec, top in ((Int8(block=block), 127), (Int4(block=block), 7)):
        out_P = codec.decode(codec.encode(x_P, {}, 0))
        for b in range(blocks_in(x_P.numel(), block)):
            run = slice(b * block, (b + 1) * block)
            step = float(x_P[run].abs().max()) / top
            off = float((out_P[run].double() - x_P[run].double()).abs().max())
            assert off <= 0.5 * step * (1 + 1e-4) + 1e-36


@settings(max_examples=40, deadline=None)
@given(vectors=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8), half=st.booleans())
def test_the_books_of_bisparse_balance(vectors, half):
    codec = BiSparse(ratio=0.1, momentum=0.0, values="fp16" if half else "fp32")
    memory: dict[str, torch.Tensor] = {}
    given_P, sent_P = torch.zeros(2, 50, dtype=torch.float64)
    for number in vectors:
        x_P = torch.randn(50, generator=torch.Generator().manual_seed(number))
        given_P += x_P
        sent_P += codec.decode(codec.encode(x_P, memory, 0))
    assert torch.allclose(given_P, sent_P + memory["v"], atol=1e-4)
