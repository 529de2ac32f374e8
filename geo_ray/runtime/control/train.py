"""One run from a configuration to a summary, on real actors."""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from geo_ray.checkpoint.manifest import PartInfo
from geo_ray.checkpoint.parts import read_part
from geo_ray.checkpoint.places import CheckpointPlaces
from geo_ray.checkpoint.store import Checkpoint, CheckpointStore
from geo_ray.config.experiment import Experiment
from geo_ray.config.load import digest
from geo_ray.errors import CheckpointError, InvariantError, LeaseLostError, RegionLostError
from geo_ray.job.account import account
from geo_ray.job.best import BestKeeper
from geo_ray.job.build import build_evals, check_absent, check_start, model_outline, use_one_thread
from geo_ray.job.checkpoints import check_unused, places_of
from geo_ray.job.codec_shapes import with_shapes
from geo_ray.job.data import data_rows, prepare_manifest
from geo_ray.job.eval_notes import EvalNotes
from geo_ray.job.far.mirror import mirrored
from geo_ray.job.model_file import about_model, keep_longer, save_trained
from geo_ray.job.plans.members import plan_of_members
from geo_ray.job.recorder import Recorder, Sink
from geo_ray.job.rundir import RunDirectory, followed_plan, lease_of
from geo_ray.job.start.evaluation import check_evaluation
from geo_ray.job.start.notes import warn_at_start
from geo_ray.lease.driving import driving, seeker_of
from geo_ray.lease.keeper import LeaseKeeper
from geo_ray.lease.seek import LeaseSeeker
from geo_ray.observe.events.log import EVENTS_FILE, EventLog, detach, last_time_s, read_events
from geo_ray.observe.metrics.summary import Summary, Summing, save_summary
from geo_ray.observe.report.ending import LOGS, note_failure
from geo_ray.runtime.actors.spec import Resume, RunSpec
from geo_ray.runtime.cluster.connect import ConnectedCluster, connect
from geo_ray.runtime.cluster.demand import by_label
from geo_ray.runtime.cluster.head_watch import watched_head
from geo_ray.runtime.cluster.logs import keep_logs
from geo_ray.runtime.cluster.placement import PlacedRegion, place, remove
from geo_ray.runtime.cluster.preflight import preflight
from geo_ray.runtime.control import stop_requests
from geo_ray.runtime.control.actor_group import ActorGroup, Tell, collect, tell_nobody
from geo_ray.runtime.control.controller import Controller
from geo_ray.runtime.control.demands import demand_of, demands_of
from geo_ray.runtime.control.health import LossHealth
from geo_ray.runtime.control.interruption import Interruption
from geo_ray.runtime.control.link_notes import LinkNotes
from geo_ray.runtime.control.membership import member_requests
from geo_ray.runtime.control.membership.member_requests import MemberRequest
from geo_ray.runtime.control.membership.plan_watch import PlanFor
from geo_ray.runtime.control.metrics import RayMetrics
from geo_ray.runtime.control.restarts import Restarts
from geo_ray.runtime.control.run_keys import RunKeys
from geo_ray.runtime.control.saver import Saver, without_lost
from geo_ray.tasks.base import Task
from geo_ray.tasks.load import load_task

_PLACE_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Resumption:
    """Go on with a run.

    Attributes:
        checkpoint: id of the one to go on from; None: the newest that is whole and healthy.
    """

    checkpoint: int | None = None


@dataclass(frozen=True, slots=True)
class Reporting:
    """Who wants to know.

    Attributes:
        status: told each phase of start-up and end.
        sinks: given every event.
        began_unix_s: time of day of the user's command.
        awaiting: told again and again who is awaited in a phase of the start-up.
        interruption: set to have the run saved and ended.
    """

    status: Callable[[str], None]
    sinks: Sequence[Sink]
    began_unix_s: float
    awaiting: Tell = tell_nobody
    interruption: Interruption = field(default_factory=Interruption)


