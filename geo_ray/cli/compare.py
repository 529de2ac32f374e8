"""`geo-ray compare`: compares strategies and codecs on one workload."""

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
    help="Comma-separated, each KIND:KEY=VALUE:..., such as asgd,sma:interval=8,"
    "diloco:interval=16:codec=int4.",
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="Set a key in all runs."
)
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path),
    callback=config_file,
    help="Use workers, batches, averager and prices of a plan from `geo-ray plan --out`; adds USD.",
)
@click.option(
    "--seeds", default=3, show_default=True, type=click.IntRange(1), help="Runs per strategy."
)
@click.option(
    "--rates",
    default="0.5,1,2",
    show_default=True,
    help="Factors for the learning rate; each strategy uses its best one. 1: keep the learning "
    "rate.",
)
@click.option(
    "--real",
    is_flag=True,
    help="Train on the cluster; learning rates are still tuned in simulation.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Output directory; default: runs/compare-NAME.",
)
@click.option("--resume", is_flag=True, help="Continue the comparison in that directory.")
@click.option(
    "--jobs", type=click.IntRange(1), help="Parallel simulated runs; default: number of cores."
)
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

    Runs are simulated unless --real is given: seconds are then predictions, with real gradients
    on the emulated links of CONFIG. Every strategy gets the same number of trials for its learning
    rate. The result is a table, compare.json and compare.html.
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
            f"{text!r} is not a comma-separated list of numbers", param_hint="--rates"
        ) from None
