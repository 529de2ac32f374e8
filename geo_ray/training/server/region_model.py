"""A region's whole model over its shards: one `Shard` here, or several wherever they live.

Shape legend: P = parameters of the model, S = of one shard's slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar, TypeVarTuple

import torch
from torch import Tensor

from geo_ray.errors import InvariantError
from geo_ray.strategies.base import Outgoing, Reply, Wait
from geo_ray.training.compute.flat import fragments_in, split_sizes
from geo_ray.training.server.shard import Contribution, Shard

As = TypeVarTuple("As")
R = TypeVar("R")


class ShardPort(Protocol):
    """A shard: `Shard` itself, or what asks one that lives elsewhere."""

    def ask(self, operation: Callable[[Shard, *As], R], *arguments: *As) -> R:
        """Let the shard carry out one of its methods, as ``ask(Shard.merge, reply)``."""


class RegionModel:
    """Carries out each operation on all shards, cutting and joining payloads.

    Args:
        shards: in the order of their slices.
        num_params: P, so that replies can be cut.
        fragments: parts of the model that are sent one at a time.
    """

    def __init__(self, shards: Sequence[ShardPort], num_params: int, fragments: int = 1) -> None:
        self._shards = tuple(shards)
        slices = split_sizes(num_params, len(self._shards))
        self._sizes = [[b - a for a, b in fragments_in(num_params, fragments, s)] for s in slices]
        self.num_params = num_params

    def apply(
        self, contributions: Sequence[Contribution], *, measure: bool = False
    ) -> float | None:
        """One step on every shard.

        Returns:
            The squared norm of the mean gradient over all shards; None if not to be measured.
        """
        found = self._all(Shard.apply, contributions, measure)
        known = [mean_sq for mean_sq in found if mean_sq is not None]
        return sum(known) if len(known) == len(found) else None

    def outgoing(self) -> Outgoing | Wait | None:
        """What the region sends after a step, its payload joined to (P,)."""
        return self._join(self._all(Shard.outgoing))

    def finish(self) -> Outgoing | None:
        """The final update, joined to (P,)."""
        out = self._join(self._all(Shard.finish))
        return out if isinstance(out, Outgoing) else None

    def merge(self, reply: Reply) -> None:
        """Merge an answer whose payload is (P,)."""
        if len(self._shards) == 1:
            self._shards[0].ask(Shard.merge, reply)
            return
        parts_S = torch.split(reply.payload_P, [sizes[reply.fragment] for sizes in self._sizes])
        for shard, part_S in zip(self._shards, parts_S, strict=True):
            shard.ask(Shard.merge, replace(reply, payload_P=part_S))

    def snapshot(self, checkpoint: int) -> None:
        """Every shard takes its copy."""
        self._all(Shard.snapshot, checkpoint)

    def whole_params(self) -> Tensor:
        """The live parameters, fp32 (P,), not to be changed; a copy if there are several shards."""
        found = self._all(Shard.live_params)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _all(self, operation: Callable[[Shard, *As], R], *arguments: *As) -> list[R]:
        return [shard.ask(operation, *arguments) for shard in self._shards]

    def _join(self, parts: Sequence[Outgoing | Wait | None]) -> Outgoing | Wait | None:
        first = parts[0]
        if len(parts) == 1:
            return first
        if any(type(part) is not type(first) for part in parts):
            raise InvariantError(f"shards disagree on whether to send: {parts}")
        outs = [part for part in parts if isinstance(part, Outgoing)]
        if not outs:
            return first
        payload_P = torch.cat([out.payload_P for out in outs])
        return Outgoing(payload_P, outs[0].wait, outs[0].fragment)
