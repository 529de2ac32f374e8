"""What commands that run a configuration share: the option ``--plan``, and a new directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from geo_ray.config.experiment import Experiment
    from geo_ray.job.rundir import RunDirectory
    from geo_ray.planning.plan import Plan

plan_option = click.option(
    "--plan",
    "plan_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Follow a plan of `geo-ray plan --out`: workers, batches, averager, interval, codec.",
)


def planned(
    config: Path, overrides: tuple[str, ...], plan_file: Path | None, *, emulated: bool = False
) -> tuple[tuple[str, ...], Plan | None]:
    """Overrides that make CONFIG what a plan says, and the plan; says what is predicted.

    Without a plan the overrides are those that are given.

    Args:
        config: the file.
        overrides: those that are given.
        plan_file: the plan.
        emulated: whether its machines are to be as fast as it takes them to be.

    Raises:
        PlanError: the plan cannot be read, or is for something else.
    """
    from geo_ray.job.follow_plan import emulation_of
    from geo_ray.planning.plan import load_plan

    if plan_file is None:
        return overrides, None
    plan = load_plan(plan_file)
    followed = following(config, overrides, plan)
    if emulated:
        followed = (*followed, *emulation_of(plan))
    total = f"{plan.total_s:.4g} s and {plan.total_usd:.4g} USD are predicted"
    click.echo(f"following the plan of {plan_file}: {total}", err=True)
    return followed, plan


def following(config: Path, overrides: tuple[str, ...], plan: Plan) -> tuple[str, ...]:
    """Overrides that make CONFIG, with those that are given, what a plan says.

    Raises:
        PlanError: it is for something else.
    """
    from geo_ray.config.experiment import Experiment
    from geo_ray.config.load import load_tree
    from geo_ray.job.follow_plan import changes_of, check_model

    experiment = load_tree(config, overrides, Experiment)
    changes = changes_of(plan, experiment)
    check_model(plan, experiment, config.parent)
    return (*overrides, *changes)


def new_run(
    experiment: Experiment, base_dir: Path, reason: str | None, plan: Plan | None
) -> RunDirectory:
    """Make the directory of a new run; says so if that has another name than the run.

    Args:
        experiment: the run.
        base_dir: where relative paths of its configuration start.
        reason: why `auto` chose what it chose, if it did.
        plan: what the run follows, if it does.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    from geo_ray.job import rundir

    run = rundir.create(experiment, base_dir, reason, plan)
    if run.path.name != experiment.name:
        taken = run.path.parent / experiment.name
        click.echo(
            f"this run is {run.path.name}, as {taken} is there already; --resume {taken} goes on "
            "with that one, --set name=NAME chooses another name",
            err=True,
        )
    return run
