"""Current spot prices of the zones of a region."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from geo_ray.clouds.aws.prices import currency_of
from geo_ray.clouds.aws.session import Aws
from geo_ray.clouds.price import PriceRecord
from geo_ray.clouds.replies import amount_of, making_sense

SOURCE: Final = "AWS spot price history"
VALID_FOR_S: Final = 12 * 3600.0


def fetch_spot(aws: Aws, region: str, types: Sequence[str]) -> list[PriceRecord]:
    """Return a record per type and zone, without local zones.

    Raises:
        CloudError: see `Aws.listed`.
    """
    now = datetime.now(UTC)
    found = aws.listed(
        "ec2",
        region,
        "describe_spot_price_history",
        "SpotPriceHistory",
        InstanceTypes=list(types),
        ProductDescriptions=["Linux/UNIX"],
        StartTime=now,  # with the present time, the answer is the present price
    )
    whole_zone = re.compile(re.escape(region) + "[a-z]")
    newest: dict[tuple[str, str], tuple[datetime, float]] = {}
    with making_sense(f"aws ec2 in {region}"):
        for item in found:
            key = (item["InstanceType"], item["AvailabilityZone"])
            amount = amount_of(item["SpotPrice"])
            if amount is None or key[0] not in types or not whole_zone.fullmatch(key[1]):
                continue
            newest[key] = max(
                newest.get(key, (item["Timestamp"], amount)), (item["Timestamp"], amount)
            )
        return [
            PriceRecord(
                cloud="aws",
                region=region,
                zone=zone,
                type=type_,
                market="spot",
                amount=amount,
                currency=currency_of(region),
                unit="hour",
                source=SOURCE,
                fetched_at=now,
                valid_for_s=VALID_FOR_S,
            )
            for (type_, zone), (_, amount) in sorted(newest.items())
        ]
