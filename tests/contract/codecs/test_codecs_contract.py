"""Every codec keeps the same promises; new ones join through the registry."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from geo_ray.base.errors import FrameError
from geo_ray.codecs.base import Codec, Coded
from geo_ray.codecs.registry import CODECS, codec_of
from geo_ray.strategies.config import AnyCodec
from geo_ray.testing.codecs import CHECKS

MORE_OPTIONS = {
    "int8": [{"block": 16}, {"block": 4096}, {"block": 1000}],
    "int4": [{"block": 16}, {"block": 4096}, {"block": 1002}],
    "topk": [{"ratio": 0.3}, {"ratio": 1.0, "values": "fp16"}, {"ratio": 0.0001}],
    "chunked_topk": [{"keep": 4}, {"keep": 1024}],
    "randomk": [{"ratio": 1.0}, {"ratio": 0.25, "values": "fp16"}],
    "randomk_unbiased": [{"ratio": 1.0}, {"ratio": 0.25, "values": "fp16"}],
    "powersgd": [{"rank": 1}, {"rank": 16}],
    "bisparse": [{"ratio": 0.3, "momentum": 0.0}, {"ratio": 1.0, "values": "fp16"}],
}
CASES = [
    pytest.param(kind, options, id=f"{kind}-{i}")
    for kind in CODECS
    for i, options in enumerate([{}, *MORE_OPTIONS.get(kind, [])])
]
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]

# |decoded - x| over |x|, at most, for normal vectors. Without an entry: no worse than nothing.
BOUNDS = {"identity": 0.0, "nonzeros": 0.0, "fp16": 2**-11, "bf16": 2**-8}
BOUNDS |= {"int8": 0.02, "int4": 0.35}
GROWS = {"randomk_unbiased": 100.0}  # unbiased, so its variance is 1 / ratio

SIZES = [0, 1, 2, 3, 7, 15, 16, 17, 255, 257, 4095, 4096, 4097, 65535, 65537, 150_001]

each_codec = pytest.mark.parametrize(("kind", "options"), CASES)
each_device = pytest.mark.parametrize("device", DEVICES)


def build(kind: str, options: dict) -> Codec:
    return TypeAdapter(AnyCodec).validate_python({"kind": kind, **options})


def gauss(num: int, device: str = "cpu", seed: int = 0) -> Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed)).to(device)


def heavy(num: int, device: str = "cpu") -> Tensor:
    """Most elements are tiny, some are not, a third is zero."""
    x_P = gauss(num) ** 5
    x_P[::3] = 0.0
    return x_P.to(device)


def bits(x_P: Tensor) -> list[int]:
    return x_P.cpu().view(torch.int32).tolist()


def copied(memory: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in memory.items()}


def bound_of(codec: Codec) -> float:
    if codec.kind in GROWS:
        return GROWS[codec.kind]
    return BOUNDS.get(codec.kind, 1.0) + 1e-6 * (codec.kind not in ("identity", "nonzeros"))


@pytest.mark.parametrize("promise", CHECKS)
@each_codec
def test_every_promise_is_kept(kind, options, promise):
    CHECKS[promise](build(kind, options))


# ------------------------------------------------------------------ round trips


@each_device
@each_codec
@pytest.mark.parametrize("make", [gauss, heavy], ids=lambda make: make.__name__)
def test_what_comes_back_is_near(kind, options, make, device):
    codec = build(kind, options)
    for num in SIZES:
        x_P = make(num, device)
        coded = codec.encode(x_P, {}, 7)
        assert (coded.kind, coded.num) == (kind, num)
        out_P = codec.decode(coded)
        assert out_P.dtype == torch.float32 and out_P.shape == (num,) and out_P.is_cpu
        assert out_P.is_contiguous() and bool(out_P.isfinite().all())
        lost, had = float((out_P - x_P.cpu()).norm()), float(x_P.norm())
        if make is gauss:
            assert lost <= bound_of(codec) * had, num
        else:
            assert lost <= max(bound_of(codec), 1.0) * had * (1 + 1e-6), num


@each_device
@each_codec
def test_zeros_stay_zeros(kind, options, device):
    codec = build(kind, options)
    for num in SIZES:
        assert not codec.decode(codec.encode(torch.zeros(num, device=device), {}, 1)).any()


@each_device
@each_codec
def test_lossless_means_every_bit(kind, options, device):
    codec = build(kind, options)
    odd_P = torch.tensor([-0.0, 0.0, 1e-45, -1e-40, 3.4e38, -3.4e38, 1.5, 65520.0, 0.1])
    x_P = torch.cat([gauss(1001), odd_P.repeat(3), torch.zeros(77)]).to(device)
    same = bits(codec.decode(codec.encode(x_P, {}, 1))) == bits(x_P)
    if not codec.traits.lossy:
        assert same
        # and that is so for dense, sparse, and anything between
        for share in (0.0, 0.001, 0.05, 0.5, 1.0):
            there_P = torch.rand(9001, generator=torch.Generator().manual_seed(3)) < share
            x_P = (gauss(9001) * there_P).to(device)
            assert bits(codec.decode(codec.encode(x_P, {}, 1))) == bits(x_P)
    elif options.get("ratio") != 1.0 and codec.encode(x_P, {}, 1).lossy is None:
        assert not same, "a codec that loses nothing should say so"


@each_device
@each_codec
@pytest.mark.parametrize("scale", [3e38, 1e30, 1e-30, 1e-38, 1e-44])
def test_extreme_magnitudes_stay_finite(kind, options, scale, device):
    codec = build(kind, options)
    for num in (1, 5, 300, 5000):
        x_P = (gauss(num).clamp(-1, 1) * scale).to(device)
        x_P[0] = scale
        out_P = codec.decode(codec.encode(x_P, {}, 1)).double()
        if kind in GROWS:  # what it returns is larger than fp32 has room for
            continue
        assert bool(out_P.isfinite().all())
        x_P = x_P.cpu().double()
        # Where the numbers themselves have few bits, no more than that they do not blow up.
        bound = max(bound_of(codec), 0.02) if scale > 1e-35 else 1.01
        assert float((out_P - x_P).norm()) <= bound * float(x_P.norm()) + 1e-45 * num


@each_device
@each_codec
def test_a_single_outlier_survives(kind, options, device):
    codec = build(kind, options)
    if kind.startswith("randomk"):
        return  # they draw
    x_P = torch.full((9000,), 1e-3, device=device)
    x_P[4321] = -1e4
    assert float(codec.decode(codec.encode(x_P, {}, 1))[4321]) == pytest.approx(-1e4, rel=1e-2)


# ------------------------------------------------------------------ purity


@each_device
@each_codec
def test_the_same_input_gives_the_same_bytes(kind, options, device):
    codec = build(kind, options)
    memories: list[dict[str, Tensor]] = [{}, {}]
    for step in range(3):
        x_P = gauss(5003, device, seed=step)
        found = []
        for number, memory in enumerate(memories):
            torch.manual_seed(number)  # of no consequence
            before = torch.get_rng_state()
            found.append(codec.encode(x_P, memory, seed=step))
            assert torch.equal(torch.get_rng_state(), before), "the global random state changed"
        assert torch.equal(found[0].data_B, found[1].data_B)
        assert memories[0].keys() == memories[1].keys()
        assert all(torch.equal(value, memories[1][name]) for name, value in memories[0].items())
        first_P, second_P = codec.decode(found[0]), codec.decode(found[0])
        assert bits(first_P) == bits(second_P)


@each_device
@each_codec
def test_a_copied_memory_goes_on_with_the_same_bytes(kind, options, device):
    codec, memory = build(kind, options), {}
    for step in range(3):
        codec.encode(gauss(4321, device, seed=step), memory, step)
    again = copied(memory)
    for step in range(3, 6):
        x_P = gauss(4321, device, seed=step)
        assert torch.equal(
            codec.encode(x_P, memory, step).data_B, codec.encode(x_P, again, step).data_B
        )


@each_device
@each_codec
def test_the_input_stays_as_it_is(kind, options, device):
    codec, memory = build(kind, options), {}
    x_P = heavy(70_001, device)
    before_P = x_P.clone()
    for _ in range(3):
        codec.encode(x_P, memory, 1)
        assert torch.equal(x_P, before_P)
    places = {value.untyped_storage().data_ptr() for value in memory.values()}
    assert x_P.untyped_storage().data_ptr() not in places


@each_device
@each_codec
def test_any_layout_in_memory_gives_the_same_bytes(kind, options, device):
    codec = build(kind, options)
    wide = gauss(20_000, device)
    strided_P = wide[::3]
    expected = codec.encode(strided_P.clone(), {}, 1).data_B
    assert torch.equal(codec.encode(strided_P, {}, 1).data_B, expected)
    assert torch.equal(codec.encode(strided_P.clone().requires_grad_(), {}, 1).data_B, expected)
    shifted_P = wide[1:9000]
    assert torch.equal(
        codec.encode(shifted_P, {}, 1).data_B, codec.encode(shifted_P.clone(), {}, 1).data_B
    )


# ------------------------------------------------------------------ bytes


@each_device
@each_codec
def test_bytes_are_a_row_on_the_cpu_and_counted(kind, options, device):
    codec = build(kind, options)
    for num in SIZES:
        coded = codec.encode(gauss(num, device), {}, 1)
        assert coded.data_B.dtype == torch.uint8 and coded.data_B.dim() == 1
        assert coded.data_B.is_cpu and coded.data_B.is_contiguous()
        lossy = 0 if coded.lossy is None else coded.lossy.blocks_LK.numel()
        assert coded.size_bytes == coded.data_B.numel() + lossy
        # a scale per 16 elements, a header, and a block or chunk that is filled up
        assert coded.size_bytes <= 4 * num + 4 * num // 16 + 2200, "larger than without a codec"


@each_codec
def test_the_name_is_enough_to_decode(kind, options):
    codec = build(kind, options)
    for num in (0, 1, 17, 4097, 70_001):
        coded = codec.encode(gauss(num), {}, 1)
        assert bits(codec_of(kind).decode(coded)) == bits(codec.decode(coded))


def test_an_unknown_name_is_refused():
    with pytest.raises(FrameError, match="cannot read"):
        codec_of("gzip")


# ------------------------------------------------------------------ trouble


def decode_or_refuse(codec: Codec, coded: Coded) -> Tensor | None:
    """The only two things that may happen to bytes, whatever they are."""
    try:
        out_P = codec.decode(coded)
    except FrameError:
        return None
    assert out_P.dtype == torch.float32 and out_P.shape == (coded.num,)
    assert out_P.untyped_storage().nbytes() >= 4 * coded.num
    return out_P


@contextmanager
def little_memory(more_bytes: int) -> Iterator[None]:
    """Nothing may ask for more than this."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    old = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)


