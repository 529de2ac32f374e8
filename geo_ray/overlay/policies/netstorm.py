"""Several roots: the model is cut in slices, each with its own tree over measured links.

With one root, every byte passes the root's line twice. With a root per slice, the sums and results
of a round load all lines alike, and slow links carry little or nothing. The trees come from
`packing`; they are replaced before a round if measurements predict enough gain.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from geo_ray.overlay.links import Links
from geo_ray.overlay.plan import Tree, sized_slices
from geo_ray.overlay.policies.packing import Parents, busiest_s, pack, share_out


class Netstorm:
    """Chooses the trees of each round.

    Args:
        links: measured links.
        num_segments: segments of the vector.
        num_trees: most slices.
        hysteresis: predicted gain below which trees and shares stay as they are.
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
        """Return the trees of round ``rnd``, by the present knowledge of links."""
        lines = self._lines()
        fresh = pack(*lines, self._num_trees)
        if not self._packed:
            self._packed = fresh
        else:
            shared = share_out([parents for parents, _ in self._packed], *lines)
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
