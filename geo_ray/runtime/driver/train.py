"""One run from a configuration to a summary, on real actors."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from geo_ray.base.errors import (
    CheckpointError,
    GeoRayError,
    LeaseLostError,
    PlacementError,
    PreflightError,
    RegionLostError,
    RunDirectoryError,
    StoreError,
)
from geo_ray.base.load import digest
from geo_ray.base.restarts import Restarts
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.connect import ConnectedCluster, keep_logs
from geo_ray.ray_cluster.keys import RunKeys
from geo_ray.ray_cluster.placement import PlacedRegion
from geo_ray.ray_cluster.preflight import CheckedCluster, check_cluster, preflight
from geo_ray.runs import requests
from geo_ray.runs import requests as stop_requests
from geo_ray.runs.build import check_absent, check_start, model_outline, use_one_thread, with_shapes
from geo_ray.runs.checkpoints import check_unused, places_of, store_of
from geo_ray.runs.data import data_rows, prepare_manifest
from geo_ray.runs.directory import RunDirectory, followed_plan, lease_of
from geo_ray.runs.evaluation import BestKeeper
from geo_ray.runs.lease import LeaseKeeper, LeaseSeeker, driving, seeker_of
from geo_ray.runs.report import reported
from geo_ray.runs.resume import kept_rows, left_out, lost_before, without_lost
from geo_ray.runs.start_checks import check_evaluation, warn_at_start
from geo_ray.runs.uploader import mirrored
from geo_ray.runtime.actor_group import ActorGroup
from geo_ray.runtime.checkpoint_upload import desk_of, write_run_marker
from geo_ray.runtime.checkpoints import Saver, part_names
from geo_ray.runtime.driver.attach import Attached, go_on, living_run
from geo_ray.runtime.driver.run_cluster import Reporting, RunCluster
from geo_ray.runtime.driver.run_context import (
    BrokenError,
    Retrying,
    RunClock,
    Stage,
    controller_of,
    drive_to_end,
    evals_of,
)
from geo_ray.runtime.driver.supervisor import steward_of
from geo_ray.runtime.launcher import GoneRegions, OwnProcesses
from geo_ray.runtime.policies import LossHealth
from geo_ray.runtime.spec import Resume, RunSpec, demands_of
from geo_ray.storage.checkpoint import Checkpoint, CheckpointStore
from geo_ray.storage.places import CheckpointPlaces
from geo_ray.telemetry.event_log import (
    LOGS_DIRECTORY,
    EventLog,
    EventTail,
    last_time_s,
    note_failure,
)
from geo_ray.telemetry.export.exporters import check_exports
from geo_ray.telemetry.summary import Summary

_PLACE_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 180.0
_PAUSE_S = 15.0  # after a restart that failed at its start; twice as long after each further one


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
        clock: of the run that this driver restarts: the restart takes part of its time; None: the
            time that nobody drove it does not count.
    """

    checkpoint: int | None = None
    waits: bool = False
    away: frozenset[str] = frozenset()
    begins: bool = False
    cause: str | None = None
    log_bytes: int = 0
    clock: RunClock | None = None

    def again(self, log: EventTail) -> Resumption:
        """How another driver goes on after one that was told this and is gone.

        As it was told, if that one had not come to begin. Else from the newest checkpoint; it may
        be the one that was gone on from, which has the state of regions that are not to take part.
        They stay away, but for those that have come since.

        Args:
            log: the run's, read from its first event on.
        """
        there: set[str] = set()
        has_begun = False
        for event in log.new():
            if event.kind in ("run_started", "driver_attached"):
                has_begun = has_begun or log.read_bytes > self.log_bytes
            if event.kind == "run_started":
                there = set(event["regions"])
            elif event.kind == "region_joined":
                there.add(event["region"])
            elif event.kind == "region_drained" and event["cause"] == "asked":
                there.discard(event["region"])
        if not has_begun:
            return self
        return Resumption(away=self.away.difference(there), begins=self.begins)


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
        mirrored(
            *(run.address, run.path, held.epoch, held.check),
            retry_s=experiment.checkpoint.retry_s,
            tell=reporting.status,
        ),
        reported(run.path),
        ExitStack() as stack,
    ):
        told = replace(reporting, status=_noting(held, reporting.status))
        cluster = RunCluster(experiment, told, stack, stands, steward_of(run.path, run.address))
        attaches = resume is not None and resume.checkpoint is None
        failed_starts = 0
        while True:
            try:
                if attaches and resume is not None:
                    living = living_run(experiment, run, told, cluster, held)
                    if isinstance(living, Attached):
                        return go_on(living, run, told, held, resume.away)
                    resume = replace(resume, cause=living)
                return _train(experiment, run, told, resume, cluster, held, placed)
            except BrokenError as broken:
                if not _can_restart(experiment, run, broken.cause, told, restarts):
                    note_failure(run.path, broken.cause, told.began_unix_s)
                    raise broken.cause from None
                failed_starts = failed_starts + 1 if broken.at_start else 0
                pause_s = _PAUSE_S * 2 ** (failed_starts - 1)
                if failed_starts and told.interruption.wait(pause_s):
                    note_failure(run.path, broken.cause, told.began_unix_s)
                    raise broken.cause from None
                resume = Resumption(waits=True, away=broken.away, clock=broken.clock)
            attaches = False


