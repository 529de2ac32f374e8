"""Starts the processes of a run: from the beginning, or from a checkpoint."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from geo_ray.base.errors import (
    ConfigError,
    GeoRayError,
    LeaseLostError,
    LoopFailedError,
    PlacementError,
    PreflightError,
    RegionLostError,
)
from geo_ray.base.load import digest
from geo_ray.base.user_code import find_function
from geo_ray.data.tasks.base import Task
from geo_ray.data.tasks.checked_calls import RowWork
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.experiment.regions import LOOP
from geo_ray.ray_cluster.demand import RegionDemand
from geo_ray.ray_cluster.placement import PlacedRegion
from geo_ray.ray_cluster.preflight import CheckedCluster, check_cluster, preflight
from geo_ray.runs import requests
from geo_ray.runs.build import check_absent, check_start, model_outline, use_one_thread, with_shapes
from geo_ray.runs.checkpoints import check_unused, places_of
from geo_ray.runs.data import data_rows, prepare_manifest
from geo_ray.runs.directory import RunDirectory, followed_plan
from geo_ray.runs.evaluation import BestKeeper
from geo_ray.runs.resume import left_out, lost_before, saved_rows, without_lost
from geo_ray.runs.start_checks import check_evaluation, warn_at_start
from geo_ray.runtime.actor_group import ActorGroup
from geo_ray.runtime.checkpoint_upload import upload_server_of, write_run_marker
from geo_ray.runtime.checkpoints import Saver, part_names
from geo_ray.runtime.launcher import GoneRegions
from geo_ray.runtime.policies import LossHealth
from geo_ray.runtime.run_context import (
    BrokenError,
    Reporting,
    RunContext,
    RunSetup,
    Training,
    controller_of,
    evals_of,
)
from geo_ray.runtime.run_order import Resumption, RunClock
from geo_ray.runtime.spec import Resume, RunSpec, demands_of
from geo_ray.storage.checkpoint import Checkpoint, CheckpointStore
from geo_ray.storage.places import CheckpointPlaces
from geo_ray.telemetry.event_log import EventLog, last_time_s, note_failure
from geo_ray.telemetry.export.exporters import check_exports

_PLACE_TIMEOUT_S: Final = 60.0
_START_TIMEOUT_S: Final = 180.0


def check_inputs(experiment: Experiment, run: RunDirectory, *, goes_on: bool) -> None:
    """Check the task, the loops and the given data of a run; needs no cluster.

    For a run that continues, the model and the data are not checked: its checkpoint determines
    which regions it has.

    Raises:
        GeoRayError: the run cannot start; the class says why.
    """
    check_absent(experiment)
    if experiment.is_served:
        check_loops(experiment, run.base_dir)
        if not experiment.task_regions:
            return
        experiment = experiment.model_copy(update={"regions": experiment.task_regions})
    task = load_task(experiment.task, run.base_dir)
    check_sharding(experiment, task)
    if goes_on:
        return
    check_start(experiment, model_outline(task, experiment.seed))
    if experiment.data.manifest is not None:
        prepare_manifest(experiment, task, run.base_dir, run.data)


def check_loops(experiment: Experiment, base_dir: Path) -> None:
    """Load the loops of groups.

    Raises:
        LoopFailedError: loops cannot be loaded; names all of them.
    """
    loops = [region.group.loop for region in experiment.groups if region.group is not None]
    problems: list[GeoRayError] = []
    for loop in dict.fromkeys(loops):
        try:
            if loop is not None:
                find_function(loop, base_dir, LOOP)
        except GeoRayError as error:
            problems.append(error)
    if len(problems) > 1:
        texts = [error.message for error in problems]
        raise LoopFailedError("; ".join(texts), fix=problems[0].fix)
    if problems:
        raise problems[0]


def check_sharding(experiment: Experiment, task: Task) -> None:
    """Check that the optimizer can step the parameters that groups of the task divide.

    Raises:
        ConfigError: it needs whole parameters.
    """
    optimizer = experiment.optimizer
    if not optimizer.needs_whole_parameters or hasattr(task, "parallelize"):
        return
    for region in experiment.groups:
        group = region.group
        if group is not None and group.loop is None and group.sharding == "fsdp":
            raise ConfigError(
                f"optimizer.kind: '{optimizer.kind}' steps whole parameters, which FSDP divides in "
                f"region '{region.name}'",
                fix="Use `group.sharding: ddp`, or adamw.",
            )


@contextmanager
def started(setup: RunSetup, resume: Resumption | None) -> Iterator[Training]:
    """Start the processes of a run, and end them after the block.

    Args:
        setup: the run.
        resume: the checkpoint to continue from; None: start from the beginning.

    Raises:
        BrokenError: an automatic restart failed and can be retried.
        GeoRayError: the run cannot start; the class says why.
    """
    run, reporting, launcher, lease = setup.run, setup.reporting, setup.launcher, setup.lease
    experiment = setup.experiment
    use_one_thread()
    followed_plan(run)  # report an invalid plan now, not at the end
    places = places_of(run, experiment.checkpoint)
    store = CheckpointStore(places.root(), experiment.checkpoint.keep, writing=lease.writing)
    if resume is None:
        check_unused(store)
    check_absent(experiment)
    check_exports(experiment.observe.export)
    found = None if resume is None else find_checkpoint(store, resume, reporting)
    gone = GoneRegions()
    if found is not None and resume is not None:
        experiment, gone = _without(experiment, found, resume, reporting)
    reporting.status("preparing task and data")
    task = load_task(experiment.task, run.base_dir)
    outline = model_outline(task, experiment.seed)
    check_start(experiment, outline)
    manifest, address = prepare_manifest(
        experiment, task, run.base_dir, run.data, goes_on=found is not None
    )
    check_evaluation(experiment, task, manifest)
    warn_at_start(experiment, manifest, simulated=False)
    lease.check()
    run_id = f"{experiment.name}-{secrets.token_hex(4)}"
    with _restartable(resume):
        checked, placed = _placed(setup, experiment, run_id)
    try:
        with _restartable(resume):
            checked.check_joining(demands_of(experiment), reporting.observer.status)
        spec = RunSpec(
            experiment_json=with_shapes(experiment, task).model_dump_json(),
            base_dir=str(run.base_dir),
            working_dir=str(Path.cwd()),
            manifest_address=address,
            run_id=run_id,
            run_dir=str(run.path),
            places=places,
            num_params=outline.num_params,
            attempt=1 if found is None else int(str(found.manifest.extra["attempt"])) + 1,
            resume=None if found is None else _parts_of(found, places, experiment),
            data_rows=data_rows(experiment, manifest),
            layout=outline.layout,
            constants=dict(outline.constants),
        )
        upload_server = upload_server_of(run, experiment)
        if upload_server is not None:
            write_run_marker(run.path, spec.run_id)
        group = ActorGroup(spec, placed, launcher, launcher, lease.token, upload_server)
        health = LossHealth() if found is None else LossHealth.restore(found.manifest)
        saver = Saver(store, experiment, digest(experiment), spec.attempt, health, lease.token)
        context = RunContext(group, experiment, run, task, saver, reporting, lease)
        step = None if found is None else found.manifest.step
        work = RowWork.of(task, outline.num_params, outline.num_frozen)
        with _training(context, gone, resume, step, work) as training:
            yield training
    except (LeaseLostError, BrokenError):
        raise  # another process writes to the run, or the run restarts
    except BaseException as error:
        note_failure(run.path, error, reporting.began_unix_s)
        raise
    finally:
        launcher.remove(placed)


@contextmanager
def _restartable(resume: Resumption | None) -> Iterator[None]:
    """Convert the failure of an automatic restart, so that the run loop retries it.

    Raises:
        BrokenError: the restart failed. Any other start fails with its own error.
    """
    try:
        yield
    except (RegionLostError, PlacementError, PreflightError) as error:
        if resume is None or resume.clock is None:
            raise
        raise BrokenError(error, resume.away, resume.clock, at_start=True) from error


def _placed(
    setup: RunSetup, experiment: Experiment, run_id: str
) -> tuple[CheckedCluster, dict[str, PlacedRegion]]:
    """Check the cluster, end the processes of an earlier start, and reserve all places."""
    launcher, demands = setup.launcher, demands_of(experiment)
    checked = check_places(setup, demands)
    launcher.attach(setup.lease.token)
    launcher.begin(run_id, experiment.region_names, experiment.transport)
    return checked, launcher.place(demands, _PLACE_TIMEOUT_S + checked.longest_s)


def check_places(setup: RunSetup, demands: Sequence[RegionDemand]) -> CheckedCluster:
    """Check whether the cluster can run the processes of a run, before they are placed.

    Raises:
        PreflightError: the cluster is not fit.
    """
    setup.reporting.status("checking the cluster and placing processes")
    if setup.experiment.cluster.kind == "local":
        preflight(demands, ask_nodes=False)
    elif not setup.launcher.has_places:
        return check_cluster(demands, setup.reporting.observer.status)
    return CheckedCluster()


@contextmanager
def _training(
    context: RunContext,
    gone: GoneRegions,
    resume: Resumption | None,
    resumed_step: int | None,
    work: RowWork,
) -> Iterator[Training]:
    actors, experiment, reporting = context.actors, context.experiment, context.reporting
    log_path = context.own_log()
    before_s = last_time_s(log_path) if log_path.exists() else 0.0
    reporting.status("starting workers, parameter servers and bridges")
    try:
        with _restartable(resume):
            actors.create(experiment.present)
            actors.await_ready(_START_TIMEOUT_S, reporting.observer.awaiting)
        clock = None if resume is None else resume.clock
        if clock is None:
            startup_s = time.time() - reporting.began_unix_s
            clock = RunClock(time.time() - before_s, startup_s)
        else:
            before_s, startup_s = time.time() - clock.origin_unix_s, 0.0
        origin_unix_s = clock.origin_unix_s
        with EventLog(log_path) as log, context.exporting(origin_unix_s) as export:
            recorder = context.recorder(log, export)
            about: dict[str, object] = {"startup_s": startup_s, **work.fields()}
            if resume is not None and resume.cause is not None:
                about["cause"] = resume.cause
            if resumed_step is not None:
                about["resumed_step"] = resumed_step
            recorder.started(experiment, context.run.path.name, before_s, simulated=False, **about)
            keeper = BestKeeper.of(experiment, context.task, context.run)
            evals = evals_of(context, recorder, keeper, log=log_path)
            evals.begin(before_s)
            with _restartable(resume):
                actors.wire(origin_unix_s, _START_TIMEOUT_S, reporting.observer.awaiting)
            requests.forget_member_requests(context.run.path)
            requests.forget_stop_request(context.run.path)
            controller = controller_of(context, recorder, evals, origin_unix_s)
            waits = resume is not None and resume.waits
            controller.members.resume(gone, unhurried=() if waits else gone.awaited)
            yield Training(context, controller, clock.startup_s)
    finally:
        context.close()


def find_checkpoint(
    store: CheckpointStore, resume: Resumption, reporting: Reporting
) -> Checkpoint | None:
    """Return the checkpoint to resume from; None: none was saved, so the run may start again."""
    if resume.cause is not None:
        reporting.status(f"cannot continue with the run's processes: {resume.cause}")
    if resume.begins and resume.checkpoint is None and not store.ids():
        reporting.status("no checkpoint was saved: starting from the beginning")
        return None
    found = store.latest() if resume.checkpoint is None else store.open(resume.checkpoint)
    for problem in found.problems:
        reporting.status(f"skipped {problem}")
    reporting.status(f"resuming from checkpoint {found.manifest.id} at step {found.manifest.step}")
    return found


def _without(
    experiment: Experiment, found: Checkpoint, resume: Resumption, reporting: Reporting
) -> tuple[Experiment, GoneRegions]:
    """Return the experiment as it continues from a checkpoint, and the regions that are absent."""
    manifest = found.manifest
    left = left_out(experiment, manifest, resume.away, asked=not resume.waits)
    experiment, missing = without_lost(experiment, {part.name for part in manifest.parts}, left)
    if missing:
        text = f"continuing without {', '.join(missing)}: not in checkpoint {manifest.id}"
        reporting.status(text)
    if left:
        why = "asked to leave" if resume.waits else "members.absent"
        reporting.status(f"continuing without {', '.join(left)}: {why}")
    gone = GoneRegions(lost_before(manifest, experiment), rows=saved_rows(found, left))
    return experiment, gone.but_for(resume.away.difference(experiment.present_names))


def _parts_of(found: Checkpoint, places: CheckpointPlaces, experiment: Experiment) -> Resume:
    """Return the checkpoint without parts that no process reads."""
    manifest, wanted = found.manifest, part_names(experiment)
    parts = {part.name: part for part in manifest.parts if part.name in wanted}
    return Resume(places, manifest.id, parts)
