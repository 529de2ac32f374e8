"""`geo-ray events`: exports the events of a run to other programs."""

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
    help="Destination, as in `observe.export`: '{kind: otlp}', '{kind: tensorboard, dir: DIR}'.",
)
def events(run_dir: RunRef, to: tuple[str, ...]) -> None:
    """Export the events of RUN to other programs.

    Rounds become traces, curves become scalars.

    `observe.export` in the configuration exports the events of a run while it is active.
    """
    from geo_ray.api.live import export_events

    count = export_events(run_dir, to)
    click.echo(f"exported {count:,} events")
