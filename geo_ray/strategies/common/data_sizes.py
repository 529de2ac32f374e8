"""Weights by the sizes of data sets, for strategies that average sites of unequal size.

The rows behind an update are steps times batch size, about the same for all sites that take the
same steps. How much data a site stands for is another thing, which `AveragerState.data_rows` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from geo_ray.strategies.base import AveragerState, Update, shares_of

SiteWeights = Literal["data", "samples", "uniform"]
"""How sites are weighted in a mean: ``data`` by the rows of their data sets, ``samples`` by the
rows behind the updates, ``uniform`` alike."""


def site_shares(
    averager: AveragerState, updates: Sequence[Update], weights: SiteWeights
) -> list[float]:
    """What each update counts in a mean; together 1.

    Where sizes of data sets are asked for and not known, the rows behind the updates stand in.
    """
    if weights != "data":
        return shares_of(updates, weights)
    rows = [averager.data_rows.get(update.region, 0.0) for update in updates]
    if min(rows) <= 0:
        return shares_of(updates, "samples")
    return [each / sum(rows) for each in rows]


def member_rows(averager: AveragerState) -> dict[str, float]:
    """Rows of every member's data set; where not known, those behind their last updates.

    The last are as `geo_ray.strategies.common.speeds.note` has noted them.
    """
    known, members = averager.data_rows, averager.members
    if all(known.get(name, 0.0) > 0 for name in members):
        return {name: known[name] for name in members}
    return {name: averager.numbers.get(f"rows/{name}", 0.0) for name in members}
