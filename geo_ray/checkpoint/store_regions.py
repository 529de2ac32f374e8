"""What checkpoints in object stores move between regions. Pure.

Rule: the parts of a region's servers go to its own store if it has one, and all else, the
averager's part too, to the store of all, which is in one of the run's regions. A part that is
written to, or read from, a store of another region has crossed from one to the other. Claims and
manifests are too small to count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from geo_ray.checkpoint.manifest import PartInfo
from geo_ray.checkpoint.names import region_of

Crossed = Mapping[tuple[str, str], int]
"""Bytes by (source, destination)."""


@dataclass(frozen=True, slots=True)
class StoreRegions:
    """Where the stores of a run are.

    Attributes:
        main: the region of the store of all.
        own: regions with one of their own.
    """

    main: str
    own: Collection[str] = ()

    def of(self, region: str | None) -> str:
        """The region of the store that has the parts of ``region``; None: the averager's part."""
        return region if region is not None and region in self.own else self.main

    def saved(self, parts: Iterable[PartInfo], home: str) -> Crossed:
        """What a checkpoint has moved.

        Args:
            parts: all of it.
            home: where the averager lives.
        """
        found: Counter[tuple[str, str]] = Counter()
        for part in parts:
            region = region_of(part.name)
            found[region or home, self.of(region)] += part.bytes
        return _between(found)

    def resumed(self, parts: Iterable[PartInfo], home: str) -> Crossed:
        """What a resume moves: every process reads its own part; the same links, the other way."""
        return {(dst, src): count for (src, dst), count in self.saved(parts, home).items()}


def _between(found: Counter[tuple[str, str]]) -> Crossed:
    return {(src, dst): count for (src, dst), count in found.items() if src != dst}
