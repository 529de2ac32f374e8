"""The parts of a run while it trains, and how it is resumed; see `geo_ray.runtime.main`."""

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
from geo_ray.runs.directory import RunDirectory, followed_plan, hyperparameters, lease_of
from geo_ray.runs.evaluation import BestKeeper, EvalMark, EvalNotes, StoppingRule
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
from geo_ray.telemetry.event_log import EVENTS_FILE, EventLog, detach, read_events
from geo_ray.telemetry.events import Event, RunObserver
from geo_ray.telemetry.export.base import ExportOrder
from geo_ray.telemetry.export.exporters import ExportQueue, exporting
from geo_ray.telemetry.metrics import METRICS, MetricsState


class RayMetrics:
    """Converts events to metric values and passes each change to Ray."""

    def __init__(self) -> None:
        self._state = MetricsState()
        self._specs = {spec.name: spec for spec in METRICS}
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}

    def feed(self, event: Event) -> None:
        """Process the next event of the run."""
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
    """Callbacks that receive a run's progress and may interrupt it.

    Attributes:
        observer: receives phases and events.
        began_unix_s: wall-clock time of the user's command.
        interruption: set to save and end the run.
    """

    observer: RunObserver
    began_unix_s: float
    interruption: Interruption = field(default_factory=Interruption)

    def status(self, text: str) -> None:
        """Report the start of a phase."""
        self.observer.status(text)

    def noted_in(self, lease: LeaseKeeper) -> Reporting:
        """Return a copy that also writes phases into the lease, for `geo-ray status`."""
        return replace(self, observer=_NotedInLease(self.observer, lease))


class _NotedInLease(RunObserver):
    """Forwards everything and also writes phases into the lease of the run."""

    def __init__(self, observer: RunObserver, lease: LeaseKeeper) -> None:
        self._observer, self._lease = observer, lease

    def status(self, text: str) -> None:
        self._lease.note(text or "training")
        self._observer.status(text)

    def awaiting(self, phase: str, done: int, total: int, names: Sequence[str]) -> None:
        self._observer.awaiting(phase, done, total, names)

    def on_event(self, event: Event) -> None:
        self._observer.on_event(event)

    def check(self) -> None:
        self._observer.check()


@contextmanager
def held(run: RunDirectory, reporting: Reporting, retry_s: float) -> Iterator[LeaseKeeper]:
    """Hold the lease of a run in the block; then write its report and copy it to its bucket.

    Args:
        run: its directory.
        reporting: receives notes on waits.
        retry_s: how long the final upload to an unreachable bucket is retried.

    Raises:
        RunHeldError, StoreError, RunDirectoryError: as for `driving` and `uploading`.
    """
    tell = reporting.observer.status
    with (
        driving(seeker_of(run.path, tell, lease_of(run))) as lease,
        uploading(run.address, run.path, lease.token, lease.check, retry_s=retry_s, notify=tell),
        reported(run.path),
    ):
        yield lease


@dataclass(frozen=True, slots=True)
class RunSetup:
    """A run that this process drives, before or after its processes have started.

    Attributes:
        experiment: its configuration.
        run: its directory.
        reporting: receives its progress.
        launcher: owns its processes, places and keys.
        lease: the run's lease, held by this process.
    """

    experiment: Experiment
    run: RunDirectory
    reporting: Reporting
    launcher: ProcessLauncher
    lease: LeaseKeeper


class BrokenError(Exception):
    """The run has lost something that cannot be replaced while the rest continues.

    Args:
        cause: the error that ends the run if it cannot restart from a checkpoint.
        away: regions that were asked to leave.
        clock: the run's clock so far.
        at_start: whether a restart failed before training.
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
    """The resources of a run: actors, places, lease, directory and stores."""

    actors: ActorGroup
    experiment: Experiment
    run: RunDirectory
    task: Task
    saver: Saver
    reporting: Reporting
    lease: LeaseKeeper

    def own_log(self) -> Path:
        """Return the event log, detached from a superseded run actor that has it open."""
        path = self.run.path / EVENTS_FILE
        if self.lease.from_unknown and path.exists():
            detach(path)
        return path

    def close(self) -> None:
        """Finish writing checkpoints, end the actors and stop accepting uploads."""
        self.saver.close()
        self.actors.close()
        if self.actors.upload_server is not None:
            self.actors.upload_server.close()

    def exporting(self, origin_unix_s: float) -> AbstractContextManager[ExportQueue]:
        """Return the queue that exports events to other programs; its clock starts at this time."""
        order = ExportOrder(
            self.run.path, self.run.base_dir, origin_unix_s, hyperparameters(self.run.path)
        )
        return exporting(self.experiment.observe.export, order)

    def recorder(self, log: EventLog, export: ExportQueue, known: Sequence[Event] = ()) -> Recorder:
        """Return the recorder of the run's events."""
        # For a run in a bucket the log is local; the uploader checks the lease before it copies.
        check = self.lease.check if self.run.address is None else self.lease.check_known
        sinks = [self.reporting.observer.on_event, RayMetrics().feed, export.feed]
        return Recorder(log, sinks, check, known)


def evals_of(
    context: RunContext,
    recorder: Recorder,
    keeper: BestKeeper | None,
    noted: frozenset[EvalMark] = frozenset(),
    log: Path | None = None,
) -> EvalNotes:
    """Return the handler of the run's evaluations.

    Args:
        context: the run.
        recorder: receives events.
        keeper: stores the best model; None: not configured.
        noted: evaluations that an earlier run actor has already recorded.
        log: log with the run's earlier events; None: there are none.
    """
    collector = build_evals(context.experiment, context.task)
    writer = ThreadPoolExecutor(1, "best-model")
    known = () if log is None or not log.exists() else read_events(log)
    stopping = StoppingRule(context.experiment.train, known)
    return EvalNotes(collector, recorder.emit, stopping, keeper, writer, noted)


def controller_of(
    context: RunContext, recorder: Recorder, evals: EvalNotes, origin_unix_s: float
) -> Controller:
    """Return the controller of the run.

    Args:
        context: the run.
        recorder: receives events.
        evals: combines evaluations.
        origin_unix_s: wall-clock time at which the run's clock was 0.
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
        planner_of(run, context.experiment),
    )


@dataclass(frozen=True, slots=True)
class Training:
    """A run whose processes are training.

    Attributes:
        context: the run.
        controller: controls it.
        startup_s: duration of the first start, which the run's clock excludes.
    """

    context: RunContext
    controller: Controller
    startup_s: float

    @property
    def clock(self) -> RunClock:
        """The run's clock."""
        return RunClock(self.controller.origin_unix_s, self.startup_s)


def planner_of(run: RunDirectory, experiment: Experiment) -> PlanFor | None:
    """Return the planner for changed members; None: the run follows no plan."""
    if followed_plan(run) is None:
        return None
    return partial(plan_of_members, run, experiment)


def _requests(run: Path, interruption: Interruption) -> list[MemberRequest]:
    """Return the pending membership requests; a stop request sets the interruption."""
    if requests.take_stop_request(run):
        interruption.set()
    return requests.take_member_requests(run)
