"""Chooses which region sends a bucket's result to which next, by predicted times.

Times are seconds, sizes and rates segments and segments per second. A region that was promised the
result counts as one that has it: it passes segments on as they arrive.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class _Holder:
    """A region that has the result or is promised it.

    Attributes:
        first_s: when it has the first segment.
        whole_s: when it has all.
        free_s: when it may begin to serve somebody.
        busy: whether it serves somebody.
    """

    first_s: float
    whole_s: float
    free_s: float
    busy: bool = False


class Distribution:
    """See the module's docstring.

    Args:
        num_regions: N.
        root: has the result.
        num_segments: of the bucket.
        now_s: the time.

    Attributes:
        left: regions that no other was told to serve yet.
        tail: the region that was promised the result last.
        at_random: whether the next transfer is chosen at random; None if that is not decided.
    """

    def __init__(self, num_regions: int, root: int, num_segments: int, now_s: float) -> None:
        self.left = [node for node in range(num_regions) if node != root]
        self.tail = root
        self.at_random: bool | None = None
        self._num_segments = num_segments
        self._holders = {root: _Holder(now_s, now_s, now_s)}

    def next_pair(
        self,
        rate_NN: NDArray[np.float64],
        down: Collection[int],
        now_s: float,
        receivers: Sequence[int],
    ) -> tuple[int, int] | None:
        """Return the transfer to one of ``receivers`` that ends first, as (from, to).

        Args:
            rate_NN: of links.
            down: regions that serve others only if there are no others to do so.
            now_s: the time.
            receivers: some of those that are left.

        Returns:
            The transfer; None if waiting for a busy region is faster.
        """
        able = {node: h for node, h in self._holders.items() if node not in down}
        able = able or self._holders
        _, busy, src, dst = min(
            (self._end_s(holder, rate_NN[src, dst], now_s), holder.busy, src, dst)
            for src, holder in able.items()
            for dst in receivers
        )
        return None if busy else (src, dst)

    def promise(self, src: int, dst: int, rate_NN: NDArray[np.float64], now_s: float) -> None:
        """Note that ``src`` was told to serve ``dst``."""
        holder = self._holders[src]
        end_s = self._end_s(holder, rate_NN[src, dst], now_s)
        start_s = max(holder.first_s, holder.free_s, now_s)
        first_s = min(end_s, start_s + 1.0 / rate_NN[src, dst])
        self._holders[dst] = _Holder(first_s, end_s, first_s)
        holder.free_s, holder.busy = end_s, True
        self.left.remove(dst)
        self.tail, self.at_random = dst, None

    def is_free(self, src: int, dst: int, now_s: float) -> None:
        """Note that ``src`` has served ``dst``."""
        if (holder := self._holders.get(dst)) is not None:
            holder.first_s, holder.whole_s = min(holder.first_s, now_s), now_s
        if (holder := self._holders.get(src)) is not None:
            holder.busy, holder.free_s = False, now_s

    def gives_up(self, src: int, dst: int, now_s: float) -> None:
        """Note that a transfer was given up: neither end counts as able to serve the other."""
        if (holder := self._holders.get(src)) is not None:
            holder.busy, holder.free_s = False, now_s
        self._holders.pop(dst, None)
        if self.tail == dst:
            self.tail = src

    def _end_s(self, holder: _Holder, rate: float, now_s: float) -> float:
        start_s = max(holder.first_s, holder.free_s, now_s)
        return max(start_s + self._num_segments / rate, holder.whole_s + 1.0 / rate)
