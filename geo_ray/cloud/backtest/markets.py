"""Spot markets over a day: price and capacity of a pool over time, generated or from AWS history.

Generated days: on-demand prices follow the price book; the spot price of a zone starts in the range
of the price book, moves by some per cent an hour, and jumps once or twice a day. Capacity is an
assumption: recorded availability (spot-traces, SkyNomad, SpotLake) is published but not used here.
Source: the ranges are those of SkyPilot's catalog; all dynamics are reconstructed. The AWS history
(`describe-spot-price-history`) has prices but no capacity.
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
    """Price and capacity of a pool: two ascending series of (unix seconds, value from then on).

    Attributes:
        prices: US dollars per hour; the first value also holds before its time.
        availabilities: maximum number of machines of one customer; when it falls, the excess is
            preempted.
    """

    prices: tuple[tuple[float, float], ...]
    availabilities: tuple[tuple[float, int], ...]

    def usd_at(self, unix_s: float) -> float:
        """Return the hourly price at a time."""
        return self.prices[max(0, bisect_right(self.prices, (unix_s, float("inf"))) - 1)][1]

    def available_at(self, unix_s: float) -> int:
        """Return the maximum number of machines of one customer at a time."""
        return self.availabilities[
            max(0, bisect_right(self.availabilities, (unix_s, 1 << 62)) - 1)
        ][1]

    def usd_between(self, start_unix_s: float, end_unix_s: float) -> float:
        """Return the cost of one machine, charged by the second at the price of each second."""
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
    """Parameters of a generated day.

    Attributes:
        hours: length.
        hourly_move: standard deviation of the hourly step of a price's logarithm.
        jumps_per_day: jumps of a zone's price.
        least_sold_out_per_day: sold-out periods of the calmest pools.
        most_sold_out_per_day: sold-out periods of the busiest pools.
    """

    hours: int = 48
    hourly_move: float = 0.03
    jumps_per_day: float = 1.5
    least_sold_out_per_day: float = 0.5
    most_sold_out_per_day: float = 4.0


def generated_day(
    book: PriceBook,
    cloud: str,
    regions: dict[str, tuple[str, ...]],
    types: tuple[str, ...],
    seed: int,
    kind: DayKind | None = None,
) -> dict[Pool, MarketTrace]:
    """Return the markets of a generated day that begins at time 0.

    Args:
        book: prices.
        cloud: the cloud.
        regions: zones by cloud region.
        types: machine types.
        seed: seed of the random generator.
        kind: parameters of the day.
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
                # on-demand machines are never preempted: a sold-out zone only refuses new ones
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
    """Return the spot markets of a price history.

    Args:
        data: JSON output of the AWS command line.
        product: operating system; other products are skipped.

    Raises:
        PriceBookError: the data is not a price history.
    """
    try:
        history = _SpotHistory.model_validate(json.loads(data))
    except (ValidationError, ValueError) as error:
        raise PriceBookError(
            f"this is not a spot price history: {str(error).splitlines()[0]}",
            fix="Create one with `aws ec2 describe-spot-price-history --output json`.",
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
