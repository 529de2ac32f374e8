"""Generated clusters and jobs with the ranges of the papers' evaluations; offers from a price book.

Ranges of workers, parameter servers, model sizes, epochs and utilities are those of SMD; those of
samples, gamma, batch, links and urgency are reconstructed. The number of samples is below the
papers' 20,000 to 500,000, since otherwise most jobs could not end on 10 machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from geo_ray.base.errors import PriceUnknownError, ScheduleInputError
from geo_ray.planner.profile import StepModel
from geo_ray.prices.price_book import PriceBook, instance_of
from geo_ray.scheduler.cluster import (
    RESOURCES,
    ClusterSite,
    Floats,
    RegionNet,
    SharedCluster,
    unit_prices,
)
from geo_ray.scheduler.job import (
    MACHINE,
    BatchLimits,
    ClusterJob,
    JobDemands,
    JobSpeed,
    SigmoidUtility,
)

_MACHINE_R: Final = (8.0, 72.0, 192.0, 400.0)
_USD_PER_H: Final = 3.2
_EGRESS: Final = (0.01, 0.02, 0.05, 0.09, 0.12)  # USD per GB, typical prices between cloud regions


@dataclass(frozen=True, slots=True)
class LoadShape:
    """Size of a generated cluster and load.

    Attributes:
        machines: machines of the cluster.
        jobs: number of jobs.
        slots: length of the horizon; jobs arrive in its first half.
        regions: number of regions; 1: the setting of the papers.
        spot_fraction: fraction of spot machines.
        slot_s: seconds of a slot.
    """

    machines: int = 50
    jobs: int = 50
    slots: int = 20
    regions: int = 1
    spot_fraction: float = 0.0
    slot_s: float = 1200.0


@dataclass(frozen=True, eq=False)
class RegionOffers:
    """Machines of one type with prices and egress, by region.

    Attributes:
        names: names of the regions.
        machine_R: units of each resource per machine.
        usd_per_h_G: on-demand price.
        spot_usd_per_h_G: mean spot price.
        egress_usd_per_gb_GG: egress price between regions.
    """

    names: tuple[str, ...]
    machine_R: tuple[float, ...]
    usd_per_h_G: Floats
    spot_usd_per_h_G: Floats
    egress_usd_per_gb_GG: Floats


def generated_cluster(
    shape: LoadShape, seed: int, offers: RegionOffers | None = None
) -> SharedCluster:
    """Return a generated cluster.

    Args:
        shape: size.
        seed: seed of links, spot markets and, without ``offers``, prices.
        offers: machines and prices of a price book; None: generated as well.

    With several regions, machines are distributed evenly, links have 100 Mbit/s to 5 Gbit/s, and
    prices differ by a factor of 0.7 to 1.5. Spot machines cost 0.3 of that, change by the slot, and
    are unavailable at times: for 1 to 6 slots, from 5 % of the slots on, never in the first.
    """
    rng = np.random.default_rng([seed, 1])
    regions = shape.regions if offers is None else len(offers.names)
    machines, slots = shape.machines, shape.slots
    mbps_GG = np.exp(rng.uniform(np.log(100), np.log(5000), (regions, regions)))
    mbps_GG = np.minimum(mbps_GG, mbps_GG.T)
    np.fill_diagonal(mbps_GG, 10_000.0)
    usd_GG = rng.choice(_EGRESS, (regions, regions))
    np.fill_diagonal(usd_GG, 0.0)
    rtt_GG = rng.uniform(0.02, 0.2, (regions, regions))
    np.fill_diagonal(rtt_GG, 0.0)
    names = tuple(f"region{number}" for number in range(regions))
    spots = rng.random(machines) < shape.spot_fraction
    sites = tuple(
        ClusterSite(f"m{number}", number % regions, 20_000.0, bool(spots[number]))
        for number in range(machines)
    )
    usd_per_h_G = _USD_PER_H * (rng.uniform(0.7, 1.5, regions) if regions > 1 else np.ones(1))
    if offers is None:
        offers = RegionOffers(names, _MACHINE_R, usd_per_h_G, 0.3 * usd_per_h_G, usd_GG)
    usd_SR = np.stack(
        [
            unit_prices(
                float((offers.spot_usd_per_h_G if s.spot else offers.usd_per_h_G)[s.region]),
                offers.machine_R,
            )
            for s in sites
        ]
    )
    capacity_SR = np.tile(np.array(offers.machine_R), (machines, 1))
    if not spots.any():
        wide = (slots, machines, len(RESOURCES))
        capacity, usd = np.broadcast_to(capacity_SR, wide), np.broadcast_to(usd_SR, wide)
    else:
        there_TS = np.ones((slots, machines))
        for site in np.flatnonzero(spots):
            for slot in np.flatnonzero(rng.random(slots) < 0.05):
                there_TS[max(1, slot) : slot + int(rng.integers(1, 7)), site] = 0.0
        move_TS = np.where(spots, np.exp(rng.normal(0, 0.15, (slots, machines))), 1.0)
        capacity, usd = capacity_SR * there_TS[:, :, None], usd_SR * move_TS[:, :, None]
    net = RegionNet(offers.names, mbps_GG, offers.egress_usd_per_gb_GG, rtt_GG)
    return SharedCluster(sites, RESOURCES, shape.slot_s, capacity, usd, net)


def generated_jobs(shape: LoadShape, seed: int) -> list[ClusterJob]:
    """Return generated jobs.

    With several regions, a third of the jobs have their data in one region, a third in two regions
    with uneven fractions, and the others everywhere.
    """
    rng = np.random.default_rng([seed, 2])
    arrivals = np.sort(rng.integers(0, max(1, shape.slots // 2), shape.jobs))
    return [_job(number, int(at), shape, rng) for number, at in enumerate(arrivals)]


def _job(number: int, arrival: int, shape: LoadShape, rng: np.random.Generator) -> ClusterJob:
    worker_R = np.array([rng.integers(0, 5), rng.integers(1, 11), rng.integers(2, 33),
                         rng.integers(5, 11)], dtype=np.float64)  # fmt: skip
    server_R = np.array([0, rng.integers(1, 11), rng.integers(2, 33), rng.integers(5, 11)], float)
    batch = int(rng.integers(1 if shape.regions == 1 else 2, 201))
    row_s = float(rng.uniform(1e-5, 1e-4)) * shape.slot_s
    rows = float(rng.integers(50, 201)) * float(rng.integers(2_000, 20_001))
    model_bytes = float(rng.uniform(30e6, 575e6))
    per_server = int(rng.integers(1, 11))
    urgency = float(rng.choice([0, 1, 2], p=[0.10, 0.55, 0.35]))
    urgency = (0.0, float(rng.uniform(0.01, 1)), float(rng.uniform(4, 6)))[int(urgency)]
    utility = SigmoidUtility(float(rng.uniform(1, 100)), urgency, float(rng.uniform(1, 15)))
    wanted = int(min(batch, int(rng.integers(1, 31))))
    most_mbps = float(rng.uniform(100, 5000))
    steps = StepModel("", 0.0, 0.0, {MACHINE: row_s}, {MACHINE: (1, batch)}, (1, batch), 0.0)
    speed = JobSpeed(steps, model_bytes, BatchLimits(batch, batch), most_mbps=most_mbps)
    data: dict[int, float] = {}
    kind = int(rng.integers(0, 3))
    if shape.regions > 1 and kind:
        picked = rng.choice(shape.regions, min(kind, shape.regions), replace=False)
        first = float(rng.uniform(0.3, 0.7))
        data = {int(picked[0]): 1.0} if kind == 1 else {int(picked[0]): first,
                                                        int(picked[1]): 1 - first}  # fmt: skip
    demands = JobDemands(worker_R, server_R, per_server, batch, wanted)
    return ClusterJob(f"job{number}", arrival, rows, demands, speed, utility, data)


_GB_PER_CORE: Final = 4.0
_DISK_GB: Final = 400.0


def book_offers(book: PriceBook, machine: str, regions: Sequence[str]) -> RegionOffers:
    """Return the offers of some regions.

    Args:
        book: the price book.
        machine: cloud and type, as in ``aws:p4d.24xlarge``.
        regions: regions of the cloud.

    Raises:
        ScheduleInputError: the type is unknown, or a region is listed twice.
        PriceUnknownError: a price is unknown.
    """
    cloud, _, type_ = machine.partition(":")
    known = instance_of(cloud, type_)
    if known.accelerators is None or known.host_gb is None:
        raise ScheduleInputError(
            f"unknown machine type '{machine}'",
            fix="Name cloud and type, as in aws:p4d.24xlarge; `geo-ray prices` lists types.",
        )
    if not regions or len(set(regions)) < len(regions):
        raise ScheduleInputError("no region is given, or one is given twice")
    usd = [book.usd_of_hours(book.instance(cloud, name, type_), 1.0) for name in regions]
    spot = [
        _spot_usd(book, cloud, name, type_, on_demand_usd)
        for name, on_demand_usd in zip(regions, usd, strict=True)
    ]
    egress = np.array(
        [
            [0.0 if a == b else book.usd_of_volume(book.egress(cloud, a, b), 1.0) for b in regions]
            for a in regions
        ]
    )
    machine_R = (float(known.accelerators), known.host_gb / _GB_PER_CORE, known.host_gb, _DISK_GB)
    return RegionOffers(tuple(regions), machine_R, np.array(usd), np.array(spot), egress)


def _spot_usd(book: PriceBook, cloud: str, region: str, type_: str, on_demand_usd: float) -> float:
    """Return the spot price, or the on-demand price if there is none."""
    try:
        return book.usd_of_hours(book.instance(cloud, region, type_, "spot"), 1.0)
    except PriceUnknownError:
        return on_demand_usd
