"""The time, bytes and dollars of one exchange between the regions.

Every region but the averager's sends an update up and gets an answer down, which takes ``up /
goodput(r, a) + down / goodput(a, r) + rtt``; the averager's own region takes no time. Pairs are
measured alone, so this is optimistic if many regions share the averager's line. Egress is billed
where bytes leave: updates by the region's cloud, answers by the averager's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from geo_ray.planning.tradeoffs import BITS_PER_PARAM
from geo_ray.transport.links.table import LinkTable


@dataclass(frozen=True, slots=True)
class Exchange:
    """One exchange of all regions with an averager.

    Attributes:
        averager: its region.
        codec: of the updates; None for fp32.
        seconds_by_region: that each region takes, in the order of the regions.
        up_bytes: of each region.
        down_bytes: to each region.
        usd_by_region: egress both ways of each region's, in the same order.
    """

    averager: str
    codec: str | None
    seconds_by_region: tuple[float, ...]
    up_bytes: float
    down_bytes: float
    usd_by_region: tuple[float, ...]

    @property
    def usd(self) -> float:
        """The egress of all regions."""
        return sum(self.usd_by_region)

    @property
    def seconds(self) -> float:
        """The seconds of the slowest region."""
        return max(self.seconds_by_region)


def mean_of(one: Exchange, first: Exchange, rounds: int) -> Exchange:
    """Return the mean of ``rounds`` exchanges, of which the first is coded otherwise."""

    def mean(common: float, own: float) -> float:
        return common + (own - common) / rounds

    seconds = zip(one.seconds_by_region, first.seconds_by_region, strict=True)
    usd = zip(one.usd_by_region, first.usd_by_region, strict=True)
    return replace(
        one,
        seconds_by_region=tuple(mean(*each) for each in seconds),
        up_bytes=mean(one.up_bytes, first.up_bytes),
        down_bytes=mean(one.down_bytes, first.down_bytes),
        usd_by_region=tuple(mean(*each) for each in usd),
    )


def exchange(
    values: float,
    regions: Sequence[str],
    averager: str,
    codec: str | None,
    links: LinkTable,
    usd_per_gb: Mapping[tuple[str, str], float],
    overhead_s: float = 0.0,
    bits: tuple[float, float] | None = None,
) -> Exchange:
    """Time and price of one exchange.

    Args:
        values: of the model, or of the part of it that an exchange has.
        regions: all of them.
        averager: one of them.
        codec: one of `tradeoffs.BITS_PER_PARAM`.
        links: goodput and round trip of every pair with the averager.
        usd_per_gb: egress by (source, destination).
        overhead_s: of an exchange beside its bytes and the round trip: coding, handing over.
        bits: per parameter up and down; None: as of the codec.

    Raises:
        LinkUnknownError: a link was not measured; names it.
    """
    up_bits, down_bits = BITS_PER_PARAM[codec] if bits is None else bits
    up_bytes, down_bytes = values * up_bits / 8, values * down_bits / 8
    seconds, usd = [], []
    for region in regions:
        if region == averager:
            seconds.append(0.0)
            usd.append(0.0)
            continue
        there, back = links.get(region, averager), links.get(averager, region)
        sent_s = 8e-6 * up_bytes / there.goodput_mbps + 8e-6 * down_bytes / back.goodput_mbps
        seconds.append(sent_s + there.rtt_s + overhead_s)
        sent_usd = up_bytes * 1e-9 * usd_per_gb[region, averager]
        usd.append(sent_usd + down_bytes * 1e-9 * usd_per_gb[averager, region])
    return Exchange(averager, codec, tuple(seconds), up_bytes, down_bytes, tuple(usd))
