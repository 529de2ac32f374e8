"""How much of a run is left, from its directory: whoever drives it, and whether it has begun.

A run that is started anew gets another directory, NAME-2 and so on, so the one that is followed is
looked for again and again: the newest of the name that lives.

One that cannot be read keeps nobody from the others. It may be only for a moment, and the very run
that all machines are for: so for a while nothing is over because of what an older one says.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from geo_ray.autoscale.recent_speed import RecentSpeed
from geo_ray.errors import GeoRayError, RunDirectoryError
from geo_ray.job.status import StatusReader
from geo_ray.observe.report.ending import Ending
from geo_ray.observe.status.record import RunStatus
from geo_ray.planning.actual import START
from geo_ray.runtime.autoscaler.named_run import FoundRun, NamedRun, runs_named

_ENDED: Final = (Ending.FINISHED.value, Ending.STOPPED.value, Ending.FAILED.value)
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Followed:
    """One directory, from look to look."""

    reader: StatusReader
    made_ns: int
    speed: RecentSpeed
    status: RunStatus | None = None  # as it was last read
    unread_s: float | None = None  # since when it cannot be
    cut_off_s: float | None = None  # since when it has had neither a driver nor an end


class RunWork:
    """See `WorkLeft`.

    Args:
        run: what is followed; none of its directories need be there yet.
        idle_s: after which a run that cannot be read, or was cut off, counts no more.
        now_s: a clock that never goes back.
    """

    def __init__(
        self, run: NamedRun, idle_s: float, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._run, self._idle_s, self._now_s = run, idle_s, now_s
        self._known: dict[Path, _Followed] = {}
        self.notes: tuple[str, ...] = ()
        """Which runs of the name could not be read at the last look, and why."""

    def left_s(self) -> float | None:
        """See `WorkLeft.left_s`; a run that has not begun has all before it.

        Raises:
            RunDirectoryError: the runs cannot be listed; or all that could be read are over, and
                one could not be for a moment.
        """
        found = self._newest()
        if found is None:
            return self._run.plan.total_s
        each, status = found
        if status.phase in _ENDED or self._was_cut_off_for_long(each, status):
            return 0.0
        regions = [region for region in status.regions if region.steps is not None]
        if not regions:
            return self._run.plan.total_s
        each.speed.see(min(region.step for region in regions), self._now_s())
        steps_left = max((r.steps or 0) - r.step for r in regions)
        # After its last step a run still evaluates and writes its model: it is not over.
        return each.speed.left_s(max(steps_left, 1) if _may_live(status) else steps_left)

    def _newest(self) -> tuple[_Followed, RunStatus] | None:
        """Return the newest run that lives, or may; else the newest one that there is."""
        seen: list[tuple[_Followed, RunStatus]] = []
        self.notes, unsure = (), ""
        for found in runs_named(self._run.path, self._run.since_unix_s):
            each = self._opened(found)
            if each is None:
                continue
            why = self._look(each)
            if why:
                why = f"the run in {found.path} cannot be read: {why}"
                self.notes += (why,)
                if self._was_unread_for_long(each):
                    continue  # whoever drives it, if anybody, cannot be heard
                unsure = unsure if each.status is not None else why
            started = each.reader.totals.started
            is_real = started is None or not started["simulated"]
            if each.status is not None and is_real:
                seen.append((each, each.status))
        living = [one for one in seen if _may_live(one[1])]
        if seen and unsure and not living:
            raise RunDirectoryError(f"whether any run of the name goes on is not known: {unsure}")
        return next(iter(living or seen), None)

    def _look(self, each: _Followed) -> str:
        """Read a run; return why that cannot be done, empty if it can."""
        try:
            each.status = each.reader.read()
        except Exception as error:  # whatever it is, it is of this run alone
            _log.warning("a run cannot be read: %s", error)
            if each.unread_s is None:
                each.unread_s = self._now_s()
            return error.message if isinstance(error, GeoRayError) else repr(error)
        each.unread_s = None
        return ""

    def _was_unread_for_long(self, each: _Followed) -> bool:
        return each.unread_s is not None and self._now_s() - each.unread_s >= self._idle_s

    def _was_cut_off_for_long(self, each: _Followed, status: RunStatus) -> bool:
        """Return whether a run has had no driver for so long that nobody seems to resume it."""
        if _may_live(status):
            each.cut_off_s = None
            return False
        if each.cut_off_s is None:
            each.cut_off_s = self._now_s()
        return self._now_s() - each.cut_off_s >= self._idle_s

    def _opened(self, found: FoundRun) -> _Followed | None:
        known = self._known.get(found.path)
        if known is not None and known.made_ns == found.made_ns:
            return known
        try:
            reader = StatusReader(found.path)
        except Exception as error:  # nobody trains by what cannot be read
            _log.warning("%s is not followed: %s", found.path, error)
            return None
        if reader.config.name != self._run.path.name:
            return None  # called so by itself
        plan = self._run.plan
        planned_s = plan.total_s - plan.seconds.get(START, 0.0)
        opened = _Followed(reader, found.made_ns, RecentSpeed(planned_s / plan.steps))
        self._known[found.path] = opened
        return opened


def _may_live(status: RunStatus) -> bool:
    return status.is_going is not False or status.waits_s is not None