def _can_restart(
    experiment: Experiment,
    run: RunDirectory,
    cause: GeoRayError,
    reporting: Reporting,
    restarts: Restarts,
) -> bool:
    """Whether a run goes on from its newest checkpoint; a store that is away is waited for."""
    store = store_of(run, experiment.checkpoint)
    retrying = Retrying(experiment.checkpoint.retry_s, reporting.status, reporting.interruption)
    try:
        retrying.until_done("reading the newest checkpoint", store.latest)
    except (CheckpointError, StoreError, RunDirectoryError):
        return False
    if not restarts.take(time.monotonic()):
        return False
    reporting.status(f"{cause.message}: the run goes on from its newest checkpoint")
    return True


@contextmanager
def _starting(resume: Resumption | None) -> Iterator[None]:
    """Start processes; a restart for which something is missing is tried again, like the run.

    Raises:
        BrokenError: the restart failed; any other start fails with its own error.
    """
    try:
        yield
    except (RegionLostError, PlacementError, PreflightError) as error:
        if resume is None or resume.clock is None:
            raise
        raise BrokenError(error, resume.away, resume.clock, at_start=True) from error


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
    cluster: RunCluster,
    lease: LeaseKeeper,
    reserved: Mapping[str, PlacedRegion] | None,
) -> Summary:
    use_one_thread()
    followed_plan(run)  # what is wrong with it is told now, not at the end
    places = places_of(run, experiment.checkpoint)
    store = CheckpointStore(places.root(), experiment.checkpoint.keep, writing=lease.writing)
    if resume is None:
        check_unused(store)
    check_absent(experiment)
    check_exports(experiment.observe.export)
    found = None if resume is None else _find_checkpoint(store, resume, reporting)
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
    demands = demands_of(experiment)
    lease.check()
    home = next(each for each in experiment.regions if each.name == experiment.averager_region)
    run_id, names = f"{experiment.name}-{secrets.token_hex(4)}", experiment.region_names
    checked = CheckedCluster()
    with _starting(resume):
        local, line = cluster.get().local, cluster.steward(lease.epoch, home)
        reporting.status("checking the cluster and placing processes")
        if local is not None:
            preflight(demands, ask_nodes=False)
        elif reserved is None:
            checked = check_cluster(demands, reporting.status)
        if line is not None:
            line.attach(checked.longest_s)
            line.begin(run_id, names, experiment.transport)
        keys, maker = (
            line or RunKeys(run_id, names, experiment.transport),
            line or OwnProcesses(reserved),
        )
        placed = maker.place(demands, _PLACE_TIMEOUT_S + checked.longest_s)
    try:
        with _starting(resume):
            checked.check_newcomers(demands, reporting.status)
        spec = RunSpec(
            experiment_json=with_shapes(experiment, task).model_dump_json(),
            base_dir=str(run.base_dir),
            driver_dir=str(Path.cwd()),
            manifest_address=address,
            run_id=run_id,
            run_dir=str(run.path),
            places=places,
            num_params=outline.num_params,
            epoch=1 if found is None else int(str(found.manifest.extra["epoch"])) + 1,
            resume=None if found is None else _parts_of(found, places, experiment),
            data_rows=data_rows(experiment, manifest),
            layout=outline.layout,
            constants=dict(outline.constants),
        )
        desk = desk_of(run, experiment)
        if desk is not None:
            write_run_marker(run.path, spec.run_id)
        group = ActorGroup(spec, placed, keys, maker, lease.epoch, desk)
        health = LossHealth() if found is None else LossHealth.restore(found.manifest)
        saver = Saver(store, experiment, digest(experiment), spec.epoch, health, lease.epoch)
        stage = Stage(group, experiment, run, task, saver, reporting, lease)
        step = None if found is None else found.manifest.step
        return _train_on(stage, gone, resume, step)
    except (LeaseLostError, BrokenError):
        raise  # what lies there is another's by now, or the run goes on
    except BaseException as error:
        if local is not None and keep_logs(local.root, run.path / LOGS_DIRECTORY):
            reporting.status(f"what the actors printed is in {run.path / LOGS_DIRECTORY}")
        note_failure(run.path, error, reporting.began_unix_s)
        raise
    finally:
        maker.remove(placed)


