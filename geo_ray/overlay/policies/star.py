"""STAR: every region sends to the root, and the root to every region.

The root's downlink takes N - 1 vectors and its uplink gives as many, one after the other or all at
once: 2 (N - 1) S / B for a vector of S bits and lines of B bit/s.
"""

from __future__ import annotations

from geo_ray.overlay.plan import Tree


def star(num_regions: int, root: int, num_segments: int) -> list[Tree]:
    """Return the tree in which all regions are children of the root."""
    return [Tree((root,) * num_regions, 0, num_segments)]
