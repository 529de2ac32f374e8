"""Options of commands that run a configuration: ``--plan``, and what is a key instead."""

from __future__ import annotations

from pathlib import Path

import click

from geo_ray.cli.paths import config_file

plan_option = click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path),
    callback=config_file,
    help="Follow a plan of `geo-ray plan --out`: workers, batches, averager, interval, codec.",
)


def _key_instead(_: click.Context, __: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise click.UsageError(
            f"there is no option --steps; did you mean --set train.steps={value}?"
        )


steps_hint = click.option(
    "--steps", hidden=True, expose_value=False, callback=_key_instead, is_eager=True
)
