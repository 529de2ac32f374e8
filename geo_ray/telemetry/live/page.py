"""Content of the live page: its state, its poller, and its sections as HTML or terminal lines.

`PageState` holds the newest version of every section; there is no queue per client, and a slow
client skips versions. `PagePoller` polls a run or a queue and backs off while no client is
connected.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from typing import Final, Generic, Protocol, TypeVar

import numpy as np
from rich.text import Text

from geo_ray.base.errors import GeoRayError, InvariantError
from geo_ray.base.text import (
    age_text,
    bytes_text,
    coarse_text,
    duration_text,
    number_text,
    printable,
)
from geo_ray.telemetry.charts import ALL, Curve, curves_chart, smooth
from geo_ray.telemetry.html_page import empty_note, section, table
from geo_ray.telemetry.participation import MEMBERS_NOTE, members_figure
from geo_ray.telemetry.run_map import map_figure
from geo_ray.telemetry.sections import cost_section, machines_note, machines_section
from geo_ray.telemetry.status import RegionStatus, RunStatus, status_lines
from geo_ray.telemetry.throughput import memory_text, mfu_text
from geo_ray.telemetry.view import CurveView, MapLink, MembersView, RunView


@dataclass(frozen=True, slots=True)
class _Section:
    version: int
    html: str


class PageState:
    """Versioned sections of the page; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sections: dict[str, _Section] = {}
        self._version = 0
        self._since = lru_cache(maxsize=16)(self._made_since)

    @property
    def version(self) -> int:
        """Grows by one with every change."""
        return self._version

    def put(self, sections: Mapping[str, str]) -> bool:
        """Update these sections; others stay unchanged.

        Returns:
            Whether anything has changed.
        """
        with self._lock:
            changed = {
                name: html
                for name, html in sections.items()
                if name not in self._sections or self._sections[name].html != html
            }
            if changed:
                version = self._version + 1
                new = {name: _Section(version, html) for name, html in changed.items()}
                self._sections = {**self._sections, **new}
                self._version = version
            return bool(changed)

    def since(self, version: int) -> tuple[int, bytes]:
        """Give the newest version, and the sections that are newer than ``version`` as JSON.

        Clients with the same version share the same bytes.
        """
        with self._lock:
            return self._since(version, self._version)

    def _made_since(self, version: int, newest: int) -> tuple[int, bytes]:
        found = {name: each.html for name, each in self._sections.items() if each.version > version}
        return newest, json.dumps(found, separators=(",", ":")).encode()


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
"""Sections of the page in order; `page_sections` gives each of them."""

_CURVES: Final = 24  # maximum number of regions with separate curves


def page_sections(view: RunView) -> dict[str, str]:
    """Draw every section; HTML by name, with all data of the run escaped."""
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


def waiting_sections(run: str, reason: str, fix: str) -> dict[str, str]:
    """Draw the page of a run that does not exist yet.

    Args:
        run: the user's name of the run.
        reason: why there is no run.
        fix: remedy.
    """
    head = (
        f'<h1>{escape(run)} <span class="tag">waiting</span></h1>'
        f'<div class="ended going"><p class="cause">{escape(reason)}</p><p>{escape(fix)} '
        "This page shows the run as soon as it starts.</p></div>"
    )
    return {**dict.fromkeys(SECTIONS, ""), "head": head}


