"""The queries to AWS when prices are refreshed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from geo_ray.clouds.aws.prices import fetch_on_demand
from geo_ray.clouds.aws.session import Aws
from geo_ray.clouds.aws.spot import fetch_spot
from geo_ray.clouds.aws.transfer import fetch_transfer
from geo_ray.clouds.query import Query

SERVICES: Final = ("ec2", "pricing")


def aws_queries(aws: Aws, types: Mapping[str, Sequence[str]]) -> list[Query]:
    """Return the queries for on-demand, spot and egress prices.

    Args:
        aws: the account.
        types: instance types by region.
    """
    queries = []
    for region, wanted in types.items():
        names = tuple(wanted)
        ask = partial(fetch_on_demand, aws, region, names)
        queries.append(Query("aws", region, "instance", ("on_demand",), names, ask))
        ask = partial(fetch_spot, aws, region, names)
        queries.append(Query("aws", region, "instance", ("spot",), names, ask))
        ask = partial(fetch_transfer, aws, region)
        queries.append(Query("aws", region, "egress", ("on_demand",), (), ask))
    return queries
