"""Codecs with fewer bits per element, against their formulae in float64."""

from __future__ import annotations

import math

import pytest
import torch

from geo_ray.base.errors import FrameError
from geo_ray.codecs.base import Coded
from geo_ray.codecs.bf16 import Bf16
from geo_ray.codecs.fp16 import Fp16
from geo_ray.codecs.int4 import Int4
from geo_ray.codecs.int8 import Int8


def gauss(num: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed))


def coded_and_back(codec, x_P: torch.Tensor) -> tuple[Coded, torch.Tensor]:
    coded = codec.encode(x_P, {}, 0)
    return coded, codec.decode(coded)


@pytest.mark.parametrize(("codec", "top"), [(Int8(block=64), 127), (Int4(block=32), 7)])
@pytest.mark.parametrize("num", [1, 31, 32, 33, 63, 64, 65, 1000, 70_001])
def test_every_block_is_rounded_on_its_own_scale(codec, top, num):
    x_P = gauss(num) * torch.logspace(-6, 6, num)
    _, out_P = coded_and_back(codec, x_P)
    for start in range(0, num, codec.block):
        x, out = (part[start : start + codec.block].double() for part in (x_P, out_P))
        scale = x.abs().max() / top
        assert float((out - (x / scale).round() * scale).abs().max()) <= float(scale) * 1e-4
        assert float((out - x).abs().max()) <= float(scale) * 0.5001


def test_whole_numbers_come_back_exactly():
    x_P = torch.arange(-127, 128).float()
    assert torch.equal(coded_and_back(Int8(), x_P)[1], x_P)
    x_P = torch.arange(-7, 8).float()
    assert torch.equal(coded_and_back(Int4(), x_P)[1], x_P)


@pytest.mark.parametrize("num", [1, 2, 3, 63, 64, 65, 127, 65_537])
def test_four_bits_are_packed_in_order(num):
    x_P = (torch.arange(num) % 15 - 7).float()
    x_P[::32] = 7.0  # so that every block has scale 1
    coded, out_P = coded_and_back(Int4(block=32), x_P)
    assert torch.equal(out_P, x_P)
    packed = coded.data_B[8 + 4 * math.ceil(num / 32) :].tolist()
    assert len(packed) == math.ceil(num / 2)
    codes = [code for byte in packed for code in (byte & 15, byte >> 4)]
    assert codes[:num] == [int(value) + 8 for value in x_P]


def test_a_zero_block_beside_a_large_one():
    x_P = torch.zeros(512)
    x_P[300] = 5.0
    for codec in (Int8(), Int4()):
        assert torch.equal(coded_and_back(codec, x_P)[1], x_P)


def test_the_largest_number_stays_finite_in_blocks():
    x_P = torch.full((300,), torch.finfo(torch.float32).max)
    for codec in (Int8(), Int4()):
        out_P = coded_and_back(codec, x_P)[1]
        assert bool(out_P.isfinite().all())
        assert torch.allclose(out_P, x_P, rtol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_scale_that_cannot_be_is_refused(value):
    for codec in (Int8(), Int4()):
        coded = codec.encode(gauss(300), {}, 0)
        coded.data_B[8:12] = torch.tensor([value]).view(torch.uint8)
        with pytest.raises(FrameError, match="scale"):
            codec.decode(coded)


def test_sizes_are_those_of_the_docstring():
    assert coded_and_back(Int8(), gauss(1024))[0].size_bytes == 8 + 4 * 4 + 1024
    assert coded_and_back(Int4(), gauss(1025))[0].size_bytes == 8 + 4 * 17 + 513
    assert coded_and_back(Fp16(), gauss(1024))[0].size_bytes == 8 + 2048
    assert coded_and_back(Bf16(), gauss(1024))[0].size_bytes == 2048


def test_bf16_is_that_of_torch_and_never_infinite():
    x_P = gauss(5000)
    assert torch.equal(coded_and_back(Bf16(), x_P)[1], x_P.bfloat16().float())
    x_P = torch.tensor([3.4028e38, -3.4028e38])
    largest = torch.finfo(torch.bfloat16).max
    assert coded_and_back(Bf16(), x_P)[1].tolist() == [largest, -largest]


@pytest.mark.parametrize("exponent", [-120, -40, 0, 40, 120])
def test_fp16_has_eleven_bits_at_any_scale(exponent):
    x_P = torch.rand(5000, generator=torch.Generator().manual_seed(1)) + 1.0
    x_P = x_P * 2.0**exponent
    out_P = coded_and_back(Fp16(), x_P)[1]
    assert float(((out_P - x_P).double() / x_P.double()).abs().max()) <= 2**-11


def test_fp16_keeps_what_is_far_below_the_largest():
    x_P = torch.tensor([1e6, 1e6 * 2.0**-28, -3.0])
    out_P = coded_and_back(Fp16(), x_P)[1]
    assert torch.allclose(out_P, x_P, rtol=2**-11, atol=0)


def test_fp16_refuses_a_scale_that_no_encoder_uses():
    coded = Fp16().encode(gauss(4), {}, 0)
    for exponent in (127, -114, 10**6):
        coded.data_B[:8] = torch.tensor([exponent]).view(torch.uint8)
        with pytest.raises(FrameError, match="scale"):
            Fp16().decode(coded)


def test_shorter_blocks_lose_less_where_scales_differ():
    x_P = gauss(100_000) ** 3
    lost = [float((coded_and_back(Int8(block=b), x_P)[1] - x_P).norm()) for b in (64, 256, 4096)]
    assert lost == sorted(lost)
