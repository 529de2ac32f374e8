"""`plan`, `replan` and `profile`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from geo_ray.api.config import Config, FilePath, Overrides, preserving_threads, source_of
from geo_ray.api.display import OnEvent, RunWatch, ShowProgress, Table
from geo_ray.api.run import Run
from geo_ray.api.status import directory_of
from geo_ray.base.clock import command_began_unix_s
from geo_ray.base.errors import ConfigError
from geo_ray.base.files import save_text
from geo_ray.base.load import load_tree, override_items
from geo_ray.base.notebooks import html_view
from geo_ray.base.text import bytes_text, duration_text, number_text
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.loss import BITS_PER_PARAM
from geo_ray.planner.plan import Plan, load_plan, tfvars_text
from geo_ray.planner.profile import Profile, save_profile
from geo_ray.runs.planning import (
    Policy,
    Sources,
    begin_profile,
    default_profile_path,
    machine_types_of,
    make_plan,
)
from geo_ray.runs.replanning import decide
from geo_ray.sweep.profile import Corner, corners, hardware, measure, missing


@dataclass(frozen=True, repr=False)
class PlanResult:
    """A plan: machines and settings, with predicted time and cost.

    Attributes:
        name: name of the configuration.
        plan: the plan, with every term of time and cost.
        front: the Pareto front of time and cost; empty unless requested.
        reason: why this plan was chosen.
        changed: for a run that follows a plan: whether another plan pays off.
    """

    name: str
    plan: Plan
    front: tuple[Plan, ...]
    reason: str
    changed: bool = True

    @property
    def seconds(self) -> float:
        """Predicted seconds of the job."""
        return self.plan.total_s

    @property
    def usd(self) -> float:
        """Predicted cost of the job in USD."""
        return self.plan.total_usd

    def save(self, path: FilePath) -> Path:
        """Write the plan for `geo_ray.train` and `geo-ray train --plan`.

        Raises:
            RunDirectoryError: the file cannot be written.
        """
        return save_text(Path(path), self.plan.model_dump_json(indent=2) + "\n")

    def save_tfvars(self, path: FilePath) -> Path:
        """Write its machines as the variable `workers` of a stack of infra/terraform.

        Raises:
            RunDirectoryError: the file cannot be written.
        """
        return save_text(Path(path), tfvars_text(self.plan))

    def table(self) -> Table:
        """Return a row per region and machine type."""
        rows = [
            {"region": region.region, **machines.model_dump(), "step_s": region.step_s}
            for region in self.plan.regions
            for machines in region.machines
        ]
        return Table(rows)

    def terms(self) -> Table:
        """Return a row per term of time and cost."""
        rows = [(term, "s", value) for term, value in self.plan.seconds.items()]
        rows += [(term, "USD", value) for term, value in self.plan.usd.items()]
        return Table([{"term": term, "unit": unit, "value": value} for term, unit, value in rows])

    def __repr__(self) -> str:
        totals = f"{duration_text(self.seconds)}, {self.usd:.2f} USD"
        exchange = f"exchange every {self.plan.interval} steps"
        return f"<Plan {self.plan.policy}: {totals}, averager {self.plan.averager}, {exchange}>"

    def _repr_html_(self) -> str:
        headings = ("region", "machines", "market", "rows per step", "USD/h each", "step")
        rows = [
            (
                row["region"],
                f"{row['count']} x {row['type']}",
                row["market"].replace("_", "-"),
                str(row["rows"]),
                number_text(row["usd_per_h"]),
                duration_text(row["step_s"]),
            )
            for row in self.table().to_pylist()
        ]
        return html_view(repr(self)[1:-1], headings, rows)


FollowedPlan: TypeAlias = FilePath | Plan | PlanResult


def plan_to_follow(plan: FollowedPlan) -> Plan:
    """Return the plan in a file or in a result of `plan`.

    Raises:
        PlanError: the file is not a plan.
    """
    if isinstance(plan, PlanResult):
        return plan.plan
    return load_plan(Path(plan)) if isinstance(plan, (str, os.PathLike)) else plan


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Inputs of a plan, in addition to the configuration.

    Attributes:
        prices: price files; later files override earlier ones.
        links: a link table of `probe`; default: the emulated links, or those of the profile.
        profile: a profile of `geo_ray.profile`; default: one of this model below ``run.dir``.
        extrapolate: allow values outside the measured range.
        loss: a loss profile of `profile_loss`; default: one of this task below ``run.dir``.
    """

    prices: Sequence[FilePath] = ()
    links: FilePath | None = None
    profile: FilePath | None = None
    extrapolate: bool = False
    loss: FilePath | None = None

    def sources(self) -> Sources:
        """Return these inputs for the planner."""
        return Sources(
            tuple(Path(price) for price in self.prices),
            None if self.links is None else Path(self.links),
            None if self.profile is None else Path(self.profile),
            self.extrapolate,
            None if self.loss is None else Path(self.loss),
        )


