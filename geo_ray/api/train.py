"""`geo_ray.train` and `geo_ray.simulate`, and the preparation of a run.

The preparation covers configuration, plan, certificates and directory.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

from geo_ray.api.auto import load_experiment
from geo_ray.api.config import Config, FilePath, Overrides, preserving_threads, source_of
from geo_ray.api.display import OnEvent, RunWatch, ShowProgress
from geo_ray.api.plan import FollowedPlan, plan_to_follow
from geo_ray.api.run import Run, open_run
from geo_ray.api.status import directory_of
from geo_ray.base.clock import command_began_unix_s
from geo_ray.base.errors import (
    ConfigError,
    GeoRayError,
    LeaseLostError,
    RunFinishedError,
    RunHeldError,
)
from geo_ray.base.load import dump_yaml, load_tree, override_items, override_notes
from geo_ray.base.model import expanded
from geo_ray.base.output import terminal_outlived, ticking
from geo_ray.base.overrides import apply_overrides
from geo_ray.base.text import counted
from geo_ray.base.yaml import ConfigSource, parse_yaml, read_text
from geo_ray.experiment.experiment import Experiment
from geo_ray.experiment.recorded import RunConfig
from geo_ray.experiment.regions import start_command
from geo_ray.planner.plan import Plan
from geo_ray.runs import directory
from geo_ray.runs.build import check_device
from geo_ray.runs.checkpoints import has_checkpoint
from geo_ray.runs.directory import RunDirectory
from geo_ray.runs.follow_plan import changes_of, check_model, emulation_of, following
from geo_ray.runs.lease import LeaseSeeker, driving, seeker_of
from geo_ray.runs.remote import RunObjects, copied_from, copy_path, driven_copy, is_ahead
from geo_ray.runs.report import reported
from geo_ray.runs.resume import check_resumable
from geo_ray.runs.uploader import uploading
from geo_ray.runtime.run_client import RunRequest, drive, may_be_running, watch_running
from geo_ray.runtime.run_context import Reporting
from geo_ray.runtime.run_order import Resumption
from geo_ray.simulator.run import simulate as simulate_to_end
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.storage.uri import is_s3, join
from geo_ray.telemetry.event_log import has_begun
from geo_ray.telemetry.report import REPORT_FILE
from geo_ray.telemetry.summary import load_summary
from geo_ray.transport.security.cert_store import check_certificates, files_of, is_revoked

Notify: TypeAlias = Callable[[str], None]
_ABSENT: Final = "members.absent"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadyRun:
    """A run that can start.

    Attributes:
        run: directory of the run.
        experiment: configuration of the run.
        is_changed: whether the configuration differs from that in the directory.
        plan: a new plan to use, if it differs from the previous one.
        note: text shown when the run begins; "" for none.
        away: regions that do not take part in a resumed run, even if the checkpoint has their
            state.
    """

    run: RunDirectory
    experiment: Experiment
    is_changed: bool = False
    plan: Plan | None = None
    note: str = ""
    away: frozenset[str] = frozenset()


def new_run(
    config: ConfigSource,
    overrides: tuple[str, ...],
    plan: Plan | None,
    notify: Notify,
    *,
    emulated: bool = False,
) -> ReadyRun:
    """Read the configuration and create the directory of a new run.

    Args:
        config: source of the configuration.
        overrides: as for ``--set``.
        plan: a plan for workers, batches, averager, interval and codec.
        notify: called with decisions.
        emulated: whether the run computes in this process, on machines with the speeds of the
            plan.

    Raises:
        ConfigError: the configuration is invalid.
        PlanError: the plan belongs to something else.
        CertificateError: a region's certificate cannot be used.
        RunDirectoryError: the directory cannot be created.
    """
    experiment, reason = checked_run(config, overrides, plan, notify, emulated=emulated)
    exact = experiment.run.again == "resume" and not emulated
    run = directory.create(experiment, config.parent, reason, plan, exact=exact)
    return ReadyRun(run, experiment, note=_name_note(run, experiment, emulated=emulated))


def run_to_resume(config: ConfigSource, overrides: tuple[str, ...]) -> Path | str | None:
    """Return the run that a configuration with ``run.again: resume`` continues.

    It is the run in ``run.dir/name`` and no other: numbered names are not searched, because
    another configuration may have created ``name-2``.

    Returns:
        Directory or address of the run; None if the configuration begins a new run.

    Raises:
        ConfigError: the configuration is invalid.
        StoreError: the bucket does not answer or refuses.
    """
    tree = apply_overrides(parse_yaml(read_text(config), str(config)), overrides)
    keys = tree.value if isinstance(tree.value, dict) else {}
    section = keys.get("run")
    if not isinstance(section, dict) or section.get("again") != "resume":
        return None
    place, name = section.get("dir", RunConfig().dir), keys.get("name")
    if not isinstance(place, str) or not isinstance(name, str):
        return None  # the full validation reports the error
    try:
        place = expanded(place)
    except ValueError:
        return None  # as above
    found = join(place, name) if is_s3(place) else Path(place) / name
    return found if directory.is_run(found) else None


def checked_run(
    config: ConfigSource,
    overrides: tuple[str, ...],
    plan: Plan | None,
    notify: Notify,
    *,
    emulated: bool = False,
) -> tuple[Experiment, str | None]:
    """Read the configuration of a new run, and check this machine's files for it.

    Args:
        config: as for `new_run`.
        overrides: as for ``--set``.
        plan: a plan to use.
        notify: called with decisions.
        emulated: whether the run computes in this process.

    Returns:
        The experiment, and the reason for strategy and codec if `auto` chose them.

    Raises:
        ConfigError, PlanError, CertificateError: as for `new_run`.
    """
    if plan is not None:
        overrides = _following(config, overrides, plan)
        if emulated:
            overrides = (*overrides, *emulation_of(plan))
        notify(f"{plan.total_s:.4g} s and {plan.total_usd:.4g} USD predicted by the plan")
    experiment, advice = load_experiment(config, overrides, loads_loops=not emulated)
    for note in override_notes(config, overrides):
        _log.warning("%s", note)
    if advice is not None:
        notify(advice.reason)
    if emulated or experiment.cluster.kind == "local":
        check_device(experiment)
    if not emulated:
        check_own_certificates(experiment)
    return experiment, None if advice is None else advice.reason


def resumed_run(
    path: Path,
    config: ConfigSource | None,
    overrides: tuple[str, ...],
    plan: Plan | None,
    *,
    allowed: Sequence[str] = (),
    checkpoint: int | None = None,
    base_dir: Path | None = None,
    begins: bool = False,
) -> ReadyRun:
    """Open the directory of an earlier run to resume it; changes nothing in it.

    Args:
        path: directory of the run.
        config: a configuration other than the run's own.
        overrides: as for ``--set``.
        plan: a new plan to use.
        allowed: keys that may differ from the run's configuration, each with all keys below it,
            and user files that may have changed. Keys of ``overrides`` may always differ.
        checkpoint: id of a checkpoint; None: the newest complete and healthy one.
        base_dir: first base of files that the run's configuration names.
        begins: whether a run without checkpoints may start from the beginning.

    Raises:
        RunDirectoryError: there is no run.
        ConfigChangedError: the configuration differs, or its codecs do, which is never allowed.
        CheckpointMissingError: the run has no checkpoint, or was simulated.
        RunFinishedError: the run has already finished.
        ConfigError, PlanError: as for `new_run`.
    """
    near = base_dir if config is None else config.parent
    run, experiment = directory.reopen(path, allowed=allowed, near=near)
    if plan is not None:
        if config is not None or overrides:
            raise ConfigError(
                "a run that is resumed with a plan uses its own configuration",
                fix="Omit the configuration and the overrides, or the plan.",
            )
        directory.has_moved(run, experiment, allowed)
        changed = following(run, experiment, plan)
        check_resumable(run, experiment, changed, checkpoint, begins=begins)
        check_own_certificates(changed, goes_on=True)
        return ReadyRun(run, changed, True, plan)
    wanted, notes = experiment, list[str]()
    if config is not None or overrides:
        followed = directory.followed_plan(run)
        if config is not None:
            run = replace(run, base_dir=config.parent.absolute())
            if followed is not None:
                overrides = _following(config, overrides, followed)
        source = run.path / directory.CONFIG_FILE if config is None else config
        wanted, _ = load_experiment(
            source,
            overrides,
            base_dir=run.base_dir,
            may_change=allowed,
        )
        named = (*allowed, *(item.partition("=")[0].strip() for item in overrides))
        changes = directory.check_changes(experiment, wanted, named)
        notes += [f"changed: {key}: {change}" for key, change in changes.items()]
        notes += _schedule_notes(experiment, wanted)
        notes += _worker_notes(experiment, wanted)
    has_moved = directory.has_moved(run, wanted, allowed)
    check_resumable(run, experiment, wanted, checkpoint, begins=begins)
    if wanted.cluster.kind == "local":
        check_device(wanted)
    check_own_certificates(wanted, goes_on=True)
    away = _away(wanted, overrides, is_given=config is not None)
    # Compare with the file on disk: the digest of a changed user file differs there.
    written = read_text(run.path / directory.CONFIG_FILE)
    is_changed = dump_yaml(wanted) != written
    return ReadyRun(run, wanted, is_changed or has_moved, note="\n".join(notes), away=away)


def _worker_notes(saved: Experiment, wanted: Experiment) -> list[str]:
    """Return what becomes of the optimizers of workers, where another number has them."""
    kind = wanted.optimizer.kind
    if kind != saved.optimizer.kind or kind == "sgd":  # there is no state to continue with
        return []
    counts = {region.name: region.workers for region in saved.regions}
    places = [each.optimizer_places for each in (saved, wanted)]
    notes = []
    for region in wanted.regions:
        before = counts.get(region.name, region.workers)
        if before == region.workers or any(each.get(region.name) != "worker" for each in places):
            continue
        what = (
            "new ones start with the optimizer's state of the first one"
            if before < region.workers
            else "the optimizer's states of the others are dropped"
        )
        count = counted(region.workers, "worker")
        notes.append(f"{region.name} has {count} instead of {before}: {what}")
    return notes


def _schedule_notes(saved: Experiment, wanted: Experiment) -> list[str]:
    """Return a note if another number of steps stretches the learning-rate schedule."""
    schedule = wanted.optimizer.schedule
    if schedule is None or schedule.kind == "constant" or schedule.steps is not None:
        return []
    before, now = _optimizer_steps(saved), _optimizer_steps(wanted)
    if before == now or saved.optimizer.schedule != schedule:
        return []
    fraction = schedule.over(now).factor(min(before, now))
    return [
        f"the {schedule.kind} schedule of the learning rate now spans {now} steps instead of "
        f"{before}: at step {min(before, now)} the rate is {fraction:.0%} of optimizer.lr instead "
        f"of {schedule.over(before).factor(min(before, now)):.0%}; "
        f"`--set optimizer.schedule.steps={before}` keeps the old schedule"
    ]


def _optimizer_steps(experiment: Experiment) -> int:
    """Return the number of optimizer steps, which the schedule counts."""
    steps = experiment.train.steps * max(1, experiment.worker_steps)
    if experiment.train.mode == "async" and not experiment.worker_steps:
        steps *= max(region.workers for region in experiment.regions)
    return steps


def _away(wanted: Experiment, overrides: tuple[str, ...], *, is_given: bool) -> frozenset[str]:
    """Return the regions that a resume excludes.

    Without an explicit list of absent regions, all regions with state in the checkpoint take part,
    because initially absent regions may have joined since.
    """
    keys = [item.partition("=")[0].strip() for item in overrides]
    says = is_given or any(key == "members" or key.startswith(_ABSENT) for key in keys)
    return frozenset(wanted.members.absent) if says else frozenset()


def _name_note(run: RunDirectory, experiment: Experiment, *, emulated: bool) -> str:
    """Return a note if the run's name differs from that of its configuration, or ""."""
    if run.path.name == experiment.name:
        return ""
    taken = RunDirectory(run.path.parent / experiment.name, run.base_dir)
    note = f"this run is {run.path.name}, because {taken.path} exists already; "
    has_saved = bool(CheckpointStore(taken.checkpoints).ids())
    if not emulated and has_saved and load_summary(taken.path) is None:
        note += f"--resume {taken.path} continues that run, "
    return note + "--set name=NAME chooses another name"


