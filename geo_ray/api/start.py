"""A run before it starts: its configuration, the plan it follows, its directory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

from geo_ray.api.auto import load_experiment
from geo_ray.checkpoint.store import CheckpointStore
from geo_ray.config.base import expanded
from geo_ray.config.experiment import Experiment
from geo_ray.config.load import dump_yaml, load_tree, override_notes, read_text
from geo_ray.config.overrides import apply_overrides
from geo_ray.config.recorded import RunConfig
from geo_ray.config.source import ConfigSource
from geo_ray.config.yaml_text import parse_yaml
from geo_ray.errors import ConfigError
from geo_ray.job import rundir
from geo_ray.job.build import check_device
from geo_ray.job.follow_plan import changes_of, check_model, emulation_of
from geo_ray.job.resumption import check_resumable
from geo_ray.job.rundir import RunDirectory
from geo_ray.job.start.cert_files import check_own_certificates
from geo_ray.observe.events.schema import Event
from geo_ray.observe.metrics.summary import load_summary
from geo_ray.planning.plan import Plan
from geo_ray.stores.uri import is_s3, join

Tell: TypeAlias = Callable[[str], None]
_ABSENT: Final = "members.absent"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadyRun:
    """A run that can start.

    Attributes:
        run: its directory.
        experiment: its configuration.
        is_changed: whether that is another one than the directory has.
        plan: to follow from now on, if it is another one than before.
        note: what people are told once it has begun; "" for nothing.
        away: regions that are not to take part in a run that is resumed, whatever its checkpoint
            has.
    """

    run: RunDirectory
    experiment: Experiment
    is_changed: bool = False
    plan: Plan | None = None
    note: str = ""
    away: frozenset[str] = frozenset()

    def begun(self, event: Event) -> None:
        """Write a changed configuration down once the run goes on; given every event.

        Not before: a resumption that is refused, by a node for example, changes nothing.

        Raises:
            RunDirectoryError: it cannot be written.
        """
        if event.kind == "run_started" and self.is_changed:
            rundir.adopt(self.run, self.experiment, self.plan)


def new_run(
    config: ConfigSource,
    overrides: tuple[str, ...],
    plan: Plan | None,
    tell: Tell,
    *,
    emulated: bool = False,
) -> ReadyRun:
    """Read the configuration and make the directory of a new run.

    Args:
        config: where it comes from.
        overrides: as for ``--set``.
        plan: to follow: workers, batches, averager, interval, codec.
        tell: told what was decided.
        emulated: whether it computes in this process, on machines as fast as the plan takes them
            to be.

    Raises:
        ConfigError: the configuration is wrong.
        PlanError: the plan is for something else.
        CertificateError: a region's certificate could not be used.
        RunDirectoryError: the directory cannot be made.
    """
    experiment, reason = checked_run(config, overrides, plan, tell, emulated=emulated)
    exact = experiment.run.again == "resume" and not emulated
    run = rundir.create(experiment, config.parent, reason, plan, exact=exact)
    return ReadyRun(run, experiment, note=_name_note(run, experiment, emulated=emulated))


def run_to_resume(config: ConfigSource, overrides: tuple[str, ...]) -> Path | str | None:
    """Return the run that a configuration with ``run.again: resume`` continues.

    It is the run in ``run.dir/name`` and no other: runs are not searched by counting names, as
    another configuration may have made ``name-2``.

    Returns:
        Its directory or address; None if the configuration begins a new run.

    Raises:
        ConfigError: the configuration is wrong.
        StoreError: the bucket does not answer or refuses.
    """
    tree = apply_overrides(parse_yaml(read_text(config), str(config)), overrides)
    keys = tree.value if isinstance(tree.value, dict) else {}
    section = keys.get("run")
    if not isinstance(section, dict) or section.get("again") != "resume":
        return None
    place, name = section.get("dir", RunConfig().dir), keys.get("name")
    if not isinstance(place, str) or not isinstance(name, str):
        return None  # the full validation says what is wrong
    try:
        place = expanded(place)
    except ValueError:
        return None  # as above
    found = join(place, name) if is_s3(place) else Path(place) / name
    return found if rundir.is_run(found) else None


def checked_run(
    config: ConfigSource,
    overrides: tuple[str, ...],
    plan: Plan | None,
    tell: Tell,
    *,
    emulated: bool = False,
) -> tuple[Experiment, str | None]:
    """Read the configuration of a new run, and look at what this machine has for it.

    Args:
        config: as for `new_run`, as are the others.
        overrides: as for ``--set``.
        plan: to follow.
        tell: told what was decided.
        emulated: whether it computes in this process.

    Returns:
        The experiment; why strategy and codec are what they are, if `auto` chose them.

    Raises:
        ConfigError, PlanError, CertificateError: as for `new_run`.
    """
    if plan is not None:
        overrides = _following(config, overrides, plan)
        if emulated:
            overrides = (*overrides, *emulation_of(plan))
        tell(f"{plan.total_s:.4g} s and {plan.total_usd:.4g} USD are predicted by the plan")
    experiment, advice = load_experiment(config, overrides)
    for note in override_notes(config, overrides):
        _log.warning("%s", note)
    if advice is not None:
        tell(advice.reason)
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
    """Open the directory of an earlier run, to go on with it; changes nothing in it.

    Args:
        path: the directory.
        config: another configuration than the run's own.
        overrides: as for ``--set``.
        plan: to follow from now on.
        allowed: keys that may differ from the run's configuration, each with all keys below it,
            and files of the user's that may have changed. Keys of ``overrides`` may, too.
        checkpoint: to go on from; None: the newest that is whole and healthy.
        base_dir: where to look first for files that the run's own configuration names.
        begins: whether a run that never saved may start from the beginning.

    Raises:
        RunDirectoryError: there is no run.
        ConfigDriftError: the configuration differs; or its codecs do, which no run outlives.
        CheckpointMissingError: it never saved, or was simulated.
        RunFinishedError: nothing would come of it.
        ConfigError, PlanError: as for `new_run`.
    """
    near = base_dir if config is None else config.parent
    run, experiment = rundir.reopen(path, allowed=allowed, near=near)
    if plan is not None:
        if config is not None or overrides:
            raise ConfigError(
                "a run that is resumed with a plan has its own configuration",
                fix="Leave out the configuration and the overrides, or the plan.",
            )
        rundir.has_moved(run, experiment, allowed)
        changed = rundir.following(run, experiment, plan)
        check_resumable(run, experiment, changed, checkpoint, begins=begins)
        check_own_certificates(changed, goes_on=True)
        return ReadyRun(run, changed, True, plan)
    wanted, notes = experiment, list[str]()
    if config is not None or overrides:
        followed = rundir.followed_plan(run)
        if config is not None:
            run = replace(run, base_dir=config.parent.absolute())
            if followed is not None:
                overrides = _following(config, overrides, followed)
        source = run.path / rundir.CONFIG_FILE if config is None else config
        wanted, _ = load_experiment(
            source,
            overrides,
            base_dir=run.base_dir,
            may_change=allowed,
        )
        named = (*allowed, *(item.partition("=")[0].strip() for item in overrides))
        changes = rundir.check_drift(experiment, wanted, named)
        notes += [f"changed: {key}: {change}" for key, change in changes.items()]
        notes += _schedule_notes(experiment, wanted)
    has_moved = rundir.has_moved(run, wanted, allowed)
    check_resumable(run, experiment, wanted, checkpoint, begins=begins)
    if wanted.cluster.kind == "local":
        check_device(wanted)
    check_own_certificates(wanted, goes_on=True)
    away = _away(wanted, overrides, is_given=config is not None)
    # Compared with what is on the disk: a file that may have changed has another digest there.
    written = read_text(run.path / rundir.CONFIG_FILE)
    is_changed = dump_yaml(wanted) != written
    return ReadyRun(run, wanted, is_changed or has_moved, note="\n".join(notes), away=away)


def _schedule_notes(saved: Experiment, wanted: Experiment) -> list[str]:
    """Say that another number of steps stretches the schedule of the learning rate."""
    schedule = wanted.optimizer.schedule
    if schedule is None or schedule.kind == "constant" or schedule.steps is not None:
        return []
    before, now = _optimizer_steps(saved), _optimizer_steps(wanted)
    if before == now or saved.optimizer.schedule != schedule:
        return []
    share = schedule.over(now).factor(min(before, now))
    return [
        f"the {schedule.kind} schedule of the learning rate now spans {now} steps instead of "
        f"{before}: at step {min(before, now)} the rate is {share:.0%} of optimizer.lr instead of "
        f"{schedule.over(before).factor(min(before, now)):.0%}; "
        f"`--set optimizer.schedule.steps={before}` keeps it as it was"
    ]


def _optimizer_steps(experiment: Experiment) -> int:
    """Steps of an optimizer, which is what a schedule counts."""
    steps = experiment.train.steps * max(1, experiment.worker_steps)
    if experiment.train.mode == "async" and not experiment.worker_steps:
        steps *= max(region.workers for region in experiment.regions)
    return steps


def _away(wanted: Experiment, overrides: tuple[str, ...], *, is_given: bool) -> frozenset[str]:
    """Regions that a resumption says are not to take part.

    Where it does not say who is absent, all do whose state the checkpoint has: of those that were
    not there as the run began, some may have joined since.
    """
    keys = [item.partition("=")[0].strip() for item in overrides]
    says = is_given or any(key == "members" or key.startswith(_ABSENT) for key in keys)
    return frozenset(wanted.members.absent) if says else frozenset()


def _name_note(run: RunDirectory, experiment: Experiment, *, emulated: bool) -> str:
    """Why a run is called otherwise than its configuration says; "" if it is not."""
    if run.path.name == experiment.name:
        return ""
    taken = RunDirectory(run.path.parent / experiment.name, run.base_dir)
    note = f"this run is {run.path.name}, as {taken.path} is there already; "
    has_saved = bool(CheckpointStore(taken.checkpoints).ids())
    if not emulated and has_saved and load_summary(taken.path) is None:
        note += f"--resume {taken.path} goes on with that one, "
    return note + "--set name=NAME chooses another name"


def _following(config: ConfigSource, overrides: tuple[str, ...], plan: Plan) -> tuple[str, ...]:
    """Overrides that make the configuration, with those that are given, what a plan says."""
    experiment = load_tree(config, overrides, Experiment)
    changes = changes_of(plan, experiment)
    check_model(plan, experiment, config.parent)
    return (*overrides, *changes)
