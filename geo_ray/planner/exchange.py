"""Exchange options between regions: time, bytes and dollars, evaluated jointly.

`OptionSet` finds the best option for given machines.

Shape legend: K = options; R = regions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from geo_ray.planner.config import Objective
from geo_ray.planner.loss import BITS_PER_PARAM
from geo_ray.planner.price_brackets import UNCHANGING, Bracket
from geo_ray.planner.timing import JobWork, Timing
from geo_ray.transport.links import LinkTable


@dataclass(frozen=True, slots=True)
class Exchange:
    """One exchange of all regions with an averager.

    Attributes:
        averager: region of the averager.
        codec: codec of the updates; None: fp32.
        seconds_by_region: seconds of each region, in the order of the regions.
        up_bytes: bytes sent by each region.
        down_bytes: bytes received by each region.
        usd_by_region: egress cost of each region in both directions, in the same order.
    """

    averager: str
    codec: str | None
    seconds_by_region: tuple[float, ...]
    up_bytes: float
    down_bytes: float
    usd_by_region: tuple[float, ...]

    @property
    def usd(self) -> float:
        """Egress cost of all regions."""
        return sum(self.usd_by_region)

    @property
    def seconds(self) -> float:
        """Seconds of the slowest region."""
        return max(self.seconds_by_region)


def mean_of(one: Exchange, first: Exchange, rounds: int) -> Exchange:
    """Return the mean of ``rounds`` exchanges, of which the first uses another codec."""

    def mean(common: float, own: float) -> float:
        return common + (own - common) / rounds

    seconds = zip(one.seconds_by_region, first.seconds_by_region, strict=True)
    usd = zip(one.usd_by_region, first.usd_by_region, strict=True)
    return replace(
        one,
        seconds_by_region=tuple(mean(*each) for each in seconds),
        up_bytes=mean(one.up_bytes, first.up_bytes),
        down_bytes=mean(one.down_bytes, first.down_bytes),
        usd_by_region=tuple(mean(*each) for each in usd),
    )


def exchange(
    values: float,
    regions: Sequence[str],
    averager: str,
    codec: str | None,
    links: LinkTable,
    usd_per_gb: Mapping[tuple[str, str], float],
    overhead_s: float = 0.0,
    bits: tuple[float, float] | None = None,
) -> Exchange:
    """Return time and price of one exchange.

    Args:
        values: number of values of the model, or of the exchanged part.
        regions: all regions.
        averager: region of the averager.
        codec: one of `tradeoffs.BITS_PER_PARAM`.
        links: goodput and round trip of every pair with the averager.
        usd_per_gb: egress by (source, destination).
        overhead_s: seconds in addition to transfer and round trip: coding and queueing.
        bits: bits per parameter up and down; None: those of the codec.

    Raises:
        LinkUnknownError: a link was not measured; it is named.
    """
    up_bits, down_bits = BITS_PER_PARAM[codec] if bits is None else bits
    up_bytes, down_bytes = values * up_bits / 8, values * down_bits / 8
    seconds, usd = [], []
    for region in regions:
        if region == averager:
            seconds.append(0.0)
            usd.append(0.0)
            continue
        there, back = links.get(region, averager), links.get(averager, region)
        sent_s = 8e-6 * up_bytes / there.goodput_mbps + 8e-6 * down_bytes / back.goodput_mbps
        seconds.append(sent_s + there.rtt_s + overhead_s)
        sent_usd = up_bytes * 1e-9 * usd_per_gb[region, averager]
        usd.append(sent_usd + down_bytes * 1e-9 * usd_per_gb[averager, region])
    return Exchange(averager, codec, tuple(seconds), up_bytes, down_bytes, tuple(usd))


SLACK: Final = 1 + 1e-9
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a plan.

    Attributes:
        deadline_s: maximum time of the job.
        budget_usd: maximum dollars.
    """

    deadline_s: float = math.inf
    budget_usd: float = math.inf

    def keeps(self, seconds: float, usd: float) -> bool:
        """Return whether both limits are met."""
        return seconds <= self.deadline_s * SLACK and usd <= self.budget_usd * SLACK


