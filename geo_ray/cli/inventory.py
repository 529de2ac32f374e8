"""`geo-ray inventory`: what could be rented, as a part of a configuration."""

from __future__ import annotations

from pathlib import Path

import click

from geo_ray.cli.paths import loading
from geo_ray.cli.say import say_json


@click.command(short_help="Show what could be rented, as Terraform's outputs have it.")
@click.option(
    "--from-terraform",
    "source",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR|FILE",
    help="Where `terraform apply` ran, or a file of `terraform output -json`.",
)
@click.option("--json", "as_json", is_flag=True, help="All that the stack says, as JSON.")
def inventory(source: Path, as_json: bool) -> None:
    """Print what a stack of infra/terraform offers, as sections of a configuration.

    Speeds (`rows_per_s`) are yours to add, or those of `geo-ray profile`. Nothing is rented.
    """
    loading()
    import geo_ray
    import geo_ray.api.clusters

    found = geo_ray.api.clusters.inventory(source)
    if as_json:
        say_json(found.stack.model_dump_json(indent=2))
    else:
        click.echo(found.yaml(), nl=False)
