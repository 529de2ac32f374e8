"""`geo-ray profile`: measures step times, exchanges or loss with short runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.box import SIMPLE_HEAD

from geo_ray.base.tables import FittedTable
from geo_ray.base.text import bytes_text
from geo_ray.cli.paths import config_file, loading
from geo_ray.cli.say import say, say_json
from geo_ray.planner.profile import Profile, fit_steps

if TYPE_CHECKING:
    from geo_ray.planner.loss import LossProfile


def steps_table(profile: Profile) -> FittedTable:
    """Print measured and fitted step times."""
    table = FittedTable(box=SIMPLE_HEAD)
    for heading in ("region", "machine"):
        table.add_column(heading)
    for heading in ("workers", "rows", "step", "spread", "line says"):
        table.add_column(heading, justify="right")
    for region in dict.fromkeys(point.region for point in profile.steps):
        line = fit_steps(region, profile.steps)
        for point in profile.steps:
            if point.region == region:
                table.add_row(
                    region,
                    point.machine,
                    f"{point.workers}",
                    f"{point.rows}",
                    f"{1e3 * point.step_s:.4g} ms",
                    f"{point.spread:.1%}",
                    f"{1e3 * line.step_s(point.machine, point.workers, point.rows):.4g} ms",
                )
    return table


def exchanges_table(profile: Profile) -> FittedTable:
    """Print sizes of exchanges, and their overhead beyond the transfer."""
    table = FittedTable(box=SIMPLE_HEAD)
    table.add_column("codec")
    for heading in ("update", "answer", "overhead", "exchanges"):
        table.add_column(heading, justify="right")
    for point in profile.exchanges:
        table.add_row(
            point.codec or "none",
            bytes_text(point.up_bytes),
            bytes_text(point.down_bytes),
            f"{1e3 * point.overhead_s:.4g} ms",
            f"{point.count}",
        )
    return table


def loss_table(profile: LossProfile) -> FittedTable:
    """Print the loss of each interval and codec: mean, upper bound for plans, default estimate."""
    from geo_ray.planner.loss import AssumedLoss, differences

    table = FittedTable(box=SIMPLE_HEAD)
    table.add_column("every", justify="right")
    for heading in ("codec", "against"):
        table.add_column(heading)
    for heading in ("mean", "counts", "else assumed"):
        table.add_column(heading, justify="right")
    for (interval, codec), each in differences(profile).items():
        assumed = AssumedLoss().loss(1 if codec else interval, codec, trains_on=False)
        diverged = math.isinf(each.mean)
        table.add_row(
            f"{interval} steps",
            codec or "none",
            "no codec" if codec else "bsp",
            "diverged" if diverged else f"{each.mean:+.2%}",
            "never" if diverged else f"{each.upper:.2%}",
            f"{assumed:.2%}",
        )
    return table


_out_type = click.Path(dir_okay=False, path_type=Path)


@click.command(short_help="Measure the job of CONFIG for `geo-ray plan`.")
@click.argument("config", type=click.Path(path_type=Path), callback=config_file)
@click.option("--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help="Change a key.")
@click.option(
    "--machine",
    "machines",
    multiple=True,
    metavar="REGION=TYPE",
    help="Machine type of `plan` on which the workers of a region run now.",
)
@click.option("--workers", help="Numbers of workers per region, such as 1,4.  [default: 1 and all]")
@click.option("--batch-sizes", help="Rows per worker, such as 8,32.  [default: a quarter and all]")
@click.option("--codecs", help="Codecs to measure, such as none,int8.")
@click.option(
    "--steps",
    type=click.IntRange(5),
    help="Steps of each run.  [default: 20; 200 with --loss]",
)
@click.option("--full", is_flag=True, help="Measure every combination instead of three extremes.")
@click.option("--fresh", is_flag=True, help="Repeat measurements of an earlier profile.")
@click.option(
    "--loss", is_flag=True, help="Measure the loss of intervals and codecs by simulation."
)
@click.option(
    "--intervals", help="With --loss: intervals, such as 1,16.  [default: own, 1, 4, 16 and 64]"
)
@click.option("--seeds", type=click.IntRange(2), help="With --loss: runs per point.  [default: 3]")
@click.option(
    "--jobs", type=click.IntRange(1), help="With --loss: parallel runs.  [default: number of cores]"
)
@click.option(
    "--out",
    type=_out_type,
    help="Output file.  [default: RUN.DIR/profiles/NAME.json, loss/NAME.json there with --loss]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON only.")
def profile(
    config: Path,
    overrides: tuple[str, ...],
    machines: tuple[str, ...],
    workers: str | None,
    batch_sizes: str | None,
    codecs: str | None,
    steps: int | None,
    full: bool,
    fresh: bool,
    loss: bool,
    intervals: str | None,
    seeds: int | None,
    jobs: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure the job of CONFIG with short runs, for `geo-ray plan`.

    Measurements of an earlier profile of the same model are reused. With --loss, short simulated
    runs measure the loss of longer intervals and codecs: docs/guides/planning.md.
    """
    if loss:
        _refuse("--loss", machines=machines, workers=workers, batch_sizes=batch_sizes, full=full)
        loading("torch", "ray", "geo_ray.api.compare")
        _measure_loss(
            config, overrides, (intervals, codecs), (steps, seeds, jobs), fresh, out, as_json
        )
        return
    _refuse("a profile without --loss", intervals=intervals, seeds=seeds, jobs=jobs)
    loading("torch", "ray", "geo_ray.api.plan")
    from rich.console import Console

    import geo_ray
    from geo_ray.api.plan import ProfileGrid

    result = geo_ray.profile(
        config,
        overrides,
        grid=ProfileGrid(
            workers=_numbers("workers", workers),
            batch_sizes=_numbers("batch-sizes", batch_sizes),
            codecs=_codecs(codecs),
            machines=_machines(machines),
            steps=steps or 20,
            full=full,
            fresh=fresh,
        ),
        out=out,
        progress=True,
    )
    found = result.profile
    if as_json:
        say_json(found.model_dump_json(indent=2))
        return
    out_console = Console()
    out_console.print(steps_table(found))
    if found.exchanges:
        out_console.print(exchanges_table(found))
    say(f"written  {result.path}")


