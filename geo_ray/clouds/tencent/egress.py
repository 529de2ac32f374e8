"""The price per GB to the internet in a region of Tencent Cloud, by a mere inquiry."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from geo_ray.clouds.price import INTERNET, PriceRecord
from geo_ray.clouds.replies import making_sense
from geo_ray.clouds.tencent.prices import fetch_instances, paid
from geo_ray.clouds.tencent.session import Tencent
from geo_ray.errors import CloudError

VALID_FOR_S: Final = 30 * 86400.0

_ACTION: Final = "InquiryPriceRunInstances"


def fetch_egress(
    tencent: Tencent, region: str, types: Sequence[str], currency: str
) -> list[PriceRecord]:
    """Return the price by traffic for an instance of one of ``types``.

    Raises:
        CloudError: see `Tencent.call`; or none of the types is available there.
    """
    sold = [
        record
        for record in fetch_instances(tencent, region, types, currency)
        if record.market == "on_demand" and record.stock != "none"
    ]
    if not sold:
        raise CloudError(
            f"tencent {region}: the price of traffic is asked for an instance, and none of "
            f"{', '.join(types)} is to be had",
            fix="Name another type with --types.",
        )
    zone, type_ = sold[0].zone, sold[0].type
    reply = tencent.call(
        region,
        _ACTION,
        {
            "Placement": {"Zone": zone},
            "ImageId": _image(tencent, region, str(type_)),
            "InstanceType": type_,
            "InstanceChargeType": "POSTPAID_BY_HOUR",
            "InternetAccessible": {
                "InternetChargeType": "TRAFFIC_POSTPAID_BY_HOUR",
                "InternetMaxBandwidthOut": 1,
            },
        },
    )
    with making_sense(f"tencent {_ACTION} in {region}"):
        price = reply["Price"]["BandwidthPrice"]
        amount = paid(price)
        if price["ChargeUnit"] != "GB":
            raise ValueError(f"traffic is priced per {price['ChargeUnit']}")
        if amount is None:
            return []
        record = PriceRecord(
            cloud="tencent",
            region=region,
            item="egress",
            to=INTERNET,
            amount=amount,
            currency=currency,
            unit="GB",
            source=f"Tencent Cloud {_ACTION}",
            fetched_at=datetime.now(UTC),
            valid_for_s=VALID_FOR_S,
        )
    return [record]


def _image(tencent: Tencent, region: str, type_: str) -> str:
    """Return any public image: an inquiry needs one, and its price is not used."""
    filters = [{"Name": "image-type", "Values": ["PUBLIC_IMAGE"]}]
    reply = tencent.call(
        region, "DescribeImages", {"Filters": filters, "InstanceType": type_, "Limit": 1}
    )
    with making_sense(f"tencent DescribeImages in {region}"):
        return str(reply["ImageSet"][0]["ImageId"])
