"""`geo_ray.train` and `geo_ray.simulate`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from geo_ray.api.inputs import Config, FilePath, Overrides, own_threads_kept, source_of
from geo_ray.api.planning import FollowedPlan, plan_to_follow
from geo_ray.api.run import Run, open_run
from geo_ray.api.start import new_run, resumed_run, run_to_resume
from geo_ray.api.status import directory_of
from geo_ray.api.watch import OnEvent, RunWatch, ShowProgress, Watched
from geo_ray.config.source import override_items
from geo_ray.errors import (
    ConfigError,
    GeoRayError,
    LeaseLostError,
    RunFinishedError,
    RunHeldError,
)
from geo_ray.job import rundir
from geo_ray.job.checkpoints import has_checkpoint
from geo_ray.job.far.copy import copied_from, copy_path, driven_copy, is_ahead
from geo_ray.job.far.mirror import mirrored
from geo_ray.job.far.objects import RunObjects
from geo_ray.job.live.report import reported
from geo_ray.job.rundir import RunDirectory
from geo_ray.lease.driving import driving, seeker_of
from geo_ray.lease.seek import LeaseSeeker
from geo_ray.observe.events.schema import Event
from geo_ray.observe.metrics.summary import Summary
from geo_ray.observe.report.ending import has_begun
from geo_ray.observe.report.report import REPORT_FILE
from geo_ray.runtime.cluster.connect import ConnectedCluster
from geo_ray.runtime.driver.drive import Driven, attach, drive
from geo_ray.runtime.driver.drive import watch as follow_driver
from geo_ray.runtime.driver.front import Handle, is_driven
from geo_ray.runtime.driver.run_cluster import Reporting
from geo_ray.runtime.driver.train import Resumption
from geo_ray.runtime.driver.train import train as train_to_end
from geo_ray.sim.run import simulate as simulate_to_end
from geo_ray.stores.uri import is_s3
from geo_ray.util.terminal import terminal_outlived
from geo_ray.util.ticking import ticking


def train(
    config: Config | None = None,
    overrides: Overrides = (),
    *,
    resume: FilePath | Run | None = None,
    checkpoint: int | None = None,
    plan: FollowedPlan | None = None,
    allow_changes: Sequence[str] = (),
    on_event: OnEvent | None = None,
    progress: ShowProgress = False,
    base_dir: FilePath | None = None,
    began_unix_s: float | None = None,
    detach: bool = False,
) -> Run:
    """Train as a configuration says, on real actors, or go on with an earlier run.

    On an existing cluster, with ``run: {driver: actor}`` or ``detach``, the run is driven by an
    actor, and this process only watches: if it dies the run goes on, and ``train(resume=run)``
    watches again.

    In the main thread, Ctrl-C saves a checkpoint and raises `InterruptedRunError`; a second one
    stops at once. A terminal that is closed costs only what it would have shown. In other threads
    no signal handler is installed. A process that is connected to Ray already trains on that
    cluster with ``cluster: {kind: existing}``, and stays connected.

    Args:
        config: a file, a mapping, or what `load_config` gave; None only with ``resume``.
        overrides: changes of single keys, by dotted key.
        resume: the earlier run, to go on with from its newest whole and healthy checkpoint.
        checkpoint: with ``resume``: id of another one, as `geo_ray.checkpoints` lists them.
        plan: to follow, as `geo_ray.plan` gives it or saves it.
        allow_changes: what may differ from the run when it is resumed: dotted keys, each with all
            keys below it, and files with classes of yours. Keys of ``overrides`` may, too.
        on_event: given every event, in this thread; what it raises ends the run.
        progress: True shows the run on standard error, "plain" does it in lines.
        base_dir: where relative paths in a mapping or an experiment start; default: the working
            directory. Those in a file start in its own directory.
        began_unix_s: time of day from which the start-up counts; default: now.
        detach: return as soon as it trains; on a cluster with ``cluster: {kind: existing}``.

    Raises:
        InterruptedRunError: by Ctrl-C; a checkpoint was saved.
        ClusterError: this process is connected to another cluster than the run's.
        GeoRayError: whatever else ends the run early; the class says what.
    """
    began_unix_s = time.time() if began_unix_s is None else began_unix_s
    watch = RunWatch(progress, on_event)
    followed = None if plan is None else plan_to_follow(plan)
    changes = override_items(overrides)
    source = None if config is None else source_of(config, base_dir)
    if checkpoint is not None and resume is None:
        raise ConfigError(
            f"checkpoint {checkpoint} of which run?", fix="Name the run to resume, too."
        )
    seeker: LeaseSeeker | None = None
    with own_threads_kept(), terminal_outlived():
        again = run_to_resume(source, changes) if resume is None and source is not None else None
        resume = resume or again
        if resume is not None:
            address = _address_of(resume)
            path = directory_of(resume) if address is None else copy_path(address, "driven")
            as_it_is = source is None and not changes and followed is None and checkpoint is None
            may_live = as_it_is and address is None
            if may_live and (living := _watched_if_living(path, watch, began_unix_s, detach)):
                return living
            leases = None if address is None else RunObjects(address).lease()
            seeker = seeker_of(path, watch.tell, leases)
            seeker.wait()  # before anything is judged that a living run changes
            was_here = address is not None and is_ahead(RunObjects(address), path)
            if address is not None:
                driven_copy(address)
            try:
                with ticking("preparing the run", watch.tell):
                    ready = resumed_run(
                        path,
                        source,
                        changes,
                        followed,
                        allowed=allow_changes,
                        checkpoint=checkpoint,
                        base_dir=None if base_dir is None else Path(base_dir),
                        begins=again is not None,
                    )
            except RunFinishedError as error:
                if address is not None and was_here:
                    _copy_rest(address, path, seeker)
                raise name_run(error, path) from error.__cause__
            except GeoRayError as error:
                raise name_run(error, path) from error.__cause__
        elif source is not None:
            with ticking("preparing the run", watch.tell):
                ready = new_run(source, changes, followed, watch.tell)
        else:
            raise ConfigError("there is no configuration", fix="Give one, or a run to resume.")
        with (
            _tidied(ready.run, watch, is_new=resume is None),
            watch.over(ready.experiment) as watched,
        ):
            goes_on = (
                None
                if resume is None
                else Resumption(checkpoint, away=ready.away, begins=again is not None)
            )
            stands = ready.experiment.cluster.kind == "existing"
            if detach and ready.run.address is not None:
                raise ConfigError(
                    "an actor drives a run whose run.dir is a directory",
                    fix="Leave `detach` out, or name a directory that all nodes share.",
                )
            if stands and (detach or ready.experiment.run.driver == "actor"):
                sinks = (_noting(ready.note, watched), *watched.sinks)
                driven = Driven(
                    ready.experiment, ready.run, goes_on, ready.is_changed, ready.plan, detach
                )
                told = Reporting(watched.status, sinks, began_unix_s, watched.awaiting)
                ended = drive(driven, told)
                if ended is None:
                    return open_run(ready.run.path)
                summary = ended
            else:
                if detach:
                    raise ConfigError(
                        "a run on a cluster of its own ends with the process that started it",
                        fix="Leave `detach` out, or run on a cluster that is there: "
                        "`cluster: {kind: existing}`.",
                    )
                sinks = (ready.begun, _noting(ready.note, watched), *watched.sinks)
                reporting = Reporting(watched.status, sinks, began_unix_s, watched.awaiting)
                summary = train_to_end(
                    ready.experiment, ready.run, reporting, resume=goes_on, seeker=seeker
                )
    return Run(ready.run, ready.experiment, summary, finished=True)


def _copy_rest(address: str, path: Path, seeker: LeaseSeeker) -> None:
    """Copy to its bucket the end of a finished run that was driven on this machine.

    Raises:
        RunHeldError, StoreError, RunDirectoryError: as for `driving` and `mirrored`.
    """
    with driving(seeker) as held, mirrored(address, path, held.epoch, held.check):
        pass


def _address_of(run: FilePath | Run) -> str | None:
    """Of a run in a bucket, however it is named; None: it is in none."""
    if isinstance(run, Run):
        return run.directory.address
    return run if isinstance(run, str) and is_s3(run) else copied_from(Path(run))


def _watched_if_living(
    path: Path, watch: RunWatch, began_unix_s: float, detach: bool
) -> Run | None:
    """Watch a run that goes on to its end; None if it does not go on, or not where it can be."""
    if not path.is_dir() or not is_driven(path):
        return None
    run, experiment = rundir.reopen(path, to_look_at=True)
    if experiment.cluster.kind != "existing":
        return None

    def watched(driver: Handle, cluster: ConnectedCluster) -> Summary | None:
        with _tidied(run, watch, is_new=False), watch.over(experiment) as shown:
            told = Reporting(shown.status, shown.sinks, began_unix_s, shown.awaiting)
            return follow_driver(driver, cluster, run.path, told, detach=detach)

    is_there, summary = attach(run.path, experiment, watched)
    if not is_there:
        return None
    return open_run(path) if summary is None else Run(run, experiment, summary)


def simulate(
    config: Config,
    overrides: Overrides = (),
    *,
    plan: FollowedPlan | None = None,
    on_event: OnEvent | None = None,
    progress: ShowProgress = False,
    base_dir: FilePath | None = None,
) -> Run:
    """Train with real gradients on emulated links and a virtual clock, in this process.

    Seconds in the result are predictions for the real run. Needs no cluster.

    Args:
        config: a file, a mapping, or what `load_config` gave.
        overrides: changes of single keys, by dotted key.
        plan: to follow, on machines that are as fast as it takes them to be.
        on_event: given every event; what it raises ends the run.
        progress: as for `train`.
        base_dir: as for `train`.

    Raises:
        GeoRayError: whatever is wrong with configuration, task or data.
    """
    watch = RunWatch(progress, on_event)
    followed = None if plan is None else plan_to_follow(plan)
    with own_threads_kept():
        source = source_of(config, base_dir)
        with ticking("preparing the run", watch.tell):
            ready = new_run(source, override_items(overrides), followed, watch.tell, emulated=True)
        with (
            _tidied(ready.run, watch, is_new=True),
            mirrored(ready.run.address, ready.run.path, 1, lambda: None),
            reported(ready.run.path),
            watch.over(ready.experiment) as watched,
        ):
            sinks = (_noting(ready.note, watched), *watched.sinks)
            summary = simulate_to_end(ready.experiment, ready.run, watched.status, sinks)
    return Run(ready.run, ready.experiment, summary, finished=True)


def _noting(note: str, watched: Watched) -> OnEvent:
    """Tells a note when the run begins: one that does not begin is not made."""

    def on_event(event: Event) -> None:
        for line in note.splitlines() if event.kind == "run_started" else ():
            watched.note(line)

    return on_event


@contextmanager
def _tidied(run: RunDirectory, watch: RunWatch, *, is_new: bool) -> Iterator[None]:
    """Name the report of a run that fails, and leave no directory of one that did not begin."""
    try:
        yield
    except (LeaseLostError, RunHeldError):
        is_new = False  # the run is another's
        raise
    except GeoRayError as error:
        if has_begun(run.path) and (run.path / REPORT_FILE).exists():
            watch.tell(f"report   {short_path(run.path / REPORT_FILE)}")
        raise name_run(error, run.path) from error.__cause__
    finally:
        if is_new and not has_begun(run.path):
            rundir.discard(run)


def name_run(error: GeoRayError, run_dir: Path) -> GeoRayError:
    """The same error with the run's directory in its advice, ready to be copied and typed.

    A run that has no checkpoint yet cannot be resumed: then the advice is to start again.
    """
    fix = error.fix
    if "--resume RUN" in fix and not has_checkpoint(run_dir):
        fix = fix.replace("--resume RUN", "CONFIG")
        fix = fix.replace("Resume with", "Start again with")
        fix = fix.replace("; nothing committed is lost", "") + " No checkpoint was saved."
    shown = copied_from(run_dir) or str(short_path(run_dir))
    resume = f"--resume {shlex.quote(shown)}"
    named = type(error)(error.message, fix=fix.replace("--resume RUN", resume))
    return named.with_traceback(error.__traceback__)  # in its place, not after it


def short_path(path: Path) -> Path:
    """The path from the working directory, if it lies below that."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