def cluster_of(
    experiment: Experiment, status: Callable[[str], None]
) -> AbstractContextManager[ConnectedCluster]:
    """The cluster of a run, as `connect` makes it: large enough for all that the run asks for."""
    demands = by_label([demand_of(experiment, region) for region in experiment.regions])
    status("starting the cluster" if experiment.cluster.kind == "local" else "connecting")
    return connect(
        experiment.cluster,
        experiment.labels,
        namespace=f"geo_ray-{experiment.name}",
        cpus_per_region=max(demand.total().get("CPU", 0.0) for demand in demands),
    )


def train(
    experiment: Experiment,
    run: RunDirectory,
    reporting: Reporting,
    *,
    resume: Resumption | None = None,
    stands: ConnectedCluster | None = None,
    seeker: LeaseSeeker | None = None,
    placed: Mapping[str, PlacedRegion] | None = None,
) -> Summary:
    """Run the experiment to its end.

    Args:
        experiment: what to do.
        run: its directory, made or reopened.
        reporting: who wants to know.
        resume: which checkpoint of ``run`` to go on from; None: begin.
        stands: a cluster to run on and leave as it is; None: as the configuration says.
        seeker: of the run's lease, if it was waited for already.
        placed: places that somebody has reserved for it, and gives back; None: it reserves them.

    Raises:
        GeoRayError: whatever ends the run early; the class says what.
    """
    limit = experiment.checkpoint.restarts
    restarts = Restarts(limit, experiment.train.restart_window_s, "checkpoint.restarts")
    with (
        driving(seeker or seeker_of(run.path, reporting.status, lease_of(run))) as held,
        mirrored(run.address, run.path, held.epoch, held.check),
        ExitStack() as stack,
    ):
        told = replace(reporting, status=_noting(held, reporting.status))
        cluster = _Cluster(experiment, told, stack, stands)
        while True:
            try:
                return _train(experiment, run, told, resume, cluster, held, placed)
            except _BrokenError as broken:
                if not _can_restart(experiment, run, broken.cause, told.status, restarts):
                    note_failure(run.path, broken.cause, told.began_unix_s)
                    raise broken.cause from None
            resume = Resumption()
            told = replace(told, began_unix_s=time.time())


class _BrokenError(Exception):
    """What a run has lost cannot be replaced while the rest of it goes on.

    Args:
        cause: what ends the run, if it does not go on from a checkpoint.
    """

    def __init__(self, cause: RegionLostError) -> None:
        super().__init__(cause.message)
        self.cause = cause


@dataclass(slots=True)
class _Cluster:
    """The cluster of a run: there once it is asked for, and until the run has ended.

    Attributes:
        experiment: the run.
        reporting: hears that it starts, and that its head is gone.
        stack: ends it.
        stands: one that is there already.
        is_watched: whether its head is.
    """

    experiment: Experiment
    reporting: Reporting
    stack: ExitStack
    stands: ConnectedCluster | None
    is_watched: bool = False

    def get(self) -> ConnectedCluster:
        """The cluster; it is started if it is not there."""
        if self.stands is None:
            start = cluster_of(self.experiment, self.reporting.status)
            self.stands = self.stack.enter_context(start)
        if not self.is_watched:
            self.is_watched = True
            lost = self.reporting.interruption.set
            self.stack.enter_context(watched_head(self.stands.address, lost))
        return self.stands


def _can_restart(
    experiment: Experiment,
    run: RunDirectory,
    cause: RegionLostError,
    status: Callable[[str], None],
    restarts: Restarts,
) -> bool:
    """Whether a run goes on from its newest checkpoint."""
    store = CheckpointStore(places_of(run, experiment).root(), experiment.checkpoint.keep)
    try:
        store.latest()
    except CheckpointError:
        return False
    if not restarts.take(time.monotonic()):
        return False
    status(f"{cause.message}: the run goes on from its newest checkpoint")
    return True


def _noting(lease: LeaseKeeper, status: Callable[[str], None]) -> Callable[[str], None]:
    """Tell a phase to the user, and to who looks at the run's lease."""

    def told(text: str) -> None:
        lease.note(text or "training")
        status(text)

    return told


