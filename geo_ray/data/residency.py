"""Samples stay at home: whoever runs in one region is refused the shards of another."""

from __future__ import annotations

import logging

from geo_ray.data.manifest import DataShard
from geo_ray.errors import ResidencyDeniedError

_log = logging.getLogger(__name__)


def check_residency(shard: DataShard, here: str) -> None:
    """Refuse a shard whose home is elsewhere. Called before any store is touched.

    Args:
        shard: what is asked for.
        here: the region that the asking process runs in.

    Raises:
        ResidencyDeniedError: naming the shard and both regions; it is logged as well.
    """
    if shard.region != here:
        _log.warning(
            "residency: %s of %s was asked for in %s; refused", shard.path, shard.region, here
        )
        raise ResidencyDeniedError(
            f"shard {shard.path} lives in region {shard.region!r} and was asked for in {here!r}"
        )
