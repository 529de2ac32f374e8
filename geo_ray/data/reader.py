"""Regional reader: maps positions in a region's training stream to rows.

The stream is infinite, deterministic and elastic. It depends only on the shard sizes and the
seed, not on the number of workers or on the row ranges they read; each epoch contains every row
exactly once. Per epoch, shards are shuffled and grouped into windows, and the rows of a window
are shuffled together, so a reader holds one window of shards in memory. `ReadAhead` prefetches
the rows a worker will probably be assigned next; a wrong guess costs one read and changes no
result.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, Final, TypeVar

import numpy as np

from geo_ray.base.errors import ConfigError, ManifestError, ShardEmptyError, StoreError
from geo_ray.base.text import listed, nearest_word
from geo_ray.base.threads import Workers
from geo_ray.base.types import Span
from geo_ray.data.columns import Column, Columns, Ragged, parse_types
from geo_ray.data.manifest import DataShard, Manifest, SplitName, check_residency
from geo_ray.data.shards import fetch_shard
from geo_ray.storage.store import Store, open_store

WINDOW_SHARDS = 4
"""Number of shards shuffled together. Changing this constant changes every training stream."""

Ints = np.ndarray[Any, np.dtype[np.int64]]

K = TypeVar("K")
V = TypeVar("V")

_CACHED_WINDOWS = (
    4  # the spans of several workers are close to each other and cross at most one window boundary
)


class StreamOrder:
    """Maps positions in the stream to rows.

    Args:
        shard_rows: number of rows of each shard, all positive.
        seed: determines the order, not negative.
        window_shards: number of shards shuffled together.
    """

    def __init__(
        self, shard_rows: Sequence[int], seed: int, window_shards: int = WINDOW_SHARDS
    ) -> None:
        if seed < 0 or window_shards < 1:
            raise ConfigError(f"order: seed {seed} or window_shards {window_shards} is too small")
        if not shard_rows:
            raise ShardEmptyError("order: no shards")
        self._rows = np.asarray(shard_rows, dtype=np.int64)
        if self._rows.min() < 1:
            raise ShardEmptyError(f"order: shard {int(self._rows.argmin())} has no rows")
        self._seed = seed
        self._window_shards = window_shards
        self._epochs: OrderedDict[int, tuple[Ints, Ints]] = OrderedDict()
        self._windows: OrderedDict[tuple[int, int], tuple[Ints, Ints]] = OrderedDict()

    @property
    def rows_per_epoch(self) -> int:
        """Return the number of rows, which is the number of positions per epoch."""
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
            Shard index (N,) int64 and row in the shard (N,) int64, in stream order; new arrays.

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
        """Split [start, start + count) into runs (shard index, its rows), in stream order.

        `locate_rows` is faster, because runs are short where shards are shuffled together.
        """
        shard_N, row_N = self.locate_rows(start, count)
        cuts = np.flatnonzero(np.diff(shard_N)) + 1
        edges = [0, *cuts.tolist(), len(shard_N)]
        return [
            (int(shard_N[begin]), row_N[begin:end]) for begin, end in pairwise(edges) if end > begin
        ]

    def _epoch(self, epoch: int) -> tuple[Ints, Ints]:
        """Return the epoch's order of shards, and the offset of each of its windows."""
        if epoch not in self._epochs:
            shards = _permutation(len(self._rows), [self._seed, epoch, 0])
            starts = np.arange(0, len(shards), self._window_shards)
            sizes = np.add.reduceat(self._rows[shards], starts)
            edges = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64)
            _remember(self._epochs, epoch, (shards, edges), 2)
        return self._epochs[epoch]

    def _window(self, epoch: int, window: int) -> tuple[Ints, Ints]:
        """Return the shard index and row of every position of a window."""
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
    """Compute a permutation that is independent of the NumPy release.

    NumPy guarantees the streams of SeedSequence and PCG64, but not of ``Generator.permutation``; a
    resumed run must not depend on it.
    """
    keys = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(size)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def _remember(cache: OrderedDict[K, V], key: K, value: V, limit: int) -> None:
    cache[key] = value
    while len(cache) > limit:
        cache.popitem(last=False)


Array = np.ndarray[Any, Any]
_MOST_PAUSE_S: Final = 15.0
log = logging.getLogger(__name__)


