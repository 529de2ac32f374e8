"""A run that is driven: all that takes part in it, from its first event to its summary."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from geo_ray.config.experiment import Experiment
from geo_ray.errors import GeoRayError, LeaseLostError, RegionLostError
from geo_ray.job.best import BestKeeper
from geo_ray.job.build import build_evals
from geo_ray.job.eval_notes import EvalMark, EvalNotes
from geo_ray.job.plans.members import plan_of_members
from geo_ray.job.recorder import Recorder
from geo_ray.job.rundir import RunDirectory, followed_plan
from geo_ray.lease.keeper import LeaseKeeper
from geo_ray.observe.events.log import EVENTS_FILE, EventLog, detach
from geo_ray.observe.events.schema import Event
from geo_ray.observe.export.exporter import ExportOrder
from geo_ray.observe.export.open import exporting
from geo_ray.observe.export.pump import ExportPump
from geo_ray.observe.metrics.summary import Summary
from geo_ray.runtime.control import stop_requests
from geo_ray.runtime.control.actor_group import ActorGroup
from geo_ray.runtime.control.controller import Controller
from geo_ray.runtime.control.interruption import Interruption
from geo_ray.runtime.control.link_notes import LinkNotes
from geo_ray.runtime.control.membership import member_requests
from geo_ray.runtime.control.membership.member_requests import MemberRequest
from geo_ray.runtime.control.membership.plan_watch import PlanFor
from geo_ray.runtime.control.metrics import RayMetrics
from geo_ray.runtime.control.saver import Saver
from geo_ray.runtime.driver.ending import Retrying, finish
from geo_ray.runtime.driver.run_cluster import Reporting
from geo_ray.tasks.base import Task


@dataclass(frozen=True, slots=True)
class RunClock:
    """The time of a run, which goes on while its driver restarts it from a checkpoint.

    Attributes:
        origin_unix_s: time of day at which it was 0.
        startup_s: how long the first start took, which it does not count.
    """

    origin_unix_s: float
    startup_s: float


class BrokenError(Exception):
    """What a run has lost cannot be replaced while the rest of it goes on.

    Args:
        cause: what ends the run, if it does not go on from a checkpoint.
        away: regions that were asked to leave.
        clock: of the run until now.
        at_start: whether a restart has failed before it trained.
    """

    def __init__(
        self,
        cause: GeoRayError,
        away: frozenset[str],
        clock: RunClock,
        *,
        at_start: bool = False,
    ) -> None:
        super().__init__(cause.message)
        self.cause = cause
        self.away = away
        self.clock = clock
        self.at_start = at_start


@dataclass(frozen=True, slots=True)
class Stage:
    """All that takes part in a run that is driven."""

    actors: ActorGroup
    experiment: Experiment
    run: RunDirectory
    task: Task
    saver: Saver
    reporting: Reporting
    lease: LeaseKeeper

    def own_log(self) -> Path:
        """Where its events go; a driver that has it open unheard writes to none from now on."""
        path = self.run.path / EVENTS_FILE
        if self.lease.from_unknown and path.exists():
            detach(path)
        return path

    def exporting(self, origin_unix_s: float) -> AbstractContextManager[ExportPump]:
        """What hands its events on to other programs; its clock was 0 at this time of day."""
        order = ExportOrder(self.run.path, self.run.base_dir, origin_unix_s)
        return exporting(self.experiment.observe.export, order)

    def recorder(self, log: EventLog, export: ExportPump, known: Sequence[Event] = ()) -> Recorder:
        """What takes its events."""
        # Of a run in a bucket the log is this machine's; the mirror asks before it copies.
        check = self.lease.check if self.run.address is None else self.lease.check_known
        sinks = [*self.reporting.sinks, RayMetrics().feed, export.feed]
        return Recorder(log, sinks, check, known)


def evals_of(
    stage: Stage,
    recorder: Recorder,
    keeper: BestKeeper | None,
    told: frozenset[EvalMark] = frozenset(),
) -> EvalNotes:
    """What follows from its evaluations.

    Args:
        stage: the run.
        recorder: takes events.
        keeper: keeps the best model; None if nobody wants it.
        told: evaluations of which an earlier driver has taken note.
    """
    board = build_evals(stage.experiment, stage.task)
    writer = ThreadPoolExecutor(1, "best-model")
    target = stage.experiment.train.target
    return EvalNotes(board, recorder.emit, target, keeper, writer, told)


def controller_of(
    stage: Stage, recorder: Recorder, evals: EvalNotes, origin_unix_s: float
) -> Controller:
    """What watches over it.

    Args:
        stage: the run.
        recorder: takes events.
        evals: combines evaluations.
        origin_unix_s: time of day at which the run's clock was 0.
    """
    reporting, run = stage.reporting, stage.run
    return Controller(
        stage.experiment,
        stage.actors,
        recorder,
        evals,
        stage.saver,
        origin_unix_s,
        LinkNotes(run.links),
        partial(_requests, run.path, reporting.interruption),
        reporting.status,
        reporting.interruption,
        _planner(run, stage.experiment),
    )


def drive_to_end(stage: Stage, controller: Controller, startup_s: float) -> Summary:
    """Watch over a run that trains until it ends, and write what it came to."""
    reporting, origin_unix_s = stage.reporting, controller.origin_unix_s
    stage.lease.note("training")
    is_lost = False
    try:
        with interruptible(controller.interrupted):
            controller.run()
    except RegionLostError as error:
        if controller.policy.is_halting or controller.interrupted.is_set():
            raise
        clock = RunClock(origin_unix_s, startup_s)
        raise BrokenError(error, controller.members.away, clock) from error
    except LeaseLostError:
        is_lost = True
        raise
    finally:
        controller.close()
        if not is_lost:
            controller.evals.end(lambda: time.time() - origin_unix_s)
    reporting.status("writing the model and the summary")
    with interruptible(reporting.interruption):
        finished = finish(
            stage.actors,
            stage.experiment,
            stage.run,
            stage.task,
            controller.recorder,
            (startup_s, time.time() - origin_unix_s),
            Retrying(
                stage.experiment.checkpoint.retry_s,
                reporting.status,
                reporting.interruption,
                is_store_away=controller.policy.is_failing,
            ),
        )
    if finished.aside is not None:
        reporting.status(f"the model before was of more steps: it is {finished.aside.name} now")
    return finished.summary


def _planner(run: RunDirectory, experiment: Experiment) -> PlanFor | None:
    """What plans anew for those who take part; None: the run follows no plan."""
    if followed_plan(run) is None:
        return None
    return partial(plan_of_members, run, experiment)


def _requests(run: Path, interruption: Interruption) -> list[MemberRequest]:
    """What users ask of members; that they ask the run to stop is passed on."""
    if stop_requests.take(run):
        interruption.set()
    return member_requests.take(run)


@contextmanager
def interruptible(event: Interruption) -> Iterator[None]:
    """First Ctrl-C or SIGTERM: save and stop. Second: stop at once.

    What has stopped the run otherwise is no Ctrl-C: the first one after it lets it be saved, too.
    """
    has_come = False

    def on_signal(number: int, _: Any) -> None:
        nonlocal has_come
        if has_come:
            raise KeyboardInterrupt
        has_come = True
        event.set()  # and no more: the signal may have come in the middle of anything

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
