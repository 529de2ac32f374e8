"""Decides when a run pauses because too few regions are there, and when it has waited enough. Pure.

Rule: with `members.min` a run goes on while so many regions are there; without, it waits for every
region that is lost and will be brought back. It goes on at once when somebody is there to join,
since newcomers begin at a border, which the others come to by training on. After `members.wait_s`
without enough regions it is saved and ends.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from geo_ray.errors import RegionLostError


@dataclass(slots=True)
class Quorum:
    """See the module's docstring. Times are seconds of one clock.

    Attributes:
        least: regions that must be there; None: all that have not left.
        wait_s: longest pause.
    """

    least: int | None
    wait_s: float
    _since_s: float | None = None
    _is_paused: bool = False

    @property
    def is_paused(self) -> bool:
        """Whether nobody trains."""
        return self._is_paused

    def see(
        self,
        here: Collection[str],
        awaited: Collection[str],
        *,
        is_joining: bool,
        is_ending: bool,
        now_s: float,
    ) -> str | None:
        """Judge who is there; `is_paused` has what follows.

        Args:
            here: regions that take part.
            awaited: lost ones that will be brought back.
            is_joining: whether one of them is there, and joins at the next border.
            is_ending: whether the run is told to finish, or to halt: then it is not paused.
            now_s: the present time.

        Returns:
            What is missing, while it is.
        """
        short = bool(awaited) if self.least is None else len(here) < self.least
        if not short:
            self._since_s, self._is_paused = None, False
            return None
        self._since_s = now_s if self._since_s is None else self._since_s
        self._is_paused = not (is_joining or is_ending)
        names = ", ".join(sorted(awaited)) or "nobody can come back"
        least = "" if self.least is None else f", and members.min asks for {self.least}"
        return f"regions that take part: {len(here)}{least}; lost: {names}"

    def overdue(self, missing: str, now_s: float) -> RegionLostError | None:
        """Why the run is saved and ends, if it has waited enough."""
        if self._since_s is None or now_s - self._since_s < self.wait_s:
            return None
        return RegionLostError(
            f"{missing}; they were not back within members.wait_s = {self.wait_s:g} s",
            fix="See why their machines do not come; `geo-ray train --resume` goes on with those "
            "that the checkpoint has.",
        )
