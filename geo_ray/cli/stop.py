"""`geo-ray stop`: a run that goes on saves a checkpoint and stops."""

from __future__ import annotations

from shlex import quote

import click

from geo_ray.cli.paths import RunRef, RunReference, run_directory


@click.command()
@click.argument("run_dir", metavar="RUN", type=RunReference(), callback=run_directory)
def stop(run_dir: RunRef) -> None:
    """Save RUN, wherever it goes on, and stop it."""
    import geo_ray

    geo_ray.stop(run_dir)
    show_asked(run_dir, f"asked; `geo-ray status {quote(str(run_dir))}` shows what comes of it")


def show_asked(run_dir: RunRef, text: str) -> None:
    """Print ``text`` about a request, or that nobody is there to take it."""
    import geo_ray

    found = next(geo_ray.follow_status(run_dir))
    if found.is_going is False:
        text = f"nobody drives {run_dir} ({found.phase}): a resume forgets what is asked now"
    click.echo(text)