def _train(
    experiment: Experiment,
    run: RunDirectory,
    reporting: Reporting,
    resume: Resumption | None,
    cluster: _Cluster,
    lease: LeaseKeeper,
    reserved: Mapping[str, PlacedRegion] | None,
) -> Summary:
    use_one_thread()
    followed_plan(run)  # what is wrong with it is told now, not at the end
    places = places_of(run, experiment)
    store = CheckpointStore(places.root(), experiment.checkpoint.keep, writing=lease.writing)
    if resume is None:
        check_unused(store)
    check_absent(experiment)
    found = None if resume is None else _find_checkpoint(store, resume, reporting)
    if found is not None:
        experiment, lost = without_lost(experiment, {part.name for part in found.manifest.parts})
        if lost:
            reporting.status(
                f"going on without {', '.join(lost)}: lost before checkpoint {found.manifest.id}"
            )
    reporting.status("preparing task and data")
    task = load_task(experiment.task, run.base_dir)
    outline = model_outline(task, experiment.seed)
    check_start(experiment, outline)
    manifest, address = prepare_manifest(
        experiment, task, run.base_dir, run.data, goes_on=found is not None
    )
    check_evaluation(experiment, task, manifest)
    warn_at_start(experiment, manifest, simulated=False)
    demands = demands_of(experiment)
    local = cluster.get().local
    reporting.status("checking the cluster and placing processes")
    if reserved is None:
        preflight(demands, ask_nodes=experiment.cluster.kind != "local")
    placed = place(demands, _PLACE_TIMEOUT_S) if reserved is None else dict(reserved)
    try:
        spec = RunSpec(
            experiment_json=with_shapes(experiment, task).model_dump_json(),
            base_dir=str(run.base_dir),
            driver_dir=str(Path.cwd()),
            manifest_address=address,
            run_id=f"{experiment.name}-{secrets.token_hex(4)}",
            run_dir=str(run.path),
            places=places,
            num_params=outline.num_params,
            epoch=1 if found is None else int(str(found.manifest.extra["epoch"])) + 1,
            resume=None if found is None else _parts_of(found, places),
            data_rows=data_rows(experiment, manifest),
            layout=outline.layout,
            constants=dict(outline.constants),
        )
        names = experiment.region_names
        keys = RunKeys(spec.run_id, names, experiment.transport)
        group = ActorGroup(spec, placed, keys)
        saver = Saver(
            store,
            experiment,
            digest(experiment),
            spec.epoch,
            LossHealth() if found is None else LossHealth.restore(found.manifest),
            lease.epoch,
        )
        return _train_on(group, experiment, run, task, saver, reporting, lease)
    except (LeaseLostError, _BrokenError):
        raise  # what lies there is another's by now, or the run goes on
    except BaseException as error:
        if local is not None and keep_logs(local.root, run.path / LOGS):
            reporting.status(f"what the actors printed is in {run.path / LOGS}")
        note_failure(run.path, error, reporting.began_unix_s)
        raise
    finally:
        if reserved is None:
            remove(placed)


