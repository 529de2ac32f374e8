"""Prices and stock of instance types in the zones of a region of Tencent Cloud."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from geo_ray.clouds.price import Market, PriceRecord, Stock
from geo_ray.clouds.replies import amount_of, making_sense
from geo_ray.clouds.tencent.session import Tencent
from geo_ray.clouds.tiers import AgeTier

VALID_FOR_S: Final = 12 * 3600.0
"""Validity of spot and on-demand prices, whose stock figures change soon."""

MARKETS: Final[dict[str, Market]] = {"POSTPAID_BY_HOUR": "on_demand", "SPOTPAID": "spot"}

_ACTION: Final = "DescribeZoneInstanceConfigInfos"
_MOST_VALUES: Final = 100
_STEPS: Final = ((96.0, "SecondStep"), (360.0, "ThirdStep"))
_STOCKS: Final[dict[str, Stock]] = {
    "EnoughStock": "enough",
    "NormalStock": "normal",
    "UnderStock": "under",
    "WithoutStock": "none",
}


def fetch_instances(
    tencent: Tencent, region: str, types: Sequence[str], currency: str
) -> list[PriceRecord]:
    """Return a record per type, zone and market; sold-out ones are included and marked.

    Raises:
        CloudError: see `Tencent.call`.
    """
    records = []
    for begin in range(0, len(types), _MOST_VALUES):
        some = types[begin : begin + _MOST_VALUES]
        filters = {"instance-type": list(some), "instance-charge-type": list(MARKETS)}
        reply = tencent.call(
            region,
            _ACTION,
            {"Filters": [{"Name": name, "Values": values} for name, values in filters.items()]},
        )
        with making_sense(f"tencent {_ACTION} in {region}"):
            for item in reply["InstanceTypeQuotaSet"]:
                if item["InstanceType"] in some and item["InstanceChargeType"] in MARKETS:
                    records += list(_records(item, region, currency))
    return records


def paid(price: Mapping[str, Any], step: str = "") -> float | None:
    """Return the price per unit, with the account's discount if there is one.

    Args:
        price: an ``ItemPrice``.
        step: suffix of an instance's age step, such as ``SecondStep``.

    Raises:
        ValueError: an amount is not a number.
    """
    return amount_of(price.get(f"UnitPriceDiscount{step}")) or amount_of(
        price.get(f"UnitPrice{step}")
    )


def _records(item: Mapping[str, Any], region: str, currency: str) -> Iterator[PriceRecord]:
    price, zone = item.get("Price") or {}, item["Zone"]
    if not zone.startswith(f"{region}-"):
        raise ValueError(f"zone {zone} is not of {region}")
    amount = paid(price)
    if amount is None:
        return
    if price.get("ChargeUnit", "HOUR") not in ("HOUR", None, ""):
        raise ValueError(f"{item['InstanceType']} is priced per {price['ChargeUnit']}")
    yield PriceRecord(
        cloud="tencent",
        region=region,
        zone=zone,
        type=item["InstanceType"],
        market=MARKETS[item["InstanceChargeType"]],
        amount=amount,
        currency=currency,
        unit="hour",
        age_tiers=tuple(_age_tiers(price, amount)),
        source=f"Tencent Cloud {_ACTION}",
        fetched_at=datetime.now(UTC),
        valid_for_s=VALID_FOR_S,
        stock=_stock(item),
    )


def _age_tiers(price: Mapping[str, Any], amount: float) -> Iterator[AgeTier]:
    for after_h, step in _STEPS:
        later = paid(price, step)
        if later is not None:
            yield AgeTier(after_h=after_h, factor=later / amount)


def _stock(item: Mapping[str, Any]) -> Stock | None:
    if item.get("Status") == "SOLD_OUT":
        return "none"
    return _STOCKS.get(str(item.get("StatusCategory")))
