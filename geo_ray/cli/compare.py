"""`geo-ray compare`: one workload, several strategies and codecs, one table."""

from __future__ import annotations

from pathlib import Path

import click

from geo_ray.cli.paths import check_config, config_file, loading


@click.command(short_help="Run CONFIG's workload with several strategies.")
@click.argument("config", type=click.Path(path_type=Path), callback=config_file)
@click.option(
    "--strategies",
    required=True,
    metavar="LIST",
    help="Separated by commas, each KIND:KEY=VALUE:..., say asgd,sma:interval=8,"
    "diloco:interval=16:codec=int4.",
)
@click.option("--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="In all runs.")
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path),
    callback=config_file,
    help="Workers, batches, averager and prices of a plan of `geo-ray plan --out`; fills USD.",
)
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1), help="Runs of each.")
@click.option(
    "--rates",
    default="0.5,1,2",
    show_default=True,
    help="Factors on the learning rate that each strategy may choose from; 1: no choice.",
)
@click.option("--real", is_flag=True, help="Train on the cluster; rates are still simulated.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for everything; default: runs/compare-NAME.",
)
@click.option("--resume", is_flag=True, help="Go on with what lies in that directory.")
@click.option("--jobs", type=click.IntRange(1), help="Simulated runs side by side; default: cores.")
def compare(
    config: Path,
    strategies: str,
    overrides: tuple[str, ...],
    plan_file: Path | None,
    seeds: int,
    rates: str,
    real: bool,
    out: Path | None,
    resume: bool,
    jobs: int | None,
) -> None:
    """Run CONFIG's workload with several strategies, each with its best learning rate.

    Simulated, unless --real: seconds are then predictions, with real gradients on the emulated
    links of CONFIG. Every strategy gets the same number of trials for its learning rate. The result
    is a table, compare.json and compare.html.
    """
    check_config(config, overrides)
    loading("torch", "ray", "geo_ray.api.compare")
    from rich.console import Console

    import geo_ray
    from geo_ray.sweep.compare import result_table

    result = geo_ray.compare(
        config,
        strategies,
        overrides,
        plan=plan_file,
        seeds=seeds,
        rates=_numbers(rates),
        real=real,
        out=out,
        resume=resume,
        jobs=jobs,
        progress=True,
    )
    Console().print(result_table(result.comparison))
    click.echo(f"curves   {result.page_path}")


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a list of numbers separated by commas", param_hint="--rates"
        ) from None
