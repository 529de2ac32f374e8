"""The run of a job of a queue: how far it is, who takes part, how it ended; what is asked of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Final

from geo_ray.errors import RunDirectoryError
from geo_ray.job.far.copy import pass_on, seen_copy
from geo_ray.job.far.objects import RunObjects
from geo_ray.job.status import Beside, StatusReader
from geo_ray.observe.events.schema import Event
from geo_ray.observe.metrics.totals import RunTotals
from geo_ray.observe.report.ending import Ending
from geo_ray.observe.status.members import MembersFold
from geo_ray.queue.job_spec import JobSpec
from geo_ray.queue.seen import RunEnd, SubmissionSeen
from geo_ray.runtime.control import stop_requests
from geo_ray.runtime.control.membership.member_requests import MemberRequest, Verb, ask
from geo_ray.stores.uri import is_s3, join

_ENDS: Final[dict[str, RunEnd]] = {
    Ending.FINISHED.value: "finished",
    Ending.STOPPED.value: "stopped",
    Ending.FAILED.value: "failed",
}
_GONE: Final = ("lost", "left", "absent", "joining", "did not join")


class QueuedRun:
    """See the module.

    Args:
        runs: `run.dir` of the queue's jobs.
        name: of the job.
        spec: what it is.
    """

    def __init__(self, runs: str, name: str, spec: JobSpec) -> None:
        self._runs, self._name, self._spec = runs, name, spec
        self._reader: StatusReader | None = None
        self._place: str | None = None
        self._members: MembersFold | None = None
        self._joined: dict[str, int] = {}  # how many steps newcomers have behind them

    @property
    def place(self) -> str | None:
        """Its directory or address; None: it has not begun."""
        return self._place

    def seen(self) -> SubmissionSeen:
        """Return how it stands, for a submission that goes on.

        Raises:
            RunDirectoryError: it cannot be read.
            StoreError: the bucket does not answer.
        """
        place = newest_run(self._runs, self._name)
        if place is None:
            return SubmissionSeen("going")
        if place != self._place or self._reader is None:
            self._place, self._reader = place, self._opened(place)
            if self._reader is None:
                return SubmissionSeen("going")
        status = self._reader.read()
        now, names = self._members, self._reader.config.region_names
        members = {} if now is None else {name: now.of(name).state for name in names}
        regions = [each for each in status.regions if each.steps is not None]
        there = [each for each in regions if members.get(each.name) not in _GONE] or regions
        done = None
        if there and self._spec.anywhere and len(self._spec.regions) > 1:
            done = sum(each.samples for each in regions) / self._spec.rows
        elif there:
            steps = {each.name: max(each.step, self._joined.get(each.name, 0)) for each in there}
            done = min(steps[each.name] / max(1, each.steps or 1) for each in there)
        return SubmissionSeen(
            "going",
            None if done is None else min(1.0, done),
            trains=status.is_going is not False and any(each.step for each in there),
            members=members,
            end=_ENDS.get(status.phase),
            code=status.code,
            told=status.message or "",
        )

    def ask_stop(self) -> None:
        """Ask it to save and end; may be repeated.

        Raises:
            RunDirectoryError: nothing can be written there.
        """
        path = self._path()
        stop_requests.ask(path)
        pass_on(self._address(), path)

    def ask_member(self, verb: Verb, region: str) -> None:
        """Let a region join or leave.

        Raises:
            RunDirectoryError: nothing can be written there.
        """
        path = self._path()
        ask(path, MemberRequest(verb=verb, region=region))
        pass_on(self._address(), path)

    def _opened(self, place: str) -> StatusReader | None:
        try:
            path = seen_copy(place) if is_s3(place) else Path(place)
            return StatusReader(path, beside=self._beside)
        except RunDirectoryError:
            return None  # it is being made

    def _beside(self) -> Beside:
        fold, self._joined = MembersFold(), {}
        self._members = fold

        def feed(event: Event, _: RunTotals) -> None:
            fold.feed(event)
            if event.kind == "run_started":
                self._joined.clear()
            elif event.kind == "region_joined":
                self._joined[event["region"]] = int(event["step"])

        return feed

    def _path(self) -> Path:
        if self._place is None:
            raise RunDirectoryError(f"the run of job {self._name} has not begun")
        return seen_copy(self._place) if is_s3(self._place) else Path(self._place)

    def _address(self) -> str | None:
        return self._place if self._place is not None and is_s3(self._place) else None


def newest_run(runs: str, name: str) -> str | None:
    """Return the newest run of a name: the one that a job of that name goes on with, or makes."""
    found = None
    for number in count(1):
        each = name if number == 1 else f"{name}-{number}"
        place = join(runs, each) if is_s3(runs) else str(Path(runs) / each)
        is_there: Callable[[], bool] = (
            RunObjects(place).is_there if is_s3(runs) else Path(place).is_dir
        )
        if not is_there():
            return found
        found = place
    return found
