"""A model's parameters as one flat fp32 vector, and its model buffers as one vector of bytes.

Strategies, codecs and servers only see vectors. `pieces_of` splits a shard's slice at parameter
boundaries, so parameter groups get the same bits as torch's own optimizers. `BufferLayout` places
model buffers (running statistics, counters): floats are averaged by rows, variances by the law of
total variance, integers take the largest.

Shape legend: S = parameters in the slice; B = bytes of the whole vector; E = of what is
exchanged; F = floats.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor, nn

from geo_ray.base.errors import TaskOutputError, TaskStateError
from geo_ray.data.tasks.groups import GroupRun
from geo_ray.data.tasks.model_buffers import FLOATS, BufferEntry, buffer_entries, state_of

_VECTOR = 16  # floats in the widest register, 512 bits
_PIECE = 2**14  # elements whose squares fp32 sums up exactly enough


def count_parameters(module: nn.Module) -> int:
    """P: the number of trainable scalars of ``module``; a shared parameter counts once."""
    return sum(p.numel() for p in _trainable(module))


def parameter_shapes(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    """Shapes of all trainable parameters, in the order in which the vector holds them."""
    return tuple(tuple(p.shape) for p in _trainable(module))


def read_parameters(module: nn.Module) -> Tensor:
    """A copy of all trainable parameters as one fp32 vector (P,), in the module's order."""
    return torch.cat([p.detach().reshape(-1).float() for p in _trainable(module)]).cpu()


def write_parameters(module: nn.Module, params_P: Tensor) -> None:
    """Set the trainable parameters of ``module`` to ``params_P``, fp32 (P,)."""
    check_module(module)
    if params_P.shape != (count_parameters(module),):
        raise other_size(module, params_P)
    with torch.no_grad():
        sizes = [p.numel() for p in _trainable(module)]
        for param, part in zip(_trainable(module), torch.split(params_P, sizes), strict=True):
            param.copy_(part.view(param.shape))


def square_norm(x_P: Tensor) -> float:
    """Return the squared 2-norm of a contiguous fp32 vector (P,), in one pass.

    In fp32, the sum of ten million squares has an error of a thousandth, as much as the differences
    of norms from which gradient noise is computed. Therefore only short pieces are summed in fp32.
    """
    whole = x_P.numel() // _PIECE * _PIECE
    total = float(torch.linalg.vector_norm(x_P[whole:])) ** 2
    if whole:
        norms = torch.linalg.vector_norm(x_P[:whole].view(-1, _PIECE), dim=1).double()
        total += float(torch.dot(norms, norms))
    return total


def exact_square_norm(x_P: Tensor) -> float:
    """Return the squared 2-norm in fp64, so that sums over slices hardly depend on the slicing."""
    pieces = torch.split(x_P, _PIECE)
    return sum(float(torch.dot(piece.double(), piece.double())) for piece in pieces)


def check_module(module: nn.Module) -> None:
    """Refuse a module that cannot be trained as one flat fp32 vector.

    Raises:
        TaskOutputError: names the parameter.
    """
    trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    if not trainable:
        raise TaskOutputError(
            "model has no trainable parameters",
            fix="Leave requires_grad of some parameters on.",
        )
    for name, param in trainable:
        if param.dtype not in FLOATS:
            raise TaskOutputError(
                f"parameter '{name}' is {param.dtype}",
                fix="Make parameters of float32, bfloat16 or float16.",
            )


