"""Pools that gave nothing are left alone: for a while, and for longer each time."""

from __future__ import annotations

from typing import Final

from geo_ray.autoscale.config import RetryConfig
from geo_ray.autoscale.memory import AutoscalerMemory, PoolRecord
from geo_ray.providers.base import Pool, Shortage

_MOST_DOUBLINGS: Final = 20


def cool_down(
    memory: AutoscalerMemory, pool: Pool, shortage: Shortage, now_unix_s: float, retry: RetryConfig
) -> None:
    """Leave a pool alone.

    A pool that is sold out: for a while, twice as long as the last time. A quota or a refusal is of
    the type in the region, whatever the zone, and lasts until somebody does something about it:
    for the longest time at once. What was throttled is simply sent again.
    """
    if shortage is Shortage.THROTTLED:
        return
    if shortage is Shortage.SOLD_OUT:
        _leave(memory.pool(pool), now_unix_s, retry)
        return
    memory.pool(pool).until_unix_s = now_unix_s + retry.longest_s
    kind = (pool.region, pool.type, pool.market)
    for record in memory.pools.values():
        if (record.pool.region, record.pool.type, record.pool.market) == kind:
            record.until_unix_s = now_unix_s + retry.longest_s


def did_not_join(
    memory: AutoscalerMemory,
    pool: Pool,
    request_id: str | None,
    now_unix_s: float,
    retry: RetryConfig,
) -> None:
    """Leave a pool alone of which a machine came and its node did not.

    For a while, and twice as long for each further launch in a row; machines of one launch are one
    failure.
    """
    record = memory.pool(pool)
    if request_id is not None and record.unjoined_request == request_id:
        return
    pause_s = retry.first_s * 2 ** min(record.unjoined, _MOST_DOUBLINGS)
    record.until_unix_s = max(record.until_unix_s, now_unix_s + min(pause_s, retry.longest_s))
    record.unjoined, record.unjoined_request = record.unjoined + 1, request_id


def joined(memory: AutoscalerMemory, pool: Pool) -> None:
    """Take note that the node of a machine of a pool came."""
    record = memory.pool(pool)
    record.unjoined, record.unjoined_request = 0, None


def gave(memory: AutoscalerMemory, pool: Pool, came_unix_s: float) -> None:
    """Take note that a machine of a pool computes.

    Args:
        memory: is changed.
        pool: which.
        came_unix_s: when the machine was first seen. One that came as the last of a pool's, while
            others were refused, says nothing against leaving the pool alone for longer.
    """
    record = memory.pool(pool)
    if record.until_unix_s <= came_unix_s:
        record.refusals = 0


def left_alone_s(record: PoolRecord | None, now_unix_s: float) -> float:
    """Return for how long a pool is left alone from now on."""
    return 0.0 if record is None else max(0.0, record.until_unix_s - now_unix_s)


def _leave(record: PoolRecord, now_unix_s: float, retry: RetryConfig) -> None:
    if record.until_unix_s > now_unix_s:
        return  # several failures of one moment are one
    pause_s = retry.first_s * 2 ** min(record.refusals, _MOST_DOUBLINGS)
    record.until_unix_s = now_unix_s + min(pause_s, retry.longest_s)
    record.refusals += 1
