"""Pools: effective price with expected preemptions, preemption rate, and backoff after failures.

Idea: a preemption costs ``lost_s`` of the work of all machines, which are paid meanwhile. Rule: an
hour of a machine costs ``usd + rate * lost_h * usd of all per hour`` and computes ``1 - rate *
lost_h`` of its speed; the score is the quotient, in dollars per row. The rate is a Gamma
posterior, ``(rate0 * weight_h + n) / (weight_h + h)`` after ``n`` preemptions in ``h`` machine
hours, with a half-life of a day for observations. A pool without capacity is avoided, for twice
as long after each failure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final

from geo_ray.cloud.autoscaler.actions import Alternative
from geo_ray.cloud.autoscaler.state import AutoscalerState, PoolRecord, outstanding, pool_key
from geo_ray.cloud.autoscaler.target import ClusterTarget, MachineKind, RegionTarget
from geo_ray.cloud.provider import Availability, LaunchFailureKind, Market, Pool
from geo_ray.experiment.autoscale import RetryConfig

HALF_LIFE_S: Final = 86_400.0


def learn(record: PoolRecord, now_unix_s: float, hours: float, preemptions: int = 0) -> None:
    """Add machine hours and preemptions to the statistics."""
    if record.as_of_unix_s and now_unix_s > record.as_of_unix_s:
        retained = 0.5 ** ((now_unix_s - record.as_of_unix_s) / HALF_LIFE_S)
        record.preemptions *= retained
        record.hours *= retained
    record.as_of_unix_s = max(record.as_of_unix_s, now_unix_s)
    record.hours += hours
    record.preemptions += preemptions
    if preemptions:
        record.taken_unix_s = now_unix_s


def rate_per_h(record: PoolRecord | None, assumed_per_h: float, weight_h: float) -> float:
    """Return the expected preemptions of one machine per hour.

    Args:
        record: observations; None: none.
        assumed_per_h: prior rate.
        weight_h: weight of the prior in machine hours.
    """
    if record is None:
        return assumed_per_h
    return (assumed_per_h * weight_h + record.preemptions) / (weight_h + record.hours)


_MOST_DOUBLINGS: Final = 20


def back_off(
    memory: AutoscalerState,
    pool: Pool,
    failure_kind: LaunchFailureKind,
    now_unix_s: float,
    retry: RetryConfig,
) -> None:
    """Back off from a pool.

    A sold-out pool: for a while, doubled with each failure. A quota or a refusal applies to the
    type in the whole region until a user changes something, so the longest backoff applies at once.
    Throttled requests are simply sent again.
    """
    if failure_kind is LaunchFailureKind.THROTTLED:
        return
    if failure_kind is LaunchFailureKind.SOLD_OUT:
        _leave(memory.pool(pool), now_unix_s, retry)
        return
    memory.pool(pool).until_unix_s = now_unix_s + retry.longest_s
    kind = (pool.region, pool.type, pool.market)
    for record in memory.pools.values():
        if (record.pool.region, record.pool.type, record.pool.market) == kind:
            record.until_unix_s = now_unix_s + retry.longest_s


def record_join_failure(
    memory: AutoscalerState,
    pool: Pool,
    request_id: str | None,
    now_unix_s: float,
    retry: RetryConfig,
) -> None:
    """Back off from a pool whose machine started without its node joining.

    The time doubles with each further launch in a row; machines of one launch count as one failure.
    """
    record = memory.pool(pool)
    if request_id is not None and record.unjoined_request == request_id:
        return
    pause_s = retry.first_s * 2 ** min(record.unjoined, _MOST_DOUBLINGS)
    record.until_unix_s = max(record.until_unix_s, now_unix_s + min(pause_s, retry.longest_s))
    record.unjoined, record.unjoined_request = record.unjoined + 1, request_id


def joined(memory: AutoscalerState, pool: Pool) -> None:
    """Record that the node of a machine of a pool joined."""
    record = memory.pool(pool)
    record.unjoined, record.unjoined_request = 0, None


def record_success(memory: AutoscalerState, pool: Pool, came_unix_s: float) -> None:
    """Record that a machine of a pool works.

    Args:
        memory: state; modified.
        pool: the pool.
        came_unix_s: when the machine was first listed. The last available machine of a pool, with
            later ones refused, does not end the backoff.
    """
    record = memory.pool(pool)
    if record.until_unix_s <= came_unix_s:
        record.refusals = 0


def backoff_left_s(record: PoolRecord | None, now_unix_s: float) -> float:
    """Return the remaining seconds of the backoff of a pool."""
    return 0.0 if record is None else max(0.0, record.until_unix_s - now_unix_s)


def _leave(record: PoolRecord, now_unix_s: float, retry: RetryConfig) -> None:
    if record.until_unix_s > now_unix_s:
        return  # several failures at one moment count as one
    pause_s = retry.first_s * 2 ** min(record.refusals, _MOST_DOUBLINGS)
    record.until_unix_s = now_unix_s + min(pause_s, retry.longest_s)
    record.refusals += 1


@dataclass(frozen=True, slots=True)
class Losses:
    """Cost of a preemption.

    Attributes:
        assumed_per_h: prior preemptions of a spot machine per hour.
        weight_h: weight of the prior in machine hours.
        lost_h: hours of the work of all machines that each preemption costs.
        all_usd_per_hour: cost of all machines.
    """

    assumed_per_h: float
    weight_h: float
    lost_h: float
    all_usd_per_hour: float

    @classmethod
    def of(cls, target: ClusterTarget, weight_h: float, all_usd_per_hour: float) -> Losses:
        """Return the cost of a preemption with a target."""
        assumed = target.preemptions_per_h
        return cls(assumed, weight_h, target.lost_s / 3600.0, all_usd_per_hour)

    def rate_per_h(self, memory: AutoscalerState, pool: Pool) -> float:
        """Return the expected preemptions of one machine of a pool per hour."""
        if pool.market is Market.ON_DEMAND:
            return 0.0
        return rate_per_h(memory.pools.get(pool_key(pool)), self.assumed_per_h, self.weight_h)

    def usd_per_hour(self, usd_per_hour: float, preemptions_per_h: float) -> float:
        """Return the price of an hour of full work, with preemptions."""
        fraction = min(0.9, preemptions_per_h * self.lost_h)
        return (usd_per_hour + fraction * self.all_usd_per_hour) / (1.0 - fraction)


@dataclass(frozen=True, slots=True)
class PoolOffer:
    """Machines that a pool can provide.

    Attributes:
        kind: kind of machine.
        pool: the pool.
        usd_per_hour: current price of one; None: unknown.
        preemptions_per_h: expected preemptions of one.
        full_usd_per_hour: price including the cost of preemptions; 0 without a price.
        most: maximum count.
        note: why no machine is available.
    """

    kind: MachineKind
    pool: Pool
    usd_per_hour: float | None
    preemptions_per_h: float
    full_usd_per_hour: float
    most: int
    note: str = ""

    @property
    def has_no_price(self) -> bool:
        """Whether the price is unknown."""
        return self.usd_per_hour is None

    @property
    def is_empty(self) -> bool:
        """Whether no machine is available."""
        return self.most == 0

    @property
    def usd_per_million_rows(self) -> float:
        """Score; lower is better."""
        return self.full_usd_per_hour / self.kind.rows_per_s / 3600.0 * 1e6

    def alternative(self, chosen: int) -> Alternative:
        """Return the pool as it is shown in the status."""
        score = None if self.usd_per_hour is None else self.usd_per_million_rows
        usd, rate = self.usd_per_hour, self.preemptions_per_h
        return Alternative(self.pool, usd, rate, score, chosen, self.note)


def alternatives_of(
    offers: Iterable[PoolOffer], launches: Mapping[Pool, tuple[int, str, float]]
) -> tuple[Alternative, ...]:
    """Return pools as shown in the status: cheapest first, those without a price last."""
    ranked = sorted(offers, key=attrgetter("has_no_price", "usd_per_million_rows"))
    return tuple(offer.alternative(launches.get(offer.pool, (0,))[0]) for offer in ranked)


def price_of(
    memory: AutoscalerState,
    pool: Pool,
    kind: MachineKind | None,
    availability: Availability | None = None,
) -> float | None:
    """Return the price of a machine: current, else last observed, else listed."""
    if availability is not None and availability.usd_per_hour is not None:
        return availability.usd_per_hour
    record = memory.pools.get(pool_key(pool))
    if record is not None and record.usd_per_hour is not None:
        return record.usd_per_hour
    return kind.list_usd_per_hour if kind and pool.market is Market.ON_DEMAND else None


def offers_of(
    region: RegionTarget,
    kinds: Sequence[MachineKind],
    memory: AutoscalerState,
    availabilities: Mapping[Pool, Availability],
    losses: Losses,
    now_unix_s: float,
    spare_s: float = 0.0,
) -> list[PoolOffer]:
    """Return the offers of a region, best first; unavailable ones last.

    Args:
        region: region of the run.
        kinds: kinds of machines.
        memory: state of pools and launched machines.
        availabilities: current quotes by pool.
        losses: cost of a preemption.
        now_unix_s: current time.
        spare_s: seconds for which a pool is avoided after a preemption.
    """
    found = []
    rented: Counter[tuple[str, str, Market]] = Counter()
    for instance in memory.instances.values():
        rented[_family(instance.machine.pool)] += 1
    for pending_launch in memory.pending_launches.values():
        rented[_family(pending_launch.request.pool)] += max(0, outstanding(memory, pending_launch))
    for kind, pool in region.pools(kinds):
        availability = availabilities.get(pool)
        usd = price_of(memory, pool, kind, availability)
        rate = losses.rate_per_h(memory, pool)
        most, note = kind.cap - rented[_family(pool)], ""
        record = memory.pools.get(pool_key(pool))
        waits_s = backoff_left_s(record, now_unix_s)
        if usd is None or (availability is not None and availability.usd_per_hour is None):
            most, note = 0, "not for sale"
        elif waits_s > 0:
            why = "its nodes did not join" if record and record.unjoined else "it gave none"
            most, note = 0, f"skipped for {waits_s:.0f} s: {why}"
        elif availability is not None:
            for bound, why in (
                (availability.available, "sold out"),
                (availability.quota_left, "quota used up"),
            ):
                if bound is not None and bound < most:
                    most, note = max(0, bound), why if bound <= 0 else ""
        if most <= 0 and not note:
            note = "the cap is reached"
        full = 0.0 if usd is None else losses.usd_per_hour(usd, rate)
        found.append(PoolOffer(kind, pool, usd, rate, full, max(0, most), note))
    found = _spared(found, memory, now_unix_s - spare_s)
    found.sort(key=attrgetter("is_empty", "usd_per_million_rows"))
    return _within_caps(found, rented)


def _spared(
    offers: Sequence[PoolOffer], memory: AutoscalerState, since_unix_s: float
) -> list[PoolOffer]:
    """Skip pools with a recent preemption where other pools of the same market have capacity."""
    calm = {
        offer.pool.market
        for offer in offers
        if offer.most > 0 and memory.pool(offer.pool).taken_unix_s <= since_unix_s
    }
    note = "preempted a machine recently"
    return [
        replace(offer, most=0, note=offer.note or note)
        if offer.pool.market in calm and memory.pool(offer.pool).taken_unix_s > since_unix_s
        else offer
        for offer in offers
    ]


def _within_caps(
    offers: Sequence[PoolOffer], rented: Mapping[tuple[str, str, Market], int]
) -> list[PoolOffer]:
    """Divide the remaining cap of a type among its zones, best first."""
    taken: Counter[tuple[str, str, Market]] = Counter(rented)
    found = []
    for offer in offers:
        family = _family(offer.pool)
        most = max(0, min(offer.most, offer.kind.cap - taken[family]))
        taken[family] += most
        note = offer.note if most == offer.most or most else "other zones use the cap"
        found.append(replace(offer, most=most, note=note))
    return found


def _family(pool: Pool) -> tuple[str, str, Market]:
    return pool.region, pool.type, pool.market
