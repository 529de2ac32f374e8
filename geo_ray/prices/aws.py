"""AWS through boto3: bounded calls; on-demand, spot and data transfer prices.

Throttled calls are retried, and every failure is a typed error. Credentials come only from boto3's
chain (environment, ``~/.aws``, role of the machine). They are read again when AWS refuses them, so
keys rotated in ``~/.aws`` need no restart.

The names of the data transfer price list, its attributes and their values are reconstructed: they
were tested with a server that imitates AWS as documented, never with AWS.
"""

# The SDK ships no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from operator import attrgetter
from typing import Any, Final, TypeVar

from geo_ray.base.errors import CloudError, CloudUnreachableError
from geo_ray.prices.price import INTERNET, PriceRecord, VolumeTier
from geo_ray.prices.query import Query, amount_of, making_sense, quoted
from geo_ray.storage.bucket import invalid_answers, keys_of, may_have_expired, new_session

T = TypeVar("T")

CREDENTIALS_FIX: Final = (
    "Give the machine a role, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile in "
    "~/.aws."
)

_PAGE: Final = 100
_MOST_PAGES: Final = 1000
_SERVER_ERROR: Final = 500
_LASTING: Final = frozenset({"InsufficientInstanceCapacity", "InsufficientCapacity"})
SLOW_DOWN: Final = frozenset(
    {
        "EC2ThrottledException",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestThrottledException",
        "SlowDown",
        "ThrottledException",
        "Throttling",
        "ThrottlingException",
        "TooManyRequestsException",
    }
)


