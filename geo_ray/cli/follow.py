"""The option ``--plan`` of commands that run a configuration."""

from __future__ import annotations

from pathlib import Path

import click

plan_option = click.option(
    "--plan",
    "plan_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Follow a plan of `geo-ray plan --out`: workers, batches, averager, interval, codec.",
)


def planned(config: Path, overrides: tuple[str, ...], plan_file: Path) -> list[str]:
    """Further overrides that make CONFIG what a plan says; says what is predicted.

    Raises:
        PlanError: the plan cannot be read, or is for something else.
    """
    from geo_ray.config.experiment import Experiment
    from geo_ray.config.load import load_tree
    from geo_ray.job.follow_plan import changes_of
    from geo_ray.planning.plan import load_plan

    plan = load_plan(plan_file)
    changes = changes_of(plan, load_tree(config, overrides, Experiment))
    total = f"{plan.total_s:.4g} s and {plan.total_usd:.4g} USD are predicted"
    click.echo(f"following the plan of {plan_file}: {total}", err=True)
    return changes