def _train_on(
    actors: ActorGroup,
    experiment: Experiment,
    run: RunDirectory,
    task: Task,
    saver: Saver,
    reporting: Reporting,
    lease: LeaseKeeper,
) -> Summary:
    log_path = run.path / EVENTS_FILE
    if lease.from_unknown and log_path.exists():
        detach(log_path)
    before_s = last_time_s(log_path) if log_path.exists() else 0.0
    reporting.status("starting workers, parameter servers and bridges")
    try:
        actors.create(experiment.present)
        actors.await_ready(_START_TIMEOUT_S, reporting.awaiting)
        with EventLog(log_path) as log:
            # Of a run in a bucket the log is this machine's; the mirror asks before it copies.
            check = lease.check if run.address is None else lease.check_known
            recorder = Recorder(log, [*reporting.sinks, RayMetrics().feed], check)
            startup_s = time.time() - reporting.began_unix_s
            origin_unix_s = time.time() - before_s
            recorder.started(
                experiment, run.path.name, before_s, simulated=False, startup_s=startup_s
            )
            board, keeper = build_evals(experiment, task), BestKeeper.of(experiment, task, run)
            writer = ThreadPoolExecutor(1, "best-model")
            evals = EvalNotes(board, recorder.emit, experiment.train.target, keeper, writer)
            evals.begin(before_s)
            actors.wire(origin_unix_s, _START_TIMEOUT_S, reporting.awaiting)
            controller = Controller(
                experiment,
                actors,
                recorder,
                evals,
                saver,
                origin_unix_s,
                LinkNotes(run.links),
                partial(_requests, run.path, reporting.interruption),
                reporting.status,
                reporting.interruption,
                _planner(run, experiment),
            )
            member_requests.forget(run.path)
            stop_requests.forget(run.path)
            lease.note("training")
            try:
                with _interruptible(controller.interrupted):
                    controller.run()
            except RegionLostError as error:
                if controller.policy.is_halting or controller.interrupted.is_set():
                    raise
                raise _BrokenError(error) from error
            finally:
                controller.bridges.close()
                controller.members.close()
                controller.plans.close()
                evals.end(lambda: time.time() - origin_unix_s)
            reporting.status("writing the model and the summary")
            finished = _finish(actors, experiment, run, task, recorder, startup_s, origin_unix_s)
            if finished.aside is not None:
                reporting.status(
                    f"the model before was of more steps: it is {finished.aside.name} now"
                )
            return finished.summary
    finally:
        saver.close()
        actors.close()


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


@dataclass(frozen=True, slots=True)
class _Finished:
    """The end of a run: its summary, and where a model of more steps is that was there before."""

    summary: Summary
    aside: Path | None


def _finish(
    actors: ActorGroup,
    experiment: Experiment,
    run: RunDirectory,
    task: Task,
    recorder: Recorder,
    startup_s: float,
    origin_unix_s: float,
) -> _Finished:
    now_s = time.time() - origin_unix_s
    actors.dismiss_workers()
    home, folder = actors.home.region, actors.spec.places.model_folder(str(run.path))
    if actors.spec.places.far:
        folder.clear()  # of an end before this one that was not come to
    written: dict[str, tuple[PartInfo | None, str]] = collect(
        {r: primary.write_model.remote(r == home) for r, primary in actors.primaries.items()},
        _START_TIMEOUT_S,
    )
    part, model_digest = written[home]
    if part is None:
        raise InvariantError(f"region '{home}' wrote no model")
    tensors, _ = read_part(folder, part)
    folder.remove([part.file])
    summing = Summing(experiment.train.target)
    for event in read_events(run.path / EVENTS_FILE):
        summing.feed(event)
    usd = account(run, summing.totals)
    summary = summing.summary(startup_s=startup_s, usd=usd, digest=model_digest)
    about = about_model(experiment, summary.steps, summary.eval)
    recorder.check()
    aside = keep_longer(run.model, summary.steps)
    save_trained(task, experiment.seed, tensors["params"], run.model, about, tensors.get("carried"))
    recorder.emit(
        "run_finished",
        now_s,
        summary=summary.model_dump(),
        digests={region: value for region, (_, value) in written.items()},
    )
    save_summary(summary, run.path)
    return _Finished(summary, aside)


def _find_checkpoint(
    store: CheckpointStore, resume: Resumption, reporting: Reporting
) -> Checkpoint:
    found = store.latest() if resume.checkpoint is None else store.open(resume.checkpoint)
    for problem in found.problems:
        reporting.status(f"passed over {problem}")
    reporting.status(f"going on from checkpoint {found.manifest.id} at step {found.manifest.step}")
    return found


def _parts_of(found: Checkpoint, places: CheckpointPlaces) -> Resume:
    manifest = found.manifest
    return Resume(places, manifest.id, {part.name: part for part in manifest.parts})


@contextmanager
def _interruptible(event: Interruption) -> Iterator[None]:
    """First Ctrl-C or SIGTERM: save and stop. Second: stop at once."""

    def on_signal(number: int, _: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
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