class RegionReader:
    """Reads one split of one region in one process; not thread-safe.

    A shard is checked (size, sha256, schema, rows) whenever it is fetched, before it is decoded;
    the last ``cache_shards`` decoded shards stay in memory. All returned arrays are writable
    copies that the caller owns.

    Args:
        manifest: the data set.
        region: the region of the shards.
        split: "train" or "heldout".
        order_seed: determines the stream's order, together with region and split.
        cache_shards: decoded shards kept in memory; from 4 (one window of the order) upwards no
            shard is fetched more than once or twice per epoch. It does not affect the order.
        here: the region of this process, e.g. its node's label; None if it is always
            ``region``.
        store: the region's store; None opens the manifest's store.

    Raises:
        ResidencyDeniedError: if ``here`` is another region; before any I/O.
        ManifestError: if the region is unknown.
        ShardEmptyError: if there are no rows, or a shard has none.
    """

    def __init__(
        self,
        manifest: Manifest,
        region: str,
        split: SplitName,
        order_seed: int,
        cache_shards: int = 8,
        here: str | None = None,
        store: Store | None = None,
    ) -> None:
        if region not in manifest.stores:
            raise ManifestError(
                f"region {region!r} is not in the manifest, which has {listed(manifest.stores)}"
                + (
                    f"; did you mean {near}?"
                    if (near := nearest_word(region, manifest.stores))
                    else ""
                ),
                fix="Correct the region's name, or write data for it.",
            )
        self._here = region if here is None else here
        self._shards = manifest.of(region, split)
        for shard in self._shards:
            check_residency(shard, self._here)
            if shard.rows == 0:
                raise ShardEmptyError(f"shard {shard.path} of region {region} has no rows")
        if not self._shards:
            raise ShardEmptyError(f"region {region!r} has no {split} rows")
        self._manifest = manifest
        self._types = parse_types(manifest.columns)
        self._store = open_store(manifest.stores[region]) if store is None else store
        rows = [shard.rows for shard in self._shards]
        self._order = StreamOrder(rows, _mix(order_seed, region, split))
        self._cache: OrderedDict[str, dict[str, Column]] = OrderedDict()
        self._cache_shards = max(1, cache_shards)
        self._retry_s = 0.0

    @property
    def num_rows(self) -> int:
        """Return the number of rows of this region's split, which is one epoch."""
        return self._order.rows_per_epoch

    def retry_for(self, seconds: float) -> None:
        """Set for how long to retry a store that does not answer before a read fails."""
        self._retry_s = seconds

    def read(self, start: int, count: int) -> Columns:
        """Return rows [start, start + count) of the infinite stream.

        Args:
            start: first position, 0 or more; ``start // num_rows`` is its epoch.
            count: number of rows N, 0 or more.

        Returns:
            Name -> (N,), (N, length) or ragged, in stream order.

        Raises:
            ShardMissingError: a shard is not in its store.
            ShardCorruptError: a shard's bytes differ from the manifest.
            SchemaMismatchError: a shard's columns differ from the manifest.
            StoreError: the store does not answer.
        """
        shard_N, row_N = self._order.locate_rows(start, count)
        if count > 0 and (shard_N == shard_N[0]).all():  # the usual case of few rows
            columns = self._columns(self._shards[shard_N[0]])
            return {name: columns[name][row_N] for name in self._types}
        fixed = {n: t for n, t in self._types.items() if t.ragged is None}
        out: dict[str, Column] = {n: np.empty(t.shape(count), t.dtype) for n, t in fixed.items()}
        parts: dict[str, list[Ragged]] = {n: [] for n in self._types if n not in fixed}
        order = []
        for index in np.unique(shard_N):
            columns = self._columns(self._shards[index])
            mine_N = shard_N == index
            order.append(np.flatnonzero(mine_N))
            for name in self._types:
                picked = columns[name][row_N[mine_N]]
                into = out.get(name)
                if isinstance(picked, Ragged):
                    parts[name].append(picked)
                elif isinstance(into, np.ndarray):
                    into[mine_N] = picked
        if parts:
            place_N = np.argsort(np.concatenate([*order, np.empty(0, np.int64)]))
            for name, kind in self._types.items():
                if name in parts:
                    found = parts[name] or [Ragged.of(str(kind), [])]
                    out[name] = Ragged.joined(found)[place_N]
        return {name: out[name] for name in self._types}

    def scan(self, batch_rows: int) -> Iterator[Columns]:
        """Read every row once, in the order of the files; for evaluation.

        Args:
            batch_rows: maximum rows per batch; a batch never spans two shards.

        Yields:
            Name -> (N,), (N, length) or ragged with 1 <= N <= ``batch_rows``.

        Raises:
            ValueError: if ``batch_rows`` is not positive; the others as for `read`.
        """
        if batch_rows < 1:
            raise ValueError(f"batch_rows must be positive, is {batch_rows}")
        for shard in self._shards:
            columns = self._columns(shard)
            for begin in range(0, shard.rows, batch_rows):
                yield {n: array[begin : begin + batch_rows].copy() for n, array in columns.items()}

    def read_shard(self, path: str) -> Columns:
        """Read a whole shard by its path in the manifest.

        Raises:
            ResidencyDeniedError: if it belongs to another region; before any I/O.
            ManifestError: if the manifest has no such shard; the others as for `read`.
        """
        for shard in self._manifest.shards:
            if shard.path == path:
                return {n: array.copy() for n, array in self._columns(shard).items()}
        raise ManifestError(f"shard {path!r} is not in the manifest")

    def _columns(self, shard: DataShard) -> dict[str, Column]:
        if shard.path in self._cache:
            self._cache.move_to_end(shard.path)
            return self._cache[shard.path]
        columns = self._fetched(shard)
        self._cache[shard.path] = columns
        while len(self._cache) > self._cache_shards:
            self._cache.popitem(last=False)
        return columns

    def _fetched(self, shard: DataShard) -> dict[str, Column]:
        ends_s, pause_s = time.monotonic() + self._retry_s, 1.0
        while True:
            try:
                return fetch_shard(shard, self._types, self._store, self._here)
            except StoreError as error:
                left_s = ends_s - time.monotonic()
                if left_s <= 0:
                    raise
                log.warning("%s; retrying for %.0f s", error.message, left_s)
                time.sleep(min(pause_s, left_s))
                pause_s = min(2 * pause_s, _MOST_PAUSE_S)


