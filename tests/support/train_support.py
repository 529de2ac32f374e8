"""Tiny runs on real actors, and what a finished run directory must hold whatever was run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geo_ray.base.load import dump_yaml
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs import directory as rundir
from geo_ray.runs.directory import RunDirectory
from geo_ray.runs.requests import Interruption
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.telemetry.event_log import EVENTS_FILE, read_events
from geo_ray.telemetry.events import Event, RunObserver
from geo_ray.telemetry.summary import Summary
from geo_ray.training.assignment import Ledger

if TYPE_CHECKING:
    from geo_ray.runtime.run_context import Reporting
    from geo_ray.runtime.run_order import Resumption

WAIT_S = 400.0


def experiment_of(directory: Path, **changes: Any) -> Experiment:
    """A tiny experiment on the shared cluster; keywords replace whole sections."""
    tree: dict[str, Any] = {
        "name": "tiny",
        "task": {"use": "digits", "options": {"width": 2}},
        "data": {"generate": {"rows_per_shard": 256}, "batch_size": 16},
        "regions": [{"name": "us-east"}, {"name": "eu-west"}],
        "strategy": {"kind": "sma", "interval": 2},
        "optimizer": {"kind": "momentum", "lr": 0.05},
        "train": {"steps": 8, "eval_every": 4, "step_timeout_s": 60},
        "cluster": {"kind": "existing"},
        "checkpoint": {"every_s": None},
        "run": {"dir": str(directory / "runs")},
    }
    return Experiment.model_validate_json(json.dumps(tree | changes))


def write_config(directory: Path, experiment: Experiment) -> Path:
    path = directory / "config.yaml"
    path.write_text(dump_yaml(experiment))
    return path


@dataclass(frozen=True)
class Trained:
    """A run that has ended well."""

    run: RunDirectory
    summary: Summary

    @property
    def events(self) -> list[Event]:
        return events_of(self.run.path)

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]


class Phases(RunObserver):
    """Notes the phases of a run."""

    def __init__(self, told: list[str]) -> None:
        self.status = told.append  # type: ignore[method-assign]


class EventSink(RunObserver):
    """Gives events to a function."""

    def __init__(self, sink: Callable[[Event], None]) -> None:
        self.on_event = sink  # type: ignore[method-assign]


def train(
    experiment: Experiment,
    base_dir: Path,
    *,
    begun: RunDirectory | None = None,
    resume: bool = False,
    away: frozenset[str] = frozenset(),
    sink: Callable[[Event], None] = lambda event: None,
    interruption: Interruption | None = None,
) -> Trained:
    """Train in this process, in a new run directory unless one is given."""
    from geo_ray.runtime.run_context import Reporting
    from geo_ray.runtime.run_order import Resumption

    reporting = Reporting(EventSink(sink), time.time(), interruption or Interruption())
    run = begun or rundir.create(experiment, base_dir)
    found = Resumption(away=away) if resume else None
    return Trained(run, run_here(experiment, run, reporting, resume=found))


def run_here(
    experiment: Experiment,
    run: RunDirectory,
    reporting: Reporting,
    *,
    resume: Resumption | None = None,
) -> Summary:
    """Host the run loop in this process, which owns the run's processes, as a Tune trial does."""
    from geo_ray.runtime import main
    from geo_ray.runtime.launcher import OwnProcesses
    from geo_ray.runtime.run_client import cluster_of

    with cluster_of(experiment, reporting.observer):
        return main.run(experiment, run, reporting, OwnProcesses(), resume=resume)


def simulate(experiment: Experiment, base_dir: Path) -> Trained:
    """The same on the virtual clock; what an undisturbed run must come to."""
    from geo_ray.simulator.run import simulate as run_to_end

    run = rundir.create(
        experiment.model_copy(update={"name": f"{experiment.name}-simulated"}), base_dir
    )
    return Trained(run, run_to_end(experiment, run, RunObserver()))


def events_of(run_dir: Path) -> list[Event]:
    return list(read_events(run_dir / EVENTS_FILE))


def count(run_dir: Path, kind: str) -> int:
    """How often an event happened so far, in all stretches of the run."""
    log = run_dir / "events.jsonl"
    return log.read_text().count(f'"kind":"{kind}"') if log.exists() else 0


def losses(events: list[Event]) -> dict[tuple[str, int], float]:
    """The loss series as it stands: a step that was done again counts as it was done last."""
    return {(e["region"], e["step"]): e["loss"] for e in events if e.kind == "step"}


def final_digests(events: list[Event]) -> set[str]:
    (finished,) = [event for event in events if event.kind == "run_finished"]
    return set(finished["digests"].values())


def books_of(run: RunDirectory) -> dict[str, Ledger]:
    """The sample books in the newest checkpoint, by region; each balances."""
    found = CheckpointStore(run.checkpoints).latest()
    books = {}
    for part in found.manifest.parts:
        if part.name.endswith("-ps0"):
            control: Any = found.read(part.name)[1]["control"]
            ledger = Ledger.restore(control["ledger"])
            ledger.check()
            books[part.name.removesuffix("-ps0")] = ledger
    return books


def eventually(condition: Callable[[], Any], what: str) -> Any:
    """Poll until the condition is true; its value."""
    deadline_s = time.monotonic() + WAIT_S
    while not (value := condition()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {WAIT_S} s: {what}")
        time.sleep(0.02)
    return value
