"""RING: reduce-scatter and all-gather, which is bandwidth-optimal between equal machines.

Each region sums one slice, which reaches it over a chain around the ring, and sends the result
around once more: 2 (N - 1) / N S / B. The slowest link of the ring sets the pace.
"""

from __future__ import annotations

from geo_ray.overlay.plan import Tree, equal_slices


def ring(num_regions: int, num_segments: int) -> list[Tree]:
    """Return a chain per slice, each with another region as its root."""
    trees = []
    for root, (first, stop) in enumerate(equal_slices(num_regions, num_segments)):
        parents = [(node + 1) % num_regions for node in range(num_regions)]
        parents[root] = root
        trees.append(Tree(tuple(parents), first, stop))
    return trees
