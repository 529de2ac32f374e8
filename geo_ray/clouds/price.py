"""A price record: item, place, market, currency, unit, date and source.

A price that is not known is absent; it is never 0. Amounts are for the unit: an hour of an
instance, a GB that leaves a region, a GB of disk kept for a month, or a Mbit/s for a month.
"""

from __future__ import annotations

from typing import Final, Literal, Self

from pydantic import AwareDatetime, Field, model_validator

from geo_ray.clouds.currency import CurrencyCode
from geo_ray.clouds.tiers import AgeTier, VolumeTier, check_age_tiers, check_volume_tiers
from geo_ray.config.base import StrictModel

Item = Literal["instance", "disk", "egress"]
Market = Literal["on_demand", "spot", "reserved"]
Unit = Literal["hour", "GB", "GB-month", "Mbps-month"]
Stock = Literal["enough", "normal", "under", "none"]

UNITS: Final[dict[Item, tuple[Unit, ...]]] = {
    "instance": ("hour",),
    "disk": ("GB-month",),
    "egress": ("GB", "Mbps-month"),
}
INTERNET: Final = "internet"
ANYWHERE: Final = "*"


class PriceRecord(StrictModel):
    """The price of one item."""

    cloud: str = Field(min_length=1, description="aws, tencent, or a name of the user's")
    region: str = Field(min_length=1, description="the cloud's region; of egress the source")
    zone: str | None = Field(None, description="availability zone; null: all of the region")
    item: Item = "instance"
    type: str | None = Field(None, description="instance type, or kind of disk; egress has none")
    to: str | None = Field(
        None, description="egress: the other region, 'internet', or '*' for any other region"
    )
    market: Market = "on_demand"
    amount: float = Field(gt=0, description="in `currency` per `unit`")
    lowest: float | None = Field(
        None, gt=0, description="if the zones differ: the cheapest; `amount` is the dearest"
    )
    currency: CurrencyCode = Field(description="ISO 4217")
    unit: Unit
    age_tiers: tuple[AgeTier, ...] = Field((), description="what older instances pay")
    volume_tiers: tuple[VolumeTier, ...] = Field((), description="what more of it in a month costs")
    source: str = Field(min_length=1, description="where it was read")
    fetched_at: AwareDatetime = Field(description="when it was read")
    dated: AwareDatetime | None = Field(
        None, description="of what day the source is, if that is not when it was read"
    )
    valid_for_s: float = Field(gt=0, description="how long it is to be believed, from then on")
    stock: Stock | None = Field(None, description="what the cloud says of its stock; null: nothing")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.unit not in UNITS[self.item]:
            units = " or ".join(UNITS[self.item])
            raise ValueError(f"unit: {self.item} is not priced per {self.unit}, but per {units}")
        if (self.type is None) != (self.item == "egress"):
            raise ValueError("type: an instance and a disk have a type, egress has none")
        if (self.to is None) == (self.item == "egress"):
            raise ValueError("to: egress has a destination, nothing else has")
        if self.lowest is not None and self.lowest > self.amount:
            raise ValueError(f"lowest: it is above the amount {self.amount:g}")
        check_age_tiers(self.age_tiers)
        check_volume_tiers(self.volume_tiers)
        return self

    @property
    def key(self) -> tuple[str | None, ...]:
        """The key of the item; a newer record with the same key replaces this one."""
        own = (self.cloud, self.region, self.zone, self.item, self.type, self.to)
        return (*own, self.market, self.unit)

    @property
    def what(self) -> str:
        """The item in words, for messages and tables."""
        place = self.zone or self.region
        if self.item == "egress":
            to = "any other region" if self.to == ANYWHERE else self.to
            return f"{self.cloud} egress from {place} to {to}"
        return f"{self.cloud} {self.type} ({self.market}) in {place}"

    def age_s(self, now_unix_s: float) -> float:
        """Return the seconds since the day that the source is of."""
        return now_unix_s - (self.dated or self.fetched_at).timestamp()

    def is_stale(self, now_unix_s: float) -> bool:
        """Return whether the price is older than it is to be believed."""
        return self.age_s(now_unix_s) > self.valid_for_s
