"""`geo-ray compare`: one workload, several strategies and codecs, one table."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import click


@click.command()
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path))
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
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
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
    from rich.console import Console

    from geo_ray.compare.page import result_table, write_page
    from geo_ray.compare.run import ComparisonPlan, default_jobs
    from geo_ray.compare.run import compare as run_all
    from geo_ray.compare.save import save_comparison
    from geo_ray.compare.variants import parse_variant
    from geo_ray.config.experiment import Experiment
    from geo_ray.config.load import load_tree
    from geo_ray.errors import RunDirectoryError
    from geo_ray.job.follow_plan import changes_of
    from geo_ray.planning.model.bill import Bill
    from geo_ray.planning.plan import load_plan

    experiment = load_tree(config, overrides, Experiment)
    bill = None
    if plan_file is not None:
        followed = load_plan(plan_file)
        overrides = (*overrides, *changes_of(followed, experiment, exchanges=False))
        bill = Bill.of(followed)
    directory = (out or Path(experiment.run.dir) / f"compare-{experiment.name}").absolute()
    if directory.exists() and not resume:
        raise RunDirectoryError(
            f"{directory} exists",
            fix="Go on with it by --resume, or name another directory with --out.",
        )
    console = Console(stderr=True)
    began_s = time.monotonic()

    def tell(done: int, count: int, what: str) -> None:
        left_s = (time.monotonic() - began_s) / done * (count - done)
        left = f", about {left_s / 60:.0f} min left" if left_s > 60 else ""
        console.print(f"{done}/{count}{left}: {what}", highlight=False, markup=False)

    plan = ComparisonPlan(
        config=config,
        common=overrides,
        variants=tuple(parse_variant(text, config.parent) for text in strategies.split(",")),
        rates=_numbers(rates),
        seeds=tuple(range(seeds)),
        out=directory,
        jobs=jobs or default_jobs(),
        real=real,
        bill=bill,
    )
    comparison = run_all(plan, tell, partial(_train, config.parent))
    save_comparison(comparison, directory / "compare.json")
    page = write_page(comparison, f"{experiment.name}: {strategies}", directory / "compare.html")
    Console().print(result_table(comparison))
    click.echo(f"curves   {page}")


def _train(base_dir: Path, experiment, directory: Path):  # type: ignore[no-untyped-def]
    """One real run; its outcome."""
    from geo_ray.compare.outcome import outcome_of
    from geo_ray.job import rundir
    from geo_ray.runtime.control.train import Reporting
    from geo_ray.runtime.control.train import train as run_to_end

    directory.mkdir(parents=True, exist_ok=True)
    run = rundir.create(experiment, base_dir)
    reporting = Reporting(lambda _: None, [], time.time())
    summary = run_to_end(experiment, run, reporting, resume=False)
    return outcome_of("", 1.0, experiment, summary, run.path)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) <= 0:
        raise click.BadParameter(
            f"{text!r} is not a list of positive numbers", param_hint="--rates"
        )
    return found
