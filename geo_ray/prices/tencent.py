"""Tencent Cloud through its SDK: bounded calls; prices of instances and egress.

Throttled calls are retried, and every failure is a typed error. Credentials come only from the
places of the SDK: TENCENTCLOUD_SECRET_ID and TENCENTCLOUD_SECRET_KEY (and TENCENTCLOUD_TOKEN), or
``~/.tencentcloud/credentials``. The role of the machine is used only if GEO_RAY_TENCENT_METADATA is
set: elsewhere the SDK would wait for it without a timeout.
"""

# The SDK ships no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from configparser import Error as ConfigParserError
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

from geo_ray.base.errors import CloudError, CloudUnreachableError
from geo_ray.prices.price import INTERNET, AgeTier, Availability, Market, PriceRecord
from geo_ray.prices.query import Query, amount_of, making_sense, quoted

METADATA_VARIABLE: Final = "GEO_RAY_TENCENT_METADATA"
"""URL of the metadata service; set on machines of Tencent Cloud only."""

_PATH: Final = "/latest/meta-data/cam/security-credentials/"
_LONGEST_S: Final = 5.0
_MOST_BYTES: Final = 65536


def role_credentials(url: str) -> tuple[str, str, str]:
    """Return key id, key and token of the machine's role; valid for hours.

    Raises:
        CloudError: the machine has no role, or the service does not answer.
    """
    try:
        name = _read(url + _PATH).splitlines()[0].strip()
        answer = json.loads(_read(url + _PATH + name))
        return str(answer["TmpSecretId"]), str(answer["TmpSecretKey"]), str(answer["Token"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise CloudError(
            f"the role of the machine cannot be read at {url}: {type(error).__name__}",
            fix="Attach a CAM role to the machine that may read the cluster's secrets.",
        ) from None


def _read(url: str) -> str:
    with build_opener(ProxyHandler({})).open(url, timeout=_LONGEST_S) as reply:
        return str(reply.read(_MOST_BYTES).decode())


CREDENTIALS_FIX: Final = (
    "Set TENCENTCLOUD_SECRET_ID and TENCENTCLOUD_SECRET_KEY, or write ~/.tencentcloud/credentials."
)

_VERSIONS: Final = {"cvm": "2017-03-12", "ssm": "2019-09-23"}
SLOW_DOWN: Final = "RequestLimitExceeded"
_AGAIN: Final = ("ClientNetworkError", "ServerNetworkError", "InternalError", "InternalServerError")


class Tencent:
    """A Tencent Cloud account.

    Args:
        endpoint: endpoint override, or None.
        attempts: attempts per request, including the first.
        pause_s: seconds before the second attempt; doubles, with jitter.
        timeout_s: timeout of connecting and of each read.

    Raises:
        CloudError: there are no credentials.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        attempts: int = 5,
        pause_s: float = 1.0,
        timeout_s: float = 20.0,
    ) -> None:
        self._endpoint = urlsplit(endpoint) if endpoint else None
        self._attempts = attempts
        self._pause_s = pause_s
        self._timeout_s = timeout_s
        self._credential = _credential()

    def call(
        self, region: str, action: str, parameters: dict[str, Any], product: str = "cvm"
    ) -> dict[str, Any]:
        """Call one action and return its reply.

        Raises:
            CloudUnreachableError: there was no reply, or the last attempt was throttled.
            CloudError: the call was refused, or its reply is invalid.
        """
        for attempt in range(1, self._attempts):
            try:
                return self._once(region, action, parameters, product)
            except CloudUnreachableError:
                time.sleep(self._pause_s * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
        return self._once(region, action, parameters, product)

    def _once(
        self, region: str, action: str, parameters: dict[str, Any], product: str
    ) -> dict[str, Any]:
        from tencentcloud.common.exception.tencent_cloud_sdk_exception import (
            TencentCloudSDKException,
        )

        place = f"tencent {action} in {region}"
        try:
            with making_sense(place):
                # the SDK checks only two content types for errors; this checks all
                reply = self._client(region, product).call_json(action, parameters)["Response"]
                error = reply.get("Error")
                if error is None:
                    return dict(reply)
                code, text = error["Code"], error["Message"]
        except TencentCloudSDKException as error:
            code, text = error.get_code(), error.get_message()
        except OSError as error:  # the SDK does not wrap errors of interrupted bodies
            code, text = "ClientNetworkError", type(error).__name__
        raise self._refusal(place, str(code), str(text))

    def _client(self, region: str, product: str) -> Any:
        """Return a client of a region without persistent connections."""
        from tencentcloud.common.common_client import CommonClient
        from tencentcloud.common.profile.client_profile import ClientProfile
        from tencentcloud.common.profile.http_profile import HttpProfile

        there = self._endpoint
        http = HttpProfile(
            protocol=there.scheme if there else "https",
            endpoint=there.netloc if there else None,
            reqTimeout=self._timeout_s,
        )
        profile = ClientProfile(httpProfile=http, language="en-US")
        return CommonClient(product, _VERSIONS[product], self._credential, region, profile)

    def _refusal(self, place: str, code: str, text: str) -> CloudError:
        known = self._credential.get_credential_info()
        code, text = quoted(code, known), quoted(text, known)
        if code.startswith(SLOW_DOWN):
            text = f"{place}: throttled the last attempt: {code}"
            found: CloudError = CloudUnreachableError(text)
        elif code == "ClientNetworkError":  # its text quotes connection internals
            found = CloudUnreachableError(f"{place}: no reply to the last attempt")
        elif code in _AGAIN:
            found = CloudUnreachableError(f"{place}: failed at the last attempt: {code}: {text}")
        else:
            found = CloudError(f"{place} refused: {code}: {text}")
        found.said = code
        return found


def _credential() -> Any:
    from tencentcloud.common.credential import Credential, ProfileCredential
    from tencentcloud.common.exception.tencent_cloud_sdk_exception import TencentCloudSDKException

    id_ = os.environ.get("TENCENTCLOUD_SECRET_ID")
    key = os.environ.get("TENCENTCLOUD_SECRET_KEY")
    try:
        if metadata := os.environ.get(METADATA_VARIABLE):
            return Credential(*role_credentials(metadata))
        if id_ and key:
            return Credential(id_, key, os.environ.get("TENCENTCLOUD_TOKEN"))
        found = ProfileCredential().get_credential()
    except (TencentCloudSDKException, OSError, AttributeError, ValueError, ConfigParserError):
        found = None  # the SDK's text is omitted, since it may repeat secrets
    if found is None:
        raise CloudError("no Tencent Cloud credentials were found", fix=CREDENTIALS_FIX)
    return found


INSTANCE_VALID_FOR_S: Final = 12 * 3600.0
"""Validity of spot and on-demand prices, whose availability changes quickly."""

MARKETS: Final[dict[str, Market]] = {"POSTPAID_BY_HOUR": "on_demand", "SPOTPAID": "spot"}

_PRICE_ACTION: Final = "DescribeZoneInstanceConfigInfos"
_MOST_VALUES: Final = 100
_STEPS: Final = ((96.0, "SecondStep"), (360.0, "ThirdStep"))
_AVAILABILITY: Final[dict[str, Availability]] = {
    "EnoughStock": "enough",
    "NormalStock": "normal",
    "UnderStock": "under",
    "WithoutStock": "none",
}


def fetch_instances(
    tencent: Tencent, region: str, types: Sequence[str], currency: str
) -> list[PriceRecord]:
    """Return a record per type, zone and market, including sold-out ones.

    Raises:
        CloudError: see `Tencent.call`.
    """
    records = []
    for begin in range(0, len(types), _MOST_VALUES):
        some = types[begin : begin + _MOST_VALUES]
        filters = {"instance-type": list(some), "instance-charge-type": list(MARKETS)}
        reply = tencent.call(
            region,
            _PRICE_ACTION,
            {"Filters": [{"Name": name, "Values": values} for name, values in filters.items()]},
        )
        with making_sense(f"tencent {_PRICE_ACTION} in {region}"):
            for item in reply["InstanceTypeQuotaSet"]:
                if item["InstanceType"] in some and item["InstanceChargeType"] in MARKETS:
                    records += list(_records(item, region, currency))
    return records


def paid(price: Mapping[str, Any], step: str = "") -> float | None:
    """Return the price per unit, with the account's discount if there is one.

    Args:
        price: an ``ItemPrice``.
        step: suffix of an instance's age step, such as ``SecondStep``.

    Raises:
        ValueError: an amount is not a number.
    """
    return amount_of(price.get(f"UnitPriceDiscount{step}")) or amount_of(
        price.get(f"UnitPrice{step}")
    )


def _records(item: Mapping[str, Any], region: str, currency: str) -> Iterator[PriceRecord]:
    price, zone = item.get("Price") or {}, item["Zone"]
    if not zone.startswith(f"{region}-"):
        raise ValueError(f"zone {zone} is not of {region}")
    amount = paid(price)
    if amount is None:
        return
    if price.get("ChargeUnit", "HOUR") not in ("HOUR", None, ""):
        raise ValueError(f"{item['InstanceType']} is priced per {price['ChargeUnit']}")
    yield PriceRecord(
        cloud="tencent",
        region=region,
        zone=zone,
        type=item["InstanceType"],
        market=MARKETS[item["InstanceChargeType"]],
        amount=amount,
        currency=currency,
        unit="hour",
        age_tiers=tuple(_age_tiers(price, amount)),
        source=f"Tencent Cloud {_PRICE_ACTION}",
        fetched_at=datetime.now(UTC),
        valid_for_s=INSTANCE_VALID_FOR_S,
        availability=_availability(item),
    )


def _age_tiers(price: Mapping[str, Any], amount: float) -> Iterator[AgeTier]:
    for after_h, step in _STEPS:
        later = paid(price, step)
        if later is not None:
            yield AgeTier(after_h=after_h, factor=later / amount)


def _availability(item: Mapping[str, Any]) -> Availability | None:
    if item.get("Status") == "SOLD_OUT":
        return "none"
    return _AVAILABILITY.get(str(item.get("StatusCategory")))


EGRESS_VALID_FOR_S: Final = 30 * 86400.0

_EGRESS_ACTION: Final = "InquiryPriceRunInstances"


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
        if record.market == "on_demand" and record.availability != "none"
    ]
    if not sold:
        raise CloudError(
            f"tencent {region}: the price of traffic is quoted per instance, but none of "
            f"{', '.join(types)} is available",
            fix="Choose another type with --types.",
        )
    zone, type_ = sold[0].zone, sold[0].type
    reply = tencent.call(
        region,
        _EGRESS_ACTION,
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
    with making_sense(f"tencent {_EGRESS_ACTION} in {region}"):
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
            source=f"Tencent Cloud {_EGRESS_ACTION}",
            fetched_at=datetime.now(UTC),
            valid_for_s=EGRESS_VALID_FOR_S,
        )
    return [record]


def _image(tencent: Tencent, region: str, type_: str) -> str:
    """Return any public image: a price query needs one, but its price is ignored."""
    filters = [{"Name": "image-type", "Values": ["PUBLIC_IMAGE"]}]
    reply = tencent.call(
        region, "DescribeImages", {"Filters": filters, "InstanceType": type_, "Limit": 1}
    )
    with making_sense(f"tencent DescribeImages in {region}"):
        return str(reply["ImageSet"][0]["ImageId"])


SERVICES: Final = ("cvm",)


def tencent_queries(
    tencent: Tencent, types: Mapping[str, Sequence[str]], currency: str
) -> list[Query]:
    """Return the queries for on-demand and spot prices and internet egress.

    Args:
        tencent: the account.
        types: instance types by region.
        currency: billing currency of the account, which replies do not contain.
    """
    queries = []
    for region, wanted in types.items():
        names = tuple(wanted)
        ask = partial(fetch_instances, tencent, region, names, currency)
        queries.append(Query("tencent", region, "instance", tuple(MARKETS.values()), names, ask))
        ask = partial(fetch_egress, tencent, region, names, currency)
        queries.append(Query("tencent", region, "egress", ("on_demand",), (), ask))
    return queries
