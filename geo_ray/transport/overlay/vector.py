"""The data of one round in one region: the partial sum of arrivals, and the result.

Shape legend: P = elements of the vector; K = segments; S = elements of one segment.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from geo_ray.base.errors import FrameError
from geo_ray.transport.overlay.plan import Grid, full_mask
from geo_ray.transport.wire.frames import Buffer

Floats = NDArray[np.float32]


class Vector:
    """Sums weighted contributions segment by segment, each contribution once.

    Args:
        me: this region's number.
        num_regions: N.
        grid: the vector's segments.
        fused: whether a segment with all contributions becomes the result at once, as the mean.

    Attributes:
        attempt: how often the sums were restarted.
    """

    def __init__(self, me: int, num_regions: int, grid: Grid, *, fused: bool) -> None:
        self.attempt = 0
        self._me = me
        self._full = full_mask(num_regions)
        self._grid = grid
        self._fused = fused
        self._own_P: Floats | None = None
        self._own_weight = 0.0
        self._sum_P = np.zeros(grid.num, dtype=np.float32)
        self._mask_K = np.zeros(grid.count, dtype=np.int64)
        self._weight_K = np.zeros(grid.count)
        self._result_P: Floats | None = None
        self._have_K = np.zeros(grid.count, dtype=np.bool_)

    @property
    def is_summed(self) -> bool:
        """Return whether every contribution is in every segment."""
        return bool((self._mask_K == self._full).all())

    @property
    def is_whole(self) -> bool:
        """Return whether every segment of the result has arrived."""
        return bool(self._have_K.all())

    @property
    def result_P(self) -> Floats:
        """The result; only when `is_whole`."""
        return self._result()

    def contribute(self, own_P: Floats, weight: float) -> None:
        """Add the region's own contribution (P,), which must stay unchanged."""
        self._own_P, self._own_weight = own_P, weight
        if self._mask_K.any():
            self._sum_P += own_P * np.float32(weight)
        else:
            np.multiply(own_P, np.float32(weight), out=self._sum_P)
        self._mask_K |= 1 << self._me
        self._weight_K += weight
        self._complete(np.flatnonzero(self._mask_K == self._full))

    def restart(self, attempt: int) -> None:
        """Restart the sums, and the result if it is made of them (`fused`)."""
        self.attempt = attempt
        # Parts under way still read the old array.
        self._sum_P = np.zeros_like(self._sum_P)
        self._mask_K[:] = 0
        self._weight_K[:] = 0.0
        if self._fused:
            self._result_P = None
            self._have_K[:] = False
        if self._own_P is not None:
            self.contribute(self._own_P, self._own_weight)

    def add(self, index: int, mask: int, weight: float, data: Buffer) -> bool:
        """Add another region's partial sum of a segment.

        Returns:
            False if it holds a contribution that was added already; nothing was added.

        Raises:
            FrameError: it has the wrong size, or an invalid mask or weight.
        """
        segment_S = self._read(index, data)
        if mask <= 0 or mask & ~self._full or not 0.0 < weight < float("inf"):
            raise FrameError(f"a partial sum of regions {mask:#x} with weight {weight}")
        if int(self._mask_K[index]) & mask:
            return False
        first, stop = self._grid.bounds(index)
        self._sum_P[first:stop] += segment_S
        self._mask_K[index] |= mask
        self._weight_K[index] += weight
        if self._mask_K[index] == self._full:
            self._complete(np.array([index]))
        return True

    def put(self, index: int, data: Buffer) -> bool:
        """Store a segment of the result.

        Returns:
            False if it had arrived already.

        Raises:
            FrameError: it has the wrong size.
        """
        segment_S = self._read(index, data)
        if self._have_K[index]:
            return False
        first, stop = self._grid.bounds(index)
        self._result()[first:stop] = segment_S
        self._have_K[index] = True
        return True

    def mean(self) -> Floats:
        """The weighted mean of all contributions (P,), a copy; only when `is_summed`."""
        mean_P = self._sum_P.copy()
        for index in range(self._grid.count):
            first, stop = self._grid.bounds(index)
            mean_P[first:stop] *= np.float32(1.0 / self._weight_K[index])
        return mean_P

    def set_result(self, result_P: Floats) -> None:
        """Take the whole result (P,), which must stay unchanged."""
        self._result_P = result_P
        self._have_K[:] = True

    def can_send_sum(self, index: int, need: int) -> bool:
        """Return whether a segment's sum holds exactly the contributions ``need``."""
        return int(self._mask_K[index]) == need

    def can_send_result(self, index: int) -> bool:
        """Return whether a segment of the result has arrived."""
        return bool(self._have_K[index])

    def sum_of(self, index: int) -> tuple[int, float, memoryview]:
        """Return mask, weight and bytes of a segment's sum."""
        first, stop = self._grid.bounds(index)
        data = self._sum_P[first:stop].data.cast("B")
        return int(self._mask_K[index]), float(self._weight_K[index]), data

    def result_of(self, index: int) -> memoryview:
        """Return the bytes of a segment of the result."""
        first, stop = self._grid.bounds(index)
        return self._result()[first:stop].data.cast("B")

    def missing(self) -> list[tuple[int, int]]:
        """Return the runs of missing segments of the result, as (first, stop)."""
        edges = np.flatnonzero(np.diff(np.concatenate(([True], self._have_K, [True]))))
        return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]

    def _result(self) -> Floats:
        if self._result_P is None:
            self._result_P = np.empty(self._grid.num, dtype=np.float32)
        return self._result_P

    def _complete(self, indices: NDArray[np.int64]) -> None:
        if not self._fused:
            return
        for index in indices.tolist():
            first, stop = self._grid.bounds(index)
            scale = np.float32(1.0 / self._weight_K[index])
            np.multiply(self._sum_P[first:stop], scale, out=self._result()[first:stop])
            self._have_K[index] = True

    def _read(self, index: int, data: Buffer) -> Floats:
        if not 0 <= index < self._grid.count:
            raise FrameError(f"segment {index} of a vector that has {self._grid.count}")
        first, stop = self._grid.bounds(index)
        view = memoryview(data)
        if view.nbytes != 4 * (stop - first):
            raise FrameError(f"segment {index} has {view.nbytes} bytes, not {4 * (stop - first)}")
        return np.frombuffer(view, dtype=np.float32)
