"""Useful rows under failures over those of a quiet run, for every strategy, on the virtual clock.

32 regions, steps of 1 s, links of 100 Mbit/s and 50 ms, a model of some hundred parameters. Every
region but the averager's fails at random (exponential times, the same for all strategies), is down
for 20 s, its processes' start included, and then joins. Two ways to live with that:

  waits     the others wait until it is back (`members.min` not given), as a job does that needs all
  goes on   they notice within 1 s and go on; it begins as a copy of another at the next border

The rate of failures is the one at which `bsp` that waits keeps 27 % of its goodput, found by
bisection. A row is useful if its step's change of the model was told to the others before its
region was lost. While a region is down its rows are missed: `most` is what is left at this rate.

  goodput_KIND   goes on, median of the seeds
  bsp_waits      the baseline, at the rate that was found
"""

from __future__ import annotations

import random
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import support
from benchmarks.membership.histories import SHORT, optimizer_of
from geo_ray.base.canonical import canonical_json
from geo_ray.base.load import load_text
from geo_ray.data.manifest import Manifest
from geo_ray.data.tasks.base import Task
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.build import use_one_thread
from geo_ray.runs.data import prepare_manifest
from geo_ray.simulator.world import World
from geo_ray.strategies.registry import STRATEGIES

REGIONS, STEPS, DOWN_S, NOTICED_S = 32, 240, 20.0, 1.0
LONGEST_S = 4000.0
ASKED_OF_BSP, ASKED = 0.27, 0.88
NAMES = tuple(f"r{number:02}" for number in range(REGIONS))


def config(kind: str) -> Experiment:
    """The run of one strategy."""
    sections = {
        "name": "goodput",
        "task": {"use": "digits", "options": {"width": 2}},
        "data": {"generate": {"split": {"kind": "iid"}}, "batch_size": 4},
        "regions": [{"name": name} for name in NAMES],
        "strategy": {"kind": kind, **SHORT.get(kind, {})},
        "codec": {"up": {"kind": "chunked_topk"}} if kind == "sparseloco" else {},
        "optimizer": optimizer_of(kind, 0.02),
        "train": {"steps": STEPS, "count": "total", "eval_every": 0},
        "emulate": {"step_s": 1.0, "link": {"rate_mbps": 100, "delay_s": 0.05}},
        "members": {"min": 1},
        "checkpoint": {"every_s": None},
    }
    return load_text(canonical_json(sections), [], Experiment, "goodput")


def failures_s(seed: int, between_s: float) -> dict[str, list[float]]:
    """When each region is lost, by name; it is down for `DOWN_S` after each."""
    draw = random.Random(seed)
    found: dict[str, list[float]] = {}
    for name in NAMES[1:]:
        at_s, times_s = draw.expovariate(1.0) * between_s, []
        while at_s < LONGEST_S:
            times_s.append(at_s)
            at_s += DOWN_S + draw.expovariate(1.0) * between_s
        found[name] = times_s
    return found


@dataclass(slots=True)
class Goodput:
    """Counts the rows of a run that are useful.

    Attributes:
        rows: that are.
        end_s: of the last step.
    """

    rows: int = 0
    end_s: float = 0.0
    _untold: dict[str, int] = field(default_factory=dict)

    def feed(self, kind: str, t_s: float, **fields: Any) -> None:
        """Take an event."""
        region = str(fields.get("region"))
        if kind == "step":
            self.rows += fields["samples"]
            self._untold[region] = self._untold.get(region, 0) + fields["samples"]
            self.end_s = t_s
        elif kind == "exchange":
            self._untold[region] = 0
        elif kind == "region_lost":
            self.rows -= self._untold.pop(region, 0)

    @property
    def per_s(self) -> float:
        """Useful rows per second."""
        return self.rows / self.end_s


class Workload:
    """The data that all runs share.

    Args:
        directory: for them.
    """

    def __init__(self, directory: Path) -> None:
        self._task: Task = load_task(config("bsp").task, directory)
        self._manifest: Manifest
        self._manifest, _ = prepare_manifest(config("bsp"), self._task, directory, directory)

    def rows_per_s(self, kind: str, failures: dict[str, list[float]], *, waits: bool) -> float:
        """Useful rows per second of one run."""
        count = Goodput()
        world = World(config(kind), self._task, self._manifest, count.feed)
        for name, times_s in failures.items():
            for at_s, next_s in zip(times_s, [*times_s[1:], LONGEST_S], strict=False):
                world.lose_at(at_s, name, DOWN_S if waits else NOTICED_S)
                ask_s = at_s + DOWN_S + 0.001
                while ask_s < min(next_s, at_s + 5 * DOWN_S):  # one joins at a time: asked again
                    world.change_at(ask_s, joins=[name])
                    ask_s += 0.5
        world.run()
        return count.per_s


def rate_of_bsp(work: Workload, quiet_per_s: float, seeds: range) -> tuple[float, float]:
    """Seconds between failures of a region at which `bsp` that waits keeps `ASKED_OF_BSP`."""
    low_s, high_s, found = 20.0, 4000.0, 0.0
    for _ in range(7):
        middle_s = (low_s * high_s) ** 0.5
        kept = [
            work.rows_per_s("bsp", failures_s(seed, middle_s), waits=True) / quiet_per_s
            for seed in seeds
        ]
        found = statistics.median(kept)
        support.say(f"a failure of each region every {middle_s:.0f} s: bsp keeps {found:.3f}")
        low_s, high_s = (middle_s, high_s) if found < ASKED_OF_BSP else (low_s, middle_s)
    return middle_s, found


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    use_one_thread()
    seeds = range(1 if options.quick else 3)
    kinds = ["bsp", "decoupled"] if options.quick else sorted(STRATEGIES)
    with tempfile.TemporaryDirectory(prefix="goodput-") as directory:
        work = Workload(Path(directory))
        quiet_per_s = work.rows_per_s("bsp", {}, waits=True)
        between_s, kept = rate_of_bsp(work, quiet_per_s, seeds)
        most = 1 - (REGIONS - 1) / REGIONS * DOWN_S / (DOWN_S + between_s)
        figures = [
            support.Figure("between_failures", between_s, "s"),
            support.Figure("bsp_waits", kept, "share"),
            support.Figure("most", most, "share"),
        ]
        best = 0.0
        for kind in kinds:
            quiet = work.rows_per_s(kind, {}, waits=False)
            runs = [
                work.rows_per_s(kind, failures_s(seed, between_s), waits=False) / quiet
                for seed in seeds
            ]
            figures.append(support.median(f"goodput_{kind}", runs, "share"))
            best = max(best, statistics.median(runs))
            support.say(f"{kind}: {statistics.median(runs):.3f}")
        figures.append(support.Figure("best", best, "share", f">= {ASKED}"))
    support.finish("goodput", machine, figures, options.out)


if __name__ == "__main__":
    main()
