"""Overlay policies: the protocol, and the policies whose tree is fixed.

A policy decides which region sends which part of a round to whom. It has no clock, socket or
thread: the coordinator reports events to it and passes its orders to the bridges. Trees avoid
broken links and lost regions (`mend`). For N regions, S bits and lines of B bit/s:

STAR: every region exchanges with the root, 2 (N - 1) S / B. BINARY: a balanced binary tree as in
MLNET, about 4 S / B with pipelined segments, 4 S / B per level without. RACK: two levels, one
aggregator per group of regions. RING: reduce-scatter and all-gather, 2 (N - 1) / N S / B, which
is bandwidth-optimal between equal machines; the slowest link sets the pace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Protocol

from geo_ray.transport.overlay.links import Links
from geo_ray.transport.overlay.plan import SendOrder, Tree, equal_slices


def mend(tree: Tree, links: Links) -> Tree:
    """Give a new parent to regions whose link to their parent is broken, or whose parent is down.

    A region goes to the nearest of its parent's ancestors that works, else to any region outside
    its own subtree. If the region reaches none of these but one below it does, the subtree is
    re-rooted at that one. If none does, the region keeps its parent.
    """
    parents = list(tree.parents)
    masks = tree.masks()
    for node in tree.outward():
        parent = parents[node]
        if node == parent or not _is_bad(links, node, parent):
            continue
        above = [parent]
        while parents[above[-1]] != above[-1]:
            above.append(parents[above[-1]])
        others = [n for n in range(len(parents)) if not masks[node] >> n & 1]
        below = [n for n in range(len(parents)) if masks[node] >> n & 1 and n != node]
        for end, candidate in product([node, *below], [*above[1:], *others]):
            if not _is_bad(links, end, candidate):
                _turn(parents, node, end, candidate)
                masks = Tree(tuple(parents), tree.first, tree.stop).masks()
                break
    return Tree(tuple(parents), tree.first, tree.stop)


def _turn(parents: list[int], top: int, end: int, outside: int) -> None:
    """Re-root the subtree of ``top`` at its member ``end`` and make it a child of ``outside``."""
    node, parent = end, outside
    while True:
        following, parents[node] = parents[node], parent
        if node == top:
            return
        node, parent = following, node


def _is_bad(links: Links, node: int, parent: int) -> bool:
    return parent in links.down or links.is_broken(node, parent)


class Policy(Protocol):
    """The methods of a policy.

    Attributes:
        fused: whether a segment's result goes out from the region that completed its sum, before
            the other segments are complete. Otherwise all sums are completed in one region, which
            sends the result.
        settle_s: how long to gather regions that become ready at about the same time.
        probes: how often to measure links between two rounds; see `probing`.
    """

    fused: bool
    settle_s: float
    probes: int

    def open(self, rnd: int) -> list[SendOrder]:
        """Return orders for a round in which no region is ready yet."""

    def ready(self, rnd: int, ready: Sequence[int], now_s: float) -> list[SendOrder]:
        """Orders once these regions, in the order of their becoming ready, have contributions.

        Called again with more regions as they become ready.
        """

    def summed(self, rnd: int, now_s: float) -> list[SendOrder]:
        """Return orders for the result; called once, when the sum is complete. Not if `fused`."""

    def sent(self, rnd: int, send: SendOrder, now_s: float) -> list[SendOrder]:
        """Return more orders after a transfer is over."""

    def lost(self, rnd: int, src: int, dst: int, now_s: float) -> list[SendOrder]:
        """Return more orders after a result's transfer was abandoned; others serve ``dst``."""

    def restart(self, rnd: int, ready: Sequence[int], now_s: float) -> list[SendOrder]:
        """Return all orders again, without broken links, for a round whose sums are restarted."""

    def close(self, rnd: int) -> None:
        """Forget a round."""


class PlannedPolicy:
    """The policy that follows trees which are known before the round begins.

    Args:
        plan: the trees of a round.
        links: broken links and lost regions.
        fused: see `Policy`.
        probes: see `Policy`.
    """

    settle_s = 0.0

    def __init__(
        self, plan: Callable[[int], list[Tree]], links: Links, *, fused: bool, probes: int = 0
    ) -> None:
        self.fused = fused
        self.probes = probes
        self._plan = plan
        self._links = links

    def open(self, rnd: int) -> list[SendOrder]:
        """See `Policy.open`."""
        trees = self._trees(rnd)
        sums = [send for tree in trees for send in tree.sums()]
        return sums + (self._results(trees) if self.fused else [])

    def ready(self, rnd: int, ready: Sequence[int], now_s: float) -> list[SendOrder]:
        """Return nothing: all orders were issued."""
        return []

    def summed(self, rnd: int, now_s: float) -> list[SendOrder]:
        """See `Policy.summed`."""
        return self._results(self._trees(rnd))

    def sent(self, rnd: int, send: SendOrder, now_s: float) -> list[SendOrder]:
        """Return nothing: all orders were issued."""
        return []

    def lost(self, rnd: int, src: int, dst: int, now_s: float) -> list[SendOrder]:
        """Return nothing: all orders were issued."""
        return []

    def restart(self, rnd: int, ready: Sequence[int], now_s: float) -> list[SendOrder]:
        """See `Policy.restart`."""
        return self.open(rnd)

    def close(self, rnd: int) -> None:
        """Do nothing, because there is no state per round."""

    def _trees(self, rnd: int) -> list[Tree]:
        return [mend(tree, self._links) for tree in self._plan(rnd)]

    @staticmethod
    def _results(trees: list[Tree]) -> list[SendOrder]:
        return [send for tree in trees for send in tree.results()]


def star(num_regions: int, root: int, num_segments: int) -> list[Tree]:
    """Return the tree in which all regions are children of the root."""
    return [Tree((root,) * num_regions, 0, num_segments)]


def binary(num_regions: int, root: int, num_segments: int) -> list[Tree]:
    """Return a balanced binary tree over the regions in their order, the root first."""
    order = [root, *(n for n in range(num_regions) if n != root)]
    parents = [root] * num_regions
    for place in range(1, num_regions):
        parents[order[place]] = order[(place - 1) // 2]
    return [Tree(tuple(parents), 0, num_segments)]


def rack(
    num_regions: int, root: int, num_segments: int, groups: Sequence[Sequence[int]]
) -> list[Tree]:
    """Return a tree in which the first region of each group, or the root, aggregates it."""
    parents = [root] * num_regions
    for group in groups:
        if root not in group:
            for member in group[1:]:
                parents[member] = group[0]
    return [Tree(tuple(parents), 0, num_segments)]


def square_groups(num_regions: int, root: int) -> list[list[int]]:
    """Return groups of about the square root of the number of regions; the root is in the first."""
    size = max(1, round(num_regions**0.5))
    order = [root, *(n for n in range(num_regions) if n != root)]
    return [order[i : i + size] for i in range(0, num_regions, size)]


def ring(num_regions: int, num_segments: int) -> list[Tree]:
    """Return a chain per slice, each with another region as its root."""
    trees = []
    for root, (first, stop) in enumerate(equal_slices(num_regions, num_segments)):
        parents = [(node + 1) % num_regions for node in range(num_regions)]
        parents[root] = root
        trees.append(Tree(tuple(parents), first, stop))
    return trees
