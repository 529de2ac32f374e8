"""The run of a job of a queue: how far it is, who takes part, how it ended; what is asked of it.

The job writes to the run's directory what it likes: a log that takes minutes to read, a pipe that
nobody writes to, the address of a server that does not answer. So all that touches the directory
runs on a thread of the run's own, and the queue waits for it for `LOOK_S` at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from geo_ray.errors import RunDirectoryError
from geo_ray.job.far.copy import pass_on, seen_copy
from geo_ray.job.status import Beside, StatusReader
from geo_ray.observe.events.schema import Event
from geo_ray.observe.metrics.totals import RunTotals
from geo_ray.observe.report.ending import Ending
from geo_ray.observe.status.members import MembersFold
from geo_ray.queue.job_spec import JobSpec
from geo_ray.queue.seen import RunEnd, SubmissionSeen
from geo_ray.runtime.control import stop_requests
from geo_ray.runtime.control.membership.member_requests import MemberRequest, Verb, ask
from geo_ray.stores.uri import is_s3
from geo_ray.util.bounded_calls import BoundedCalls

_ENDS: Final[dict[str, RunEnd]] = {
    Ending.FINISHED.value: "finished",
    Ending.STOPPED.value: "stopped",
    Ending.FAILED.value: "failed",
}
_MOST_EVENTS: Final = 20_000
LOOK_S: Final = 2.0
"""Longest wait for what is done in the directory of a run; it is done to its end all the same."""
_READ_S: Final = 60.0  # for the log of a run that is over
_GONE: Final = ("lost", "left", "absent", "joining", "did not join")


class QueuedRun:
    """See the module.

    Args:
        place: its directory or address, which no other job has.
        spec: of the job.
    """

    def __init__(self, place: str, spec: JobSpec) -> None:
        self._place, self._spec = place, spec
        self._reader: StatusReader | None = None
        self._members: MembersFold | None = None
        self._joined: dict[str, int] = {}  # how many steps newcomers have behind them
        self._calls = BoundedCalls(f"the directory of run {place}", LOOK_S, RunDirectoryError)
        self._found: SubmissionSeen | None = None  # of the newest look, until it is asked for
        self._over_s: float | None = None

    def begin_look(self) -> Callable[[], SubmissionSeen]:
        """Begin to look how it stands, for a submission that continues.

        Returns:
            What waits for the answer. An answer that comes too late is that of the next look. It
            raises `RunDirectoryError` if the directory cannot be read, or not in time, and
            `StoreError` if the bucket does not answer.
        """
        wait = self._calls.begin(self._look)

        def look() -> SubmissionSeen:
            try:
                wait()
            except RunDirectoryError:
                if self._found is None:
                    raise
            found, self._found = self._found, None
            return found or SubmissionSeen("going")

        return look

    def _look(self) -> None:
        self._found = self._seen()

    def has_told_all(self) -> bool:
        """Whether a run that is over has nothing more to tell, or does not tell it in a minute."""
        self._over_s = self._over_s or time.monotonic()
        return self._is_read or time.monotonic() - self._over_s >= _READ_S

    @property
    def _is_read(self) -> bool:
        """Whether all of its log was read: a look reads a part of it, however long it is."""
        return self._reader is None or self._reader.read_share >= 1.0

    def _seen(self) -> SubmissionSeen:
        self._reader = self._reader or self._opened()
        if self._reader is None:
            return SubmissionSeen("going")
        status = self._reader.read(_MOST_EVENTS)  # a look must end soon, whatever the log has
        now, names = self._members, self._reader.config.region_names
        members = {} if now is None else {name: now.of(name).state for name in names}
        regions = [each for each in status.regions if each.steps is not None]
        there = [each for each in regions if members.get(each.name) not in _GONE] or regions
        done = None
        if not self._is_read:
            pass  # what is read so far is less than what was done
        elif there and self._spec.anywhere and len(self._spec.regions) > 1:
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
            problem=next(iter(self._reader.problems), ""),
        )

    def ask_stop(self) -> None:
        """Ask it to save and end; may be repeated.

        Raises:
            RunDirectoryError: nothing can be written there, or not in time.
            StoreError: the bucket does not answer.
        """
        self._calls.begin(self._ask_stop)()

    def ask_member(self, verb: Verb, region: str) -> None:
        """Let a region join or leave.

        Raises:
            RunDirectoryError: nothing can be written there, or not in time.
            StoreError: the bucket does not answer.
        """
        self._calls.begin(partial(self._ask_member, verb, region))()

    def _ask_stop(self) -> None:
        path = self._path()
        stop_requests.ask(path)
        pass_on(self._address(), path)

    def _ask_member(self, verb: Verb, region: str) -> None:
        path = self._path()
        ask(path, MemberRequest(verb=verb, region=region))
        pass_on(self._address(), path)

    def _opened(self) -> StatusReader | None:
        try:
            return StatusReader(self._path(), beside=self._beside)
        except RunDirectoryError:
            return None  # there is none yet, or it is being made

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
        return seen_copy(self._place) if is_s3(self._place) else Path(self._place)

    def _address(self) -> str | None:
        return self._place if is_s3(self._place) else None
