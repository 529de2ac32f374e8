"""`geo-ray simulate`: the same experiment on a virtual clock, in one process."""

from __future__ import annotations

import time
from pathlib import Path

import click

from geo_ray.cli.follow import new_run, plan_option, planned


@click.command()
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="Change one key.")
@plan_option
@click.option("--plain", is_flag=True, help="Lines instead of a live table.")
def simulate(config: Path, overrides: tuple[str, ...], plan_file: Path | None, plain: bool) -> None:
    """Train as CONFIG says, with real gradients on emulated links and a virtual clock.

    Seconds in its output are predictions for the real run.
    """
    from rich.console import Console

    from geo_ray.cli.ending import show_end, show_failure
    from geo_ray.errors import GeoRayError
    from geo_ray.job.auto import load_experiment
    from geo_ray.observe.progress import Progress
    from geo_ray.sim.run import simulate as run_to_end

    overrides, plan = planned(config, overrides, plan_file, emulated=True)
    experiment, advice = load_experiment(config, overrides)
    if advice is not None:
        click.echo(advice.reason, err=True)
    run = new_run(experiment, config.parent, advice.reason if advice else None, plan)
    most = max(r.workers for r in experiment.regions) if experiment.train.mode == "async" else 1
    began_s = time.perf_counter()
    with Progress(
        experiment.train.steps * most,
        experiment.region_names,
        Console(stderr=True),
        True if plain else None,
    ) as progress:
        try:
            summary = run_to_end(experiment, run, progress.status, [progress.feed])
        except GeoRayError:
            show_failure(run.path)
            raise
        progress.status("")
    real_s = time.perf_counter() - began_s
    show_end(summary, run.path)
    click.echo(f"simulated {summary.seconds:.1f} s in {real_s:.1f} s")
