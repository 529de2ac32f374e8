"""`geo-ray members`: which regions take part in a run, and how to change that while it goes on."""

from __future__ import annotations

from shlex import quote

import click

from geo_ray.cli.paths import RunRef, RunReference, run_directory
from geo_ray.cli.say import say

_VERBS = ("add", "drain", "remove")


@click.command()
@click.argument("run_dir", metavar="RUN", type=RunReference(), callback=run_directory)
@click.argument("verb", required=False, type=click.Choice(_VERBS))
@click.argument("region", required=False)
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0.0),
    default=10.0,
    show_default=True,
    help="Seconds to wait for the answer to a request.",
)
@click.option("--no-wait", is_flag=True, help="Ask, and wait for no answer.")
def members(
    run_dir: RunRef, verb: str | None, region: str | None, wait_s: float, no_wait: bool
) -> None:
    """Show the regions that take part in RUN, or change which do.

    add REGION: a region of the configuration that takes no part joins.

    drain REGION: a region leaves, with all it has done.

    remove REGION: a region is given up at once, with what it had not sent.

    A request that is refused is an error, which says why.
    """
    from rich.box import SIMPLE
    from rich.console import Console

    import geo_ray
    from geo_ray.api.status import change_members
    from geo_ray.base.errors import ConfigError
    from geo_ray.base.tables import FittedTable

    if verb is not None and region is None:
        raise ConfigError(
            f"{verb}: no region is named", fix=f"Say `geo-ray members RUN {verb} REGION`."
        )
    if verb is not None and region is not None:
        answer = change_members(run_dir, verb, region, wait_s=0.0 if no_wait else wait_s)
        said = "begun" if answer == "begun" else "asked"
        waited = "" if no_wait or answer == "begun" else ", not answered yet"
        click.echo(
            f"{said}: {verb} {region}{waited}; `geo-ray members {quote(str(run_dir))}` shows what "
            "comes of it"
        )
        return
    table = FittedTable(box=SIMPLE)
    for heading in ("region", "state", "since the run's step"):
        table.add_column(heading)
    rows = geo_ray.members(run_dir).to_pylist()
    for row in rows:
        since = "" if row["step"] is None else f"{row['step']:,}"
        table.add_row(row["region"], row["state"], since)
    Console().print(table)
    for row in rows:
        if row["refused"] is not None:
            say(f"refused: {row['refused']}")
