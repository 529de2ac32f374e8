"""Spot markets of a day: price and stock of a pool over time, generated or from AWS's history.

Generated days: on-demand prices as in the price book; each zone's spot price begins in the
book's range over zones, moves by some per cent an hour, and jumps once or twice a day. Stock is
an assumption: recorded availability (spot-traces, SkyNomad, SpotLake) is published but not used
here. Source: the ranges are those of SkyPilot's catalog; all dynamics are reconstructed. AWS's
history (`describe-spot-price-history`) has prices and no stock.
"""

from __future__ import annotations

import json
import math
import random
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from geo_ray.base.errors import PriceBookError
from geo_ray.cloud.provider import Market, Pool
from geo_ray.prices.price_book import PriceBook


@dataclass(frozen=True)
class MarketTrace:
    """Two series of (unix seconds, value that holds from then on), ascending.

    Attributes:
        prices: US dollars per hour; before the first, the first holds.
        availabilities: machines that one customer can have at once; who has more loses some.
    """

    prices: tuple[tuple[float, float], ...]
    availabilities: tuple[tuple[float, int], ...]

    def usd_at(self, unix_s: float) -> float:
        """Return the price of an hour at a moment."""
        return self.prices[max(0, bisect_right(self.prices, (unix_s, float("inf"))) - 1)][1]

    def available_at(self, unix_s: float) -> int:
        """Return how many one customer can have at a moment."""
        return self.availabilities[
            max(0, bisect_right(self.availabilities, (unix_s, 1 << 62)) - 1)
        ][1]

    def usd_between(self, start_unix_s: float, end_unix_s: float) -> float:
        """Return what one machine costs: by the second, at the price of each second."""
        if end_unix_s <= start_unix_s:
            return 0.0
        edges = [when for when, _ in self.prices if start_unix_s < when < end_unix_s]
        total = 0.0
        for low, high in pairwise([start_unix_s, *edges, end_unix_s]):
            total += (high - low) / 3600.0 * self.usd_at(low)
        return total


_HOUR_S: Final = 3600.0
_PLENTY: Final = 1000


@dataclass(frozen=True, slots=True)
class DayKind:
    """What a made-up day is like.

    Attributes:
        hours: that it has.
        hourly_move: standard deviation of a price's step in an hour, of its logarithm.
        jumps_per_day: of a zone's price.
        least_sold_out_per_day: of the calmest pools.
        most_sold_out_per_day: of the worst.
    """

    hours: int = 48
    hourly_move: float = 0.03
    jumps_per_day: float = 1.5
    least_sold_out_per_day: float = 0.5
    most_sold_out_per_day: float = 4.0


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
                availabilities = [(0.0, _PLENTY)]
                if zone == dry:
                    start_s = rng.uniform(0, kind.hours * _HOUR_S)
                    availabilities += [
                        (start_s, 0),
                        (start_s + rng.uniform(1, 6) * _HOUR_S, _PLENTY),
                    ]
                # Machines on demand are never taken back: a sold-out zone only gives no new ones.
                found[pool] = MarketTrace(((0.0, usd),), tuple(availabilities))
                spot = Pool(region, zone, type_, Market.SPOT)
                prices = _prices(rng, kind, bottom, top, usd)
                found[spot] = MarketTrace(prices, _availabilities(rng, kind))
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


def _availabilities(rng: random.Random, kind: DayKind) -> tuple[tuple[float, int], ...]:
    low, high = kind.least_sold_out_per_day, kind.most_sold_out_per_day
    per_s = math.exp(rng.uniform(math.log(low), math.log(high))) / 86_400
    now_s, found = 0.0, [(0.0, _PLENTY)]
    while True:
        now_s += rng.expovariate(per_s)
        if now_s >= kind.hours * _HOUR_S:
            return tuple(found)
        found.append((now_s, rng.choice((0, 0, 1, 2))))
        now_s += math.exp(rng.uniform(math.log(600), math.log(3 * _HOUR_S)))
        found.append((now_s, _PLENTY))


class _SpotPrice(BaseModel):
    model_config = ConfigDict(extra="ignore")
    zone: str = Field(alias="AvailabilityZone", min_length=2)
    type: str = Field(alias="InstanceType", min_length=1)
    product: str = Field("Linux/UNIX", alias="ProductDescription")
    usd: float = Field(alias="SpotPrice", gt=0)
    when: datetime = Field(alias="Timestamp")


class _SpotHistory(BaseModel):
    model_config = ConfigDict(extra="ignore")
    prices: list[_SpotPrice] = Field(alias="SpotPriceHistory")


def read_spot_history(data: bytes | str, product: str = "Linux/UNIX") -> dict[Pool, MarketTrace]:
    """Return the spot markets that a history has.

    Args:
        data: JSON as AWS's command line prints it.
        product: what the machines run; others are left out.

    Raises:
        PriceBookError: it is nothing of the kind.
    """
    try:
        history = _SpotHistory.model_validate(json.loads(data))
    except (ValidationError, ValueError) as error:
        raise PriceBookError(
            f"this is no history of spot prices: {str(error).splitlines()[0]}",
            fix="Make one with `aws ec2 describe-spot-price-history --output json`.",
        ) from error
    found: dict[Pool, dict[float, float]] = defaultdict(dict)
    for each in history.prices:
        if each.product == product:
            region = each.zone.rstrip("abcdefghijklmnopqrstuvwxyz")
            pool = Pool(region, each.zone, each.type, Market.SPOT)
            found[pool][each.when.timestamp()] = each.usd
    return {
        pool: MarketTrace(tuple(sorted(prices.items())), ((min(prices), _PLENTY),))
        for pool, prices in found.items()
    }
