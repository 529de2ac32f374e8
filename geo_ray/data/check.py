"""Verify all shards of a manifest and say what is in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from geo_ray.data.columns import parse_types
from geo_ray.data.manifest import DataShard, Manifest
from geo_ray.data.nearby import listed
from geo_ray.data.verify import fetch_shard
from geo_ray.errors import DataError, ManifestError
from geo_ray.stores.base import open_store


@dataclass(frozen=True)
class Verdict:
    """What was found of one shard.

    Attributes:
        shard: the manifest's record.
        error: why it must not be used; None if it is whole.
    """

    shard: DataShard
    error: DataError | None


def shards_to_check(manifest: Manifest, region: str | None) -> tuple[DataShard, ...]:
    """The shards of one region, or of all.

    Raises:
        ManifestError: if the region is unknown.
    """
    if region is not None and region not in manifest.stores:
        raise ManifestError(
            f"region {region!r} is not in the manifest, which has {listed(manifest.stores)}",
            fix="Correct the region's name.",
        )
    return tuple(s for s in manifest.shards if region is None or s.region == region)


def check_shards(manifest: Manifest, region: str | None = None) -> Iterator[Verdict]:
    """Read each shard entirely and compare it with the manifest; go on after a bad one.

    Args:
        manifest: the data set.
        region: only this region's; None for all, which reads across regions.

    Yields:
        One verdict per shard, in the manifest's order.

    Raises:
        ManifestError: if the region is unknown.
    """
    types = parse_types(manifest.columns)
    stores = {name: open_store(uri) for name, uri in manifest.stores.items()}
    for shard in shards_to_check(manifest, region):
        try:
            fetch_shard(shard, types, stores[shard.region], here=shard.region)
        except DataError as error:
            yield Verdict(shard, error)
        else:
            yield Verdict(shard, None)
