"""What a run's watchers, its supervisor and its run actor say to each other."""

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
    """The time of a run, which goes on while its run actor restarts it from a checkpoint.

    Attributes:
        origin_unix_s: time of day at which it was 0.
        startup_s: how long the first start took, which it does not count.
    """

    origin_unix_s: float
    startup_s: float


@dataclass(frozen=True, slots=True)
class Resumption:
    """Go on with a run.

    Attributes:
        checkpoint: id of the one to go on from; None: the newest that is whole and healthy.
        waits: whether the run goes on by itself, and so pauses for regions that were lost before it
            where it pauses for any.
        away: regions that are not to take part: who resumes says so, or they were asked to leave
            since.
        begins: whether a run that never saved starts from the beginning.
        cause: why the processes that the run had do not go on, if they might have.
        log_bytes: what the run's log had when this was asked for.
        clock: of the run that this run actor restarts. The restart counts as part of its time;
            None: the time without a run actor does not count.
    """

    checkpoint: int | None = None
    waits: bool = False
    away: frozenset[str] = frozenset()
    begins: bool = False
    cause: str | None = None
    log_bytes: int = 0
    clock: RunClock | None = None

    def again(self, log: EventTail) -> Resumption:
        """How another run actor goes on after one that was told this and is gone.

        As it was told, if that one had not come to begin. Else from the newest checkpoint; it may
        be the one that was gone on from, which has the state of regions that are not to take part.
        They stay away, but for those that have come since; so do those that were asked to leave
        since.

        Args:
            log: the run's, read from its first event on.
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
        """How the run has ended since this was asked for; None: its log does not say.

        Args:
            log: the run's, read from its first event on.
        """
        return noted_end(event for event in log.new() if log.read_bytes > self.log_bytes)


@dataclass(frozen=True, slots=True)
class RunOrder:
    """A run to be driven to its end.

    Attributes:
        experiment_json: its configuration; only the run actor reads it, as it may name classes of
            the user's.
        run: its directory.
        resume: as for `geo_ray.runtime.main.run`.
        began_unix_s: time of day of the user's command.
        cwd: working directory of that command.
        path: where that command looks for modules.
        unattended_s: a run that nobody watches for so long is saved and ended; None: never.
        adopts: whether the configuration differs from that in the directory.
        plan: to follow from now on, if it differs from the one before.
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
        """The configuration as a tree."""
        # Imported here: it imports PyTorch, which the supervisor of the run does not need.
        from geo_ray.experiment.experiment import Experiment

        given = context(self.run.base_dir)
        return Experiment.model_validate_json(self.experiment_json, context=given)


@dataclass(frozen=True, slots=True)
class StartWait:
    """A wait of the start-up that is in progress.

    Attributes:
        phase: what is done.
        done: how many of ``total`` are there.
        total: how many there will be.
        names: of those that are awaited.
    """

    phase: str
    done: int
    total: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UserRequests:
    """What the users of a run have asked for, as the supervisor passes it on.

    Attributes:
        stop: save a checkpoint and end with this error.
        end: end at once, with this error.
    """

    stop: GeoRayError | None = None
    end: BaseException | None = None


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run has ended: with a summary, or early with an error."""

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
    """How a run has ended; None: its newest event does not say."""
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
