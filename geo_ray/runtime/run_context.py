"""What a run consists of while it trains, and how it is resumed; see `geo_ray.runtime.main`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ray.util.metrics import Counter, Gauge

from geo_ray.base.errors import GeoRayError
from geo_ray.data.tasks.base import Task
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs import requests
from geo_ray.runs.build import build_evals
from geo_ray.runs.directory import RunDirectory, followed_plan, lease_of
from geo_ray.runs.evaluation import BestKeeper, EvalMark, EvalNotes
from geo_ray.runs.lease import LeaseKeeper, driving, seeker_of
from geo_ray.runs.recorder import Recorder
from geo_ray.runs.replanning import plan_of_members
from geo_ray.runs.report import reported
from geo_ray.runs.requests import Interruption, MemberRequest
from geo_ray.runs.uploader import uploading
from geo_ray.runtime.actor_group import ActorGroup
from geo_ray.runtime.checkpoints import Saver
from geo_ray.runtime.controller import Controller
from geo_ray.runtime.launcher import ProcessLauncher
from geo_ray.runtime.replanning import LinkNotes, PlanFor
from geo_ray.runtime.run_order import RunClock
from geo_ray.telemetry.event_log import EVENTS_FILE, EventLog, detach
from geo_ray.telemetry.events import Event, RunObserver
from geo_ray.telemetry.export.base import ExportOrder
from geo_ray.telemetry.export.exporters import ExportQueue, exporting
from geo_ray.telemetry.metrics import METRICS, MetricsState


class RayMetrics:
    """Folds events into metric values and hands each change to Ray."""

    def __init__(self) -> None:
        self._state = MetricsState()
        self._specs = {spec.name: spec for spec in METRICS}
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}

    def feed(self, event: Event) -> None:
        """Take the next event of the run."""
        for reading in self._state.feed(event):
            spec = self._specs[reading.name]
            tags = dict(zip(spec.tag_keys, reading.tags, strict=True))
            arguments = (spec.name, spec.description, spec.tag_keys)
            if spec.kind == "counter":
                counter = self._counters.get(spec.name) or Counter(*arguments)
                self._counters[spec.name] = counter
                counter.inc(reading.increase, tags)
            else:
                gauge = self._gauges.get(spec.name) or Gauge(*arguments)
                self._gauges[spec.name] = gauge
                gauge.set(reading.value, tags)


@dataclass(frozen=True, slots=True)
class Reporting:
    """Who receives a run's progress, and may interrupt it.

    Attributes:
        observer: receives phases and events.
        began_unix_s: time of day of the user's command.
        interruption: set to have the run saved and ended.
    """

    observer: RunObserver
    began_unix_s: float
    interruption: Interruption = field(default_factory=Interruption)

    def status(self, text: str) -> None:
        """Report the phase that begins."""
        self.observer.status(text)

    def noted_in(self, lease: LeaseKeeper) -> Reporting:
        """Return the same, with phases also written into the lease, for `geo-ray status`."""
        return replace(self, observer=_NotedInLease(self.observer, lease))


class _NotedInLease(RunObserver):
    """Passes everything on and writes phases into the lease of the run."""

    def __init__(self, observer: RunObserver, lease: LeaseKeeper) -> None:
        self._observer, self._lease = observer, lease

    def status(self, text: str) -> None:
        self._lease.note(text or "training")
        self._observer.status(text)

    def awaiting(self, phase: str, done: int, total: int, names: Sequence[str]) -> None:
        self._observer.awaiting(phase, done, total, names)

    def on_event(self, event: Event) -> None:
        self._observer.on_event(event)


@contextmanager
def held(run: RunDirectory, reporting: Reporting, retry_s: float) -> Iterator[LeaseKeeper]:
    """Hold the lease of a run in the block; then write its report and copy it to its bucket.

    Args:
        run: its directory.
        reporting: told of waits.
        retry_s: how long a bucket that is away is tried again at the end.

    Raises:
        RunHeldError, StoreError, RunDirectoryError: as for `driving` and `uploading`.
    """
    tell = reporting.observer.status
    with (
        driving(seeker_of(run.path, tell, lease_of(run))) as lease,
        uploading(run.address, run.path, lease.epoch, lease.check, retry_s=retry_s, notify=tell),
        reported(run.path),
    ):
        yield lease


@dataclass(frozen=True, slots=True)
class RunSetup:
    """A run that this process drives, whether its processes are there or not.

    Attributes:
        experiment: its configuration.
        run: its directory.
        reporting: receives its progress.
        launcher: owns its processes, places and keys.
        lease: the run's, which is held.
    """

    experiment: Experiment
    run: RunDirectory
    reporting: Reporting
    launcher: ProcessLauncher
    lease: LeaseKeeper


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
class RunContext:
    """All that takes part in a run that is driven."""

    actors: ActorGroup
    experiment: Experiment
    run: RunDirectory
    task: Task
    saver: Saver
    reporting: Reporting
    lease: LeaseKeeper

    def own_log(self) -> Path:
        """Where its events go; a run actor that has it open unheard writes to none from now on."""
        path = self.run.path / EVENTS_FILE
        if self.lease.from_unknown and path.exists():
            detach(path)
        return path

    def close(self) -> None:
        """Finish writing checkpoints, end the actors and take in no more parts."""
        self.saver.close()
        self.actors.close()
        if self.actors.upload_server is not None:
            self.actors.upload_server.close()

    def exporting(self, origin_unix_s: float) -> AbstractContextManager[ExportQueue]:
        """What hands its events on to other programs; its clock was 0 at this time of day."""
        order = ExportOrder(self.run.path, self.run.base_dir, origin_unix_s)
        return exporting(self.experiment.observe.export, order)

    def recorder(self, log: EventLog, export: ExportQueue, known: Sequence[Event] = ()) -> Recorder:
        """What takes its events."""
        # Of a run in a bucket the log is this machine's; the uploader asks before it copies.
        check = self.lease.check if self.run.address is None else self.lease.check_known
        sinks = [self.reporting.observer.on_event, RayMetrics().feed, export.feed]
        return Recorder(log, sinks, check, known)


def evals_of(
    context: RunContext,
    recorder: Recorder,
    keeper: BestKeeper | None,
    noted: frozenset[EvalMark] = frozenset(),
) -> EvalNotes:
    """What follows from its evaluations.

    Args:
        context: the run.
        recorder: takes events.
        keeper: keeps the best model; None if nobody wants it.
        noted: evaluations of which an earlier run actor has taken note.
    """
    collector = build_evals(context.experiment, context.task)
    writer = ThreadPoolExecutor(1, "best-model")
    target = context.experiment.train.target
    return EvalNotes(collector, recorder.emit, target, keeper, writer, noted)


def controller_of(
    context: RunContext, recorder: Recorder, evals: EvalNotes, origin_unix_s: float
) -> Controller:
    """What watches over it.

    Args:
        context: the run.
        recorder: takes events.
        evals: combines evaluations.
        origin_unix_s: time of day at which the run's clock was 0.
    """
    reporting, run = context.reporting, context.run
    return Controller(
        context.experiment,
        context.actors,
        recorder,
        evals,
        context.saver,
        origin_unix_s,
        LinkNotes(run.links),
        partial(_requests, run.path, reporting.interruption),
        reporting.observer.status,
        reporting.interruption,
        _planner(run, context.experiment),
    )


@dataclass(frozen=True, slots=True)
class Training:
    """A run whose processes train.

    Attributes:
        context: the run.
        controller: watches over it.
        startup_s: how long the first start took, which the run's clock does not count.
    """

    context: RunContext
    controller: Controller
    startup_s: float

    @property
    def clock(self) -> RunClock:
        """The run's clock."""
        return RunClock(self.controller.origin_unix_s, self.startup_s)


def _planner(run: RunDirectory, experiment: Experiment) -> PlanFor | None:
    """What plans anew for those who take part; None: the run follows no plan."""
    if followed_plan(run) is None:
        return None
    return partial(plan_of_members, run, experiment)


def _requests(run: Path, interruption: Interruption) -> list[MemberRequest]:
    """What users ask of members; that they ask the run to stop is passed on."""
    if requests.take_stop_request(run):
        interruption.set()
    return requests.take_member_requests(run)
