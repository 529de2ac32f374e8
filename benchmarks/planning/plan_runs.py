"""Plans held against the runs that follow them: time and dollars of whole jobs.

Three regions of the local cluster with machines of two speeds and prices of our own: `quick` and
`slow`, emulated by padding steps to rows over a speed that the planner does not know. For each of
the two types `geo-ray profile` measures the job; then `geo-ray plan` makes a plan per policy and
`geo-ray train --plan` follows it.

  time_error_POLICY   |predicted / actual - 1| of the seconds from the command to the last event,
                      the start as profiled included
  usd_error_POLICY    the same of the dollars: machines and servers by the actual time, egress by
                      the bytes that crossed
  seconds_*, usd_*    actual
  profile_s           what both profiles took
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.common import support
from benchmarks.common.command import Run, command, geo_ray
from geo_ray.planner.plan import Plan, load_plan
from geo_ray.planner.profile import load_profile

SPEED = {"quick": 30.0, "slow": 10.0}
PRICE = {"quick": 3.0, "slow": 0.8}
CAPS = {
    "us": {"quick": 2, "slow": 2},
    "eu": {"quick": 1, "slow": 2},
    "asia": {"quick": 1, "slow": 2},
}
ROWS = {"us": 4000, "eu": 2000, "asia": 2000}
PROFILES = {
    "quick": ("--workers", "1,4", "--batch-sizes", "4,16", "--codecs", "none,int8"),
    "slow": ("--workers", "1", "--batch-sizes", "4,16", "--codecs", "none,int8"),
}
POLICIES = ("optimal", "cloudless", "everything")
STEPS = 240


def config(steps: int) -> str:
    """The job."""
    regions = []
    for name, caps in CAPS.items():
        machines = ", ".join(f"{{type: {kind}, cap: {cap}}}" for kind, cap in caps.items())
        regions.append(
            f"    {name}: {{cloud: own, at: {name}, rows: {ROWS[name]}, server: server, "
            f"machines: [{machines}]}}"
        )
    return f"""
name: planned
task: {{use: bytelm, options: {{size: 0.1M, context: 32}}}}
data: {{generate: {{rows_per_shard: 1024}}, batch_size: 6}}
regions: [{{name: us, workers: 4}}, {{name: eu, workers: 3}}, {{name: asia, workers: 3}}]
strategy: {{kind: diloco, interval: 8}}
optimizer: {{kind: sgd, lr: 0.01}}
train: {{steps: {steps}, eval_every: {steps // 2}}}
checkpoint: {{every_s: null}}
emulate:
  link: {{rate_mbps: 20, delay_s: 0.03}}
plan:
  startup_s: null
  intervals: [8]
  codecs: [null, int8]
  regions:
{chr(10).join(regions)}
"""


def prices() -> str:
    """A file of prices."""
    what = {"source": "made up", "fetched_at": "2026-11-20T00:00:00Z", "valid_for_s": 1e9}
    records = []
    for region in CAPS:
        common = {"cloud": "own", "region": region, "currency": "USD", **what}
        for kind, amount in {**PRICE, "server": 0.4}.items():
            records.append({**common, "type": kind, "amount": amount, "unit": "hour"})
        records.append({**common, "item": "egress", "to": "*", "amount": 0.09, "unit": "GB"})
    return json.dumps({"records": records})


def main() -> None:
    parser = support.parser(__doc__)
    parser.add_argument("--policies", default=",".join(POLICIES), help="only these, with commas")
    options = parser.parse_args()
    machine = support.hardware()
    steps = 40 if options.quick else STEPS
    figures: list[support.Figure] = []
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        job, measured = write_job(directory, steps)
        profile(job, measured)
        figures.append(support.Figure("profile_s", load_profile(measured).spent_s, "s"))
        policies = options.policies.split(",")
        for policy in policies[:1] if options.quick else policies:
            out = directory / f"{policy}.json"
            plan = planned(job, measured, out, "--policy", policy)
            support.say(
                f"{policy}: {plan.total_s:.1f} s, {plan.total_usd:.4f} USD; {machines(plan)}"
            )
            run = followed(plan, out, job, directory / policy)
            figures += compared(policy, plan, run)
            support.say(", ".join(f"{f.name} {f.value:.4g}" for f in figures[-4:] if f.value))
            support.say((run.directory / "cost.json").read_text("utf-8"))
    support.finish("plan_runs", machine, figures, options.out)


def write_job(directory: Path, steps: int) -> tuple[Path, Path]:
    """The job's configuration, beside its prices; and where its profile will be."""
    job = directory / "job.yaml"
    job.write_text(config(steps), "utf-8")
    (directory / "prices.json").write_text(prices(), "utf-8")
    return job, directory / "profile.json"


def profile(job: Path, measured: Path, profiles: Mapping[str, Sequence[str]] = PROFILES) -> None:
    """`geo-ray profile`, once on each of the two types, with these arguments."""
    for kind, speed in SPEED.items():
        support.say(f"profile of {kind}")
        speeds = ", ".join(f"{name}: [{speed}]" for name in CAPS)
        words = [part for name in CAPS for part in ("--machine", f"{name}={kind}")]
        words += ["--set", f"emulate.rows_per_s_by_region={{{speeds}}}", "--out", str(measured)]
        command("profile", str(job), *profiles[kind], *words, cwd=job.parent)


def planned(job: Path, measured: Path, out: Path, *words: str) -> Plan:
    """`geo-ray plan` with the profile."""
    known = ["--prices", str(job.parent / "prices.json"), "--profile", str(measured)]
    command("plan", str(job), *known, "--out", str(out), "--extrapolate", *words, cwd=job.parent)
    return load_plan(out)


def machines(plan: Plan) -> str:
    """What runs where."""
    return "; ".join(
        f"{region.region} {', '.join(f'{m.count} {m.type} x {m.rows}' for m in region.machines)}"
        for region in plan.regions
    )


def followed(plan: Plan, path: Path, job: Path, runs: Path, timeout_s: float = 1800) -> Run:
    """`geo-ray train --plan`, with machines as fast as they are."""
    speeds = {
        region.region: [SPEED[m.type] for m in region.machines for _ in range(m.count)]
        for region in plan.regions
    }
    sets: dict[str, object] = {"emulate.rows_per_s_by_region": json.dumps(speeds)}
    # The plan sets them too, but speeds must fit before it does.
    sets |= {f"regions.{i}.workers": len(speeds[name]) for i, name in enumerate(CAPS)}
    return geo_ray("train", job, sets, runs, flags=("--plan", str(path)), timeout_s=timeout_s)


def compared(policy: str, plan: Plan, run: Run) -> list[support.Figure]:
    """Predicted against actual."""
    actual_s = run.summary["startup_s"] + run.summary["seconds"]
    actual_usd = run.summary["usd"]
    return [
        support.Figure(
            f"time_error_{policy}", abs(plan.total_s / actual_s - 1), "ratio", "<= 0.05"
        ),
        support.Figure(
            f"usd_error_{policy}", abs(plan.total_usd / actual_usd - 1), "ratio", "<= 0.05"
        ),
        support.Figure(f"seconds_{policy}", actual_s, "s"),
        support.Figure(f"usd_{policy}", actual_usd, "USD"),
    ]


if __name__ == "__main__":
    main()