def reading_sections(run: str, fraction: float) -> dict[str, str]:
    """Draw the page of a run whose long log is still being read.

    Args:
        run: the user's name of the run.
        fraction: fraction of the log that was read, 0 to 1.
    """
    head = (
        f'<h1>{escape(run)} <span class="tag">reading</span></h1>'
        f'<div class="ended going"><p class="cause">Reading the log: {fraction:.0%}</p></div>'
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
    ended = ""
    if status.message is not None or status.fix is not None:
        code = f"{status.code}: " if status.code else ""
        cause = f'<p class="cause">{escape(code + status.message)}</p>' if status.message else ""
        fix = f"<p>{escape(status.fix)}</p>" if status.fix else ""
        ended = f'<div class="ended">{cause}{fix}</div>'
    for problem in view.problems:
        ended += f'<p class="warn">{escape(problem)}</p>'
    run_actor = status.run_actor
    who = (
        ""
        if run_actor is None
        else f"run actor: process {run_actor.pid} on {run_actor.host}: {run_actor.how}"
    )
    about = (", ".join(sub), who, status.run)
    return (
        f'<h1>{escape(_name(status.run))} <span class="tag{tag}">{escape(status.phase)}</span></h1>'
        f'<p class="sub">{"<br>".join(escape(text) for text in about if text)}</p>{ended}'
    )


def _name(run: str) -> str:
    """Return the last part of a directory or address."""
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
        if status.tokens_per_s is not None:
            facts.append(("tokens per second", number_text(round(status.tokens_per_s, 1))))
        if status.mfu is not None:
            facts.append(("MFU", mfu_text(status.mfu, estimated=status.mfu_is_estimated)))
    if status.spent.usd is not None:
        planned = "" if view.planned is None else f" of {view.planned.usd:.4g} planned"
        facts.append(("USD", f"{status.spent.usd:.4g}{planned}"))
    if status.checkpoint is not None:
        age = status.checkpoint.age_s
        at_step = f"at step {status.checkpoint.step:,}"
        facts.append(("saved", f"{coarse_text(age)} ago" if age is not None and going else at_step))
    if status.eval_step is not None:
        where = f"at step {status.eval_step:,}"
        facts += [(f"{name} {where}", number_text(each)) for name, each in status.eval.items()]
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
    if view.end_s <= 0 or not view.ranges:
        return ""
    drawn = members_figure(view.ranges, view.marks, view.end_s)
    return section("Members over time", drawn, MEMBERS_NOTE)


def _regions(regions: Sequence[RegionStatus]) -> str:
    if not regions:
        return ""
    has_tokens = any(each.tokens_per_s is not None for each in regions)
    has_mfu = any(each.mfu is not None for each in regions)
    has_memory = any(each.memory is not None for each in regions)
    has_ranks = any(each.ranks is not None for each in regions)
    rows = [
        [
            escape(each.name),
            escape(each.state if each.lost_cause is None else f"lost: {each.lost_cause}"),
            f"{each.step:,}" + ("" if each.steps is None else f" of {each.steps:,}"),
            f"{each.exchanges:,}",
            number_text(each.loss),
            number_text(round(each.samples_per_s, 1)),
            *([number_text(each.tokens_per_s and round(each.tokens_per_s, 1))] * has_tokens),
            *([mfu_text(each.mfu)] * has_mfu),
            *([memory_text(each.memory)] * has_memory),
            f"{each.workers_lost:,}",
            *(["-" if each.ranks is None else f"{each.ranks:,}", f"{each.restarts:,}"] * has_ranks),
        ]
        for each in regions
    ]
    headings = ["region", "state", "step", "exchanges", "loss", "samples/s"]
    headings += ["tokens/s"] * has_tokens + ["MFU"] * has_mfu + ["GPU memory"] * has_memory
    headings += ["workers lost"] + ["ranks", "restarts"] * has_ranks
    return section("Regions", table(headings, rows, left=2))


def _notes(notes: Sequence[tuple[float, str]]) -> str:
    if not notes:
        return section("Notable events", empty_note("no notable events"))
    rows = [[duration_text(t_s), escape(text)] for t_s, text in reversed(notes)]
    return section("What happened", table(["time", "what"], rows, left=2))


_SLICE_EVENTS: Final = 10_000
_AT_ONCE_S: Final = 0.01  # between two slices, so that requests are answered
_log = logging.getLogger(__name__)


V = TypeVar("V", covariant=True)
S = TypeVar("S")


class ViewReader(Protocol[V]):
    """Source of the page; `geo_ray.runs` has the readers of a run and of a queue."""

    @property
    def is_remote(self) -> bool:
        """Whether reading sends requests to a bucket."""

    def read(self, most_events: int) -> float:
        """Read more; return the fraction that was read. Raises while there is nothing."""

    def view(self) -> V:
        """Return the view to show."""


class PagePoller(Generic[S]):
    """A thread that polls a reader and updates the page, until `close`.

    Args:
        run: the user's name of the run.
        reader: source of the page.
        page_state: state to update.
        watchers: number of connected clients.
        on_change: called after a change of the page state.
        every_s: seconds between two polls.
        draw: converts a view to sections of the page.
    """

    def __init__(
        self,
        run: str,
        reader: ViewReader[S],
        page_state: PageState,
        watchers: Callable[[], int],
        on_change: Callable[[], None],
        every_s: float = 1.0,
        *,
        draw: Callable[[S], dict[str, str]],
    ) -> None:
        self._draw = draw
        self._run, self._reader, self._page_state = run, reader, page_state
        self._watchers, self._on_change = watchers, on_change
        self._every_s = every_s
        self._is_drawn = False
        self._wake, self._ends = threading.Event(), False
        self._thread = threading.Thread(target=self._go, name="looking", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Poll immediately, because a client has connected."""
        self._wake.set()

    def close(self) -> None:
        """Stop polling; idempotent."""
        self._ends = True
        self._wake.set()
        self._thread.join(timeout=60.0)

    def _go(self) -> None:
        while not self._ends:
            self._wake.clear()
            try:
                self._look()
            except GeoRayError as error:
                self._put(waiting_sections(self._run, f"{error.code}: {error.message}", error.fix))
            except Exception as error:  # polling continues after a failure
                _log.exception("polling %s failed", self._run)
                what = f"{InvariantError.code}: {type(error).__name__}: {error}"
                self._put(waiting_sections(self._run, what, InvariantError.advice))
            self._wake.wait(self._pause_s())

    def _pause_s(self) -> float:
        pause_s = self._every_s * (5 if self._reader.is_remote else 1)
        return pause_s if self._watchers() else 10 * pause_s

    def _look(self) -> None:
        while (fraction := self._reader.read(_SLICE_EVENTS)) < 1.0 and not self._ends:
            self._put(reading_sections(self._run, fraction))
            threading.Event().wait(_AT_ONCE_S)
        if self._watchers() or not self._is_drawn:  # so that the first client finds content
            self._is_drawn = True
            self._put(self._draw(self._reader.view()))

    def _put(self, sections: dict[str, str]) -> None:
        if self._page_state.put(sections):
            self._on_change()


_MOST: Final = 8  # links, machines and notes


def view_lines(view: RunView | GeoRayError) -> list[str]:
    """Give the lines of a view, or of the error while there is no run."""
    if isinstance(view, GeoRayError):
        return [printable(f"waiting: {view.code}: {' '.join(view.message.split())}")]
    lines = status_lines(view.status)
    lines += [f"  {text}" for text in view.problems]
    lines += _named("links", [_link(each) for each in view.map.links])
    if view.planned is not None and view.status.spent.usd is not None:
        spent, planned = view.status.spent.usd, view.planned.usd
        lines += _named("cost", [f"{spent:.4g} USD spent of {planned:.4g} planned"])
    machines = view.machines
    if machines is not None:
        rows = [
            f"{row.region}: {row.machine} {row.type}, {row.state}"
            + ("" if row.usd_per_hour is None else f", {number_text(row.usd_per_hour)} USD/h")
            + ("" if row.age_s is None else f", {age_text(row.age_s)}")
            for row in machines.rows
        ]
        lines += _named("machines", rows)
        lines.append(f"    {machines_note(machines)}")
    lines += _named(
        "newest", [f"{duration_text(t)} {text}" for t, text in view.history.notes][::-1]
    )
    return [printable(line) for line in lines]


def view_text(view: RunView | GeoRayError) -> Text:
    """Give the lines as one text."""
    return Text("\n".join(view_lines(view)))


def _link(link: MapLink) -> str:
    limit = "" if link.limit_mbps is None else f" of {number_text(link.limit_mbps)}"
    load = f"{number_text(round(link.mbps, 2))}{limit} Mb/s"
    return f"{link.src} to {link.dst}: {load}, {bytes_text(link.bytes)} so far"


def _named(name: str, rows: list[str]) -> list[str]:
    shown = rows[:_MOST] + ([f"and {len(rows) - _MOST} more"] if len(rows) > _MOST else [])
    return [f"  {name if not i else '':<9} {row}" for i, row in enumerate(shown)]
