"""`geo-ray stop`: stops an active run, which saves a checkpoint first."""

from __future__ import annotations

from shlex import quote

import click

from geo_ray.cli.paths import RunRef, RunReference, run_directory
from geo_ray.cli.say import say


@click.command()
@click.argument("run_dir", metavar="RUN", type=RunReference(), callback=run_directory)
def stop(run_dir: RunRef) -> None:
    """Save RUN and stop it, wherever it runs."""
    import geo_ray
    from geo_ray.api.status import follow_status

    geo_ray.stop(run_dir)
    found = next(follow_status(run_dir))
    text = f"requested; `geo-ray status {quote(str(run_dir))}` shows the result"
    if found.waits_s is not None:
        text = f"requested; {run_dir} {found.phase}, and stops then"
    elif found.phase == "finished":
        text = f"{run_dir} is finished: nothing to stop"
    elif found.is_going is False:
        text = f"{run_dir} is not active ({found.phase}): nothing to stop"
    say(text)
