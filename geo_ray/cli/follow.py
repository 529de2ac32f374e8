"""The option ``--plan`` of commands that run a configuration."""

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
