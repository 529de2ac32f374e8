"""The live page's sections as HTML, from the values of a run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

import numpy as np

from geo_ray.observe.picture.machines_section import machines_section
from geo_ray.observe.picture.map_section import map_figure
from geo_ray.observe.picture.view import CurveView, MembersView, RunView
from geo_ray.observe.report.charts import ALL, Curve, curves_chart
from geo_ray.observe.report.cost_section import cost_section
from geo_ray.observe.report.members_section import MEMBERS_NOTE, members_figure
from geo_ray.observe.report.sections import none, section, table
from geo_ray.observe.report.series import smooth
from geo_ray.observe.status.record import RegionStatus, RunStatus
from geo_ray.observe.text import (
    bytes_text,
    coarse_text,
    duration_text,
    metrics_text,
    number_text,
)

SECTIONS: Final = (
    "head",
    "facts",
    "map",
    "curves",
    "money",
    "members",
    "regions",
    "machines",
    "notes",
)
"""What the page consists of, from above; each is one of the answers of `page_sections`."""

_CURVES: Final = 24  # most regions with a curve of their own


def page_sections(view: RunView) -> dict[str, str]:
    """Draw every section; HTML by name, in which all that comes from a run is escaped."""
    status, history = view.status, view.history
    return {
        "head": _head(view),
        "facts": _facts(view),
        "map": section("Regions and links", map_figure(view.map, now=bool(status.is_going))),
        "curves": _curves(view),
        "money": _money(view),
        "members": _members(history.members),
        "regions": _regions(status.regions),
        "machines": machines_section(view.machines),
        "notes": _notes(history.notes),
    }


def waiting_sections(run: str, told: str, fix: str) -> dict[str, str]:
    """Draw the page of a run of which there is nothing yet.

    Args:
        run: what the user called it.
        told: why there is nothing.
        fix: what to do about it.
    """
    head = (
        f'<h1>{escape(run)} <span class="tag">awaited</span></h1>'
        f'<div class="ended going"><p class="cause">{escape(told)}</p><p>{escape(fix)} '
        "This page shows the run as soon as it is there.</p></div>"
    )
    return {**dict.fromkeys(SECTIONS, ""), "head": head}


def reading_sections(run: str, share: float) -> dict[str, str]:
    """Draw the page of a run whose log is long and not read to its end yet.

    Args:
        run: what the user called it.
        share: of the log that was read, 0 to 1.
    """
    head = (
        f'<h1>{escape(run)} <span class="tag">reading</span></h1>'
        f'<div class="ended going"><p class="cause">Reading the log: {share:.0%}</p></div>'
    )
    return {"head": head}


def _head(view: RunView) -> str:
    status = view.status
    tag = {True: "", False: " done" if status.code is None else " cut"}.get(
        bool(status.is_going), ""
    )
    sub = [part for part in (status.strategy, _averager(status)) if part]
    if status.is_going and status.left_s is not None:
        sub.append(f"about {coarse_text(status.left_s)} left")
    box = ""
    if status.message is not None or status.fix is not None:
        code = f"{status.code}: " if status.code else ""
        cause = f'<p class="cause">{escape(code + status.message)}</p>' if status.message else ""
        fix = f"<p>{escape(status.fix)}</p>" if status.fix else ""
        box = f'<div class="ended">{cause}{fix}</div>'
    for problem in view.problems:
        box += f'<p class="warn">{escape(problem)}</p>'
    driver = status.driver
    who = "" if driver is None else f"driven by process {driver.pid} on {driver.host}: {driver.how}"
    about = (", ".join(sub), who, status.run)
    return (
        f'<h1>{escape(_name(status.run))} <span class="tag{tag}">{escape(status.phase)}</span></h1>'
        f'<p class="sub">{"<br>".join(escape(text) for text in about if text)}</p>{box}'
    )


def _name(run: str) -> str:
    """The last part of a directory or address."""
    return run.partition("?")[0].rstrip("/").rpartition("/")[2] or run


def _averager(status: RunStatus) -> str:
    return f"averager in {status.averager}" if status.averager and len(status.regions) > 1 else ""


def _facts(view: RunView) -> str:
    status = view.status
    facts = [
        ("time", duration_text(status.spent.seconds)),
        ("round", "-" if status.round is None else f"{status.round:,}"),
        ("loss", number_text(status.loss)),
        ("between regions", bytes_text(status.spent.wan_bytes)),
    ]
    going = status.is_going is not False
    if going:
        facts.append(("samples per second", number_text(round(status.samples_per_s, 1))))
    if status.spent.usd is not None:
        planned = "" if view.planned is None else f" of {view.planned.usd:.4g} planned"
        facts.append(("USD", f"{status.spent.usd:.4g}{planned}"))
    if status.checkpoint is not None:
        age = status.checkpoint.age_s
        at_step = f"at step {status.checkpoint.step:,}"
        facts.append(("saved", f"{coarse_text(age)} ago" if age is not None and going else at_step))
    if status.eval_step is not None:
        facts.append((f"at step {status.eval_step:,}", metrics_text(status.eval)))
    items = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in facts
    )
    return f'<dl class="facts">{items}</dl>'


def _curves(view: RunView) -> str:
    history = view.history
    parts = history.losses[1:] if 1 < len(history.losses) - 1 <= _CURVES else ()
    curves = [_curve(each, number, faint=False) for number, each in enumerate(parts)]
    if history.losses:
        curves.append(_curve(history.losses[0], ALL, faint=False))
    charts = curves_chart("loss", curves, x_label="time", x_time=True, log=True)
    for each in history.evals:
        charts += curves_chart(each.label, [_curve(each, ALL)], x_label="time", x_time=True)
    charts += curves_chart(
        "seconds of an exchange",
        [_curve(history.exchanges, 2)],
        x_label="time",
        x_time=True,
        zero=True,
    )
    return section("Training and rounds", f'<div class="charts">{charts}</div>')


def _curve(view: CurveView, series: int, *, faint: bool = False) -> Curve:
    after = np.searchsorted(view.t_s, view.breaks_s).tolist()
    bold = smooth(view.value, breaks=after)
    return Curve(view.label, view.t_s, bold, series, faint, view.breaks_s)


def _money(view: RunView) -> str:
    usd, planned = view.history.usd, view.planned
    chart = ""
    if usd is not None and len(usd.t_s):
        curves = [Curve("spent", usd.t_s, usd.value, ALL)]
        if planned is not None:
            line_s = np.array([0.0, planned.seconds])
            curves.insert(0, Curve("planned", line_s, np.array([0.0, planned.usd]), 0))
        chart = section(
            "USD against plan", curves_chart("USD", curves, x_label="time", x_time=True, zero=True)
        )
    return chart + cost_section(view.cost)


def _members(view: MembersView) -> str:
    if view.end_s <= 0 or not view.bands:
        return ""
    drawn = members_figure(view.bands, view.marks, view.end_s)
    return section("Members over time", drawn, MEMBERS_NOTE)


def _regions(regions: Sequence[RegionStatus]) -> str:
    if not regions:
        return ""
    rows = [
        [
            escape(each.name),
            escape(each.state if each.lost_cause is None else f"lost: {each.lost_cause}"),
            f"{each.step:,}" + ("" if each.steps is None else f" of {each.steps:,}"),
            f"{each.exchanges:,}",
            number_text(each.loss),
            number_text(round(each.samples_per_s, 1)),
            f"{each.workers_lost:,}",
        ]
        for each in regions
    ]
    headings = ["region", "state", "step", "exchanges", "loss", "samples/s", "workers lost"]
    return section("Regions", table(headings, rows, left=2))


def _notes(notes: Sequence[tuple[float, str]]) -> str:
    if not notes:
        return section("What happened", none("nothing that one must know"))
    rows = [[duration_text(t_s), escape(text)] for t_s, text in reversed(notes)]
    return section("What happened", table(["time", "what"], rows, left=2))
