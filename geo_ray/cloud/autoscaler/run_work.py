"""The work left in a run, read from its directory.

A restarted run gets another directory, NAME-2 and so on, so the newest running one of the name
is looked up each time. An unreadable directory does not hide the others, and for a while
nothing is concluded from older ones: the error may pass.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Final

from geo_ray.base.errors import GeoRayError, RunDirectoryError
from geo_ray.planner.actual_cost import START
from geo_ray.planner.plan import Plan
from geo_ray.runs.directory import PLAN_FILE
from geo_ray.runs.lease import LEASE_KEY
from geo_ray.runs.status import StatusReader
from geo_ray.telemetry.event_log import EVENTS_FILE, Ending
from geo_ray.telemetry.status import RunStatus


@dataclass(frozen=True, slots=True)
class NamedRun:
    """The run that a cluster is made for.

    Attributes:
        path: its directory if its name is free; else that with a number.
        plan: that it follows.
        since_unix_s: when the cluster was requested. A run whose run actor has written nothing
            since then is not counted as its work.
    """

    path: Path
    plan: Plan
    since_unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FoundRun:
    """The directory of a run.

    Attributes:
        path: it.
        made_ns: when it was made, by its file system's clock.
        written_unix_s: when its run actor last wrote to it, by the same clock.
    """

    path: Path
    made_ns: int
    written_unix_s: float


def runs_named(path: Path, since_unix_s: float = 0.0) -> list[FoundRun]:
    """Return the runs that have a directory's name, or would have it if it had been free.

    A run of another name may be among them: ``trial-2`` may be called so.

    Args:
        path: ``run.dir/name``.
        since_unix_s: runs to which nobody has written since then are left out.

    Returns:
        The one that was made last first.

    Raises:
        RunDirectoryError: the directory of all runs cannot be read.
    """
    name = re.compile(rf"{re.escape(path.name)}(-\d+)?")
    found = []
    try:
        for each in path.parent.iterdir():
            if name.fullmatch(each.name):
                with suppress(FileNotFoundError, NotADirectoryError):  # none, or not a whole one
                    found.append(_seen(each))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunDirectoryError(f"cannot read {path.parent}: {error.strerror or error}") from error
    recent = [run for run in found if run.written_unix_s >= since_unix_s]
    return sorted(recent, key=attrgetter("made_ns", "path.name"), reverse=True)


def _seen(path: Path) -> FoundRun:
    made = (path / PLAN_FILE).stat()  # written once, when the directory is made
    written_s = [made.st_mtime]
    for name in (EVENTS_FILE, LEASE_KEY):
        with suppress(FileNotFoundError):
            written_s.append((path / name).stat().st_mtime)
    return FoundRun(path, made.st_mtime_ns, max(written_s))


_LOOKS: Final = 64
_LEAST_S: Final = 30.0


class RecentSpeed:
    """Steps over time of one job.

    Args:
        planned_step_s: seconds of a step as planned.
    """

    def __init__(self, planned_step_s: float) -> None:
        self._planned_step_s = planned_step_s
        self._last: tuple[float, float] | None = None
        self._step_s: deque[float] = deque(maxlen=_LOOKS)

    def see(self, step: float, now_s: float) -> None:
        """Take in how many steps are done; fewer than before after a resume."""
        if self._last is None or step < self._last[0]:
            self._last = (step, now_s)
            return
        before, since_s = self._last
        if now_s - since_s >= _LEAST_S and step > before:
            self._step_s.append((now_s - since_s) / (step - before))
            self._last = (step, now_s)

    @property
    def step_s(self) -> float:
        """Seconds of a step with all machines."""
        return min(self._step_s, default=self._planned_step_s)

    def left_s(self, steps_left: float) -> float:
        """Return the seconds that some steps take."""
        return max(0.0, steps_left) * self.step_s


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
    cut_off_s: float | None = None  # since when it has had neither a run actor nor an end


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
        """Return whether a run has had no run actor for so long that nobody seems to resume it."""
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
