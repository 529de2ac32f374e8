"""Which regions take part in a run, as its events tell."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from geo_ray.observe.events.schema import Event

_STATES: Final = {
    "region_lost": "lost",
    "region_drained": "left",
    "region_joined": "member",
    "join_failed": "did not join",
}


class MemberStates:
    """Given a run's events, in their order.

    Args:
        regions: of its configuration.

    Attributes:
        states: of each, and the step since which it is so; None: from the start.
    """

    def __init__(self, regions: Iterable[str]) -> None:
        absent: tuple[str, int | None] = ("absent", None)
        self.states = dict.fromkeys(regions, absent)
        self._step = 0

    def feed(self, event: Event) -> None:
        """Take in an event."""
        if event.kind == "run_started":
            for name in event["regions"]:
                if self.states.get(name, ("absent", None))[0] != "member":
                    self.states[name] = ("member", self._step)
        elif event.kind == "step":
            self._step = max(self._step, int(event["step"]))
        elif event.kind in _STATES:
            self.states[event["region"]] = (_STATES[event.kind], self._step)
