"""Layout of a model over the ranks of regions, which may have different shardings.

All trained parameters form one vector of P elements, in the order of the module's names. A tied
parameter is in it once, a frozen one is not. Every rank of a region holds some ranges of the vector
(`held_ranges`), and exchanges its *share* of them: ranks that hold the same range divide it.

Ranges of different regions need not match, because regions may have other world sizes or
shardings. `slices_of` cuts the vector at the boundaries of all regions. A *slice* consists of all
ranges that have the same owner in every region, so that each rank exchanges whole slices.

Shape legend: P = trained parameters of the model.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING, Final, Self, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn

from geo_ray.base.errors import CheckpointMismatchError, ModelMismatchError, TaskOutputError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Ascending, disjoint ranges ``(start, stop)`` of the vector of all parameters."""

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_WRAPPERS: Final = re.compile(r"(^|(?<=\.))(_orig_mod|module|_fsdp_wrapped_module)\.")
_MOST_NAMES: Final = 3


@dataclass(frozen=True, slots=True)
class Parameter:
    """One trained parameter.

    Attributes:
        name: its name in the module, without the prefixes of wrappers.
        shape: whole shape, also if it is sharded.
        dtype: such as ``bfloat16``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """The trained parameters of a model in order; equal in all regions and ranks of a run.

    Attributes:
        parameters: the parameters.
    """

    parameters: tuple[Parameter, ...]
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        starts = [0]
        for each in self.parameters:
            starts.append(starts[-1] + each.size)
        object.__setattr__(self, "_starts", tuple(starts))

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        """Return the layout of a module.

        Raises:
            TaskOutputError: nothing is trained, a parameter has another dtype than `DTYPES`, or
                the module is sharded by `FullyShardedDataParallel`.
        """
        if any(type(each).__name__ == "FullyShardedDataParallel" for each in module.modules()):
            raise TaskOutputError(
                "the model is sharded by FullyShardedDataParallel, whose flat parameters do not "
                "say what they contain",
                fix="Use FSDP2: torch.distributed.fsdp.fully_shard.",
            )
        found = []
        for name, param in trained_parameters(module).items():
            if param.dtype not in DTYPES:
                raise TaskOutputError(
                    f"parameter '{name}' is {param.dtype}",
                    fix="Train parameters in float32, bfloat16 or float16.",
                )
            found.append(Parameter(name, tuple(param.shape), str(param.dtype).split(".")[1]))
        if not found:
            raise TaskOutputError(
                "the model has no trained parameters",
                fix="Leave requires_grad of some parameters on.",
            )
        return cls(tuple(found))

    @property
    def size(self) -> int:
        """P."""
        return self._starts[-1]

    def start(self, index: int) -> int:
        """Return the position of a parameter in the vector."""
        return self._starts[index]

    def index(self, position: int) -> int:
        """Return the index of the parameter at a position of the vector."""
        return bisect_right(self._starts, position) - 1

    def at(self, position: int) -> str:
        """Return the name of the parameter at a position of the vector, for messages."""
        return self.parameters[self.index(position)].name

    def to_json(self) -> str:
        """Return the layout as text, for messages and checkpoints."""
        return json.dumps([[p.name, list(p.shape), p.dtype] for p in self.parameters])

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the result of `to_json`.

        Raises:
            ModelMismatchError: the text is no layout.
        """
        try:
            rows = json.loads(text)
            found = [
                Parameter(str(name), tuple(int(n) for n in shape), str(dtype))
                for name, shape, dtype in rows
            ]
            if any(n < 0 for each in found for n in each.shape):
                raise ValueError("a negative size")
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ModelMismatchError(f"a description of a model cannot be read: {error}") from None
        return cls(tuple(found))

    @property
    def digest(self) -> str:
        """SHA-256 of `to_json`."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def check_same(self, other: Layout, who: str, whose: str) -> None:
        """Refuse another model.

        Args:
            other: the layout of ``who``.
            who: such as ``region 'eu'``.
            whose: the owner of this layout.

        Raises:
            ModelMismatchError: names the first parameters that differ.
        """
        if other == self:
            return
        mine, theirs = ({p.name: p for p in each.parameters} for each in (self, other))
        wrong = []
        for name in [*mine, *(name for name in theirs if name not in mine)]:
            ours, its = mine.get(name), theirs.get(name)
            if ours != its:
                wrong.append(f"'{name}' is {_text(its)} in {who} and {_text(ours)} in {whose}")
        if not wrong:
            wrong = [f"the parameters of {who} have another order than those of {whose}"]
        more = f"; and {len(wrong) - _MOST_NAMES} more" if len(wrong) > _MOST_NAMES else ""
        raise ModelMismatchError("; ".join(wrong[:_MOST_NAMES]) + more)


def _text(parameter: Parameter | None) -> str:
    return "absent" if parameter is None else f"{parameter.dtype} {list(parameter.shape)}"


def plain_name(name: str) -> str:
    """Return the name of a parameter or buffer without the names of wrappers."""
    return _WRAPPERS.sub("", name)


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name, a tied one once, without the names of wrappers."""
    return {
        plain_name(name): param for name, param in module.named_parameters() if param.requires_grad
    }


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a `DTensor`.

    Processes without any do not load the module, which takes 60 MB.
    """
    loaded = sys.modules.get("torch.distributed.tensor")
    kind: type | None = getattr(loaded, "DTensor", None)
    return kind is not None and isinstance(value, kind)


def local_part(param: Tensor) -> Tensor:
    """Return what this process holds of a parameter, for reading and writing in place."""
    local = param.to_local() if is_dtensor(param) else param
    return local.detach()


def held_ranges(param: Tensor, start: int) -> Ranges:
    """Return the ranges of the vector that this process holds of a parameter.

    They have the order of the local part's elements.

    Args:
        param: a parameter, sharded or not.
        start: position of the parameter in the vector.

    Raises:
        TaskOutputError: the parameter is sharded in a way that is not supported.
    """
    if not is_dtensor(param):
        return ((start, start + param.numel()),) if param.numel() else ()
    if any(placement.is_partial() for placement in param.placements):
        raise TaskOutputError(
            f"a parameter has the placement {param.placements}",
            fix="Parameters may be sharded or replicated, not partial.",
        )
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )
    return box_ranges(tuple(param.shape), tuple(offset), tuple(shape), start)


def box_ranges(
    shape: tuple[int, ...], offset: tuple[int, ...], extent: tuple[int, ...], start: int = 0
) -> Ranges:
    """Return the ranges of a box in a tensor that is stored row by row.

    Args:
        shape: shape of the whole tensor.
        offset: first index of the box in each dimension.
        extent: size of the box in each dimension.
        start: position of the tensor in the vector.
    """
    if prod(extent) == 0:
        return ()
    whole = len(shape)  # the dimensions from here on are complete
    while whole > 0 and extent[whole - 1] == shape[whole - 1]:
        whole -= 1
    run_dim = max(0, whole - 1)
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    length = prod(extent[run_dim:]) if shape else 1
    found: list[tuple[int, int]] = []
    for index in product(*(range(offset[d], offset[d] + extent[d]) for d in range(run_dim))):
        at = start + sum(i * strides[d] for d, i in enumerate(index))
        at += offset[run_dim] * strides[run_dim] if shape else 0
        if found and found[-1][1] == at:
            found[-1] = (found[-1][0], at + length)
        else:
            found.append((at, at + length))
    return tuple(found)


def replicas_of(param: Tensor, rank: int, world_size: int) -> tuple[int, int]:
    """Return which replica of its part this process holds, and how many there are.

    A plain parameter is replicated on all ranks, as under DistributedDataParallel. A `DTensor` is
    replicated over the dimensions of its mesh with the placement `Replicate`.
    """
    if not is_dtensor(param):
        return rank, world_size
    index, count = 0, 1
    coordinate = param.device_mesh.get_coordinate() or [0] * param.device_mesh.ndim
    for dim, placement in enumerate(param.placements):
        if placement.is_replicate():
            size = param.device_mesh.size(dim)
            index, count = index * size + coordinate[dim], count * size
    return index, count


def divided(ranges: Ranges, index: int, count: int) -> Ranges:
    """Return part ``index`` of ``count`` nearly equal parts of some ranges."""
    total = sum(stop - start for start, stop in ranges)
    first, last = total * index // count, total * (index + 1) // count
    found, at = [], 0
    for start, stop in ranges:
        a, b = max(first, at), min(last, at + stop - start)
        if a < b:
            found.append((start + a - at, start + b - at))
        at += stop - start
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Slice:
    """Ranges of the vector that have the same owner in every region.

    Attributes:
        ranges: the ranges.
        owners: the rank that exchanges it, by region.
        holder: number of the process that has its averager.
    """

    ranges: Ranges
    owners: Mapping[str, int]
    holder: int = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(stop - start for start, stop in self.ranges)


def holder_starts(layout: Layout, count: int) -> tuple[int, ...]:
    """Divide the vector among the processes that hold the averagers.

    Each holds one range. Where possible, it begins at a row of a parameter, so that codecs that
    compress matrices find complete rows.

    Args:
        layout: the model.
        count: number of processes.

    Returns:
        First position of each process; the first one is 0.

    Raises:
        ModelMismatchError: there are more processes than elements.
    """
    if count > layout.size:
        raise ModelMismatchError(
            f"the model has {layout.size} trained elements, which cannot be divided among "
            f"{count} holders",
            fix="Set a smaller `serve.holders`.",
        )
    starts = [0]
    for holder in range(1, count):
        even = layout.size * holder // count
        index = layout.index(even)
        first, row = layout.start(index), prod(layout.parameters[index].shape[1:])
        start = first + (even - first) // row * row
        starts.append(start if start > starts[-1] else max(even, starts[-1] + 1))
    return tuple(starts)


def holder_ranges(layout: Layout, count: int) -> list[tuple[int, int]]:
    """Return the range of each process; see `holder_starts`."""
    starts = holder_starts(layout, count)
    return list(zip(starts, (*starts[1:], layout.size), strict=True))


def holder_of(starts: Sequence[int], ranges: Ranges) -> int:
    """Return the number of the process that holds a slice; ``starts``: see `holder_starts`."""
    return bisect_right(starts, ranges[0][0]) - 1 if ranges else 0


def slices_of(
    layout: Layout, shares: Mapping[str, Sequence[Ranges]], starts: Sequence[int] = (0,)
) -> tuple[Slice, ...]:
    """Cut the vector so that each rank of each region exchanges whole slices.

    Args:
        layout: the model.
        shares: ranges that each rank exchanges, by region.
        starts: first position of each process that holds averagers (`holder_starts`).

    Returns:
        The slices, in the order of their first elements.

    Raises:
        ModelMismatchError: the ranks of a region do not cover the model exactly once.
    """
    owned: dict[str, list[tuple[int, int, int]]] = {}
    cuts = {0, layout.size, *starts}
    for region, ranks in shares.items():
        rows = sorted((a, b, rank) for rank, ranges in enumerate(ranks) for a, b in ranges)
        at = 0
        for a, b, rank in rows:
            if a != at:
                who = "no rank exchanges" if a > at else f"rank {rank} and another exchange"
                place = layout.at(min(a, at))
                raise ModelMismatchError(f"region '{region}': {who} a part of '{place}'")
            cuts.update((a, b))
            at = b
        if at != layout.size:
            raise ModelMismatchError(
                f"region '{region}': no rank exchanges a part of '{layout.at(at)}'"
                if at < layout.size
                else f"region '{region}': its ranks exchange more than the model"
            )
        owned[region] = rows
    bounds = sorted(cuts)
    regions = sorted(owned)
    places = dict.fromkeys(regions, 0)
    found: dict[tuple[int, tuple[int, ...]], list[tuple[int, int]]] = {}
    for a, b in pairwise(bounds):
        for region in regions:
            while owned[region][places[region]][1] <= a:
                places[region] += 1
        owners = tuple(owned[r][places[r]][2] for r in regions)
        ranges = found.setdefault((bisect_right(starts, a) - 1, owners), [])
        if ranges and ranges[-1][1] == a:
            ranges[-1] = (ranges[-1][0], b)
        else:
            ranges.append((a, b))
    return tuple(
        Slice(tuple(ranges), dict(zip(regions, ranks, strict=True)), holder)
        for (holder, ranks), ranges in found.items()
    )


def shapes_in(layout: Layout, ranges: Ranges) -> list[tuple[int, ...]]:
    """Return the shapes of the parts of parameters in some ranges, in their order.

    Complete rows of a parameter keep its shape, for codecs that compress matrices.
    """
    found: list[tuple[int, ...]] = []
    for start, stop in ranges:
        while start < stop:
            index = layout.index(start)
            parameter, first = layout.parameters[index], layout.start(index)
            end = min(stop, first + parameter.size)
            row = prod(parameter.shape[1:])
            is_rows = len(parameter.shape) > 1 and not (
                (start - first) % row or (end - start) % row
            )
            rows = (end - start) // row
            found.append((rows, *parameter.shape[1:]) if is_rows else (end - start,))
            start = end
    return found


def positions(part: Ranges, whole: Ranges) -> Ranges:
    """Return where ranges lie in the vector that consists of other ranges, joined.

    Args:
        part: ranges that are all in ``whole``.
        whole: the ranges of the vector.
    """
    starts, at = [], 0
    for start, stop in whole:
        starts.append(at)
        at += stop - start
    found: list[tuple[int, int]] = []
    firsts = [start for start, _ in whole]
    for start, stop in part:
        index = bisect_right(firsts, start) - 1
        while start < stop:
            a, b = whole[index]
            end = min(stop, b)
            here = (starts[index] + start - a, starts[index] + end - a)
            if found and found[-1][1] == here[0]:
                found[-1] = (found[-1][0], here[1])
            else:
                found.append(here)
            start, index = end, index + 1
    return tuple(found)


def taken(vector: Tensor, places: Ranges) -> Tensor:
    """Return the elements of a vector at some places; a view if they are one range."""
    parts = [vector[start:stop] for start, stop in places]
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else vector[:0]


def within(places: Ranges, start: int, stop: int) -> Ranges:
    """Return the places of elements ``start`` to ``stop`` of those at ``places``."""
    found, at = [], 0
    for first, end in places:
        low, high = max(first, first + start - at), min(end, first + stop - at)
        if low < high:
            found.append((low, high))
        at += end - first
    return tuple(found)


def put(vector: Tensor, places: Ranges, values: Tensor) -> None:
    """Set the elements of a vector at some places."""
    at = 0
    for start, stop in places:
        vector[start:stop].copy_(values[at : at + stop - start])
        at += stop - start


def gathered(pieces: Sequence[tuple[Ranges, Tensor]], ranges: Ranges) -> Tensor:
    """Return the elements at some ranges of the model from vectors that have other ranges of it.

    Args:
        pieces: disjoint ranges, and the vector with their elements.
        ranges: wanted ranges.

    Raises:
        CheckpointMismatchError: some are in no piece.
    """
    found = torch.empty(sum(stop - start for start, stop in ranges))
    missing = found.numel()
    for have, values in pieces:
        both = common(have, ranges)
        if both:
            put(found, positions(both, ranges), taken(values, positions(both, have)))
            missing -= sum(stop - start for start, stop in both)
    if missing:
        raise CheckpointMismatchError(
            f"{missing} of {found.numel()} elements of the model are not in the checkpoint"
        )
    return found


def common(a: Ranges, b: Ranges) -> Ranges:
    """Return the ranges that are in both."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            found.append((start, stop))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a module saves, by name without the prefixes of wrappers."""
    found = {}
    for prefix, part in module.named_modules():
        kept = part._non_persistent_buffers_set
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in kept:
                found[_WRAPPERS.sub("", f"{prefix}.{name}" if prefix else name)] = buffer
    return found