def _following(config: ConfigSource, overrides: tuple[str, ...], plan: Plan) -> tuple[str, ...]:
    """Return the overrides that apply a plan, together with the given ones."""
    experiment = load_tree(config, overrides, Experiment)
    changes = changes_of(plan, experiment)
    check_model(plan, experiment, config.parent)
    return (*overrides, *changes)


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
    detach: bool = False,
) -> Run:
    """Train with a configuration on Ray actors, or resume an earlier run.

    An actor of the cluster runs the run, and this process only watches. If this process dies, a run
    on an existing cluster continues for `run.unattended_s`, and ``train(resume=run)`` attaches to
    it again.

    In the main thread, Ctrl-C saves a checkpoint and raises `InterruptedRunError`; a second one
    stops at once. Closing the terminal only stops the output. In other threads no signal handler
    is installed. A process that is already connected to Ray trains on that cluster with
    ``cluster: {kind: existing}``, and stays connected.

    Args:
        config: a file, a mapping, or a result of `load_config`; None only with ``resume``.
        overrides: changed values by dotted key.
        resume: an earlier run, resumed from its newest complete and healthy checkpoint.
        checkpoint: with ``resume``: id of another checkpoint, from `geo_ray.checkpoints`.
        plan: a plan, as a result of `geo_ray.plan` or a saved file.
        allow_changes: allowed differences of a resumed run: dotted keys, each with all keys below
            it, and files with custom classes. Keys of ``overrides`` may always differ.
        on_event: called with every event in this thread; an exception ends the run.
        progress: True shows the run on standard error, "plain" shows it in lines.
        base_dir: base of relative paths in a mapping or an experiment; default: the working
            directory. Paths in a file are relative to the file's directory.
        detach: return as soon as the run trains; requires ``cluster: {kind: existing}``.

    Raises:
        InterruptedRunError: by Ctrl-C; a checkpoint was saved.
        ClusterError: this process is connected to another cluster than the run's.
        GeoRayError: the run ends early; the class states the cause.
    """
    began_unix_s = command_began_unix_s()
    watch = RunWatch(progress, on_event)
    followed = None if plan is None else plan_to_follow(plan)
    changes = override_items(overrides)
    source = None if config is None else source_of(config, base_dir)
    if checkpoint is not None and resume is None:
        raise ConfigError(
            f"checkpoint {checkpoint} requires a run", fix="Also give the run to resume."
        )
    with preserving_threads(), terminal_outlived():
        again = run_to_resume(source, changes) if resume is None and source is not None else None
        resume = resume or again
        if resume is not None:
            address = _address_of(resume)
            path = directory_of(resume) if address is None else copy_path(address, "driven")
            as_it_is = source is None and not changes and followed is None and checkpoint is None
            if again is not None and source is not None:
                as_it_is = followed is None and is_unchanged(path, source, changes)
            if as_it_is and (running := _watched_if_running(path, watch, detach)):
                return running
            leases = None if address is None else RunObjects(address).lease()
            seeker = seeker_of(path, watch.notify, leases)
            seeker.wait()  # wait first, because an active run changes its files
            was_here = address is not None and is_ahead(RunObjects(address), path)
            if address is not None:
                driven_copy(address)
            try:
                with ticking("preparing the run", watch.notify):
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
            with ticking("preparing the run", watch.notify):
                ready = new_run(source, changes, followed, watch.notify)
        else:
            raise ConfigError("no configuration given", fix="Give one, or a run to resume.")
        note = ready.note
        if ready.experiment.is_served:  # it begins when its regions have joined
            for line in note.splitlines():
                watch.notify(line)
            note = ""
        with (
            _tidied(ready.run, watch, is_new=resume is None),
            watch.over(ready.experiment, note) as watched,
        ):
            if detach and ready.experiment.cluster.kind != "existing":
                raise ConfigError(
                    "a run on a local cluster ends with the process that started it",
                    fix="Omit `detach`, or use an existing cluster: `cluster: {kind: existing}`.",
                )
            goes_on = (
                None
                if resume is None
                else Resumption(checkpoint, away=ready.away, begins=again is not None)
            )
            request = RunRequest(
                ready.experiment, ready.run, goes_on, ready.is_changed, ready.plan, detach
            )
            summary = drive(request, Reporting(watched, began_unix_s))
    if summary is None:
        return open_run(ready.run.path)
    return Run(ready.run, ready.experiment, summary, finished=True)


