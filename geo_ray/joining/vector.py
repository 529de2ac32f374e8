"""The part of a model that a rank exchanges, as one fp32 vector in host memory; its model buffers.

Shape legend: S = parameters that this rank exchanges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from geo_ray.base.errors import TaskOutputError, TaskStateError
from geo_ray.data.tasks.model_buffers import BufferEntry, BufferRule, state_of
from geo_ray.joining.layout import (
    Layout,
    Ranges,
    divided,
    held_ranges,
    is_dtensor,
    local_part,
    plain_name,
    positions,
    replicas_of,
    trained_parameters,
)
from geo_ray.training.messages import ReplyMessage
from geo_ray.training.model_buffers import RegionBuffers
from geo_ray.training.parameters import BufferLayout

_BUCKET: Final = 1 << 24  # elements of one broadcast


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive elements of a parameter's local part, and their place in the vector."""

    param: nn.Parameter
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class _Copies:
    """A parameter that several ranks hold; each of them exchanges a part of it.

    Attributes:
        param: the parameter.
        bounds: part of each replica, as ranges of the local part.
        group: process group of the replicas; None: all ranks of the member.
    """

    param: nn.Parameter
    bounds: tuple[Ranges, ...]
    group: dist.ProcessGroup | None


class ParameterVector:
    """Reads a rank's share of a module into a vector (S,), and writes the vector back.

    Between `read` and `write` the caller may change ``params_S`` in place. For parameters in bf16
    or fp16 the vector keeps the full precision: `read` adds the change of the module since `write`,
    so that rounding does not accumulate in the vector.

    Attributes:
        share: ranges of the vector of all parameters that this rank exchanges.

    Args:
        module: trained module.
        layout: its layout.
        group: process group of the member's ranks; None: there is one rank.

    Raises:
        TaskOutputError: the parameters are sharded in a way that is not supported.
    """

    def __init__(
        self, module: nn.Module, layout: Layout, group: dist.ProcessGroup | None = None
    ) -> None:
        rank = 0 if group is None else dist.get_rank(group)
        world_size = 1 if group is None else dist.get_world_size(group)
        self._group, self._world_size = group, world_size
        self._pieces: list[_Piece] = []
        self._copies: list[_Copies] = []
        share: list[tuple[int, int]] = []
        at = 0
        for index, param in enumerate(trained_parameters(module).values()):
            held = held_ranges(param, layout.start(index))
            replica, count = replicas_of(param, rank, world_size)
            own = divided(held, replica, count)
            for start, stop in positions(own, held):
                self._pieces.append(_Piece(param, start, stop, at))
                at += stop - start
            share += own
            if count > 1:
                parts = tuple(positions(divided(held, each, count), held) for each in range(count))
                self._copies.append(_Copies(param, parts, self._replica_group(param)))
        self.share: Ranges = _joined(share)
        self.size = at
        self._params_S: Tensor | None = None
        devices = {each.param.device for each in self._pieces}
        self._devices = tuple(device for device in devices if device.type == "cuda")
        self._exact = all(each.param.dtype == torch.float32 for each in self._pieces)

    def read(self) -> Tensor:
        """Return the present parameters, fp32 (S,), in memory that the next call reuses."""
        params_S = self._params_S
        is_first = params_S is None
        if params_S is None:
            params_S = torch.empty(self.size, pin_memory=self._pinned)
            self._params_S = params_S
        with torch.no_grad():
            for piece, local in self._locals():
                into = params_S[piece.at : piece.at + piece.stop - piece.start]
                if is_first or local.dtype == torch.float32:
                    into.copy_(local, non_blocking=self._pinned)
                else:
                    written = into.to(local.dtype)
                    into.add_(local.to(into.device).float() - written.float())
        self._await_copies()
        return params_S

    def part(self, ranges: Ranges) -> Tensor:
        """Return present parameters at some ranges of the vector, as a new tensor.

        The vector itself is not needed, and must have been released.
        """
        parts = []
        with torch.no_grad():
            for start, stop in ranges:
                for piece, local in self._locals(start, stop):
                    first, end = max(start, piece.at), min(stop, piece.at + local.numel())
                    parts.append(local[first - piece.at : end - piece.at])
            return torch.cat(parts) if parts else torch.empty(0)

    def write(self, params_S: Tensor) -> None:
        """Set the parameters of all replicas to a vector (S,); collective if there are replicas."""
        with torch.no_grad():
            if not self._exact and params_S is not self._params_S:  # such as a saved one
                if self._params_S is None:
                    self._params_S = torch.empty(self.size, pin_memory=self._pinned)
                self._params_S.copy_(params_S)
            for piece, local in self._locals():
                part_S = params_S[piece.at : piece.at + piece.stop - piece.start]
                if local.data_ptr() == 0 or not _is_view(local, piece.param):
                    whole = local_part(piece.param)
                    flat = whole.reshape(-1)
                    flat[piece.start : piece.stop].copy_(part_S)
                    whole.copy_(flat.view(whole.shape))
                else:
                    local.copy_(part_S, non_blocking=self._pinned)
            for copies in self._copies:
                _broadcast(copies, self._world_size)
        self._await_copies()

    def release(self) -> bool:
        """Free the vector, unless it is pinned or holds more precision than the module.

        Returns:
            Whether the vector is the caller's now, to be overwritten.
        """
        if self._exact and not self._pinned:
            self._params_S = None
        return self._params_S is None

    @property
    def _pinned(self) -> bool:
        return bool(self._devices)

    def _await_copies(self) -> None:
        """Wait for copies between GPUs and the vector, which may be changed in place after it.

        The parameters need not be on the current device.
        """
        for device in self._devices:
            torch.cuda.synchronize(device)

    def _locals(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[_Piece, Tensor]]:
        """Return pieces with elements at ``start`` to ``stop``, and their whole values."""
        stop = self.size if stop is None else stop
        for piece in self._pieces:
            if piece.at < stop and start < piece.at + piece.stop - piece.start:
                yield piece, local_part(piece.param).reshape(-1)[piece.start : piece.stop]

    def _replica_group(self, param: nn.Parameter) -> dist.ProcessGroup | None:
        if not is_dtensor(param):
            return self._group
        dims = [d for d, placement in enumerate(param.placements) if placement.is_replicate()]
        dims = [d for d in dims if param.device_mesh.size(d) > 1]
        if len(dims) != 1:
            raise TaskOutputError(
                f"a parameter is replicated over {len(dims)} dimensions of its device mesh",
                fix="Use one replicated dimension, as HSDP does.",
            )
        return param.device_mesh.get_group(dims[0])


