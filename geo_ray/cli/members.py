"""`geo-ray members`: shows and changes the member regions of a run."""

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
    help="Timeout for the answer to a request, in seconds.",
)
@click.option("--no-wait", is_flag=True, help="Do not wait for the answer.")
def members(
    run_dir: RunRef, verb: str | None, region: str | None, wait_s: float, no_wait: bool
) -> None:
    """Show the member regions of RUN, or change them.

    add REGION: a region of the configuration that is not a member joins.

    drain REGION: a region leaves after all its work has been exchanged.

    remove REGION: a region leaves at once; updates that it has not sent are lost.

    A refused request is an error that states the reason.
    """
    from rich.box import SIMPLE
    from rich.console import Console

    import geo_ray
    from geo_ray.api.status import change_members
    from geo_ray.base.errors import ConfigError
    from geo_ray.base.tables import FittedTable

    if verb is not None and region is None:
        raise ConfigError(
            f"{verb}: no region given", fix=f"Use `geo-ray members RUN {verb} REGION`."
        )
    if verb is not None and region is not None:
        answer = change_members(run_dir, verb, region, wait_s=0.0 if no_wait else wait_s)
        said = "begun" if answer == "begun" else "asked"
        waited = "" if no_wait or answer == "begun" else ", not answered yet"
        click.echo(
            f"{said}: {verb} {region}{waited}; `geo-ray members {quote(str(run_dir))}` shows the "
            "result"
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
