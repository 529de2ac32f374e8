"""The preparation file: how each column of a task is made from columns of the user's files.

`written_sources` returns the sources as written in the file, with line numbers, for messages;
`flow` and `source_text` write lines of such a file.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from geo_ray.base.errors import ConfigError
from geo_ray.base.explain import explain
from geo_ray.base.model import StrictModel
from geo_ray.base.text import missing_path
from geo_ray.base.yaml import parse_yaml, read_text
from geo_ray.data.arrow_values import Cast, text_of

MAX_WORDS = 1_000_000
"""Maximum number of words in a vocabulary."""

Word = bool | int | float | str

_LEAST, _GREATEST = -(2**63), 2**64 - 1


class Fill(StrictModel):
    """A replacement for missing values."""

    fill: Word = Field(description="the value: a number, or a word of the vocabulary")


class Linear(StrictModel):
    """(value - subtract) / divide; what `standard` and `minmax` become with statistics."""

    subtract: float = Field(description="subtracted first")
    divide: float = Field(description="then divided by it; not 0")

    @model_validator(mode="after")
    def _no_zero(self) -> Linear:
        if self.divide == 0:
            raise ValueError("divide must not be 0")
        return self


class Vocabulary(StrictModel):
    """The words allowed in a column, and their encoding."""

    values: tuple[Word, ...] | None = Field(default=None, description="the words, in order")
    file: str | None = Field(
        default=None,
        description="a UTF-8 file with one word per line, in the folder of the preparation file",
    )
    counted: int | None = Field(
        default=None,
        ge=1,
        description="use the words that the statistics counted at least this often, the most "
        "frequent first",
    )
    hash: int | None = Field(
        default=None,
        ge=1,
        description="without a list: number of hash buckets for the words; a bucket is the BLAKE2b "
        "hash (8 bytes, big endian) of the UTF-8 word, modulo this number",
    )
    other: Literal["bucket", "refuse"] = Field(
        default="bucket",
        description="words not in the list: bucket (an extra last position), refuse",
    )
    encode: Literal["index", "one_hot"] | None = Field(
        default=None,
        description="index: a number from 0; one_hot: one number per position, 1 at the word's and "
        "0 elsewhere; by default index if the column has only this source, else one_hot",
    )

    @model_validator(mode="after")
    def _one_source_of_words(self) -> Vocabulary:
        sources = {
            "values": self.values,
            "file": self.file,
            "counted": self.counted,
            "hash": self.hash,
        }
        given = [key for key, value in sources.items() if value is not None]
        if len(given) != 1:
            raise ValueError(
                f"a vocabulary needs exactly one of {', '.join(sources)}; found "
                f"{', '.join(given) or 'none'}"
            )
        twice = [word for word, n in Counter(self.words).items() if n > 1]
        if twice or self.values == ():
            raise ValueError(
                f"values: {twice[0]!r} is listed twice" if twice else "values: is empty"
            )
        return self

    @property
    def words(self) -> tuple[str, ...]:
        """Return ``values`` as texts for comparison with columns; () without a list."""
        return tuple(text_of(value) for value in self.values or ())

    @property
    def places(self) -> int:
        """Return the number of positions, including other words; needs ``values`` or ``hash``."""
        return self.hash or len(self.values or ()) + (self.other == "bucket")


class Source(StrictModel):
    """One column of the files and its conversion."""

    column: str = Field(description="the column of the files; `outer.inner` inside objects")
    cast: Cast = Field(
        default="number",
        description="number; time: text such as 2026-01-31T10:00:00Z, as seconds since 1970; "
        "{time: FORMAT}: text such as %d.%m.%Y",
    )
    length: int | None = Field(
        default=None, ge=1, description="numbers per row, if each row of the column is a list"
    )
    missing: Literal["refuse", "drop_row", "keep", "mean", "most_frequent", "other"] | Fill = Field(
        default="refuse",
        description="rows with a missing value or NaN: refuse, drop_row, keep (as NaN), mean, "
        "most_frequent, other (the vocabulary's position for other words), or {fill: VALUE}",
    )
    infinite: Literal["refuse", "missing", "keep"] = Field(
        default="refuse",
        description="infinite numbers: refuse, missing (treated as missing values), keep",
    )
    scale: Literal["standard", "minmax"] | Linear | None = Field(
        default=None,
        description="standard: mean 0 and deviation 1, with deviation = sqrt(M2 / count) and M2 = "
        "the sum of squared deviations from the mean; minmax: from 0 to 1; or {subtract, divide}",
    )
    vocabulary: Vocabulary | None = Field(
        default=None, description="words, for a column of categories"
    )

    @property
    def needs_words(self) -> bool:
        """Whether it refers to words counted in statistics."""
        counted = self.vocabulary is not None and self.vocabulary.counted is not None
        return counted or self.missing == "most_frequent"

    @property
    def needs_statistics(self) -> bool:
        """Whether it refers to any statistic."""
        return self.needs_words or self.missing == "mean" or isinstance(self.scale, str)

    @property
    def width(self) -> int:
        """Return the numbers per row that it produces; needs the words of its vocabulary."""
        if self.vocabulary is None:
            return self.length or 1
        return self.vocabulary.places if self.vocabulary.encode == "one_hot" else 1

    @model_validator(mode="after")
    def _no_contradiction(self) -> Source:
        words = self.vocabulary
        if words is None:
            if self.missing == "other":
                raise ValueError("missing: other requires a vocabulary")
            if isinstance(self.missing, Fill) and isinstance(self.missing.fill, str):
                raise ValueError(f"fill: {self.missing.fill!r} is not a number")
            if isinstance(self.missing, Fill) and not _LEAST <= self.missing.fill <= _GREATEST:  # type: ignore[operator]
                raise ValueError("fill: must be from -2**63 to 2**64 - 1")
            if self.length is not None and self.scale in ("standard", "minmax"):
                raise ValueError("lists have no statistics; write {subtract, divide}")
            return self
        if self.scale is not None or self.length is not None or self.cast != "number":
            raise ValueError("scale, length and cast cannot be combined with a vocabulary")
        if self.missing in ("keep", "mean"):
            raise ValueError(f"missing: {self.missing} cannot be combined with a vocabulary")
        if self.missing == "other" and (words.hash is not None or words.other == "refuse"):
            raise ValueError("missing: other requires a vocabulary with a position for other words")
        return self


class Preparation(StrictModel):
    """All columns of a task and their sources."""

    version: Literal[1] = Field(default=1, description="version of this format")
    columns: dict[str, tuple[Source, ...]] = Field(
        description="column of the task -> its sources, whose numbers are concatenated"
    )
    types: dict[str, str] = Field(
        default_factory=dict, description="column of the task -> type; written by `data shard`"
    )

    @model_validator(mode="after")
    def _no_empty_column(self) -> Preparation:
        empty = [name for name, sources in self.columns.items() if not sources]
        if empty:
            raise ValueError(f"columns.{empty[0]} has no source")
        return self


def load_preparation(path: Path) -> Preparation:
    """Read a preparation file and its vocabulary files, whose paths are relative to it.

    Returns:
        The preparation, with vocabularies from files stored in ``values``.

    Raises:
        ConfigError: naming the file and every invalid key, or the vocabulary file.
    """
    if not path.exists():
        raise ConfigError(
            f"no preparation file {path}{missing_path(path)}",
            fix="Correct the path; `geo-ray data inspect FILES --task TASK --draft FILE` writes a "
            "first one.",
        )
    found = parse_preparation(read_text(path), str(path))
    columns = {
        name: tuple(_with_words(source, path) for source in sources)
        for name, sources in found.columns.items()
    }
    return found.model_copy(update={"columns": columns})


def parse_preparation(text: str, origin: str) -> Preparation:
    """Read a preparation from YAML without its vocabulary files.

    Args:
        text: the YAML; a single source of a column need not be in a list.
        origin: the name of the text, for messages.

    Raises:
        ConfigError: naming every invalid key.
    """
    tree = parse_yaml(text, origin)
    value, origins = tree.value, dict(tree.origins)
    columns = value.get("columns") if isinstance(value, dict) else None
    if isinstance(value, dict) and isinstance(columns, dict):
        alone = [name for name, source in columns.items() if isinstance(source, dict)]
        value = {**value, "columns": {**columns, **{name: [columns[name]] for name in alone}}}
        for path, line in tree.origins.items():
            if path[:1] == ("columns",) and len(path) > 1 and path[1] in alone:
                origins[(*path[:2], 0, *path[2:])] = line
    try:
        return Preparation.model_validate_json(json.dumps(value, allow_nan=False))
    except ValidationError as error:
        lines = explain(error, Preparation, origins)
        raise ConfigError(
            "\n    ".join([f"{origin}: this preparation is invalid:", *lines]),
            fix="Correct the keys; docs/guides/preparation.md lists them.",
        ) from None


def _with_words(source: Source, path: Path) -> Source:
    words = source.vocabulary
    if words is None or words.file is None:
        return source
    file = path.parent / words.file
    try:
        # Not splitlines(), which splits at more characters than line ends.
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeError) as error:
        raise _no_words(source.column, path, file, error) from None
    values = tuple(line.strip() for line in lines if line.strip())
    twice = [word for word, n in Counter(text_of(value) for value in values).items() if n > 1]
    if twice or not values or len(values) > MAX_WORDS:
        problem = f"has {twice[0]!r} twice" if twice else f"has {len(values)} words"
        raise ConfigError(
            f"{path}: the vocabulary {words.file!r} {problem}",
            fix=f"Write each word once, from 1 to {MAX_WORDS} words.",
        )
    inlined = words.model_copy(update={"values": values, "file": None})
    return source.model_copy(update={"vocabulary": inlined})


def _no_words(column: str, path: Path, file: Path, error: OSError | UnicodeError) -> ConfigError:
    where = f"{path}: the vocabulary of column {column!r}"
    if isinstance(error, FileNotFoundError):
        return ConfigError(
            f"{where}: no file {file}{missing_path(file)}",
            fix=f"Correct its path, which is relative to the folder of {path.name}, or write a "
            "UTF-8 "
            "file with one word per line there.",
        )
    reason = "it is not UTF-8 text" if isinstance(error, UnicodeError) else error.strerror
    return ConfigError(
        f"{where}: {file} cannot be read: {reason}", fix="Name a UTF-8 file with one word per line."
    )


_PLAIN = re.compile(r"[A-Za-z_]([\w .-]*\w)?", re.ASCII)
_TAKEN = {"null", "true", "false"}


def flow(value: Any) -> str:
    """A value as YAML on one line; as JSON if plain text would be misread."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{flow(k)}: {flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(flow(item) for item in value) + "]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _TAKEN:
        return value
    return json.dumps(value, ensure_ascii=False)


