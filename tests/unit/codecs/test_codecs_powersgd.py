"""Low rank: what is sent for which matrix, and that it turns towards what is strong."""

from __future__ import annotations

import pytest
import torch

from geo_ray.base.errors import FrameError
from geo_ray.codecs.base import Coded
from geo_ray.codecs.buffers import header, joined
from geo_ray.codecs.powersgd import MatrixPart, PowerSgd, parts_of


def gauss(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def lost(codec: PowerSgd, x_P: torch.Tensor, memory: dict, seed: int = 0) -> float:
    return float((codec.decode(codec.encode(x_P, memory, seed)) - x_P).norm() / x_P.norm())


@pytest.mark.parametrize("rank", [1, 3])
def test_a_matrix_of_low_rank_comes_back_at_once(rank):
    x_P = (gauss(60, rank) @ gauss(rank, 40, seed=1)).reshape(-1)
    assert lost(PowerSgd(rank=rank, shapes=((60, 40),)), x_P, {}) < 1e-5


def test_a_warm_start_reaches_the_best_there_is():
    u, _ = torch.linalg.qr(gauss(60, 40))
    v, _ = torch.linalg.qr(gauss(40, 40, seed=1))
    values = torch.logspace(1, -2, 40)
    x_P = (u * values @ v.T).reshape(-1)
    best = float(values[3:].norm() / values.norm())
    codec, memory = PowerSgd(rank=3, shapes=((60, 40),)), {}
    found = [lost(codec, x_P, memory) for _ in range(30)]
    assert found[0] > best * 1.05
    assert found[-1] == pytest.approx(best, rel=1e-3)


def test_the_seed_decides_the_first_start_only():
    codec, memories = PowerSgd(rank=1, shapes=((50, 50),)), ({}, {})
    x_P = gauss(2500)
    first = [codec.encode(x_P, memory, seed) for seed, memory in enumerate(memories)]
    assert not torch.equal(first[0].data_B, first[1].data_B)
    memory = {name: value.clone() for name, value in memories[0].items()}
    again = [codec.encode(x_P, kept, seed) for seed, kept in ((5, memories[0]), (6, memory))]
    assert torch.equal(again[0].data_B, again[1].data_B)


def test_a_direction_that_is_lost_is_drawn_anew():
    codec, memory = PowerSgd(rank=2, shapes=((50, 40),)), {}
    codec.encode(gauss(2000), memory, 0)
    assert not codec.decode(codec.encode(torch.zeros(2000), memory, 1)).any()
    assert memory == {}
    x_P = (gauss(50, 2) @ gauss(2, 40, seed=1)).reshape(-1)
    assert lost(codec, x_P, memory, seed=2) < 1e-5


def test_shapes_are_followed_in_order():
    codec = PowerSgd(rank=2, shapes=((30,), (30, 20), (64, 3, 3, 3), (5, 2), (7,)))
    parts = parts_of(30 + 600 + 1728 + 10 + 7, codec.shapes, 2)
    assert parts == [
        MatrixPart(1, 30, 0),
        MatrixPart(30, 20, 2),
        MatrixPart(64, 27, 2),
        MatrixPart(1, 17, 0),
    ]
    x_P = gauss(sum(part.num for part in parts))
    x_P[30:630] = (gauss(30, 2) @ gauss(2, 20, seed=1)).reshape(-1)
    memory: dict[str, torch.Tensor] = {}
    coded = codec.encode(x_P, memory, 0)
    assert coded.size_bytes == 16 + 24 * 4 + 4 * (30 + 2 * 50 + 2 * 91 + 17)
    out_P = codec.decode(coded)
    assert torch.equal(out_P[:30], x_P[:30]) and torch.equal(out_P[-17:], x_P[-17:])
    assert torch.allclose(out_P[30:630], x_P[30:630], atol=1e-4)
    assert {name: tuple(value.shape) for name, value in memory.items()} == {
        "q1": (20, 2),
        "q2": (27, 2),
    }


def test_shapes_of_another_model_are_refused():
    with pytest.raises(ValueError, match="600 elements, the vector 601"):
        PowerSgd(shapes=((30, 20),)).encode(gauss(601), {}, 0)


@pytest.mark.parametrize("num", [0, 1, 2, 100, 997, 10_000, 65_537, 999_983])
def test_without_shapes_the_vector_is_one_matrix_and_a_short_rest(num):
    parts = parts_of(num, (), 4)
    assert sum(part.num for part in parts) == num
    assert all(part.possible(64) for part in parts)
    if num >= 10_000:
        assert parts[0].rank == 4 and parts[0].rows <= parts[0].columns < 2 * parts[0].rows
        assert sum(part.num for part in parts[1:]) < parts[0].rows


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1.0, 1e30, 3e38])
def test_scale_changes_nothing_but_the_scale(scale):
    matrix = gauss(60, 2) @ gauss(2, 40, seed=1)
    x_P = (matrix / matrix.abs().max()).reshape(-1) * scale
    codec, memory = PowerSgd(rank=2, shapes=((60, 40),)), {}
    for _ in range(3):
        out_P = codec.decode(codec.encode(x_P, memory, 0)).double()
        assert bool(out_P.isfinite().all())
        tolerance = 1e-4 if scale > 1e-38 else 0.2  # below, numbers have few bits
        assert float((out_P - x_P).norm()) <= tolerance * float(x_P.double().norm())
        assert all(bool(value.isfinite().all()) for value in memory.values())


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([], id="none"),
        pytest.param([(10, 10, -1)], id="negative rank"),
        pytest.param([(10, 10, 11)], id="rank above size"),
        pytest.param([(-10, -10, 0)], id="negative sides"),
        pytest.param([(-1, 100, 0), (2, 100, 0)], id="negative and too many"),
        pytest.param([(2**62, 2**62, 0)], id="huge"),
        pytest.param([(10, 9, 0)], id="too few"),
    ],
)
def test_parts_that_cannot_be_are_refused(parts):
    numbers = [header(*part) for part in parts]
    coded = Coded("powersgd", 100, joined(header(len(parts), 0), *numbers, torch.zeros(100)))
    with pytest.raises(FrameError):
        PowerSgd().decode(coded)


def test_negative_and_huge_counts_of_parts_are_refused():
    for count in (-1, 2**60):
        with pytest.raises(FrameError):
            PowerSgd().decode(Coded("powersgd", 1, joined(header(count, 0), torch.zeros(100))))
