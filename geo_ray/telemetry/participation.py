"""The participation timeline of a run, and its chart.

It tells when each region and worker was a member, lost, gone or paused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Final

from geo_ray.base.text import duration_text
from geo_ray.telemetry.charts import (
    STRETCHED_WIDTH,
    Axis,
    figure,
    frame,
    marks,
    stretched,
    time_axis,
)
from geo_ray.telemetry.columns import RunRecord
from geo_ray.telemetry.events import MEMBER_KINDS, Event
from geo_ray.telemetry.html_page import section

RUN: Final = "run"
"""The band of the run as a whole: it is there only if the run was paused."""

_STATE_AFTER: Final = {
    "region_lost": "lost",
    "region_drained": "left",
    "region_joined": "member",
    "worker_lost": "lost",
    "worker_left": "left",
    "worker_replaced": "member",
}


@dataclass(frozen=True, slots=True)
class Band:
    """A state of a region or worker.

    Attributes:
        state: ``member``, ``lost``, ``left`` or ``paused``.
        start_s: when it began.
        end_s: when it ended.
    """

    state: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class Presence:
    """Folds events, in order.

    Attributes:
        bands: of each region and worker of which something is known, in order of appearance;
            workers are called ``region/worker``.
        marks: what happened at a moment: seconds, and words.
    """

    bands: dict[str, list[Band]] = field(default_factory=dict)
    marks: list[tuple[float, str]] = field(default_factory=list)
    _now: dict[str, tuple[str, float]] = field(default_factory=dict)
    _began_s: float = 0.0

    def feed(self, event: Event) -> None:
        """Take the next event; one of `MEMBER_KINDS`."""
        kind, t_s = event.kind, event.t_s
        if kind == "run_started":
            self._began_s = t_s
            self._end(t_s, but=event["regions"])  # a driver that was killed told no end
            for name in event["regions"]:
                self._enter(name, "member", t_s)
        elif kind in ("run_finished", "run_failed"):
            self._end(t_s)
        elif kind == "run_paused":
            self._enter(RUN, "paused", t_s)
        elif kind == "run_went_on":
            self._leave(RUN, t_s)
        elif kind == "averager_moved":
            self.marks.append((t_s, f"the averager moves to {event['region']}"))
        elif kind == "bridge_replaced":
            self.marks.append((t_s, f"another bridge in {event['region']}: {event['cause']}"))
        elif kind == "driver_attached":
            self.marks.append((t_s, f"another driver, after {event['silent_s']:.1f} s"))
        elif kind == "join_failed":
            self.marks.append((t_s, f"{event['region']} does not join: {event['cause']}"))
        else:
            self._changed(event)

    def until(self, end_s: float) -> dict[str, list[Band]]:
        """All bands, with those that last cut off at the end of what is known."""
        found = {name: list(bands) for name, bands in self.bands.items()}
        for name, (state, start_s) in self._now.items():
            if end_s > start_s:
                found.setdefault(name, []).append(Band(state, start_s, end_s))
        return found

    def _changed(self, event: Event) -> None:
        region = event["region"]
        if event.kind.startswith("region"):
            self._enter(region, _STATE_AFTER[event.kind], event.t_s)
            return
        name = f"{region}/{event['worker']}"
        if name not in self._now and name not in self.bands:
            self._now[name] = ("member", self._began_s)  # nobody told of it so far
            self.bands[name] = []
        self._enter(name, _STATE_AFTER[event.kind], event.t_s)

    def _enter(self, name: str, state: str, t_s: float) -> None:
        if self._now.get(name, ("", 0.0))[0] == state:
            return
        self._leave(name, t_s)
        self._now[name] = (state, t_s)

    def _leave(self, name: str, t_s: float) -> None:
        state, start_s = self._now.pop(name, ("", t_s))
        bands = self.bands.setdefault(name, [])
        if t_s > start_s:
            bands.append(Band(state, start_s, t_s))

    def _end(self, t_s: float, but: Collection[str] = ()) -> None:
        """All bands end but those of members in ``but``, and of their workers that are members."""
        for name, (state, _) in list(self._now.items()):
            if state != "member" or name.partition("/")[0] not in but:
                self._leave(name, t_s)


def absences(bands: Iterable[Band]) -> tuple[tuple[float, float], ...]:
    """Return when a region was lost or had left: the start and the end of each time in seconds."""
    return tuple((band.start_s, band.end_s) for band in bands if band.state in ("lost", "left"))


def presence_of(events: Iterable[Event]) -> Presence:
    """Fold the events of a run, in order; those of other kinds are passed over."""
    found = Presence()
    for event in events:
        if event.kind in MEMBER_KINDS:
            found.feed(event)
    return found


_STATE_ORDER: Final = ("member", "lost", "left", "paused")
_LEAST_PX: Final = 560
_ROOMY, _TIGHT = (24, 16), (12, 8)  # pixels of a lane, and of its band
_ROOMY_LANES: Final = 24
_MOST_LANES: Final = 200
MEMBERS_NOTE: Final = (
    "Regions, and workers that were lost, left or came. A dashed line: the averager moved, a "
    "bridge was replaced, or somebody did not join."
)


def members_section(run: RunRecord) -> str:
    """The section; nothing if the members were the same all the time."""
    found = presence_of(run.changes)
    end_s = run.totals.elapsed_s
    bands = found.until(end_s)
    changed = any(band.state != "member" for each in bands.values() for band in each)
    joined = any(each and each[0].start_s > _first_s(bands) for each in bands.values())
    if not (changed or joined or found.marks) or end_s <= 0:
        return ""
    return section("Members", members_figure(bands, found.marks, end_s), MEMBERS_NOTE)


def members_figure(
    bands: Mapping[str, list[Band]], at: Sequence[tuple[float, str]], end_s: float
) -> str:
    """Draw bands over time.

    Args:
        bands: of the run, its regions and workers, by name.
        at: what happened at a moment: seconds, and words.
        end_s: end of the time; above 0.
    """
    lanes = _in_order(bands)
    return _drawn(lanes[:_MOST_LANES], len(lanes), end_s, at)


def _first_s(bands: Mapping[str, Sequence[Band]]) -> float:
    return min((each[0].start_s for each in bands.values() if each), default=0.0)


def _in_order(bands: Mapping[str, list[Band]]) -> list[tuple[str, list[Band]]]:
    """The run, then each region with its workers behind it."""
    return sorted(bands.items(), key=lambda item: (item[0] != RUN, item[0].split("/")))


def _drawn(
    lanes: Sequence[tuple[str, list[Band]]],
    count: int,
    end_s: float,
    at: Sequence[tuple[float, str]],
) -> str:
    axis, unit = time_axis(0.0, end_s, 10)
    lane, height = _ROOMY if len(lanes) <= _ROOMY_LANES else _TIGHT
    names = [(i * lane + 4 + height / 2, _name(name)) for i, (name, _) in enumerate(lanes)]
    body = "".join(
        _band(band, i * lane + 4, height, axis)
        for i, (_, bands) in enumerate(lanes)
        for band in bands
    )
    total = lane * len(lanes) + 4
    shown = [
        s for s in _STATE_ORDER if any(band.state == s for _, bands in lanes for band in bands)
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


def _band(band: Band, top: int, height: int, axis: Axis) -> str:
    x = STRETCHED_WIDTH * axis.part(band.start_s)
    width = max(STRETCHED_WIDTH * axis.part(band.end_s) - x, 0.6)
    text = f"{band.state} for {duration_text(band.end_s - band.start_s)}"
    return (
        f'<rect class="m-{band.state}" x="{x:.1f}" y="{top}" width="{width:.1f}" '
        f'height="{height}"><title>{escape(text)}</title></rect>'
    )


def _name(name: str) -> str:
    short = name if len(name) <= 20 else name[:18] + "…"
    return f"{escape(short)}<title>{escape(name)}</title>"