def split_sizes(num_params: int, num_shards: int) -> list[tuple[int, int]]:
    """Split P parameters into nearly equal contiguous slices.

    Slices begin at multiples of a vector register's length: the fused AdamW computes the remainder
    at a slice's end differently, and S shards would not give the bits of one.

    Returns:
        ``(start, stop)`` per shard.
    """
    step = _VECTOR if num_params >= num_shards * _VECTOR else 1
    inner = [num_params * i // num_shards // step * step for i in range(1, num_shards)]
    return list(pairwise([0, *inner, num_params]))


def fragment_bounds(num_params: int, fragments: int) -> list[tuple[int, int]]:
    """Return the positions of a model's fragments, as ``(start, stop)``.

    With several fragments, the last entry is the whole model, for the last exchange.
    """
    bounds = split_sizes(num_params, fragments)
    return bounds if fragments == 1 else [*bounds, (0, num_params)]


def fragments_in(
    num_params: int, fragments: int, piece: tuple[int, int]
) -> tuple[tuple[int, int], ...]:
    """Return the positions of the model's fragments in one shard's slice; possibly empty ranges.

    Args:
        num_params: P.
        fragments: number of fragments.
        piece: slice, as (start, stop).

    Returns:
        ``(start, stop)`` per entry of `fragment_bounds`, relative to the slice's start.
    """
    start, stop = piece
    bounds = fragment_bounds(num_params, fragments)
    return tuple(
        (min(max(a, start), stop) - start, max(min(b, stop), start) - start) for a, b in bounds
    )


def digest(params_P: Tensor) -> str:
    """SHA-256 of the parameters' bytes; equal digests mean equal models to the bit."""
    return hashlib.sha256(params_P.detach().cpu().contiguous().numpy().data).hexdigest()


def other_size(module: nn.Module, *vectors: Tensor) -> TaskOutputError:
    """The error for a module whose parameters do not fit ``vectors``."""
    sizes = " and ".join(str(vector.numel()) for vector in vectors)
    return TaskOutputError(
        f"model has {count_parameters(module)} parameters, the buffers hold {sizes}",
        fix="Let model(seed) make parameters of the same shapes wherever it is called.",
    )


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


BLOCK: Final = 64  # floats; a multiple of the elements that any vector loop processes at once


@dataclass(frozen=True, slots=True)
class GroupPiece:
    """Neighbouring elements of one parameter.

    Attributes:
        start: their first place in the slice.
        stop: one past their last.
        factors: of rate, decay and schedule.
        block: for a part of a block: length of the whole, and where in it the part begins.
        shape: shape of the parameter, if the piece is a whole one; else that of a vector.
        hidden: whether the piece is a whole hidden matrix.
        parameter: index of the parameter in the model.
    """

    start: int
    stop: int
    factors: tuple[float, float, float] = (1.0, 1.0, 1.0)
    block: tuple[int, int] | None = None
    shape: tuple[int, ...] = (-1,)
    hidden: bool = False
    parameter: int = 0


def pieces_of(runs: Sequence[GroupRun], piece: tuple[int, int]) -> tuple[GroupPiece, ...]:
    """The pieces of the slice of a model between two places; empty without groups."""
    first, last = piece
    found: list[GroupPiece] = []
    for parameter, run in enumerate(runs):
        start, stop = max(run.start, first), min(run.stop, last)
        if start < stop:
            found += [replace(each, parameter=parameter) for each in _cut(run, start, stop, first)]
    return tuple(found)


def _cut(run: GroupRun, start: int, stop: int, origin: int) -> list[GroupPiece]:
    """Parts of blocks at both ends, if they are parts, and whole blocks between them."""
    if (start, stop) == (run.start, run.stop):
        place = (start - origin, stop - origin)
        return [GroupPiece(*place, run.factors, shape=run.shape or (-1,), hidden=run.hidden)]
    edges = [start]
    begin = run.start - (run.start - start) // BLOCK * BLOCK  # of the first whole block
    end = stop if stop == run.stop else run.start + (stop - run.start) // BLOCK * BLOCK
    edges += [edge for edge in (begin, end) if start < edge < stop]
    edges = sorted({*edges, stop})
    return [
        GroupPiece(a - origin, b - origin, run.factors, _block(run, a, b))
        for a, b in pairwise(edges)
    ]


def _block(run: GroupRun, start: int, stop: int) -> tuple[int, int] | None:
    """The block that a piece is part of; None if the piece is whole blocks up to the end."""
    inside = (start - run.start) % BLOCK
    is_cut = stop < run.stop and (stop - run.start) % BLOCK > 0
    if not inside and not is_cut:
        return None
    first = start - inside
    return min(BLOCK, run.stop - first), inside


_LINE_BYTES = 64  # aligned, so that the parameters behind the vector begin on a cache line
_INTEGER_BYTES = 8


@dataclass(frozen=True)
class BufferLayout:
    """Layout of model buffers in a byte vector, and the rules that average several such vectors.

        | means of variances | those variances | other floats | integers | regional values |
          fp32                 fp32              fp32           int64      raw
        |------------------ exchanged between regions ------------------|

    Floats become the mean by rows. The variance of mixed groups is not the mean of variances: by
    the law of total variance it is ``sum_i q_i (v_i + (m_i - m)^2)``. Integers take the largest
    value.

    Shape legend: B = bytes of the whole vector; E = of what is exchanged; F = floats.

    Attributes:
        entries: model buffers.
    """

    entries: tuple[BufferEntry, ...]

    @classmethod
    def of(cls, task: object, module: nn.Module) -> BufferLayout:
        """Return the layout of a task's model; empty without model buffers.

        Args:
            task: the task, or the mapping that it would declare.
            module: its model.

        Raises:
            TaskStateError: see `buffer_entries`.
        """
        return cls(buffer_entries(task, module))

    @cached_property
    def _variances(self) -> tuple[BufferEntry, ...]:
        return tuple(entry for entry in self.entries if entry.variance_of is not None)

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        """First and last byte of every entry."""
        by_name = {entry.name: entry for entry in self.entries}
        means = [by_name[str(entry.variance_of)] for entry in self._variances]
        paired = {entry.name for entry in (*means, *self._variances)}
        shared = [e for e in self.entries if e.rule == "mean" and e.name not in paired]
        floats = [entry for entry in shared if entry.torch_dtype in FLOATS]
        integers = [entry for entry in shared if entry.torch_dtype not in FLOATS]
        retained = [entry for entry in self.entries if entry.rule == "region"]
        places, at = {}, 0
        for group, width in (([*means, *self._variances, *floats], 4), (integers, _INTEGER_BYTES)):
            at = _up(at, width)
            for entry in group:
                places[entry.name] = (at, at + width * entry.count)
                at += width * entry.count
        for entry in retained:
            at = _up(at, _INTEGER_BYTES)
            places[entry.name] = (at, at + entry.torch_dtype.itemsize * entry.count)
            at = places[entry.name][1]
        return places

    @cached_property
    def num_floats(self) -> int:
        """F: floats at the vector's beginning."""
        ends = [e for entry, (_, e) in self._with_places("mean") if entry.torch_dtype in FLOATS]
        return max(ends, default=0) // 4

    @cached_property
    def exchanged_bytes(self) -> int:
        """E: bytes at the beginning that regions exchange."""
        return max((stop for _, (_, stop) in self._with_places("mean")), default=0)

    @cached_property
    def size_bytes(self) -> int:
        """B: bytes of the vector, whole cache lines."""
        last = max((stop for _, stop in self._places.values()), default=0)
        return _up(last, _LINE_BYTES)

    @property
    def size_floats(self) -> int:
        """Length of the vector in front of the parameters, in fp32 values."""
        return self.size_bytes // 4

    def combine(self, vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Combine several vectors into one.

        Args:
            vectors: uint8 (B,) or (E,), all of one size; regional values are those of the first.
            weights: weight of each, not all 0.

        Returns:
            A new vector; identical to the input if there is only one.
        """
        first_B = vectors[0].clone()
        if len(vectors) == 1:
            return first_B
        total = sum(weights)
        fractions = [weight / total for weight in weights]
        stop = 4 * self.num_floats
        floats = [vector[:stop].view(torch.float32) for vector in vectors]
        mean_F = torch.mul(floats[0], fractions[0])
        for each_F, fraction in zip(floats[1:], fractions[1:], strict=True):
            mean_F.add_(each_F, alpha=fraction)
        count = sum(entry.count for entry in self._variances)
        if count:
            mean_M = mean_F[:count]
            for each_F, fraction in zip(floats, fractions, strict=True):
                mean_F[count : 2 * count].add_((each_F[:count] - mean_M).square(), alpha=fraction)
        first_B[:stop].view(torch.float32).copy_(mean_F)
        self._take_largest(first_B, vectors[1:])
        return first_B

    def renewed(self, mean_E: Tensor, fraction: float, sent_E: Tensor, now_B: Tensor) -> Tensor:
        """Return a region's vector after an exchange during which training continued.

        The region's contribution to the mean is as old as its request. It is replaced by the
        present values with the same weight.

        Args:
            mean_E: averager's answer.
            fraction: region's weight in it.
            sent_E: values that the region had sent.
            now_B: present values.
        """
        new_B = now_B.clone()
        sent, now = sent_E, now_B[: self.exchanged_bytes]
        new_B[: self.exchanged_bytes] = mean_E
        if torch.equal(sent, now):
            return new_B
        stop = 4 * self.num_floats
        new_F = new_B[:stop].view(torch.float32)
        new_F.add_(now[:stop].view(torch.float32) - sent[:stop].view(torch.float32), alpha=fraction)
        count = sum(entry.count for entry in self._variances)
        new_F[count : 2 * count].clamp_(min=0)  # not below by rounding
        self._take_largest(new_B, [now_B])
        return new_B

    def with_statistics(
        self, leader: str, vectors: Mapping[str, Tensor], rows: Mapping[str, float]
    ) -> Tensor:
        """A region's vector with means and variances over all regions.

        Args:
            leader: the region.
            vectors: uint8 (B,) by region.
            rows: weights of the regions.
        """
        new_B = vectors[leader].clone()
        stop = 8 * sum(entry.count for entry in self._variances)
        names = sorted(vectors)
        if stop and any(not torch.equal(vectors[n][:stop], new_B[:stop]) for n in names):
            weights = [rows.get(name, 1.0) for name in names]
            new_B[:stop] = self.combine([vectors[name] for name in names], weights)[:stop]
        return new_B

    def is_finite(self, vector: Tensor) -> bool:
        """Tell whether all averaged floats are finite."""
        floats_F = vector[: 4 * self.num_floats].view(torch.float32)
        return bool(torch.isfinite(floats_F).all())

    def read(self, module: nn.Module) -> Tensor:
        """The present values of a module as a vector, uint8 (B,)."""
        vector_B = torch.zeros(self.size_bytes, dtype=torch.uint8)
        self.read_into(module, vector_B)
        return vector_B

    def read_into(self, module: nn.Module, vector_B: Tensor) -> None:
        """Read the values of a module into an existing vector.

        Raises:
            TaskStateError: a value has another shape or type than at the start.
        """
        tensors = state_of(module)
        for entry, (start, stop) in self._with_places():
            tensor = tensors.get(entry.name)
            if tensor is None or _kind(tensor) != (entry.shape, entry.torch_dtype):
                found = "gone" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"
                raise TaskStateError(
                    f"the model's {entry.name!r} was {entry.dtype}{list(entry.shape)} and is "
                    f"{found} now",
                    fix="Keep shape and type of what `model_buffers` names.",
                )
            flat = vector_B[start:stop].view(self._dtype(entry))
            flat.copy_(tensor.detach().reshape(-1))

    def write(self, vector_B: Tensor, module: nn.Module) -> None:
        """Set a module's values from a vector, uint8 (B,), or (E,) without regional values."""
        tensors = state_of(module)
        for entry, (start, stop) in self._with_places():
            if stop <= vector_B.numel():
                flat = vector_B[start:stop].view(self._dtype(entry))
                with torch.no_grad():
                    tensors[entry.name].copy_(flat.view(entry.shape))

    def names(self) -> frozenset[str]:
        """Return the names of all entries."""
        return frozenset(self._places)

    def _take_largest(self, into: Tensor, others: Sequence[Tensor]) -> None:
        start = _up(4 * self.num_floats, _INTEGER_BYTES)
        if start >= self.exchanged_bytes:
            return
        largest = into[start : self.exchanged_bytes].view(torch.int64)
        for other in others:
            theirs = other[start : self.exchanged_bytes].view(torch.int64)
            largest.copy_(torch.maximum(largest, theirs))

    def _with_places(self, rule: str | None = None) -> list[tuple[BufferEntry, tuple[int, int]]]:
        wanted = [entry for entry in self.entries if rule in (None, entry.rule)]
        return [(entry, self._places[entry.name]) for entry in wanted]

    def _dtype(self, entry: BufferEntry) -> torch.dtype:
        if entry.rule == "region":
            return entry.torch_dtype
        return torch.float32 if entry.torch_dtype in FLOATS else torch.int64


def _kind(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


_LARGEST_UNIT: Final = 8  # no unit that could be divided has more than one part in so many
_LEAST_UNIT: Final = 200  # smaller modules are gathered with the whole model
_WHOLE: Final = (nn.MultiheadAttention,)  # reads parameters of its children directly


def units_of(model: nn.Module) -> list[str]:
    """Return the modules that FSDP2 gathers and frees together, besides the rest of the model.

    They are the largest modules with at most an eighth of the trained parameters each: usually the
    blocks of a transformer and its embeddings. The rest includes modules with less than 0.5 %, and
    modules whose parameters another one shares.
    """
    total = _numel(model)
    owners: dict[int, int] = {}
    for _, param in model.named_parameters(remove_duplicate=False):
        owners[id(param)] = owners.get(id(param), 0) + 1
    found: list[str] = []

    def visit(name: str, module: nn.Module) -> None:
        size = _numel(module)
        if size * _LEAST_UNIT < total:
            return
        own: dict[int, int] = {}
        for _, param in module.named_parameters(remove_duplicate=False):
            own[id(param)] = own.get(id(param), 0) + 1
        shares = any(owners[key] > count for key, count in own.items())
        children = list(module.named_children())
        is_leaf = not children or isinstance(module, _WHOLE)
        is_small = size * _LARGEST_UNIT <= total
        can_be = bool(name) and not shares and not isinstance(module, nn.ModuleList | nn.ModuleDict)
        if can_be and (is_leaf or is_small):
            found.append(name)
            return
        if not isinstance(module, _WHOLE):
            for child_name, child in children:
                visit(f"{name}.{child_name}" if name else child_name, child)

    visit("", model)
    return found


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters() if param.requires_grad)
