"""Variants of a comparison, and the outcome file of each run, from which a comparison resumes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, ValidationError

from geo_ray.base.errors import ConfigError
from geo_ray.base.files import save_text, unwritable
from geo_ray.base.load import digest, load_tree
from geo_ray.base.model import StrictModel
from geo_ray.base.overrides import OptionText, typed
from geo_ray.base.text import nearest_word
from geo_ray.base.yaml import ConfigSource
from geo_ray.codecs.registry import CODECS, sections_of
from geo_ray.experiment.experiment import Experiment
from geo_ray.strategies.registry import STRATEGIES, default_section
from geo_ray.telemetry.charts import Floats, bytes_at
from geo_ray.telemetry.event_log import EVENTS_FILE, read_events
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.summary import Summary
from geo_ray.telemetry.totals import Link, RunTotals, SentUntil


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to do it.

    Attributes:
        label: as the user wrote it; its name in tables.
        overrides: what it changes in the workload's configuration, as for ``--set``.
    """

    label: str
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One run to be made.

    Attributes:
        variant: of what.
        rate: factor on the learning rate.
        seed: of the run.
    """

    variant: Variant
    rate: float
    seed: int


@dataclass(frozen=True, slots=True)
class CaseDirectory:
    """Names of the directories of a comparison's runs, no two of them the same.

    Attributes:
        variants: all of the comparison.
        rates: all factors on learning rates that it may take.
    """

    variants: tuple[Variant, ...]
    rates: tuple[float, ...]

    def of(self, case: Case) -> str:
        """The name of one case; with a digest or all digits only where another has the same."""
        name, rate = _safe(case.variant.label), f"{case.rate:g}"
        if sum(_safe(other.label).lower() == name.lower() for other in self.variants) > 1:
            whole = "\n".join((case.variant.label, *case.variant.overrides))
            name = f"{name}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
        if sum(f"{other:g}" == rate for other in self.rates) > 1:
            rate = repr(case.rate)
        return f"{name}_x{rate}_s{case.seed}"


def _safe(label: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in label).strip("-")


def parse_variant(text: str, base_dir: Path = Path()) -> Variant:
    """Read ``KIND:KEY=VALUE:...``, or ``FILE.py:CLASS:KEY=VALUE:...`` for a strategy of the user's.

    Args:
        text: as the user wrote it.
        base_dir: where a relative path starts.

    Raises:
        ConfigError: there is no such strategy, or a part is no ``KEY=VALUE``.
    """
    kind, *parts = text.strip().split(":")
    section = {"kind": kind}
    if kind not in STRATEGIES:
        if "=" in kind:
            raise ConfigError(
                f"{typed('strategies', text)}: '{kind}' is no strategy; its options follow a "
                "strategy after a colon, and a comma begins the next strategy",
                fix=f"Write for example sma:{text.strip()}.",
            )
        if not parts or "=" in parts[0]:
            near = nearest_word(kind, STRATEGIES)
            hint = f"; did you mean {near}?" if near else ""
            raise ConfigError(
                f"{typed('strategies', text)}: there is no strategy '{kind}'{hint}",
                fix=f"Choose among {', '.join(STRATEGIES)}; or name your own, FILE.py:CLASS.",
            )
        section = {"use": f"{kind}:{parts.pop(0)}"}
    overrides = [f"strategy={json.dumps(section)}", *_default_kinds(section, parts, base_dir)]
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"{typed('strategies', text)}: '{part}' is not of the form key=value",
                fix="Write for example diloco:interval=16:codec=int4.",
            )
        overrides += _overrides(key.strip(), value.strip())
    option = "strategies", text.strip()
    return Variant(text.strip(), tuple(OptionText(each, option) for each in overrides))


def _default_kinds(section: Mapping[str, str], parts: Sequence[str], base_dir: Path) -> list[str]:
    """Sections of the strategy of which single keys are given are still of their default kind."""
    defaults = default_section(section, base_dir)
    names = [part.split(".")[0] for part in parts if "." in part.partition("=")[0]]
    kinds = {name: inner["kind"] for name in names if "kind" in (inner := defaults.get(name, {}))}
    return [f"strategy.{name}={{kind: {kind}}}" for name, kind in kinds.items()]


def _overrides(key: str, value: str) -> list[str]:
    if key in ("codec", "up", "down"):
        ways: tuple[str, ...] = ("up", "down") if key == "codec" else (key,)
        if key == "codec" and value in CODECS:
            ways = tuple(sections_of(value))
        return [f"codec.{way}={{kind: {value}}}" for way in ways]
    own = key.split(".")[0] not in Experiment.model_fields
    return [f"strategy.{key}={value}" if own else f"{key}={value}"]


def experiment_of(case: Case, config: ConfigSource, common: Sequence[str], out: Path) -> Experiment:
    """The configuration of one run.

    Args:
        case: which.
        config: the workload.
        common: what the user changes in all of them, as for ``--set``.
        out: directory that holds the runs.

    Raises:
        ConfigError: it cannot be.
    """
    overrides = [
        *common,
        *case.variant.overrides,
        f"seed={case.seed}",
        "name=run",
        f'run.dir="{out}"',
        "checkpoint.every_s=null",
    ]
    experiment = load_tree(config, overrides, Experiment)
    if case.rate == 1.0:
        return experiment
    section, holder, last = _rate_of(experiment)
    # The whole section, since what is a default is not in the file.
    changed = holder.model_copy(update={last: getattr(holder, last) * case.rate})
    scaled = f"{section}={changed.model_dump_json()}"
    rate = OptionText(scaled, ("rates", f"{case.rate:g}"))
    return load_tree(config, [*overrides, rate], Experiment)


def learning_rate(experiment: Experiment) -> float:
    """The learning rate that factors scale: the one that the strategy trains with."""
    _, holder, last = _rate_of(experiment)
    return float(getattr(holder, last))


def _rate_of(experiment: Experiment) -> tuple[str, Any, str]:
    """The key of the learning rate's section, that section, and the name of the rate in it."""
    section, _, last = experiment.strategy.traits.region.rate_key.rpartition(".")
    holder: Any = experiment
    for name in section.split("."):
        holder = getattr(holder, name)
    return section, holder, last


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
