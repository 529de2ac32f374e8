"""Traces become jobs of a shared cluster.

What a trace does not say is set by rule, from a digest of the job's id (or, for the region, of its
tenant) and the seed, so that it is the same whatever else the trace has:

- *work*: what the job's workers do in its duration on one site;
- *model*: one of `FAMILIES`; of a job that names its application, by its name;
- *region of its data*: by tenant, region ``g`` with a weight of ``1 / (g + 1)``; one region a job;
- *worth and deadline*: worth of 1 to 100, a target of 1.2 to 5 times the duration, urgency as in
  made-up loads;
- *parameter servers*: one for four workers, with 2 cores and 8 GB;
- *batch*: 32 rows a worker; it may be four times as large in all.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from geo_ray.errors import TraceError
from geo_ray.planning.model.step_model import StepModel
from geo_ray.scheduling.load.helios import read_helios
from geo_ray.scheduling.load.pai import read_pai
from geo_ray.scheduling.load.philly import read_philly
from geo_ray.scheduling.load.pollux_trace import read_pollux
from geo_ray.scheduling.load.record import TraceJob
from geo_ray.scheduling.model.cluster import SharedCluster
from geo_ray.scheduling.model.job import ClusterJob, JobDemands
from geo_ray.scheduling.model.speed import MACHINE, BatchLimits, JobSpeed, LinkUsed
from geo_ray.scheduling.model.utility import SigmoidUtility

FORMATS: Final[Mapping[str, Callable[[Path], list[TraceJob]]]] = {
    "philly": read_philly,
    "helios": read_helios,
    "pai": read_pai,
    "pollux": read_pollux,
}
FAMILIES: Final = (("small", 6e6, 1e-3), ("resnet", 102e6, 3e-3), ("vgg", 553e6, 5e-3),
                   ("bert", 440e6, 2e-2))  # fmt: skip
"""Name, bytes of the model, seconds of a row on one worker: assumptions of the usual order."""
_ROWS: Final = 32


def read_trace(path: Path, kind: str) -> list[TraceJob]:
    """Read a trace, jobs in the order of their submission, the first at 0.

    Raises:
        TraceError: it cannot be read, or has no job that ran.
    """
    if kind not in FORMATS:
        raise TraceError(f"there is no format '{kind}'", fix=f"Choose among {', '.join(FORMATS)}.")
    jobs = sorted(FORMATS[kind](path), key=lambda job: (job.submit_s, job.id))
    if not jobs:
        raise TraceError(f"trace {path} has no job with accelerators that ran")
    return jobs


def cluster_jobs(
    traced: Sequence[TraceJob], cluster: SharedCluster, seed: int = 0
) -> list[ClusterJob]:
    """Return jobs by the rules above; the first comes in slot 0."""
    first_s = min(job.submit_s for job in traced)
    return [_job(job, first_s, cluster, seed) for job in traced]


def _job(traced: TraceJob, first_s: float, cluster: SharedCluster, seed: int) -> ClusterJob:
    rng = np.random.default_rng(_digest(seed, traced.id))
    regions = len(cluster.net.names)
    weights = 1 / np.arange(1, regions + 1)
    by_tenant = np.random.default_rng(_digest(seed, traced.tenant or traced.id))
    region = int(by_tenant.choice(regions, p=weights / weights.sum()))
    named = [family for family in FAMILIES if family[0] in traced.model]
    _, model_bytes, row_s = named[0] if named else FAMILIES[int(rng.integers(len(FAMILIES)))]
    rows = _ROWS * traced.workers
    cpus = traced.cpus or 4 * max(1.0, traced.gpus)
    # A whole machine is the most that a worker can be given; larger ones are cut to it.
    most_R = cluster.capacity_TSR[0].max(axis=0)
    worker_R = np.minimum([traced.gpus, cpus, 16 * max(1.0, traced.gpus), 0.0], most_R)
    server_R = np.minimum([0.0, 2.0, 8.0, 0.0], most_R)
    steps = StepModel("", 0.0, 0.0, {MACHINE: row_s}, {MACHINE: (1, rows)}, (1, rows), 0.0)
    speed = JobSpeed(steps, model_bytes, BatchLimits(rows, 4 * rows, 4.0 * rows))
    demands = JobDemands(worker_R, server_R, 4, min(rows, 4 * traced.workers), traced.workers)
    link = LinkUsed(float(cluster.inside_mbps_S.max()), is_inside=True)
    per_s = float(speed.rows_per_s(traced.workers, demands.servers(traced.workers), rows, link))
    slots = traced.duration_s / cluster.slot_s
    kind = int(rng.choice(3, p=[0.10, 0.55, 0.35]))
    urgency = (0.0, float(rng.uniform(0.01, 1)), float(rng.uniform(4, 6)))[kind]
    utility = SigmoidUtility(
        float(rng.uniform(1, 100)), urgency / max(1.0, slots), slots * float(rng.uniform(1.2, 5))
    )
    return ClusterJob(
        traced.id,
        math.floor((traced.submit_s - first_s) / cluster.slot_s),
        max(1.0, per_s * traced.duration_s),
        demands,
        speed,
        utility,
        {region: 1.0} if regions > 1 else {},
        traced.tenant,
    )


def _digest(seed: int, text: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{text}".encode()).digest()[:8], "big")
