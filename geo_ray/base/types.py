"""Ids and small frozen records that every layer shares. No torch here: planning reads this too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

RegionName = NewType("RegionName", str)
"""The value of the node label ``ray.io/availability-region``."""

WorkerRank = NewType("WorkerRank", int)
"""A worker's number inside its region, 0 to workers - 1. A replacement takes the same rank."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of positions in a region's endless, deterministic stream of training rows.

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
    """A share of a coded gradient.

    Attributes:
        span: the rows whose mean gradient it is.
        weight: what that is multiplied with.
    """

    span: Span
    weight: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a worker tells of one step beside its gradient.

    Attributes:
        span: the rows it read.
        loss: mean loss over them; None if the step was refused.
        compute_s: seconds from the first row to the finished gradient, padding included.
        refused: why the step must not be applied (a loss or gradient that is not finite), or None.
        grad_sq: squared 2-norm of the gradient as pushed; None if it is no plain mean of the rows'.
    """

    span: Span
    loss: float | None
    compute_s: float
    refused: str | None = None
    grad_sq: float | None = None