def serve(
    config: Config,
    overrides: Overrides = (),
    *,
    on_event: OnEvent | None = None,
    progress: ShowProgress = False,
    base_dir: FilePath | None = None,
    detach: bool = False,
) -> Run:
    """Serve a run to regions that join it with `geo_ray.join`; returns when it has finished.

    All regions of the configuration have ``join: true``. An actor of the cluster averages; the
    directory ``join`` of the run has a file with credentials for each region.

    Args:
        config: as for `train`.
        overrides: as for `train`.
        on_event: as for `train`.
        progress: as for `train`.
        base_dir: as for `train`.
        detach: as for `train`.

    Raises:
        ConfigError: a region does not join.
        GeoRayError: the run ends early; the class states the cause.
    """
    check_joins(config, overrides, base_dir)
    return train(
        config, overrides, on_event=on_event, progress=progress, base_dir=base_dir, detach=detach
    )


def check_joins(
    config: Config, overrides: Overrides = (), base_dir: FilePath | None = None
) -> None:
    """Check that all regions of a configuration join; executes no loops.

    Raises:
        ConfigError: a region does not join, or the configuration is invalid.
    """
    experiment, _ = load_experiment(source_of(config, base_dir), override_items(overrides))
    if not experiment.is_served or experiment.groups:
        names = ", ".join(region.name for region in experiment.groups)
        raise ConfigError(
            f"regions: geo_ray starts the groups {names}"
            if names
            else "regions: no region of this configuration joins",
            fix="Use `geo-ray train`, or set `join: true` for each region.",
        )


