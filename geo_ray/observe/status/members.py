"""Folds the events of a run into who takes part in it, and what became of requests. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from geo_ray.observe.events.schema import Event

_STATES: Final = {
    "region_lost": "lost",
    "region_drained": "left",
    "region_joining": "joining",
    "region_joined": "member",
    "join_failed": "did not join",
}


@dataclass(slots=True)
class MemberNow:
    """One region of the configuration.

    Attributes:
        state: ``member``, ``absent`` (it was not there as the run last began, and has not joined),
            ``joining``, ``leaving``, ``lost``, ``left`` or ``did not join``.
        step: the newest step that any region had taken then; None: before the start.
        refused: the newest request about it, if it was refused, and why.
    """

    state: str = "absent"
    step: int | None = None
    refused: str | None = None


class MembersFold:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._regions: dict[str, MemberNow] = {}
        self._step = 0
        self.refused: str | None = None
        """The newest request, if it was refused, and why."""

    def of(self, region: str) -> MemberNow:
        """How a region stands."""
        return self._regions.setdefault(region, MemberNow())

    def feed(self, event: Event) -> None:
        """Take the next event."""
        match event.kind:
            case "run_started":
                self._begin(frozenset(event["regions"]))
            case "run_finished" | "run_failed":
                self.end()
            case "step":
                self._step = max(self._step, int(event["step"]))
            case "members_accepted":
                self.refused = self.of(event["region"]).refused = None
                if event["verb"] == "drain" and self.of(event["region"]).state == "member":
                    self._set(event["region"], "leaving")
            case "members_refused":
                region = self.of(event["region"])
                self.refused = f"{event['verb']} {event['region']}: {event['cause']}"
                region.refused = self.refused
                if event["verb"] == "drain" and not event.fields.get("request"):
                    self._come_back(event["region"])  # it was accepted, and came to nothing
            case kind if kind in _STATES:
                self._set(event["region"], _STATES[kind])

    def end(self) -> None:
        """Nobody drives the run: who was on the way does not come, nor go."""
        for name, region in self._regions.items():
            if region.state == "joining":
                self._set(name, "did not join")
            self._come_back(name)

    def _begin(self, there: frozenset[str]) -> None:
        self.end()
        for name in [name for name, each in self._regions.items() if each.state == "member"]:
            if name not in there:
                self._set(name, "absent")
        for name in sorted(there):
            if self.of(name).state != "member":
                self._set(name, "member")

    def _come_back(self, name: str) -> None:
        if self.of(name).state == "leaving":
            self._set(name, "member")

    def _set(self, name: str, state: str) -> None:
        region = self.of(name)
        region.state, region.step = state, self._step
