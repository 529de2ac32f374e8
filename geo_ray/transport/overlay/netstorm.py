"""NETSTORM policy: several roots, each with its own tree over measured links for one model slice.

With one root, every byte passes the root's line twice; with a root per slice, all lines are loaded
alike. Trees are replaced before a round if measurements predict enough gain. Choosing trees and
slice sizes so that the busiest line finishes first is a packing program. It is solved
approximately: a small share is repeatedly assigned to the tree that is cheapest at prices which
grow with a line's load. An edge costs both directions of its link, both uplinks and downlinks.

Shape legend: N = regions; rows send, columns receive.

Source: reconstructed from the general idea of NetStorm (arXiv 2404.11352); the prices are the
usual ones of multiplicative weights for packing programs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import itemgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from geo_ray.transport.overlay.links import Links
from geo_ray.transport.overlay.plan import Tree, sized_slices

Parents = tuple[int, ...]
Floats = NDArray[np.float64]

_SHARES: Final = 48  # how finely the vector is dealt out
_STEEPNESS: Final = 12.0
_HOP: Final = 0.02  # of an edge's price, per level: prefers flat trees among equal ones


class _Lines:
    """Loads of all lines, as seconds per unit of the vector, and their prices."""

    def __init__(self, link_NN: Floats, up_N: Floats, down_N: Floats) -> None:
        self._link_NN = 1.0 / link_NN
        self._up_N = 1.0 / up_N
        self._down_N = 1.0 / down_N
        self._load_NN = np.zeros_like(link_NN)  # of the vector, by ordered pair

    def worst(self) -> float:
        """Return how long the busiest line is busy."""
        load_NN = self._load_NN
        return float(
            max(
                (load_NN * self._link_NN).max(),
                (load_NN.sum(axis=1) * self._up_N).max(),
                (load_NN.sum(axis=0) * self._down_N).max(),
            )
        )

    def prices(self) -> Floats:
        """Return the present price of each edge, both directions together (N, N)."""
        load_NN = self._load_NN
        busy_NN = load_NN * self._link_NN
        up_N, down_N = load_NN.sum(axis=1) * self._up_N, load_NN.sum(axis=0) * self._down_N
        scale = _STEEPNESS / max(self.worst(), 1e-12)
        price_NN = (
            np.exp(scale * (busy_NN - self.worst())) * self._link_NN
            + (np.exp(scale * (up_N - self.worst())) * self._up_N)[:, None]
            + (np.exp(scale * (down_N - self.worst())) * self._down_N)[None, :]
        )
        return np.asarray(price_NN + price_NN.T, dtype=np.float64)

    def add(self, parents: Parents, share: float) -> None:
        """Send ``share`` of the vector along a tree, up and down."""
        for node, parent in enumerate(parents):
            if node != parent:
                self._load_NN[node, parent] += share
                self._load_NN[parent, node] += share


def pack(
    link_NN: Floats, up_N: Floats, down_N: Floats, num_trees: int
) -> list[tuple[Parents, float]]:
    """Return trees and the share of the vector for each.

    Args:
        link_NN: rate of every ordered pair.
        up_N: rate of every region's uplink.
        down_N: rate of every region's downlink.
        num_trees: most trees.

    Returns:
        Parents and share, largest first; the shares sum to 1.
    """
    lines = _Lines(link_NN, up_N, down_N)
    counts: dict[frozenset[tuple[int, int]], int] = defaultdict(int)
    flat: dict[frozenset[tuple[int, int]], Parents] = {}
    for i in range(_SHARES):
        parents = centred(_cheapest(lines.prices(), i % len(up_N)))
        lines.add(parents, 1.0 / _SHARES)
        edges = edges_of(parents)
        counts[edges] += 1
        flat.setdefault(edges, parents)
    best = sorted(counts, key=lambda edges: (-counts[edges], sorted(edges)))[:num_trees]
    return allocate([flat[edges] for edges in best], link_NN, up_N, down_N)


def allocate(
    trees: Sequence[Parents], link_NN: Floats, up_N: Floats, down_N: Floats
) -> list[tuple[Parents, float]]:
    """Return the best shares for given trees, largest first."""
    lines = _Lines(link_NN, up_N, down_N)
    shares = [0] * len(trees)
    steps = 4 * _SHARES
    for _ in range(steps):
        price_NN = lines.prices()
        costs = [sum(price_NN[n, p] for n, p in enumerate(tree) if n != p) for tree in trees]
        cheapest = int(np.argmin(costs))
        shares[cheapest] += 1
        lines.add(trees[cheapest], 1.0 / steps)
    dealt = sorted(zip(trees, shares, strict=True), key=itemgetter(1), reverse=True)
    return [(tree, share / steps) for tree, share in dealt if share]


def busiest_s(
    packed: Sequence[tuple[Parents, float]], link_NN: Floats, up_N: Floats, down_N: Floats
) -> float:
    """Return how long the busiest line is busy with a vector of size 1 along given trees."""
    lines = _Lines(link_NN, up_N, down_N)
    for parents, share in packed:
        lines.add(parents, share)
    return lines.worst()


def edges_of(parents: Parents) -> frozenset[tuple[int, int]]:
    """Return a tree's edges, whatever its root."""
    return frozenset((min(n, p), max(n, p)) for n, p in enumerate(parents) if n != p)


