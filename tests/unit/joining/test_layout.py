"""The layout of a model, ranges of ranks, and slices that fit all regions."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from geo_ray.base.errors import ModelMismatchError, TaskOutputError
from geo_ray.joining.layout import (
    Layout,
    Parameter,
    Ranges,
    box_ranges,
    divided,
    positions,
    put,
    slices_of,
    taken,
)


def elements(ranges: Ranges) -> list[int]:
    return [i for start, stop in ranges for i in range(start, stop)]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.last = nn.Linear(3, 1).to(torch.bfloat16)


def test_a_tied_parameter_is_in_the_vector_once_and_a_frozen_one_is_not() -> None:
    layout = Layout.of(Tied())
    assert [p.name for p in layout.parameters] == ["embed.weight", "last.weight", "last.bias"]
    assert layout.size == 12 + 3 + 1
    assert layout.parameters[1].dtype == "bfloat16"
    assert layout.at(11) == "embed.weight"
    assert layout.at(12) == "last.weight"
    assert Layout.from_json(layout.to_json()) == layout


def test_names_do_not_contain_wrappers() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Sequential(nn.Linear(2, 2))

    assert Layout.of(Wrapped()) == Layout.of(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TaskOutputError, match=r"'weight' is torch\."):
        Layout.of(nn.Linear(2, 2, dtype=dtype))


def test_another_model_is_refused_by_name() -> None:
    ours, theirs = Layout.of(nn.Linear(4, 2)), Layout.of(nn.Linear(4, 3))
    with pytest.raises(
        ModelMismatchError, match=r"'weight' is float32 \[3, 4\] in region 'eu' and float32 \[2, 4"
    ):
        ours.check_same(theirs, "region 'eu'", "region 'us'")
    extra = Layout((*ours.parameters, Parameter("more", (1,), "float32")))
    with pytest.raises(ModelMismatchError, match=r"'more' is float32 \[1\] in x and absent in y"):
        ours.check_same(extra, "x", "y")
    swapped = Layout(ours.parameters[::-1])
    with pytest.raises(ModelMismatchError, match="another order"):
        ours.check_same(swapped, "x", "y")


@given(st.data())
def test_ranges_of_a_box_are_those_of_its_elements(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=0, max_size=4)))
    offset = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    extent = tuple(
        data.draw(st.integers(0, size - first)) for size, first in zip(shape, offset, strict=True)
    )
    start = data.draw(st.integers(0, 5))
    index = torch.arange(int(torch.tensor(shape).prod()) if shape else 1).reshape(shape) + start
    box = index[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))]
    found = box_ranges(shape, offset, extent, start)
    assert elements(found) == box.reshape(-1).tolist()
    assert all(b < c for (_, b), (c, _) in pairwise(found))  # joined


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 6))
def test_replicas_divide_their_ranges(lengths: list[int], count: int) -> None:
    ranges, at = [], 0
    for length in lengths:
        ranges.append((at, at + length))
        at += length + 2
    parts = [divided(tuple(ranges), index, count) for index in range(count)]
    assert [i for part in parts for i in elements(part)] == elements(tuple(ranges))
    sizes = [len(elements(part)) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def owners(draw: st.DrawFn, size: int) -> list[Ranges]:
    """Random ranks of a region, each with some of the elements."""
    world_size = draw(st.integers(1, 3))
    owner = draw(st.lists(st.integers(0, world_size - 1), min_size=size, max_size=size))
    found: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    for element, rank in enumerate(owner):
        ranges = found[rank]
        if ranges and ranges[-1][1] == element:
            ranges[-1] = (ranges[-1][0], element + 1)
        else:
            ranges.append((element, element + 1))
    return [tuple(ranges) for ranges in found]


@st.composite
def shared(draw: st.DrawFn) -> tuple[int, dict[str, list[Ranges]]]:
    size = draw(st.integers(1, 12))
    return size, {name: owners(draw, size) for name in ("ap", "eu", "us")}


@given(shared())
def test_slices_have_one_owner_in_each_region(
    case: tuple[int, dict[str, list[Ranges]]],
) -> None:
    size, shares = case
    layout = Layout((Parameter("w", (size,), "float32"),))
    slices = slices_of(layout, shares)
    assert sorted(i for each in slices for i in elements(each.ranges)) == list(range(size))
    for each in slices:
        for region, rank in each.owners.items():
            assert set(elements(each.ranges)) <= set(elements(shares[region][rank]))
    assert len({tuple(each.owners.items()) for each in slices}) == len(slices)  # as few as possible


@given(shared())
def test_slices_are_found_in_the_vector_of_their_owner(
    case: tuple[int, dict[str, list[Ranges]]],
) -> None:
    size, shares = case
    whole = torch.arange(size)
    for each in slices_of(Layout((Parameter("w", (size,), "float32"),)), shares):
        for region, rank in each.owners.items():
            share = shares[region][rank]
            own = taken(whole, share)
            places = positions(each.ranges, share)
            assert taken(own, places).tolist() == elements(each.ranges)
            back = torch.zeros(len(own), dtype=torch.long)
            put(back, places, torch.tensor(elements(each.ranges)))
            assert back[back != 0].tolist() == [i for i in elements(each.ranges) if i]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([((0, 3),), ((4, 6),)], "no rank exchanges a part of 'b'"),
        ([((0, 4),), ((2, 6),)], "rank 1 and another exchange a part of 'a'"),
        ([((0, 5),)], "no rank exchanges a part of 'b'"),
    ],
)
def test_gaps_and_overlaps_name_the_parameter(ranks: list[Ranges], message: str) -> None:
    layout = Layout((Parameter("a", (3,), "float32"), Parameter("b", (3,), "float32")))
    with pytest.raises(ModelMismatchError, match=f"region 'eu': {message}"):
        slices_of(layout, {"eu": ranks})


def test_flat_parameters_are_refused() -> None:
    """FSDP1 needs a process group; what counts is the class of a module inside."""
    inner = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(inner)
    with pytest.raises(TaskOutputError, match="FullyShardedDataParallel") as caught:
        Layout.of(nn.Sequential(nn.Linear(2, 2), inner))
    assert "fully_shard" in str(caught.value.fix)
