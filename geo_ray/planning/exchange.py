"""What one exchange between the regions takes in time, bytes and dollars.

Every region but the averager's sends an update up and gets an answer down, and the slowest pair
decides: ``max_r up / goodput(r, a) + down / goodput(a, r) + rtt``. Pairs are measured alone, so
where many share the averager's line this is optimistic.

Egress is billed where bytes leave: up to the region's cloud, down to the averager's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from geo_ray.planning.tradeoffs import BITS_PER_PARAM
from geo_ray.wan.link_table import LinkTable


@dataclass(frozen=True, slots=True)
class Exchange:
    """One exchange of all regions with an averager.

    Attributes:
        averager: its region.
        codec: of the updates; None for fp32.
        seconds: until the slowest region has its answer.
        up_bytes: of each region.
        down_bytes: to each region.
        usd: egress both ways, of all regions.
    """

    averager: str
    codec: str | None
    seconds: float
    up_bytes: float
    down_bytes: float
    usd: float


def exchange(
    num_params: int,
    regions: Sequence[str],
    averager: str,
    codec: str | None,
    links: LinkTable,
    usd_per_gb: Mapping[tuple[str, str], float],
) -> Exchange:
    """Time and price of one exchange.

    Args:
        num_params: of the model.
        regions: all of them.
        averager: one of them.
        codec: one of `tradeoffs.BITS_PER_PARAM`.
        links: goodput and round trip of every pair with the averager.
        usd_per_gb: egress by (source, destination).

    Raises:
        LinkUnknownError: a link was not measured; names it.
    """
    up_bits, down_bits = BITS_PER_PARAM[codec]
    up_bytes, down_bytes = num_params * up_bits / 8, num_params * down_bits / 8
    slowest_s, usd = 0.0, 0.0
    for region in regions:
        if region == averager:
            continue
        there, back = links.get(region, averager), links.get(averager, region)
        sent_s = 8e-6 * up_bytes / there.goodput_mbps + 8e-6 * down_bytes / back.goodput_mbps
        slowest_s = max(slowest_s, sent_s + there.rtt_s)
        usd += up_bytes * 1e-9 * usd_per_gb[region, averager]
        usd += down_bytes * 1e-9 * usd_per_gb[averager, region]
    return Exchange(averager, codec, slowest_s, up_bytes, down_bytes, usd)
