"""Whether the processes of a run train on although nobody drives it, and for how long. Pure."""

from __future__ import annotations

from geo_ray.config.cluster import ClusterConfig
from geo_ray.config.recorded import RunConfig
from geo_ray.observe.metrics.totals import RunTotals


def patience_s(cluster: ClusterConfig, run: RunConfig) -> float | None:
    """For how long processes of a run wait for another driver; None: they end with theirs."""
    return None if cluster.kind == "local" else run.driverless_s


def waits_s(patience_s: float | None, totals: RunTotals, silent_s: float | None) -> float | None:
    """For how long the processes of a run that nobody drives train on and wait for a driver.

    Args:
        patience_s: for how long they wait at most, as `patience_s` gives it.
        totals: the fold over its events.
        silent_s: since its driver was last heard; None if not known.

    Returns:
        Seconds from now; None if they do not: they have ended, end, or never trained.
    """
    if patience_s is None or silent_s is None or totals.started is None:
        return None
    if totals.finished is not None or totals.failed is not None or totals.stop_cause is not None:
        return None
    left_s = patience_s - silent_s
    return left_s if left_s > 0 else None
