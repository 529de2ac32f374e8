"""One job under made-up days of spot prices and preemptions: the autoscaler beside other ways.

Three regions of AWS with three zones each, three types of machines with accelerators, servers on
demand for all; prices within the ranges of the shipped snapshot, all else made up from a seed
(`geo_ray/cloud/backtest/markets.py`). Work of 8 to 14 hours, a deadline of 1.1 to 1.6 times that.
Nothing is rented: money is that of a simulated cloud that bills by the second. The figures do not
carry over to recorded markets (docs/results/archive/2026-11-24-autoscale.md).

  saving_over_on_demand       share of the bill that is saved against static on demand, median
  saving_over_on_demand_worst the least of them
  over_cheapest_worst         bill over that of the cheapest other way that meets the deadline
  deadlines_missed            seeds where another way meets it and the autoscaler does not
  budget_overshoot_ticks      bill beyond a budget that does not suffice, in ticks of all machines
  ledger_error                of the autoscaler's books against the cloud's bill, largest
  *_no_floor                  the same with servers on the spot market where that is cheaper
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from benchmarks.common import support
from geo_ray.cloud.autoscaler.target import ClusterTarget, MachineKind, RegionTarget
from geo_ray.cloud.backtest.markets import DayKind, MarketTrace, generated_day
from geo_ray.cloud.backtest.replay import ALTERNATIVES, FAILOVER, ON_DEMAND, OURS, SPOT, replay
from geo_ray.cloud.backtest.simulated_cloud import SimJob
from geo_ray.cloud.provider import Pool
from geo_ray.experiment.autoscale import AutoscaleConfig
from geo_ray.prices.price_book import PriceBook, bundled_book

SPEED = {"g4dn.xlarge": 50.0, "g5.xlarge": 120.0, "g6.2xlarge": 90.0}
SERVER = "c5a.2xlarge"
REGIONS = {"us": "us-east-1", "eu": "eu-central-1", "asia": "ap-northeast-1"}
EVERY_S = 30.0
DAYS = {
    "usual": DayKind(),
    "calm": DayKind(
        hourly_move=0.01,
        jumps_per_day=0.3,
        least_sold_out_per_day=0.02,
        most_sold_out_per_day=0.2,
    ),
    "rough": DayKind(jumps_per_day=4, least_sold_out_per_day=3, most_sold_out_per_day=15),
}
Markets = Mapping[Pool, MarketTrace]


def scenario(
    book: PriceBook, seed: int, kind: DayKind | None = None
) -> tuple[ClusterTarget, Markets, SimJob]:
    """What a job wants, and the markets of its day."""
    rng = random.Random(f"job/{seed}")
    zones = {at: tuple(f"{at}{letter}" for letter in "abc") for at in REGIONS.values()}
    markets = generated_day(book, "aws", zones, (*SPEED, SERVER), seed, kind)
    kinds = tuple(MachineKind(name, speed, 12) for name, speed in SPEED.items())
    server = MachineKind(SERVER, 1.0, 2)
    regions = tuple(
        RegionTarget(name, at, 120.0 * rng.randint(2, 4), kinds, server, zones[at])
        for name, at in REGIONS.items()
    )
    work_s = rng.uniform(8, 14) * 3600
    deadline_s = work_s * rng.uniform(1.1, 1.6)
    return ClusterTarget(regions, deadline_s), markets, SimJob(work_s)


def main() -> None:
    parser = support.parser(__doc__)
    parser.add_argument("--day", choices=sorted(DAYS), help="only servers on demand, such days")
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()
    machine, book = support.hardware(), bundled_book()
    first = arguments.first_seed
    seeds = range(first, first + (4 if arguments.quick else 20))
    figures: list[support.Figure] = []
    if arguments.day is not None:
        config = AutoscaleConfig(every_s=EVERY_S)
        figures = compared(book, seeds, config, f"_{arguments.day}", DAYS[arguments.day])
    else:
        for suffix, floor in (("", "servers"), ("_no_floor", "none")):
            config = AutoscaleConfig(every_s=EVERY_S, floor=floor)  # type: ignore[arg-type]
            figures += compared(book, seeds, config, suffix)
        figures.append(budget(book, seeds))
    support.finish("autoscale", machine, figures, arguments.out)


def compared(
    book: PriceBook,
    seeds: range,
    config: AutoscaleConfig,
    suffix: str,
    kind: DayKind | None = None,
) -> list[support.Figure]:
    savings, over, errors, missed = [], [], [], 0
    bills: dict[str, list[float]] = {strategy: [] for strategy in ALTERNATIVES}
    for seed in seeds:
        target, markets, job = scenario(book, seed, kind)
        if config.floor == "none":
            regions = tuple(replace(each, floor=0) for each in target.regions)
            target = replace(target, regions=regions)
        found = {
            strategy: replay(strategy, target, markets, job, config) for strategy in ALTERNATIVES
        }
        ours = found[OURS]
        others = [found[w] for w in (ON_DEMAND, SPOT, FAILOVER) if found[w].in_time]
        savings.append(1 - ours.usd / found[ON_DEMAND].usd)
        if others:
            over.append(ours.usd / min(each.usd for each in others))
            missed += not ours.in_time
        errors.append(abs((ours.ledger_usd or 0.0) / ours.usd - 1))
        for strategy in ALTERNATIVES:
            bills[strategy].append(found[strategy].usd)
        support.say(
            f"seed {seed}{suffix}: deadline {(target.deadline_unix_s or 0) / 3600:.1f} h; "
            + "; ".join(
                f"{strategy} {r.usd:.2f} USD {r.hours:.1f} h{'' if r.in_time else ' LATE'} "
                f"({r.taken} of {r.launches} taken)"
                for strategy, r in found.items()
            )
        )
        assert not ours.left_over
    result = [
        support.median(f"saving_over_on_demand{suffix}", savings, "share", ">= 0.5"),
        support.Figure(f"saving_over_on_demand_worst{suffix}", min(savings), "share"),
        support.Figure(f"over_cheapest_worst{suffix}", max(over), "ratio", "<= 1.0", None, over),
        support.Figure(f"deadlines_missed{suffix}", float(missed), "seeds", "<= 0"),
        support.Figure(f"ledger_error{suffix}", max(errors), "share", "<= 0.05"),
    ]
    for strategy in ALTERNATIVES:
        name = f"usd_{strategy.replace(' ', '_')}{suffix}"
        result.append(support.median(name, bills[strategy], "USD"))
    return result


def budget(book: PriceBook, seeds: range) -> support.Figure:
    """Bills beyond a budget that is 30 to 90 % of what the job costs, in ticks of its machines."""
    config = AutoscaleConfig(every_s=EVERY_S)
    beyond = []
    for seed in seeds:
        target, markets, job = scenario(book, seed)
        whole = replay(OURS, target, markets, job, config)
        share = random.Random(f"budget/{seed}").uniform(0.3, 0.9)
        bound = share * whole.usd
        found = replay(OURS, replace(target, budget_usd=bound), markets, job, config)
        assert not found.is_done and not found.left_over
        tick_usd = whole.usd / whole.hours * EVERY_S / 3600.0
        beyond.append(max(0.0, found.usd - bound) / tick_usd)
    worst = max(beyond)
    return support.Figure("budget_overshoot_ticks", worst, "ticks", "<= 1", None, beyond)


if __name__ == "__main__":
    main()
