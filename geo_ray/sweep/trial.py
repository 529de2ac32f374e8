"""One trial: the run of one configuration, simulated or on real actors, and its outcome."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from geo_ray.base.canonical import JSONValue
from geo_ray.base.errors import NonFiniteError
from geo_ray.base.load import digest
from geo_ray.base.model import StrictModel
from geo_ray.base.user_section import context
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs import directory as rundir
from geo_ray.runs.directory import RunDirectory
from geo_ray.simulator.run import simulate
from geo_ray.telemetry.charts import Floats, bytes_at
from geo_ray.telemetry.event_log import EVENTS_FILE, read_events
from geo_ray.telemetry.events import Event, RunObserver
from geo_ray.telemetry.summary import Summary
from geo_ray.telemetry.totals import Link, RunTotals, SentUntil

if TYPE_CHECKING:
    from geo_ray.ray_cluster.connect import ConnectedCluster
    from geo_ray.runtime.launcher import OwnProcesses


@dataclass(frozen=True, slots=True)
class RealTrial:
    """Settings of a trial on real actors.

    Attributes:
        launcher: owns the run's processes, so that they end with this process, which hosts the run
            loop; None: an actor of the cluster hosts it.
        stands: the running cluster; None: the run connects to a cluster, or starts it.
        resumes: whether the run continues from a checkpoint in its directory.
        began_unix_s: start of the run's clock; None: now.
    """

    launcher: OwnProcesses | None = None
    stands: ConnectedCluster | None = None
    resumes: bool = False
    began_unix_s: float | None = None


def run_trial(
    experiment: Experiment,
    run: RunDirectory,
    observer: RunObserver | None = None,
    real: RealTrial | None = None,
) -> Summary:
    """Run one configuration to its end, and remove its generated data.

    Args:
        experiment: the configuration.
        run: its directory.
        observer: receives its progress.
        real: settings for real actors; None: simulated.

    Raises:
        GeoRayError: the error that ended the run early.
    """
    observer = observer or RunObserver()
    if real is None:
        summary = simulate(experiment, run, observer)
    else:
        summary = _train(experiment, run, observer, real)
    shutil.rmtree(run.data, ignore_errors=True)
    return summary


def _train(
    experiment: Experiment, run: RunDirectory, observer: RunObserver, real: RealTrial
) -> Summary:
    # Imported here: processes that only simulate do not import Ray.
    from geo_ray.runtime import main
    from geo_ray.runtime.run_client import RunRequest, train_watched
    from geo_ray.runtime.run_context import Reporting
    from geo_ray.runtime.run_order import Resumption

    began_unix_s = time.time() if real.began_unix_s is None else real.began_unix_s
    reporting = Reporting(observer, began_unix_s)
    resume = Resumption() if real.resumes else None
    if real.launcher is not None:
        return main.run(experiment, run, reporting, real.launcher, resume=resume)
    return train_watched(RunRequest(experiment, run, resume), reporting, real.stands)


@dataclass(frozen=True, slots=True)
class TrialSpec:
    """A run to make.

    Attributes:
        label: group of runs that are compared with others.
        rate: factor of the learning rate.
        experiment: its configuration; `run.dir` is a directory of this trial only.
        base_dir: base of relative paths in the configuration.
        is_saved: whether the directory stays once the outcome is known.
    """

    label: str
    rate: float
    experiment: Experiment
    base_dir: Path
    is_saved: bool = True

    @property
    def values(self) -> dict[str, JSONValue]:
        """Values that identify the trial in a trials file."""
        return {
            "label": self.label,
            "rate": self.rate,
            "seed": self.experiment.seed,
            "config": digest(self.experiment),
        }

    def measure(self, real: RealTrial | None = None) -> Outcome:
        """Run the trial and measure it. Its directory is emptied first.

        Raises:
            GeoRayError: as for `run_trial`. Diverged training is an outcome.
        """
        directory = Path(self.experiment.run.dir)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        try:
            run = rundir.create(self.experiment, self.base_dir)
            summary = run_trial(self.experiment, run, real=real)
            outcome = outcome_of(self.label, self.rate, self.experiment, summary, run.path)
        except NonFiniteError as error:
            outcome = failed_outcome(self.label, self.rate, self.experiment, str(error))
        if not self.is_saved:
            shutil.rmtree(directory, ignore_errors=True)
        return outcome


class Point(StrictModel):
    """An evaluation of all regions."""

    t_s: float = Field(description="seconds since the start of the run; virtual if simulated")
    samples: int = Field(description="training samples of all regions until then")
    step: int | None = Field(None, description="step of the regions")
    wan_bytes: int = Field(description="bytes between regions until then, all classes")
    metrics: dict[str, float | None] = Field(description="the task's metrics")


class Outcome(StrictModel):
    """The measurements of one run."""

    label: str = Field(description="the variant")
    rate: float = Field(description="factor of the learning rate")
    lr: float | None = Field(None, description="that rate")
    seed: int = Field(description="seed of the run")
    digest: str = Field(description="digest of its configuration")
    seconds: float = Field(
        description="length of the run, virtual if simulated; 0 if it did not end"
    )
    time_to_target_s: float | None = Field(description="null: no target, or not reached")
    samples_to_target: int | None = Field(description="training samples to the target")
    rounds: int = Field(description="exchanges that were committed")
    wan_bytes: int = Field(description="bytes between regions, all classes")
    sent_bytes: dict[str, dict[str, float]] | None = Field(
        None, description="by source and destination, until the target or the end; null: unknown"
    )
    idle_fraction: float = Field(description="fraction of the regions' time without computation")
    usd: float | None = Field(description="cost until the target or the end; null without prices")
    eval: dict[str, float | None] = Field(description="metrics at the end")
    points: tuple[Point, ...] = Field(description="its evaluations")
    failed: str | None = Field(None, description="reason if it did not finish; null if it did")


def outcome_of(
    label: str, rate: float, experiment: Experiment, summary: Summary, run_dir: Path
) -> Outcome:
    """Measure a finished run by its events."""
    totals, evals = RunTotals(), list[tuple[Event, int]]()
    wan: list[tuple[float, float]] = []  # times, and bytes of all links until then
    samples = 0
    to_target = None
    target = experiment.train.target
    reached_s = summary.time_to_target_s
    sent = SentUntil(math.inf if reached_s is None else reached_s)
    for event in read_events(run_dir / EVENTS_FILE):
        totals.feed(event)
        sent.feed(event)
        if event.kind == "step":
            samples += event["samples"]
        elif event.kind == "wan":
            wan.append((event.t_s, sum(totals.wan.by_class().values())))
        elif event.kind == "eval" and event["region"] is None:
            evals.append((event, samples))
            if target is not None and to_target is None and target.reached(event):
                to_target = samples
    busy_s = sum(region.compute_s for region in totals.regions.values())
    idle_s = sum(region.wait_s for region in totals.regions.values())
    return Outcome(
        label=label,
        rate=rate,
        lr=learning_rate(experiment),
        seed=experiment.seed,
        digest=digest(experiment),
        seconds=summary.seconds,
        time_to_target_s=summary.time_to_target_s,
        samples_to_target=to_target,
        rounds=summary.rounds,
        wan_bytes=sum(summary.wan_bytes.values()),
        sent_bytes=_nested(sent.by_link()),
        idle_fraction=idle_s / (busy_s + idle_s) if busy_s + idle_s else 0.0,
        usd=None,
        eval=summary.eval,
        points=_points(evals, np.array(wan, dtype=np.float64).reshape(-1, 2)),
    )


def _points(evals: Sequence[tuple[Event, int]], wan_N2: Floats) -> tuple[Point, ...]:
    """Return evaluations with the samples and bytes at their time."""
    times_s = np.array([event.t_s for event, _ in evals], dtype=np.float64)
    by_then = bytes_at(wan_N2[:, 0], wan_N2[:, 1], times_s)
    return tuple(
        Point(
            t_s=event.t_s,
            samples=samples,
            step=event["step"],
            wan_bytes=round(float(wan_bytes)),
            metrics=dict(event["metrics"]),
        )
        for (event, samples), wan_bytes in zip(evals, by_then, strict=True)
    )


def _nested(by_link: Mapping[Link, float]) -> dict[str, dict[str, float]]:
    nested: dict[str, dict[str, float]] = {}
    for (src, dst), count in by_link.items():
        nested.setdefault(src, {})[dst] = count
    return nested


def failed_outcome(label: str, rate: float, experiment: Experiment, why: str) -> Outcome:
    """Return the outcome of a failed run, such as one with too large a learning rate."""
    return Outcome(
        label=label,
        rate=rate,
        lr=learning_rate(experiment),
        seed=experiment.seed,
        digest=digest(experiment),
        seconds=0.0,
        time_to_target_s=None,
        samples_to_target=None,
        rounds=0,
        wan_bytes=0,
        idle_fraction=0.0,
        usd=None,
        eval={},
        points=(),
        failed=why,
    )


def validated(tree: Mapping[str, Any], base_dir: Path) -> Experiment:
    """Return the configuration of a changed tree.

    Raises:
        ValidationError: of pydantic; the configuration is invalid.
    """
    return Experiment.model_validate_json(json.dumps(tree), context=context(base_dir))


def learning_rate(experiment: Experiment) -> float:
    """Return the learning rate that factors scale: that of the strategy."""
    _, holder, last = rate_of(experiment)
    return float(getattr(holder, last))


def rate_of(experiment: Experiment) -> tuple[str, Any, str]:
    """Return the key of the learning rate's section, the section, and the rate's name in it."""
    section, _, last = experiment.strategy.traits.region.rate_key.rpartition(".")
    holder: Any = experiment
    for name in section.split("."):
        holder = getattr(holder, name)
    return section, holder, last
