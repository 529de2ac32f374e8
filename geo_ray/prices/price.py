"""Price records, price tiers and exchange rates.

A record has item, place, market, currency, unit, date and source. An unknown price is absent;
it is never 0. Amounts are per unit: an hour of an instance, a GB that leaves a region, a GB of
disk kept for a month, or a Mbit/s for a month. Exchange rates are explicit and dated, and come
from the user; nothing is converted without one.

Tiers depend on an instance's age or on a month's volume. Both costs are piecewise linear,
continuous and never decrease, which tests check.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import date
from itertools import pairwise
from operator import attrgetter
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AwareDatetime, Field, model_validator

from geo_ray.base.errors import CurrencyError
from geo_ray.base.model import MessageWords, StrictModel

CurrencyCode = Annotated[
    str, Field(pattern=r"^[A-Z]{3}$"), MessageWords("three capital letters, such as EUR")
]
"""A currency by its ISO 4217 code."""


class ExchangeRate(StrictModel):
    """The value of one unit of a currency."""

    currency: CurrencyCode = Field(description="ISO 4217")
    usd: float = Field(gt=0, description="US dollars per unit")
    on: date = Field(description="day of the rate")
    source: str = Field(min_length=1, description="whose rate it is")


def usd_per_unit(currency: str, rates: Sequence[ExchangeRate]) -> float:
    """Return US dollars per unit of a currency, by the newest rate.

    Raises:
        CurrencyError: there is no rate for the currency, which the message names.
    """
    if currency == "USD":
        return 1.0
    found = [rate for rate in rates if rate.currency == currency]
    if not found:
        raise CurrencyError(f"there are prices in {currency} and no exchange rate for it")
    return max(found, key=attrgetter("on")).usd


GB_PER_MBPS_MONTH: Final = 324.0
"""GB that one Mbit/s carries in a month of 30 days: 10^6 / 8 * 86,400 * 30 bytes."""


class AgeTier(StrictModel):
    """Price factor of an instance from an age on."""

    after_h: float = Field(gt=0, description="hours since it was started")
    factor: float = Field(gt=0, description="fraction of the amount from this age on")


class VolumeTier(StrictModel):
    """The price of each further unit beyond a volume in a month."""

    above: float = Field(gt=0, description="units in the month")
    amount: float = Field(ge=0, description="per unit from there on, in the record's currency")


def check_age_tiers(tiers: Sequence[AgeTier]) -> None:
    """Raise ValueError unless ages increase."""
    _check_rising("age_tiers", [tier.after_h for tier in tiers])


def check_volume_tiers(tiers: Sequence[VolumeTier]) -> None:
    """Raise ValueError unless volumes increase."""
    _check_rising("volume_tiers", [tier.above for tier in tiers])


def billed_hours(hours: float, tiers: Sequence[AgeTier], age_h: float = 0.0) -> float:
    """Return the number of full-price hours that an instance is billed for.

    Args:
        hours: hours of use.
        tiers: tiers of its price.
        age_h: its age in hours at the start.
    """
    return _integral(age_h + hours, tiers) - _integral(age_h, tiers)


def volume_cost(
    units: float, amount: float, tiers: Sequence[VolumeTier], used: float = 0.0
) -> float:
    """Return the cost of ``units`` more in a month with ``used`` units so far.

    Args:
        units: volume, such as GB.
        amount: price per unit below the first tier.
        tiers: prices of further units.
        used: volume of the account in this month; tiers apply to the account, not to the job.
    """
    edges = [0.0, *(tier.above for tier in tiers), math.inf]
    amounts = [amount, *(tier.amount for tier in tiers)]
    total = 0.0
    for (low, high), each in zip(pairwise(edges), amounts, strict=True):
        total += max(0.0, min(used + units, high) - max(used, low)) * each
    return total


def _integral(hours: float, tiers: Sequence[AgeTier]) -> float:
    edges = [0.0, *(tier.after_h for tier in tiers), math.inf]
    factors = [1.0, *(tier.factor for tier in tiers)]
    total = 0.0
    for (low, high), factor in zip(pairwise(edges), factors, strict=True):
        total += max(0.0, min(hours, high) - low) * factor
    return total


def _check_rising(name: str, edges: Sequence[Any]) -> None:
    if any(high <= low for low, high in pairwise(edges)):
        raise ValueError(f"{name}: bounds must rise, are {', '.join(f'{e:g}' for e in edges)}")


Item = Literal["instance", "disk", "egress"]
Market = Literal["on_demand", "spot", "reserved"]
Unit = Literal["hour", "GB", "GB-month", "Mbps-month"]
Availability = Literal["enough", "normal", "under", "none"]

UNITS: Final[dict[Item, tuple[Unit, ...]]] = {
    "instance": ("hour",),
    "disk": ("GB-month",),
    "egress": ("GB", "Mbps-month"),
}
INTERNET: Final = "internet"
ANYWHERE: Final = "*"


class PriceRecord(StrictModel):
    """The price of one item."""

    cloud: str = Field(min_length=1, description="aws, tencent, or a custom name")
    region: str = Field(
        min_length=1, description="region of the cloud; of egress the source, which is billed"
    )
    zone: str | None = Field(None, description="availability zone; null: all of the region")
    item: Item = Field("instance", description="kind of the priced item")
    type: str | None = Field(None, description="instance type or disk type; egress has none")
    to: str | None = Field(
        None, description="egress: the other region, 'internet', or '*' for any other region"
    )
    market: Market = Field("on_demand", description="market of the instance")
    amount: float = Field(gt=0, description="in `currency` per `unit`")
    lowest: float | None = Field(
        None, gt=0, description="if zones differ: the lowest; `amount` is the highest"
    )
    currency: CurrencyCode = Field(description="ISO 4217")
    unit: Unit = Field(
        description="`hour` of an instance, `GB-month` of a disk, `GB` or `Mbps-month` of egress"
    )
    age_tiers: tuple[AgeTier, ...] = Field((), description="price of older instances, by age")
    volume_tiers: tuple[VolumeTier, ...] = Field(
        (),
        description="price of units beyond a volume in a calendar month, of the whole account",
    )
    source: str = Field(min_length=1, description="source of the price")
    fetched_at: AwareDatetime = Field(description="when the price was read")
    dated: AwareDatetime | None = Field(
        None, description="day of the source, if it differs from `fetched_at`"
    )
    valid_for_s: float = Field(
        gt=0, description="seconds after which the price is stale; it is still used"
    )
    availability: Availability | None = Field(
        None, description="reported availability; null: not reported"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.unit not in UNITS[self.item]:
            units = " or ".join(UNITS[self.item])
            raise ValueError(f"unit: {self.item} is not priced per {self.unit}, but per {units}")
        if (self.type is None) != (self.item == "egress"):
            raise ValueError("type: instances and disks need a type, egress has none")
        if (self.to is None) == (self.item == "egress"):
            raise ValueError("to: only egress has a destination")
        if self.lowest is not None and self.lowest > self.amount:
            raise ValueError(f"lowest: exceeds the amount {self.amount:g}")
        check_age_tiers(self.age_tiers)
        check_volume_tiers(self.volume_tiers)
        return self

    @property
    def key(self) -> tuple[str | None, ...]:
        """Key of the item; a newer record with the same key replaces this one."""
        own = (self.cloud, self.region, self.zone, self.item, self.type, self.to)
        return (*own, self.market, self.unit)

    @property
    def what(self) -> str:
        """Description of the item, for messages and tables."""
        place = self.zone or self.region
        if self.item == "egress":
            to = "any other region" if self.to == ANYWHERE else self.to
            return f"{self.cloud} egress from {place} to {to}"
        return f"{self.cloud} {self.type} ({self.market}) in {place}"

    def age_s(self, now_unix_s: float) -> float:
        """Return the seconds since the day of the source."""
        return now_unix_s - (self.dated or self.fetched_at).timestamp()

    def is_stale(self, now_unix_s: float) -> bool:
        """Return whether the price is older than its validity."""
        return self.age_s(now_unix_s) > self.valid_for_s
