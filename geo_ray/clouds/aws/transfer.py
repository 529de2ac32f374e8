"""Prices per GB of traffic that leaves a region, from the Price List service.

The names of the service, its attributes and their values are reconstructed: this was tested with a
server that imitates AWS as understood from its documents, never with AWS.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from geo_ray.clouds.aws.prices import SOURCE, VALID_FOR_S, currency_of, dimensions, products
from geo_ray.clouds.aws.session import Aws
from geo_ray.clouds.price import INTERNET, PriceRecord
from geo_ray.clouds.replies import making_sense
from geo_ray.clouds.tiers import VolumeTier

_REGIONS: Final = "InterRegion Outbound"
_OUTSIDE: Final = "AWS Outbound"


def fetch_transfer(aws: Aws, region: str) -> list[PriceRecord]:
    """Return a record per other region, and one for the internet.

    Raises:
        CloudError: see `Aws.listed`.
    """
    dearest: dict[str, PriceRecord] = {}
    with making_sense(f"aws pricing of transfers from {region}"):
        for kind in (_REGIONS, _OUTSIDE):
            filters = {"fromRegionCode": region, "transferType": kind}
            for product in products(aws, region, "AWSDataTransfer", filters):
                record = _record(product, region, kind)
                if record is not None and record.to is not None:
                    old = dearest.get(record.to, record)
                    dearest[record.to] = max(old, record, key=lambda r: r.amount)
    return list(dearest.values())


def _record(product: dict[str, Any], region: str, kind: str) -> PriceRecord | None:
    attributes = product["product"]["attributes"]
    to = INTERNET if kind == _OUTSIDE else attributes.get("toRegionCode")
    if not to or to == region or attributes.get("toLocationType") == "AWS Local Zone":
        return None
    currency = currency_of(region)
    # Free allowances are left out: they are the account's, and other jobs may have used them.
    steps = sorted(
        (begin, each) for unit, begin, each in dimensions(product, currency) if unit == "GB"
    )
    if not steps:
        return None
    return PriceRecord(
        cloud="aws",
        region=region,
        item="egress",
        to=to,
        amount=steps[0][1],
        currency=currency,
        unit="GB",
        volume_tiers=tuple(VolumeTier(above=begin, amount=each) for begin, each in steps[1:]),
        source=f"{SOURCE} (AWSDataTransfer)",
        fetched_at=datetime.now(UTC),
        valid_for_s=VALID_FOR_S,
    )