def plan(
    config: Config,
    overrides: Overrides = (),
    *,
    policy: Policy = "optimal",
    inputs: PlanInputs | None = None,
    front: bool = False,
    base_dir: FilePath | None = None,
) -> PlanResult:
    """Choose machines, averager, interval and codec by time and cost; start nothing.

    Args:
        config: a file, a mapping, or a result of `load_config`, with a section ``plan``.
        overrides: changed values by dotted key.
        policy: planning policy; see docs/guides/planning.md.
        inputs: prices, links and profile.
        front: also compute the Pareto front of time and cost.
        base_dir: as for `geo_ray.train`.

    Raises:
        PlanInfeasibleError: no plan meets every constraint; names a sufficient change.
        GeoRayError: a plan cannot be made for another reason.
    """
    with preserving_threads():
        source = source_of(config, base_dir)
        experiment = load_tree(source, override_items(overrides), Experiment)
        sources = (inputs or PlanInputs()).sources()
        made = make_plan(experiment, source.parent, policy, sources, with_front=front)
    return PlanResult(experiment.name, made.plan, tuple(made.front), made.plan.reason)


def replan(
    run: Run | FilePath,
    config: Config,
    overrides: Overrides = (),
    *,
    inputs: PlanInputs | None = None,
    age_h: float | None = None,
    base_dir: FilePath | None = None,
) -> PlanResult:
    """Plan the rest of a run that follows a plan: whether a change pays off.

    Args:
        run: the run, or its directory.
        config: its configuration, as for `plan`.
        overrides: changed values by dotted key.
        inputs: as for `plan`.
        age_h: hours since the run's first machines were rented, for prices that decrease with age;
            default: the duration of its starts and the run, without pauses.
        base_dir: as for `geo_ray.train`.

    Raises:
        ConfigError: the age is not a number of hours.
        GeoRayError: a plan cannot be made for another reason.
    """
    if age_h is not None and not 0 <= age_h < math.inf:
        raise ConfigError(f"age_h: {age_h} is not an age", fix="Give hours, 0 or more.")
    with preserving_threads():
        source = source_of(config, base_dir)
        experiment = load_tree(source, override_items(overrides), Experiment)
        path = directory_of(run)
        sources = (inputs or PlanInputs()).sources()
        decision = decide(experiment, source.parent, path, sources, age_h)
    return PlanResult(experiment.name, decision.plan, (), decision.reason, decision.changed)


@dataclass(frozen=True, repr=False)
class ProfileResult:
    """Measured durations of steps and exchanges.

    Attributes:
        profile: all measurements.
        path: file of the profile.
    """

    profile: Profile
    path: Path

    def table(self) -> Table:
        """Return a row per region, machine, number of workers and rows."""
        return Table([point.model_dump() for point in self.profile.steps])

    def exchanges(self) -> Table:
        """Return a row per codec."""
        return Table([point.model_dump() for point in self.profile.exchanges])

    def __repr__(self) -> str:
        codecs = ", ".join(point.codec or "no codec" for point in self.profile.exchanges)
        return f"<Profile {self.path}: {len(self.profile.steps)} points, exchanges with {codecs}>"

    def _repr_html_(self) -> str:
        headings = ("region", "machine", "workers", "rows", "step", "update")
        sizes = ", ".join(bytes_text(each.up_bytes) for each in self.profile.exchanges)
        rows = [
            (p.region, p.machine, str(p.workers), str(p.rows), duration_text(p.step_s), sizes)
            for p in self.profile.steps
        ]
        return html_view(repr(self)[1:-1], headings, rows)


