"""The parts of a plan: segments of a vector, orders to send them, and trees made of orders.

Regions are numbers here, 0 to N - 1, in the order of their names. A set of regions is a bit mask:
bit i stands for region i.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from geo_ray.base.errors import InvariantError

SUM: Final = 0  # towards a root: partial sums
RESULT: Final = 1  # away from a root: the sum's result
PROBE: Final = 2  # a few segments of the result, only to measure a link


@dataclass(frozen=True, slots=True)
class Grid:
    """A vector of ``num`` elements cut in segments of ``segment`` elements; the last is shorter."""

    num: int
    segment: int

    @property
    def count(self) -> int:
        """The number of segments."""
        return -(-self.num // self.segment)

    def bounds(self, index: int) -> tuple[int, int]:
        """Return the first element of a segment, and one past its last."""
        return index * self.segment, min(self.num, (index + 1) * self.segment)


@dataclass(frozen=True, slots=True)
class SendOrder:
    """An order: region ``src`` sends the segments ``first`` to ``stop - 1`` to ``dst``.

    Attributes:
        src: sending region.
        dst: receiving region.
        phase: SUM, RESULT or PROBE.
        first: first segment.
        stop: one past the last.
        need: for sums: regions whose contributions a segment must hold before it is sent.
    """

    src: int
    dst: int
    phase: int
    first: int
    stop: int
    need: int = 0


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree over all regions that carries some segments to its root and back.

    Attributes:
        parents: of every region; the root is its own.
        first: first segment.
        stop: one past the last.
    """

    parents: tuple[int, ...]
    first: int
    stop: int

    @property
    def root(self) -> int:
        """The region where the sum is completed."""
        return next(node for node, parent in enumerate(self.parents) if node == parent)

    def outward(self) -> list[int]:
        """Return all regions, parents before children.

        Raises:
            InvariantError: the parents make no tree.
        """
        roots = [node for node, parent in enumerate(self.parents) if node == parent]
        order = list(roots)
        for node in order:  # grows while it is walked
            order += [c for c, p in enumerate(self.parents) if p == node and c != node]
        if len(roots) != 1 or len(order) != len(self.parents):
            raise InvariantError(f"the parents {self.parents} make no tree")
        return order

    def masks(self) -> list[int]:
        """Return for every region the set of itself and all below it."""
        masks = [1 << node for node in range(len(self.parents))]
        for node in reversed(self.outward()):
            if self.parents[node] != node:
                masks[self.parents[node]] |= masks[node]
        return masks

    def sums(self) -> list[SendOrder]:
        """Return the orders that carry the sum to the root."""
        masks = self.masks()
        return [
            SendOrder(node, self.parents[node], SUM, self.first, self.stop, masks[node])
            for node in reversed(self.outward())
            if self.parents[node] != node
        ]

    def results(self) -> list[SendOrder]:
        """Return the orders that carry the result from the root to all regions."""
        return [
            SendOrder(self.parents[node], node, RESULT, self.first, self.stop)
            for node in self.outward()
            if self.parents[node] != node
        ]


def full_mask(num_regions: int) -> int:
    """Return the mask of all regions."""
    return (1 << num_regions) - 1


def equal_slices(count: int, num_segments: int) -> list[tuple[int, int]]:
    """Split ``num_segments`` into ``count`` slices, equal to within one; leave out empty ones."""
    edges = [i * num_segments // count for i in range(count + 1)]
    return [(a, b) for a, b in pairwise(edges) if a < b]


def sized_slices(shares: list[float], num_segments: int) -> list[tuple[int, int]]:
    """Return contiguous slices in proportion to ``shares`` (sum about 1); some may be empty."""
    total, edges = 0.0, [0]
    for share in shares:
        total += share
        edges.append(round(total / max(sum(shares), 1e-12) * num_segments))
    return list(pairwise(edges))