NO_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class Option:
    """An exchange option: region of the averager, interval and codec.

    Attributes:
        interval: local steps in which the whole model is exchanged once.
        timing: when exchanges happen, and when they block training.
        exchange: a single exchange.
        usd_per_h: fixed cost of the regions (servers, disks) per billed hour (`Bracket`).
        last: the exchange after the last step, if any.
    """

    interval: int
    timing: Timing
    exchange: Exchange
    usd_per_h: float
    last: Exchange | None = None

    @property
    def last_s(self) -> float:
        """Seconds of the exchange after the last step."""
        return 0.0 if self.last is None else self.last.seconds

    def egress_usd(self, steps: float, step_s_R: Floats) -> float:
        """Return the egress of a job, including the last exchange.

        Args:
            steps: steps of the job.
            step_s_R: seconds of a step, by region.
        """
        one = self.exchange
        counts_R = self.timing.counts_R(steps, step_s_R, np.array(one.seconds_by_region))
        usd = float(counts_R @ np.array(one.usd_by_region))
        return usd + (0.0 if self.last is None else self.last.usd)


@dataclass(frozen=True)
class OptionSet:
    """Exchange options that are evaluated jointly.

    Shape legend: K = options; R = regions.

    Attributes:
        work: the job.
        options: at least one.
        fastest_s: shortest possible step of each region.
        bracket: hours that the prices apply to.
    """

    work: JobWork
    options: tuple[Option, ...]
    fastest_s: tuple[float, ...]
    bracket: Bracket = UNCHANGING

    def step_times_KR(self, steps_s: Sequence[float]) -> Floats:
        """Return the pace of each region, without terms that depend on all machines.

        Args:
            steps_s: seconds of a step by region.
        """
        constant_LKR, slope_LK = self._lines
        step_times_LKR = constant_LKR + slope_LK[:, :, None] * np.array(steps_s)
        return np.asarray(step_times_LKR.max(axis=0))

    def whole_step_times_KR(self, steps_s: Sequence[float]) -> Floats:
        """Return the pace of each region, including terms that depend on all machines."""
        step_times_KR = self.step_times_KR(steps_s)
        steps, steps_R = self.work.steps, np.array(steps_s)
        for k, option in enumerate(self.options):
            if option.timing.is_of_machines:
                exchange_s_R = np.array(option.exchange.seconds_by_region)
                step_times_KR[k] += option.timing.more_s_R(steps, steps_R, exchange_s_R) / steps
        return step_times_KR

    def limits_s(self, step_time_s: float) -> list[float]:
        """Return the longest step of each region with which an option keeps the pace."""
        constant_LKR, slope_LK = self._lines
        if self._none_hides:
            return [step_time_s - wait_s for wait_s in self._least_begin_s]
        limits_LKR = (step_time_s - constant_LKR) / slope_LK[:, :, None]
        return [float(limit_s) for limit_s in limits_LKR.min(axis=0).max(axis=0)]

    def slower_s(self, group: OptionSet) -> float:
        """Return an upper bound on the pace of this option minus that of its group."""
        begin_R = self._lines[0][-1, 0]
        least_R = np.array(group._least_begin_s) if group._none_hides else np.zeros(len(begin_R))
        return float((begin_R - least_R).max())

    @cached_property
    def _least_begin_s(self) -> list[float]:
        """Minimum time that exchanges of any option add to a step, if none is hidden."""
        return [float(wait_s) for wait_s in self._lines[0][-1].min(axis=0)]

    @cached_property
    def _none_hides(self) -> bool:
        return bool((self._lines[1] == 1).all())

    @cached_property
    def depends(self) -> bool:
        """Whether cost or time of exchanges depends on the machines of all regions."""
        return any(option.timing.is_of_machines for option in self.options)

    @cached_property
    def _lines(self) -> tuple[Floats, Floats]:
        """Constants and slopes of the lines of `Timing.lines`, by option."""
        lines_KL2 = np.array([option.timing.lines(self.work.steps) for option in self.options])
        exchange_s_KR = np.array([option.exchange.seconds_by_region for option in self.options])
        constant_LKR = lines_KL2[:, :, 0].T[:, :, None] * exchange_s_KR
        return constant_LKR, np.ascontiguousarray(lines_KL2[:, :, 1].T)

    @cached_property
    def singles(self) -> tuple[OptionSet, ...]:
        """Return each option as a set of one."""
        return tuple(replace(self, options=(option,)) for option in self.options)

    @cached_property
    def _least_usd_K(self) -> Floats:
        """Lower bound on the egress: that of the fastest machines."""
        fastest_R = np.array(self.fastest_s)
        return np.array([_least_usd(o, self.work.steps, fastest_R) for o in self.options])

    @cached_property
    def _fixed_K(self) -> Floats:
        return np.array([o.usd_per_h for o in self.options])

    @cached_property
    def _around_s_K(self) -> Floats:
        """Return the seconds that do not depend on machines."""
        return np.array([o.last_s for o in self.options])

    def not_beaten(self) -> OptionSet:
        """Remove options that cost and take at least as much as another one at every pace.

        Usually, the longest interval of each averager and codec remains.
        """
        if self.depends:
            return self  # their cost depends on the machines
        columns = [self._least_usd_K, self._fixed_K, self._around_s_K]
        constant_LKR, slope_LK = self._lines
        table = np.concatenate([np.stack(columns, axis=1), *constant_LKR[1:]], axis=1)
        if not self._none_hides:  # for lines that fall to zero: where they begin and end
            hidden_LK = np.maximum(1 - slope_LK[1:], 1e-300)
            table = np.concatenate([table, *(constant_LKR[1:] / hidden_LK[:, :, None])], axis=1)
        retained: list[int] = []
        for k in np.lexsort((np.arange(len(table)), table.sum(axis=1))).tolist():
            if not any(bool((table[other] <= table[k]).all()) for other in retained):
                retained.append(k)
        return replace(self, options=tuple(self.options[k] for k in sorted(retained)))

    def bound(
        self,
        step_time_s: float,
        usd_per_h: float,
        stall: float,
        objective: Objective,
        limits: Limits,
    ) -> float:
        """Return a lower bound for solutions of a pace and price; infinite outside the limits.

        Args:
            step_time_s: seconds per step.
            usd_per_h: price of all machines; every region has at least one.
            stall: minimum factor by which preemptions extend steps and exchanges.
            objective: the objective.
            limits: the limits.
        """
        if math.isinf(usd_per_h):
            return math.inf
        step_times_K = np.full(len(self.options), step_time_s * stall)
        workers = len(self.fastest_s)
        values = self._values(
            step_times_K, self._least_usd_K, usd_per_h, workers, objective, limits
        )
        return float(values[0].min())

    def best(
        self,
        steps_s: Sequence[float],
        usd_per_h: float,
        workers: int,
        stall: float,
        objective: Objective,
        limits: Limits,
    ) -> Option:
        """Return the best option for given machines; any option if none meets the limits.

        Args:
            steps_s: seconds of a step by region.
            usd_per_h: price of all machines.
            workers: number of all workers.
            stall: factor by which preemptions extend steps and exchanges.
            objective: the objective; the other measure breaks ties.
            limits: the limits.
        """
        egress_K = self._least_usd_K
        if self.depends:
            steps_R = np.array(steps_s)
            egress_K = np.array([o.egress_usd(self.work.steps, steps_R) for o in self.options])
        step_times_K = self.whole_step_times_KR(steps_s).max(axis=1) * stall
        first_K, second_K = self._values(
            step_times_K, egress_K, usd_per_h, workers, objective, limits
        )
        return self.options[int(np.lexsort((second_K, first_K))[0])]

    def _values(
        self,
        step_times_K: Floats,
        egress_K: Floats,
        usd_per_h: float,
        workers: int,
        objective: Objective,
        limits: Limits,
    ) -> tuple[Floats, Floats]:
        work = self.work
        trained_s_K = work.steps * step_times_K
        seconds_K = work.start_s(workers) + work.evaluations_s + trained_s_K + self._around_s_K
        usd_K = self.bracket.billed_h_K(seconds_K) * (usd_per_h + self._fixed_K) + egress_K
        broken_K = (seconds_K > limits.deadline_s * SLACK) | (usd_K > limits.budget_usd * SLACK)
        first_K, second_K = (usd_K, seconds_K) if objective == "cost" else (seconds_K, usd_K)
        return np.where(broken_K, np.inf, first_K), second_K


def _least_usd(option: Option, steps: float, fastest_s_R: Floats) -> float:
    """Return a lower bound on the egress: every region at its fastest."""
    timing = replace(option.timing, by_speed=False, bound=None)
    usd = replace(option, timing=timing).egress_usd(steps, fastest_s_R)
    bound = option.timing.bound
    if bound is None or not timing.skips:
        return usd
    one = option.exchange
    counts_R = timing.counts_R(steps, fastest_s_R, np.array(one.seconds_by_region))
    # a much slower region does not increase the number of exchanges of the others
    least_R = np.minimum(counts_R, bound + 1)
    least = float(least_R @ np.array(one.usd_by_region))
    return least + (0.0 if option.last is None else option.last.usd)
