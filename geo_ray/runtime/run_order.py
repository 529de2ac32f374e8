"""Messages between a run's watchers, its supervisor and its run actor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from geo_ray.base.errors import GeoRayError, InvariantError, from_code
from geo_ray.base.user_section import context
from geo_ray.planner.plan import Plan
from geo_ray.runs.directory import RunDirectory
from geo_ray.telemetry.event_log import EventTail
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.summary import Summary

if TYPE_CHECKING:
    from geo_ray.experiment.experiment import Experiment


@dataclass(frozen=True, slots=True)
class RunClock:
    """The clock of a run; it continues while the run actor restarts the run from a checkpoint.

    Attributes:
        origin_unix_s: wall-clock time at which it was 0.
        startup_s: duration of the first start, which it excludes.
    """

    origin_unix_s: float
    startup_s: float


@dataclass(frozen=True, slots=True)
class Resumption:
    """Settings with which a run continues.

    Attributes:
        checkpoint: id of the checkpoint to continue from; None: the newest intact and healthy one.
        waits: whether the restart is automatic; then the run may pause for regions that were lost
            earlier.
        away: regions that must not take part: excluded on resume, or asked to leave since.
        begins: whether a run without a checkpoint starts from the beginning.
        cause: why the existing processes cannot be used, if there were any.
        log_bytes: size of the run's log when this was requested.
        clock: clock of the run that this run actor restarts; the restart counts as part of its
            time. None: the time without a run actor does not count.
    """

    checkpoint: int | None = None
    waits: bool = False
    away: frozenset[str] = frozenset()
    begins: bool = False
    cause: str | None = None
    log_bytes: int = 0
    clock: RunClock | None = None

    def again(self, log: EventTail) -> Resumption:
        """Return how another run actor continues after one that received this and died.

        If that run actor had not begun, nothing changes. Otherwise the run continues from the
        newest checkpoint, which may be the one it was resumed from and contain regions that must
        not take part. These stay away unless they have joined since, as do regions that were asked
        to leave since.

        Args:
            log: the run's log, read from its first event.
        """
        there: set[str] = set()
        left: set[str] = set()
        has_begun = False
        for event in log.new():
            is_new = log.read_bytes > self.log_bytes
            if event.kind in ("run_started", "run_actor_attached"):
                has_begun = has_begun or is_new
            if event.kind == "run_started":
                there = set(event["regions"])
            elif event.kind == "region_joined":
                there.add(event["region"])
            elif event.kind == "region_drained" and event["cause"] == "asked":
                there.discard(event["region"])
                if is_new:
                    left.add(event["region"])
        if not has_begun:
            return self
        return Resumption(away=(self.away | left).difference(there), begins=self.begins)

    def end_noted(self, log: EventTail) -> RunEnd | None:
        """Return how the run has ended since this was requested; None: its log does not say.

        Args:
            log: the run's log, read from its first event.
        """
        return noted_end(event for event in log.new() if log.read_bytes > self.log_bytes)


@dataclass(frozen=True, slots=True)
class RunOrder:
    """A run to execute.

    Attributes:
        experiment_json: its configuration; only the run actor parses it, as it may name user
            classes.
        run: its directory.
        resume: as for `geo_ray.runtime.main.run`.
        began_unix_s: wall-clock time of the user's command.
        cwd: working directory of that command.
        path: module search path of that command.
        unattended_s: a run without a watcher for this long is saved and ended; None: never.
        adopts: whether the configuration differs from the one in the directory.
        plan: plan to follow from now on, if it differs from the previous one.
    """

    experiment_json: str
    run: RunDirectory
    resume: Resumption | None
    began_unix_s: float
    cwd: str
    path: tuple[str, ...]
    unattended_s: float | None
    adopts: bool = False
    plan: Plan | None = None

    @property
    def experiment(self) -> Experiment:
        """Return the parsed configuration."""
        # A local import: it loads PyTorch, which the supervisor of the run does not need.
        from geo_ray.experiment.experiment import Experiment

        given = context(self.run.base_dir)
        return Experiment.model_validate_json(self.experiment_json, context=given)


@dataclass(frozen=True, slots=True)
class StartWait:
    """A wait of the start-up that is in progress.

    Attributes:
        phase: the current phase.
        done: number of ``total`` that are ready.
        total: number that must become ready.
        names: names of those that are awaited.
    """

    phase: str
    done: int
    total: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UserRequests:
    """Requests of the run's users, forwarded by the supervisor.

    Attributes:
        stop: save a checkpoint and end the run with this error.
        end: end the run immediately with this error.
    """

    stop: GeoRayError | None = None
    end: BaseException | None = None


@dataclass(frozen=True, slots=True)
class RunEnd:
    """Result of a run: its summary, or the error that ended it early."""

    summary: Summary | None
    error: BaseException | None = None

    def result(self) -> Summary:
        """Return the summary, or raise what ended the run early."""
        if self.error is not None:
            raise self.error
        if self.summary is None:
            raise InvariantError("a run ended without a summary and without an error")
        return self.summary


def noted_end(events: Iterable[Event]) -> RunEnd | None:
    """Return how a run has ended; None: its newest event does not say."""
    newest = None
    for newest in events:  # noqa: B007 - the last one counts
        pass
    if newest is None:
        return None
    if newest.kind == "run_finished":
        return RunEnd(Summary.model_validate(newest["summary"]))
    if newest.kind == "run_failed":
        return RunEnd(None, from_code(newest["code"], newest["message"], newest["fix"]))
    return None
