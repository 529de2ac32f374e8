"""Statistics of columns that regions may share; merging them needs no rows.

Means and squared deviations are merged by the formula of Chan, Golub and LeVeque (1979), which is
exact up to rounding. Words are counted only on request, because they are data.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from geo_ray.base.errors import ConfigError
from geo_ray.base.load import load_json
from geo_ray.base.model import StrictModel
from geo_ray.base.text import missing_path

ColumnKind = Literal["number", "time", "text", "list", "empty", "other"]


@dataclass(frozen=True)
class Moments:
    """Count, mean, sum of squared deviations from the mean (M2), minimum and maximum."""

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0
    low: float = float("inf")
    high: float = float("-inf")

    @classmethod
    def of(cls, values: np.ndarray[Any, Any]) -> Moments:
        """Compute the moments of finite numbers (N,). Equal numbers have an M2 of exactly 0."""
        if not len(values):
            return cls()
        with np.errstate(over="ignore", invalid="ignore"):
            floats = values.astype(np.float64)
            shifted = floats - floats[0]  # small even if the numbers have a large offset
            middle = shifted.mean()
            m2 = float(np.square(shifted - middle).sum())
        low, high = float(floats.min()), float(floats.max())
        return cls(len(floats), float(floats[0] + middle), m2, low, high)

    @property
    def usable(self) -> bool:
        """Whether nothing overflowed."""
        return math.isfinite(self.mean) and math.isfinite(self.m2)

    def merge(self, other: Moments) -> Moments:
        """Merge the moments of two sets of numbers."""
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        delta = other.mean - self.mean
        return Moments(
            count,
            self.mean + delta * (other.count / count),
            self.m2 + other.m2 + delta * delta * (self.count * (other.count / count)),
            min(self.low, other.low),
            max(self.high, other.high),
        )


class ColumnStatistics(StrictModel):
    """Statistics of one column."""

    kind: ColumnKind = Field(description="kind of its values; time: in seconds since 1970, UTC")
    nulls: int = Field(ge=0, description="rows with a missing value")
    nans: int = Field(default=0, ge=0, description="values that are not a number (NaN)")
    infinite: int = Field(
        default=0, ge=0, description="infinite values, which the following keys exclude"
    )
    count: int = Field(default=0, ge=0, description="finite numbers")
    mean: float | None = Field(
        default=None, description="mean of these numbers; null if there are none"
    )
    m2: float | None = Field(
        default=None, ge=0, description="sum of squared deviations from the mean"
    )
    min: float | None = Field(default=None, description="minimum; null if it is not shared")
    max: float | None = Field(default=None, description="the greatest")
    words: dict[str, int] | None = Field(
        default=None, description="frequent word -> rows; only on request"
    )

    @model_validator(mode="after")
    def _no_mean_of_nothing(self) -> ColumnStatistics:
        if (self.mean is None) != (self.m2 is None):
            raise ValueError("mean and m2 must be given together")
        if self.mean is not None and not self.count:
            raise ValueError("mean is given, but count is 0")
        return self


class Statistics(StrictModel):
    """Statistics of the columns of one region, or of several merged."""

    version: Literal[1] = Field(default=1, description="version of this format")
    regions: tuple[str, ...] = Field(min_length=1, description="regions of the rows")
    rows: int = Field(ge=0, description="how many")
    at_least: int = Field(
        default=1, ge=1, description="minimum number of a region's rows that a listed word has"
    )
    needed: tuple[str, ...] = Field(
        default=(), description="columns that the preparation scales or fills with statistics"
    )
    columns: dict[str, ColumnStatistics] = Field(description="column -> its statistics")
    left_out: dict[str, str] = Field(
        default_factory=dict, description="column -> why its statistics are missing or incomplete"
    )


def load_statistics(path: Path) -> Statistics:
    """Read a file of statistics.

    Raises:
        ConfigError: it cannot be read or is invalid.
    """
    fix = "Write it with `geo-ray data stats`, or `geo-ray data merge-stats` for several regions."
    if not path.exists():
        raise ConfigError(f"no statistics file {path}{missing_path(path)}", fix=fix)
    return load_json(path, Statistics, "statistics", partial(ConfigError, fix=fix))


def save_statistics(statistics: Statistics, path: Path) -> None:
    """Write a file of statistics; equal ones give equal bytes.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(statistics.model_dump_json(indent=1, exclude_none=True) + "\n", "utf-8")
    except OSError as error:
        raise ConfigError(
            f"--out: {path} cannot be written: {error.strerror}", fix="Choose another path."
        ) from None


