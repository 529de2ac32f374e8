"""A run's events as columns, for charts; a million steps fit in memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from geo_ray.telemetry.events import FAULT_KINDS, MEMBER_KINDS, Event
from geo_ray.telemetry.totals import RunTotals

Floats = NDArray[np.float64]
STEP = ("step", "samples", "loss", "start_s", "compute_s", "wait_s")
EXCHANGE = ("start_s", "bytes_sent", "bytes_received", "blocking", "staleness")


INCIDENTS = ("stop_requested", "checkpoint_failed", "run_failed")


class Columns:
    """Rows of floats, stored by column.

    Args:
        names: of the columns.
    """

    def __init__(self, *names: str) -> None:
        self._columns = {name: array("d") for name in names}

    def add(self, *row: float) -> None:
        """Append a row, in the order of the names."""
        for column, value in zip(self._columns.values(), row, strict=True):
            column.append(value)

    def newest(self, name: str) -> float:
        """Give the value of one column in the row that was added last."""
        return self._columns[name][-1]

    def __getitem__(self, name: str) -> Floats:
        """Give one column, float64 (N,)."""
        return np.array(self._columns[name], dtype=np.float64)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))


def standing(step_N: Floats) -> NDArray[np.intp]:
    """Give the indices of the steps that were not repeated after a resume.

    Args:
        step_N: step numbers in the order in which they were done, float64 (N,).
    """
    lowest_after = np.minimum.accumulate(step_N[::-1])[::-1]
    stands = np.ones(len(step_N), dtype=bool)
    stands[:-1] = step_N[:-1] < lowest_after[1:]
    return np.flatnonzero(stands)


@dataclass(slots=True)
class RegionRecord:
    """Columns of one region: its steps (including repeated ones), and its exchanges."""

    steps: Columns = field(default_factory=partial(Columns, "t_s", *STEP))
    exchanges: Columns = field(default_factory=partial(Columns, "t_s", *EXCHANGE))

    def standing(self) -> NDArray[np.intp]:
        """Give the indices of the steps that were not repeated later, (N,)."""
        return standing(self.steps["step"])


@dataclass(slots=True)
class RunRecord:
    """All data of the report.

    Attributes:
        totals: totals, as used by `Summary`.
        regions: columns by region.
        evals: (region or None for all together, metric) -> columns t_s, step, value.
        wan: traffic class -> columns t_s, bytes (cumulative over all links).
        wan_total: columns t_s, bytes of all classes (cumulative).
        incidents: faults, resumes, requests to stop and failures, in order.
        checkpoints: the committed ones, in order.
        changes: membership events, in order.
    """

    totals: RunTotals = field(default_factory=RunTotals)
    regions: dict[str, RegionRecord] = field(default_factory=dict)
    evals: dict[tuple[str | None, str], Columns] = field(default_factory=dict)
    wan: dict[str, Columns] = field(default_factory=dict)
    wan_total: Columns = field(default_factory=partial(Columns, "t_s", "bytes"))
    incidents: list[Event] = field(default_factory=list)
    checkpoints: list[Event] = field(default_factory=list)
    changes: list[Event] = field(default_factory=list)

    def feed(self, event: Event) -> None:
        """Take the next event."""
        resumed = event.kind == "run_started" and self.totals.started is not None
        if resumed or event.kind in FAULT_KINDS or event.kind in INCIDENTS:
            self.incidents.append(event)
        if event.kind in MEMBER_KINDS:
            self.changes.append(event)
        match event.kind:
            case "run_started":
                for name in event["regions"]:
                    self._region(name)
            case "step":
                self._region(event["region"]).steps.add(event.t_s, *map(event.number, STEP))
            case "exchange":
                row = map(event.number, EXCHANGE)
                self._region(event["region"]).exchanges.add(event.t_s, *row)
            case "eval":
                for metric in event["metrics"]:
                    value = event["metrics"][metric]
                    columns = self.evals.setdefault(
                        (event["region"], metric), Columns("t_s", "step", "value")
                    )
                    number = float("nan") if value is None else value
                    columns.add(event.t_s, event["step"], number)
            case "checkpoint":
                self.checkpoints.append(event)
        self._feed_totals(event)

    def _feed_totals(self, event: Event) -> None:
        self.totals.feed(event)
        if event.kind != "wan":
            return
        by_class = self.totals.wan.by_class()
        self.wan_total.add(event.t_s, sum(by_class.values()))
        for name, count in by_class.items():
            columns = self.wan.get(name)
            if count != (0 if columns is None else columns.newest("bytes")):
                self.wan.setdefault(name, Columns("t_s", "bytes")).add(event.t_s, count)

    def _region(self, name: str) -> RegionRecord:
        return self.regions.setdefault(name, RegionRecord())


def record(events: Iterable[Event]) -> RunRecord:
    """Fold the events of a run, in order."""
    run = RunRecord()
    for event in events:
        run.feed(event)
    return run
