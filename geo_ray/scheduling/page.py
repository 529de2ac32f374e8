"""A page that shows what came of each policy."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Final

import numpy as np

from geo_ray.observe.report.charts import Curve, bars_chart, curves_chart
from geo_ray.observe.report.page import html_page, write_html
from geo_ray.observe.report.sections import section, table
from geo_ray.observe.text import duration_text, number_text
from geo_ray.scheduling.history.outcome import ScheduleOutcome, outcome_of, used_shares
from geo_ray.scheduling.model.schedule import ClusterSchedule

HEADINGS: Final = (
    "policy",
    "utility",
    "mean",
    "median",
    "p99",
    "makespan",
    "in use",
    "fairness",
    "ended",
    "turned away",
    "USD",
    "decision",
)
NOTE: Final = (
    "Completion times (mean, median, p99) are of the jobs that ended. Fairness is Jain's index of "
    "how fast jobs went beside having the cluster to themselves; a decision's time is the longest "
    "of one job."
)


def cells(name: str, outcome: ScheduleOutcome) -> list[str]:
    """Return a policy's numbers as text, in the order of `HEADINGS`."""
    times = outcome.completion
    return [
        name,
        number_text(outcome.utility),
        duration_text(times.mean_s),
        duration_text(times.median_s),
        duration_text(times.p99_s),
        duration_text(outcome.makespan_s),
        f"{outcome.utilisation:.0%}",
        f"{outcome.fairness:.2f}",
        str(outcome.ended),
        str(outcome.turned_away)
        + (f" ({outcome.no_schedule} without a schedule)" if outcome.no_schedule else ""),
        f"{outcome.usd:.2f}",
        f"{outcome.decision_s * 1e3:.1f} ms",
    ]


def write_schedule_page(
    title: str, schedules: Mapping[str, ClusterSchedule], bound: float | None, path: Path
) -> Path:
    """Write one self-contained HTML page.

    Args:
        title: what was replayed.
        schedules: by policy.
        bound: utility that none can exceed; None: not computed.
        path: file to write.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    outcomes = {name: outcome_of(each) for name, each in schedules.items()}
    rows = [[escape(text) for text in cells(name, each)] for name, each in outcomes.items()]
    utilities = {name: max(0.0, each.utility) for name, each in outcomes.items()}
    if bound is not None:
        utilities["upper bound"] = bound
    ended, shares = [], []
    for place, (name, each) in enumerate(schedules.items()):
        slot_s = each.cluster.slot_s
        took = sorted(
            ended_s - each.jobs[job].arrival_slot * slot_s
            for job, ended_s in each.finished_s.items()
        )
        part = np.arange(1, len(took) + 1) / max(1, len(each.jobs))
        ended.append(Curve(name, np.array(took, dtype=np.float64), part.astype(np.float64), place))
        used = used_shares(each)
        shares.append(Curve(name, np.arange(len(used), dtype=np.float64) * slot_s, used, place))
    charts = (
        bars_chart("Utility", utilities, number_text)
        + curves_chart(
            "Share of all jobs that ended within",
            ended,
            x_label="completion",
            x_time=True,
            zero=True,
        )
        + curves_chart("Share in use", shares, x_label="time", x_time=True, zero=True)
    )
    body = (
        f"<header><h1>{escape(title)}</h1></header>"
        + section("Policies", table(HEADINGS, rows), NOTE)
        + section("Charts", f'<div class="charts">{charts}</div>')
    )
    return write_html(html_page(title, body), path)
