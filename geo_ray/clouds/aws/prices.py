"""On-demand prices of instance types, from the Price List service."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from geo_ray.clouds.aws.session import Aws
from geo_ray.clouds.price import PriceRecord
from geo_ray.clouds.replies import amount_of, making_sense

SOURCE: Final = "AWS Price List"
VALID_FOR_S: Final = 30 * 86400.0

_FILTERS: Final = {
    "operatingSystem": "Linux",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",
    "tenancy": "Shared",
    "productFamily": "Compute Instance",
}


def fetch_on_demand(aws: Aws, region: str, types: Sequence[str]) -> list[PriceRecord]:
    """Linux, shared tenancy; a type that is not sold in the region is left out.

    Raises:
        CloudError: see `Aws.listed`.
    """
    records = []
    currency = currency_of(region)
    for type_ in types:
        filters = {"regionCode": region, "instanceType": type_, **_FILTERS}
        with making_sense(f"aws pricing of {type_} in {region}"):
            amounts = [
                amount
                for product in products(aws, region, "AmazonEC2", filters)
                for unit, _, amount in dimensions(product, currency)
                if unit == "Hrs"
            ]
            if amounts:
                record = PriceRecord(
                    cloud="aws",
                    region=region,
                    type=type_,
                    amount=max(amounts),  # several products per type: the dearest
                    currency=currency,
                    unit="hour",
                    source=SOURCE,
                    fetched_at=datetime.now(UTC),
                    valid_for_s=VALID_FOR_S,
                )
                records.append(record)
    return records


def currency_of(region: str) -> str:
    """Return the currency in which AWS bills a region."""
    return "CNY" if region.startswith("cn-") else "USD"


def products(
    aws: Aws, region: str, service_code: str, filters: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """Return the products of the price list that have all these attributes.

    Raises:
        CloudError: see `Aws.listed`.
        ValueError: one is no JSON object.
    """
    found = aws.listed(
        "pricing",
        # Few regions have this service; what it says is of all regions of the partition.
        "cn-northwest-1" if region.startswith("cn-") else "us-east-1",
        "get_products",
        "PriceList",
        ServiceCode=service_code,
        FormatVersion="aws_v1",
        Filters=[{"Type": "TERM_MATCH", "Field": k, "Value": v} for k, v in filters.items()],
    )
    for text in found:
        product = json.loads(text)
        # The service may ignore a filter that it does not know, so attributes are compared again.
        attributes = product["product"]["attributes"]
        if all(attributes.get(key, value) == value for key, value in filters.items()):
            yield product


def dimensions(product: dict[str, Any], currency: str) -> Iterator[tuple[str, float, float]]:
    """Return a product's prices on demand: unit, lower bound of the volume, amount; never 0.

    Raises:
        ValueError: an amount is not a number.
    """
    for term in product["terms"].get("OnDemand", {}).values():
        for part in term["priceDimensions"].values():
            amount = amount_of(part["pricePerUnit"].get(currency))
            if amount is not None:
                yield part["unit"], float(part.get("beginRange", 0)), amount
