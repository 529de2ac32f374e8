"""Elastic deterministic order: which row a position of a region's training stream is.

The stream is infinite. It depends on the shards' sizes and the seed alone: not on how many workers
read it, nor on how it is cut into spans. Each epoch has every row exactly once.

Per epoch the shards are shuffled and grouped into windows; the rows of a window are shuffled
together. So a reader needs only one window of shards in memory, not all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from geo_ray.errors import ConfigError, ShardEmptyError

WINDOW_SHARDS = 4
"""Shards that are mixed with each other. A constant: changing it changes every training stream."""

Ints = np.ndarray[Any, np.dtype[np.int64]]

K = TypeVar("K")
V = TypeVar("V")

_CACHED_WINDOWS = 4  # spans of several workers lie near each other, across at most a window's edge


class StreamOrder:
    """Position in the stream -> row.

    Args:
        shard_rows: number of rows of each shard, all positive.
        seed: fixes the order, not negative.
        window_shards: how many shards are mixed.
    """

    def __init__(
        self, shard_rows: Sequence[int], seed: int, window_shards: int = WINDOW_SHARDS
    ) -> None:
        if seed < 0 or window_shards < 1:
            raise ConfigError(f"order: seed {seed} or window_shards {window_shards} is too small")
        if not shard_rows:
            raise ShardEmptyError("order: there are no shards")
        self._rows = np.asarray(shard_rows, dtype=np.int64)
        if self._rows.min() < 1:
            raise ShardEmptyError(f"order: shard {int(self._rows.argmin())} has no rows")
        self._seed = seed
        self._window_shards = window_shards
        self._epochs: OrderedDict[int, tuple[Ints, Ints]] = OrderedDict()
        self._windows: OrderedDict[tuple[int, int], tuple[Ints, Ints]] = OrderedDict()

    @property
    def rows_per_epoch(self) -> int:
        """The number of rows, and so of positions per epoch."""
        return int(self._rows.sum())

    def locate(self, position: int) -> tuple[int, int, int]:
        """Find one row.

        Args:
            position: 0 or more.

        Returns:
            (epoch, shard index, row in the shard).

        Raises:
            ValueError: if the position is negative.
        """
        shard_N, row_N = self.locate_rows(position, 1)
        return position // self.rows_per_epoch, int(shard_N[0]), int(row_N[0])

    def locate_rows(self, start: int, count: int) -> tuple[Ints, Ints]:
        """Find the rows of the span [start, start + count).

        Returns:
            Shard index (N,) int64 and row in the shard (N,) int64, in stream order; own arrays.

        Raises:
            ValueError: if start or count is negative.
        """
        if start < 0 or count < 0:
            raise ValueError(f"span [{start}, +{count}) is negative")
        shard_parts, row_parts = [], []
        while count > 0:
            epoch, offset = divmod(start, self.rows_per_epoch)
            _, edges = self._epoch(epoch)
            window = int(np.searchsorted(edges, offset, side="right")) - 1
            shards, rows = self._window(epoch, window)
            begin = offset - int(edges[window])
            take = min(count, len(rows) - begin)
            shard_parts.append(shards[begin : begin + take])
            row_parts.append(rows[begin : begin + take])
            start, count = start + take, count - take
        nothing = [np.empty(0, dtype=np.int64)]  # the span may be empty
        return np.concatenate(shard_parts + nothing), np.concatenate(row_parts + nothing)

    def locate_span(self, start: int, count: int) -> list[tuple[int, Ints]]:
        """The span [start, start + count) as runs (shard index, its rows), in stream order.

        `locate_rows` is the faster form: runs are short where shards are mixed.
        """
        shard_N, row_N = self.locate_rows(start, count)
        cuts = np.flatnonzero(np.diff(shard_N)) + 1
        edges = [0, *cuts.tolist(), len(shard_N)]
        return [
            (int(shard_N[begin]), row_N[begin:end]) for begin, end in pairwise(edges) if end > begin
        ]

    def _epoch(self, epoch: int) -> tuple[Ints, Ints]:
        """The epoch's order of shards, and the offset at which each of its windows begins."""
        if epoch not in self._epochs:
            shards = _permutation(len(self._rows), [self._seed, epoch, 0])
            starts = np.arange(0, len(shards), self._window_shards)
            sizes = np.add.reduceat(self._rows[shards], starts)
            edges = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64)
            _remember(self._epochs, epoch, (shards, edges), 2)
        return self._epochs[epoch]

    def _window(self, epoch: int, window: int) -> tuple[Ints, Ints]:
        """Shard index and row of every position of a window."""
        key = (epoch, window)
        if key in self._windows:
            self._windows.move_to_end(key)
            return self._windows[key]
        begin = window * self._window_shards
        members = self._epoch(epoch)[0][begin : begin + self._window_shards]
        sizes = self._rows[members]
        shards = np.repeat(members, sizes)
        rows = np.arange(len(shards)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        mix = _permutation(len(shards), [self._seed, epoch, window + 1])
        _remember(self._windows, key, (shards[mix], rows[mix]), _CACHED_WINDOWS)
        return self._windows[key]


def _permutation(size: int, entropy: list[int]) -> Ints:
    """A permutation that no NumPy release may change.

    NumPy guarantees the streams of SeedSequence and PCG64, but not of ``Generator.permutation``; a
    resumed run must not depend on it.
    """
    keys = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(size)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def _remember(cache: OrderedDict[K, V], key: K, value: V, limit: int) -> None:
    cache[key] = value
    while len(cache) > limit:
        cache.popitem(last=False)
