"""Ways to exchange, evaluated together: the best value of each with given machines.

Shape legend: K = ways; R = regions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from geo_ray.planning.model.exchange import Exchange
from geo_ray.planning.model.work import JobWork
from geo_ray.planning.search.bracket import UNCHANGING, Bracket

Objective = Literal["cost", "time"]
SLACK: Final = 1 + 1e-9
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan must keep.

    Attributes:
        deadline_s: longest time of the job.
        budget_usd: most dollars.
    """

    deadline_s: float = math.inf
    budget_usd: float = math.inf

    def keeps(self, seconds: float, usd: float) -> bool:
        """Return whether both limits are kept."""
        return seconds <= self.deadline_s * SLACK and usd <= self.budget_usd * SLACK


NO_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class Option:
    """A way to exchange: where the averager is, how often, with which codec.

    Attributes:
        interval: local steps between exchanges.
        exchange: one of them.
        usd_per_h: what stands in the regions whatever machines are rented: servers, disks; per
            billed hour (`Bracket`).
        last: an exchange after the last step, where there is one.
    """

    interval: int
    exchange: Exchange
    usd_per_h: float
    last: Exchange | None = None

    @property
    def last_s(self) -> float:
        """Seconds of the exchange after the last step."""
        return 0.0 if self.last is None else self.last.seconds

    def egress_usd(self, rounds: float) -> float:
        """Return the egress of so many exchanges, and the last one."""
        return rounds * self.exchange.usd + (0.0 if self.last is None else self.last.usd)


@dataclass(frozen=True)
class Ways:
    """See the module's docstring.

    Attributes:
        work: the job.
        options: at least one.
        bracket: of the hours that are looked at.
    """

    work: JobWork
    options: tuple[Option, ...]
    bracket: Bracket = UNCHANGING

    @cached_property
    def waits_KR(self) -> Floats:
        """Return what exchanges add to each step."""
        return np.array(
            [
                [self.work.waits_s(o.interval, each_s) for each_s in o.exchange.seconds_by_region]
                for o in self.options
            ]
        )

    @cached_property
    def least_waits_s(self) -> list[float]:
        """Return the least wait of any way, by region."""
        return [float(wait_s) for wait_s in self.waits_KR.min(axis=0)]

    @cached_property
    def singles(self) -> tuple[Ways, ...]:
        """Return each way by itself."""
        return tuple(Ways(self.work, (option,), self.bracket) for option in self.options)

    @cached_property
    def _rounds_K(self) -> Floats:
        return np.array([float(self.work.rounds(o.interval)) for o in self.options])

    @cached_property
    def _exchange_s_K(self) -> Floats:
        return np.array([o.exchange.seconds for o in self.options])

    @cached_property
    def _interval_K(self) -> Floats:
        return np.array([float(o.interval) for o in self.options])

    @cached_property
    def _usd_K(self) -> Floats:
        pairs = zip(self.options, self._rounds_K, strict=True)
        return np.array([o.egress_usd(float(rounds)) for o, rounds in pairs])

    @cached_property
    def _stands_K(self) -> Floats:
        return np.array([o.usd_per_h for o in self.options])

    @cached_property
    def _around_s_K(self) -> Floats:
        """Return the seconds that do not depend on machines."""
        return np.array([o.last_s for o in self.options])

    def not_beaten(self) -> Ways:
        """Leave out ways that cost and take at least as much as another at every pace.

        Of one averager and codec the longest interval is left, as a rule.
        """
        columns = [self._usd_K, self._stands_K, self._around_s_K]
        if self.work.overlaps:  # a line that falls to zero: where it begins, and where it ends
            columns += [self._rounds_K * self._exchange_s_K, self._exchange_s_K / self._interval_K]
        table = np.concatenate([np.stack(columns, axis=1), self.waits_KR], axis=1)
        kept: list[int] = []
        for k in np.lexsort((np.arange(len(table)), table.sum(axis=1))).tolist():
            if not any(bool((table[other] <= table[k]).all()) for other in kept):
                kept.append(k)
        return Ways(self.work, tuple(self.options[k] for k in sorted(kept)), self.bracket)

    def bound(self, pace_s: float, usd_per_h: float, objective: Objective, limits: Limits) -> float:
        """Return a lower bound for choices of that pace and price; infinite outside the limits.

        Args:
            pace_s: see `work`.
            usd_per_h: of all machines; every region has one at least.
            objective: what counts.
            limits: to keep.
        """
        if math.isinf(usd_per_h):
            return math.inf
        workers = self.waits_KR.shape[1]
        paces_K = np.full(len(self.options), pace_s)
        return float(self._values(paces_K, usd_per_h, workers, objective, limits)[0].min())

    def best(
        self,
        steps_s: Sequence[float],
        usd_per_h: float,
        workers: int,
        objective: Objective,
        limits: Limits,
    ) -> Option:
        """Return the best way for given machines; any way if none keeps the limits.

        Args:
            steps_s: by region.
            usd_per_h: of all machines.
            workers: of all regions.
            objective: what counts; the other measure breaks ties.
            limits: to keep.
        """
        paces_K = (self.waits_KR + np.array(steps_s)).max(axis=1)
        first_K, second_K = self._values(paces_K, usd_per_h, workers, objective, limits)
        return self.options[int(np.lexsort((second_K, first_K))[0])]

    def _values(
        self,
        paces_K: Floats,
        usd_per_h: float,
        workers: int,
        objective: Objective,
        limits: Limits,
    ) -> tuple[Floats, Floats]:
        work = self.work
        seconds_K = work.start_s(workers) + work.evaluations_s + work.steps * paces_K
        seconds_K = seconds_K + self._around_s_K
        if work.overlaps:
            hidden_K = self._exchange_s_K - self._interval_K * paces_K
            seconds_K = seconds_K + self._rounds_K * np.maximum(0.0, hidden_K)
        usd_K = self.bracket.billed_h_K(seconds_K) * (usd_per_h + self._stands_K) + self._usd_K
        broken_K = (seconds_K > limits.deadline_s * SLACK) | (usd_K > limits.budget_usd * SLACK)
        first_K, second_K = (usd_K, seconds_K) if objective == "cost" else (seconds_K, usd_K)
        return np.where(broken_K, np.inf, first_K), second_K
