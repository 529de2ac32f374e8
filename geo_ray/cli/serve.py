"""`geo-ray serve`: serves a run to regions that join it from their own training loops."""

from __future__ import annotations

from pathlib import Path

import click

from geo_ray.cli.paths import check_config, config_file, dry_run_option, loading


@click.command()
@click.argument("config", type=click.Path(path_type=Path), callback=config_file)
@click.option("--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="Change a key.")
@dry_run_option
@click.option(
    "--detach",
    is_flag=True,
    help="Return as soon as all regions train; on an existing cluster.",
)
@click.option("--plain", is_flag=True, help="Print lines instead of a live table.")
def serve(
    config: Path, overrides: tuple[str, ...], dry_run: bool, detach: bool, plain: bool
) -> None:
    """Serve the run of CONFIG to regions that join it from their own training loops.

    Prints the address of the run, and writes a file with credentials for each region. Ctrl-C saves
    a checkpoint at the next exchange of all regions, and stops.
    """
    check_config(config, overrides)
    loading("torch", "ray", "geo_ray.api.check" if dry_run else "geo_ray.api.train")
    if dry_run:
        from geo_ray.api.train import check_joins
        from geo_ray.cli.ending import show_check

        check_joins(config, overrides)
        show_check(config, overrides)
        return
    import geo_ray
    from geo_ray.cli.ending import show_detached, show_end

    run = geo_ray.serve(config, overrides, progress="plain" if plain else True, detach=detach)
    if detach and not run.finished:
        show_detached(run)
    else:
        show_end(run)