def _measure_loss(
    config: Path,
    overrides: tuple[str, ...],
    lists: tuple[str | None, str | None],
    numbers: tuple[int | None, int | None, int | None],
    fresh: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    from rich.console import Console

    from geo_ray.api.compare import LossGrid, profile_loss

    intervals, codecs = lists
    steps, seeds, jobs = numbers
    grid = LossGrid(
        intervals=_numbers("intervals", intervals) or None,
        codecs=_codecs(codecs),
        steps=steps or 200,
        seeds=seeds or 3,
        jobs=jobs,
        fresh=fresh,
    )
    result = profile_loss(config, overrides, grid=grid, out=out, progress=True)
    if as_json:
        say_json(result.profile.model_dump_json(indent=2))
        return
    console = Console()
    console.print(loss_table(result.profile))
    say(f"written  {result.path}")


def _refuse(where: str, **options: object) -> None:
    for name, value in options.items():
        if value:
            option = f"--{name.replace('_', '-')}".replace("--machines", "--machine")
            raise click.UsageError(f"{option} does not apply to {where}")


def _numbers(name: str, text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise click.BadParameter(f"'{text}' is not a list such as 1,4", param_hint=f"--{name}")
    return found


def _machines(words: tuple[str, ...]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    return {region: kind for region, _, kind in pairs}


def _codecs(text: str | None) -> tuple[str | None, ...] | None:
    from geo_ray.planner.loss import BITS_PER_PARAM

    if text is None:
        return None
    found = tuple(None if word == "none" else word for word in text.split(","))
    for each in found:
        if each not in BITS_PER_PARAM:
            known = ", ".join(str(name or "none") for name in BITS_PER_PARAM)
            raise click.BadParameter(f"{each} is not one of {known}", param_hint="--codecs")
    return found
