"""Days that are made up from a seed within what is documented of prices.

Prices: on demand as the book has it; on the spot market each zone begins within the range that the
book has over zones, moves by some per cent every hour and returns, and jumps to another place of
the range, or a quarter beyond, once or twice a day; never above on demand. Nobody publishes
preemptions, so stock is an assumption: a zone has plenty of a type, and now and then, between once
in two days and a few times a day as the pool goes, there are two, one or none for ten minutes to
three hours. On demand there is always some, but for one zone and type in each region that is sold
out for a while.

Source: the ranges are those of SkyPilot's catalog; all dynamics are reconstructed.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Final

from geo_ray.autoscale.replay.market_trace import MarketTrace
from geo_ray.clouds.price_book import PriceBook
from geo_ray.providers.base import Market, Pool

_HOUR_S: Final = 3600.0
_PLENTY: Final = 1000


@dataclass(frozen=True, slots=True)
class DayKind:
    """What a made-up day is like.

    Attributes:
        hours: that it has.
        hourly_move: standard deviation of a price's step in an hour, of its logarithm.
        jumps_per_day: of a zone's price.
        least_shortages_per_day: of the calmest pools.
        most_shortages_per_day: of the worst.
    """

    hours: int = 48
    hourly_move: float = 0.03
    jumps_per_day: float = 1.5
    least_shortages_per_day: float = 0.5
    most_shortages_per_day: float = 4.0


def made_up_day(
    book: PriceBook,
    cloud: str,
    regions: dict[str, tuple[str, ...]],
    types: tuple[str, ...],
    seed: int,
    kind: DayKind | None = None,
) -> dict[Pool, MarketTrace]:
    """Return the markets of a day that begins at 0.

    Args:
        book: prices.
        cloud: whose.
        regions: zones by the cloud's region.
        types: of machines.
        seed: of all that is left to chance.
        kind: what the day is like.
    """
    kind = kind or DayKind()
    found: dict[Pool, MarketTrace] = {}
    for region, zones in regions.items():
        for type_ in types:
            rng = random.Random(f"{seed}/{region}/{type_}")
            usd = book.usd_of_hours(book.instance(cloud, region, type_), 1.0)
            record = book.instance(cloud, region, type_, "spot")
            top = book.usd_of_hours(record, 1.0)
            bottom = top * (record.lowest or record.amount) / record.amount
            dry = rng.choice(zones)
            for zone in zones:
                pool = Pool(region, zone, type_, Market.ON_DEMAND)
                stocks = [(0.0, _PLENTY)]
                if zone == dry:
                    start_s = rng.uniform(0, kind.hours * _HOUR_S)
                    stocks += [(start_s, 0), (start_s + rng.uniform(1, 6) * _HOUR_S, _PLENTY)]
                # Machines on demand are never taken back: a sold-out zone only gives no new ones.
                found[pool] = MarketTrace(((0.0, usd),), tuple(stocks))
                spot = Pool(region, zone, type_, Market.SPOT)
                prices = _prices(rng, kind, bottom, top, usd)
                found[spot] = MarketTrace(prices, _stocks(rng, kind))
    return found


def _prices(
    rng: random.Random, kind: DayKind, bottom: float, top: float, limit: float
) -> tuple[tuple[float, float], ...]:
    centre = rng.uniform(bottom, top)
    price, found = centre, []
    for hour in range(kind.hours):
        if rng.random() < kind.jumps_per_day / 24:
            centre = rng.uniform(0.8 * bottom, 1.25 * top)
        price *= math.exp(0.3 * math.log(centre / price) + rng.gauss(0, kind.hourly_move))
        found.append((hour * _HOUR_S, round(min(price, limit), 4)))
    return tuple(found)


def _stocks(rng: random.Random, kind: DayKind) -> tuple[tuple[float, int], ...]:
    low, high = kind.least_shortages_per_day, kind.most_shortages_per_day
    per_s = math.exp(rng.uniform(math.log(low), math.log(high))) / 86_400
    now_s, found = 0.0, [(0.0, _PLENTY)]
    while True:
        now_s += rng.expovariate(per_s)
        if now_s >= kind.hours * _HOUR_S:
            return tuple(found)
        found.append((now_s, rng.choice((0, 0, 1, 2))))
        now_s += math.exp(rng.uniform(math.log(600), math.log(3 * _HOUR_S)))
        found.append((now_s, _PLENTY))
