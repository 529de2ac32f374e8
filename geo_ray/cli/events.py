"""`geo-ray events`: what a run has written down, to other programs."""

from __future__ import annotations

import click

from geo_ray.cli.paths import RunRef, RunReference, run_directory


@click.command("events")
@click.argument("run_dir", metavar="RUN", type=RunReference(), callback=run_directory)
@click.option(
    "--export",
    "to",
    multiple=True,
    required=True,
    help="Where to, as in `observe.export`: '{kind: otlp}', '{kind: tensorboard, dir: DIR}'.",
)
def events(run_dir: RunRef, to: tuple[str, ...]) -> None:
    """Hand the events of RUN to other programs.

    Its rounds as traces, its curves as scalars.

    While a run goes on, `observe.export` in its configuration does the same.
    """
    from geo_ray.api.live import export_events

    count = export_events(run_dir, to)
    click.echo(f"handed on {count:,} events")