def _mix(seed: int, region: str, split: str) -> int:
    """Derive a separate seed for every region and split."""
    digest = hashlib.sha256(f"{seed}/{region}/{split}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


_JOIN_S = 5.0


class ReadAhead:
    """Reads a worker's next rows while the worker computes on the current ones.

    The region's server assigns rows to workers, so the next assignment is a guess: the same
    distance ahead as the last one. The guess is made after two assignments at equal distances.
    Rows depend only on their position in the stream, so a wrong guess costs one read and changes
    no result. A daemon thread does all the reading and ends with `close`.

    Args:
        read: reads a number of rows from a position of the stream.
    """

    def __init__(self, read: Callable[[int, int], Columns]) -> None:
        self._read = read
        self._jobs: SimpleQueue[tuple[Span, Future[Columns]] | None] = SimpleQueue()
        self._ahead: dict[Span, Future[Columns]] = {}
        self._last: Span | None = None
        self._stride = 0
        self._threads = Workers()
        self._threads.start("read-ahead", self._execute)

    def take(self, spans: Sequence[Span]) -> list[Columns]:
        """Return the rows of an assignment, and start to read those of the next one.

        Args:
            spans: at least one; the same number every time.

        Raises:
            DataError: an error of the reader at these rows.
        """
        known = self._ahead.keys()
        reads = [self._ahead.pop(span) if span in known else self._ask(span) for span in spans]
        for wrong in self._ahead.values():
            wrong.cancel()
        self._ahead = {}
        found = [read.result() for read in reads]
        first, last = spans[0], self._last
        stride = 0 if last is None else first.start - last.start
        if stride > 0 and stride == self._stride:
            following = [replace(span, start=span.start + stride) for span in spans]
            self._ahead = {span: self._ask(span) for span in following}
        self._last, self._stride = first, stride
        return found

    def close(self) -> None:
        """End the thread and drop the rows read ahead."""
        self._jobs.put(None)
        self._threads.join(_JOIN_S)

    def _ask(self, span: Span) -> Future[Columns]:
        future: Future[Columns] = Future()
        self._jobs.put((span, future))
        return future

    def _execute(self) -> None:
        while (job := self._jobs.get()) is not None:
            span, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._read(span.start, span.count))
            except BaseException as error:  # it is raised to the caller that requests these rows
                future.set_exception(error)
