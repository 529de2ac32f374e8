"""The results of a run: summary, best model, and cost.

`summary.json` and the final table, the best evaluated model, and `cost.json`, which compares
estimated and actual cost.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field
from rich.box import SIMPLE_HEAD

from geo_ray.base.errors import RunDirectoryError
from geo_ray.base.files import save_text
from geo_ray.base.load import load_run_json
from geo_ray.base.model import StrictModel
from geo_ray.base.notebooks import ShownModel
from geo_ray.base.tables import FittedTable
from geo_ray.base.text import (
    bytes_text,
    codec_text,
    duration_text,
    metrics_text,
    number_text,
    saving_text,
)
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.totals import RegionTotals, RunTotals, newest_noise

REGION_HEADINGS: Final = (
    "region",
    "steps",
    "samples",
    "loss",
    "compute",
    "waiting",
    "WAN sent",
    "received",
)
"""Columns of the table of regions, in the terminal and in a notebook."""


class Best(StrictModel):
    """The best evaluated model of a run."""

    metric: str = Field(description="metric of the comparison")
    mode: Literal["min", "max"] = Field(description="whether lower or higher values are better")
    value: float = Field(description="value of the metric")
    step: int = Field(description="region steps of the model")
    region: str | None = Field(description="region of the held-out rows; null: all regions")
    samples: int = Field(description="held-out rows behind the metrics")
    metrics: dict[str, float | None] = Field(description="all metrics of its evaluation")

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Best:
        """Return the best model of a `best_kept` event, which may have more fields."""
        return cls(**{name: fields[name] for name in cls.model_fields})

    @property
    def text(self) -> str:
        """Short description."""
        where = "" if self.region is None else f" in {self.region}"
        return f"{self.metric} {number_text(self.value)} at step {self.step:,}{where}"


class KeepBest(StrictModel):
    """Metric by which the best evaluated model is saved."""

    metric: str = Field(description="name of the metric, as the task gives it")
    mode: Literal["min", "max"] = Field(description="max for accuracies, min for losses")

    def known(self, best: Best | None) -> Best | None:
        """Return the best model, if it was chosen by the same rule."""
        same = best is not None and (best.metric, best.mode) == (self.metric, self.mode)
        return best if same else None

    def is_better(self, value: float | None, best: Best | None) -> bool:
        """Return whether a value is better than the best one.

        A non-finite value never is, and of equal values the earlier one stays.

        Args:
            value: of the metric.
            best: the best model; another metric or mode does not count.
        """
        if value is None or not math.isfinite(value):
            return False
        known = self.known(best)
        return known is None or self.improves(value, known.value)

    def improves(self, value: float, best: float) -> bool:
        """Return whether a value is better than the best one."""
        return value > best if self.mode == "max" else value < best


COST_FILE: Final = "cost.json"
TOTAL: Final = "total"

Unit = Literal["s", "USD"]


class CostRow(StrictModel):
    """One term."""

    term: str = Field(description="name of the term; 'total' is the sum of a unit")
    unit: Unit = Field(description="seconds or US dollars")
    estimated: float = Field(description="value in the plan")
    actual: float | None = Field(description="value in the run; null: unknown")

    @property
    def error(self) -> float | None:
        """Relative difference of the actual value from the estimate; None if unknown."""
        if self.actual is None or self.estimated == 0:
            return None
        return self.actual / self.estimated - 1


class Cost(StrictModel):
    """The content of `cost.json`."""

    rows: tuple[CostRow, ...] = Field(min_length=1, description="terms, each unit's total last")
    notes: tuple[str, ...] = Field((), description="limitations of the numbers")

    def total(self, unit: Unit) -> CostRow | None:
        """Return the total of a unit, or None."""
        found = [row for row in self.rows if (row.term, row.unit) == (TOTAL, unit)]
        return found[0] if found else None


def save_cost(cost: Cost, run_dir: Path) -> Path:
    """Write `cost.json` atomically; return its path.

    Raises:
        RunDirectoryError: the file cannot be written.
    """
    return save_text(run_dir / COST_FILE, cost.model_dump_json(indent=2) + "\n")


def load_cost(run_dir: Path) -> Cost | None:
    """Read `cost.json` of a run; None if the run has none.

    Raises:
        RunDirectoryError: the file cannot be read or is of another kind.
    """
    return load_run_json(run_dir / COST_FILE, Cost)


def value_text(value: float | None, unit: Unit) -> str:
    """A value of a row for people: ``3:07``, ``0.1234 USD``, ``-`` if unknown."""
    if unit == "s":
        return duration_text(value)
    return "-" if value is None else f"{number_text(value)} USD"


def error_text(row: CostRow) -> str:
    """Return the relative difference of a row: ``+12%``, ``-`` if undefined."""
    return "-" if row.error is None else f"{row.error:+.0%}"


def cost_line(cost: Cost) -> str:
    """The totals in one line: ``estimated 3:07 and 1.2 USD, actual 3:20 (+7%) and ...``."""
    totals = [row for unit in ("s", "USD") if (row := cost.total(unit)) is not None]
    estimated = " and ".join(value_text(row.estimated, row.unit) for row in totals)
    actual = " and ".join(
        "USD unknown"
        if row.actual is None
        else f"{value_text(row.actual, row.unit)} ({error_text(row)})"
        for row in totals
    )
    return f"estimated {estimated}, actual {actual}"


SUMMARY_FILE = "summary.json"


class Target(StrictModel):
    """A target value of an evaluation metric."""

    metric: str = Field(description="name of the metric, as the task gives it")
    value: float = Field(description="the value to reach, in the metric's own unit")
    direction: Literal["at_least", "at_most"] = Field(
        description="at_least for accuracies, at_most for losses"
    )
    stop: bool = Field(
        True, description="end the run when it is reached; false: only record the time"
    )

    def reached(self, event: Event) -> bool:
        """Return whether this `eval` event of all regions reaches the value."""
        value = event["metrics"].get(self.metric)
        if event["region"] is not None or value is None:
            return False
        return bool(value >= self.value if self.direction == "at_least" else value <= self.value)


StopReason = Literal["target", "patience"]


class EarlyStop(StrictModel):
    """Why an evaluation ended a run before its last step."""

    reason: StopReason = Field(
        description="target: `train.target` was reached; patience: no improvement in "
        "`train.patience` evaluations"
    )
    cause: str = Field(description="the same with metric and values")


class Summary(ShownModel):
    """Results of a run; the content of `summary.json`."""

    strategy: str = Field(description="name of the synchronisation strategy")
    seed: int = Field(description="seed of the run")
    steps: int = Field(description="highest step that any region applied")
    samples: int = Field(description="training samples of all regions; repeated work counts once")
    seconds: float = Field(
        description="time of the newest event since the start (virtual in a simulation), with "
        "pauses and automatic restarts, without the time between the end of a run and `--resume`"
    )
    startup_s: float | None = Field(
        default=None, description="seconds from the command to the start of training"
    )
    time_to_target_s: float | None = Field(
        default=None,
        description="seconds until all regions together first reached the target; null if they did "
        "not, or without target",
    )
    early_stop: EarlyStop | None = Field(
        default=None, description="why an evaluation ended the run early; null if none did"
    )
    wan_bytes: dict[str, int] = Field(
        description="bytes between regions by class; repeated bytes count again"
    )
    codec: dict[str, str] = Field(
        default={},
        description="codecs by direction, up and down; directions without a codec are omitted",
    )
    payload_bytes: dict[str, int] | None = Field(
        default=None,
        description="payloads of all exchanges, also of the averager's region, `before` and "
        "`after` coding; null without codecs",
    )
    rounds: int = Field(description="number of distinct rounds")
    usd: float | None = Field(
        default=None,
        description="cost at the prices of the plan; null without a plan or if a price is missing",
    )
    eval: dict[str, float | None] = Field(
        description="newest metrics over all regions; null if not finite"
    )
    best: Best | None = Field(
        default=None,
        description="best evaluated model with `train.keep_best`: metric, value, step, region",
    )
    noise: dict[str, float | None] | None = Field(
        default=None,
        description="newest gradient noise: `grad_sq`, `trace`, and their quotient `b_simple` "
        "(null while noise hides the gradient); null if not measured",
    )
    digest: str | None = Field(default=None, description="digest of the final parameters")
    faults: dict[str, int] = Field(
        description="counts of `worker_lost`, `worker_replaced`, `step_refused`, "
        "`bridge_replaced`, `region_lost`, `state_changed`"
    )

    def view(self) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
        """See `ShownModel.view`."""
        line = f"{self.strategy}, seed {self.seed}: {self.steps:,} steps in "
        line += duration_text(self.seconds)
        if self.eval:
            line += f", {metrics_text(self.eval)}"
        rows = [(name, number_text(value)) for name, value in self.eval.items()]
        rows += [
            ("samples", f"{self.samples:,}"),
            ("rounds", f"{self.rounds:,}"),
            ("between regions", bytes_text(sum(self.wan_bytes.values()))),
        ]
        if self.time_to_target_s is not None:
            rows.append(("time to target", duration_text(self.time_to_target_s)))
        if self.early_stop is not None:
            rows.append(("ended early", self.early_stop.cause))
        if self.usd is not None:
            rows.append(("USD", number_text(self.usd)))
        rows += [(kind.replace("_", " "), f"{n:,}") for kind, n in self.faults.items() if n]
        return line, ("", "value"), rows


class Summing:
    """Folds events into a summary; also works for interrupted runs.

    Args:
        target: the evaluation metric to time, if any.
    """

    def __init__(self, target: Target | None = None) -> None:
        self._target = target
        self._totals = RunTotals()
        self._reached_s: float | None = None

    @property
    def totals(self) -> RunTotals:
        """The fold over the events so far."""
        return self._totals

    def feed(self, event: Event) -> None:
        """Process the next event, starting with `run_started`."""
        self._totals.feed(event)
        if self._target is None or self._reached_s is not None or event.kind != "eval":
            return
        if self._target.reached(event):
            self._reached_s = event.t_s

    def summary(
        self,
        *,
        startup_s: float | None = None,
        usd: float | None = None,
        digest: str | None = None,
    ) -> Summary:
        """Return the current summary.

        Args:
            startup_s: seconds from the command to the start of the run.
            usd: what the run cost.
            digest: digest of the final parameters.

        Raises:
            RunDirectoryError: there was no `run_started` among the events.
        """
        totals = self._totals
        if totals.started is None:
            raise RunDirectoryError(
                "the events have no run_started: no summary is possible",
                fix="Check the output of the command that started the run.",
            )
        return Summary(
            strategy=totals.started["strategy"],
            seed=totals.started["seed"],
            steps=totals.steps,
            samples=totals.samples,
            seconds=totals.elapsed_s,
            startup_s=startup_s,
            time_to_target_s=self._reached_s,
            early_stop=early_stop_of(totals),
            wan_bytes=totals.wan.by_class(),
            codec=totals.codec,
            payload_bytes=_payload_bytes(totals),
            rounds=len(totals.rounds),
            usd=usd,
            eval=dict(totals.newest_eval["metrics"]) if totals.newest_eval else {},
            best=None if totals.best is None else Best.of(totals.best.fields),
            noise=newest_noise(totals.noise),
            digest=digest,
            faults=totals.faults,
        )


def early_stop_of(totals: RunTotals) -> EarlyStop | None:
    """Return why an evaluation ended the run early, or None."""
    if totals.stop_cause is None or totals.stop_reason is None:
        return None
    return EarlyStop(reason=totals.stop_reason, cause=totals.stop_cause)


def summarise(
    events: Iterable[Event],
    *,
    target: Target | None = None,
    startup_s: float | None = None,
    usd: float | None = None,
    digest: str | None = None,
) -> Summary:
    """Return the summary of complete events; see `Summing`."""
    summing = Summing(target)
    for event in events:
        summing.feed(event)
    return summing.summary(startup_s=startup_s, usd=usd, digest=digest)


def _payload_bytes(totals: RunTotals) -> dict[str, int] | None:
    if not totals.codec:
        return None
    return {"before": totals.payload_before, "after": totals.payload_after}


def save_summary(summary: Summary, run_dir: Path) -> Path:
    """Write `summary.json` atomically; return its path.

    Raises:
        RunDirectoryError: the file cannot be written.
    """
    return save_text(run_dir / SUMMARY_FILE, json.dumps(summary.model_dump(), indent=2) + "\n")


def load_summary(run_dir: Path) -> Summary | None:
    """Read `summary.json` of a run; None if the run has none.

    Raises:
        RunDirectoryError: the file cannot be read or is not a summary.
    """
    return load_run_json(run_dir / SUMMARY_FILE, Summary)


def final_table(summary: Summary, totals: RunTotals) -> FittedTable:
    """Create the final table of a run: a row per region, then one for the whole run.

    Args:
        summary: summary of the run.
        totals: totals over the same events.
    """
    title = f"{summary.strategy}, seed {summary.seed}, {duration_text(summary.seconds)}"
    table = FittedTable(
        title=title,
        title_justify="left",
        caption=_caption(summary),
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for heading in REGION_HEADINGS:
        table.add_column(
            heading, justify="left" if heading == "region" else "right", overflow="fold"
        )
    for name, region in totals.regions.items():
        sent, received = totals.wan.bytes_sent(name), totals.wan.bytes_received(name)
        table.add_row(name, *_cells(region, sent, received))
    wan_bytes = bytes_text(sum(summary.wan_bytes.values()))
    table.add_section()
    table.add_row("all", f"{summary.steps:,}", f"{summary.samples:,}", "", "", "", wan_bytes, "")
    return table


def _cells(region: RegionTotals, sent_bytes: int, received_bytes: int) -> list[str]:
    loss = region.steps.end_loss()
    return [
        f"{region.steps.step:,}",
        f"{region.steps.samples:,}",
        number_text(loss) if math.isfinite(loss) else "-",
        duration_text(region.compute_s),
        duration_text(region.wait_s),
        bytes_text(sent_bytes),
        bytes_text(received_bytes),
    ]


def _caption(summary: Summary) -> str:
    parts = [f"{summary.rounds:,} rounds"]
    if summary.eval:
        parts.insert(0, metrics_text(summary.eval))
    if summary.time_to_target_s is not None:
        parts.append(f"target reached after {duration_text(summary.time_to_target_s)}")
    if summary.early_stop is not None and summary.early_stop.reason == "patience":
        parts.append(f"ended early: {summary.early_stop.cause}")
    if summary.usd is not None:
        parts.append(f"{summary.usd:.2f} USD")
    if summary.payload_bytes is not None:
        parts.append(f"codec {codec_text(summary.codec)}: {saving_text(summary.payload_bytes)}")
    parts += [
        f"{count} {kind.replace('_', ' ')}" for kind, count in summary.faults.items() if count
    ]
    return "; ".join(parts)
