"""How a user's files are to be read; each field is an option of ``geo-ray data``."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from geo_ray.base.errors import ConfigError

Format = Literal["csv", "jsonl", "parquet", "arrow"]

THOUSANDS = (",", ".", "'", " ")
"""Marks between groups of three digits; a space stands for all kinds of spaces."""

CHARACTERS = {"tab": "\t", "\\t": "\t", "space": " "}
"""Words for characters that are hard to type, or to see."""

FORMATS: tuple[Format, ...] = get_args(Format)

DEFAULT_NULLS = ("NULL", "null", "None", "NA", "N/A", "n/a", "#N/A")
"""Words that, unquoted in a CSV file, mean that there is no value. Empty text always does."""


@dataclass(frozen=True)
class ReadOptions:
    """What the files do not say themselves.

    Attributes:
        format: read files of this format only; None for whichever the folder has.
        delimiter: between the values of a CSV file; None for a comma, in ``.tsv`` a tab.
        decimal: the decimal mark of a CSV file, "." or ",".
        thousands: the mark between groups of three digits in the numbers of a CSV file: a comma, a
            point, an apostrophe or a space; None if there is none.
        encoding: of text files, as Python names it.
        header: names of the columns of CSV files without a header line; () if they have one.
        nulls: words that mean "no value"; those of `DEFAULT_NULLS` only in CSV files and unquoted.
        site: a file that says how these files are read, and how their columns differ from those
            that all regions share; see `geo_ray.data.files.site`.
        strict: refuse files of which anything is left out: a file, a folder, or a line.
    """

    format: Format | None = None
    delimiter: str | None = None
    decimal: str = "."
    encoding: str = "utf-8"
    header: tuple[str, ...] = ()
    nulls: tuple[str, ...] = DEFAULT_NULLS
    thousands: str | None = None
    site: str | Path | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n'):
            raise ConfigError(
                f"--delimiter: {self.delimiter!r} is not one character",
                fix="Write one character, such as ';', or the word tab.",
            )
        if self.delimiter is not None and self.delimiter == self.decimal:
            raise ConfigError(
                f"--delimiter and --decimal are both {self.delimiter!r}",
                fix="Files with decimal commas have another delimiter, mostly --delimiter ';'.",
            )
        if self.thousands is not None and self.thousands not in THOUSANDS:
            raise ConfigError(
                f"--thousands: {self.thousands!r} is no mark between digits",
                fix="Write a comma, a point, an apostrophe or the word space.",
            )
        if self.thousands == self.decimal:
            raise ConfigError(
                f"--thousands and --decimal are both {self.decimal!r}",
                fix="Pass `--thousands . --decimal ,` for numbers such as 1.000,5.",
            )
        if len(set(self.header)) != len(self.header) or not all(self.header):
            raise ConfigError(
                f"--header: {','.join(self.header)!r} has an empty name, or one twice",
                fix="Give each column a name of its own.",
            )
        try:
            codecs.lookup(self.encoding)
        except LookupError:
            raise ConfigError(
                f"--encoding: there is no encoding {self.encoding!r}",
                fix="Usual are utf-8, latin-1, cp1252 and utf-16.",
            ) from None