@dataclass(slots=True)
class ModuleBuffers(RegionBuffers):
    """The model buffers of a rank: read when an update is sent, written after its answer.

    Every rank sends its own; those of a region's ranks are combined where the run is served.

    Attributes:
        module: the module that has them, without wrappers.
    """

    module: nn.Module = field(kw_only=True)

    @classmethod
    def of(cls, module: nn.Module, rules: Mapping[str, BufferRule] | None = None) -> Self | None:
        """Return the model buffers of a module; None if it has none.

        Args:
            module: trained module.
            rules: declared rules, by pattern of names (`geo_ray.data.tasks.model_buffers`).

        Raises:
            TaskStateError: a pattern matches nothing, or a value cannot be combined.
        """
        module = _unwrapped(module)
        layout = BufferLayout.of(rules or {}, module)
        if not layout.entries:
            return None
        tensors = state_of(module)
        for each in layout.entries:
            if is_dtensor(tensors[each.name]):
                raise TaskStateError(
                    f"buffers: '{each.name}' is sharded",
                    fix="Name only whole tensors, or use the rule scratch.",
                )
        return cls(layout, layout.read(module), module=module)

    @property
    def entries(self) -> tuple[BufferEntry, ...]:
        """Return a description that is equal in all ranks and regions."""
        return tuple(
            replace(
                each,
                name=plain_name(each.name),
                variance_of=None if each.variance_of is None else plain_name(each.variance_of),
            )
            for each in self.layout.entries
        )

    def by_name(self) -> dict[str, Tensor]:
        """Return the tensors of the module, by the names of `entries`."""
        tensors = state_of(self.module)
        return {plain_name(each.name): tensors[each.name] for each in self.layout.entries}

    def tensors(self) -> dict[str, Tensor]:
        """See `RegionBuffers.tensors`; at a barrier, where the present values are agreed."""
        self.present_B = self.agreed_B = self.layout.read(self.module)
        return RegionBuffers.tensors(self)

    def start(self, initial_B: Tensor) -> None:
        """Load the run's initial values but those of rule ``region``, uint8 (B,)."""
        exchanged_E = initial_B[: self.layout.exchanged_bytes].clone()
        self.layout.write(exchanged_E, self.module)
        self.present_B = self.layout.read(self.module)
        self.agreed_B = self.present_B

    def outgoing(self) -> Tensor:
        """See `RegionBuffers.outgoing`."""
        self.present_B = self.layout.read(self.module)
        return RegionBuffers.outgoing(self)

    def merge(self, reply: ReplyMessage) -> None:
        """See `RegionBuffers.merge`."""
        self.present_B = self.layout.read(self.module)
        RegionBuffers.merge(self, reply)
        self.layout.write(self.present_B, self.module)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """See `RegionBuffers.restore`."""
        RegionBuffers.restore(self, tensors)
        self.layout.write(self.present_B, self.module)


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the module in `DistributedDataParallel` and `torch.compile`."""
    while True:
        is_parallel = isinstance(module, DistributedDataParallel)
        inner = module.module if is_parallel else getattr(module, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def _is_view(part: Tensor, param: nn.Parameter) -> bool:
    return part.untyped_storage().data_ptr() == local_part(param).untyped_storage().data_ptr()


def _broadcast(copies: _Copies, world_size: int) -> None:
    """Give every replica the parts that the others have written."""
    group = copies.group
    whole = local_part(copies.param)
    flat = whole.reshape(-1)
    for replica, ranges in enumerate(copies.bounds):
        source = replica if group is None else dist.get_global_rank(group, replica)
        for start, stop in ranges:
            for first in range(start, stop, _BUCKET):
                dist.broadcast(flat[first : min(stop, first + _BUCKET)], source, group=group)
    if not _is_view(flat, copies.param):
        whole.copy_(flat.view(whole.shape))


def _joined(ranges: list[tuple[int, int]]) -> Ranges:
    """Merge neighbours."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)
