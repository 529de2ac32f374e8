"""`geo-ray stop`: a run that goes on saves a checkpoint and stops."""

from __future__ import annotations

import click

from geo_ray.cli.paths import RunRef, RunReference, run_directory


@click.command()
@click.argument("run_dir", metavar="RUN", type=RunReference(), callback=run_directory)
def stop(run_dir: RunRef) -> None:
    """Save RUN, wherever it goes on, and stop it."""
    import geo_ray

    geo_ray.stop(run_dir)
    click.echo(f"asked; `geo-ray status {run_dir}` shows what comes of it")
