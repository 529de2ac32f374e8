"""A job of a shared cluster: its work, demands, speed and utility.

Speed: a step of ``F`` rows on ``W`` workers takes `StepModel.step_s` of ``F / W`` rows plus the
pull and push of the model: ``2 g / (S b)`` inside one site, with model size ``g``, ``S``
parameter servers and goodput ``b``. Otherwise the slowest pair of sites and the round trip
count, as often as `Timing` says. The region with the fewest workers relative to its data
determines the speed. Source: PD-ORS. Utility: ``u(d) = value / (1 + exp(urgency (d -
target_slots)))``. Source: SMD.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from geo_ray.planner.profile import StepModel
from geo_ray.planner.progress import Noise
from geo_ray.planner.timing import Timing
from geo_ray.scheduler.cluster import Allocation, Floats, SharedCluster

_STEEP: Final = 700.0  # exp of larger numbers overflows


@dataclass(frozen=True, slots=True)
class SigmoidUtility:
    """Value of a job by its completion time: a sigmoid that falls around its target.

    ``u(d) = value / (1 + exp(urgency (d - target_slots)))``, where ``d`` is the number of slots
    from the arrival slot to the last slot in which the job ran. Urgency 0: completion time does not
    matter (half of the value at any time). Urgency 4 to 6: no value when late.

    Source: SMD, a paper by the authors of PD-ORS.

    Attributes:
        value: priority; the value on immediate completion of an urgent job.
        urgency: steepness per slot.
        target_slots: slots after which half of the value is lost.
    """

    value: float
    urgency: float
    target_slots: float

    def of(self, slots: float) -> float:
        """Return the value of completion ``slots`` after the arrival slot."""
        return self.value / (1 + math.exp(min(_STEEP, self.urgency * (slots - self.target_slots))))


MACHINE: Final = "worker"
Counted = Floats | NDArray[np.int64] | float
_EPS: Final = 1e-9


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Batch sizes of a job.

    Attributes:
        rows: batch as submitted; progress is counted in rows of such steps.
        most_rows: maximum batch.
        noise_rows: gradient noise scale in rows; infinite: efficiency does not fall.
    """

    rows: int
    most_rows: int
    noise_rows: float = math.inf

    def efficiency(self, rows: int) -> float:
        """Return the progress of a row at batch ``rows``, relative to the submitted batch."""
        if rows == self.rows:
            return 1.0
        if math.isinf(self.noise_rows):
            return 1.0
        noise = Noise(1.0, self.noise_rows, self.rows, 2, 1)
        return noise.efficiency(rows, self.rows)


@dataclass(frozen=True, slots=True)
class JobSpeed:
    """Speed of a job with an allocation: step model and exchange timing of the planner.

    A step of ``F`` rows on ``W`` workers takes `StepModel.step_s` of ``F / W`` rows, and the pull
    and push of the model. On one site: ``2 g / (S b)`` in every step, with model size ``g``, ``S``
    parallel parameter servers and goodput ``b`` inside the site. Otherwise: the slowest pair of a
    worker's and a server's site, and the round trip, as often and as much hidden as `Timing` says;
    a step then takes the *pace* of `JobWork`. With an exchange in every step, no fixed part and no
    round trip, a worker computes ``1 / q`` rows per second, ``q = tau + 2 g gamma / (b F)``, as in
    PD-ORS with ``W = gamma S``.

    A job with data in several regions computes each region's part of a batch there, so the region
    with the fewest workers relative to its data determines the speed.

    Source: step and pace are those of `geo_ray.planner`; the distinction between one and several
    sites is PD-ORS's observation on locality, derived independently.

    Attributes:
        steps: step model of the planner, for machine type `MACHINE`.
        model_bytes: bytes of a push or a pull.
        batch: rows per step.
        timing: exchanges between sites.
        most_mbps: bandwidth limit of the job between sites.
    """

    steps: StepModel
    model_bytes: float
    batch: BatchLimits
    timing: Timing = field(default_factory=partial(Timing, 1.0))
    most_mbps: float = math.inf

    def step_s(self, workers: Counted, batch: float) -> Floats:
        """Return the seconds of a step without its exchange."""
        model = self.steps
        found = model.fixed_s + model.row_s[MACHINE] * batch / workers + model.lan_s * workers
        return np.asarray(found)

    def step_time_s(
        self, workers: Counted, servers: Counted, batch: float, link: LinkUsed
    ) -> Floats:
        """Return the average seconds of a step, with exchanges.

        Args:
            workers: on all sites; may be an array.
            servers: on all sites; may be an array.
            batch: rows per step.
            link: slowest link between a worker and a parameter server.
        """
        step_s = self.step_s(workers, batch)
        sent_s = 2 * 8e-6 * self.model_bytes / np.asarray(servers)
        if link.is_inside:
            return np.asarray(step_s + sent_s / link.mbps)
        exchange_s = sent_s / min(link.mbps, self.most_mbps) + link.rtt_s
        lines = self.timing.lines(_MANY_STEPS)
        paces = [first * exchange_s + second * step_s for first, second in lines]
        return np.asarray(np.max(paces, axis=0))

    def rows_per_s(self, workers: Counted, servers: Counted, batch: int, link: LinkUsed) -> Floats:
        """Return the progress per second, in rows of steps of the job's own batch."""
        step_time_s = self.step_time_s(workers, servers, batch, link)
        return np.asarray(batch * self.batch.efficiency(batch) / step_time_s)


_MANY_STEPS: Final = 1e6  # first and last exchange are negligible for that many steps


