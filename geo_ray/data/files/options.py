"""Options for reading a user's files; each field is an option of ``geo-ray data``."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from geo_ray.base.errors import ConfigError

Format = Literal["csv", "jsonl", "parquet", "arrow", "webdataset", "mds", "images"]

THOUSANDS = (",", ".", "'", " ")
"""Allowed thousands marks; a space stands for all kinds of spaces."""

CHARACTERS = {"tab": "\t", "\\t": "\t", "space": " "}
"""Names of characters that are hard to type or see."""

FORMATS: tuple[Format, ...] = get_args(Format)

DEFAULT_NULLS = ("NULL", "null", "None", "NA", "N/A", "n/a", "#N/A")
"""Unquoted words in a CSV file that mean a missing value. Empty text always does."""


@dataclass(frozen=True)
class ReadOptions:
    """Properties of the files that the files do not declare.

    Attributes:
        format: read files of this format only; None for the format that the folder has.
        delimiter: the delimiter of CSV files; None for a comma, or a tab in ``.tsv`` files.
        decimal: the decimal mark of a CSV file, "." or ",".
        thousands: the thousands mark of numbers in a CSV file: a comma, a point, an apostrophe or a
            space; None if there is none.
        encoding: encoding of text files, by its Python name.
        header: names of the columns of CSV files without a header line; () if they have one.
        nulls: words that mean a missing value; those of `DEFAULT_NULLS` only unquoted in CSV files.
        site: a site file with reading options and the differences between these files' columns and
            the columns shared by all regions; see `geo_ray.data.files.site`.
        strict: fail if a file, a folder or a line is skipped.
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
                fix="Files with decimal commas use another delimiter, usually --delimiter ';'.",
            )
        if self.thousands is not None and self.thousands not in THOUSANDS:
            raise ConfigError(
                f"--thousands: {self.thousands!r} is not a valid thousands mark",
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
                fix="Give each column a unique name.",
            )
        try:
            codecs.lookup(self.encoding)
        except LookupError:
            raise ConfigError(
                f"--encoding: unknown encoding {self.encoding!r}",
                fix="Common encodings are utf-8, latin-1, cp1252 and utf-16.",
            ) from None
