"""``geo-ray data stats`` and ``merge-stats``: what regions may tell each other of their columns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.box import SIMPLE
from rich.console import Console

from geo_ray.cli.data.options import names_of, read_options
from geo_ray.cli.paths import loading
from geo_ray.cli.say import say
from geo_ray.cli.tables.data import MOST_LEFT_OUT, left_out_lines, shown_time
from geo_ray.observe.fitted_table import FittedTable

_DAY_S = 86_400

if TYPE_CHECKING:
    from geo_ray import ReadOptions
    from geo_ray.data.prepare.statistics import Statistics


@click.command()
@click.argument("source", metavar="DIR_OR_URI")
@click.option("--region", required=True, help="The region whose files these are.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The file to write.")
@click.option(
    "--prepare",
    "prepare_file",
    type=click.Path(path_type=Path),
    help="Only the columns whose statistics this preparation file needs.",
)
@click.option("--columns", metavar="NAME,...", help="Only these columns.  [default: all]")
@click.option(
    "--values",
    metavar="NAME,...",
    help="Count the words of these columns too. Words are data: they leave the region.",
)
@click.option(
    "--at-least",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="With --values: leave out words that fewer rows have.",
)
@click.option(
    "--no-extremes",
    is_flag=True,
    help="Leave out least and greatest numbers: they are values of single rows.",
)
@read_options
def stats(
    source: str,
    region: str,
    out: Path,
    prepare_file: Path | None,
    columns: str | None,
    values: str | None,
    at_least: int,
    no_extremes: bool,
    read: ReadOptions,
) -> None:
    """Write statistics of a region's columns.

    Counts, means, deviations; no rows.
    """
    loading("pyarrow")
    import geo_ray

    wanted = geo_ray.WantedStatistics(
        prepare_file, names_of(columns), names_of(values), at_least, extremes=not no_extremes
    )
    found = geo_ray.data_stats(source, region, wanted, read=read, progress=True)
    found.save(out)
    for line in left_out_lines(found.left_out, MOST_LEFT_OUT):
        say(line, err=True)
    _show(found.statistics)
    click.echo(f"Statistics: {out}")


@click.command("merge-stats")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The file to write.")
def merge_stats(files: tuple[Path, ...], out: Path) -> None:
    """Make statistics of all regions of FILES.

    `geo-ray data stats` wrote them, one per region.
    """
    loading("pyarrow")
    import geo_ray

    merged = geo_ray.merge_data_stats(files)
    merged.save(out)
    _show(merged.statistics)
    click.echo(f"Statistics: {out}")


def _show(shared: Statistics) -> None:
    table = FittedTable(title=f"{', '.join(shared.regions)}: {shared.rows:,} rows", box=SIMPLE)
    for heading in ("column", "kind"):
        table.add_column(heading, no_wrap=True)
    counted = any(known.words is not None for known in shared.columns.values())
    for heading in ("no value", "numbers", "mean", "deviation", *(("words",) if counted else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, known in shared.columns.items():
        mean, deviation = "", ""
        if known.mean is not None and known.m2 is not None:
            spread = math.sqrt(known.m2 / known.count)
            is_time = known.kind == "time"
            mean = shown_time(known.mean)[:10] if is_time else f"{known.mean:.6g}"
            deviation = f"{spread / _DAY_S:.4g} days" if is_time else f"{spread:.6g}"
        table.add_row(
            name,
            known.kind,
            f"{known.nulls + known.nans:,}",
            f"{known.count:,}",
            mean,
            deviation,
            *(("" if known.words is None else f"{len(known.words):,}",) if counted else ()),
        )
    Console().print(table)
    for name, why in shared.left_out.items():
        say(f"{name}: {why}", err=True)