@dataclass(frozen=True, slots=True)
class ProfileGrid:
    """Measurements of a profile.

    Attributes:
        workers: numbers of workers per region; default: 1 and all.
        batch_sizes: rows per worker; default: a quarter and all.
        codecs: codecs of exchanges, None for no codec; default: the configuration's.
        machines: instance type by region, where several could be rented.
        steps: steps of each run.
        full: measure every combination instead of three extremes.
        fresh: repeat measurements of an earlier profile.
    """

    workers: Sequence[int] = ()
    batch_sizes: Sequence[int] = ()
    codecs: Sequence[str | None] | None = None
    machines: Mapping[str, str] | None = None
    steps: int = 20
    full: bool = False
    fresh: bool = False


def profile(
    config: Config,
    overrides: Overrides = (),
    *,
    grid: ProfileGrid | None = None,
    out: FilePath | None = None,
    on_event: OnEvent | None = None,
    progress: ShowProgress = False,
    base_dir: FilePath | None = None,
) -> ProfileResult:
    """Measure a job with short runs on real actors, for `plan`.

    Args:
        config: a file, a mapping, or a result of `load_config`.
        overrides: changed values by dotted key.
        grid: points to measure; measurements of an earlier profile of the same model are reused.
        out: output file; default: ``RUN.DIR/profiles/NAME.json``.
        on_event: called with every event of every run.
        progress: report progress on standard error.
        base_dir: as for `geo_ray.train`.

    Raises:
        InterruptedRunError: by Ctrl-C; finished measurements are saved.
        GeoRayError: a run ends early.
    """
    began_unix_s = command_began_unix_s()
    grid = grid or ProfileGrid()
    watch = RunWatch(progress, on_event)
    with preserving_threads():
        source = source_of(config, base_dir)
        experiment = load_tree(source, override_items(overrides), Experiment)
        path = default_profile_path(experiment) if out is None else Path(out)
        named = [f"{region}={kind}" for region, kind in (grid.machines or {}).items()]
        labels = machine_types_of(experiment, named)
        batch = experiment.data.batch_size
        most = max(region.workers for region in experiment.regions)
        if experiment.groups:
            wanted = _of_groups(experiment, grid)
        else:
            wanted = corners(
                _counts("workers", grid.workers) or (1, most),
                _counts("batch_sizes", grid.batch_sizes) or (max(1, batch // 4), batch),
                _codecs(experiment, grid.codecs),
                full=grid.full,
            )
        known = begin_profile(experiment, source.parent, path, hardware(experiment))
        todo = wanted if grid.fresh else missing(wanted, experiment, labels, known)
        if len(todo) < len(wanted):
            watch.notify(f"{len(wanted) - len(todo)} of {len(wanted)} runs are known from {path}")
        found = known
        observer = watch.observer, began_unix_s
        profiles = measure(experiment, source.parent, todo, labels, known, grid.steps, *observer)
        with closing(profiles):
            for found in profiles:
                save_profile(found, path)  # after each run, so that an interrupt loses at most one
    return ProfileResult(found, path)


def _of_groups(experiment: Experiment, grid: ProfileGrid) -> list[Corner]:
    """Return the run that measures groups: with all of their ranks.

    Raises:
        ConfigError: the grid has other points.
    """
    if grid.workers or grid.batch_sizes or grid.codecs:
        raise ConfigError(
            "a group is measured with its own ranks, data.batch_size and codec",
            fix="Omit --workers, --batch-sizes and --codecs; change the configuration by --set.",
        )
    most = max(region.group.world_size for region in experiment.groups if region.group is not None)
    return [Corner(most, experiment.data.batch_size)]


def _counts(name: str, values: Sequence[int]) -> Sequence[int]:
    if any(value < 1 for value in values):
        raise ConfigError(f"{name}: {list(values)} are not positive", fix="Give whole numbers.")
    return values


def _codecs(experiment: Experiment, named: Sequence[str | None] | None) -> Sequence[str | None]:
    if named is None:
        up = experiment.codec.up
        return (up.kind if up is not None and up.kind in BITS_PER_PARAM else None,)
    for each in named:
        if each not in BITS_PER_PARAM:
            known = ", ".join(str(name or "none") for name in BITS_PER_PARAM)
            raise ConfigError(f"codecs: {each} cannot be profiled", fix=f"Choose among {known}.")
    return named
