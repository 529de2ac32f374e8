"""How well a profile predicts steps that were not measured, other links included.

*emulated*: two regions of up to four workers, steps padded to their rows over a speed, exchanges
every 8 steps on an emulated link. *computed*: one region of up to two workers on this machine's
cores, nothing padded. `geo-ray profile` measures corners (partial: three of them) or a grid (full);
then the job runs with workers, rows, link and codec that no profile has seen.

  error_partial_*, error_full_*   mean of |predicted / measured - 1| of the seconds per step, what
                                  exchanges add included; single held-out points in `runs`
  profile_s_*                     what measuring took, starts of clusters included
  repeated_*                      mean of |first / second - 1| of the held-out points, which are
                                  measured before and after the profiles: what the machine itself
                                  leaves unsaid; the errors are against the mean of the two
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.common import support
from benchmarks.common.command import Run, command, geo_ray
from geo_ray.planner.exchange import exchange
from geo_ray.planner.profile import Profile, fit_steps, load_profile
from geo_ray.transport.emulation import LinkSpec
from geo_ray.transport.links import table_of

HUB, FAR = "us", "eu"
INTERVAL, STEPS = 8, 43
MANY = 403  # of steps that take a few dozen milliseconds, on cores that do not keep their speed
DELAY_S, PROFILED_MBPS = 0.02, 50
CONFIG = """
name: profiled
task: {use: bytelm, options: {size: 0.1M, context: 32}}
data: {generate: {rows_per_shard: 1024}, batch_size: 32}
optimizer: {kind: sgd, lr: 0.01}
checkpoint: {every_s: null}
"""
TWO = f"""
regions: [{{name: {HUB}, workers: 4}}, {{name: {FAR}, workers: 4}}]
strategy: {{kind: diloco, interval: {INTERVAL}}}
train: {{steps: {STEPS}, eval_every: 0}}
emulate:
  step_s: 0.05
  link: {{rate_mbps: {PROFILED_MBPS}, delay_s: {DELAY_S}}}
  rows_per_s_by_region: {{{HUB}: [100], {FAR}: [100]}}
