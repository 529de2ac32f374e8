"""Puts times that processes tell onto the driver's clock, where a machine's clock is far off. Pure.

Idea: each process counts from the time of day that its machine believes in. Nothing is ordered by
these times, but the time line of a run is made of them.

Rule: what a process says of the present arrives later by what the message took, so the largest
difference seen is the nearest one. Less than `TOLERATED_S` is left as it is: clocks that are set
over the network agree better than this can tell.

Source: ours; the least delay tells most about a clock, as in NTP.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

log = logging.getLogger(__name__)

TOLERATED_S: Final = 90.0  # more than an answer may be late
_TIMES: Final = ("t_s", "start_s")


@dataclass(slots=True)
class Skews:
    """See the module's docstring."""

    _ahead_s: dict[tuple[str, str], float] = field(default_factory=dict)

    def events(
        self, answers: Mapping[tuple[str, str], Mapping[str, Any]], now_s: float
    ) -> list[dict[str, Any]]:
        """All events of some answers, with times of the driver's clock.

        Args:
            answers: by (role, region); ``now_s`` in one is what its process took for the present.
            now_s: the present.
        """
        found = []
        for key, answer in answers.items():
            ahead_s = self._skew(key, answer.get("now_s"), now_s)
            for event in answer["events"]:
                moved = {t: event[t] - ahead_s for t in _TIMES if ahead_s and t in event}
                found.append({**event, **moved})
        return found

    def _skew(self, key: tuple[str, str], told_s: float | None, now_s: float) -> float:
        """Seconds that a process is ahead; 0 if that is none to speak of."""
        if told_s is None:
            return 0.0
        before_s, ahead_s = self._ahead_s.get(key), told_s - now_s
        if before_s is not None and ahead_s < before_s - TOLERATED_S:
            before_s = None  # another process, on another machine
        self._ahead_s[key] = ahead_s = ahead_s if before_s is None else max(before_s, ahead_s)
        if abs(ahead_s) < TOLERATED_S:
            return 0.0
        if before_s is None:
            side = "ahead of" if ahead_s > 0 else "behind"
            log.warning(
                "the clock of the machine of region '%s' (%s) is %.0f s %s the driver's: times of "
                "its events are corrected; set it, since certificates go by it",
                key[1], key[0], abs(ahead_s), side,
            )  # fmt: skip
        return ahead_s
