"""BINARY: a static balanced binary tree, as MLNET has it.

Two vectors enter each inner region and two leave it: about 4 S / B with pipelined segments, and 4 S
/ B per level without.
"""

from __future__ import annotations

from geo_ray.overlay.plan import Tree


def binary(num_regions: int, root: int, num_segments: int) -> list[Tree]:
    """Return a balanced binary tree over the regions in their order, the root first."""
    order = [root, *(n for n in range(num_regions) if n != root)]
    parents = [root] * num_regions
    for place in range(1, num_regions):
        parents[order[place]] = order[(place - 1) // 2]
    return [Tree(tuple(parents), 0, num_segments)]
