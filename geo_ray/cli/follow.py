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
