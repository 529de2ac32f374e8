"""`geo-ray members`: which regions take part in a run, and how to change that while it goes on."""

from __future__ import annotations

import click

from geo_ray.cli.paths import RunRef, RunReference, run_directory
from geo_ray.cli.stop import show_asked

_VERBS = ("add", "drain", "remove")


@click.command()
@click.argument("run_dir", metavar="RUN", type=RunReference(), callback=run_directory)
@click.argument("verb", required=False, type=click.Choice(_VERBS))
@click.argument("region", required=False)
def members(run_dir: RunRef, verb: str | None, region: str | None) -> None:
    """Show the regions that take part in RUN, or change which do.

    add REGION: a region of the configuration that takes no part joins.

    drain REGION: a region leaves, with all it has done.

    remove REGION: a region is given up at once, with what it had not sent.
    """
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    import geo_ray
    from geo_ray.errors import ConfigError

    if verb is not None and region is None:
        raise ConfigError(
            f"{verb}: no region is named", fix=f"Say `geo-ray members RUN {verb} REGION`."
        )
    if verb is not None and region is not None:
        geo_ray.change_members(run_dir, verb, region)
        show_asked(
            run_dir,
            f"asked: {verb} {region}; what comes of it is shown by whoever trains {run_dir}",
        )
        return
    table = Table(box=SIMPLE)
    for heading in ("region", "state", "since step"):
        table.add_column(heading)
    for row in geo_ray.members(run_dir).to_pylist():
        since = "" if row["step"] is None else f"{row['step']:,}"
        table.add_row(row["region"], row["state"], since)
    Console().print(table)
