"""How a user's files are to be read; each field is an option of ``geo-ray data``."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import Literal, get_args

from geo_ray.errors import ConfigError

Format = Literal["csv", "jsonl", "parquet", "arrow"]

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
        encoding: of text files, as Python names it.
        header: names of the columns of CSV files without a header line; () if they have one.
        nulls: words of a CSV file that mean "no value" (if they are not quoted).
    """

    format: Format | None = None
    delimiter: str | None = None
    decimal: str = "."
    encoding: str = "utf-8"
    header: tuple[str, ...] = ()
    nulls: tuple[str, ...] = DEFAULT_NULLS

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
