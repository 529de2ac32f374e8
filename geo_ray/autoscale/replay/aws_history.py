"""Reads what `aws ec2 describe-spot-price-history` prints, as the markets of a day.

The answer has a price for every change, newest first, by zone and type; it says nothing of stock,
so what a customer could have is taken to be plenty, or is given.
"""

from __future__ import annotations

import json
from collections import defaultdict
from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from geo_ray.autoscale.replay.market_trace import MarketTrace
from geo_ray.errors import PriceBookError
from geo_ray.providers.base import Market, Pool

_PLENTY = 1000


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
