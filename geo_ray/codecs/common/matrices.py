"""Which parts of a vector are seen as matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_WORTH = 2  # a part must become this much smaller, or it is sent as it is
_WIDTHS_TRIED = 64


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """A run of a vector.

    Attributes:
        rows: n.
        columns: m; the run has n * m elements.
        rank: columns of the thin matrices; 0 if the elements are sent as they are.
    """

    rows: int
    columns: int
    rank: int

    @property
    def num(self) -> int:
        """Elements of the run."""
        return self.rows * self.columns

    @property
    def sent(self) -> int:
        """Numbers that are sent for it."""
        return self.rank * (self.rows + self.columns) or self.num

    def possible(self, max_rank: int) -> bool:
        """Whether there is such a part."""
        most = min(self.rows, self.columns, max_rank)
        return self.rows >= 0 and self.columns >= 0 and 0 <= self.rank <= max(most, 0)


def parts_of(num: int, shapes: Sequence[Sequence[int]], rank: int) -> list[MatrixPart]:
    """Cut a vector of ``num`` elements.

    Args:
        num: elements of the vector.
        shapes: of its tensors in order; none for one nearly square matrix and a short rest.
        rank: of every matrix.

    Raises:
        ValueError: the tensors have another number of elements.
    """
    if not shapes:
        rows = _rows(num)
        return _merged([_part(rows, num // rows, rank), MatrixPart(1, num % rows, 0)])
    parts = [
        _part(shape[0], math.prod(shape[1:]), rank)
        if len(shape) > 1
        else MatrixPart(1, math.prod(shape), 0)
        for shape in shapes
    ]
    found = sum(part.num for part in parts)
    if found != num:
        raise ValueError(f"`shapes` has {found} elements, the vector {num}")
    return _merged(parts)


def _part(rows: int, columns: int, rank: int) -> MatrixPart:
    gains = rank * (rows + columns) * _WORTH <= rows * columns and rank <= min(rows, columns)
    return MatrixPart(rows, columns, rank) if gains else MatrixPart(1, rows * columns, 0)


def _rows(num: int) -> int:
    """A number near the square root that leaves a short rest."""
    root = max(math.isqrt(num), 1)
    return min(range(root, max(root - _WIDTHS_TRIED, root // 2, 0), -1), key=lambda n: num % n)


def _merged(parts: list[MatrixPart]) -> list[MatrixPart]:
    """Neighbours that are sent as they are become one; empty ones vanish."""
    merged: list[MatrixPart] = []
    for part in parts:
        if not part.num:
            continue
        if merged and not part.rank and not merged[-1].rank:
            part = MatrixPart(1, merged.pop().num + part.num, 0)
        merged.append(part)
    return merged
