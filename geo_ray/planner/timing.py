"""The time model: when regions exchange, how long they stall, and the total work of a job."""

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
"""Exchanges per step that are waited for, and the share of a step's own seconds that counts: a
region with exchanges of ``x`` seconds has a pace of ``first * x + second * t`` at least."""
Lines = tuple[Line, Line, Line, Line]


@dataclass(frozen=True, slots=True)
class Timing:
    """The exchanges of one interval, in steps of the job.

    Attributes:
        every: steps from one to the next, where the link is free.
        hides: steps that hide one; infinite if nobody stands still for it.
        last: whether there is one after the last step; see `LastExchange`.
        bound: exchanges that a region may be ahead of the slowest; None: any number.
        by_speed: whether slower regions exchange after fewer steps.
        unit: steps that are taken at once.
        owes: whether a codec owes something after each exchange, so that the one of the last step,
            which pays it, is the last one.
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
        """Whether exchanges that are due are put off while the link is busy."""
        return math.isinf(self.hides)

    @property
    def is_of_machines(self) -> bool:
        """Whether the number of exchanges depends on how fast machines are."""
        return self.skips or self.by_speed

    def rounds(self, steps: float) -> int:
        """Return the exchanges that are due within so many steps, without the last one."""
        if self._has_own_last:
            return max(0, math.ceil(steps / self.every - _EPS) - 1)
        return math.floor(steps / self.every + _EPS)

    def has_last(self, steps: float) -> bool:
        """Return whether there is one more after the last step."""
        is_rest = steps > self.rounds(steps) * self.every + _EPS
        return self._has_own_last or (self.last == "rest" and is_rest)

    @property
    def _has_own_last(self) -> bool:
        """Whether an exchange that is due at the last step is the last one."""
        return self.last == "always" or self.owes

    def counts_R(self, steps: float, step_s_R: Floats, exchange_s_R: Floats) -> Floats:
        """Return how many each region makes, without the last one.

        Regions are the last dimension; others are of choices.
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
        """Return what depends on all machines: seconds beyond those of `lines`."""
        every_R = self._every_R(step_s_R)
        if not self.skips:
            more_R = self._rounds_R(steps, every_R) - self.rounds(steps)
            return np.asarray(more_R * exchange_s_R)  # only who stands still goes by speed
        counts_R, _ = _counts_R(steps, every_R, step_s_R, exchange_s_R)
        late_s_R = exchange_s_R - (steps - every_R) * step_s_R
        return np.where(counts_R == 1, np.maximum(0.0, late_s_R), 0.0)

    def lines(self, steps: float) -> Lines:
        """Return the lines whose largest is the pace of a region that waits when it must."""
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
    """Return exchanges, if what is due waits for the link, and steps from one to the next."""
    takes_R = np.ceil(exchange_s_R / step_s_R - _EPS)
    apart_R = np.maximum(every_R, takes_R)
    rest_R = steps - every_R - np.maximum(1.0, takes_R)
    first_R = (every_R < steps - _EPS).astype(float)  # nobody knows yet how long it takes
    return np.asarray(np.maximum(first_R, np.floor(rest_R / apart_R + _EPS) + 1)), apart_R


@dataclass(frozen=True, slots=True)
class Pattern:
    """How a strategy exchanges, for every interval that it could have.

    Attributes:
        blocking: see `Blocking`.
        last: see `LastExchange`.
        fragments: parts of the model, of which an exchange has one.
        bound: see `Timing.bound`.
        every: steps from one exchange to the next, by interval; else the interval over `fragments`.
        by_speed: see `Timing.by_speed`.
        synchronous: whether a region that stands still holds up all of them.
        unit: see `Timing.unit`.
        hidden: steps that hide an exchange of those who stand still when late, by interval; else
            those until the next one.
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
        """Whether regions train on while an exchange is on its way."""
        return self.blocking != "always"

    def timing(self, interval: int, *, owes: bool = False) -> Timing:
        """Return the exchanges with an interval.

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
    """A job without machines.

    Attributes:
        steps: local steps of every region until the target.
        rows_per_step: of all regions together.
        rows: of data, by region; the shares of a step.
        num_params: of the model.
        pattern: when regions exchange, and what of that they stand still for.
        startup_s: until the first step, paid for like any other second.
        worker_start_s: that every worker adds to it.
        evaluations_s: of all evaluations; steps wait for them.
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
        """Return the region's rows of a step, at least one."""
        return max(1, round(self.rows_per_step * self.rows[region] / sum(self.rows.values())))

    def start_s(self, workers: int) -> float:
        """Return the seconds until the first step."""
        return self.startup_s + self.worker_start_s * workers

    def seconds(self, pace_s: float, last_s: float, workers: int, stall: float = 1.0) -> float:
        """Seconds of the job.

        Args:
            pace_s: see the module's docstring.
            last_s: of the exchange after the last step; 0 if there is none.
            workers: of all regions.
            stall: how much longer steps and exchanges take because of preemptions.
        """
        trained_s = self.steps * pace_s * stall
        return self.start_s(workers) + self.evaluations_s + trained_s + last_s


def stall_of(lost_fraction: float) -> float:
    """Return how much longer work takes of whose time that fraction is lost, at most ten times."""
    return 1 / (1 - min(_MOST_LOST, lost_fraction))
