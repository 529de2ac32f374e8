"""RACK: two levels, one aggregator per group of regions.

A group of regions, such as a continent, takes the place of a data centre's rack.
"""

from __future__ import annotations

from collections.abc import Sequence

from geo_ray.overlay.plan import Tree


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
