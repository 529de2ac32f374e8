"""Machines that run already, apart from those that would be rented anew.

Where prices fall with age, a machine that is kept goes on at the price of its age, while another
one of its type begins at the full price. So what could be rented is, for each type and market, the
machines that run, by when they were rented, and new ones up to the cap. Those that run may be kept
whatever the cap and the cloud's stock are by now.

Ages count from the run's first machines: one that was rented ``since_h`` later is, when the run's
first ones are ``run_h`` old, ``run_h - since_h`` old.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from geo_ray.planning.plan import RegionPlan
from geo_ray.planning.policies.fixed import Kind
from geo_ray.planning.request import Rental, Site


def with_running(site: Site, present: RegionPlan, run_h: float) -> Site:
    """Return what a region could keep and rent; what it could keep comes first.

    Args:
        site: as it would be if nothing ran there.
        present: what runs there.
        run_h: age of the run's first machines.
    """
    running = _running(present)
    rentals: list[Rental] = []
    for rental in site.rentals:
        kept = _kept(rental, running.get((rental.type, rental.market), {}), run_h)
        left = max(0, rental.cap - sum(each.cap for each in kept))
        rentals += [*kept, replace(rental, cap=left, since_h=run_h)]
    found = replace(site, rentals=rentals, server_since_h=run_h)
    if site.server is not None and present.server == site.server:
        since_h = present.server_since_h
        usd = partial(site.stands_usd, age_h=_age_h(run_h, since_h))
        found = replace(found, stands_usd=usd, server_since_h=since_h)
    sinces_h = {found.server_since_h, *(rental.since_h for rental in rentals)}
    later_h = {edge_h - _age_h(run_h, since_h) for edge_h in site.edges_h for since_h in sinces_h}
    return replace(found, edges_h=frozenset(edge_h for edge_h in later_h if edge_h > 0))


def counts_of(present: RegionPlan) -> dict[Kind, int]:
    """Return the machines that run, by type and market."""
    return {kind: sum(by_since.values()) for kind, by_since in _running(present).items()}


def _running(present: RegionPlan) -> Mapping[Kind, Mapping[float, int]]:
    """Return how many there are, by when they were rented; a plan has an entry for each batch."""
    found: dict[Kind, dict[float, int]] = defaultdict(lambda: defaultdict(int))
    for each in present.machines:
        found[each.type, each.market][each.since_h] += each.count
    return found


def _kept(rental: Rental, running: Mapping[float, int], run_h: float) -> list[Rental]:
    """Return those that run, the oldest first."""
    return [
        replace(
            rental,
            usd=partial(rental.usd, age_h=_age_h(run_h, since_h)),
            cap=0 if rental.left_out else count,
            since_h=since_h,
        )
        for since_h, count in sorted(running.items())
    ]


def _age_h(run_h: float, since_h: float) -> float:
    return max(0.0, run_h - since_h)
