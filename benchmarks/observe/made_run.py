"""A run of many regions as its directory shows it, written by the project's own writers.

Nobody trains: events are written as a run would write them, as fast as is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_ray.base.load import load_text
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.plan import Machines, Plan, RegionPlan
from geo_ray.runs import directory
from geo_ray.runs.directory import RunDirectory
from geo_ray.telemetry.event_log import EVENTS_FILE, EventLog

Row = tuple[str, float, dict[str, Any]]
"""Kind, time and fields of an event."""

TEXT = """
name: trial
task: {use: digits, options: {width: 2}}
data: {generate: {}, batch_size: 8}
regions: [REGIONS]
strategy: {kind: sma}
optimizer: {kind: sgd}
train: {steps: 400}
emulate: {link: {rate_mbps: 50}}
run: {dir: "DIR"}
"""
PLACES = ("us-east", "eu-west", "ap-south", "us-west", "sa-east", "af-south")


def names_of(count: int) -> list[str]:
    """Names of so many regions."""
    return [
        PLACES[i] if count <= len(PLACES) else f"{PLACES[i % 6]}-{i // 6}" for i in range(count)
    ]


def experiment_of(where: str, regions: list[str]) -> Experiment:
    """The configuration of the run."""
    text = TEXT.replace("REGIONS", ", ".join(f"{{name: {name}}}" for name in regions))
    return load_text(text.replace("DIR", where), [], Experiment, "trial.yaml")


def plan_for(regions: list[str], seconds: float = 200.0) -> Plan:
    """A plan that it follows."""

    def machines(number: int) -> Machines:
        return Machines(
            type="g5.xlarge" if number % 2 else "g6.xlarge",
            market="spot" if number % 3 else "on_demand",
            count=1 + number % 2,
            rows=8,
            rows_per_s=20.0,
            usd_per_h=1.2,
        )

    leader = regions[0]
    return Plan(
        policy="geo",
        regions=tuple(
            RegionPlan(region=name, machines=(machines(i),), step_s=0.5)
            for i, name in enumerate(regions)
        ),
        averager=leader,
        interval=4,
        codec=None,
        steps=400,
        usd_per_gb={s: dict.fromkeys(regions, 0.02) for s in regions},
        seconds={"start": 5.0, "compute": seconds - 5.0},
        usd={"machines": len(regions) * 1.5 * 1.2 * seconds / 3600, "egress": 0.1},
    )


@dataclass
class MadeRun:
    """A run whose log grows as the test wants."""

    run: RunDirectory
    regions: list[str]
    log: EventLog
    round: int = 0
    sent: int = 0

    @property
    def path(self) -> Path:
        """Its directory."""
        return self.run.path

    def write(self, *rows: Row) -> None:
        """Write events."""
        for kind, t_s, fields in rows:
            self.log.write(kind, t_s, **fields)

    def begin(self, **changes: Any) -> None:
        """Begin; ``changes`` are fields of `run_started`."""
        told: dict[str, Any] = {
            "run": "trial",
            "digest": "c0ffee",
            "task": "digits",
            "seed": 7,
            "simulated": False,
            "regions": self.regions,
            "averager": self.regions[0],
            "steps": dict.fromkeys(self.regions, 400),
            "strategy": "sma",
            "startup_s": 3.0,
        }
        self.write(("run_started", 0.0, {**told, **changes}))

    def go_on(self, rounds: int, without: tuple[str, ...] = ()) -> None:
        """So many rounds of four steps each, 2 s a round."""
        for _ in range(rounds):
            self.round += 1
            self.sent += 1_000_000
            self.write(*self._round([n for n in self.regions if n not in without]))

    def _round(self, regions: list[str]) -> Iterator[Row]:
        leader, at_s = self.regions[0], 2.0 * self.round
        for i, name in enumerate(regions):
            for k in range(4):
                number, t_s = 4 * (self.round - 1) + k + 1, at_s - 2.0 + 0.4 * (k + 1)
                loss = 2.3 * math.exp(-number / 150) + 0.05 * math.sin(i + number)
                took = {"compute_s": 0.35, "wait_s": 0.05, "start_s": t_s - 0.5}
                told = {"region": name, "step": number, "samples": 32, "loss": loss}
                yield "step", t_s, told | took
        for i, name in enumerate(regions):
            yield "exchange", at_s, self._exchange(name, at_s - 0.4 - 0.001 * i)
            if name != leader:
                sent = self.sent * (1 + i % 5)
                yield "wan", at_s, {"src": name, "dst": leader, "bytes_by_class": {"update": sent}}
                back = {"reply": sent // 2}
                yield "wan", at_s, {"src": leader, "dst": name, "bytes_by_class": back}

    def _exchange(self, region: str, start_s: float) -> dict[str, Any]:
        numbers = {"seq": self.round, "round": self.round, "staleness": 0}
        sizes = {"bytes_sent": 1000, "bytes_received": 1200}
        return {
            "region": region,
            "start_s": start_s,
            "held_s": 0.1,
            "blocking": True,
            **numbers,
            **sizes,
        }

    def close(self) -> None:
        """Write no more."""
        self.log.close()

    def finish(self) -> None:
        """Tell the end."""
        self.write(("run_finished", 2.0 * self.round + 1, {"summary": {"seconds": 1.0}}))


def made_run(root: Path, count: int, *, where: str | None = None) -> MadeRun:
    """A run that follows a plan, in a directory, or at an address."""
    regions = names_of(count)
    experiment = experiment_of(where or str(root / "runs"), regions)
    run = directory.create(experiment, root, followed=plan_for(regions))
    return MadeRun(run, regions, EventLog(run.path / EVENTS_FILE))


def eventful(made: MadeRun, rounds: int) -> None:
    """A run in which something happens: a region is lost and comes back, the averager moves."""
    made.begin()
    third = max(1, rounds // 3)
    made.go_on(third)
    gone, at_s = made.regions[-1], 2.0 * made.round
    made.write(("region_lost", at_s, {"region": gone, "cause": "its machine was taken back"}))
    made.go_on(third, without=(gone,))
    at_s = 2.0 * made.round
    fields = {"view": 3, "round": made.round, "step": 4 * made.round, "bytes": 10**6, "took_s": 1.5}
    made.write(("region_joined", at_s, {"region": gone, **fields}))
    made.write(("averager_moved", at_s, {"region": made.regions[1], "term": 2}))
    made.go_on(rounds - 2 * third)
