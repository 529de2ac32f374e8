"""The work of a job: steps, rows per step, and the time of steps and exchanges.

A step has a fixed global batch; each region computes the part of it that its data are of all data,
so that all regions pass over their data equally often. A region's steps and exchanges take it what
`Timing` says, and the job takes as long as the slowest region. A last exchange, which pays all that
is owed, is after that, and nothing hides it.

The *pace* is that time of the slowest region over the number of its steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from geo_ray.planning.model.timing import Pattern

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

    def share(self, region: str) -> int:
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


def stall_of(lost_share: float) -> float:
    """Return how much longer work takes of whose time that share is lost, at most ten times."""
    return 1 / (1 - min(_MOST_LOST, lost_share))
