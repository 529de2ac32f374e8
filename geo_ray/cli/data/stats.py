"""``geo-ray data stats`` and ``merge-stats``: what regions may tell each other of their columns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from geo_ray.cli.data.options import names_of, read_options, reading
from geo_ray.cli.tables.data import shown_time
from geo_ray.errors import ConfigError

_DAY_S = 86_400

if TYPE_CHECKING:
    from geo_ray.data.files.options import ReadOptions
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
    """Write statistics of a region's columns: counts, means, deviations; no rows."""
    from geo_ray.data.files.find import find_files
    from geo_ray.data.prepare.findings import Findings
    from geo_ray.data.prepare.share import share
    from geo_ray.data.prepare.statistics import save_statistics
    from geo_ray.data.prepare.survey import survey_files

    counted = names_of(values)
    wanted = _wanted(prepare_file, names_of(columns), counted)
    found = find_files(source, read)
    with reading("Reading files", len(found.files)) as on_read:
        survey = survey_files(found, wanted, counted, on_read)
    findings = Findings({})
    for error in survey.unreadable:
        findings.add_unreadable(error)
    findings.raise_any(f"the files in {source} cannot all be read", prepared=True)
    shared = share(survey, region, wanted, at_least, extremes=not no_extremes)
    save_statistics(shared, out)
    _show(shared)
    click.echo(f"Statistics: {out}")


@click.command("merge-stats")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The file to write.")
def merge_stats(files: tuple[Path, ...], out: Path) -> None:
    """Make statistics of all regions of FILES that `geo-ray data stats` wrote, one per region."""
    from geo_ray.data.prepare.statistics import (
        load_statistics,
        merge_statistics,
        save_statistics,
    )

    merged = merge_statistics([load_statistics(path) for path in files])
    save_statistics(merged, out)
    _show(merged)
    click.echo(f"Statistics: {out}")


def _wanted(
    prepare_file: Path | None, columns: tuple[str, ...], counted: tuple[str, ...]
) -> tuple[str, ...] | None:
    """The columns to look at; None for all."""
    from geo_ray.data.prepare.config import load_preparation
    from geo_ray.data.prepare.share import needs_of

    if prepare_file is None:
        return tuple(dict.fromkeys(columns + counted)) if columns else None
    if columns:
        raise click.UsageError("--columns and --prepare both say which columns; give one of them")
    needs = needs_of(load_preparation(prepare_file))
    if not needs.columns and not counted:
        raise ConfigError(
            f"{prepare_file} needs no statistics", fix="Leave this step and --stats out."
        )
    if silent := [name for name in needs.words if name not in counted]:
        raise ConfigError(
            f"{prepare_file} needs the words of {', '.join(silent)}, which are data of this region",
            fix=f"If they may leave it, add --values {','.join(silent)}; words that fewer rows "
            "have than --at-least stay here. Otherwise use vocabulary: {hash: N} or {file: FILE}.",
        )
    return tuple(dict.fromkeys(needs.columns + counted))


def _show(shared: Statistics) -> None:
    table = Table(title=f"{', '.join(shared.regions)}: {shared.rows:,} rows", box=SIMPLE)
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
        click.echo(f"{name}: {why}", err=True)
