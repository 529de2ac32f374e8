"""`geo-ray simulate`: runs an experiment on a virtual clock, in one process."""

from __future__ import annotations

import time
from pathlib import Path

import click

from geo_ray.cli.paths import check_config, config_file, loading, plan_option, steps_hint


@click.command(short_help="Simulate the training of CONFIG on emulated links and a virtual clock.")
@click.argument("config", type=click.Path(path_type=Path), callback=config_file)
@click.option("--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="Change a key.")
@plan_option
@steps_hint
@click.option("--plain", is_flag=True, help="Print lines instead of a live table.")
def simulate(config: Path, overrides: tuple[str, ...], plan_file: Path | None, plain: bool) -> None:
    """Simulate the training of CONFIG with real gradients on emulated links and a virtual clock.

    Seconds in the output are predictions for the real run.
    """
    check_config(config, overrides)
    loading("torch", "geo_ray.api.train")
    import geo_ray
    from geo_ray.cli.ending import show_end

    began_s = time.perf_counter()
    run = geo_ray.simulate(config, overrides, plan=plan_file, progress="plain" if plain else True)
    real_s = time.perf_counter() - began_s
    show_end(run)
    click.echo(f"simulated {run.summary.seconds:.1f} s in {real_s:.1f} s")
