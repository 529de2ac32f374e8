"""Context of a driven run, from its first event to its summary, and the order of its shutdown.

Shutdown: 1. `Controller.close` ends all other threads that call Ray; 2. `finish` writes the
model of a finished run; 3. it writes the summary and ``run_finished`` (`note_failure`:
``run_failed``); 4. actors, places and a cluster of its own end; 5. the report is written; 6.
the rest is copied to the bucket and the lease is released. Every step replaces what it writes
as a whole, so a crash between two loses nothing.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from ray.util.metrics import Counter, Gauge
from torch import Tensor

from geo_ray.base.errors import (
    CheckpointConflictError,
    GeoRayError,
    InvariantError,
    LeaseLostError,
    RegionLostError,
    RunDirectoryError,
    StoreError,
)
from geo_ray.data.tasks.base import Task
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.calls import Handle, collect
from geo_ray.runs import requests
from geo_ray.runs import requests as member_requests
from geo_ray.runs.build import build_evals
from geo_ray.runs.checkpoints import places_of
from geo_ray.runs.directory import RunDirectory, followed_plan
from geo_ray.runs.evaluation import BestKeeper, EvalMark, EvalNotes
from geo_ray.runs.lease import LeaseKeeper
from geo_ray.runs.model_file import about_model, keep_longer, save_trained
from geo_ray.runs.recorder import Recorder
from geo_ray.runs.replanning import plan_of_members
from geo_ray.runs.report import account
from geo_ray.runs.requests import Interruption, MemberRequest
from geo_ray.runtime.actor_group import ActorGroup
from geo_ray.runtime.checkpoints import Saver
from geo_ray.runtime.controller import Controller
from geo_ray.runtime.driver.run_cluster import Reporting
from geo_ray.runtime.replanning import LinkNotes, PlanFor
from geo_ray.storage.folders import Folder
from geo_ray.storage.parts import read_part
from geo_ray.storage.places import CheckpointPlaces
from geo_ray.telemetry.event_log import EVENTS_FILE, EventLog, detach, read_events
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.export.base import ExportOrder
from geo_ray.telemetry.export.exporters import ExportPump, exporting
from geo_ray.telemetry.metrics import METRICS, MetricsState
from geo_ray.telemetry.summary import Summary, Summing, save_summary


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


_WRITE_S: Final = 180.0
_MOST_PAUSE_S: Final = 30.0
_PIECE_BYTES: Final = 32 << 20
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """The end of a run: its summary, and where a model of more steps is that was there before."""

    summary: Summary
    aside: Path | None


@dataclass(frozen=True, slots=True)
class Retrying:
    """How long the end of a run is tried again where a store or a disk takes nothing.

    Attributes:
        seconds: for each step.
        status: told why it takes so long.
        interruption: set if the user does not want to wait.
        is_store_away: whether the last checkpoint could not be saved: then the store is left out.
    """

    seconds: float
    status: Callable[[str], None]
    interruption: Interruption
    is_store_away: bool = False

    def until_done(self, what: str, step: Callable[[], T]) -> T:
        """Carry out a step that may be repeated, until it succeeds.

        Raises:
            StoreError, RunDirectoryError: it did not succeed in time, or before an interruption.
        """
        ends_s, pause_s = time.monotonic() + self.seconds, 1.0
        while True:
            try:
                return step()
            except (StoreError, RunDirectoryError) as error:
                left_s = ends_s - time.monotonic()
                if left_s <= 0 or self.interruption.is_set():
                    raise
                self.status(f"{what} is tried again for {left_s:.0f} s: {error.message}")
                self.interruption.wait(min(pause_s, left_s))
                pause_s = min(2 * pause_s, _MOST_PAUSE_S)


def finish(
    actors: ActorGroup,
    experiment: Experiment,
    run: RunDirectory,
    task: Task,
    recorder: Recorder,
    times_s: tuple[float, float],
    retrying: Retrying,
) -> FinishedRun:
    """Have the model written, and write the summary.

    The model comes through the store, if the run has one. If that does not take it in time, the
    driver takes it from the server of the averager's region, so the run's directory has it.

    Args:
        actors: of the run.
        experiment: the run.
        run: its directory.
        task: gives the module.
        recorder: takes the last event.
        times_s: how long the start took, and the present time by the run's clock.
        retrying: for how long a store or a disk is tried again.

    Raises:
        GeoRayError: whatever keeps them from being written.
    """
    startup_s, now_s = times_s
    actors.dismiss_workers()
    tensors, digests = _final_model(actors, places_of(run, experiment.checkpoint), run, retrying)
    if actors.desk is not None:  # the model has come over it
        for (src, dst), count in actors.desk.crossed().items():
            recorder.emit("wan", now_s, src=src, dst=dst, bytes_by_class={"checkpoint": count})
    summing = Summing(experiment.train.target)
    for event in read_events(run.path / EVENTS_FILE):
        summing.feed(event)
    usd = account(run, summing.totals)
    summary = summing.summary(startup_s=startup_s, usd=usd, digest=digests[actors.home.region])
    about = about_model(experiment, summary.steps, summary.eval)
    recorder.check()
    aside = retrying.until_done("the model", lambda: keep_longer(run.model, summary.steps))

    def save() -> None:
        params_P, carried_B = tensors["params"], tensors.get("carried")
        save_trained(task, experiment.seed, params_P, run.model, about, carried_B)
        save_summary(summary, run.path)

    retrying.until_done("writing the model", save)
    recorder.emit(  # last: a run that has this event is not resumed
        "run_finished", now_s, summary=summary.model_dump(), digests=digests
    )
    return FinishedRun(summary, aside)


def _final_model(
    actors: ActorGroup, places: CheckpointPlaces, run: RunDirectory, retrying: Retrying
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Give the vectors of the final model, and the digest of the parameters of each region."""
    home = actors.home.region
    others = {r: p.write_model.remote(False) for r, p in actors.primaries.items() if r != home}
    digests = {r: str(value) for r, (_, value) in collect(others, _WRITE_S).items()}
    primary = actors.primaries[home]
    if not (places.far and retrying.is_store_away):
        folder = places.model_folder(str(run.path))
        try:
            found = retrying.until_done("the model", partial(_through, primary, folder, places))
            return found[0], digests | {home: found[1]}
        except (StoreError, RunDirectoryError) as error:
            retrying.status(f"{error.message}: taking the model from region '{home}' itself")
    sizes, digest = collect({0: primary.model_bytes.remote()}, _WRITE_S)[0]
    tensors = {}
    for name, num_bytes in sizes.items():
        tensors[name] = torch.empty(num_bytes, dtype=torch.uint8)
        for start in range(0, num_bytes, _PIECE_BYTES):
            stop = min(num_bytes, start + _PIECE_BYTES)
            piece = collect({0: primary.model_piece.remote(name, start, stop)}, _WRITE_S)[0]
            tensors[name][start:stop] = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
    tensors["params"] = tensors["params"].view(torch.float32)
    return tensors, digests | {home: str(digest)}


def _through(
    primary: Handle, folder: Folder, places: CheckpointPlaces
) -> tuple[dict[str, Tensor], str]:
    """Have the model written to a folder, and read it there."""
    if places.far:
        places.beside("model").clear()  # of an end before this one that was not come to
    try:
        part, digest = collect({0: primary.write_model.remote(True)}, _WRITE_S)[0]
    except (RegionLostError, CheckpointConflictError) as error:  # an earlier attempt comes late
        if not places.far:
            raise
        raise StoreError(f"{places} does not take the model: {error.message}") from error
    if part is None:
        raise InvariantError("the averager's region wrote no model")
    tensors, _ = read_part(folder, part)
    with suppress(StoreError):
        folder.remove([part.file])
    return tensors, str(digest)


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
        raise BrokenError(error, controller.members.regions.away, clock) from error
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
    if requests.take_stop_request(run):
        interruption.set()
    return member_requests.take_member_requests(run)


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
