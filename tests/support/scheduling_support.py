"""Small clusters and jobs for scheduler tests."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from geo_ray.planner.profile import StepModel
from geo_ray.planner.timing import Timing
from geo_ray.scheduler.cluster import RESOURCES, ClusterSite, RegionNet, SharedCluster
from geo_ray.scheduler.job import (
    MACHINE,
    BatchLimits,
    ClusterJob,
    JobDemands,
    JobSpeed,
    SigmoidUtility,
)


def cluster_of(
    capacities: np.ndarray,
    regions: tuple[int, ...],
    *,
    spot: tuple[bool, ...] | None = None,
    slot_s: float = 100.0,
    mbps: float = 1000.0,
    usd_per_gb: float = 0.1,
) -> SharedCluster:
    """Return a cluster from capacities by slot, site and (gpu, cpu)."""
    slots, sites, _ = capacities.shape
    wide = np.zeros((slots, sites, len(RESOURCES)))
    wide[:, :, :2] = capacities
    num = max(regions) + 1
    mbps_GG = np.full((num, num), mbps)
    np.fill_diagonal(mbps_GG, 5000.0)
    egress = np.full((num, num), usd_per_gb)
    np.fill_diagonal(egress, 0.0)
    spots = spot or (False,) * sites
    made = tuple(
        ClusterSite(f"s{i}", r, 10_000.0, s)
        for i, (r, s) in enumerate(zip(regions, spots, strict=True))
    )
    usd = np.full(wide.shape, 0.36)
    net = RegionNet(tuple(f"r{g}" for g in range(num)), mbps_GG, egress, np.zeros((num, num)))
    return SharedCluster(made, RESOURCES, slot_s, wide, usd, net)


def job_of(
    name: str = "a",
    *,
    arrival: int = 0,
    rows: float = 1000.0,
    row_s: float = 0.1,
    model_bytes: float = 1e6,
    most: int = 4,
    per_server: int = 2,
    value: float = 10.0,
    urgency: float = 0.0,
    target: float = 5.0,
    data: Mapping[int, float] | None = None,
    worker: tuple[float, float] = (1.0, 1.0),
    server: tuple[float, float] = (0.0, 1.0),
    batch: int = 8,
    most_rows: int | None = None,
    wanted: int = 2,
    timing: Timing | None = None,
) -> ClusterJob:
    """Return a job with demands of (gpu, cpu)."""
    steps = StepModel("", 0.0, 0.0, {MACHINE: row_s}, {MACHINE: (1, batch)}, (1, batch), 0.0)
    limits = BatchLimits(batch, most_rows or batch, 4.0 * batch)
    speed = JobSpeed(steps, model_bytes, limits, timing or Timing(1.0))
    demands = JobDemands(
        np.array([*worker, 0.0, 0.0]), np.array([*server, 0.0, 0.0]), per_server, most, wanted
    )
    utility = SigmoidUtility(value, urgency, target)
    return ClusterJob(name, arrival, rows, demands, speed, utility, data or {})
