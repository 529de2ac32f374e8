"""When regions exchange, and how much of an exchange they stand still for.

With an exchange every ``E`` steps, of which one takes a region ``x`` seconds beside steps of ``t``
seconds, ``S`` steps take it

    ``S t + (R - 1) max(0, x - h t) + max(0, x - m t)``,  ``R = floor(S / E)``,

where ``h`` steps hide an exchange: none for strategies that stand still for each, those until the
next one is due (or until the answer is merged) for those that stand still only if it is late. The
one that is on its way at the end is hidden by the ``m = min(h, S - R E)`` steps since it began.
Strategies that never stand still put off what is due until the link is free: they exchange after
``E`` steps and then every ``k = max(E, ceil(x / t))``, ``n = 1 + floor((S - E) / k)`` times in all,
and at the end they wait for ``max(0, x - (S - E - (n - 1) k) t)``. Where no region may be more than
some exchanges ahead, all exchange as often as the one that does so least often, until the last has
ended: ``floor(max S t / max k t)`` times.

Where slower regions exchange after fewer steps, ``E`` of each is ``max(u, u floor(E t' / (t u)))``
with the shortest step ``t'`` of any region, and ``u`` steps of a worker in one of its region.

Whatever a strategy is called, all of this comes from its `Traits`.

Shape legend: K = ways to exchange; R = regions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from geo_ray.strategies.traits import LastExchange, StandsStill

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
        bounded: whether a region may be only so many exchanges ahead of the slowest.
        by_speed: whether slower regions exchange after fewer steps.
        unit: steps that are taken at once.
    """

    every: float
    hides: float = 0.0
    last: LastExchange = "rest"
    bounded: bool = False
    by_speed: bool = False
    unit: int = 1

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
        return math.floor(steps / self.every + _EPS)

    def has_last(self, steps: float) -> bool:
        """Return whether there is one more after the last step."""
        is_rest = steps > self.rounds(steps) * self.every + _EPS
        return self.last == "always" or (self.last == "rest" and is_rest)

    def counts_R(self, steps: float, step_s_R: Floats, exchange_s_R: Floats) -> Floats:
        """Return how many each region makes, without the last one."""
        every_R = self._every_R(step_s_R)
        if not self.skips:
            return np.floor(steps / every_R + _EPS)
        apart_R = _apart_R(every_R, step_s_R, exchange_s_R)
        counts_R = _counts_R(steps, every_R, apart_R)
        if self.bounded:
            longest_s, rarest_s = steps * step_s_R.max(), (apart_R * step_s_R).max()
            return np.full(len(step_s_R), np.floor(longest_s / rarest_s + _EPS))
        return counts_R

    def more_s_R(self, steps: float, step_s_R: Floats, exchange_s_R: Floats) -> Floats:
        """Return what depends on all machines: seconds beyond those of `lines`."""
        every_R = self._every_R(step_s_R)
        if not self.skips:
            more_R = np.floor(steps / every_R + _EPS) - self.rounds(steps)
            return np.asarray(more_R * exchange_s_R)  # only who stands still goes by speed
        apart_R = _apart_R(every_R, step_s_R, exchange_s_R)
        counts_R = _counts_R(steps, every_R, apart_R)
        since_R = steps - every_R - (counts_R - 1) * apart_R
        return np.where(counts_R > 0, np.maximum(0.0, exchange_s_R - since_R * step_s_R), 0.0)

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

    def _every_R(self, step_s_R: Floats) -> Floats:
        every_R = np.full(len(step_s_R), self.every)
        if self.by_speed:
            shares_R = float(step_s_R.min()) / step_s_R
            every_R = self.unit * np.maximum(1, np.floor(every_R / self.unit * shares_R + _EPS))
        return every_R


def _apart_R(every_R: Floats, step_s_R: Floats, exchange_s_R: Floats) -> Floats:
    """Return steps from one exchange to the next, if what is due waits for the link."""
    return np.maximum(every_R, np.ceil(exchange_s_R / step_s_R - _EPS))


def _counts_R(steps: float, every_R: Floats, apart_R: Floats) -> Floats:
    return np.asarray(np.maximum(0.0, np.floor((steps - every_R) / apart_R + _EPS) + 1))


@dataclass(frozen=True, slots=True)
class Pattern:
    """How a strategy exchanges, for every interval that it could have.

    Attributes:
        stands_still: see `StandsStill`.
        last: see `LastExchange`.
        fragments: parts of the model, of which an exchange has one.
        bounded: see `Timing.bounded`.
        every: steps from one exchange to the next, by interval; else the interval over `fragments`.
        by_speed: see `Timing.by_speed`.
        together: whether a region that stands still holds up all of them.
        unit: see `Timing.unit`.
        hidden: steps that hide an exchange of those who stand still when late, by interval; else
            those until the next one.
    """

    stands_still: StandsStill = "always"
    last: LastExchange = "rest"
    fragments: int = 1
    bounded: bool = False
    by_speed: bool = False
    together: bool = True
    unit: int = 1
    every: Mapping[int, float] = field(default_factory=dict)
    hidden: Mapping[int, float] = field(default_factory=dict)

    @property
    def trains_on(self) -> bool:
        """Whether regions train on while an exchange is on its way."""
        return self.stands_still != "always"

    def timing(self, interval: int) -> Timing:
        """Return the exchanges with an interval."""
        every = self.every.get(interval, interval / self.fragments)
        hides = {
            "always": 0.0,
            "when_late": self.hidden.get(interval, every),
            "never": math.inf,
        }[self.stands_still]
        return Timing(every, hides, self.last, self.bounded, self.by_speed, self.unit)
