"""What one run of a comparison came to: a file, so that a long comparison can be resumed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from pydantic import Field, ValidationError

from geo_ray.comparison.variants import learning_rate
from geo_ray.config.base import StrictModel
from geo_ray.config.experiment import Experiment
from geo_ray.config.load import digest
from geo_ray.observe.events.log import EVENTS_FILE, read_events
from geo_ray.observe.events.schema import Event
from geo_ray.observe.events.sent import SentUntil
from geo_ray.observe.metrics.counters import Link
from geo_ray.observe.metrics.summary import Summary
from geo_ray.observe.metrics.totals import RunTotals
from geo_ray.observe.report.series import Floats, bytes_at
from geo_ray.util.atomic_file import save_text, unwritable

OUTCOME_FILE = "outcome.json"


class Point(StrictModel):
    """An evaluation of all regions together."""

    t_s: float = Field(description="seconds since the start of the run; virtual if simulated")
    samples: int = Field(description="training samples of all regions until then")
    step: int | None = Field(None, description="of the regions; null in files of older releases")
    wan_bytes: int = Field(description="bytes between regions until then, all classes")
    metrics: dict[str, float | None] = Field(description="the task's metrics")


class Outcome(StrictModel):
    """One run."""

    label: str = Field(description="the variant")
    rate: float = Field(description="factor on the learning rate")
    lr: float | None = Field(None, description="that rate; null in files of older releases")
    seed: int = Field(description="of the run")
    digest: str = Field(description="of its configuration")
    seconds: float = Field(
        description="length of the run, virtual if simulated; 0 if it did not end"
    )
    time_to_target_s: float | None = Field(description="null: no target, or not reached")
    samples_to_target: int | None = Field(description="the same in training samples")
    rounds: int = Field(description="exchanges that were committed")
    wan_bytes: int = Field(description="between regions, all classes")
    sent_bytes: dict[str, dict[str, float]] | None = Field(
        None, description="by source and destination, until the target or the end; null: not known"
    )
    idle_share: float = Field(description="of the regions' time in which nobody computed")
    usd: float | None = Field(description="until the target or the end; null without prices")
    eval: dict[str, float | None] = Field(description="metrics at the end")
    points: tuple[Point, ...] = Field(description="its evaluations")
    failed: str | None = Field(None, description="why it did not end; null if it did")


def outcome_of(
    label: str, rate: float, experiment: Experiment, summary: Summary, run_dir: Path
) -> Outcome:
    """Read a finished run's events."""
    totals, evals = RunTotals(), list[tuple[Event, int]]()
    wan: list[tuple[float, float]] = []  # when, bytes of all links by then
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
        idle_share=idle_s / (busy_s + idle_s) if busy_s + idle_s else 0.0,
        usd=None,
        eval=summary.eval,
        points=_points(evals, np.array(wan, dtype=np.float64).reshape(-1, 2)),
    )


def _points(evals: Sequence[tuple[Event, int]], wan_N2: Floats) -> tuple[Point, ...]:
    """Evaluations with the samples and the bytes by their time."""
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
    """A run that ended in an error: a result too, for a learning rate that is too large, say."""
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
        idle_share=0.0,
        usd=None,
        eval={},
        points=(),
        failed=why,
    )


def save_outcome(outcome: Outcome, directory: Path) -> None:
    """Write it whole or not at all.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(directory, error) from error
    save_text(directory / OUTCOME_FILE, outcome.model_dump_json() + "\n")


def load_outcome(directory: Path, experiment: Experiment) -> Outcome | None:
    """What `save_outcome` left of the very same configuration; None if there is none."""
    try:
        outcome = Outcome.model_validate_json((directory / OUTCOME_FILE).read_bytes())
    except (OSError, ValidationError):
        return None
    return outcome if outcome.digest == digest(experiment) else None
