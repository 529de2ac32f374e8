"""A region's reader: stream positions in, arrays out."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from geo_ray.data.columns import Columns, parse_types
from geo_ray.data.manifest import DataShard, Manifest, SplitName
from geo_ray.data.nearby import listed
from geo_ray.data.order import StreamOrder
from geo_ray.data.residency import check_residency
from geo_ray.data.verify import fetch_shard
from geo_ray.errors import ManifestError, ShardEmptyError, StoreError
from geo_ray.stores.base import Store, open_store
from geo_ray.util.nearest import nearest

Array = np.ndarray[Any, Any]
_MOST_PAUSE_S: Final = 15.0
log = logging.getLogger(__name__)


class RegionReader:
    """Reads one split of one region, one process each; not for use from several threads.

    A shard is checked (size, sha256, schema, rows) whenever it is fetched, before it is decoded;
    the last ``cache_shards`` decoded ones are kept. All returned arrays are writable copies that
    the caller owns.

    Args:
        manifest: the data set.
        region: whose shards.
        split: "train" or "heldout".
        order_seed: fixes the stream's order, together with region and split.
        cache_shards: decoded shards kept in memory; from 4 (one window of the order) upwards no
            shard is fetched more than once or twice per epoch. Has no influence on the order.
        here: the region that this process runs in, e.g. its node's label; None if that is
            ``region`` by construction.
        store: the region's store; None opens the one that the manifest names.

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
                + (f"; did you mean {near}?" if (near := nearest(region, manifest.stores)) else ""),
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
        self._cache: OrderedDict[str, dict[str, Array]] = OrderedDict()
        self._cache_shards = max(1, cache_shards)
        self._retry_s = 0.0

    @property
    def num_rows(self) -> int:
        """The number of rows of this region's split: one epoch."""
        return self._order.rows_per_epoch

    def retry_for(self, seconds: float) -> None:
        """From now on ask a store that does not answer again for so long, before a read fails."""
        self._retry_s = seconds

    def read(self, start: int, count: int) -> Columns:
        """Rows [start, start + count) of the infinite stream.

        Args:
            start: first position, 0 or more; ``start // num_rows`` is its epoch.
            count: number of rows N, 0 or more.

        Returns:
            Name -> (N,) or (N, length), in stream order.

        Raises:
            ShardMissingError: a shard is not in its store.
            ShardCorruptError: a shard's bytes are not those of the manifest.
            SchemaMismatchError: a shard's columns are not those of the manifest.
            StoreError: the store does not answer.
        """
        shard_N, row_N = self._order.locate_rows(start, count)
        if count > 0 and (shard_N == shard_N[0]).all():  # the usual case of few rows
            columns = self._columns(self._shards[shard_N[0]])
            return {name: columns[name][row_N] for name in self._types}
        out = {name: np.empty(t.shape(count), t.dtype) for name, t in self._types.items()}
        for index in np.unique(shard_N):
            columns = self._columns(self._shards[index])
            mine_N = shard_N == index
            for name, array in out.items():
                array[mine_N] = columns[name][row_N[mine_N]]
        return out

    def scan(self, batch_rows: int) -> Iterator[Columns]:
        """Every row once, in the order of the files; for evaluation.

        Args:
            batch_rows: most rows per batch; no batch spans two shards.

        Yields:
            Name -> (N,) or (N, length) with 1 <= N <= ``batch_rows``.

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
        """One whole shard by its path in the manifest.

        Raises:
            ResidencyDeniedError: if its home is another region; before any I/O.
            ManifestError: if the manifest has no such shard; the others as for `read`.
        """
        for shard in self._manifest.shards:
            if shard.path == path:
                return {n: array.copy() for n, array in self._columns(shard).items()}
        raise ManifestError(f"shard {path!r} is not in the manifest")

    def _columns(self, shard: DataShard) -> dict[str, Array]:
        if shard.path in self._cache:
            self._cache.move_to_end(shard.path)
            return self._cache[shard.path]
        columns = self._fetched(shard)
        self._cache[shard.path] = columns
        while len(self._cache) > self._cache_shards:
            self._cache.popitem(last=False)
        return columns

    def _fetched(self, shard: DataShard) -> dict[str, Array]:
        ends_s, pause_s = time.monotonic() + self._retry_s, 1.0
        while True:
            try:
                return fetch_shard(shard, self._types, self._store, self._here)
            except StoreError as error:
                left_s = ends_s - time.monotonic()
                if left_s <= 0:
                    raise
                log.warning("%s; it is asked again for %.0f s", error.message, left_s)
                time.sleep(min(pause_s, left_s))
                pause_s = min(2 * pause_s, _MOST_PAUSE_S)


def _mix(seed: int, region: str, split: str) -> int:
    """A seed of its own for every region and split."""
    digest = hashlib.sha256(f"{seed}/{region}/{split}".encode()).digest()
    return int.from_bytes(digest[:8], "big")