def merge_statistics(parts: Sequence[Statistics]) -> Statistics:
    """Merge the statistics of several regions; the order of ``parts`` does not matter.

    Raises:
        ConfigError: there are no parts, two parts have a region in common, or a column that a
            preparation scales has no mean.
    """
    twice = [r for r, n in Counter(r for part in parts for r in part.regions).items() if n > 1]
    if twice or not parts:
        raise ConfigError(
            f"the statistics of region {twice[0]!r} are in two of the files"
            if twice
            else "no statistics to merge",
            fix="Give one file per region.",
        )
    ordered = sorted(parts, key=attrgetter("regions"))
    left_out = {name: why for part in ordered for name, why in part.left_out.items()}
    columns: dict[str, ColumnStatistics] = {}
    for name in dict.fromkeys(name for part in ordered for name in part.columns):
        lacking = [part for part in ordered if name not in part.columns]
        if lacking:
            left_out.setdefault(name, f"{_names(lacking[0])} has none")
            continue
        merged = _merge_column({_names(part): part.columns[name] for part in ordered})
        if isinstance(merged, str):
            left_out.setdefault(name, merged)
            continue
        columns[name] = merged
        missing = [p for p in ordered if p.columns[name].words is None
                  and p.columns[name].kind != "empty"]  # fmt: skip
        if missing and any(part.columns[name].words is not None for part in ordered):
            left_out.setdefault(name, f"{_names(missing[0])} did not count its words")
    needed = tuple(dict.fromkeys(name for part in ordered for name in part.needed))
    _refuse_without_mean(needed, columns, left_out, ordered)
    return Statistics(
        needed=needed,
        regions=tuple(sorted(region for part in ordered for region in part.regions)),
        rows=sum(part.rows for part in ordered),
        at_least=max(part.at_least for part in ordered),
        columns=columns,
        left_out=left_out,
    )


def _refuse_without_mean(
    needed: Sequence[str],
    columns: Mapping[str, ColumnStatistics],
    left_out: Mapping[str, str],
    parts: Sequence[Statistics],
) -> None:
    """Reject statistics that `data shard` could not use in any region."""
    lines = []
    for name in needed:
        if name not in columns:
            lines.append(f"{name}: {left_out[name]}")
        elif columns[name].mean is None:
            kind = columns[name].kind
            what = "it has no values in any region" if kind == "empty" else f"its kind is {kind}"
            lines.append(f"{name}: {what}")
    if not lines:
        return
    first, *others = parts
    odd = [part for part in others if set(part.needed) != set(first.needed)]
    lines += [
        f"{_names(part)}: written for {', '.join(part.needed) or 'no preparation'}"
        for part in ([first, *odd] if odd else [])
    ]
    raise ConfigError(
        "\n    ".join(["columns that the preparation scales or fills have no statistics:", *lines]),
        fix="Write the statistics of each region with the same preparation file (--prepare), and "
        "where a column has another name, other words or another type, with a site file (--site).",
    )


def _names(part: Statistics) -> str:
    return " and ".join(part.regions)


def _merge_column(parts: Mapping[str, ColumnStatistics]) -> ColumnStatistics | str:
    """Merge a column of all regions; a text says why that is impossible."""
    full = {region: part for region, part in parts.items() if part.kind != "empty"}
    kinds = {region: part.kind for region, part in full.items()}
    if len(set(kinds.values())) > 1:
        return "it is " + ", ".join(f"{kind} in {region}" for region, kind in kinds.items())
    moments, words = Moments(), Counter[str]()
    for part in full.values():
        if part.count and part.mean is not None and part.m2 is not None:
            low, high = part.min or 0.0, part.max or 0.0  # used only if all parts have them
            moments = moments.merge(Moments(part.count, part.mean, part.m2, low, high))
        words.update(part.words or {})
    known = all(part.min is not None for part in full.values() if part.count)
    counted = bool(full) and all(part.words is not None for part in full.values())
    if not moments.usable:
        return "its numbers are too large"
    merged = column_statistics(next(iter(kinds.values()), "empty"), moments, known)
    return merged.model_copy(
        update={
            "nulls": sum(part.nulls for part in parts.values()),
            "nans": sum(part.nans for part in parts.values()),
            "infinite": sum(part.infinite for part in parts.values()),
            "words": dict(sorted(words.items())) if counted else None,
        }
    )


def column_statistics(kind: ColumnKind, moments: Moments, extremes: bool) -> ColumnStatistics:
    """Return the record of a column, with minimum and maximum if they may be shared."""
    if not moments.count:
        return ColumnStatistics(kind=kind, nulls=0)
    return ColumnStatistics(
        kind=kind,
        nulls=0,
        count=moments.count,
        mean=moments.mean,
        m2=moments.m2,
        min=moments.low if extremes else None,
        max=moments.high if extremes else None,
    )
