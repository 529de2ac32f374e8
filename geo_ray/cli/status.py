"""`geo-ray status`: how a run stands."""

from __future__ import annotations

import click

from geo_ray.cli.paths import RunRef, RunReference, run_directory


@click.command("status")
@click.argument("run_dir", metavar="RUN", type=RunReference(), callback=run_directory)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
@click.option("--follow", is_flag=True, help="Again and again, until nobody drives the run.")
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    help="With --follow: seconds from one to the next.",
)
def status(run_dir: RunRef, as_json: bool, follow: bool, every_s: float) -> None:
    """Say how RUN stands, and whether its driver lives.

    Reads RUN only, so it works from any terminal or machine that sees it, whoever drives it.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    import geo_ray
    from geo_ray.observe.status.text import status_lines

    found = geo_ray.follow_status(run_dir, every_s) if follow else (geo_ray.status(run_dir),)
    if as_json:
        for each in found:
            click.echo(each.model_dump_json(indent=None if follow else 2))
        return
    if not (follow and Console().is_terminal):
        for each in found:
            click.echo("\n".join(status_lines(each)))
        return
    with Live(auto_refresh=False) as live:
        for each in found:
            live.update(Text("\n".join(status_lines(each))), refresh=True)
