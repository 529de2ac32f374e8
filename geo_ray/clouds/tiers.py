"""Tiers of prices by an instance's age and by a month's volume.

Both costs are piecewise linear, continuous and never fall, which tests check: published code of
another project charged 717 for 60 TB where the tiers give some 5,000.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

from pydantic import Field

from geo_ray.config.base import StrictModel

GB_PER_MBPS_MONTH: Final = 324.0
"""GB that one Mbit/s carries in a month of 30 days: 10^6 / 8 * 86,400 * 30 bytes."""


class AgeTier(StrictModel):
    """The share of its price that an instance pays from an age on."""

    after_h: float = Field(gt=0, description="hours since it was started")
    factor: float = Field(gt=0, description="share of the amount from then on")


class VolumeTier(StrictModel):
    """The price of each further unit beyond a volume in a month."""

    above: float = Field(gt=0, description="units in the month")
    amount: float = Field(ge=0, description="per unit from there on, in the record's currency")


def check_age_tiers(tiers: Sequence[AgeTier]) -> None:
    """Raises ValueError unless ages rise."""
    _check_rising("age_tiers", [tier.after_h for tier in tiers])


def check_volume_tiers(tiers: Sequence[VolumeTier]) -> None:
    """Raises ValueError unless volumes rise."""
    _check_rising("volume_tiers", [tier.above for tier in tiers])


def billed_hours(hours: float, tiers: Sequence[AgeTier], age_h: float = 0.0) -> float:
    """Return how many full-price hours an instance is billed for.

    Args:
        hours: hours that it is kept for.
        tiers: tiers of its price.
        age_h: its age in hours at the start.
    """
    return _integral(age_h + hours, tiers) - _integral(age_h, tiers)


def volume_cost(
    units: float, amount: float, tiers: Sequence[VolumeTier], used: float = 0.0
) -> float:
    """Return the cost of ``units`` more in a month in which ``used`` were used before.

    Args:
        units: volume, such as GB.
        amount: price per unit below the first tier.
        tiers: prices beyond.
        used: volume of the account's month so far; tiers are of the account, not of the job.
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