class Aws:
    """An AWS account.

    Creating a client is expensive, so one client per service and region is cached.

    Args:
        endpoints: endpoint overrides by service.
        attempts: attempts per request, including the first.
        timeout_s: timeout of connecting and of each read.

    Raises:
        CloudError: there are no credentials.
    """

    def __init__(
        self, endpoints: Mapping[str, str], *, attempts: int = 5, timeout_s: float = 20.0
    ) -> None:
        from botocore.exceptions import BotoCoreError  # slow import

        self._endpoints = dict(endpoints)
        self._attempts = attempts
        self._timeout_s = timeout_s
        self._making = threading.Lock()
        self._clients: dict[tuple[str, str], Any] = {}
        try:
            self._session = new_session()
            frozen = keys_of(self._session)
        except BotoCoreError as error:
            raise CloudError(
                f"AWS credentials cannot be loaded: {type(error).__name__}", fix=CREDENTIALS_FIX
            ) from None
        if frozen is None:
            raise CloudError("no AWS credentials were found", fix=CREDENTIALS_FIX)
        self._secrets: tuple[str | None, ...] = _secrets_of(frozen)

    def listed(
        self, service: str, region: str, operation: str, key: str, **arguments: Any
    ) -> list[Any]:
        """Return the items of all pages of a reply; see `call` for errors.

        Args:
            service: boto3 name of the service.
            region: region to query.
            operation: boto3 client method with pagination.
            key: key of the list in each page.
            **arguments: arguments of the operation.
        """
        place = f"aws {service} in {region}"

        def pages(client: Any) -> list[Any]:
            pages = client.get_paginator(operation).paginate(
                **arguments, PaginationConfig={"PageSize": _PAGE}
            )
            found: list[Any] = []
            for number, page in enumerate(pages):
                items = page.get(key)
                if not isinstance(items, list) or number == _MOST_PAGES:
                    wrong = f"no {key}" if number < _MOST_PAGES else "pages without end"
                    raise CloudError(f"{place}: the answer is not valid ({wrong})")
                found += items
            return found

        return self._ask(place, service, region, pages)

    def call(self, service: str, region: str, operation: str, **arguments: Any) -> dict[str, Any]:
        """Call one operation and return its reply.

        Args:
            service: boto3 name of the service.
            region: region to query.
            operation: boto3 client method.
            **arguments: arguments of the operation.

        Raises:
            CloudUnreachableError: there was no reply, or the last attempt was throttled.
            CloudError: AWS refused the call, or its reply is invalid.
        """
        place = f"aws {service} {operation} in {region}"
        return self._ask(
            place, service, region, lambda client: dict(getattr(client, operation)(**arguments))
        )

    def _ask(self, place: str, service: str, region: str, ask: Callable[[Any], T]) -> T:
        """Send requests with a client; retry with another one if the credentials have changed."""
        from botocore.exceptions import ClientError

        with self._answering(place):
            session = self._session
            try:
                return ask(self._client(service, region))
            except ClientError as error:
                if not may_have_expired(error) or not self._renew_credentials(session):
                    raise
            return ask(self._client(service, region))

    def _renew_credentials(self, refused: Any) -> bool:
        """Read the credentials again; return whether they differ from those of a session."""
        with self._making:
            if self._session is refused:
                session = new_session()
                keys = keys_of(session)
                if keys is None or keys == keys_of(refused):
                    return False
                # a late reply to the old keys may still quote them
                self._secrets = (*_secrets_of(keys), *_secrets_of(keys_of(refused)))
                self._session = session
                self._clients.clear()
            return True

    @contextmanager
    def _answering(self, place: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
        from botocore.exceptions import ConnectionError as BotoConnectionError

        try:
            yield
        except ClientError as error:
            raise self._refusal(place, error.response) from None
        except (BotoConnectionError, HTTPClientError) as error:
            # the SDK's text is omitted: it may quote signed URLs
            raise CloudUnreachableError(f"{place} did not answer: {type(error).__name__}") from None
        except BotoCoreError as error:
            raise CloudError(f"{place}: {type(error).__name__}") from None
        except invalid_answers() as error:
            raise CloudError(f"{place}: the answer is not valid ({type(error).__name__})") from None

    def _client(self, service: str, region: str) -> Any:
        from botocore.config import Config

        with self._making:  # clients are thread-safe, their creation is not
            client = self._clients.get((service, region))
            if client is None:
                client = self._session.client(
                    service,
                    region_name=region,
                    endpoint_url=self._endpoints.get(service),
                    config=Config(
                        connect_timeout=self._timeout_s,
                        read_timeout=self._timeout_s,
                        retries={"mode": "standard", "total_max_attempts": self._attempts},
                    ),
                )
                self._clients[service, region] = client
            return client

    def _refusal(self, place: str, response: Mapping[str, Any]) -> CloudError:
        said = response.get("Error", {})
        code = quoted(str(said.get("Code", "unknown")), self._secrets)
        text = quoted(str(said.get("Message", "")), self._secrets)
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code in SLOW_DOWN:
            found: CloudError = CloudUnreachableError(f"{place} throttled the last attempt: {code}")
        elif status >= _SERVER_ERROR and code not in _LASTING:
            found = CloudUnreachableError(f"{place} failed at the last attempt: {code}: {text}")
        else:
            found = CloudError(f"{place} refused: {code}: {text}")
        found.said = code
        return found


def _secrets_of(keys: Any) -> tuple[str | None, ...]:
    return keys.secret_key, keys.token, keys.access_key


PRICE_LIST_SOURCE: Final = "AWS Price List"
PRICE_LIST_VALID_FOR_S: Final = 30 * 86400.0

_FILTERS: Final = {
    "operatingSystem": "Linux",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",
    "tenancy": "Shared",
    "productFamily": "Compute Instance",
}


def fetch_on_demand(aws: Aws, region: str, types: Sequence[str]) -> list[PriceRecord]:
    """Return Linux prices with shared tenancy; types that are not offered are omitted.

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
                    amount=max(amounts),  # several products per type: the most expensive
                    currency=currency,
                    unit="hour",
                    source=PRICE_LIST_SOURCE,
                    fetched_at=datetime.now(UTC),
                    valid_for_s=PRICE_LIST_VALID_FOR_S,
                )
                records.append(record)
    return records


def currency_of(region: str) -> str:
    """Return the currency in which AWS bills a region."""
    return "CNY" if region.startswith("cn-") else "USD"


def products(
    aws: Aws, region: str, service_code: str, filters: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """Return the products of the price list with all these attributes.

    Raises:
        CloudError: see `Aws.listed`.
        ValueError: a product is not a JSON object.
    """
    found = aws.listed(
        "pricing",
        # few regions have this service; its data cover all regions of the partition
        "cn-northwest-1" if region.startswith("cn-") else "us-east-1",
        "get_products",
        "PriceList",
        ServiceCode=service_code,
        FormatVersion="aws_v1",
        Filters=[{"Type": "TERM_MATCH", "Field": k, "Value": v} for k, v in filters.items()],
    )
    for text in found:
        product = json.loads(text)
        # the service may ignore unknown filters, so attributes are compared again
        attributes = product["product"]["attributes"]
        if all(attributes.get(key, value) == value for key, value in filters.items()):
            yield product


def dimensions(product: dict[str, Any], currency: str) -> Iterator[tuple[str, float, float]]:
    """Return a product's on-demand prices: unit, lower bound of the volume, amount; never 0.

    Raises:
        ValueError: an amount is not a number.
    """
    for term in product["terms"].get("OnDemand", {}).values():
        for part in term["priceDimensions"].values():
            amount = amount_of(part["pricePerUnit"].get(currency))
            if amount is not None:
                yield part["unit"], float(part.get("beginRange", 0)), amount


SPOT_SOURCE: Final = "AWS spot price history"
SPOT_VALID_FOR_S: Final = 12 * 3600.0


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
        StartTime=now,  # with the current time, the reply has the current price
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
                source=SPOT_SOURCE,
                fetched_at=now,
                valid_for_s=SPOT_VALID_FOR_S,
            )
            for (type_, zone), (_, amount) in sorted(newest.items())
        ]


_REGIONS: Final = "InterRegion Outbound"
_OUTSIDE: Final = "AWS Outbound"


def fetch_transfer(aws: Aws, region: str) -> list[PriceRecord]:
    """Return a record per other region, and one for the internet.

    Raises:
        CloudError: see `Aws.listed`.
    """
    highest: dict[str, PriceRecord] = {}
    with making_sense(f"aws pricing of transfers from {region}"):
        for kind in (_REGIONS, _OUTSIDE):
            filters = {"fromRegionCode": region, "transferType": kind}
            for product in products(aws, region, "AWSDataTransfer", filters):
                record = _record(product, region, kind)
                if record is not None and record.to is not None:
                    old = highest.get(record.to, record)
                    highest[record.to] = max(old, record, key=attrgetter("amount"))
    return list(highest.values())


def _record(product: dict[str, Any], region: str, kind: str) -> PriceRecord | None:
    attributes = product["product"]["attributes"]
    to = INTERNET if kind == _OUTSIDE else attributes.get("toRegionCode")
    if not to or to == region or attributes.get("toLocationType") == "AWS Local Zone":
        return None
    currency = currency_of(region)
    # Free allowances are ignored: they belong to the account, and other jobs may use them.
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
        source=f"{PRICE_LIST_SOURCE} (AWSDataTransfer)",
        fetched_at=datetime.now(UTC),
        valid_for_s=PRICE_LIST_VALID_FOR_S,
    )


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
