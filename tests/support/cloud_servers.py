"""Clouds on loopback: they check every request's signature and answer as the real ones do."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qsl
from xml.sax.saxutils import escape

KEY_ID = "AKIACANARYCANARY0001"
SECRET = "canary/secret+9c41d2e8"
TOKEN = "canary-session-token-77aa"


class Reply(NamedTuple):
    status: int
    kind: str
    body: str


@dataclass(frozen=True)
class Request:
    """What arrived; header names are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class LoopbackCloud:
    """A server on a free port of 127.0.0.1, for a ``with``; nothing of it is left afterwards."""

    def __init__(self, answer: Callable[[Request], Reply]) -> None:
        self.requests: list[Request] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:  # noqa: N805
                size = int(handler.headers.get("Content-Length", 0))
                headers = {name.lower(): value for name, value in handler.headers.items()}
                request = Request("POST", handler.path, headers, handler.rfile.read(size))
                self.requests.append(request)
                reply = answer(request)
                if reply.status == 0:  # hang up without a word
                    return
                data = reply.body.encode()
                handler.send_response(reply.status)
                handler.send_header("Content-Type", reply.kind)
                handler.send_header("Content-Length", str(len(data)))
                handler.end_headers()
                handler.wfile.write(data)

            def log_message(handler, format: str, *args: object) -> None:  # noqa: N805
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def hmac_sha256(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()


# ------------------------------------------------------------------ AWS


def sigv4_scope(request: Request, secret: str) -> tuple[str, str] | None:
    """Region and service that a request is signed for; None if its signature is wrong."""
    found = re.fullmatch(
        r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d{8})/([^/]+)/([^/]+)/aws4_request, "
        r"SignedHeaders=([^,]+), Signature=([0-9a-f]{64})",
        request.headers.get("authorization", ""),
    )
    if found is None:
        return None
    key_id, day, region, service, names, signature = found.groups()
    if key_id != KEY_ID or not {"host", "x-amz-date"} <= set(names.split(";")):
        return None
    headers = "".join(f"{n}:{' '.join(request.headers[n].split())}\n" for n in names.split(";"))
    digest = hashlib.sha256(request.body).hexdigest()
    canonical = "\n".join([request.method, request.path, "", headers, names, digest])
    scope = f"{day}/{region}/{service}/aws4_request"
    hashed = hashlib.sha256(canonical.encode()).hexdigest()
    text = "\n".join(["AWS4-HMAC-SHA256", request.headers["x-amz-date"], scope, hashed])
    key = f"AWS4{secret}".encode()
    for part in (day, region, service, "aws4_request"):
        key = hmac_sha256(key, part)
    good = hmac.compare_digest(hmac_sha256(key, text).hex(), signature)
    return (region, service) if good else None


def pricing_error(code: str, text: str, status: int = 400) -> Reply:
    body = {"__type": f"com.amazonaws.pricing#{code}", "Message": text}
    return Reply(status, "application/x-amz-json-1.1", json.dumps(body))


def ec2_error(code: str, text: str, status: int = 400) -> Reply:
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>\n<Response><Errors><Error>'
        f"<Code>{code}</Code><Message>{escape(text)}</Message></Error></Errors>"
        "<RequestID>ea966190-f9aa-478e-9ede-example</RequestID></Response>"
    )
    return Reply(status, "text/xml;charset=UTF-8", body)


def product(attributes: dict[str, str], *steps: tuple[str, str, str], money: str = "USD") -> str:
    """An item of a price list; steps are unit, begin and price."""
    sku = hashlib.sha256(json.dumps(attributes).encode()).hexdigest()[:16].upper()
    parts = {
        f"{sku}.JRTCKXETXF.{number}": {
            "unit": unit,
            "beginRange": begin,
            "endRange": "Inf",
            "description": "as listed",
            "appliesTo": [],
            "rateCode": f"{sku}.JRTCKXETXF.{number}",
            "pricePerUnit": {money: price},
        }
        for number, (unit, begin, price) in enumerate(steps)
    }
    term = {"priceDimensions": parts, "sku": sku, "offerTermCode": "JRTCKXETXF"}
    terms = {"OnDemand": {f"{sku}.JRTCKXETXF": term}}
    listed = {"product": {"attributes": attributes, "sku": sku}, "terms": terms}
    return json.dumps({**listed, "serviceCode": "AmazonEC2", "version": "20261120000000"})


def instance_product(region: str, type_: str, price: str, money: str = "USD", **more: str) -> str:
    attributes = {
        "regionCode": region,
        "instanceType": type_,
        "operatingSystem": "Linux",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
        "marketoption": "OnDemand",
        "tenancy": "Shared",
        **more,
    }
    return product(attributes, ("Hrs", "0", price), money=money)


