"""`geo-ray stop`: a run that goes on saves a checkpoint and stops."""

from __future__ import annotations

from shlex import quote

import click

from geo_ray.cli.paths import RunRef, RunReference, run_directory
from geo_ray.cli.say import say


@click.command()
@click.argument("run_dir", metavar="RUN", type=RunReference(), callback=run_directory)
def stop(run_dir: RunRef) -> None:
    """Save RUN, wherever it goes on, and stop it."""
    import geo_ray
    from geo_ray.api.status import follow_status

    geo_ray.stop(run_dir)
    found = next(follow_status(run_dir))
    text = f"asked; `geo-ray status {quote(str(run_dir))}` shows what comes of it"
    if found.waits_s is not None:
        text = f"asked; {run_dir} {found.phase}, and stops then"
    elif found.phase == "finished":
        text = f"{run_dir} is finished: there is nothing to stop"
    elif found.is_going is False:
        text = f"nobody drives {run_dir} ({found.phase}): there is nothing to stop"
    say(text)
