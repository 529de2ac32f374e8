"""Options that several verbs of ``geo-ray data`` share: how a user's files are to be read."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from geo_ray import ReadOptions

_READ = (
    click.option(
        "--format",
        type=click.Choice(["csv", "jsonl", "parquet", "arrow"]),
        help="Read files of this format.  [default: that of the files' names]",
    ),
    click.option("--delimiter", help="Of CSV files: ';', tab, ...  [default: comma]"),
    click.option(
        "--decimal",
        type=click.Choice([".", ","]),
        default=".",
        show_default=True,
        help="Decimal mark of CSV files.",
    ),
    click.option(
        "--thousands",
        metavar="MARK",
        help="Mark between groups of three digits: a comma, a point, an apostrophe or the word "
        "space.  [default: none]",
    ),
    click.option("--encoding", default="utf-8", show_default=True, help="Of text files."),
    click.option(
        "--header", metavar="NAME,...", help="Column names, if the CSV files have no header line."
    ),
    click.option(
        "--null",
        "nulls",
        multiple=True,
        metavar="WORD",
        help="A word that means that there is no value, besides empty text and, unquoted in CSV "
        "files, NULL, null, None, NA, N/A, n/a and #N/A; repeatable.",
    ),
    click.option(
        "--no-default-nulls", is_flag=True, help="NULL, NA and so on are words like others."
    ),
    click.option(
        "--site",
        type=click.Path(path_type=Path),
        help="A site file: how these files are read, and their columns become the shared ones.",
    ),
    click.option(
        "--strict", is_flag=True, help="Refuse files of which anything would be left out."
    ),
)


def read_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the options of reading files; it gets them as one argument ``read``."""

    @wraps(verb)
    def with_read(
        *args: Any,
        format: str | None,
        delimiter: str | None,
        decimal: str,
        thousands: str | None,
        encoding: str,
        header: str | None,
        nulls: tuple[str, ...],
        no_default_nulls: bool,
        site: Path | None,
        strict: bool,
        **others: Any,
    ) -> None:
        from geo_ray import ReadOptions
        from geo_ray.data.files.options import CHARACTERS, DEFAULT_NULLS

        names = tuple(name.strip() for name in header.split(",")) if header is not None else ()
        read = ReadOptions(
            format=format,  # type: ignore[arg-type]  # click has checked it
            delimiter=delimiter and CHARACTERS.get(delimiter, delimiter),
            decimal=decimal,
            encoding=encoding,
            header=names,
            nulls=(*(() if no_default_nulls else DEFAULT_NULLS), *nulls),
            thousands=thousands and CHARACTERS.get(thousands, thousands),
            site=site,
            strict=strict,
        )
        verb(*args, read=read, **others)

    decorated: Callable[..., None] = with_read
    for option in reversed(_READ):
        decorated = option(decorated)
    return decorated


def names_of(text: str | None) -> tuple[str, ...]:
    """The names of a comma-separated option; () without it."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def is_default(read: ReadOptions) -> bool:
    """Whether no option of reading was given."""
    from geo_ray import ReadOptions as Options

    return read == Options()
