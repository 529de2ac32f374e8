"""What a region could rent: prices, speeds, memory and network of its machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Final

from geo_ray.clouds.instances import Instance, instance_of
from geo_ray.clouds.price import PriceRecord
from geo_ray.clouds.price_book import PriceBook
from geo_ray.config.experiment import Experiment
from geo_ray.errors import ConfigError, ProfileError
from geo_ray.job.plans.sizes import ModelSize
from geo_ray.planning.config import MachineConfig, PlanConfig, RegionOffer
from geo_ray.planning.model.memory import Footprint
from geo_ray.planning.model.step_model import StepModel
from geo_ray.planning.model.work import HOUR_S
from geo_ray.planning.request import Rental, RentalPrice, Site
from geo_ray.planning.search.fleet import ANY_ROWS
from geo_ray.planning.section import no_plan_section

_MONTH_H: Final = 730.0
_STATES: Final = {"sgd": 0, "momentum": 1, "adamw": 2}
"""Values per parameter that an optimizer keeps."""


def section_of(experiment: Experiment) -> PlanConfig:
    """The section `plan`.

    Raises:
        ConfigError: there is none, or its regions are not those of the run.
    """
    plan = experiment.plan
    if plan is None:
        raise no_plan_section(experiment.region_names)
    missing = [name for name in experiment.region_names if name not in plan.regions]
    unknown = [name for name in plan.regions if name not in experiment.region_names]
    if missing or unknown:
        raise ConfigError(
            f"plan.regions: they are not those of the run; {', '.join(missing + unknown)} is in "
            "one only",
            fix=f"Say there what could be rented in {', '.join(experiment.region_names)}.",
        )
    return plan


def site_of(
    name: str, experiment: Experiment, book: PriceBook, measured: StepModel | None, size: ModelSize
) -> Site:
    """A region of the run as the planner sees it; errors as for `inputs.request_of`."""
    plan = section_of(experiment)
    offer = plan.regions[name]
    footprint = _footprint(experiment, size)
    lacks = _server_lacks(offer, footprint)
    counts_lan = _lan_is_counted(plan, measured)
    rentals, edges_h = [], _edges_h_of_server(offer, book)
    for machine in offer.machines:
        has = _facts(offer, machine)
        room, why = footprint.room(has, serves=offer.server is None)
        for market in machine.markets:
            record = book.instance(offer.cloud, offer.at, machine.type, market)
            edges_h |= {tier.after_h for tier in record.age_tiers}
            is_spot = market == "spot"
            lost = plan.spot.preemptions_per_h * plan.spot.lost_s / HOUR_S if is_spot else 0.0
            rentals.append(
                Rental(
                    machine.type,
                    market,
                    _hourly(book, record),
                    _speed(name, machine, measured),
                    0 if record.stock == "none" or not room or lacks else machine.cap,
                    min(lost, 0.9),
                    _lan_s(experiment, has, measured, footprint),
                    max(1, has.accelerators or 0),
                    int(min(room, ANY_ROWS)),
                    lacks or why,
                )
            )
    return Site(
        name,
        rentals,
        _standing(offer, book),
        fixed_s=_fixed_s(experiment, measured),
        one_is_free=offer.server is None and counts_lan,
        counts_lan=counts_lan,
        server=offer.server,
        edges_h=frozenset(edges_h),
    )


def notes_of(experiment: Experiment, sites: Sequence[Site], size: ModelSize) -> list[str]:
    """What is to be said of machines that were left out, and of what is not counted."""
    plan = section_of(experiment)
    found = [
        f"{site.name}: no {rental.type}: {rental.left_out}"
        for site in sites
        for rental in site.rentals
        if rental.left_out
    ]
    has = {
        machine.type: _facts(offer, machine)
        for offer in plan.regions.values()
        for machine in offer.machines
    }
    nets = sorted(kind for kind, facts in has.items() if facts.network_gbps is None)
    if nets and any(site.counts_lan for site in sites):
        found.append(
            f"what machines send each other inside a region is not counted for {', '.join(nets)}: "
            "give network_gbps, or plan.lan_s_per_machine"
        )
    hosts = sorted(kind for kind, facts in has.items() if facts.host_gb is None)
    if hosts:
        found.append(f"nobody knows whether the memory of {', '.join(hosts)} suffices: host_gb")
    elif size.row_bytes is None and plan.activation_mb_per_row is None:
        found.append("memory for rows was not counted: give plan.activation_mb_per_row")
    if plan.step_overhead_s is None and not any(site.fixed_s for site in sites):
        found.append(
            "the parameter server's own work, sums and optimizer, is not counted: profile the job, "
            "or give plan.step_overhead_s"
        )
    if any(offer.disk is None for offer in plan.regions.values()):
        found.append("disks are not counted where plan.regions.*.disk names none")
    return list(dict.fromkeys(found))


def _facts(offer: RegionOffer, machine: MachineConfig) -> Instance:
    """What a type of machine has: as the configuration says, else as known."""
    known = instance_of(offer.cloud, machine.type)
    own = {field.name: getattr(machine, field.name) for field in fields(Instance)}
    return replace(known, **{name: value for name, value in own.items() if value is not None})


def _footprint(experiment: Experiment, size: ModelSize) -> Footprint:
    given_mb = section_of(experiment).activation_mb_per_row
    return Footprint(
        size.num_params,
        _STATES[experiment.optimizer.kind],
        experiment.worker_steps > 0,
        len(experiment.regions),
        size.row_bytes if given_mb is None else given_mb * 1e6,
    )


def _server_lacks(offer: RegionOffer, footprint: Footprint) -> str:
    """Why a parameter server by itself does not fit its machine."""
    has_gb = None if offer.server is None else instance_of(offer.cloud, offer.server).host_gb
    if has_gb is None or has_gb * 1e9 >= footprint.server_bytes:
        return ""
    return (
        f"the server {offer.server} has {has_gb:g} GB of memory, and the parameter server needs "
        f"{footprint.server_bytes / 1e9:.3g} GB"
    )


def _fixed_s(experiment: Experiment, measured: StepModel | None) -> float:
    """What every local step takes beside computing; a profile measures it per local step."""
    given_s = section_of(experiment).step_overhead_s
    if given_s is not None:
        return given_s / max(1, experiment.worker_steps)
    return 0.0 if measured is None else measured.fixed_s


def _lan_is_counted(plan: PlanConfig, measured: StepModel | None) -> bool:
    """Whether nobody says what the network inside a region adds."""
    return plan.lan_s_per_machine is None and (measured is None or measured.workers[1] == 1)


def _lan_s(
    experiment: Experiment, has: Instance, measured: StepModel | None, footprint: Footprint
) -> float:
    """What a machine adds to a local step: gradients to the parameter server, parameters back."""
    plan, workers = section_of(experiment), max(1, has.accelerators or 0)
    local = max(1, experiment.worker_steps)
    if plan.lan_s_per_machine is not None:
        return plan.lan_s_per_machine / local
    if measured is not None and not _lan_is_counted(plan, measured):
        return measured.lan_s * workers
    if has.network_gbps is None:
        return 0.0  # a note says so
    sent_gbit = 2 * 32e-9 * footprint.num_params * workers
    return sent_gbit / has.network_gbps / local


def _speed(name: str, machine: MachineConfig, measured: StepModel | None) -> float:
    if machine.rows_per_s is not None:
        return machine.rows_per_s
    row_s = None if measured is None else measured.row_s.get(machine.type)
    if row_s is None:
        raise ConfigError(
            f"plan.regions.{name}: nothing is known of the speed of {machine.type}",
            fix=f"Give its rows_per_s, or measure it: geo-ray profile --machine "
            f"{name}={machine.type}.",
        )
    if row_s <= 0:
        raise ProfileError(
            f"region '{name}': in the profile a step on {machine.type} takes no longer with more "
            "rows",
            fix="Measure batches that differ more: geo-ray profile --batch-sizes.",
        )
    return 1 / row_s


def _edges_h_of_server(offer: RegionOffer, book: PriceBook) -> set[float]:
    if offer.server is None:
        return set()
    record = book.instance(offer.cloud, offer.at, offer.server)
    return {tier.after_h for tier in record.age_tiers}


def _hourly(book: PriceBook, record: PriceRecord) -> RentalPrice:
    book.usd_of_hours(record, 1.0)  # a currency without a rate is told now
    return partial(book.usd_of_hours, record)


def _standing(offer: RegionOffer, book: PriceBook) -> RentalPrice:
    parts: list[RentalPrice] = []
    if offer.server is not None:
        parts.append(_hourly(book, book.instance(offer.cloud, offer.at, offer.server)))
    if offer.disk is not None:
        monthly = book.usd_of_volume(book.disk(offer.cloud, offer.at, offer.disk), offer.disk_gb)
        parts.append(lambda hours, age_h=0.0: monthly * hours / _MONTH_H)
    return lambda hours, age_h=0.0: sum(part(hours, age_h) for part in parts)
