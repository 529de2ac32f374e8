"""Any state in any sharding comes back bit for bit in any other; the files alone contain it."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from geo_ray.base.canonical import canonical_json
from geo_ray.base.errors import CheckpointError
from geo_ray.joining.checkpoint import commit, load, write_part
from geo_ray.joining.checkpoint_manifest import (
    PartRecord,
    TensorChunk,
    TensorRecord,
    combine,
    decode_value,
    encode_value,
)
from tests.support.rank_checkpoint_support import as_rank, oracle, sharded

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
MESHES = ((1,), (2,), (3,), (4,), (5,), (2, 2), (2, 3), (3, 2))


@st.composite
def wholes(draw: st.DrawFn) -> dict[str, Tensor]:
    """Tensors of some shapes, with random bits."""
    seed = draw(st.integers(0, 999))
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        dtype = draw(st.sampled_from(TYPES))
        size = math.prod(shape) * dtype.itemsize
        bits = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        found[f"t{number}"] = bits.view(dtype).reshape(shape)
    return found


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[int | None]]]:
    """A mesh, and for each tensor the dimension that each dimension of the mesh divides."""
    mesh = draw(st.sampled_from(MESHES))
    choice = st.none() | st.integers(0, 2)
    return mesh, [[draw(choice) for _ in mesh] for _ in range(3)]


def placed(
    wholes: dict[str, Tensor], layout: tuple[tuple[int, ...], list[list[int | None]]]
) -> dict[str, Any]:
    """This rank's state: a plain tensor if nothing divides it."""
    mesh, dims = layout
    found: dict[str, Any] = {}
    for (name, whole), row in zip(wholes.items(), dims, strict=False):
        row = [None if d is None or d >= whole.dim() else d for d in row]
        if len(set(row)) < len(row):  # two divisions of one dimension: the first counts
            row = [d if d not in row[:n] else None for n, d in enumerate(row)]
        if all(d is None for d in row):
            found[name] = whole.clone()
        else:
            places: list[Placement] = [Replicate() if d is None else Shard(d) for d in row]
            found[name] = sharded(whole, mesh, places)
    return found


def bits(tensor: Any) -> list[int]:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    flat: list[int] = local.contiguous().reshape(-1).view(torch.uint8).tolist()
    return flat


@settings(deadline=None, max_examples=40)
@given(wholes(), layouts(), layouts(), st.sampled_from([40, 1 << 30]))
def test_any_sharding_comes_back_in_any_other(
    wholes: dict[str, Tensor],
    saved: tuple[tuple[int, ...], list[list[int | None]]],
    loaded: tuple[tuple[int, ...], list[list[int | None]]],
    file_bytes: int,
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = math.prod(saved[0])
        records: list[PartRecord] = []
        for rank in range(ranks):
            with as_rank(rank, ranks):
                state = {"m": placed(wholes, saved), "n": (1, 2.5)}
                records.append(write_part(state, folder, rank, ranks, file_bytes=file_bytes))
        # Every element is written once, whoever has it.
        manifest = commit(folder, records)
        stored = sum(info.bytes for info in manifest.files)
        written = [chunk for t in manifest.tensors.values() for chunk in t.chunks]
        assert len({(c.file, c.key) for c in written}) == len(written)
        assert stored == sum((folder / info.file).stat().st_size for info in manifest.files)
        assert {info.file for info in manifest.files} == {c.file for c in written}
        assert sum(len(record.files) for record in records) == len(manifest.files)

        found = oracle(folder)
        assert found["n"] == (1, 2.5)
        for key, whole in wholes.items():
            assert bits(found[f"m.{key}"]) == bits(whole)

        ranks = math.prod(loaded[0])
        for rank in range(ranks):
            with as_rank(rank, ranks):
                expected = placed(wholes, loaded)
                zeros = {key: torch.zeros_like(whole) for key, whole in wholes.items()}
                state = {"m": placed(zeros, loaded), "n": ()}
                load(state, folder)
                assert state["n"] == (1, 2.5)
                for key, tensor in expected.items():
                    assert bits(state["m"][key]) == bits(tensor)


Box = tuple[tuple[int, ...], tuple[int, ...]]


@st.composite
def divisions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and boxes that divide it, or nearly."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        at, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, size[dim]))
        boxes.append((at, (*size[:dim], cut, *size[dim + 1 :])))
        rest = (*size[:dim], size[dim] - cut, *size[dim + 1 :])
        boxes.append(((*at[:dim], at[dim] + cut, *at[dim + 1 :]), rest))
    for _ in range(draw(st.integers(0, 2))):  # damage
        at, size = boxes[draw(st.integers(0, len(boxes) - 1))]
        dim = draw(st.integers(0, len(shape) - 1))
        moved = (*at[:dim], at[dim] + draw(st.integers(-1, 1)), *at[dim + 1 :])
        grown = (*size[:dim], size[dim] + draw(st.integers(-1, 1)), *size[dim + 1 :])
        boxes[draw(st.integers(0, len(boxes) - 1))] = (moved, grown)
    return shape, boxes


@settings(max_examples=300)
@given(divisions(), st.data())
def test_a_checkpoint_is_complete_if_every_element_is_written_once(
    division: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = division
    ranks: list[list[TensorChunk]] = [[], []]
    for at, size in boxes:
        chunk = TensorChunk(file="f.safetensors", key="w", offsets=at, sizes=size)
        for rank in data.draw(st.sampled_from([[0], [1], [0, 1]])):  # replicas count once
            ranks[rank].append(chunk)
    records = [
        PartRecord(
            rank=rank,
            world_size=2,
            files=(),
            tensors={
                "w": TensorRecord(path=("w",), dtype="F32", shape=shape, chunks=tuple(chunks))
            },
            values={},
        )
        for rank, chunks in enumerate(ranks)
    ]
    times = torch.zeros(shape, dtype=torch.int64)
    is_inside = True
    for at, size in set(boxes):
        is_inside &= all(
            a >= 0 and n >= 0 and a + n <= extent
            for a, n, extent in zip(at, size, shape, strict=True)
        )
        if is_inside:
            times[tuple(slice(a, a + n) for a, n in zip(at, size, strict=True))] += 1
    if is_inside and bool((times == 1).all()):
        assert {(c.offsets, c.sizes) for c in combine(records).tensors["w"].chunks} == set(boxes)
    else:
        with pytest.raises(CheckpointError, match="tensor 'w'"):
            combine(records)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=200)
@given(VALUES)
@example([1, True, 1.0, -0.0, 5e-324, 1 << 70, "\0\u2028", {"tuple": [1]}, {"float": "nan"}])
def test_any_value_comes_back_with_its_types(value: Any) -> None:
    record = {
        "rank": 0,
        "world_size": 1,
        "files": [],
        "tensors": {},
        "values": {"k": {"path": ["k", 0], "value": encode_value("k", value)}},
    }
    read = PartRecord.from_json(canonical_json(record)).values["k"]  # type: ignore[arg-type]
    assert read.path == ("k", 0)
    assert repr(decode_value(read.value)) == repr(
        value
    )  # tells 1 from True and 1.0, and nan is nan