def _train_on(
    stage: Stage, gone: GoneRegions, resume: Resumption | None, resumed_step: int | None
) -> Summary:
    actors, experiment, reporting = stage.actors, stage.experiment, stage.reporting
    log_path = stage.own_log()
    before_s = last_time_s(log_path) if log_path.exists() else 0.0
    reporting.status("starting workers, parameter servers and bridges")
    try:
        with _starting(resume):
            actors.create(experiment.present)
            actors.await_ready(_START_TIMEOUT_S, reporting.awaiting)
        clock = None if resume is None else resume.clock
        if clock is None:
            startup_s = time.time() - reporting.began_unix_s
            clock = RunClock(time.time() - before_s, startup_s)
        else:
            before_s, startup_s = time.time() - clock.origin_unix_s, 0.0
        origin_unix_s = clock.origin_unix_s
        with EventLog(log_path) as log, stage.exporting(origin_unix_s) as export:
            recorder = stage.recorder(log, export)
            about: dict[str, object] = {"startup_s": startup_s}
            if resume is not None and resume.cause is not None:
                about["cause"] = resume.cause
            if resumed_step is not None:
                about["resumed_step"] = resumed_step
            recorder.started(experiment, stage.run.path.name, before_s, simulated=False, **about)
            keeper = BestKeeper.of(experiment, stage.task, stage.run)
            evals = evals_of(stage, recorder, keeper)
            evals.begin(before_s)
            with _starting(resume):
                actors.wire(origin_unix_s, _START_TIMEOUT_S, reporting.awaiting)
            requests.forget_member_requests(stage.run.path)
            stop_requests.forget_stop_request(stage.run.path)
            controller = controller_of(stage, recorder, evals, origin_unix_s)
            waits = resume is not None and resume.waits
            controller.members.go_on(gone, unhurried=() if waits else gone.awaited)
            return drive_to_end(stage, controller, clock.startup_s)
    finally:
        stage.saver.close()
        actors.close()
        if actors.desk is not None:
            actors.desk.close()


def _find_checkpoint(
    store: CheckpointStore, resume: Resumption, reporting: Reporting
) -> Checkpoint | None:
    """Return what to resume from; None: the run has saved nothing and may begin again."""
    if resume.cause is not None:
        reporting.status(f"the run's processes do not go on: {resume.cause}")
    if resume.begins and resume.checkpoint is None and not store.ids():
        reporting.status("the run has saved nothing yet: starting from the beginning")
        return None
    found = store.latest() if resume.checkpoint is None else store.open(resume.checkpoint)
    for problem in found.problems:
        reporting.status(f"passed over {problem}")
    reporting.status(f"going on from checkpoint {found.manifest.id} at step {found.manifest.step}")
    return found


def _without(
    experiment: Experiment, found: Checkpoint, resume: Resumption, reporting: Reporting
) -> tuple[Experiment, GoneRegions]:
    """The experiment as it goes on from a checkpoint, and what is known of who is not there."""
    manifest = found.manifest
    left = left_out(experiment, manifest, resume.away, asked=not resume.waits)
    experiment, missing = without_lost(experiment, {part.name for part in manifest.parts}, left)
    if missing:
        reporting.status(f"going on without {', '.join(missing)}: not in checkpoint {manifest.id}")
    if left:
        why = "asked to leave" if resume.waits else "members.absent"
        reporting.status(f"going on without {', '.join(left)}: {why}")
    gone = GoneRegions(lost_before(manifest, experiment), rows=kept_rows(found, left))
    return experiment, gone.but_for(resume.away.difference(experiment.present_names))


def _parts_of(found: Checkpoint, places: CheckpointPlaces, experiment: Experiment) -> Resume:
    """The checkpoint without parts that nobody reads."""
    manifest, wanted = found.manifest, part_names(experiment)
    parts = {part.name: part for part in manifest.parts if part.name in wanted}
    return Resume(places, manifest.id, parts)
