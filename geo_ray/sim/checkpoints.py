"""Checkpoints of a simulated run, kept in memory and never written."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from geo_ray.training.averager.averager_snapshot import AveragerSnapshot
from geo_ray.training.membership.newcomer import ShardState
from geo_ray.training.server.effects import Snapshot


@dataclass(slots=True)
class SimCheckpoint:
    """A checkpoint of a simulated run, kept in memory.

    Attributes:
        regions: the primary shard's part and the shards' parts by region.
        averager: the averager's part.
        is_whole: whether every part is here that was to come.
    """

    regions: dict[str, tuple[Snapshot, list[ShardState]]] = field(default_factory=dict)
    averager: AveragerSnapshot | None = None
    is_whole: bool = False

    @property
    def step(self) -> int:
        """The most steps that a region had applied."""
        return max(int(str(primary.control["version"])) for primary, _ in self.regions.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        tensors = [] if self.averager is None else list(self.averager.tensors.values())
        for primary, shards in self.regions.values():
            tensors += primary.tensors.values()
            tensors += [tensor for state, _ in shards for tensor in state.values()]
        return sum(tensor.nbytes for tensor in tensors)

    def close(self, members: Collection[str], *, has_averager: bool) -> bool:
        """Note whether it is whole by now; True once, when it has become so."""
        if self.is_whole or has_averager != (self.averager is not None):
            return False
        self.is_whole = set(self.regions) == set(members)
        return self.is_whole
