"""How much of a run is left, from its directory: whoever drives it, and whether it has begun.

A run that is started anew gets another directory, NAME-2 and so on, so the one that is followed is
looked for again and again: the newest of the name that lives.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from geo_ray.autoscale.recent_speed import RecentSpeed
from geo_ray.errors import GeoRayError
from geo_ray.job.status import StatusReader
from geo_ray.observe.report.ending import Ending
from geo_ray.observe.status.record import RunStatus
from geo_ray.planning.actual import START
from geo_ray.runtime.autoscaler.named_run import FoundRun, NamedRun, runs_named

_ENDED: Final = (Ending.STOPPED.value, Ending.FAILED.value)
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Followed:
    """One directory, from look to look."""

    reader: StatusReader
    made_ns: int
    speed: RecentSpeed
    ended_s: float | None = None


class RunWork:
    """See `WorkLeft`.

    Args:
        run: what is followed; none of its directories need be there yet.
        idle_s: after which a run that was stopped or failed needs no machines; it may be resumed.
        now_s: a clock that never goes back.
    """

    def __init__(
        self, run: NamedRun, idle_s: float, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._run, self._idle_s, self._now_s = run, idle_s, now_s
        self._known: dict[Path, _Followed] = {}

    def left_s(self) -> float | None:
        """See `WorkLeft.left_s`; a run that has not begun has all before it."""
        found = self._newest()
        if found is None:
            return self._run.plan.total_s
        each, status = found
        if status.phase == Ending.FINISHED.value:
            return 0.0
        if status.phase not in _ENDED:
            each.ended_s = None
        elif each.ended_s is None:
            each.ended_s = self._now_s()
        elif self._now_s() - each.ended_s >= self._idle_s:
            return 0.0
        regions = [region for region in status.regions if region.steps is not None]
        if not regions:
            return self._run.plan.total_s
        each.speed.see(min(region.step for region in regions), self._now_s())
        return each.speed.left_s(max((r.steps or 0) - r.step for r in regions))

    def _newest(self) -> tuple[_Followed, RunStatus] | None:
        """Return the newest run that lives, or may; else the newest one that there is."""
        seen = []
        for found in runs_named(self._run.path, self._run.since_unix_s):
            each = self._opened(found)
            if each is None:
                continue
            status = each.reader.read()
            started = each.reader.totals.started
            if started is None or not started["simulated"]:
                seen.append((each, status))
        living = [one for one in seen if _may_live(one[1])]
        return next(iter(living or seen), None)

    def _opened(self, found: FoundRun) -> _Followed | None:
        known = self._known.get(found.path)
        if known is not None and known.made_ns == found.made_ns:
            return known
        try:
            reader = StatusReader(found.path)
        except GeoRayError as error:  # nobody trains by what cannot be read
            _log.warning("%s is not followed: %s", found.path, error.message)
            return None
        if reader.experiment.name != self._run.path.name:
            return None  # called so by itself
        plan = self._run.plan
        planned_s = plan.total_s - plan.seconds.get(START, 0.0)
        opened = _Followed(reader, found.made_ns, RecentSpeed(planned_s / plan.steps))
        self._known[found.path] = opened
        return opened


def _may_live(status: RunStatus) -> bool:
    return status.is_going is not False or status.waits_s is not None
