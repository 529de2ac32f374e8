"""What plans save, how far they are from the optimum, and how long they take to make.

Prices and egress are those of the shipped AWS snapshot; speeds, caps, data and links are drawn from
a seed. Speeds of types (`SPEED`) are assumptions that keep the order of the hardware. Nothing is
run: money and time are the planner's own, the same for every policy.

  cloudless_saving_*     two regions with the same machines, data 1.2:1 to 2:1: share that
                         right-sizing saves against renting everything, and what it adds in time
  optimal_saving         random scenarios: of `optimal`, in the time of `cloudless`, against it
  optimal_saving_worst   the least of them
  machines_saving        the same with averager, interval and codec as `cloudless` has them
  arbitrary_*            of `optimal` in half the time of the median of random choices of machines,
                         which keep the configured interval and codec where `optimal` chooses them
  brute_force_gap        largest share by which enumeration is better, on small scenarios
  seconds_*              to make a plan, 300 types in 3 markets per region; in half of the regions
                         machines slow each other down
  gap_*                  that those plans prove
  *_without_lan          the same where machines do not slow each other down anywhere
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from benchmarks.common import support
from geo_ray.base.errors import PlanInfeasibleError, PriceUnknownError
from geo_ray.planner.exchange import Limits
from geo_ray.planner.policies import cloudless, everything, optimal
from geo_ray.planner.request import Rental, Request, Site
from geo_ray.planner.search import Search
from geo_ray.planner.timing import JobWork, Pattern
from geo_ray.prices.price_book import PriceBook, bundled_book
from geo_ray.transport.links import LinkRecord, LinkTable

SPEED = {
    "c5a.2xlarge": 10.0,
    "m5.2xlarge": 9.0,
    "g4dn.xlarge": 50.0,
    "g5.xlarge": 120.0,
    "g6.2xlarge": 90.0,
    "p4d.24xlarge": 1600.0,
}
REGIONS = (
    "us-east-1",
    "us-west-2",
    "eu-west-1",
    "eu-central-1",
    "ap-northeast-1",
    "ap-southeast-1",
    "ap-south-1",
)
INTERVALS, CODECS = (8, 16, 32, 64, 128, 256), (None, "fp16", "int8", "int4")
SPOT_LOST = 0.05 * 180 / 3600  # preemptions an hour, times what each costs


def links(names: Sequence[str], rng: random.Random) -> LinkTable:
    """Every pair, 50 to 500 Mbit/s, 20 to 250 ms."""
    return LinkTable(
        links=tuple(
            LinkRecord(
                src=src,
                dst=dst,
                goodput_mbps=rng.uniform(50, 500),
                rtt_s=rng.uniform(0.02, 0.25),
                loss=0.0,
                samples=1,
                measured_at_unix_s=0.0,
                source="emulated",
            )
            for src, dst in itertools.permutations(names, 2)
        )
    )


def real_scenario(book: PriceBook, rng: random.Random) -> Request:
    """Two to five regions of AWS with three to five types each, on demand and spot."""
    names = rng.sample(REGIONS, rng.randint(2, 5))
    sites = []
    for name in names:
        rentals: list[Rental] = []
        sold = sorted(kind for kind in SPEED if _is_sold(book, name, kind))
        for kind in rng.sample(sold, min(len(sold), rng.randint(3, 5))):
            speed, cap = SPEED[kind] * rng.uniform(0.9, 1.1), rng.randint(2, 16)
            for market in ("on_demand", "spot"):
                try:
                    record = book.instance("aws", name, kind, market)  # type: ignore[arg-type]
                except PriceUnknownError:
                    continue
                usd = partial(book.usd_of_hours, record)
                lost = SPOT_LOST if market == "spot" else 0.0
                rentals.append(Rental(kind, record.market, usd, speed, cap, lost))
        server = partial(book.usd_of_hours, book.instance("aws", name, "m5.2xlarge"))
        sites.append(Site(name, rentals, server))
    prices = {
        (src, dst): book.usd_of_volume(book.egress("aws", src, dst), 1.0)
        for src, dst in itertools.permutations(names, 2)
    }
    work = JobWork(
        steps=20_000,
        rows_per_step=1024,
        rows={name: rng.uniform(1, 4) for name in names},
        num_params=rng.choice([10, 50, 100, 500]) * 1_000_000,
        startup_s=120,
    )
    return Request(work, sites, links(names, rng), prices, names, INTERVALS, CODECS)


def _is_sold(book: PriceBook, region: str, kind: str) -> bool:
    try:
        book.instance("aws", region, kind)
    except PriceUnknownError:
        return False
    return True


def made_scenario(rng: random.Random, regions: int, types: int, markets: int, cap: int) -> Request:
    """Machines and prices out of thin air, as many as one likes."""
    names = [f"r{i}" for i in range(regions)]
    kinds = [(rng.choice([5, 10, 20, 40]) * rng.uniform(0.7, 1.3)) for _ in range(types)]
    sites = []
    for name in names:
        rentals = []
        for i, speed in enumerate(kinds):
            price = speed * rng.uniform(0.02, 0.06)
            for share in (1.0, 0.6, rng.uniform(0.2, 0.9))[:markets]:
                usd = partial(_linear, price * share)
                rentals.append(Rental(f"t{i}", "on_demand", usd, speed, rng.randint(0, cap)))
        if not any(rental.cap for rental in rentals):
            rentals[0] = replace(rentals[0], cap=1)
        lan_s = rng.choice([0.0, 0.002])
        rentals = [replace(rental, lan_s=lan_s) for rental in rentals]
        sites.append(Site(name, rentals, partial(_linear, 0.1), 0.02))
    prices = {pair: rng.choice([0.02, 0.09]) for pair in itertools.permutations(names, 2)}
    rows = {name: rng.uniform(1, 3) for name in names}
    pattern = Pattern(*(("when_late", "always") if rng.random() < 0.5 else ("always", "rest")))
    work = JobWork(1000, regions * 64, rows, 5_000_000, pattern, 60)
    return Request(work, sites, links(names, rng), prices, names, INTERVALS, CODECS)


def without_lan(request: Request) -> Request:
    """The same where no machine slows another one down."""
    sites = [
        replace(site, rentals=[replace(rental, lan_s=0.0) for rental in site.rentals])
        for site in request.sites
    ]
    return replace(request, sites=sites)


def _linear(price: float, hours: float) -> float:
    return price * hours


def right_sizing(book: PriceBook, imbalance: float, averager: str) -> tuple[float, float]:
    """Share of the money that `cloudless` saves, and share of the time that it adds."""
    usd = partial(book.usd_of_hours, book.instance("aws", "us-east-1", "c5a.2xlarge"))
    sites = [Site(name, [Rental("c", "on_demand", usd, 10.0, 24)], _free) for name in ("a", "b")]
    work = JobWork(10_000, 2400, {"a": imbalance, "b": 1.0}, 1_000_000)
    table = links(("a", "b"), random.Random(0))
    free = {("a", "b"): 0.0, ("b", "a"): 0.0}
    request = Request(work, sites, table, free, [averager], [8], [None])
    whole, right = everything(request), cloudless(request)
    return 1 - right.total_usd / whole.total_usd, right.total_s / whole.total_s - 1


def _free(hours: float) -> float:
    return 0.0 * hours


def arbitrary(request: Request, rng: random.Random) -> tuple[float, float] | None:
    """Share saved in half the median time of random machines, and how much faster that is."""
    search = Search(request.work, request.fleets(), request.options())
    drawn = []
    for _ in range(41):
        picks = []
        for fleet in search.fleets:
            counts = [rng.randint(0, offer.cap) for offer in fleet.offers]
            picks.append(fleet.pick(counts) if any(counts) else fleet.smallest())
        drawn.append(search.complete(picks, search.options[0]))
    seconds = statistics.median(found.seconds for found in drawn)
    usd = statistics.median(found.usd for found in drawn)
    try:
        plan = optimal(replace(request, limits=Limits(deadline_s=seconds / 2)))
    except PlanInfeasibleError:
        return None
    return 1 - plan.total_usd / usd, seconds / plan.total_s


def brute_force_gap(rng: random.Random) -> float:
    """Share by which the best of all choices is better than the plan."""
    request = made_scenario(rng, rng.randint(2, 3), 2, 1, 3)
    search = Search(request.work, request.fleets(), request.options())
    by_region = [
        [
            fleet.pick(counts)
            for counts in itertools.product(*(range(offer.cap + 1) for offer in fleet.offers))
            if any(counts)
        ]
        for fleet in search.fleets
    ]
    options = search.options
    least = min(
        search.complete(picks, option).usd
        for picks in itertools.product(*by_region)
        for option in options
    )
    return max(0.0, 1 - least / optimal(request, gap=0.0).total_usd)


def main() -> None:
    options = support.parse(__doc__)
    machine, book, rng = support.hardware(), bundled_book(), random.Random(1)
    count, small = (20, 5) if options.quick else (200, 60)
    figures = []
    for imbalance, averager in itertools.product((1.2, 1.5, 2.0), ("a", "b")):
        saved, slower = right_sizing(book, imbalance, averager)
        name = f"{imbalance:.1f}_{averager}".replace(".", "_")
        figures.append(support.Figure(f"cloudless_saving_{name}", saved, "share"))
        figures.append(support.Figure(f"cloudless_slower_{name}", slower, "share", "<= 0.02"))
    support.say(f"{count} random scenarios")
    saved, machines, cheaper, faster = [], [], [], []
    for _ in range(count):
        request = real_scenario(book, rng)
        base = cloudless(request)
        limit = Limits(deadline_s=base.total_s)
        saved.append(1 - optimal(replace(request, limits=limit)).total_usd / base.total_usd)
        first = {"averagers": request.averagers[:1], "intervals": [8], "codecs": [None]}
        alike = replace(request, limits=limit, **first)
        machines.append(1 - optimal(alike).total_usd / base.total_usd)
        against = arbitrary(request, rng)
        if against is not None:
            cheaper.append(against[0])
            faster.append(against[1])
    figures += [
        support.Figure("optimal_saving", statistics.median(saved), "share", ">= 0.15"),
        support.Figure("optimal_saving_worst", min(saved), "share", ">= 0"),
        support.Figure("machines_saving", statistics.median(machines), "share"),
        support.Figure("machines_saving_worst", min(machines), "share"),
        support.Figure("arbitrary_saving", statistics.median(cheaper), "share", ">= 0.5"),
        support.Figure("arbitrary_faster", statistics.median(faster), "ratio", ">= 2.0"),
        support.Figure("arbitrary_feasible", len(cheaper) / count, "share"),
    ]
    support.say(f"{small} scenarios against enumeration")
    gaps = [brute_force_gap(rng) for _ in range(small)]
    figures.append(support.Figure("brute_force_gap", max(gaps), "share", "<= 1e-6"))
    for regions, asked, suffix in (
        (10, "<= 0.5", ""),
        (50, "<= 5.0", ""),
        (50, "<= 2.0", "_without_lan"),
    ):
        request = made_scenario(random.Random(2), regions, 300, 3, 16)
        if suffix:
            request = without_lan(request)
        walls_s, proven = [], []
        for _ in range(1 if options.quick else 3):
            began_s = time.perf_counter()
            proven.append(optimal(request, gap=0.01).gap)
            walls_s.append(time.perf_counter() - began_s)
            support.say(f"{regions} regions{suffix}: {walls_s[-1]:.2f} s, gap {proven[-1]:.2%}")
        figures.append(support.median(f"seconds_{regions}_regions{suffix}", walls_s, "s", asked))
        figures.append(support.median(f"gap_{regions}_regions{suffix}", proven, "share"))
    support.finish("planner", machine, figures, options.out)


if __name__ == "__main__":
    main()
