"""Pools: effective price with expected preemptions, preemption rate, and backoff after failures.

A preemption costs ``lost_s`` of the work of all machines, which are paid meanwhile. So an hour
of a machine costs ``usd + rate * lost_h * usd of all per hour`` and computes ``1 - rate *
lost_h`` of its speed; the score is the quotient, in dollars per row. The rate is a Gamma
posterior: ``(rate0 * weight_h + n) / (weight_h + h)`` after ``n`` preemptions in ``h`` machine
hours, with observations halved after a day. A pool that delivered nothing is avoided for longer
each time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final

from geo_ray.cloud.autoscaler.actions import Alternative
from geo_ray.cloud.autoscaler.state import AutoscalerMemory, PoolRecord, outstanding, pool_key
from geo_ray.cloud.autoscaler.target import ClusterTarget, MachineKind, RegionTarget
from geo_ray.cloud.provider import Availability, LaunchFailureKind, Market, Pool
from geo_ray.experiment.autoscale import RetryConfig

HALF_LIFE_S: Final = 86_400.0


def learn(record: PoolRecord, now_unix_s: float, hours: float, preemptions: int = 0) -> None:
    """Take in machine hours, and machines that were taken back."""
    if record.as_of_unix_s and now_unix_s > record.as_of_unix_s:
        kept = 0.5 ** ((now_unix_s - record.as_of_unix_s) / HALF_LIFE_S)
        record.preemptions *= kept
        record.hours *= kept
    record.as_of_unix_s = max(record.as_of_unix_s, now_unix_s)
    record.hours += hours
    record.preemptions += preemptions
    if preemptions:
        record.taken_unix_s = now_unix_s


def rate_per_h(record: PoolRecord | None, assumed_per_h: float, weight_h: float) -> float:
    """Return the expected preemptions of one machine in an hour.

    Args:
        record: what was seen; None: nothing.
        assumed_per_h: before anything was seen.
        weight_h: machine hours that this weighs.
    """
    if record is None:
        return assumed_per_h
    return (assumed_per_h * weight_h + record.preemptions) / (weight_h + record.hours)


_MOST_DOUBLINGS: Final = 20


def cool_down(
    memory: AutoscalerMemory,
    pool: Pool,
    failure_kind: LaunchFailureKind,
    now_unix_s: float,
    retry: RetryConfig,
) -> None:
    """Leave a pool alone.

    A pool that is sold out: for a while, twice as long as the last time. A quota or a refusal is of
    the type in the region, whatever the zone, and lasts until somebody does something about it:
    for the longest time at once. What was throttled is simply sent again.
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


def did_not_join(
    memory: AutoscalerMemory,
    pool: Pool,
    request_id: str | None,
    now_unix_s: float,
    retry: RetryConfig,
) -> None:
    """Leave a pool alone of which a machine came and its node did not.

    For a while, and twice as long for each further launch in a row; machines of one launch are one
    failure.
    """
    record = memory.pool(pool)
    if request_id is not None and record.unjoined_request == request_id:
        return
    pause_s = retry.first_s * 2 ** min(record.unjoined, _MOST_DOUBLINGS)
    record.until_unix_s = max(record.until_unix_s, now_unix_s + min(pause_s, retry.longest_s))
    record.unjoined, record.unjoined_request = record.unjoined + 1, request_id


def joined(memory: AutoscalerMemory, pool: Pool) -> None:
    """Take note that the node of a machine of a pool came."""
    record = memory.pool(pool)
    record.unjoined, record.unjoined_request = 0, None


def gave(memory: AutoscalerMemory, pool: Pool, came_unix_s: float) -> None:
    """Take note that a machine of a pool computes.

    Args:
        memory: is changed.
        pool: which.
        came_unix_s: when the machine was first seen. One that came as the last of a pool's, while
            others were refused, says nothing against leaving the pool alone for longer.
    """
    record = memory.pool(pool)
    if record.until_unix_s <= came_unix_s:
        record.refusals = 0


def left_alone_s(record: PoolRecord | None, now_unix_s: float) -> float:
    """Return for how long a pool is left alone from now on."""
    return 0.0 if record is None else max(0.0, record.until_unix_s - now_unix_s)


def _leave(record: PoolRecord, now_unix_s: float, retry: RetryConfig) -> None:
    if record.until_unix_s > now_unix_s:
        return  # several failures of one moment are one
    pause_s = retry.first_s * 2 ** min(record.refusals, _MOST_DOUBLINGS)
    record.until_unix_s = now_unix_s + min(pause_s, retry.longest_s)
    record.refusals += 1


@dataclass(frozen=True, slots=True)
class Losses:
    """What a preemption costs.

    Attributes:
        assumed_per_h: preemptions of a spot machine before any was seen.
        weight_h: machine hours that this weighs.
        lost_h: hours of the work of all that each takes.
        all_usd_per_hour: what all machines cost together.
    """

    assumed_per_h: float
    weight_h: float
    lost_h: float
    all_usd_per_hour: float

    @classmethod
    def of(cls, target: ClusterTarget, weight_h: float, all_usd_per_hour: float) -> Losses:
        """Return what they cost with a target."""
        assumed = target.preemptions_per_h
        return cls(assumed, weight_h, target.lost_s / 3600.0, all_usd_per_hour)

    def rate_per_h(self, memory: AutoscalerMemory, pool: Pool) -> float:
        """Return the expected preemptions of one machine of a pool in an hour."""
        if pool.market is Market.ON_DEMAND:
            return 0.0
        return rate_per_h(memory.pools.get(pool_key(pool)), self.assumed_per_h, self.weight_h)

    def usd_per_hour(self, usd_per_hour: float, preemptions_per_h: float) -> float:
        """Return what an hour of full work costs."""
        share = min(0.9, preemptions_per_h * self.lost_h)
        return (usd_per_hour + share * self.all_usd_per_hour) / (1.0 - share)


