"""What measuring a job first costs, against an oracle that knew the best machines from the start.

The job of `plan_runs`, three quarters of an hour long. *Ours* profiles it, three runs on the quick
machines and one on the slow ones, which share all but their speed, plans from that and trains. The
*oracle* is given the machines' true speeds, plans from those and trains. If both come to the same
machines and exchanges, one run is both.

  overhead_time       (profile + our run) / oracle's run - 1, in seconds from command to end
  overhead_usd        the same of dollars; profiles at the prices of the machines they ran on
  profile_s, run_s, oracle_s   what it is made of
  same_plan           1 if both came to the same plan
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from benchmarks.common import support
from benchmarks.common.command import Run
from benchmarks.planning.plan_runs import (
    CAPS,
    PRICE,
    PROFILES,
    SPEED,
    followed,
    machines,
    planned,
    profile,
    write_job,
)
from geo_ray.planner.plan import Plan
from geo_ray.planner.profile import load_profile

STEPS = 1750
TIMEOUT_S = 5400.0
LEAN = {**PROFILES, "slow": ("--workers", "1", "--batch-sizes", "16", "--codecs", "none")}
HOUR_S = 3600.0
SERVER_USD_PER_H = 0.4


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        job, measured = write_job(directory, 80 if options.quick else STEPS)
        profile(job, measured, LEAN)
        profiled_s = load_profile(measured).spent_s
        mine = planned(job, measured, directory / "ours.json")
        true = [
            word
            for i, name in enumerate(CAPS)
            for word in ("--set", f"plan.regions.{name}.machines={_known(name)}")
        ]
        best = planned(job, measured, directory / "oracle.json", *true)
        support.say(f"ours: {machines(mine)}; the oracle's: {machines(best)}")
        is_same = _choice(mine) == _choice(best)
        ours = followed(mine, directory / "ours.json", job, directory / "ours", TIMEOUT_S)
        other = ours
        if not is_same:
            path = directory / "oracle.json"
            other = followed(best, path, job, directory / "oracle", TIMEOUT_S)
        run_s, oracle_s = _seconds(ours), _seconds(other)
        run_usd, oracle_usd = ours.summary["usd"], other.summary["usd"]
        profiled_usd = profiled_s / HOUR_S * _profiled_usd_per_h()
    figures = [
        support.Figure("overhead_time", (profiled_s + run_s) / oracle_s - 1, "ratio", "<= 0.1"),
        support.Figure("overhead_usd", (profiled_usd + run_usd) / oracle_usd - 1, "ratio"),
        support.Figure("profile_s", profiled_s, "s"),
        support.Figure("run_s", run_s, "s"),
        support.Figure("oracle_s", oracle_s, "s"),
        support.Figure("same_plan", float(is_same), ""),
    ]
    support.finish("profiling_overhead", machine, figures, options.out)


def _known(region: str) -> str:
    """A region's machines with the speeds that they have."""
    return json.dumps(
        [
            {"type": kind, "cap": cap, "rows_per_s": SPEED[kind]}
            for kind, cap in CAPS[region].items()
        ]
    )


def _choice(plan: Plan) -> object:
    """What of a plan decides how a run goes."""
    rented = [
        [(m.type, m.market, m.count, m.rows) for m in region.machines] for region in plan.regions
    ]
    return rented, plan.averager, plan.interval, plan.codec


def _seconds(run: Run) -> float:
    return float(run.summary["startup_s"] + run.summary["seconds"])


def _profiled_usd_per_h() -> float:
    """Of the largest of the runs of a profile, on the dearer machines: more than it was."""
    rented = sum(sum(caps.values()) for caps in CAPS.values()) * max(PRICE.values())
    return rented + len(CAPS) * SERVER_USD_PER_H


if __name__ == "__main__":
    main()