@each_codec
def test_numbers_that_lie_ask_for_no_memory(kind, options):
    codec = build(kind, options)
    lies = [-1, 0, 1, 2, 255, 4096, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63)]
    coded = codec.encode(heavy(5000), {}, 1)
    with little_memory(64 << 20):
        for word in range(min(coded.data_B.numel() // 8, 8)):
            for lie in lies:
                lying_B = coded.data_B.clone()
                lying_B[8 * word : 8 * word + 8] = torch.tensor([lie]).view(torch.uint8)
                decode_or_refuse(codec, replace(coded, data_B=lying_B))


@each_codec
def test_noise_is_refused_or_decodes_to_something(kind, options):
    codec = build(kind, options)
    generator = torch.Generator().manual_seed(11)
    with little_memory(64 << 20):
        for size in (0, 1, 8, 16, 24, 40, 64, 200, 5000):
            for num in (0, 1, 2, 50, 4097):
                noise_B = torch.randint(0, 256, (size,), generator=generator).to(torch.uint8)
                decode_or_refuse(codec, Coded(kind, num, noise_B))


@pytest.mark.parametrize("kind", CODECS)
def test_options_are_checked(kind):
    with pytest.raises(ValidationError):
        build(kind, {"unheard_of": 1})
    for name, values in {
        "ratio": (0.0, -0.1, 1.1, float("nan")),
        "block": (0, 8, 1 << 17),
        "keep": (0, 6, 4096),
        "rank": (0, 65),
        "momentum": (-0.1, 1.0),
        "values": ("fp64",),
    }.items():
        if name in CODECS[kind].model_fields:
            for value in values:
                with pytest.raises(ValidationError):
                    build(kind, {name: value})