@dataclass(frozen=True, slots=True)
class PoolOffer:
    """Machines that a pool may give.

    Attributes:
        kind: of machine.
        pool: which.
        usd_per_hour: of one, now; None: no price is known.
        preemptions_per_h: that are expected of one.
        full_usd_per_hour: with what those cost; 0 without a price.
        most: how many could be had.
        note: why none could.
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
        """Whether no price is known."""
        return self.usd_per_hour is None

    @property
    def is_empty(self) -> bool:
        """Whether none can be had."""
        return self.most == 0

    @property
    def usd_per_million_rows(self) -> float:
        """The score: the least is the best."""
        return self.full_usd_per_hour / self.kind.rows_per_s / 3600.0 * 1e6

    def alternative(self, chosen: int) -> Alternative:
        """Return it as it is shown."""
        score = None if self.usd_per_hour is None else self.usd_per_million_rows
        usd, rate = self.usd_per_hour, self.preemptions_per_h
        return Alternative(self.pool, usd, rate, score, chosen, self.note)


def alternatives_of(
    offers: Iterable[PoolOffer], launches: Mapping[Pool, tuple[int, str, float]]
) -> tuple[Alternative, ...]:
    """Return how pools are shown: those with a price first, the cheapest first."""
    ranked = sorted(offers, key=attrgetter("has_no_price", "usd_per_million_rows"))
    return tuple(offer.alternative(launches.get(offer.pool, (0,))[0]) for offer in ranked)


def price_of(
    memory: AutoscalerMemory,
    pool: Pool,
    kind: MachineKind | None,
    availability: Availability | None = None,
) -> float | None:
    """Return the price of a machine: as quoted now, else as last seen, else as listed."""
    if availability is not None and availability.usd_per_hour is not None:
        return availability.usd_per_hour
    record = memory.pools.get(pool_key(pool))
    if record is not None and record.usd_per_hour is not None:
        return record.usd_per_hour
    return kind.list_usd_per_hour if kind and pool.market is Market.ON_DEMAND else None


def offers_of(
    region: RegionTarget,
    kinds: Sequence[MachineKind],
    memory: AutoscalerMemory,
    availabilities: Mapping[Pool, Availability],
    losses: Losses,
    now_unix_s: float,
    spare_s: float = 0.0,
) -> list[PoolOffer]:
    """Return what could be rented in a region, the best first; what could not comes last.

    Args:
        region: of the run.
        kinds: of machines.
        memory: what is known of pools, and what is rented.
        availabilities: by pool, as quoted.
        losses: what preemptions cost.
        now_unix_s: the present time.
        spare_s: for how long a pool that took a machine back is left to others of its market.
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
        waits_s = left_alone_s(record, now_unix_s)
        if usd is None or (availability is not None and availability.usd_per_hour is None):
            most, note = 0, "not for sale"
        elif waits_s > 0:
            why = "its nodes did not come" if record and record.unjoined else "it gave none"
            most, note = 0, f"left alone for {waits_s:.0f} s, as {why}"
        elif availability is not None:
            for bound, why in (
                (availability.available, "sold out"),
                (availability.quota_left, "quota used up"),
            ):
                if bound is not None and bound < most:
                    most, note = max(0, bound), why if bound <= 0 else ""
        if most <= 0 and not note:
            note = "as many as the cap allows"
        full = 0.0 if usd is None else losses.usd_per_hour(usd, rate)
        found.append(PoolOffer(kind, pool, usd, rate, full, max(0, most), note))
    found = _spared(found, memory, now_unix_s - spare_s)
    found.sort(key=attrgetter("is_empty", "usd_per_million_rows"))
    return _within_caps(found, rented)


def _spared(
    offers: Sequence[PoolOffer], memory: AutoscalerMemory, since_unix_s: float
) -> list[PoolOffer]:
    """Leave pools that took a machine back since a moment, where others of their market give."""
    calm = {
        offer.pool.market
        for offer in offers
        if offer.most > 0 and memory.pool(offer.pool).taken_unix_s <= since_unix_s
    }
    note = "took a machine back just now"
    return [
        replace(offer, most=0, note=offer.note or note)
        if offer.pool.market in calm and memory.pool(offer.pool).taken_unix_s > since_unix_s
        else offer
        for offer in offers
    ]


def _within_caps(
    offers: Sequence[PoolOffer], rented: Mapping[tuple[str, str, Market], int]
) -> list[PoolOffer]:
    """Share what a type's cap leaves among its zones, the best first."""
    taken: Counter[tuple[str, str, Market]] = Counter(rented)
    found = []
    for offer in offers:
        family = _family(offer.pool)
        most = max(0, min(offer.most, offer.kind.cap - taken[family]))
        taken[family] += most
        note = offer.note if most == offer.most or most else "others do for the cap"
        found.append(replace(offer, most=most, note=note))
    return found


def _family(pool: Pool) -> tuple[str, str, Market]:
    return pool.region, pool.type, pool.market
