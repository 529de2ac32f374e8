"""A region's whole model over its shards: one `Shard` here, or several wherever they live.

Shape legend: P = parameters of the model, S = of one shard's slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar, TypeVarTuple

import torch
from torch import Tensor

from geo_ray.errors import InvariantError
from geo_ray.strategies.base import Outgoing, Reply, Wait
from geo_ray.training.compute.flat import fragments_in, split_sizes
from geo_ray.training.server.pulls import Change, OpenPulls
from geo_ray.training.server.shard import Contribution, Shard
from geo_ray.util.together import in_turn

As = TypeVarTuple("As")
R = TypeVar("R")


class ShardPort(Protocol):
    """A shard: `Shard` itself, or what asks one that lives elsewhere."""

    def ask(
        self, operation: Callable[[Shard, *As], R], *arguments: *As, change: Change | None = None
    ) -> R:
        """Let the shard carry out one of its methods, as ``ask(Shard.merge, reply)``.

        ``change`` is given if it may change the parameters, and there are other shards.
        """


class Concurrently(Protocol):
    """Makes some calls; all have ended when it returns, or raises what one of them raised."""

    def __call__(self, calls: Sequence[Callable[[], R]]) -> list[R]:
        """Their results, in their order."""


class RegionModel:
    """Carries out each operation on all shards, cutting and joining payloads.

    Attributes:
        pulls: what workers may fetch from the shards.

    Args:
        shards: in the order of their slices.
        num_params: P, so that replies can be cut.
        fragments: parts of the model that are sent one at a time.
        together: asks all shards; at the same time where they live in processes of their own.
    """

    def __init__(
        self,
        shards: Sequence[ShardPort],
        num_params: int,
        fragments: int = 1,
        together: Concurrently = in_turn,
    ) -> None:
        self._shards = tuple(shards)
        self._together = together
        self.pulls = OpenPulls()
        slices = split_sizes(num_params, len(self._shards))
        self._sizes = [[b - a for a, b in fragments_in(num_params, fragments, s)] for s in slices]
        self.num_params = num_params

    @property
    def is_cut(self) -> bool:
        """Whether there are several shards, from which a worker must fetch one version."""
        return len(self._shards) > 1

    def apply(
        self,
        contributions: Sequence[Contribution],
        *,
        measure: bool = False,
        most_norm: float | None = None,
        rate: float = 1.0,
    ) -> float | None:
        """One step on every shard.

        Args:
            contributions: who takes part.
            measure: look at the mean's norm.
            most_norm: largest norm of the mean gradient over all shards; it is made that short.
            rate: what the learning rate is multiplied by.

        Returns:
            The squared norm of the mean gradient over all shards, before it is made shorter; None
            if not to be measured.
        """
        scale = 1.0
        if most_norm is not None:
            parts = self._all(Shard.mean_sq, contributions)
            norm = math.sqrt(math.fsum(part for part in parts if part is not None))
            scale = most_norm / norm if norm > most_norm else 1.0
        found = self._change(Shard.apply, contributions, measure, scale, rate)
        known = [mean_sq for mean_sq in found if mean_sq is not None]
        return sum(known) if len(known) == len(found) else None

    def keep(self, share: int) -> None:
        """Every shard copies what was pushed for a share, whose place is needed."""
        self._all(Shard.keep, share)

    def outgoing(self) -> Outgoing | Wait | None:
        """What the region sends after a step, its payload joined to (P,)."""
        return self._join(self._change(Shard.outgoing))

    def finish(self) -> Outgoing | None:
        """The final update, joined to (P,)."""
        out = self._join(self._change(Shard.finish))
        return out if isinstance(out, Outgoing) else None

    def merge(self, reply: Reply) -> None:
        """Merge an answer whose payload is (P,)."""
        parts = [reply]
        if self.is_cut:
            sizes = [each[reply.fragment] for each in self._sizes]
            cut = torch.split(reply.payload_P, sizes)
            parts = [replace(reply, payload_P=part_S) for part_S in cut]
        change = self._next_change()
        pairs = zip(self._shards, parts, strict=True)
        asks = [partial(shard.ask, Shard.merge, part, change=change) for shard, part in pairs]
        self._together(asks)

    def snapshot(self, checkpoint: int) -> None:
        """Every shard takes its copy."""
        self._all(Shard.snapshot, checkpoint)

    def whole_params(self) -> Tensor:
        """The live parameters, fp32 (P,), not to be changed; a copy if there are several shards."""
        found = self._all(Shard.live_params)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _all(
        self, operation: Callable[[Shard, *As], R], *arguments: *As, change: Change | None = None
    ) -> list[R]:
        asks = [partial(each.ask, operation, *arguments, change=change) for each in self._shards]
        return self._together(asks)

    def _change(self, operation: Callable[[Shard, *As], R], *arguments: *As) -> list[R]:
        """The same for an operation that may change the parameters."""
        return self._all(operation, *arguments, change=self._next_change())

    def _next_change(self) -> Change | None:
        # One shard gives its parameters with its answer: nothing comes between.
        return self.pulls.change() if self.is_cut else None

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
