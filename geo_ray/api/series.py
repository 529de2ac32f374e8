"""Events of a run as tables of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from geo_ray.api.display import Table
from geo_ray.base.errors import ConfigError
from geo_ray.telemetry.charts import bytes_at
from geo_ray.telemetry.columns import RunRecord
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.totals import LinkTotals

EVAL = "eval."
OF_STEPS = ("loss", "samples", "compute_s", "wait_s")
_COLUMNS = {"step": int, "time_s": float, "region": str, "value": float, "wan_bytes": int}


def metric_names(events: Iterable[Event]) -> tuple[str, ...]:
    """The names that `metric_table` takes for this run."""
    evals = {name for event in events if event.kind == "eval" for name in event["metrics"]}
    return (*OF_STEPS, *(f"{EVAL}{name}" for name in sorted(evals)))


def metric_table(events: Sequence[Event], name: str) -> Table:
    """One number of a run over its steps.

    Args:
        events: all of the run's, in order.
        name: a field of steps, such as ``loss``; ``eval.accuracy`` and the like for evaluations.
            ``eval.`` may be left out where no field of steps has the name.

    Returns:
        Columns step, time_s, region, value, wan_bytes: the last counts all bytes between regions
        until then, between two counts in proportion, as the report draws them; null in a run that
        counted none. The region is null in evaluations of all regions together. Steps that were
        done again after a resumption are there once.

    Raises:
        ConfigError: the run has no such number.
    """
    metric = name.removeprefix(EVAL)
    of_steps = name in OF_STEPS
    wan, counts = LinkTotals(), list[tuple[float, float]]()
    rows: dict[str | None, list[tuple[Any, ...]]] = {}
    for event in events:
        if event.kind == "run_started":
            wan.restart()
        elif event.kind == "wan":
            wan.feed(event["src"], event["dst"], event["bytes_by_class"])
            counts.append((event.t_s, sum(wan.by_class().values())))
        elif event.kind == ("step" if of_steps else "eval"):
            values = event.fields if of_steps else event["metrics"]
            if metric not in values:
                continue
            own = rows.setdefault(event["region"], [])
            while own and own[-1][0] >= event["step"]:
                own.pop()  # it was done again
            own.append((event["step"], event.t_s, event["region"], values[metric]))
    if not rows:
        names = ", ".join(metric_names(events))
        raise ConfigError(f"the run has no metric {name!r}", fix=f"There are {names}.")
    ordered = sorted((row for own in rows.values() for row in own), key=lambda row: row[1])
    counts_N2 = np.array(counts, dtype=np.float64).reshape(-1, 2)
    times_s = np.array([row[1] for row in ordered], dtype=np.float64)
    by_then = bytes_at(counts_N2[:, 0], counts_N2[:, 1], times_s)
    known = [round(float(count)) for count in by_then] if counts else [None] * len(ordered)
    ordered = [(*row, count) for row, count in zip(ordered, known, strict=True)]
    return Table([dict(zip(_COLUMNS, row, strict=True)) for row in ordered], _COLUMNS)


def regions_table(record: RunRecord) -> Table:
    """A row per region: what it did, and what it sent and received."""
    totals = record.totals
    rows = [
        {
            "region": name,
            "steps": region.steps.step,
            "samples": region.steps.samples,
            "loss": region.steps.end_loss(),
            "compute_s": region.compute_s,
            "wait_s": region.wait_s,
            "wan_out_bytes": totals.wan.out_bytes(name),
            "wan_in_bytes": totals.wan.in_bytes(name),
        }
        for name, region in totals.regions.items()
    ]
    return Table(rows)
