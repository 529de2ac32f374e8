"""The planner against enumeration of all possibilities, on small scenarios."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import re

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from geo_ray.base.errors import PlanInfeasibleError
from geo_ray.planner.cover import CLOSE, Cover, cheapest_cover
from geo_ray.planner.exchange import Limits
from geo_ray.planner.fleet import Offer, Pick, RegionFleet
from geo_ray.planner.policies import cloudless, everything, front, optimal
from geo_ray.planner.request import Rental, Request, Site
from geo_ray.planner.search import Search
from geo_ray.planner.timing import JobWork, Pattern
from geo_ray.transport.links import LinkRecord, LinkTable


def links(names: list[str], rng: random.Random) -> LinkTable:
    return LinkTable(
        links=tuple(
            LinkRecord(
                src=a,
                dst=b,
                goodput_mbps=rng.uniform(20, 200),
                rtt_s=rng.uniform(0.02, 0.2),
                loss=0.0,
                samples=1,
                measured_at_unix_s=0.0,
                source="emulated",
            )
            for a in names
            for b in names
            if a != b
        )
    )


def _pattern(rng: random.Random) -> Pattern:
    return Pattern("when_late", "always") if rng.random() < 0.5 else Pattern()


def scenario(seed: int, regions: int = 3, offers: int = 3, cap: int = 3, **more) -> Request:
    lost_fraction = more.pop("lost_fraction", 0.0)
    rng = random.Random(seed)
    names = [f"r{i}" for i in range(regions)]
    sites = []
    for name in names:
        rentals = []
        for i in range(offers):
            speed = rng.choice([5, 10, 20, 40]) * rng.uniform(0.8, 1.2)
            price = speed * rng.uniform(0.02, 0.06)
            market = rng.choice(["on_demand", "spot"])
            rentals.append(
                Rental(
                    f"t{i}",
                    market,
                    lambda hours, price=price: price * hours,
                    speed,
                    rng.randint(1, cap),
                    lost_fraction=lost_fraction if market == "spot" else 0.0,
                )
            )
        fixed_s, lan_s = rng.choice([0.0, 0.02]), rng.choice([0.0, 0.01])
        rentals = [dataclasses.replace(rental, lan_s=lan_s) for rental in rentals]
        stands = rng.uniform(0, 0.2)
        sites.append(
            Site(
                name,
                rentals,
                lambda hours, stands=stands: stands * hours,
                fixed_s=fixed_s,
            )
        )
    work = JobWork(
        steps=1000,
        rows_per_step=60,
        rows={name: rng.choice([1000, 2000, 3000]) for name in names},
        num_params=2_000_000,
        pattern=_pattern(rng),
        startup_s=20,
    )
    prices = {(a, b): rng.choice([0.02, 0.09]) for a in names for b in names if a != b}
    values = {
        "work": work,
        "sites": sites,
        "links": links(names, rng),
        "usd_per_gb": prices,
        "averagers": names,
        "intervals": [4, 16, 64],
        "codecs": [None, "int8", "int4"],
    }
    return Request(**values | more)


def every(request: Request) -> list:
    """Yield all combinations of machines and exchanges."""
    search = Search(request.work, request.fleets(), request.options())
    by_region = []
    for fleet in search.fleets:
        ranges = [range(offer.cap + 1) for offer in fleet.offers]
        by_region.append([fleet.pick(c) for c in itertools.product(*ranges) if any(c)])
    options = search.options
    return [
        search.complete(picks, option)
        for picks in itertools.product(*by_region)
        for option in options
    ]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("objective", ["cost", "time"])
def test_nothing_is_better_than_what_is_found(seed, objective):
    request = scenario(seed, regions=2, offers=2, cap=3, objective=objective)
    all_of_them = every(request)
    rng = random.Random(seed)
    middle = sorted(found.seconds for found in all_of_them)[len(all_of_them) // rng.randint(2, 6)]
    cheap = sorted(found.usd for found in all_of_them)[len(all_of_them) // rng.randint(2, 6)]
    for limits in (Limits(), Limits(deadline_s=middle), Limits(middle, cheap)):
        allowed = [
            f for f in all_of_them if f.seconds <= limits.deadline_s and f.usd <= limits.budget_usd
        ]
        asked = Request(**{**_fields(request), "limits": limits})
        if not allowed:
            with pytest.raises(PlanInfeasibleError):
                optimal(asked, gap=0.0)
            continue
        plan = optimal(asked, gap=0.0)
        value = {"cost": lambda f: f.usd, "time": lambda f: f.seconds}[objective]
        ours = plan.total_usd if objective == "cost" else plan.total_s
        assert ours == pytest.approx(min(map(value, allowed)), rel=1e-6)
        assert plan.gap <= 1e-6


@pytest.mark.parametrize("seed", range(8))
def test_the_cheapest_machines_of_a_region_are_the_cheapest(seed):
    rng = random.Random(seed)
    offers = [
        Offer(f"t{i}", "on_demand", rng.uniform(0.1, 2), rng.uniform(1, 20), rng.randint(0, 4))
        for i in range(4)
    ]
    fleet = RegionFleet("r", offers, 30, rng.choice([0.0, 0.1]), rng.choice([0.0, 0.05]))
    if fleet.is_empty:
        return
    ranges = [range(offer.cap + 1) for offer in offers]
    picks = [fleet.pick(c) for c in itertools.product(*ranges) if any(c)]
    shortest_s = min(pick.step_s for pick in picks)
    assert fleet.fastest().step_s == pytest.approx(shortest_s)
    for factor in (1.0, 1.1, 1.5, 2.0, 4.0, 10.0):
        limit_s = shortest_s * factor
        least = min(p.usd_per_h for p in picks if p.step_s <= limit_s * (1 + 1e-9))
        found = fleet.cheapest(limit_s)
        assert found is not None and found.step_s <= limit_s * (1 + 1e-8)
        assert found.usd_per_h == pytest.approx(least)
    assert fleet.cheapest(shortest_s * 0.99) is None


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("lan", [False, True])
def test_the_cheapest_machines_with_few_that_may_be_preempted(seed, lan):
    rng = random.Random(seed)
    offers = [
        Offer(
            f"t{i}", market, rng.uniform(0.5, 1) * (0.4 if market == "spot" else 1.0) * speed,
            speed, rng.randint(0, 3), 0.07 if lan else 0.0,
            lost_fraction=0.01 if market == "spot" else 0.0,
        )
        for i, speed in enumerate([4.0, 9.0])
        for market in ("on_demand", "spot")
    ]  # fmt: skip
    fleet = RegionFleet("r", offers, 30, 0.1, one_is_free=rng.random() < 0.5)
    if fleet.is_empty:
        return
    ranges = [range(offer.cap + 1) for offer in offers]
    picks = [fleet.pick(c) for c in itertools.product(*ranges) if any(c)]
    for most_spot in range(7):
        allowed = [p for p in picks if p.counts[1] + p.counts[3] <= most_spot]
        capped = fleet.capped(most_spot)
        if not allowed:
            assert capped.cheapest(1e9) is None
            continue
        shortest_s = min(pick.step_s for pick in allowed)
        assert capped.fastest().step_s == pytest.approx(shortest_s)
        for factor in (1.0, 1.1, 1.5, 2.0, 4.0, 10.0):
            limit_s = shortest_s * factor
            least = min(p.usd_per_h for p in allowed if p.step_s <= limit_s * (1 + 1e-9))
            assert capped.least_usd_per_h(limit_s) <= least * (1 + 1e-9)
            found = capped.cheapest(limit_s)
            assert found is not None and found.step_s <= limit_s * (1 + 1e-8)
            assert found.usd_per_h == pytest.approx(least)
            assert fleet.spots(found.counts) <= most_spot


def _unlike_machines(rng: random.Random) -> RegionFleet:
    """Return a fleet whose types have their own networks and memory."""
    offers = []
    for i in range(rng.randint(2, 3)):
        speed, cap = rng.uniform(1, 40), rng.randint(1, 3)
        lan_s = rng.choice([0, 0.001, 0.02, 0.2, 1.0]) * rng.uniform(0.5, 1.5)
        max_rows = rng.choice([2**40, 5, 12])
        for market in rng.choice([["on_demand"], ["spot"], ["on_demand", "spot"]]):
            lost_fraction = 0.01 if market == "spot" else 0.0
            price = rng.uniform(0.1, 2)
            offers.append(Offer(f"t{i}", market, price, speed, cap, lan_s, max_rows, lost_fraction))
    rows, fixed_s = rng.randint(2, 30), rng.choice([0.0, 0.1])
    return RegionFleet("r", offers, rows, fixed_s, one_is_free=rng.random() < 0.5)


def _every_pick(fleet: RegionFleet) -> list[Pick]:
    ranges = [range(offer.cap + 1) for offer in fleet.offers]
    counts = (c for c in itertools.product(*ranges) if 1 <= sum(c) <= fleet.rows)
    return [pick for pick in map(fleet.pick, counts) if math.isfinite(pick.step_s)]


def test_the_fastest_of_machines_with_their_own_networks_are_the_fastest():
    rng = random.Random(0)
    for _ in range(60):
        fleet = _unlike_machines(rng)
        picks = _every_pick(fleet)
        for most_spot in (None, 0, 1, 3):
            capped = fleet if most_spot is None else fleet.capped(most_spot)
            allowed = [
                p.step_s for p in picks if most_spot is None or fleet.spots(p.counts) <= most_spot
            ]
            if not allowed:
                assert capped.least_step_s == math.inf
                continue
            assert capped.fastest().step_s == pytest.approx(min(allowed), rel=1e-7)
            assert capped.least_step_s == pytest.approx(min(allowed), rel=1e-7)


def test_the_bound_of_the_shortest_step_holds_where_its_search_is_cut_off(monkeypatch):
    monkeypatch.setattr("geo_ray.planner.fleet._MOST_COVERS", 1)
    rng, cut_off = random.Random(1), 0
    for _ in range(60):
        fleet = _unlike_machines(rng)
        picks = _every_pick(fleet)
        if not picks:
            continue
        best_s = min(pick.step_s for pick in picks)
        assert fleet.least_step_s <= best_s * (1 + 1e-9) <= fleet.fastest().step_s * (1 + 2e-9)
        cut_off += fleet.least_step_s < best_s * (1 - 1e-6)
        found = fleet.cheapest(best_s)
        assert found is None or found.step_s <= best_s * (1 + 1e-8)
        assert not fleet.is_too_short(best_s)
    assert cut_off > 3


@pytest.mark.parametrize("most_covers", [400, 1])
@pytest.mark.parametrize("objective", ["cost", "time"])
def test_the_gap_is_true_where_types_have_their_own_networks(objective, most_covers, monkeypatch):
    monkeypatch.setattr("geo_ray.planner.fleet._MOST_COVERS", most_covers)
    for seed in range(6):
        request = scenario(
            seed, regions=2, offers=2, cap=2, lost_fraction=0.02 * (seed % 2), objective=objective
        )
        rng = random.Random(seed)
        sites = [
            dataclasses.replace(
                site,
                rentals=[
                    dataclasses.replace(r, lan_s=rng.choice([0.01, 0.1, 0.6])) for r in site.rentals
                ],
                one_is_free=seed % 3 == 0,
            )
            for site in request.sites
        ]
        request = dataclasses.replace(request, sites=sites)
        values = [found.usd if objective == "cost" else found.seconds for found in every(request)]
        plan = optimal(request, gap=0.0)
        ours = plan.total_usd if objective == "cost" else plan.total_s
        assert ours * (1 - plan.gap) <= min(values) * (1 + 1e-9)
        if most_covers > 1:
            assert ours == pytest.approx(min(values), rel=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_optimal_is_never_dearer_than_cloudless_in_its_time(seed):
    request = scenario(seed, regions=4, offers=4, cap=6)
    right_sized, whole = cloudless(request), everything(request)
    assert right_sized.total_usd <= whole.total_usd * (1 + 1e-9)
    assert right_sized.total_s <= whole.total_s * (1 + 1e-9)
    best = optimal(Request(**{**_fields(request), "limits": Limits(right_sized.total_s)}))
    assert best.total_usd <= right_sized.total_usd * (1 + 1e-4)
    assert best.total_s <= right_sized.total_s * (1 + 1e-9)


def test_no_time_between_regions_is_made_of_rounding():
    plans = [policy(scenario(seed)) for seed in range(30) for policy in (optimal, cloudless)]
    between = [plan.seconds.get("between regions", 0.0) / plan.total_s for plan in plans]
    assert min(between) == 0.0 and not [share for share in between if 0.0 < share < 1e-9]


def test_the_front_falls_and_every_point_has_a_reason():
    plans = front(scenario(3, regions=3, offers=4, cap=5))
    assert len(plans) > 3
    for faster, slower in itertools.pairwise(plans):
        assert faster.total_s < slower.total_s and faster.total_usd > slower.total_usd
    assert all(plan.reason for plan in plans)


def test_rows_of_a_step_are_all_given_out():
    plan = optimal(scenario(5))
    for region, share in zip(plan.regions, _shares(scenario(5)), strict=True):
        assert sum(region.batch_sizes) == pytest.approx(share, abs=0.5)
        assert min(region.batch_sizes) >= 1


def _fixes(error: PlanInfeasibleError) -> dict[str, float]:
    """Return the values that an error suggests, by key."""
    return {k: float(v) for k, v in re.findall(r"plan\.(\w+) to ([\d.e+-]+\d)", str(error))}


def test_infeasible_limits_are_reported_with_sufficient_values():
    request = scenario(1)
    plans = front(request)
    assert len(plans) > 1
    fast_s, cheap_usd = plans[0].total_s * 1.001, plans[-1].total_usd * 1.001
    for limits, words, keys in (
        (Limits(deadline_s=1.0), "plan.deadline_h 0.0002778: the fastest", {"deadline_h"}),
        (Limits(budget_usd=1e-6), "budget 1e-06 USD", {"budget_usd"}),
        (Limits(fast_s, cheap_usd), "not both", {"deadline_h", "budget_usd"}),
    ):
        with pytest.raises(PlanInfeasibleError, match=words) as found:
            optimal(Request(**{**_fields(request), "limits": limits}))
        fixes = _fixes(found.value)
        assert fixes.keys() == keys
        for key, value in fixes.items():
            one = {"deadline_s": value * 3600} if key == "deadline_h" else {key: value}
            enough = dataclasses.replace(limits, **one)
            assert optimal(Request(**{**_fields(request), "limits": enough})).regions
    lossy = {**_fields(request), "loss_budget": 0.0, "intervals": [64]}
    with pytest.raises(PlanInfeasibleError, match="loss_budget") as found:
        optimal(Request(**lossy))
    assert optimal(Request(**{**lossy, **_fixes(found.value)})).regions
    empty = scenario(1)
    sites = [Site("r0", [], empty.sites[0].fixed_usd), *empty.sites[1:]]
    with pytest.raises(PlanInfeasibleError, match="r0"):
        optimal(Request(**{**_fields(empty), "sites": sites}))


def test_the_gap_is_honest():
    request = scenario(7, regions=4, offers=5, cap=8)
    rough, exact = optimal(request, gap=0.2), optimal(request, gap=0.0)
    assert exact.gap <= 1e-6
    assert rough.gap <= 0.2 + 1e-9
    assert exact.total_usd >= rough.total_usd * (1 - rough.gap) * (1 - 1e-9)
    assert math.isfinite(rough.total_s)


def _fields(request: Request) -> dict:
    return {name: getattr(request, name) for name in Request.__slots__}


def _shares(request: Request) -> list[float]:
    return [request.work.region_rows(site.name) for site in request.sites]


@pytest.mark.parametrize("seed", range(6))
def test_the_tree_and_highs_agree(seed):
    rng = np.random.default_rng(seed)
    speed_I = rng.uniform(1, 20, 8)
    price_I = speed_I * rng.uniform(0.03, 0.06, 8)
    cap_I = rng.integers(1, 6, 8).astype(float)
    lan_I, max_rows_I = np.full(8, [0.0, 0.02][seed % 2]), rng.integers(5, 40, 8)
    for limit_s in (0.8, 1.5, 3.0, 1e-3):
        cover = Cover(price_I, speed_I, cap_I, 40, limit_s, lan_I, max_rows_I, 40)
        ours, theirs_I = cheapest_cover(cover), by_highs(cover)
        assert (ours.counts_I is None) == (theirs_I is None)
        if theirs_I is not None:
            assert ours.usd == ours.least_usd == pytest.approx(theirs_I @ price_I, rel=1e-6)
            hurried = cheapest_cover(dataclasses.replace(cover, most_nodes=12))
            assert hurried.least_usd <= ours.usd * (1 + 1e-9) <= hurried.usd * (1 + 2e-9)


def by_highs(cover: Cover) -> np.ndarray | None:
    """Solve by integer programming: one program for every number of machines."""
    best_I, least, lan_s = None, np.inf, float(cover.lan_I[0])  # the same for all
    numbers = range(1, int(min(cover.most, cover.cap_I.sum())) + 1) if lan_s else [None]
    for number in numbers:
        left_s = cover.limit_s - lan_s * (number or 0)
        each_I = np.floor(np.maximum(left_s, 0.0) * cover.speed_I * (1 + CLOSE))
        each_I = np.minimum(each_I, cover.max_rows_I)
        ones = np.ones(len(each_I))
        answer = milp(
            cover.price_I,
            integrality=ones,
            bounds=Bounds(0, np.where(each_I > 0, cover.cap_I, 0)),
            constraints=LinearConstraint(
                np.stack([each_I, ones]),
                [cover.rows, number or 1],
                [np.inf, number or cover.most],
            ),
            options={"mip_rel_gap": 0.0},
        )
        if answer.x is not None and answer.fun < least:
            best_I, least = np.round(answer.x), answer.fun
    return best_I


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("objective", ["cost", "time"])
def test_where_workers_queue_to_start_nothing_is_better_by_more_than_the_gap(seed, objective):
    plain = scenario(seed, regions=2, offers=2, cap=3, objective=objective)
    request = dataclasses.replace(plain, work=dataclasses.replace(plain.work, worker_start_s=30.0))
    plan = optimal(request, gap=0.0)
    values = [found.usd if objective == "cost" else found.seconds for found in every(request)]
    value = plan.total_usd if objective == "cost" else plan.total_s
    assert value * (1 - plan.gap) <= min(values) * (1 + 1e-9)
    workers = sum(region.workers for region in plan.regions)
    assert plan.seconds["start"] == pytest.approx(20 + 30 * workers)


@pytest.mark.parametrize("seed", range(5))
def test_the_shortest_time_of_all_is_a_deadline_that_can_be_kept(seed):
    request = scenario(seed, regions=3, offers=4, cap=6)
    search = Search(request.work, request.fleets(), request.options())
    picks = [fleet.fastest() for fleet in search.fleets]
    least_s = min(search.complete(picks, option).seconds for option in search.options)
    plan = optimal(Request(**{**_fields(request), "limits": Limits(deadline_s=least_s)}))
    assert plan.total_s == pytest.approx(least_s)


def test_more_machines_than_rows_are_not_rented():
    offers = [Offer("a", "on_demand", 1.0, 5.0, 4), Offer("b", "on_demand", 1.0, 10.0, 4)]
    fleet = RegionFleet("r", offers, 6)
    assert fleet.everything().counts == (2, 4)
    assert fleet.fastest().counts == (0, 3)  # two rows on each, as long as one on the slow ones


@pytest.mark.parametrize("seed", range(2))
def test_many_types_leave_no_gap_where_machines_do_not_slow_each_other_down(seed):
    many = scenario(seed, regions=6, offers=120, cap=16)
    sites = [
        dataclasses.replace(
            site, rentals=[dataclasses.replace(rental, lan_s=0.0) for rental in site.rentals]
        )
        for site in many.sites
    ]
    assert optimal(dataclasses.replace(many, sites=sites)).gap <= 1e-4


@pytest.mark.parametrize("seed", range(4))
def test_the_front_is_every_plan_that_none_beats(seed):
    request = scenario(seed, regions=2, offers=2, cap=2)
    wanted = []
    for found in sorted(every(request), key=lambda f: (f.seconds, f.usd)):
        if not wanted or found.usd < wanted[-1].usd * (1 - 1e-4):
            wanted.append(found)
    plans = front(request)
    assert plans[0].total_s == pytest.approx(wanted[0].seconds), "the fastest is not"
    assert [p.total_s for p in plans] == pytest.approx([f.seconds for f in wanted], rel=1e-3)
    assert [p.total_usd for p in plans] == pytest.approx([f.usd for f in wanted], rel=1e-3)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("objective", ["cost", "time"])
def test_preemptions_make_all_wait_and_no_plan_is_better(seed, objective):
    lost_fraction = (0.03, 0.1, 0.0004)[seed % 3]
    request = scenario(
        seed, regions=2, offers=2, cap=3, lost_fraction=lost_fraction, objective=objective,
        work=JobWork(1000, 60, {"r0": 1.0, "r1": 2.0}, 2_000_000, startup_s=20),
    )  # fmt: skip
    all_of_them = every(request)
    for found in all_of_them[:50]:
        spot = sum(
            n
            for site, pick in zip(request.sites, found.picks, strict=True)
            for rental, n in zip(site.rentals, pick.counts, strict=True)
            if rental.market == "spot"
        )
        trained_s = 1000 * found.step_time_s / (1 - lost_fraction * spot)
        assert found.seconds == pytest.approx(20 + trained_s + found.option.last_s)
    middle = sorted(found.seconds for found in all_of_them)[len(all_of_them) // 4]
    fastest = min(all_of_them, key=lambda f: (f.seconds, f.usd))
    cheapest = min(all_of_them, key=lambda f: (f.usd, f.seconds))
    for limits in (
        Limits(),
        Limits(deadline_s=middle),
        Limits(fastest.seconds, fastest.usd),
        Limits(cheapest.seconds, cheapest.usd),
    ):
        values = [
            f.usd if objective == "cost" else f.seconds
            for f in all_of_them
            if limits.keeps(f.seconds, f.usd)
        ]
        plan = optimal(Request(**{**_fields(request), "limits": limits}), gap=0.0)
        value = plan.total_usd if objective == "cost" else plan.total_s
        assert value == pytest.approx(min(values), rel=1e-6)
        assert plan.gap <= 1e-6


@pytest.mark.parametrize("objective", ["cost", "time"])
def test_many_that_may_be_preempted_are_looked_at_in_groups_and_the_gap_is_true(objective):
    request = scenario(5, regions=3, offers=6, cap=200, lost_fraction=0.002, objective=objective)
    request = dataclasses.replace(
        request, work=dataclasses.replace(request.work, rows_per_step=900)
    )
    plan = optimal(request)
    search = Search(request.work, request.fleets(), request.options())
    rng, best = random.Random(0), float("inf")
    for _ in range(400):
        limit_s = 10 ** rng.uniform(-1, 1.5)
        picks = [
            fleet.capped(rng.choice([0, 0, 1, 2, 5, 20, 300])).cheapest(limit_s)
            for fleet in search.fleets
        ]
        if None in picks:
            continue
        for option in search.options:
            found = search.complete(picks, option)
            best = min(best, found.usd if objective == "cost" else found.seconds)
    ours = plan.total_usd if objective == "cost" else plan.total_s
    assert ours * (1 - plan.gap) <= best * (1 + 1e-9)
    assert plan.gap <= 0.02


def test_asynchronous_regions_are_delayed_by_their_own_machines_only():
    apart = Pattern("never", "always", synchronous=False)
    request = scenario(3, regions=2, offers=2)
    request = dataclasses.replace(
        request,
        work=dataclasses.replace(request.work, pattern=apart),
        sites=[
            dataclasses.replace(
                site, rentals=[dataclasses.replace(r, lost_fraction=0.03) for r in site.rentals]
            )
            for site in request.sites
        ],
    )
    for found in every(request)[:50]:
        most = max(sum(pick.counts) for pick in found.picks)
        assert found.stall == pytest.approx(1 / (1 - 0.03 * most))
