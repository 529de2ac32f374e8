"""Exchange rates: explicit and dated, from the user; nothing is converted without one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Annotated

from pydantic import Field

from geo_ray.config.annotations import MessageWords
from geo_ray.config.base import StrictModel
from geo_ray.errors import CurrencyError

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
    return max(found, key=lambda rate: rate.on).usd
