"""`geo-ray inventory`: prints the machines that can be rented, as configuration sections."""

from __future__ import annotations

from pathlib import Path

import click

from geo_ray.cli.paths import loading
from geo_ray.cli.say import say_json


@click.command(short_help="Show the machines that a Terraform stack offers.")
@click.option(
    "--from-terraform",
    "source",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR|FILE",
    help="Directory of `terraform apply`, or a file of `terraform output -json`.",
)
@click.option("--json", "as_json", is_flag=True, help="Print all outputs of the stack as JSON.")
def inventory(source: Path, as_json: bool) -> None:
    """Print the machines of a stack of infra/terraform as configuration sections.

    Add speeds (`rows_per_s`) by hand or with `geo-ray profile`. Nothing is rented.
    """
    loading()
    import geo_ray
    import geo_ray.api.clusters

    found = geo_ray.api.clusters.inventory(source)
    if as_json:
        say_json(found.stack.model_dump_json(indent=2))
    else:
        click.echo(found.yaml(), nl=False)
