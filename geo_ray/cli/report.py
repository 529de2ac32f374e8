"""`geo-ray report`: writes an HTML report of a run."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click

from geo_ray.cli.paths import RunRef, RunReference, run_directory


@click.command("report")
@click.argument("run_dir", metavar="RUN", type=RunReference(), callback=run_directory)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Output file.  [default: RUN/report.html]",
)
@click.option("--open", "open_page", is_flag=True, help="Open the page in the browser.")
def report(run_dir: RunRef, out: Path | None, open_page: bool) -> None:
    """Write an HTML report of RUN and print its path.

    The page shows curves, bytes between regions, a timeline, exchanges, faults and the
    configuration. It loads no external resources, and also works for active or interrupted runs.
    """
    import geo_ray

    path = geo_ray.report(run_dir, out)
    click.echo(str(path))
    if open_page:
        webbrowser.open(path.resolve().as_uri())
