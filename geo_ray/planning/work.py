"""What is to be computed: how many steps, of how many rows, and how steps and exchanges make time.

A step has a fixed global batch; each region computes the part of it that its data are of all data,
so that all regions pass over their data equally often. With ``S`` steps of ``tau`` seconds and an
exchange of ``w`` seconds every ``H`` of them:

- regions that wait: ``T = S tau + (S / H) w``
- regions that train on meanwhile: ``T = (S / H) max(H tau, w)``
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Work:
    """A job without machines.

    Attributes:
        steps: local steps of every region until the target.
        rows_per_step: of all regions together.
        rows: of data, by region; the shares of a step.
        num_params: of the model.
        overlaps: whether regions train on while an exchange is on its way.
        startup_s: until the first step, paid for like any other second.
    """

    steps: float
    rows_per_step: float
    rows: Mapping[str, float]
    num_params: int
    overlaps: bool = False
    startup_s: float = 0.0

    def share(self, region: str) -> float:
        """Rows of a step that are the region's."""
        return self.rows_per_step * self.rows[region] / sum(self.rows.values())

    def rounds(self, interval: int) -> float:
        """Exchanges of the job; the last may come early."""
        return self.steps / interval

    def wan_s(self, step_s: float, interval: int, exchange_s: float) -> float:
        """Seconds of the job in which regions stand still for exchanges."""
        rounds = self.rounds(interval)
        if self.overlaps:
            return rounds * max(0.0, exchange_s - interval * step_s)
        return rounds * exchange_s

    def seconds(self, step_s: float, interval: int, exchange_s: float) -> float:
        """Seconds of the job with steps of ``step_s``."""
        return self.startup_s + self.steps * step_s + self.wan_s(step_s, interval, exchange_s)
