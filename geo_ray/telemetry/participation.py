"""Participation and activity of regions in a run: two timelines, and their charts.

The first shows when each region and worker was a member, lost, gone or paused. The second shows
when each region computed, waited and transferred: lanes of a Gantt chart as inline SVG.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Final

import numpy as np
from numpy.typing import NDArray

from geo_ray.base.text import duration_text
from geo_ray.telemetry.charts import (
    STRETCHED_WIDTH,
    Axis,
    coverage,
    figure,
    frame,
    marks,
    stretched,
    time_axis,
)
from geo_ray.telemetry.columns import RegionRecord, RunRecord
from geo_ray.telemetry.events import MEMBER_KINDS, Event
from geo_ray.telemetry.html_page import section

RUN: Final = "run"
"""Key of the whole run; present only if the run was paused."""

_STATE_AFTER: Final = {
    "region_lost": "lost",
    "region_drained": "left",
    "region_joined": "member",
    "worker_lost": "lost",
    "worker_left": "left",
    "worker_replaced": "member",
}


@dataclass(frozen=True, slots=True)
class TimeRange:
    """A time range in which a region or worker had one state.

    Attributes:
        state: ``member``, ``lost``, ``left`` or ``paused``.
        start_s: start of the range.
        end_s: end of the range.
    """

    state: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class Participation:
    """Folds events, in order.

    Attributes:
        ranges: time ranges of each known region and worker, in order of appearance; workers are
            named ``region/worker``.
        marks: events at a moment: seconds, and a description.
    """

    ranges: dict[str, list[TimeRange]] = field(default_factory=dict)
    marks: list[tuple[float, str]] = field(default_factory=list)
    _now: dict[str, tuple[str, float]] = field(default_factory=dict)
    _began_s: float = 0.0

    def feed(self, event: Event) -> None:
        """Process the next event; one of `MEMBER_KINDS`."""
        kind, t_s = event.kind, event.t_s
        if kind == "run_started":
            self._began_s = t_s
            self._end(t_s, but=event["regions"])  # a killed run actor has written no end
            for name in event["regions"]:
                self._enter(name, "member", t_s)
        elif kind in ("run_finished", "run_failed"):
            self._end(t_s)
        elif kind == "run_paused":
            self._enter(RUN, "paused", t_s)
        elif kind == "run_resumed":
            self._leave(RUN, t_s)
        elif kind == "averager_moved":
            self.marks.append((t_s, f"the averager moves to {event['region']}"))
        elif kind == "server_replaced":
            self.marks.append((t_s, f"the standby serves the run at {event['address']}"))
        elif kind == "bridge_replaced":
            self.marks.append((t_s, f"another bridge in {event['region']}: {event['cause']}"))
        elif kind == "run_actor_attached":
            self.marks.append((t_s, f"run actor restarted after {event['downtime_s']:.1f} s"))
        elif kind == "join_failed":
            self.marks.append((t_s, f"{event['region']} does not join: {event['cause']}"))
        else:
            self._changed(event)

    def until(self, end_s: float) -> dict[str, list[TimeRange]]:
        """Return all ranges; open ranges end at ``end_s``."""
        found = {name: list(ranges) for name, ranges in self.ranges.items()}
        for name, (state, start_s) in self._now.items():
            if end_s > start_s:
                found.setdefault(name, []).append(TimeRange(state, start_s, end_s))
        return found

    def _changed(self, event: Event) -> None:
        region = event["region"]
        if event.kind.startswith("region"):
            self._enter(region, _STATE_AFTER[event.kind], event.t_s)
            return
        name = f"{region}/{event['worker']}"
        if name not in self._now and name not in self.ranges:
            self._now[name] = ("member", self._began_s)  # its first event
            self.ranges[name] = []
        self._enter(name, _STATE_AFTER[event.kind], event.t_s)

    def _enter(self, name: str, state: str, t_s: float) -> None:
        if self._now.get(name, ("", 0.0))[0] == state:
            return
        self._leave(name, t_s)
        self._now[name] = (state, t_s)

    def _leave(self, name: str, t_s: float) -> None:
        state, start_s = self._now.pop(name, ("", t_s))
        ranges = self.ranges.setdefault(name, [])
        if t_s > start_s:
            ranges.append(TimeRange(state, start_s, t_s))

    def _end(self, t_s: float, but: Collection[str] = ()) -> None:
        """End all ranges except those of members in ``but``, and of their member workers."""
        for name, (state, _) in list(self._now.items()):
            if state != "member" or name.partition("/")[0] not in but:
                self._leave(name, t_s)


def absences(ranges: Iterable[TimeRange]) -> tuple[tuple[float, float], ...]:
    """Return when a region was lost or had left: the start and the end of each time in seconds."""
    return tuple(
        (time_range.start_s, time_range.end_s)
        for time_range in ranges
        if time_range.state in ("lost", "left")
    )


def participation_of(events: Iterable[Event]) -> Participation:
    """Fold the events of a run, in order; other kinds are ignored."""
    found = Participation()
    for event in events:
        if event.kind in MEMBER_KINDS:
            found.feed(event)
    return found


_STATE_ORDER: Final = ("member", "lost", "left", "paused")
_LEAST_PX: Final = 560
_ROOMY, _TIGHT = (24, 16), (12, 8)  # pixels of a lane, and of its bar
_ROOMY_LANES: Final = 24
_MOST_LANES: Final = 200
MEMBERS_NOTE: Final = (
    "Regions, and workers that joined, left or were lost. A dashed line: the averager moved, a "
    "bridge was replaced, or a region did not join."
)


def members_section(run: RunRecord) -> str:
    """Return the section; empty if the members never changed."""
    found = participation_of(run.changes)
    end_s = run.totals.elapsed_s
    ranges = found.until(end_s)
    changed = any(time_range.state != "member" for each in ranges.values() for time_range in each)
    joined = any(each and each[0].start_s > _first_s(ranges) for each in ranges.values())
    if not (changed or joined or found.marks) or end_s <= 0:
        return ""
    return section("Members", members_figure(ranges, found.marks, end_s), MEMBERS_NOTE)


def members_figure(
    ranges: Mapping[str, list[TimeRange]], at: Sequence[tuple[float, str]], end_s: float
) -> str:
    """Draw time ranges.

    Args:
        ranges: time ranges of the run, its regions and workers, by name.
        at: events at a moment: seconds, and a description.
        end_s: end of the time axis; above 0.
    """
    lanes = _in_order(ranges)
    return _drawn(lanes[:_MOST_LANES], len(lanes), end_s, at)


def _first_s(ranges: Mapping[str, Sequence[TimeRange]]) -> float:
    return min((each[0].start_s for each in ranges.values() if each), default=0.0)


def _turn(name: str) -> tuple[bool, list[str]]:
    return name != RUN, name.split("/")


def _in_order(ranges: Mapping[str, list[TimeRange]]) -> list[tuple[str, list[TimeRange]]]:
    """Return the run, then each region followed by its workers."""
    names = sorted(ranges, key=_turn)
    return [(name, ranges[name]) for name in names]


def _drawn(
    lanes: Sequence[tuple[str, list[TimeRange]]],
    count: int,
    end_s: float,
    at: Sequence[tuple[float, str]],
) -> str:
    axis, unit = time_axis(0.0, end_s, 10)
    lane, height = _ROOMY if len(lanes) <= _ROOMY_LANES else _TIGHT
    names = [(i * lane + 4 + height / 2, _name(name)) for i, (name, _) in enumerate(lanes)]
    body = "".join(
        _time_range(time_range, i * lane + 4, height, axis)
        for i, (_, ranges) in enumerate(lanes)
        for time_range in ranges
    )
    total = lane * len(lanes) + 4
    shown = [
        s
        for s in _STATE_ORDER
        if any(time_range.state == s for _, ranges in lanes for time_range in ranges)
    ]
    legend = "".join(
        f'<li><svg width="14" height="12"><rect class="m-{state}" width="14" height="12"/></svg>'
        f"{state}</li>"
        for state in shown
    )
    drawing = frame(
        "members over time",
        total,
        stretched(body, total, cut=False) + marks(axis, total, at),
        x_axis=axis,
        x_label=f"time ({unit})",
        y_texts=names,
        least_px=_LEAST_PX,
        upright=True,
    )
    rest = f" (the first {len(lanes)} of {count})" if count > len(lanes) else ""
    return figure(f"members over time{rest}", f'<ul class="legend">{legend}</ul>', drawing)


def _time_range(time_range: TimeRange, top: int, height: int, axis: Axis) -> str:
    x = STRETCHED_WIDTH * axis.part(time_range.start_s)
    width = max(STRETCHED_WIDTH * axis.part(time_range.end_s) - x, 0.6)
    text = f"{time_range.state} for {duration_text(time_range.end_s - time_range.start_s)}"
    return (
        f'<rect class="m-{time_range.state}" x="{x:.1f}" y="{top}" width="{width:.1f}" '
        f'height="{height}"><title>{escape(text)}</title></rect>'
    )


def _name(name: str) -> str:
    short = name if len(name) <= 20 else name[:18] + "…"
    return f"{escape(short)}<title>{escape(name)}</title>"


Floats = NDArray[np.float64]

MAX_INTERVALS = 2000  # above it, the whole run is drawn as fractions of time
ZOOM_INTERVALS, ZOOM_EACH = 240, 12  # drawn individually in the zoomed figure; minimum per region
_BINS_LEAST, _BINS_MOST = 60, 240
_MOST_BINS = 12_000  # of all regions of a drawing
_NARROW_PX = 560
_KINDS = ("compute", "wait", "transfer")


@dataclass(frozen=True, slots=True)
class _Rows:
    """Heights in pixels: of a region, of its row of work, of its row of exchanges."""

    lane: int
    work: int
    wire: int


_ROOMY_ROWS, _TIGHT_ROWS = _Rows(46, 20, 11), _Rows(22, 10, 5)
_ROOMY_REGIONS = 16


@dataclass(frozen=True, slots=True)
class Spans:
    """Intervals of one kind in one region, in seconds.

    Attributes:
        start: starts, float64 (N,).
        end: ends, float64 (N,); after the starts.
    """

    start: Floats
    end: Floats

    def before(self, end_s: float) -> Spans:
        """Give the intervals that begin before ``end_s``, truncated there."""
        is_shown = self.start < end_s
        return Spans(self.start[is_shown], np.minimum(self.end[is_shown], end_s))


Lanes = Mapping[str, Mapping[str, Spans]]  # region -> kind -> spans


def lanes(regions: Mapping[str, RegionRecord]) -> dict[str, dict[str, Spans]]:
    """Compute the intervals of every region.

    Compute is ``start_s`` to ``start_s + compute_s`` of a step. Its ``wait_s`` lies between there
    and ``t_s`` as far as it fits, and the rest just before ``start_s``. A transfer is an exchange.
    """
    return {name: _region_lanes(region) for name, region in regions.items()}


def _region_lanes(region: RegionRecord) -> dict[str, Spans]:
    steps, exchanges = region.steps, region.exchanges
    start, t_s = steps["start_s"], steps["t_s"]
    computed = start + np.nan_to_num(steps["compute_s"])
    wait_s = np.nan_to_num(steps["wait_s"])
    after_s = np.clip(t_s - computed, 0.0, wait_s)
    floor = np.concatenate([[0.0], np.maximum(computed, computed + after_s)[:-1]])
    before = np.clip(start - (wait_s - after_s), np.minimum(floor, start), start)
    return {
        "compute": _spans(start, computed),
        "wait": _spans(
            np.concatenate([before, computed]), np.concatenate([start, computed + after_s])
        ),
        "transfer": _spans(exchanges["start_s"], exchanges["t_s"]),
    }


def _spans(start: Floats, end: Floats) -> Spans:
    real = np.isfinite(start) & np.isfinite(end) & (end > start)
    order = np.argsort(start[real], kind="stable")
    return Spans(start[real][order], end[real][order])


def timeline(of: Lanes, at: Sequence[tuple[float, str]] = ()) -> str:
    """Draw the whole run and, if that is crowded, its first seconds as well.

    Args:
        of: result of `lanes`.
        at: (seconds, description), drawn as marks.

    Returns:
        HTML of one or two figures; of a note if there is nothing to draw.
    """
    every = [spans for kinds in of.values() for spans in kinds.values()]
    starts = np.sort(np.concatenate([spans.start for spans in every] or [np.zeros(0)]))
    if not len(starts):
        return '<figure><p class="none">no data recorded</p></figure>'
    end_s = max(float(spans.end.max()) for spans in every if len(spans.end))
    aggregated = len(starts) > MAX_INTERVALS
    caption = "whole run"
    if aggregated:
        caption += ": height is the fraction of time in each column"
    figures = ""
    shown = max(ZOOM_INTERVALS, ZOOM_EACH * len(of))
    if len(starts) > shown:
        # Start at the first interval, because start-up would be empty.
        zoom_s = float(starts[shown])
        zoomed = {
            name: {kind: spans.before(zoom_s) for kind, spans in kinds.items()}
            for name, kinds in of.items()
        }
        if zoom_s < 0.8 * end_s:
            first_s = float(starts[0])
            length = duration_text(zoom_s - first_s)
            figures = _lanes_drawn(f"the first {length}", zoomed, first_s, zoom_s, at, shares=False)
    return figures + _lanes_drawn(caption, of, 0.0, end_s, at, shares=aggregated)


def _lanes_drawn(
    caption: str,
    of: Lanes,
    low_s: float,
    high_s: float,
    at: Sequence[tuple[float, str]],
    *,
    shares: bool,
) -> str:
    axis, unit = time_axis(low_s, high_s, 10)
    rows = _ROOMY_ROWS if len(of) <= _ROOMY_REGIONS else _TIGHT_ROWS
    height = rows.lane * len(of)
    names, parts = [], []
    for index, (name, kinds) in enumerate(of.items()):
        top = index * rows.lane + 4
        names.append((top + rows.work / 2, f"{escape(_short(name))}<title>{escape(name)}</title>"))
        if shares:
            most = min(_BINS_MOST, max(_BINS_LEAST, _MOST_BINS // len(of)))
            parts.append(_shares(kinds, top, rows, axis, most))
        else:
            parts.append(_bars(kinds, top, rows, axis))
    legend = "".join(
        f'<li><svg width="14" height="12"><rect class="t-{kind}" width="14" height="12"/></svg>'
        f"{kind}</li>"
        for kind in _KINDS
    )
    drawing = frame(
        f"timeline, {caption}",
        height,
        stretched("".join(parts), height, cut=False) + marks(axis, height, at),
        x_axis=axis,
        x_label=f"time ({unit})",
        y_texts=names,
        least_px=_NARROW_PX,
        upright=True,
    )
    return figure(caption, f'<ul class="legend">{legend}</ul>', drawing)


def _x(axis: Axis, value_s: Floats) -> Floats:
    return STRETCHED_WIDTH * (value_s - axis.low) / (axis.high - axis.low)


def _bars(kinds: Mapping[str, Spans], top: int, rows: _Rows, axis: Axis) -> str:
    parts = []
    for kind in _KINDS:
        spans = kinds[kind]
        y, height = (top + rows.work + 3, rows.wire) if kind == "transfer" else (top, rows.work)
        start, end = _x(axis, spans.start), _x(axis, spans.end)
        width = np.maximum(end - start - 0.5, 0.6)  # half a pixel or so between neighbours
        lengths = [duration_text(float(length)) for length in spans.end - spans.start]
        parts += [
            f'<rect class="t-{kind}" x="{x:.1f}" y="{y}" width="{w:.1f}" height="{height}">'
            f"<title>{kind} {length}</title></rect>"
            for x, w, length in zip(start, width, lengths, strict=True)
        ]
    return "".join(parts)


def _shares(kinds: Mapping[str, Spans], top: int, rows: _Rows, axis: Axis, most: int) -> str:
    # Several exchanges per column, to avoid aliasing between rounds and columns.
    columns = int(np.clip(len(kinds["transfer"].start) // 4, _BINS_LEAST, most))
    edges = np.linspace(axis.low, axis.high, columns + 1)
    x = _x(axis, edges)
    shares = {kind: coverage(kinds[kind].start, kinds[kind].end, edges) for kind in _KINDS}
    shares["wait"] = np.minimum(shares["wait"], 1.0 - shares["compute"])
    floor = np.full(columns, float(top + rows.work))
    compute, wait = floor - rows.work * shares["compute"], rows.work * shares["wait"]
    wire = floor + 3 + rows.wire
    return (
        f'<rect class="t-none" x="0" y="{top}" width="{STRETCHED_WIDTH}" height="{rows.work}"/>'
        + _steps("compute", x, compute, floor)
        + _steps("wait", x, compute - wait, compute)
        + _steps("transfer", x, wire - rows.wire * shares["transfer"], wire)
    )


def _steps(kind: str, x: Floats, upper: Floats, lower: Floats) -> str:
    """Draw the columns between two rows of heights as one path."""
    columns = [
        f"M{a:.1f},{low:.1f}V{high:.1f}H{b:.1f}V{low:.1f}Z"
        for a, b, high, low in zip(x[:-1], x[1:], upper, lower, strict=True)
        if low - high > 0.05
    ]
    return f'<path class="t-{kind}" d="{"".join(columns)}"/>' if columns else ""


def _short(name: str) -> str:
    return name if len(name) <= 20 else name[:18] + "…"