@dataclass
class AwsAnswers:
    """EC2 and the Price List service.

    Attributes:
        products: of the price list.
        spot: region, zone, type, price and time each.
        troubles: replies that come first, whatever is asked.
        page: items per page.
    """

    products: list[str] = field(default_factory=list)
    spot: list[tuple[str, str, str, str, str]] = field(default_factory=list)
    troubles: deque[Reply] = field(default_factory=deque)
    page: int = 2
    secret: str = SECRET
    refused_regions: set[str] = field(default_factory=set)

    def __call__(self, request: Request) -> Reply:
        is_pricing = "x-amz-target" in request.headers
        scope = sigv4_scope(request, self.secret)
        if scope is None:
            text = f"The signature does not match. x-amz-security-token:{TOKEN} {KEY_ID}"
            if is_pricing:
                return pricing_error("InvalidSignatureException", text)
            return ec2_error("AuthFailure", text, 401)
        if self.troubles:
            return self.troubles.popleft()
        region, service = scope
        assert service == ("pricing" if is_pricing else "ec2")
        return self._products(request) if is_pricing else self._history(request, region)

    def _products(self, request: Request) -> Reply:
        assert request.headers["x-amz-target"] == "AWSPriceListService.GetProducts"
        asked = json.loads(request.body)
        filters = {part["Field"]: part["Value"] for part in asked["Filters"]}
        assert all(part["Type"] == "TERM_MATCH" for part in asked["Filters"])
        if filters.get("regionCode") in self.refused_regions:
            return pricing_error("AccessDeniedException", "not authorized: pricing:GetProducts")
        found = []
        for text in self.products:
            attributes = json.loads(text)["product"]["attributes"]
            if all(attributes.get(k, v) == v for k, v in filters.items()):
                kind = "AWSDataTransfer" if "transferType" in attributes else "AmazonEC2"
                found += [text] if kind == asked["ServiceCode"] else []
        begin = int(asked.get("NextToken", "0"))
        body: dict[str, Any] = {"FormatVersion": "aws_v1"}
        body["PriceList"] = found[begin : begin + self.page]
        if begin + self.page < len(found):
            body["NextToken"] = str(begin + self.page)
        return Reply(200, "application/x-amz-json-1.1", json.dumps(body))

    def _history(self, request: Request, region: str) -> Reply:
        asked = dict(parse_qsl(request.body.decode()))
        assert asked["Action"] == "DescribeSpotPriceHistory" and "StartTime" in asked
        assert asked["ProductDescription.1"] == "Linux/UNIX"
        if region in self.refused_regions:
            return ec2_error("UnauthorizedOperation", "You are not authorized.", 403)
        types = {value for name, value in asked.items() if name.startswith("InstanceType.")}
        found = [row for row in self.spot if row[0] == region and row[2] in types]
        begin = int(asked.get("NextToken", "0"))
        items = "".join(
            f"<item><instanceType>{type_}</instanceType>"
            "<productDescription>Linux/UNIX</productDescription>"
            f"<spotPrice>{price}</spotPrice><timestamp>{at}</timestamp>"
            f"<availabilityZone>{zone}</availabilityZone></item>"
            for _, zone, type_, price, at in found[begin : begin + self.page]
        )
        token = str(begin + self.page) if begin + self.page < len(found) else ""
        body = (
            '<?xml version="1.0" encoding="UTF-8"?>\n<DescribeSpotPriceHistoryResponse '
            'xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><requestId>59dbff89</requestId>'
            f"<spotPriceHistorySet>{items}</spotPriceHistorySet><nextToken>{token}</nextToken>"
            "</DescribeSpotPriceHistoryResponse>"
        )
        return Reply(200, "text/xml;charset=UTF-8", body)


# ------------------------------------------------------------------ Tencent Cloud


def tc3_is_right(request: Request, secret: str, product: str = "cvm") -> bool:
    """Whether a request to a product is signed with a secret."""
    found = re.fullmatch(
        r"TC3-HMAC-SHA256 Credential=([^/]+)/([\d-]+)/" + product + "/tc3_request, "
        r"SignedHeaders=content-type;host, Signature=([0-9a-f]{64})",
        request.headers.get("authorization", ""),
    )
    stamp = request.headers.get("x-tc-timestamp", "0")
    day = datetime.fromtimestamp(int(stamp), UTC).strftime("%Y-%m-%d")
    if found is None or found[1] != KEY_ID or found[2] != day:
        return False
    headers = f"content-type:{request.headers['content-type']}\nhost:{request.headers['host']}\n"
    digest = hashlib.sha256(request.body).hexdigest()
    canonical = "\n".join(["POST", "/", "", headers, "content-type;host", digest])
    hashed = hashlib.sha256(canonical.encode()).hexdigest()
    text = "\n".join(["TC3-HMAC-SHA256", stamp, f"{day}/{product}/tc3_request", hashed])
    key = f"TC3{secret}".encode()
    for part in (day, product, "tc3_request"):
        key = hmac_sha256(key, part)
    return hmac.compare_digest(hmac_sha256(key, text).hex(), found[3])


