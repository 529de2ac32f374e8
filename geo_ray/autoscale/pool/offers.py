"""What a machine of each pool would cost, with what its preemptions are expected to cost.

A preemption takes ``lost_s`` of the work of all, who are paid meanwhile. So an hour of a machine
costs ``usd + rate * lost_h * usd of all per hour``, and computes ``1 - rate * lost_h`` of what it
would; the score is the quotient, in dollars per row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from geo_ray.autoscale.actions import Alternative
from geo_ray.autoscale.memory import AutoscalerMemory, outstanding, pool_key
from geo_ray.autoscale.pool.cooldown import left_alone_s
from geo_ray.autoscale.pool.hazard import rate_per_h
from geo_ray.autoscale.target import ClusterTarget, MachineKind, RegionTarget
from geo_ray.providers.base import Market, Pool, Stock


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
    def usd_per_million_rows(self) -> float:
        """The score: the least is the best."""
        return self.full_usd_per_hour / self.kind.rows_per_s / 3600.0 * 1e6

    def alternative(self, chosen: int) -> Alternative:
        """Return it as it is shown."""
        score = None if self.usd_per_hour is None else self.usd_per_million_rows
        usd, rate = self.usd_per_hour, self.preemptions_per_h
        return Alternative(self.pool, usd, rate, score, chosen, self.note)


def price_of(
    memory: AutoscalerMemory, pool: Pool, kind: MachineKind | None, stock: Stock | None = None
) -> float | None:
    """Return the price of a machine: as quoted now, else as last seen, else as listed."""
    if stock is not None and stock.usd_per_hour is not None:
        return stock.usd_per_hour
    record = memory.pools.get(pool_key(pool))
    if record is not None and record.usd_per_hour is not None:
        return record.usd_per_hour
    return kind.list_usd_per_hour if kind and pool.market is Market.ON_DEMAND else None


def offers_of(
    region: RegionTarget,
    kinds: Sequence[MachineKind],
    memory: AutoscalerMemory,
    stocks: Mapping[Pool, Stock],
    losses: Losses,
    now_unix_s: float,
    spare_s: float = 0.0,
) -> list[PoolOffer]:
    """Return what could be rented in a region, the best first; what could not comes last.

    Args:
        region: of the run.
        kinds: of machines.
        memory: what is known of pools, and what is rented.
        stocks: by pool, as quoted.
        losses: what preemptions cost.
        now_unix_s: the present time.
        spare_s: for how long a pool that took a machine back is left to others of its market.
    """
    found = []
    rented: Counter[tuple[str, str, Market]] = Counter()
    for duty in memory.duties.values():
        rented[_family(duty.machine.pool)] += 1
    for intent in memory.intents.values():
        rented[_family(intent.request.pool)] += max(0, outstanding(memory, intent))
    for kind, pool in region.pools(kinds):
        stock = stocks.get(pool)
        usd = price_of(memory, pool, kind, stock)
        rate = losses.rate_per_h(memory, pool)
        most, note = kind.cap - rented[_family(pool)], ""
        record = memory.pools.get(pool_key(pool))
        waits_s = left_alone_s(record, now_unix_s)
        if usd is None or (stock is not None and stock.usd_per_hour is None):
            most, note = 0, "not for sale"
        elif waits_s > 0:
            why = "its nodes did not come" if record and record.unjoined else "it gave none"
            most, note = 0, f"left alone for {waits_s:.0f} s, as {why}"
        elif stock is not None:
            for bound, why in ((stock.available, "sold out"), (stock.quota_left, "quota used up")):
                if bound is not None and bound < most:
                    most, note = max(0, bound), why if bound <= 0 else ""
        if most <= 0 and not note:
            note = "as many as the cap allows"
        full = 0.0 if usd is None else losses.usd_per_hour(usd, rate)
        found.append(PoolOffer(kind, pool, usd, rate, full, max(0, most), note))
    found = _spared(found, memory, now_unix_s - spare_s)
    found.sort(key=lambda offer: (offer.most == 0, offer.usd_per_million_rows))
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