def centred(parents: Parents) -> Parents:
    """Return the tree with its root in the middle, so that paths to it are short."""
    beside: dict[int, list[int]] = defaultdict(list)
    for a, b in sorted(edges_of(parents)):
        beside[a].append(b)
        beside[b].append(a)

    def rooted(root: int) -> tuple[int, Parents]:
        found, depth, order = {root: root}, {root: 0}, [root]
        for node in order:  # grows while it is walked
            for other in beside[node]:
                if other not in found:
                    found[other], depth[other] = node, depth[node] + 1
                    order.append(other)
        return max(depth.values()), tuple(found[node] for node in range(len(parents)))

    return min((rooted(root) for root in range(len(parents))), key=itemgetter(0))[1]


def _cheapest(price_NN: Floats, start: int) -> Parents:
    """Return a minimum spanning tree by Prim's rule; equal edges are ranked by level."""
    num = len(price_NN)
    parents, depth = [start] * num, [0] * num
    cost = price_NN[start] * (1.0 + _HOP)
    outside = set(range(num)) - {start}
    while outside:
        node = min(sorted(outside), key=cost.__getitem__)
        outside.remove(node)
        depth[node] = depth[parents[node]] + 1
        for other in outside:
            through = price_NN[node, other] * (1.0 + _HOP * (depth[node] + 1))
            if through < cost[other]:
                cost[other], parents[other] = through, node
    return tuple(parents)


class Netstorm:
    """Chooses the trees of each round.

    Args:
        links: measured links.
        num_segments: segments of the vector.
        num_trees: most slices.
        hysteresis: predicted gain below which trees and shares do not change.
    """

    def __init__(
        self, links: Links, num_segments: int, num_trees: int, hysteresis: float = 0.05
    ) -> None:
        self._links = links
        self._num_segments = num_segments
        self._num_trees = min(num_trees, num_segments)
        self._hysteresis = hysteresis
        self._packed: list[tuple[Parents, float]] = []

    def trees(self, rnd: int) -> list[Tree]:
        """Return the trees of round ``rnd``, from the present measurements."""
        lines = self._lines()
        fresh = pack(*lines, self._num_trees)
        if not self._packed:
            self._packed = fresh
        else:
            shared = allocate([parents for parents, _ in self._packed], *lines)
            best = min((shared, fresh), key=lambda packed: busiest_s(packed, *lines))
            gain = 1.0 - busiest_s(best, *lines) / busiest_s(self._packed, *lines)
            if gain > self._hysteresis:
                self._packed = best
        slices = sized_slices([share for _, share in self._packed], self._num_segments)
        return [
            Tree(parents, first, stop)
            for (parents, _), (first, stop) in zip(self._packed, slices, strict=True)
            if first < stop
        ]

    def _lines(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        link_NN = self._links.matrix()
        return link_NN, self._links.up_mbps(), self._links.down_mbps()
