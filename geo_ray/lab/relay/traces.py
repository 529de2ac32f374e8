"""Rates that change over time: given points, or random draws. Pure and seeded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Trace:
    """Either points, or a range from which a rate is drawn at fixed intervals.

    Attributes:
        points: (seconds since the start, Mbit/s), ascending from 0; empty for a drawn trace.
        repeat_s: time after which the points are repeated; None keeps the last rate.
        low_mbps: least drawn rate.
        high_mbps: largest drawn rate.
        every_s: time between two draws.
        seed: of the draws.
    """

    points: Sequence[Sequence[float]] = ()
    repeat_s: float | None = None
    low_mbps: float = 0.0
    high_mbps: float = 0.0
    every_s: float = 0.0
    seed: int = 0

    def changes(self) -> Iterator[tuple[float, float]]:
        """Yield (seconds since the start, Mbit/s) in order of time, perhaps without end."""
        if self.points:
            yield from self._played()
        else:
            random, turn = Random(self.seed), 0
            while True:
                yield turn * self.every_s, random.uniform(self.low_mbps, self.high_mbps)
                turn += 1

    def _played(self) -> Iterator[tuple[float, float]]:
        begins_s = 0.0
        while True:
            for time_s, rate_mbps in self.points:
                yield begins_s + time_s, rate_mbps
            if self.repeat_s is None:
                return
            begins_s += self.repeat_s
