"""Time model: when regions exchange, how long they wait, and the total work of a job."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from geo_ray.strategies.traits import Blocking, LastExchange

_EPS: Final = 1e-9

Floats = NDArray[np.float64]
Line = tuple[float, float]
"""Lines ``(first, second)``.

A region with exchanges of ``x`` seconds and steps of ``t`` seconds has a pace of at least ``first *
x + second * t``."""
Lines = tuple[Line, Line, Line, Line]


@dataclass(frozen=True, slots=True)
class Timing:
    """Exchanges at one interval, in steps of the job.

    Attributes:
        every: steps between exchanges while the link is free.
        hides: steps that can hide an exchange; infinite if exchanges never block.
        last: whether an exchange follows the last step; see `LastExchange`.
        bound: exchanges that a region may be ahead of the slowest; None: no bound.
        by_speed: whether slower regions exchange after fewer steps.
        unit: steps that are taken at once.
        owes: whether the codec accumulates an error, which the exchange of the last step transmits.
    """

    every: float
    hides: float = 0.0
    last: LastExchange = "rest"
    bound: int | None = None
    by_speed: bool = False
    unit: int = 1
    owes: bool = False

    @property
    def skips(self) -> bool:
        """Whether due exchanges are skipped while the link is busy."""
        return math.isinf(self.hides)

    @property
    def is_of_machines(self) -> bool:
        """Whether the number of exchanges depends on the speed of machines."""
        return self.skips or self.by_speed

    def rounds(self, steps: float) -> int:
        """Return the number of exchanges within a number of steps, without the last one."""
        if self._has_own_last:
            return max(0, math.ceil(steps / self.every - _EPS) - 1)
        return math.floor(steps / self.every + _EPS)

    def has_last(self, steps: float) -> bool:
        """Return whether an additional exchange follows the last step."""
        is_rest = steps > self.rounds(steps) * self.every + _EPS
        return self._has_own_last or (self.last == "rest" and is_rest)

    @property
    def _has_own_last(self) -> bool:
        """Whether an exchange that is due at the last step is the last one."""
        return self.last == "always" or self.owes

    def counts_R(self, steps: float, step_s_R: Floats, exchange_s_R: Floats) -> Floats:
        """Return the number of exchanges of each region, without the last one.

        The last dimension is regions; other dimensions are choices.
        """
        every_R = self._every_R(step_s_R)
        if not self.skips:
            return self._rounds_R(steps, every_R)
        counts_R, apart_R = _counts_R(steps, every_R, step_s_R, exchange_s_R)
        if self.bound is not None:
            rarest_s = (apart_R * step_s_R).max(axis=-1, keepdims=True)
            most_R = np.ceil(steps * step_s_R / rarest_s - _EPS) + self.bound
            counts_R = np.minimum(counts_R, most_R)
        return counts_R

    def more_s_R(self, steps: float, step_s_R: Floats, exchange_s_R: Floats) -> Floats:
        """Return the seconds that depend on all machines, in addition to those of `lines`."""
        every_R = self._every_R(step_s_R)
        if not self.skips:
            more_R = self._rounds_R(steps, every_R) - self.rounds(steps)
            return np.asarray(more_R * exchange_s_R)  # only blocked regions depend on speed
        counts_R, _ = _counts_R(steps, every_R, step_s_R, exchange_s_R)
        late_s_R = exchange_s_R - (steps - every_R) * step_s_R
        return np.where(counts_R == 1, np.maximum(0.0, late_s_R), 0.0)

    def lines(self, steps: float) -> Lines:
        """Return lines whose maximum is the pace of a region that waits when required."""
        if self.skips:
            return (0.0, 1.0), (0.0, 1.0), (0.0, 1.0), (0.0, 1.0)
        rounds = self.rounds(steps)
        whole = max(0, rounds - 1)
        part = min(1, rounds)
        hidden = whole * self.hides
        rest = part * min(self.hides, max(0.0, steps - rounds * self.every))
        return (
            (0.0, 1.0),
            (whole / steps, 1 - hidden / steps),
            (part / steps, 1 - rest / steps),
            (rounds / steps, 1 - (hidden + rest) / steps),
        )

    def _rounds_R(self, steps: float, every_R: Floats) -> Floats:
        if self._has_own_last:
            return np.asarray(np.maximum(0.0, np.ceil(steps / every_R - _EPS) - 1))
        return np.asarray(np.floor(steps / every_R + _EPS))

    def _every_R(self, step_s_R: Floats) -> Floats:
        every_R = np.full(step_s_R.shape, self.every)
        if self.by_speed:
            fractions_R = step_s_R.min(axis=-1, keepdims=True) / step_s_R
            every_R = self.unit * np.maximum(1, np.floor(every_R / self.unit * fractions_R + _EPS))
        return every_R


def _counts_R(
    steps: float, every_R: Floats, step_s_R: Floats, exchange_s_R: Floats
) -> tuple[Floats, Floats]:
    """Return the number of exchanges if due ones wait for the link, and the steps between them."""
    takes_R = np.ceil(exchange_s_R / step_s_R - _EPS)
    apart_R = np.maximum(every_R, takes_R)
    rest_R = steps - every_R - np.maximum(1.0, takes_R)
    first_R = (every_R < steps - _EPS).astype(float)  # the duration is unknown at first
    return np.asarray(np.maximum(first_R, np.floor(rest_R / apart_R + _EPS) + 1)), apart_R


@dataclass(frozen=True, slots=True)
class Pattern:
    """Exchange pattern of a strategy, for every possible interval.

    Attributes:
        blocking: see `Blocking`.
        last: see `LastExchange`.
        fragments: parts of the model; each exchange transmits one.
        bound: see `Timing.bound`.
        every: steps between exchanges by interval; default: the interval over `fragments`.
        by_speed: see `Timing.by_speed`.
        synchronous: whether a region that pauses delays all others.
        unit: see `Timing.unit`.
        hidden: steps that hide an exchange of a region that blocks when late, by interval; default:
            those until the next exchange.
    """

    blocking: Blocking = "always"
    last: LastExchange = "rest"
    fragments: int = 1
    bound: int | None = None
    by_speed: bool = False
    synchronous: bool = True
    unit: int = 1
    every: Mapping[int, float] = field(default_factory=dict)
    hidden: Mapping[int, float] = field(default_factory=dict)

    @property
    def trains_on(self) -> bool:
        """Whether regions train during an exchange."""
        return self.blocking != "always"

    @property
    def sends(self) -> int:
        """How often per exchange a server needs the state of workers that have an optimizer.

        It needs it for the update, when the answer arrives during training, and when an answer is
        merged some steps later.
        """
        return 1 + self.trains_on + bool(self.hidden)

    def timing(self, interval: int, *, owes: bool = False) -> Timing:
        """Return the exchanges at an interval.

        Args:
            interval: steps in which the whole model is exchanged once.
            owes: see `Timing.owes`.
        """
        every = self.every.get(interval, interval / self.fragments)
        hides = {
            "always": 0.0,
            "when_late": self.hidden.get(interval, every),
            "never": math.inf,
        }[self.blocking]
        return Timing(every, hides, self.last, self.bound, self.by_speed, self.unit, owes)


HOUR_S: Final = 3600.0
_MOST_LOST: Final = 0.9


@dataclass(frozen=True, slots=True)
class JobWork:
    """Work of a job, independent of machines.

    Attributes:
        steps: local steps of every region until the target.
        rows_per_step: rows per step over all regions.
        rows: rows of data by region, which determine the division of a step.
        num_params: of the model.
        pattern: exchange pattern.
        startup_s: seconds until the first step; they cost like any others.
        worker_start_s: additional start-up seconds per worker.
        evaluations_s: seconds of all evaluations, which block training.
    """

    steps: float
    rows_per_step: float
    rows: Mapping[str, float]
    num_params: int
    pattern: Pattern = field(default_factory=Pattern)
    startup_s: float = 0.0
    worker_start_s: float = 0.0
    evaluations_s: float = 0.0

    def region_rows(self, region: str) -> int:
        """Return the region's rows per step, at least one."""
        return max(1, round(self.rows_per_step * self.rows[region] / sum(self.rows.values())))

    def start_s(self, workers: int) -> float:
        """Return the seconds until the first step."""
        return self.startup_s + self.worker_start_s * workers

    def seconds(self, step_time_s: float, last_s: float, workers: int, stall: float = 1.0) -> float:
        """Return the seconds of the job.

        Args:
            step_time_s: seconds per step.
            last_s: seconds of the exchange after the last step; 0: none.
            workers: workers of all regions.
            stall: factor by which preemptions extend steps and exchanges.
        """
        trained_s = self.steps * step_time_s * stall
        return self.start_s(workers) + self.evaluations_s + trained_s + last_s


def stall_of(lost_fraction: float) -> float:
    """Return the factor by which work is extended if a fraction of time is lost, at most ten."""
    return 1 / (1 - min(_MOST_LOST, lost_fraction))
