"""Decides when regions that were lost are to come back. Pure.

Idea: most losses are of one process, and the region is back within seconds; a machine that fails
again and again must not cost the others a border each time.

Rule: a region is brought back at once. If it does not come up, or is lost again within `QUIET_S` of
having been back, it waits `FIRST_S` before the next attempt, then twice as long each time, at most
`LONGEST_S`. A region that was asked to leave, or to be removed, is not brought back.

Source: ours; exponential backoff, as everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

QUIET_S: Final = 120.0
FIRST_S: Final = 10.0
LONGEST_S: Final = 320.0


@dataclass(slots=True)
class _Absence:
    """What is remembered of a region.

    Attributes:
        attempts: to bring it back, with no quiet time since.
        joined_s: when it was back last; None: it has not been since it was lost.
        due_s: when to try next; None: it is there, or on its way.
    """

    attempts: int = 0
    joined_s: float | None = None
    due_s: float | None = None


@dataclass(slots=True)
class Returns:
    """See the module's docstring. Times are seconds of one clock."""

    _absences: dict[str, _Absence] = field(default_factory=dict)

    def lost(self, region: str, now_s: float) -> float:
        """A region is lost, or an attempt to bring it back has failed; seconds until the next."""
        absence = self._absences.setdefault(region, _Absence())
        if absence.joined_s is not None and now_s - absence.joined_s >= QUIET_S:
            absence.attempts = 0
        wait_s = 0.0
        if absence.attempts:
            wait_s = min(LONGEST_S, FIRST_S * 2 ** (absence.attempts - 1))
        absence.joined_s, absence.due_s = None, now_s + wait_s
        return wait_s

    def joined(self, region: str, now_s: float) -> None:
        """It is back."""
        if region in self._absences:
            self._absences[region].joined_s = now_s

    def forget(self, region: str) -> None:
        """It is not to come back by itself."""
        self._absences.pop(region, None)

    def due(self, now_s: float) -> list[str]:
        """Regions to bring back now; they count as on their way then."""
        found = []
        for region, absence in self._absences.items():
            if absence.due_s is not None and now_s >= absence.due_s:
                absence.due_s = None
                absence.attempts += 1
                found.append(region)
        return found
