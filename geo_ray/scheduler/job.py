"""A job of a shared cluster: its work, demands, speed and utility.

Speed: a step of ``F`` rows on ``W`` workers takes `StepModel.step_s` of ``F / W`` rows plus the
pull and push of the model: ``2 g / (S b)`` inside one site, with ``g`` the model's size, ``S``
parameter servers and ``b`` the goodput; else the slowest pair of sites and the round trip, as
often as `Timing` says. The region with the fewest workers for its share decides. Source:
PD-ORS. Utility: ``u(d) = value / (1 + exp(urgency (d - target_slots)))``. Source: SMD.
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

_STEEP: Final = 700.0  # exp of more is no float


@dataclass(frozen=True, slots=True)
class SigmoidUtility:
    """What a job is worth by how long it takes: a sigmoid that falls around its target.

    ``u(d) = value / (1 + exp(urgency (d - target_slots)))``, where ``d`` is the number of slots
    from the one in which the job came to the last one in which it ran. Urgency 0 is a job that does
    not mind waiting (half of its worth, whenever); 4 to 6 one that is worth nothing when late.

    Source: read in SMD, a sister paper of PD-ORS by the same authors.

    Attributes:
        value: priority; what the job is worth at once, if it is urgent.
        urgency: per slot.
        target_slots: when half of the worth is gone.
    """

    value: float
    urgency: float
    target_slots: float

    def of(self, slots: float) -> float:
        """Return what finishing ``slots`` after the slot of arrival is worth."""
        return self.value / (1 + math.exp(min(_STEEP, self.urgency * (slots - self.target_slots))))


MACHINE: Final = "worker"
Counted = Floats | NDArray[np.int64] | float
_EPS: Final = 1e-9


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Rows of a step.

    Attributes:
        rows: as the job was submitted; progress is counted in rows of such steps.
        most_rows: that it may have.
        noise_rows: batch at which gradient noise and gradient balance; infinite: never.
    """

    rows: int
    most_rows: int
    noise_rows: float = math.inf

    def efficiency(self, rows: int) -> float:
        """Return the progress of a row with ``rows`` a step, against one of the job's own batch."""
        if rows == self.rows:
            return 1.0
        if math.isinf(self.noise_rows):
            return 1.0
        noise = Noise(1.0, self.noise_rows, self.rows, 2, 1)
        return noise.efficiency(rows, self.rows)


@dataclass(frozen=True, slots=True)
class JobSpeed:
    """How fast a job is with what it has: the planner's step model and its timing of exchanges.

    A step of ``F`` rows on ``W`` workers takes what `StepModel.step_s` says of ``F / W`` rows, and
    the pull and push of the model. All on one site: ``2 g / (S b)`` in every step, with ``g`` the
    model's size, ``S`` parameter servers that serve at the same time and ``b`` the goodput inside
    the site. Anything else: the same with the slowest pair of a worker's and a server's site, and
    the round trip, as often and as much hidden as `Timing` says; a step then takes the *pace* of
    `JobWork`. With an exchange in every step, no fixed part and no round trip, rows per second of a
    worker are ``1 / q``, ``q = tau + 2 g gamma / (b F)``, as in PD-ORS with ``W = gamma S``.

    A job whose data lie in several regions computes each region's share of a batch there, so the
    region with fewest workers for its share decides.

    Source: step and pace are those of `geo_ray.planner`; the two cases of one site and several are
    PD-ORS's observation on locality, derived anew.

    Attributes:
        steps: the planner's model of a step, of the machine type `MACHINE`.
        model_bytes: of a push, and of a pull.
        batch: rows of a step.
        timing: exchanges between sites.
        most_mbps: of the job's own lines between sites.
    """

    steps: StepModel
    model_bytes: float
    batch: BatchLimits
    timing: Timing = field(default_factory=partial(Timing, 1.0))
    most_mbps: float = math.inf

    def step_s(self, workers: Counted, batch: float) -> Floats:
        """Return the seconds of a step without the exchange."""
        model = self.steps
        found = model.fixed_s + model.row_s[MACHINE] * batch / workers + model.lan_s * workers
        return np.asarray(found)

    def pace_s(self, workers: Counted, servers: Counted, batch: float, link: LinkUsed) -> Floats:
        """Return the seconds of a step with all that belongs to it.

        Args:
            workers: of all sites; may be an array.
            servers: the same.
            batch: rows of a step.
            link: the slowest pair of a worker and a parameter server.
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
        pace_s = self.pace_s(workers, servers, batch, link)
        return np.asarray(batch * self.batch.efficiency(batch) / pace_s)


_MANY_STEPS: Final = 1e6  # the first and last exchange of a job of so many do not count


@dataclass(frozen=True, slots=True)
class LinkUsed:
    """The slowest way between a worker and a parameter server.

    Attributes:
        mbps: its goodput.
        is_inside: whether both are always on one and the same site.
        rtt_s: the longest round trip.
    """

    mbps: float
    is_inside: bool
    rtt_s: float = 0.0


def link_used(cluster: SharedCluster, allocation: Allocation) -> LinkUsed:
    """Return the slowest pattern that an allocation uses."""
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
    """Return the workers that count: of so many as its data shares allow.

    Args:
        cluster: the cluster.
        allocation: what the job has.
        fractions: of its data, by number of region; empty: they lie anywhere.
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
    """What a job's processes need.

    Attributes:
        worker_R: of each resource for a worker.
        server_R: the same for a parameter server.
        workers_per_server: at most.
        most_workers: at most; no more than rows of its batch.
        wanted_workers: what its owner asked for; policies that do not choose a number give that.
    """

    worker_R: Floats
    server_R: Floats
    workers_per_server: int
    most_workers: int
    wanted_workers: int

    def servers(self, workers: int) -> int:
        """Return the parameter servers that so many workers need."""
        return math.ceil(workers / self.workers_per_server)

    def units_R(self, workers: float, servers: float) -> Floats:
        """Return what so many need of each resource."""
        return np.asarray(self.worker_R * workers + self.server_R * servers)


@dataclass(frozen=True, eq=False)
class ClusterJob:
    """A job of a shared cluster: its work, what it needs, how fast it is, and what it is worth.

    Attributes:
        id: its name.
        arrival_slot: before which nobody knows of it.
        rows: of work, in steps of its own batch.
        demands: what its processes need.
        speed: how fast it is.
        utility: what it is worth.
        data: share of its data by number of region: rows are computed where they lie; empty: they
            lie everywhere.
        tenant: whose it is.
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
        """Return its progress per second with what it has."""
        workers = counted_workers(cluster, allocation, self.data)
        servers = allocation.num_servers
        if workers == 0 or servers == 0:
            return 0.0
        link = link_used(cluster, allocation)
        return float(self.speed.rows_per_s(workers, servers, allocation.batch, link))

    def usd_per_s(self, cluster: SharedCluster, allocation: Allocation, slot: int) -> float:
        """Return what it costs per second: resources, and egress as it trains."""
        return self.machines_usd_per_s(cluster, allocation, slot) + self.egress_usd_per_s(
            cluster, allocation
        )

    def machines_usd_per_s(
        self, cluster: SharedCluster, allocation: Allocation, slot: int
    ) -> float:
        """Return what its resources cost per second."""
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
        """Return what its exchanges cost per second.

        Each region sends one update to each parameter server elsewhere, of the part of the model
        that lies there, and gets it back.
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
        pace_s = float(self.speed.pace_s(workers, servers, allocation.batch, link))
        return usd / pace_s / self.speed.timing.every
