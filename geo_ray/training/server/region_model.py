"""A region's whole model over its shards: one `Shard` here, or several wherever they live.

Shape legend: P = parameters of the model, S = of one shard's slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from geo_ray.errors import InvariantError
from geo_ray.strategies.base import Outgoing, Reply, Wait
from geo_ray.training.compute.flat import fragments_in, split_sizes
from geo_ray.training.server.shard import Contribution


class ShardPort(Protocol):
    """What the lead asks of a shard: `Shard` itself, or calls to one that lives elsewhere."""

    def apply(
        self, contributions: Sequence[Contribution], *, measure: bool = False
    ) -> float | None:
        """See `Shard.apply`."""

    def outgoing(self) -> Outgoing | Wait | None:
        """See `Shard.outgoing`."""

    def finish(self) -> Outgoing | None:
        """See `Shard.finish`."""

    def merge(self, reply: Reply) -> None:
        """See `Shard.merge`."""

    def dropped(self) -> None:
        """See `Shard.dropped`."""

    def snapshot(self, checkpoint: int) -> None:
        """See `Shard.snapshot`."""


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
        found = [shard.apply(contributions, measure=measure) for shard in self._shards]
        known = [mean_sq for mean_sq in found if mean_sq is not None]
        return sum(known) if len(known) == len(found) else None

    def outgoing(self) -> Outgoing | Wait | None:
        """What the region says after a step, its payload joined to (P,)."""
        return self._join([shard.outgoing() for shard in self._shards])

    def finish(self) -> Outgoing | None:
        """The last word, joined to (P,)."""
        out = self._join([shard.finish() for shard in self._shards])
        return out if isinstance(out, Outgoing) else None

    def merge(self, reply: Reply) -> None:
        """Merge an answer whose payload is (P,)."""
        if len(self._shards) == 1:
            self._shards[0].merge(reply)
            return
        parts_S = torch.split(reply.payload_P, [sizes[reply.fragment] for sizes in self._sizes])
        for shard, part_S in zip(self._shards, parts_S, strict=True):
            shard.merge(replace(reply, payload_P=part_S))

    def dropped(self) -> None:
        """The last message will get no answer."""
        for shard in self._shards:
            shard.dropped()

    def snapshot(self, checkpoint: int) -> None:
        """Every shard takes its copy."""
        for shard in self._shards:
            shard.snapshot(checkpoint)

    def _join(self, parts: Sequence[Outgoing | Wait | None]) -> Outgoing | Wait | None:
        first = parts[0]
        if len(parts) == 1:
            return first
        if any(type(part) is not type(first) for part in parts):
            raise InvariantError(f"shards disagree on whether to speak: {parts}")
        outs = [part for part in parts if isinstance(part, Outgoing)]
        if not outs:
            return first
        payload_P = torch.cat([out.payload_P for out in outs])
        return Outgoing(payload_P, outs[0].wait, outs[0].fragment)