def _copy_rest(address: str, path: Path, seeker: LeaseSeeker) -> None:
    """Upload the end of a finished run that ran on this machine to its bucket.

    Raises:
        RunHeldError, StoreError, RunDirectoryError: as for `driving` and `uploading`.
    """
    with driving(seeker) as held, uploading(address, path, held.token, held.check):
        pass


def _address_of(run: FilePath | Run) -> str | None:
    """Return the address of a run in a bucket; None for a run in a directory."""
    if isinstance(run, Run):
        return run.directory.address
    return run if isinstance(run, str) and is_s3(run) else copied_from(Path(run))


def is_unchanged(path: Path, source: ConfigSource, overrides: tuple[str, ...]) -> bool:
    """Return whether a configuration equals that of the run in a directory."""
    saved = path / directory.CONFIG_FILE
    if not saved.is_file():
        return False
    wanted, _ = load_experiment(source, overrides)
    return dump_yaml(wanted) == read_text(saved)


def _watched_if_running(path: Path, watch: RunWatch, detach: bool) -> Run | None:
    """Watch an active run until its end; None if it is not active, or not reachable."""
    if not path.is_dir():
        return None
    run, experiment = directory.reopen(path, read_only=True)
    if experiment.cluster.kind != "existing" or not may_be_running(run):
        return None
    with _tidied(run, watch, is_new=False), watch.over(experiment) as shown:
        is_running, summary = watch_running(run, experiment, shown, detach=detach)
    if not is_running:
        return None
    return open_run(path) if summary is None else Run(run, experiment, summary, finished=True)