def tencent_reply(**holds: Any) -> Reply:
    body = {"Response": {**holds, "RequestId": "3c140219-cfe9-470e-b241-907877d6fb03"}}
    return Reply(200, "application/json", json.dumps(body))


def tencent_error(code: str, text: str) -> Reply:
    return tencent_reply(Error={"Code": code, "Message": text})


def quota(zone: str, type_: str, charge: str = "POSTPAID_BY_HOUR", **more: Any) -> dict[str, Any]:
    """An ``InstanceTypeQuotaItem``."""
    price = {"UnitPrice": 8.0, "ChargeUnit": "HOUR", "UnitPriceDiscount": 8.0, "Discount": 100.0}
    return {
        "Zone": zone,
        "InstanceType": type_,
        "InstanceChargeType": charge,
        "Cpu": 8,
        "Memory": 32,
        "InstanceFamily": type_.split(".")[0],
        "Status": "SELL",
        "StatusCategory": "EnoughStock",
        "Price": price,
        **more,
    }


@dataclass
class TencentAnswers:
    """CVM.

    Attributes:
        items: of `DescribeZoneInstanceConfigInfos`.
        traffic: the ``BandwidthPrice`` by region.
        troubles: replies that come first, whatever is asked.
    """

    items: list[dict[str, Any]] = field(default_factory=list)
    traffic: dict[str, dict[str, Any]] = field(default_factory=dict)
    troubles: deque[Reply] = field(default_factory=deque)
    secret: str = SECRET
    refused_regions: set[str] = field(default_factory=set)

    def __call__(self, request: Request) -> Reply:
        if not tc3_is_right(request, self.secret):
            text = f"The provided credentials could not be validated. {KEY_ID} {TOKEN}"
            return tencent_error("AuthFailure.SignatureFailure", text)
        assert request.headers["x-tc-version"] == "2017-03-12"
        if self.troubles:
            return self.troubles.popleft()
        region, asked = request.headers["x-tc-region"], json.loads(request.body)
        if region in self.refused_regions:
            return tencent_error("UnsupportedRegion", f"{region} is not supported.")
        match request.headers["x-tc-action"]:
            case "DescribeZoneInstanceConfigInfos":
                return self._quotas(region, asked)
            case "DescribeImages":
                assert asked["Filters"] == [{"Name": "image-type", "Values": ["PUBLIC_IMAGE"]}]
                return tencent_reply(ImageSet=[{"ImageId": "img-canary01"}], TotalCount=1)
            case "InquiryPriceRunInstances":
                assert asked["ImageId"] == "img-canary01"
                assert asked["Placement"]["Zone"].startswith(region)
                assert asked["InternetAccessible"]["InternetChargeType"] == (
                    "TRAFFIC_POSTPAID_BY_HOUR"
                )
                price = {"InstancePrice": {}, "BandwidthPrice": self.traffic[region]}
                return tencent_reply(Price=price)
        return tencent_error("InvalidAction", "The request action is unknown.")

    def _quotas(self, region: str, asked: dict[str, Any]) -> Reply:
        filters = {part["Name"]: part["Values"] for part in asked["Filters"]}
        assert all(len(values) <= 100 for values in filters.values())
        found = [
            item
            for item in self.items
            if item["Zone"].startswith(region)
            and item["InstanceType"] in filters["instance-type"]
            and item["InstanceChargeType"] in filters["instance-charge-type"]
        ]
        return tencent_reply(InstanceTypeQuotaSet=found)


# ------------------------------------------------------------------ the caller's side


def as_caller(monkeypatch: Any, home: Path) -> None:
    """The environment of somebody whose credentials the servers know."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "TENCENTCLOUD_", "GEO_RAY_")) or "_proxy" in name.lower():
            monkeypatch.delenv(name)
    for name, value in {
        "HOME": str(home),
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": TOKEN,
        "AWS_EC2_METADATA_DISABLED": "true",
        "TENCENTCLOUD_SECRET_ID": KEY_ID,
        "TENCENTCLOUD_SECRET_KEY": SECRET,
        "TENCENTCLOUD_TOKEN": TOKEN,
    }.items():
        monkeypatch.setenv(name, value)


def shows_no_secret(text: str) -> bool:
    return not any(secret in text for secret in (SECRET, TOKEN, KEY_ID))
