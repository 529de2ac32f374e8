"""The work of a job: steps, rows per step, and the time of steps and exchanges.

A step has a fixed global batch; each region computes the part of it that its data are of all data,
so that all regions pass over their data equally often. With ``S`` steps of ``tau_r`` seconds and an
exchange of ``w_r`` seconds every ``H`` of them:

- regions that wait: a round begins for a region when it has its answer and ends when the last
  update has come, so ``T = max_r (S tau_r + floor(S / H) w_r)``; steps after the last whole round
  end with one more exchange, in which all that is owed is paid
- regions that train on meanwhile: ``T = S max_r tau_r + floor(S / H) max(0, max_r w_r - H max_r
  tau_r)``, and such a last exchange at the end, which nothing hides

The *pace* is the time of a step in the slowest region, including its share of an exchange if
regions wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

HOUR_S: Final = 3600.0
_EPS: Final = 1e-9


@dataclass(frozen=True, slots=True)
class JobWork:
    """A job without machines.

    Attributes:
        steps: local steps of every region until the target.
        rows_per_step: of all regions together.
        rows: of data, by region; the shares of a step.
        num_params: of the model.
        overlaps: whether regions train on while an exchange is on its way.
        startup_s: until the first step, paid for like any other second.
        worker_start_s: that every worker adds to it.
        evaluations_s: of all evaluations; steps wait for them.
    """

    steps: float
    rows_per_step: float
    rows: Mapping[str, float]
    num_params: int
    overlaps: bool = False
    startup_s: float = 0.0
    worker_start_s: float = 0.0
    evaluations_s: float = 0.0

    def share(self, region: str) -> int:
        """Return the region's rows of a step, at least one."""
        return max(1, round(self.rows_per_step * self.rows[region] / sum(self.rows.values())))

    def rounds(self, interval: int) -> float:
        """Return the number of exchanges of the job, without the last one of `has_last`."""
        return math.floor(self.steps / interval + _EPS)

    def has_last(self, interval: int) -> bool:
        """Return whether the job ends with an extra exchange."""
        return self.overlaps or self.steps / interval > self.rounds(interval) + _EPS

    def start_s(self, workers: int) -> float:
        """Return the seconds until the first step."""
        return self.startup_s + self.worker_start_s * workers

    def waits_s(self, interval: int, exchange_s: float) -> float:
        """Return what exchanges of ``exchange_s`` seconds add to each step on average."""
        return 0.0 if self.overlaps else exchange_s * self.rounds(interval) / self.steps

    def seconds(
        self, pace_s: float, interval: int, exchange_s: float, last_s: float, workers: int
    ) -> float:
        """Seconds of the job.

        Args:
            pace_s: of a step; see the module's docstring.
            interval: steps between exchanges.
            exchange_s: of one of them, in the slowest region.
            last_s: of one after the last step; 0 if there is none.
            workers: of all regions.
        """
        trained_s = self.steps * pace_s
        if self.overlaps:
            trained_s += self.rounds(interval) * max(0.0, exchange_s - interval * pace_s)
        return self.start_s(workers) + self.evaluations_s + trained_s + last_s
