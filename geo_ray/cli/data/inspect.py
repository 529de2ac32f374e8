"""``geo-ray data inspect``: what a user's files have, and how they could be prepared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.box import SIMPLE
from rich.console import Console

from geo_ray.cli.data.options import read_options
from geo_ray.cli.data.task import named_task
from geo_ray.cli.paths import loading
from geo_ray.cli.say import say
from geo_ray.cli.tables.data import left_out_lines, shown_time
from geo_ray.observe.fitted_table import FittedTable
from geo_ray.observe.text import printable

if TYPE_CHECKING:
    from geo_ray import DataSurvey, ReadOptions
    from geo_ray.data.prepare.survey import ColumnSurvey, Survey

_FEW_VALUES = 20
_MOST_VALUES = 8
_MOST_LETTERS = 40


@click.command()
@click.argument("source", metavar="DIR_OR_URI")
@click.option("--task", "use", help="The task that the files are for; needed by --draft.")
@click.option("--task-option", "options", multiple=True, metavar="K=V", help="Option of the task.")
@click.option(
    "--draft",
    "draft_file",
    type=click.Path(path_type=Path),
    help="Write a first preparation file for the task.",
)
@click.option("--force", is_flag=True, help="Replace a preparation file that is already there.")
@read_options
def inspect(
    source: str,
    use: str | None,
    options: tuple[str, ...],
    draft_file: Path | None,
    force: bool,
    read: ReadOptions,
) -> None:
    """Show the columns of your files.

    Their types, missing values, and usual treatments.
    """
    loading("pyarrow" if use is None else "torch")
    import geo_ray

    if draft_file is not None and use is None:
        raise click.UsageError("--draft needs --task, whose columns are to be made")
    task = None if use is None else named_task(use, options)
    found = geo_ray.inspect_data(
        source, read, task=task, draft=draft_file, force=force, progress=True
    )
    _show(found)
    if found.wanted:
        wanted = ", ".join(f"{name}: {kind}" for name, kind in found.wanted.items())
        say(f"The task wants {wanted}")
    if draft_file is not None:
        click.echo(f"Preparation: {draft_file}")
    unreadable = found.survey.unreadable
    for error in unreadable:
        click.secho(printable(f"error {error}"), fg="red", err=True)
    if unreadable:
        raise click.exceptions.Exit(unreadable[0].exit_code)


def _show(found: DataSurvey) -> None:
    survey = found.survey
    table = FittedTable(title=f"{survey.rows:,} rows in {_files(survey.files)}", box=SIMPLE)
    table.add_column("column", overflow="fold")
    table.add_column("type", no_wrap=True, min_width=5)
    for heading in ("no value", "different", "least", "greatest"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, column in survey.columns.items():
        table.add_row(
            name,
            _type(column),
            f"{column.nulls + column.nans:,}",
            _different(column),
            *_extremes(column),
        )
    if survey.columns:
        Console().print(table)
    for note in [*left_out_lines(found.left_out), *_notes(survey)]:
        say(note)
    frequent = {
        name: line for name, column in survey.columns.items() if (line := _frequent(column))
    }
    if frequent:
        click.echo("Most frequent values:")
    for name, line in frequent.items():
        say(f"  {name}: {line}")
    if found.label is not None and found.label not in found.wanted:
        say(f"The label may be {found.label}.")
    if found.options:
        say(f"Options for inspect, stats and shard: {' '.join(found.options)}")
    if survey.columns:
        click.echo("Usual treatments:")
    for name, treatment in found.treatments.items():
        remark = f"  # {treatment.remark}" if treatment.remark else ""
        say(f"  {found.treatment_text(name)}{remark}")


def _frequent(column: ColumnSurvey) -> str:
    """The most frequent values of a column of words, or of few numbers."""
    few = column.distinct is not None and len(column.distinct) <= _FEW_VALUES
    if column.kind not in ("text", "bool", "int") or not column.repeats:
        return ""
    if column.kind == "int" and not few:
        return ""
    numbers = column.families["int"] + column.families["float"]
    if column.marks or column.formats or numbers > column.families["text"] > 0:  # a measure
        return ", ".join(
            f"{_cut(word)} {rows:,}" for word, rows in column.texts.most_common(_MOST_VALUES)
        )
    top = column.seen.most_common(_MOST_VALUES)
    shown = ", ".join(f"{_cut(word)} {rows:,}" for word, rows in top)
    if column.is_many:
        return f"{shown} and many more"
    more = len(column.seen) - len(top)
    return shown + (f" and {more:,} more" if more else "")


def _cut(word: str) -> str:
    from geo_ray.data.nearby import printable as shown_word

    return shown_word(word[:_MOST_LETTERS])


def _different(column: ColumnSurvey) -> str:
    if column.kind in ("list", "other"):
        return ""
    return f"{len(column.distinct):,}" if column.distinct is not None else "many"


def _files(number: int) -> str:
    return "1 file" if number == 1 else f"{number:,} files"


def _type(column: ColumnSurvey) -> str:
    if column.kind == "list":
        lengths = ", ".join(str(length) for length in sorted(column.lengths))
        return f"list of {lengths}"
    return column.kind


def _extremes(column: ColumnSurvey) -> tuple[str, str]:
    moments = column.moments
    if not moments.count or column.kind not in ("int", "float", "time"):
        return "", ""
    if column.kind == "time":
        return shown_time(moments.low), shown_time(moments.high)
    return f"{moments.low:.6g}", f"{moments.high:.6g}"


def _notes(survey: Survey) -> list[str]:
    from geo_ray.data.nearby import listed

    without: dict[tuple[str, ...], list[str]] = {}  # files -> the columns that they do not have
    for name, column in survey.columns.items():
        files = tuple(path for path in survey.rows_of if path not in column.files)
        without.setdefault(files, []).append(name)
    notes = [
        f"{names[0]} is not in {listed(files)}"
        if len(names) == 1
        else f"{len(names)} columns are not in {listed(files)}: {listed(names)}"
        for files, names in without.items()
        if files
    ]
    for name, column in survey.columns.items():
        if len(column.first_file) > 1:
            kinds = ", ".join(
                f"{column.families[kind]:,} {kind} (first in {path})"
                for kind, path in column.first_file.items()
            )
            notes.append(f"{name} is of several types: {kinds}")
        if column.nans or column.infinite:
            notes.append(f"{name} has {column.nans:,} NaN and {column.infinite:,} infinite values")
    return notes
