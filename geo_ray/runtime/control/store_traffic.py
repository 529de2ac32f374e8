"""Counts what checkpoints move between regions: through object stores, or to the driver's machine.

It is told like what bridges send each other, as events `wan` of the class ``checkpoint``, so that
summary, report and bill have it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from geo_ray.checkpoint.manifest import PartInfo
from geo_ray.checkpoint.store_regions import Crossed, StoreRegions
from geo_ray.runtime.control.actor_group import ActorGroup

_CLASS: Final = "checkpoint"


class TrafficSource(Protocol):
    """Tells what checkpoints have moved between regions; see `StoreRegions`."""

    def saved(self, parts: Iterable[PartInfo], home: str) -> Crossed:
        """By one that was written."""

    def resumed(self, parts: Iterable[PartInfo], home: str) -> Crossed:
        """By one that was read."""


def crossing_of(actors: ActorGroup) -> TrafficSource | None:
    """What tells it of a run, whose parts go to stores, or to its directory."""
    spec = actors.spec
    if not spec.places.far:
        return actors.desk
    checkpoint, home = spec.experiment.checkpoint, spec.experiment.averager_region
    return StoreRegions(checkpoint.store_region or home, checkpoint.region_stores)


@dataclass(slots=True)
class StoreTraffic:
    """See the module's docstring.

    Attributes:
        stores: tells what has crossed; None: nothing does.
        emit: takes events of now: a kind, and its fields by name.
    """

    stores: TrafficSource | None
    emit: Callable[..., None]
    _total: Counter[tuple[str, str]] = field(default_factory=Counter)

    def go_on(self, sums: Mapping[tuple[str, str], Mapping[str, int]]) -> None:
        """Count on from what was told before, by link and class."""
        self._total = Counter({link: told.get(_CLASS, 0) for link, told in sums.items()})

    def saved(self, parts: Iterable[PartInfo], home: str) -> None:
        """A checkpoint was written, with the averager in ``home``."""
        if self.stores is not None:
            self._add(self.stores.saved(parts, home))

    def resumed(self, parts: Iterable[PartInfo], home: str) -> None:
        """The run goes on from a checkpoint, with the averager in ``home``."""
        if self.stores is not None:
            self._add(self.stores.resumed(parts, home))

    def _add(self, crossed: Crossed) -> None:
        for (src, dst), count in sorted(crossed.items()):
            self._total[src, dst] += count
            # Events have sums so far; others of the same link have other classes.
            self.emit("wan", src=src, dst=dst, bytes_by_class={_CLASS: self._total[src, dst]})