@dataclass(frozen=True, slots=True)
class LinkUsed:
    """The slowest link between a worker and a parameter server.

    Attributes:
        mbps: its goodput.
        is_inside: whether both are always on the same site.
        rtt_s: longest round-trip time.
    """

    mbps: float
    is_inside: bool
    rtt_s: float = 0.0


def link_used(cluster: SharedCluster, allocation: Allocation) -> LinkUsed:
    """Return the slowest link that an allocation uses."""
    sites = allocation.sites
    if len(sites) == 1:
        return LinkUsed(cluster.sites[sites[0]].inside_mbps, is_inside=True)
    net = cluster.net
    of_workers = sorted({cluster.sites[site].region for site, _ in allocation.workers})
    of_servers = sorted({cluster.sites[site].region for site, _ in allocation.servers})
    there = np.ix_(of_workers, of_servers)
    back = np.ix_(of_servers, of_workers)
    mbps = min(float(net.mbps_GG[there].min()), float(net.mbps_GG[back].min()))
    return LinkUsed(mbps, is_inside=False, rtt_s=float(net.rtt_s_GG[there].max()))


def counted_workers(
    cluster: SharedCluster, allocation: Allocation, fractions: Mapping[int, float]
) -> int:
    """Return the number of effective workers, as limited by the data of each region.

    Args:
        cluster: the cluster.
        allocation: allocation of the job.
        fractions: fraction of the data by region index; empty: data are available everywhere.
    """
    total = allocation.num_workers
    if not fractions:
        return total
    there: dict[int, int] = dict.fromkeys(fractions, 0)
    for site, count in allocation.workers:
        region = cluster.sites[site].region
        there[region] = there.get(region, 0) + count
    return math.floor(
        min(there[region] / fraction for region, fraction in fractions.items()) + _EPS
    )


@dataclass(frozen=True, eq=False)
class JobDemands:
    """Resource demands of a job's processes.

    Attributes:
        worker_R: units of each resource per worker.
        server_R: units of each resource per parameter server.
        workers_per_server: maximum workers per parameter server.
        most_workers: maximum workers; at most the rows of its batch.
        wanted_workers: requested workers, used by policies that do not choose the number.
    """

    worker_R: Floats
    server_R: Floats
    workers_per_server: int
    most_workers: int
    wanted_workers: int

    def servers(self, workers: int) -> int:
        """Return the number of parameter servers for a number of workers."""
        return math.ceil(workers / self.workers_per_server)

    def units_R(self, workers: float, servers: float) -> Floats:
        """Return the units of each resource for a number of workers and servers."""
        return np.asarray(self.worker_R * workers + self.server_R * servers)


@dataclass(frozen=True, eq=False)
class ClusterJob:
    """A job of a shared cluster: its work, demands, speed and utility.

    Attributes:
        id: its name.
        arrival_slot: slot in which it is submitted.
        rows: work, in rows of steps of its own batch.
        demands: resource demands of its processes.
        speed: its speed.
        utility: its utility.
        data: fraction of its data by region index; rows are computed where they are stored; empty:
            data are available everywhere.
        tenant: its tenant.
    """

    id: str
    arrival_slot: int
    rows: float
    demands: JobDemands
    speed: JobSpeed
    utility: SigmoidUtility
    data: Mapping[int, float] = field(default_factory=dict)
    tenant: str = ""

    def may_work_S(self, cluster: SharedCluster) -> np.ndarray:
        """Return the sites where it may have workers, bool (S,)."""
        if not self.data:
            return np.ones(len(cluster.sites), dtype=bool)
        return np.isin(cluster.region_S, list(self.data))

    def rows_per_s(self, cluster: SharedCluster, allocation: Allocation) -> float:
        """Return its progress per second with an allocation."""
        workers = counted_workers(cluster, allocation, self.data)
        servers = allocation.num_servers
        if workers == 0 or servers == 0:
            return 0.0
        link = link_used(cluster, allocation)
        return float(self.speed.rows_per_s(workers, servers, allocation.batch, link))

    def usd_per_s(self, cluster: SharedCluster, allocation: Allocation, slot: int) -> float:
        """Return its cost per second: resources and egress."""
        return self.machines_usd_per_s(cluster, allocation, slot) + self.egress_usd_per_s(
            cluster, allocation
        )

    def machines_usd_per_s(
        self, cluster: SharedCluster, allocation: Allocation, slot: int
    ) -> float:
        """Return the cost of its resources per second."""
        usd_per_h_SR = cluster.usd_per_h_TSR[slot]
        per_h = 0.0
        for counts, units_R in (
            (allocation.workers, self.demands.worker_R),
            (allocation.servers, self.demands.server_R),
        ):
            for site, count in counts:
                per_h += count * float(usd_per_h_SR[site] @ units_R)
        return per_h / 3600.0

    def egress_usd_per_s(self, cluster: SharedCluster, allocation: Allocation) -> float:
        """Return the cost of its exchanges per second.

        Each region sends one update to every remote parameter server, for the part of the model
        there, and receives the reply.
        """
        per_gb = cluster.net.usd_per_gb_GG
        servers = allocation.num_servers
        if len(allocation.sites) == 1 or not servers or not allocation.num_workers:
            return 0.0
        usd = 0.0
        for here in {cluster.sites[site].region for site, _ in allocation.workers}:
            for other, count in allocation.servers:
                there = cluster.sites[other].region
                usd += count / servers * (per_gb[here, there] + per_gb[there, here])
        usd *= self.speed.model_bytes * 1e-9
        if usd == 0.0:
            return 0.0
        workers = max(1, counted_workers(cluster, allocation, self.data))
        link = link_used(cluster, allocation)
        step_time_s = float(self.speed.step_time_s(workers, servers, allocation.batch, link))
        return usd / step_time_s / self.speed.timing.every
