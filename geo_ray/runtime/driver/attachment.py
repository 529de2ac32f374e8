"""A driver goes on with a run whose processes are there."""

from __future__ import annotations

import time
from collections.abc import Collection

from geo_ray.checkpoint.names import shard_part_name
from geo_ray.checkpoint.store import CheckpointStore
from geo_ray.config.experiment import Experiment
from geo_ray.config.load import digest
from geo_ray.errors import LeaseLostError, RegionLostError
from geo_ray.job.best import BestKeeper
from geo_ray.job.build import use_one_thread
from geo_ray.job.checkpoints import places_of
from geo_ray.job.codec_shapes import with_shapes
from geo_ray.job.live.driverless import patience_s
from geo_ray.job.rundir import RunDirectory
from geo_ray.lease.keeper import LeaseKeeper
from geo_ray.observe.events.log import (
    EVENTS_FILE,
    EventLog,
    EventTail,
    newest_stretch,
)
from geo_ray.observe.metrics.summary import Summary
from geo_ray.observe.report.ending import note_failure
from geo_ray.runtime.control.health import LossHealth
from geo_ray.runtime.control.membership import member_requests
from geo_ray.runtime.control.membership.member_requests import MemberRequest
from geo_ray.runtime.control.saver import Saver
from geo_ray.runtime.driver.run_cluster import Reporting, RunCluster
from geo_ray.runtime.driver.run_desk import desk_of
from geo_ray.runtime.driver.stage import BrokenError, Stage, controller_of, drive_to_end, evals_of
from geo_ray.runtime.steward.attach import Attached, attach
from geo_ray.runtime.steward.attach_policy import why_gone
from geo_ray.tasks.load import load_task


def living_run(
    experiment: Experiment,
    run: RunDirectory,
    reporting: Reporting,
    cluster: RunCluster,
    lease: LeaseKeeper,
) -> Attached | str | None:
    """The processes of a run that go on without a driver.

    Returns:
        They; or why there are none to go on with; None: the driver before has ended them itself.
    """
    log = run.path / EVENTS_FILE
    stretch = newest_stretch(EventTail(log))
    # Of a run in a bucket the log is a copy that was made just now.
    silent_s = time.time() - log.stat().st_mtime if run.address is None and stretch else None
    line = cluster.living_steward(lease.epoch)
    if line is None:
        told = {event.kind for event in stretch}
        patience = patience_s(experiment.cluster, experiment.run)
        return why_gone(told, patience, silent_s) if told else None
    reporting.status("the run's processes go on: attaching")
    shaped = with_shapes(experiment, load_task(experiment.task, run.base_dir))
    desk = desk_of(run, experiment)
    try:
        return attach(line, lease.epoch, experiment, shaped, stretch, desk)
    except RegionLostError:
        return "they have just ended"


def go_on(
    living: Attached,
    run: RunDirectory,
    reporting: Reporting,
    lease: LeaseKeeper,
    away: Collection[str] = (),
) -> Summary:
    """Drive a run whose processes are there, to its end.

    Args:
        living: the run.
        run: its directory.
        reporting: who wants to know.
        lease: the run's, which holds.
        away: regions that are not to take part; those that do are asked to leave.
    """
    use_one_thread()
    experiment, actors = living.experiment, living.actors
    store = CheckpointStore(
        places_of(run, experiment.checkpoint).root(),
        experiment.checkpoint.keep,
        writing=lease.writing,
    )
    epoch = actors.next_epoch()
    saver = Saver(store, experiment, digest(experiment), epoch, _health(store), lease.epoch)
    task = load_task(experiment.task, run.base_dir)
    stage = Stage(actors, experiment, run, task, saver, reporting, lease)
    shards = {region.name: range(region.ps_shards) for region in experiment.regions}
    parts = {shard_part_name(name, i) for name in actors.primaries for i in shards[name]}
    saver.go_on(parts, store.newest_id())
    keeper = BestKeeper.of(experiment, task, run, attaches=True)
    origin_unix_s = living.book.origin_unix_s
    now_s = time.time() - origin_unix_s
    try:
        with EventLog(stage.own_log()) as log, stage.exporting(origin_unix_s) as export:
            recorder = stage.recorder(log, export, living.known)
            for event in living.stretch:
                recorder.pass_on(event)
            evals = evals_of(stage, recorder, keeper, living.evaluated)
            for name in experiment.region_names:
                if name in experiment.present_names and name not in actors.primaries:
                    evals.board.forget(name)
                elif name in actors.primaries and name not in experiment.present_names:
                    evals.board.admit(name, living.steps.get(name, 0))
            controller = controller_of(stage, recorder, evals, origin_unix_s)
            controller.links.go_on(living.sent)
            controller.checkpoints.traffic.go_on(living.sent)
            gone = living.book.gone.but_for(set(away).difference(actors.primaries))
            controller.workers.go_on(living.requested)
            # Who was lost before a resume is absent, and that has not waited.
            controller.members.go_on(gone, unhurried=experiment.members.absent)
            for region in sorted(set(away).intersection(actors.primaries)):
                member_requests.ask(run.path, MemberRequest(verb="drain", region=region))
            silent_s = max(0.0, now_s - living.last_s)
            recorder.emit("driver_attached", now_s, epoch=lease.epoch, silent_s=silent_s)
            reporting.status("")
            return drive_to_end(stage, controller, living.startup_s)
    except (LeaseLostError, BrokenError):
        raise  # what lies there is another's by now, or the run goes on
    except BaseException as error:
        note_failure(run.path, error, reporting.began_unix_s)
        raise
    finally:
        saver.close()
        actors.close()
        if actors.desk is not None:
            actors.desk.close()


def _health(store: CheckpointStore) -> LossHealth:
    """How the loss was when a checkpoint was last made."""
    ids = store.ids()
    return LossHealth.restore(store.manifest(ids[-1])) if ids else LossHealth()
