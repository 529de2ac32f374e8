"""Ids and small frozen records that every layer shares. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NewType

RegionName = NewType("RegionName", str)
"""The value of the node label ``ray.io/availability-region``."""

WorkerRank = NewType("WorkerRank", int)
"""A worker's number inside its region, 0 to workers - 1. A replacement has the same rank."""


@dataclass(frozen=True, slots=True)
class Span:
    """A range of positions in a region's endless, deterministic stream of training rows.

    Attributes:
        start: first position.
        count: number of rows.
    """

    start: int
    count: int

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class CodedPartition:
    """A partition of a coded gradient.

    Attributes:
        span: rows of its mean gradient.
        weight: factor of that gradient.
    """

    span: Span
    weight: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """A worker's report of a step, without the gradient.

    Attributes:
        span: the rows it read.
        loss: mean loss over them; None if the step was refused.
        compute_s: seconds from the first row to the finished gradient, padding included.
        refused: reason to refuse the step (a non-finite loss or gradient), or None.
        grad_sq: squared 2-norm of the gradient as pushed; None if it is not a plain mean over rows.
        learning_rate: of the last step of the worker's own optimizer; None without one.
        unused: parameters without a gradient, by index in the model.
    """

    span: Span
    loss: float | None
    compute_s: float
    refused: str | None = None
    grad_sq: float | None = None
    learning_rate: float | None = None
    unused: Sequence[int] = ()


def unused_by_all(parts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the parameters that are unused in all parts of a step; none without any part."""
    found = [frozenset(part) for part in parts]
    return tuple(sorted(frozenset.intersection(*found))) if found else ()