def simulate(
    config: Config,
    overrides: Overrides = (),
    *,
    plan: FollowedPlan | None = None,
    on_event: OnEvent | None = None,
    progress: ShowProgress = False,
    base_dir: FilePath | None = None,
) -> Run:
    """Simulate training with real gradients on emulated links and a virtual clock.

    Seconds in the result are predictions for the real run. Needs no cluster.

    Args:
        config: a file, a mapping, or a result of `load_config`.
        overrides: changed values by dotted key.
        plan: a plan to use, on machines with its speeds.
        on_event: called with every event; an exception ends the run.
        progress: as for `train`.
        base_dir: as for `train`.

    Raises:
        GeoRayError: configuration, task or data are invalid.
    """
    watch = RunWatch(progress, on_event)
    followed = None if plan is None else plan_to_follow(plan)
    with preserving_threads():
        source = source_of(config, base_dir)
        with ticking("preparing the run", watch.notify):
            ready = new_run(
                source, override_items(overrides), followed, watch.notify, emulated=True
            )
        with (
            _tidied(ready.run, watch, is_new=True),
            uploading(ready.run.address, ready.run.path, 1, lambda: None),
            reported(ready.run.path),
            watch.over(ready.experiment, ready.note) as watched,
        ):
            summary = simulate_to_end(ready.experiment, ready.run, watched)
    return Run(ready.run, ready.experiment, summary, finished=True)


