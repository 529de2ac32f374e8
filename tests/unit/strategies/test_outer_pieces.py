"""The outer step goes through a large model piece by piece: the bits are those of one pass each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from geo_ray.base.memory import ReusedMemory
from geo_ray.strategies import local_steps, outer
from geo_ray.strategies.outer import (
    OneOuter,
    OuterAdam,
    OuterNesterov,
    OuterSgd,
    outer_change,
    outer_round,
)
from geo_ray.strategies.state import AveragerState, RegionState, Reply, Update

REGIONS = ("east", "north", "west")
SIZES = (1, 37, outer._PIECE, outer._PIECE + 1, 5 * outer._PIECE + 4711)


def rounds(config: OneOuter, size: int, averager: AveragerState) -> list[Tensor]:
    """What three rounds answer."""
    generator = torch.Generator().manual_seed(size)
    answers = []
    for _ in range(3):
        updates = [
            Update(region, torch.randn(size, generator=generator), 1 + rows)
            for rows, region in enumerate(REGIONS)
        ]
        replies = outer_round(averager, updates, "samples", config)
        answers.append(replies[0].payload_P.clone())
    return answers


@pytest.mark.parametrize("config", [OuterSgd(lr=0.7), OuterNesterov(), OuterAdam()])
@pytest.mark.parametrize("size", SIZES)
def test_pieces_give_the_bits_of_the_whole(
    config: OneOuter, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = AveragerState(REGIONS, allocate=ReusedMemory().tensor)
    found = rounds(config, size, pieces)
    delta_P = torch.randn(size)
    found.append(outer_change(config, pieces, delta_P))
    monkeypatch.setattr(outer, "_PIECE", 2**40)
    whole = AveragerState(REGIONS)
    expected = rounds(config, size, whole)
    expected.append(outer_change(config, whole, delta_P))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert pieces.numbers == whole.numbers and pieces.memory.keys() == whole.memory.keys()
    assert all(torch.equal(pieces.memory[name], whole.memory[name]) for name in whole.memory)


def test_an_answer_lies_where_the_one_before_lay_once_nobody_holds_that() -> None:
    size = 2**18
    averager = AveragerState(("here",), allocate=ReusedMemory().tensor)

    def answer() -> Tensor:
        update = Update("here", torch.randn(size), 1)
        return outer_round(averager, [update], "uniform", OuterNesterov())[0].payload_P

    first_P = answer()
    at, bits = first_P.data_ptr(), first_P.clone()
    second_P = answer()
    assert second_P.data_ptr() != at and torch.equal(first_P, bits)
    del first_P
    assert answer().data_ptr() == at


@pytest.mark.parametrize("size", SIZES)
def test_a_region_adopts_the_outer_model(size: int) -> None:
    params_P, change_P = torch.randn(size), torch.randn(size)
    region = RegionState(params_P, lambda grad_P: None)
    anchor_P = local_steps.anchor(region).clone()
    params_P.add_(1.0)
    local_steps.adopt(region, Reply("here", change_P, 1))
    assert torch.equal(local_steps.anchor(region), anchor_P - change_P)
    assert torch.equal(region.params_P, anchor_P - change_P)
    for wrong in (size + 1, size + outer._PIECE):
        with pytest.raises((RuntimeError, ValueError)):
            local_steps.adopt(region, Reply("here", torch.ones(wrong), 1))


@pytest.mark.parametrize("config", [OuterSgd(lr=0.7), OuterNesterov(), OuterAdam()])
@pytest.mark.parametrize("size", SIZES)
def test_the_answer_may_have_the_memory_of_an_update(config: OneOuter, size: int) -> None:
    own, reused = AveragerState(REGIONS), AveragerState(REGIONS, reuses_updates=True)
    expected, found = rounds(config, size, own), rounds(config, size, reused)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(reused.memory[name], own.memory[name]) for name in own.memory)
    updates = [Update(region, torch.ones(size), 1) for region in REGIONS]
    (reply, *_) = outer_round(reused, updates, "samples", config)
    assert reply.payload_P is updates[0].payload_P
