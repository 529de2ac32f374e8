"""Utility of online scheduling: PD-ORS beside FIFO, DRF, Dorm, OASiS and Optimus.

Made-up loads with the ranges of the papers' evaluations (docs/reference/scheduling-policies.md);
every schedule is
held against the validator. Utility is summed over jobs; of each size, means over seeds. The other
policies know neither worth nor deadline: a greedy policy that does beats pd_ors under load.

  utility_over_*         of pd_ors over another policy, mean utilities, worst and mean of the sizes
  rank_of_pd_ors         in the mean, worst over the sizes; 1 is first
  competitive_ratio      upper bound over utility of pd_ors, five seeds of each size
  load_competitive_ratio the same of pd_ors_load
  foresight_over_pd_ors  a schedule that knows all jobs ahead over pd_ors, same seeds: what really
                         could be won; the optimum lies between it and the bound
  load_over_pd_ors       utility of pd_ors_load over pd_ors
  geo_*                  regions, egress and spot prices: utility less USD, over the best other, and
                         over pd_ors without money, egress and links in its price
  decision_s             longest decision for one job, 50 sites
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import replace

from benchmarks.common import support
from geo_ray.scheduler.bound import OraclePolicy, utility_bound
from geo_ray.scheduler.policies.pd_ors import PdOrsPolicy
from geo_ray.scheduler.policies.registry import POLICIES
from geo_ray.scheduler.policy import SchedulingPolicy
from geo_ray.scheduler.replay import replay_jobs
from geo_ray.scheduler.schedule import check_schedule
from geo_ray.scheduler.workload import LoadShape, generated_cluster, generated_jobs

OTHERS = ("fifo", "drf", "dorm", "oasis", "optimus")
SIZES = ((10, 10), (10, 50), (10, 100), (50, 50), (100, 100))
BOUNDED = 5  # seeds of each size, whose bound is computed


def geo_policies() -> dict[str, SchedulingPolicy]:
    """The policies of the second part: ours with money in its price, and the paper's without."""
    plain = PdOrsPolicy()
    return {
        "geo": replace(plain, search=replace(plain.search, value_per_usd=1.0)),
        "paper": plain,
        **{name: POLICIES[name]() for name in OTHERS},
    }


def compare(shape: LoadShape, policies: dict[str, SchedulingPolicy], seeds: range, usd: float):
    """Values by policy, one for each seed; the longest decision; bounds with what is below them."""
    values, longest, bounds = defaultdict(list), 0.0, []
    for seed in seeds:
        cluster, jobs = generated_cluster(shape, seed), generated_jobs(shape, seed)
        for name, policy in policies.items():
            done = replay_jobs(cluster, jobs, policy, seed=seed)
            check_schedule(done)
            values[name].append(done.total_utility - usd * done.usd)
            if name in ("pd_ors", "pd_ors_load", "geo"):
                longest = max(longest, *done.decision_s)
        if seed < BOUNDED:
            most = utility_bound(cluster, jobs, value_per_usd=usd, rounds=30)
            ahead = replay_jobs(cluster, jobs, OraclePolicy(jobs, most, value_per_usd=usd))
            check_schedule(ahead)
            bounds.append((most.utility, ahead.total_utility - usd * ahead.usd))
    sums = tuple(map(sum, zip(*bounds, strict=True)))
    return values, longest, sums


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    seeds, sizes = (range(2), SIZES[:1] + SIZES[4:5]) if options.quick else (range(20), SIZES)
    own = {name: POLICIES[name]() for name in ("pd_ors", "pd_ors_load", *OTHERS)}
    over: dict[str, list[float]] = defaultdict(list)
    ranks, ratios, decisions, figures = [], [], [], []
    load_ratios, aheads, loads = [], [], []
    for machines, jobs in sizes:
        shape = LoadShape(machines, jobs)
        values, longest, (most, ahead) = compare(shape, own, seeds, 0.0)
        means = {name: statistics.mean(each) for name, each in values.items()}
        for name in OTHERS:
            over[name].append(means["pd_ors"] / means[name])
        ranks.append(1 + sum(means[name] > means["pd_ors"] for name in OTHERS))
        bounded = {name: sum(each[:BOUNDED]) for name, each in values.items()}
        ratios.append(most / bounded["pd_ors"])
        load_ratios.append(most / bounded["pd_ors_load"])
        aheads.append(ahead / bounded["pd_ors"])
        loads.append(means["pd_ors_load"] / means["pd_ors"])
        if machines <= 50:
            decisions.append(longest)
        support.say(
            f"{machines} machines, {jobs} jobs: "
            + ", ".join(f"{name} {value:.0f}" for name, value in means.items())
            + f"; over ours: bound {ratios[-1]:.2f}, foresight {aheads[-1]:.2f}; bound over "
            f"pd_ors_load {load_ratios[-1]:.2f}; decision {longest:.2f} s"
        )
    for name in OTHERS:
        target = ">= 1.3" if name == "fifo" else None
        least = support.Figure(
            f"utility_over_{name}_least", min(over[name]), "ratio", target, None, over[name]
        )
        figures += [least, support.median(f"utility_over_{name}", over[name], "ratio", target)]
    figures.append(support.Figure("rank_of_pd_ors", max(ranks), "rank", "<= 1", None, ranks))
    figures.append(
        support.Figure("competitive_ratio", max(ratios), "ratio", "<= 1.5", None, ratios)
    )
    figures.append(support.median("competitive_ratio_median", ratios, "ratio", "<= 1.5"))
    figures += [
        support.Figure(
            "load_competitive_ratio", max(load_ratios), "ratio", "<= 1.5", None, load_ratios
        ),
        support.Figure("foresight_over_pd_ors", max(aheads), "ratio", None, None, aheads),
        support.median("load_over_pd_ors", loads, "ratio", None),
    ]
    geo_ranks, gains, best = [], [], []
    for machines, jobs in sizes[:2] if options.quick else ((20, 20), (50, 50)):
        shape = LoadShape(machines, jobs, regions=5, spot_fraction=0.3)
        values, longest, (most, ahead) = compare(shape, geo_policies(), seeds, 1.0)
        means = {name: statistics.mean(each) for name, each in values.items()}
        ours = sum(values["geo"][:BOUNDED])
        others = [means[name] for name in OTHERS]
        geo_ranks.append(1 + sum(value > means["geo"] for name, value in means.items()))
        gains.append(means["geo"] - means["paper"])
        best.append(means["geo"] - max(others))
        decisions.append(longest)
        support.say(
            f"5 regions, {machines} machines, {jobs} jobs: "
            + ", ".join(f"{name} {value:.0f}" for name, value in means.items())
            + f"; over ours: bound {most / ours:.2f}, foresight {ahead / ours:.2f}; decision "
            f"{longest:.2f} s"
        )
    figures += [
        support.Figure("geo_rank", max(geo_ranks), "rank", "<= 1", None, geo_ranks),
        support.Figure("geo_over_paper", min(gains), "utility less USD", None, None, gains),
        support.Figure("geo_over_best_other", min(best), "utility less USD", None, None, best),
        support.Figure("decision_s", max(decisions), "s", "<= 0.3", None, decisions),
    ]
    support.finish("online_scheduling", machine, figures, options.out)


if __name__ == "__main__":
    main()
