"""The work left in a run, read from its directory.

A restarted run gets another directory, NAME-2 and so on, so the newest running one of the name
is found in each iteration. An unreadable directory does not hide the others. Older runs are not
used for a while, since the error may be temporary.
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
    """The run that a cluster serves.

    Attributes:
        path: its directory if the name was free; otherwise that with a number.
        plan: plan of the run.
        since_unix_s: when the cluster was requested. A run without writes since then is not its
            work.
    """

    path: Path
    plan: Plan
    since_unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FoundRun:
    """Directory of a run.

    Attributes:
        path: the directory.
        made_ns: creation time by the clock of its file system.
        written_unix_s: last write of its run actor, by the same clock.
    """

    path: Path
    made_ns: int
    written_unix_s: float


def runs_named(path: Path, since_unix_s: float = 0.0) -> list[FoundRun]:
    """Return the runs whose directory has a name, or that name with a number.

    A run of another name may be included, such as one that is named ``trial-2``.

    Args:
        path: ``run.dir/name``.
        since_unix_s: runs without writes since then are omitted.

    Returns:
        The runs, newest first.

    Raises:
        RunDirectoryError: the parent directory cannot be read.
    """
    name = re.compile(rf"{re.escape(path.name)}(-\d+)?")
    found = []
    try:
        for each in path.parent.iterdir():
            if name.fullmatch(each.name):
                with suppress(FileNotFoundError, NotADirectoryError):  # missing, or incomplete
                    found.append(_seen(each))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunDirectoryError(f"cannot read {path.parent}: {error.strerror or error}") from error
    recent = [run for run in found if run.written_unix_s >= since_unix_s]
    return sorted(recent, key=attrgetter("made_ns", "path.name"), reverse=True)


def _seen(path: Path) -> FoundRun:
    made = (path / PLAN_FILE).stat()  # written once, when the directory is created
    written_s = [made.st_mtime]
    for name in (EVENTS_FILE, LEASE_KEY):
        with suppress(FileNotFoundError):
            written_s.append((path / name).stat().st_mtime)
    return FoundRun(path, made.st_mtime_ns, max(written_s))


_LOOKS: Final = 64
_LEAST_S: Final = 30.0


class RecentSpeed:
    """Recent steps of one job over time.

    Args:
        planned_step_s: planned seconds of a step.
    """

    def __init__(self, planned_step_s: float) -> None:
        self._planned_step_s = planned_step_s
        self._last: tuple[float, float] | None = None
        self._step_s: deque[float] = deque(maxlen=_LOOKS)

    def see(self, step: float, now_s: float) -> None:
        """Add the number of finished steps; it may fall after a resume."""
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
    """A directory that is read in each iteration."""

    reader: StatusReader
    made_ns: int
    speed: RecentSpeed
    status: RunStatus | None = None  # as last read
    unread_s: float | None = None  # since when it is unreadable
    cut_off_s: float | None = None  # since when it has neither a run actor nor an end


class RunWork:
    """Remaining work of a run; see `WorkLeft`.

    Args:
        run: the run; its directory need not exist yet.
        idle_s: seconds after which an unreadable or abandoned run no longer counts.
        now_s: a monotonic clock.
    """

    def __init__(
        self, run: NamedRun, idle_s: float, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._run, self._idle_s, self._now_s = run, idle_s, now_s
        self._known: dict[Path, _Followed] = {}
        self.notes: tuple[str, ...] = ()
        """Runs of the name that could not be read in the last iteration, with the reason."""

    def left_s(self) -> float | None:
        """See `WorkLeft.left_s`. A run that has not begun has all its work left.

        Raises:
            RunDirectoryError: the runs cannot be listed; or all readable runs are over and one is
                temporarily unreadable.
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
        """Return the newest run that is or may be active; otherwise the newest run."""
        observed: list[tuple[_Followed, RunStatus]] = []
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
                    continue  # its run actor, if any, cannot be observed
                unsure = unsure if each.status is not None else why
            started = each.reader.totals.started
            is_real = started is None or not started["simulated"]
            if each.status is not None and is_real:
                observed.append((each, each.status))
        living = [one for one in observed if _may_live(one[1])]
        if observed and unsure and not living:
            raise RunDirectoryError(f"it is unknown whether a run of this name is active: {unsure}")
        return next(iter(living or observed), None)

    def _look(self, each: _Followed) -> str:
        """Read a run; return the error text, or an empty string."""
        try:
            each.status = each.reader.read()
        except Exception as error:  # an error concerns this run only
            _log.warning("a run cannot be read: %s", error)
            if each.unread_s is None:
                each.unread_s = self._now_s()
            return error.message if isinstance(error, GeoRayError) else repr(error)
        each.unread_s = None
        return ""

    def _was_unread_for_long(self, each: _Followed) -> bool:
        return each.unread_s is not None and self._now_s() - each.unread_s >= self._idle_s

    def _was_cut_off_for_long(self, each: _Followed, status: RunStatus) -> bool:
        """Return whether a run was without a run actor for so long that no resume is expected."""
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
        except Exception as error:  # no training depends on an unreadable run
            _log.warning("%s is not followed: %s", found.path, error)
            return None
        if reader.config.name != self._run.path.name:
            return None  # it has this name by itself
        plan = self._run.plan
        planned_s = plan.total_s - plan.seconds.get(START, 0.0)
        opened = _Followed(reader, found.made_ns, RecentSpeed(planned_s / plan.steps))
        self._known[found.path] = opened
        return opened


def _may_live(status: RunStatus) -> bool:
    return status.is_going is not False or status.waits_s is not None
