"""The queries to Tencent Cloud when prices are refreshed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from geo_ray.clouds.query import Query
from geo_ray.clouds.tencent.egress import fetch_egress
from geo_ray.clouds.tencent.prices import MARKETS, fetch_instances
from geo_ray.clouds.tencent.session import Tencent

SERVICES: Final = ("cvm",)


def tencent_queries(
    tencent: Tencent, types: Mapping[str, Sequence[str]], currency: str
) -> list[Query]:
    """On-demand and spot prices with the stock, and those of traffic to the internet.

    Args:
        tencent: the account.
        types: instance types by region.
        currency: currency that the account is billed in; the answers do not say it.
    """
    queries = []
    for region, wanted in types.items():
        names = tuple(wanted)
        ask = partial(fetch_instances, tencent, region, names, currency)
        queries.append(Query("tencent", region, "instance", tuple(MARKETS.values()), names, ask))
        ask = partial(fetch_egress, tencent, region, names, currency)
        queries.append(Query("tencent", region, "egress", ("on_demand",), (), ask))
    return queries
