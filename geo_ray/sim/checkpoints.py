"""Checkpoints of a simulated run, kept in memory and never written."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from geo_ray.errors import InvariantError
from geo_ray.training.averager.averager_snapshot import AveragerSnapshot
from geo_ray.training.membership.newcomer import ShardState, rows_of
from geo_ray.training.server.effects import Snapshot


@dataclass(slots=True)
class SimCheckpoint:
    """One checkpoint.

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

    def check_whole(self) -> None:
        """Refuse one of which parts are missing.

        Raises:
            InvariantError: they are.
        """
        if not self.is_whole:
            raise InvariantError(f"a checkpoint with the parts of {sorted(self.regions)}")

    def rows_of_others(self, present: Collection[str]) -> dict[str, dict[str, object]]:
        """The books of rows of the regions that are not there any more."""
        others = {name: parts for name, parts in self.regions.items() if name not in present}
        return {name: rows_of(primary.control) for name, (primary, _) in others.items()}

    def close(self, members: Collection[str], *, has_averager: bool) -> bool:
        """Note whether it is whole by now; True once, when it has become so."""
        if self.is_whole or has_averager != (self.averager is not None):
            return False
        self.is_whole = set(self.regions) == set(members)
        return self.is_whole


@dataclass(slots=True)
class SimCheckpoints:
    """All checkpoints of a run that are kept.

    Attributes:
        by_id: those that are whole, or may become so.
        has_averager: whether each has a part of the averager.
        next_id: of the next one that is made regularly.
    """

    has_averager: bool
    by_id: dict[int, SimCheckpoint] = field(default_factory=dict)
    next_id: int = 0
    _given_up: set[int] = field(default_factory=set)

    def begin_next(self) -> int | None:
        """Its number, with no other one kept; None while one is being made."""
        known = self.by_id.get(self.next_id - 1)
        if known is not None and not known.is_whole:
            return None
        for old in [number for number in self.by_id if number < self.next_id]:
            del self.by_id[old]
        self.next_id += 1
        return self.next_id - 1

    def add_averager(self, part: AveragerSnapshot) -> None:
        """The averager's part of one is there."""
        if part.id not in self._given_up:
            self.by_id.setdefault(part.id, SimCheckpoint()).averager = part

    def add_region(
        self, name: str, primary: Snapshot, shards: list[ShardState], members: Collection[str]
    ) -> SimCheckpoint | None:
        """A region's parts of one are there; the checkpoint if it is whole with them."""
        if primary.id in self._given_up:
            return None
        checkpoint = self.by_id.setdefault(primary.id, SimCheckpoint())
        checkpoint.regions[name] = (primary, shards)
        return checkpoint if checkpoint.close(members, has_averager=self.has_averager) else None

    def abandon(self) -> None:
        """Somebody is gone: what is there of one that is not whole is of no use."""
        open_ones = {number for number, saved in self.by_id.items() if not saved.is_whole}
        self._given_up |= open_ones
        for number in open_ones:
            del self.by_id[number]