def source_text(source: Source, changes: Mapping[str, Any] | None = None) -> str:
    """Return ``{column: age, missing: mean}``: the non-default keys, with some keys changed."""
    given = source.model_dump(mode="json", exclude_defaults=True)
    return flow({"column": source.column, **given, **(changes or {})})


@dataclass(frozen=True)
class WrittenSource:
    """One source of a column as written, without statistics and vocabulary files.

    Attributes:
        where: file and line, such as ``prepare.yaml, line 4``.
        keys: its keys in the file.
    """

    where: str
    keys: Mapping[str, Any]

    def changed(self, changes: Mapping[str, Any]) -> str:
        """Return the source on one line of YAML, with some keys changed or added."""
        return flow({**self.keys, **changes})


WrittenSources = Mapping[tuple[str, str], WrittenSource]
"""(column of the task, column of the files) -> its source."""


def written_sources(path: Path | None) -> WrittenSources:
    """Return the sources of a valid preparation file.

    Args:
        path: the file; None gives no sources.
    """
    if path is None:
        return {}
    tree: Any = parse_yaml(read_text(path), str(path))
    found: dict[tuple[str, str], WrittenSource] = {}
    for name, given in tree.value["columns"].items():
        for number, keys in enumerate(given if isinstance(given, list) else [given]):
            place = (name, number) if isinstance(given, list) else (name,)
            line = tree.origins[("columns", *place)]
            found.setdefault((name, keys["column"]), WrittenSource(f"{path}, {line}", keys))
    return found