"""
ONE = f"""
regions: [{{name: {HUB}, workers: 2}}]
strategy: {{kind: bsp}}
train: {{steps: {MANY}, eval_every: 0}}
"""


@dataclass(frozen=True, slots=True)
class Point:
    """What no profile has seen."""

    workers: int
    rows: int
    rate_mbps: float = 0.0
    codec: str | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """One kind of machine."""

    text: str
    held_out: Sequence[Point]
    partial: Sequence[str]
    full: Sequence[str]


SETTINGS: Mapping[str, Setting] = {
    "emulated": Setting(
        CONFIG + TWO,
        (
            Point(3, 12, 20),
            Point(2, 24, 100, "int8"),
            Point(1, 20, 20, "int8"),
            Point(3, 28, 100),
        ),
        ("--workers", "1,4", "--batch-sizes", "8,32", "--codecs", "none,int8"),
        ("--workers", "1,2,4", "--batch-sizes", "8,16,32", "--codecs", "none,int8", "--full"),
    ),
    "computed": Setting(
        CONFIG + ONE,
        (Point(1, 48), Point(1, 96), Point(2, 48), Point(2, 96)),
        ("--workers", "1,2", "--batch-sizes", "32,128", "--steps", "200"),
        ("--workers", "1,2", "--batch-sizes", "32,64,128", "--steps", "200", "--full"),
    ),
}


def main() -> None:
    parser = support.parser(__doc__)
    parser.add_argument("--settings", default=",".join(SETTINGS), help="only these, with commas")
    options = parser.parse_args()
    machine = support.hardware()
    figures: list[support.Figure] = []
    for name in options.settings.split(","):
        setting = SETTINGS[name]
        with tempfile.TemporaryDirectory() as directory:
            figures += measure(name, setting, Path(directory), quick=options.quick)
        if options.quick:
            break
    support.finish("profile_error", machine, figures, options.out)


def measure(
    name: str, setting: Setting, directory: Path, *, quick: bool = False
) -> list[support.Figure]:
    """Run what was held out, profile, run it again, compare."""
    config = directory / "job.yaml"
    config.write_text(setting.text, "utf-8")
    points = setting.held_out[: 1 if quick else None]
    before_s = held_out_s(name, points, config, directory / "before")
    profiles = {}
    for kind in ("partial",) if quick else ("partial", "full"):
        support.say(f"{name}: {kind} profile")
        path = directory / f"{kind}.json"
        words = setting.partial if kind == "partial" else setting.full
        command("profile", str(config), *words, "--out", str(path), cwd=directory)
        profiles[kind] = load_profile(path)
    after_s = held_out_s(name, points, config, directory / "after")
    errors: dict[str, list[float]] = {kind: [] for kind in profiles}
    for point, *both_s in zip(points, before_s, after_s, strict=True):
        measured_s = statistics.mean(both_s)
        for kind, profile in profiles.items():
            found_s = predicted_s(profile, point)
            errors[kind].append(abs(found_s / measured_s - 1))
            support.say(f"{name}: {point}: {measured_s:.4f} s a step, {kind} said {found_s:.4f}")
    again = [abs(one / other - 1) for one, other in zip(before_s, after_s, strict=True)]
    label = f"repeated_{name}"
    figures = [support.Figure(label, statistics.mean(again), "ratio", None, None, again)]
    for kind, target in (("partial", "<= 0.05"), ("full", "<= 0.02")):
        if kind in profiles:
            mean = statistics.mean(errors[kind])
            label = f"error_{kind}_{name}"
            figures.append(support.Figure(label, mean, "ratio", target, None, errors[kind]))
            figures.append(support.Figure(f"profile_s_{kind}_{name}", profiles[kind].spent_s, "s"))
    return figures


def held_out_s(name: str, points: Sequence[Point], config: Path, directory: Path) -> list[float]:
    """Seconds per step of every point."""
    found = []
    for number, point in enumerate(points):
        run = run_of(point, config, directory / str(number), two=name == "emulated")
        found.append(period_s(run))
        support.say(f"{name}: {point}: {found[-1]:.4f} s a step")
    return found


def run_of(point: Point, config: Path, directory: Path, *, two: bool) -> Run:
    """The job with what was held out."""
    sets: dict[str, object] = {"regions.0.workers": point.workers, "data.batch_size": point.rows}
    if two:
        sets |= {"regions.1.workers": point.workers, "emulate.link.rate_mbps": point.rate_mbps}
    if point.codec is not None:
        both = f"{{kind: {point.codec}}}"
        sets["codec"] = f"{{up: {both}, down: {both}}}"
    return geo_ray("train", config, sets, directory)


def period_s(run: Run) -> float:
    """Seconds per step, from the start of a round to that of the next; the slower region's."""
    starts_s: dict[str, list[float]] = {}
    for step in run.events("step"):
        starts_s.setdefault(step["region"], []).append(step["start_s"])
    slowest_s = 0.0
    for values in starts_s.values():
        borders_s = values[3::INTERVAL]  # the first steps are slower
        rounds = [(b - a) / INTERVAL for a, b in pairwise(borders_s)]
        slowest_s = max(slowest_s, statistics.median(rounds))
    return slowest_s


def predicted_s(profile: Profile, point: Point) -> float:
    """Seconds per step as the planner has them."""
    regions = list(dict.fromkeys(each.region for each in profile.steps))
    step_s = max(
        fit_steps(name, profile.steps).step_s("here", point.workers, point.rows) for name in regions
    )
    if len(regions) == 1:
        return step_s
    link = LinkSpec(rate_mbps=point.rate_mbps, delay_s=DELAY_S)
    pairs = ((HUB, FAR), (FAR, HUB))
    one = exchange(
        profile.model.num_params,
        regions,
        HUB,
        point.codec,
        table_of(dict.fromkeys(pairs, link)),
        dict.fromkeys(pairs, 0.0),
        {each.codec: each.overhead_s for each in profile.exchanges}[point.codec],
    )
    return step_s + one.seconds / INTERVAL


if __name__ == "__main__":
    main()
