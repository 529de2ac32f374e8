"""How much of a run is left, from its directory: whoever drives it, and whether it has begun."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from geo_ray.autoscale.recent_speed import RecentSpeed
from geo_ray.errors import RunDirectoryError
from geo_ray.job.status import StatusReader
from geo_ray.observe.report.ending import Ending
from geo_ray.planning.actual import START
from geo_ray.planning.plan import Plan

_ENDED: Final = (Ending.STOPPED.value, Ending.FAILED.value)


class RunWork:
    """See `WorkLeft`.

    Args:
        path: the run's directory, which need not be there yet.
        plan: that it follows.
        idle_s: after which a run that was stopped or failed needs no machines; it may be resumed.
        now_s: a clock that never goes back.
    """

    def __init__(
        self,
        path: Path,
        plan: Plan,
        idle_s: float,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._plan, self._idle_s, self._now_s = path, plan, idle_s, now_s
        self._ended_s: float | None = None
        planned_s = plan.total_s - plan.seconds.get(START, 0.0)
        self._speed = RecentSpeed(planned_s / plan.steps)
        self._reader: StatusReader | None = None

    def left_s(self) -> float | None:
        """See `WorkLeft.left_s`; a run that has not begun has all before it."""
        if self._reader is None:
            try:
                self._reader = StatusReader(self._path)
            except RunDirectoryError:
                return self._plan.total_s
        status = self._reader.read()
        if status.phase == Ending.FINISHED.value:
            return 0.0
        if status.phase not in _ENDED:
            self._ended_s = None
        elif self._ended_s is None:
            self._ended_s = self._now_s()
        elif self._now_s() - self._ended_s >= self._idle_s:
            return 0.0
        regions = [each for each in status.regions if each.steps is not None]
        if not regions:
            return self._plan.total_s
        self._speed.see(min(each.step for each in regions), self._now_s())
        return self._speed.left_s(max((each.steps or 0) - each.step for each in regions))
