"""One source's share of a column: rows in, numbers and what is wrong with them out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Array = np.ndarray[Any, Any]

Kind = Literal[
    "absent", "missing", "text", "infinite", "inexact", "fraction", "range", "truth", "unknown",
    "is_list", "is_single", "length", "unreadable",
]  # fmt: skip
"""What may be wrong; `geo_ray.data.prepare.findings` says each in words."""


@dataclass(frozen=True)
class Wrong:
    """Rows that a source cannot take.

    Attributes:
        kind: why.
        rows_N: (N,) which.
    """

    kind: Kind
    rows_N: Array


@dataclass
class Part:
    """What a source made of some rows.

    Attributes:
        values_NW: (N, W) numbers; 0 in rows that are wrong or dropped.
        dropped_N: (N,) rows that are to be left out.
        wrong: what is wrong, one record per kind.
        filled: rows whose missing value was replaced.
        other: words that are not in the vocabulary -> their rows.
    """

    values_NW: Array
    dropped_N: Array
    wrong: list[Wrong] = field(default_factory=list)
    filled: int = 0
    other: Counter[str] = field(default_factory=Counter)

    def refuse(self, kind: Kind, rows_N: Array) -> None:
        """Note rows as wrong, if there are any."""
        if rows_N.any():
            self.wrong.append(Wrong(kind, rows_N))


def any_of(mask_NW: Array) -> Array:
    """(N,) whether any number of the row is marked."""
    rows_N: Array = np.any(mask_NW, axis=1)
    return rows_N


def unusable(kind: Kind, rows: int, width: int) -> Part:
    """The part of a source that cannot be used at all."""
    part = Part(np.zeros((rows, width)), np.zeros(rows, bool))
    part.refuse(kind, np.ones(rows, bool))
    return part
