"""When regions exchange, and how much of an exchange they stand still for.

With an exchange every ``E`` steps, of which one takes a region ``x`` seconds beside steps of ``t``
seconds, ``S`` steps take it

    ``S t + (R - 1) max(0, x - h t) + max(0, x - m t)``,  ``R = floor(S / E)``,

where ``h`` steps hide an exchange: none for strategies that stand still for each, those until the
next one is due (or until the answer is merged) for those that stand still only if it is late. The
one that is on its way at the end is hidden by the ``m = min(h, S - R E)`` steps since it began.
Strategies that never stand still put off what is due until the link is free: they exchange every
``k = max(E, ceil(x / t))`` steps, ``n = floor(S / k)`` times, but at most ``bound + 1`` times more
than the region that does so least often, where there is such a bound; and at the end they wait for
``max(0, x - (S - n k) t)``.

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
        bound: exchanges that a region may be ahead of the slowest; None: as many as it likes.
    """

    every: float
    hides: float = 0.0
    last: LastExchange = "rest"
    bound: int | None = None

    @property
    def skips(self) -> bool:
        """Whether exchanges that are due are put off while the link is busy."""
        return math.isinf(self.hides)

    def rounds(self, steps: float) -> int:
        """Return the exchanges that are due within so many steps, without the last one."""
        return math.floor(steps / self.every + _EPS)

    def has_last(self, steps: float) -> bool:
        """Return whether there is one more after the last step."""
        is_rest = steps > self.rounds(steps) * self.every + _EPS
        return self.last == "always" or (self.last == "rest" and is_rest)

    def counts_R(self, steps: float, step_s_R: Floats, exchange_s_R: Floats) -> Floats:
        """Return how many each region makes, without the last one."""
        if not self.skips:
            return np.full(len(step_s_R), float(self.rounds(steps)))
        apart_R = self._apart_R(step_s_R, exchange_s_R)
        counts_R = np.floor(steps / apart_R + _EPS)
        if self.bound is not None:
            rarest_per_s = float((1 / (apart_R * step_s_R)).min())
            ahead_R = np.floor(steps * step_s_R * rarest_per_s + _EPS) + self.bound + 1
            counts_R = np.minimum(counts_R, ahead_R)
        return counts_R

    def on_its_way_R(self, steps: float, step_s_R: Floats, exchange_s_R: Floats) -> Floats:
        """Return how long each region waits after its last step, if none waits before."""
        apart_R = self._apart_R(step_s_R, exchange_s_R)
        counts_R = np.floor(steps / apart_R + _EPS)
        left_R = exchange_s_R - (steps - counts_R * apart_R) * step_s_R
        return np.where(counts_R > 0, np.maximum(0.0, left_R), 0.0)

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

    def _apart_R(self, step_s_R: Floats, exchange_s_R: Floats) -> Floats:
        return np.maximum(self.every, np.ceil(exchange_s_R / step_s_R - _EPS))


@dataclass(frozen=True, slots=True)
class Pattern:
    """How a strategy exchanges, for every interval that it could have.

    Attributes:
        stands_still: see `StandsStill`.
        last: see `LastExchange`.
        fragments: parts of the model, of which an exchange has one.
        bound: see `Timing.bound`.
        every: steps from one exchange to the next, by interval; else the interval over `fragments`.
        hidden: steps that hide an exchange of those who stand still when late, by interval; else
            those until the next one.
    """

    stands_still: StandsStill = "always"
    last: LastExchange = "rest"
    fragments: int = 1
    bound: int | None = None
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
        return Timing(every, hides, self.last, self.bound)
