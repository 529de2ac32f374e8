"""Who took part in a run when, from its events. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from geo_ray.observe.events.schema import MEMBER_KINDS, Event

RUN: Final = "run"
"""The band of the run as a whole: it is there only if the run was paused."""

_STATES: Final = {
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
        elif kind == "hub_moved":
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
            self._enter(region, _STATES[event.kind], event.t_s)
            return
        name = f"{region}/{event['worker']}"
        if name not in self._now and name not in self.bands:
            self._now[name] = ("member", self._began_s)  # nobody told of it so far
            self.bands[name] = []
        self._enter(name, _STATES[event.kind], event.t_s)

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