@contextmanager
def _tidied(run: RunDirectory, watch: RunWatch, *, is_new: bool) -> Iterator[None]:
    """Print the report of a failed run, and remove the directory of one that did not begin.

    A run that was stopped at once names the command that resumes it, if it has a checkpoint.
    """
    try:
        yield
    except (LeaseLostError, RunHeldError):
        is_new = False  # the run belongs to another process
        raise
    except KeyboardInterrupt:
        if has_checkpoint(run.path):
            resume = f"geo-ray train {_resume_option(run.path)}"
            watch.notify(f"the newest checkpoint is kept: `{resume}` continues from it")
        elif is_new and not has_begun(run.path):
            watch.notify(f"the run had not begun: {short_path(run.path)} is removed")
        raise
    except GeoRayError as error:
        if has_begun(run.path) and (run.path / REPORT_FILE).exists():
            watch.notify(f"report   {short_path(run.path / REPORT_FILE)}")
        raise name_run(error, run.path) from error.__cause__
    finally:
        if is_new and not has_begun(run.path):
            directory.discard(run)


def name_run(error: GeoRayError, run_dir: Path) -> GeoRayError:
    """Return the error with the run's directory in its advice, ready to be copied.

    A run without a checkpoint cannot be resumed; then the advice is to start again.
    """
    fix = error.fix
    if "--resume RUN" in fix and not has_checkpoint(run_dir):
        fix = fix.replace("geo-ray train --resume RUN", f"{_start_command(run_dir)} CONFIG")
        fix = fix.replace("Resume with", "Start again with")
        fix = fix.replace("; nothing committed is lost", "") + " No checkpoint was saved."
    named = type(error)(error.message, fix=fix.replace("--resume RUN", _resume_option(run_dir)))
    return named.with_traceback(error.__traceback__)  # replaces the original error


def _resume_option(run_dir: Path) -> str:
    shown = copied_from(run_dir) or str(short_path(run_dir))
    return f"--resume {shlex.quote(shown)}"


def _start_command(run_dir: Path) -> str:
    """Return the command that starts a run like the one in a directory."""
    try:
        return start_command(directory.recorded_run(run_dir)[1].regions)
    except GeoRayError:  # no run, or an unreadable one
        return "geo-ray train"


def short_path(path: Path) -> Path:
    """Return the path relative to the working directory, if it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def check_own_certificates(experiment: Experiment, *, goes_on: bool = False) -> None:
    """Check `transport.certs` on this host.

    On an existing cluster, bridges run on other hosts, and each checks its own certificate at its
    start.

    Args:
        experiment: the run.
        goes_on: whether the run is resumed: it may continue without a region that was revoked
            since, whose bridge alone is then refused.

    Raises:
        CertificateError: names the region and the file.
    """
    transport = experiment.transport
    if transport.certs is None or transport.tls == "off" or len(experiment.regions) < 2:
        return
    directory, names = Path(transport.certs), experiment.region_names
    if experiment.cluster.kind != "local":
        names = tuple(name for name in names if Path(files_of(directory, name).cert).exists())
    if goes_on:
        names = tuple(name for name in names if not is_revoked(directory, name))
    check_certificates(directory, names)
