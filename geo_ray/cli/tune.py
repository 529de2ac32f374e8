"""`geo-ray tune`: searches the values of a configuration with Ray Tune."""

from __future__ import annotations

from pathlib import Path

import click

from geo_ray.cli.paths import check_search, check_search_directory, config_file, loading, telling


@click.command(short_help="Search for the fastest or cheapest configuration of a job.")
@click.argument("search", type=click.Path(path_type=Path), callback=config_file)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="Change a key of SEARCH."
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Output directory; default: runs/tune-NAME.",
)
@click.option("--resume", is_flag=True, help="Continue the search in that directory.")
@click.option("--dry-run", is_flag=True, help="Check the search; start nothing.")
def tune(
    search: Path, overrides: tuple[str, ...], out: Path | None, resume: bool, dry_run: bool
) -> None:
    """Search for the fastest or cheapest configuration of a job.

    SEARCH names the base configuration, the keys to vary with their domains, and the objective to
    minimize. By default trials are simulated, many in parallel on virtual time. The result is a
    table, tune.html, tune.json and, if a trial beat the base, best.yaml for `geo-ray train`; the
    results of Ray Tune are in the folder tune.
    """
    found = check_search(search, overrides)
    if not dry_run:
        check_search_directory(search, found, out, resume=resume)
    loading("torch", "ray", "geo_ray.api.tune")
    from rich.console import Console

    import geo_ray
    from geo_ray.sweep.tune import tuning_table

    if dry_run:
        from geo_ray.api.tune import plan_of

        with telling("checking the search"):
            plan = plan_of(search, overrides, out=out)
        click.echo(f"{plan.wanted} {plan.config.trials.kind} trials, {plan.jobs} in parallel")
        click.echo(f"{len(plan.tried)} configurations at the edges of the space can all be")
        return
    result = geo_ray.tune(search, overrides, out=out, resume=resume, progress=True)
    Console().print(tuning_table(result.tuning, f"search {search.stem}, best first"))
    click.echo(f"page     {result.page_path}")
    if result.best_path is not None:
        click.echo(f"best     {result.best_path}")
