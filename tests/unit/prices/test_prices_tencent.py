"""Tencent Cloud prices, against a server on loopback that checks TC3-HMAC-SHA256."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from geo_ray.base.errors import CloudError, CloudUnreachableError
from geo_ray.prices.price_book import PriceBook
from geo_ray.prices.tencent import Tencent, fetch_egress, fetch_instances
from tests.support.cloud_servers import (
    KEY_ID,
    SECRET,
    LoopbackCloud,
    Reply,
    TencentAnswers,
    as_caller,
    quota,
    shows_no_secret,
    tencent_error,
    tencent_reply,
)
from tests.support.wan_support import leaving_nothing_behind

SHANGHAI = "ap-shanghai"
TYPE = "GN7.2XLARGE32"
SLOW = tencent_error("RequestLimitExceeded", "Your current request frequency exceeds the limit.")


@pytest.fixture(autouse=True)
def caller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    as_caller(monkeypatch, tmp_path)


@contextmanager
def asking(answers: Any, attempts: int = 3) -> Iterator[tuple[Tencent, LoopbackCloud]]:
    with leaving_nothing_behind(), LoopbackCloud(answers) as cloud:
        yield Tencent(cloud.url, attempts=attempts, pause_s=0.001, timeout_s=30), cloud


def price(**fields: float) -> dict[str, Any]:
    return {"ChargeUnit": "HOUR", **fields}


# ------------------------------------------------------------------ instances


def test_a_type_has_prices_age_tiers_and_availability_by_zone_and_market() -> None:
    aging = price(
        UnitPrice=10.0,
        UnitPriceDiscount=8.0,
        UnitPriceSecondStep=5.0,
        UnitPriceDiscountSecondStep=4.0,
        UnitPriceThirdStep=3.4,
        UnitPriceDiscountThirdStep=2.72,
    )
    items = [
        quota("ap-shanghai-2", TYPE, Price=aging),
        quota("ap-shanghai-2", TYPE, "SPOTPAID", Price=price(UnitPrice=8.0, UnitPriceDiscount=1.6)),
        quota("ap-shanghai-3", TYPE, StatusCategory="UnderStock"),
        quota("ap-shanghai-4", TYPE, Status="SOLD_OUT", StatusCategory="WithoutStock"),
        quota("ap-shanghai-2", TYPE, "PREPAID", Price={"OriginalPrice": 2500.0}),
        quota("ap-shanghai-2", "S5.LARGE8"),
        quota("ap-beijing-4", TYPE),
    ]
    with asking(TencentAnswers(items)) as (tencent, cloud):
        found = fetch_instances(tencent, SHANGHAI, [TYPE], "CNY")
    shown = [(r.zone, r.market, r.amount, r.availability) for r in found]
    assert shown == [
        ("ap-shanghai-2", "on_demand", 8.0, "enough"),
        ("ap-shanghai-2", "spot", 1.6, "enough"),
        ("ap-shanghai-3", "on_demand", 8.0, "under"),
        ("ap-shanghai-4", "on_demand", 8.0, "none"),
    ]
    tiers = [(tier.after_h, tier.factor) for tier in found[0].age_tiers]
    assert tiers == [(96, pytest.approx(0.5)), (360, pytest.approx(0.34))]
    assert found[2].age_tiers == ()
    assert {r.currency for r in found} == {"CNY"}
    (request,) = cloud.requests
    assert request.headers["x-tc-action"] == "DescribeZoneInstanceConfigInfos"
    assert request.headers["x-tc-language"] == "en-US"
    # A planner takes a zone that has it, not the one that is sold out.
    assert (
        PriceBook(records=tuple(found)).instance("tencent", SHANGHAI, TYPE).availability != "none"
    )


def test_what_has_no_price_is_left_out_and_never_free() -> None:
    items = [
        quota("ap-shanghai-2", TYPE, Price=None),
        quota("ap-shanghai-3", TYPE, Price=price()),
        quota("ap-shanghai-4", TYPE, Price=price(UnitPrice=0.0, UnitPriceDiscount=0.0)),
        quota("ap-shanghai-5", TYPE, Price=price(UnitPrice=9.0)),
    ]
    with asking(TencentAnswers(items)) as (tencent, _):
        found = fetch_instances(tencent, SHANGHAI, [TYPE], "CNY")
    assert [(r.zone, r.amount) for r in found] == [("ap-shanghai-5", 9.0)]


def test_many_types_are_asked_for_in_parts() -> None:
    names = [f"S5.SIZE{i}" for i in range(230)]
    items = [quota("ap-shanghai-2", name) for name in names]
    with asking(TencentAnswers(items)) as (tencent, cloud):
        assert len(fetch_instances(tencent, SHANGHAI, names, "CNY")) == 230
    assert len(cloud.requests) == 3


# ------------------------------------------------------------------ traffic


def test_traffic_is_priced_by_an_inquiry_for_a_type_that_is_to_be_had() -> None:
    items = [
        quota("ap-shanghai-2", TYPE, Status="SOLD_OUT"),
        quota("ap-shanghai-3", TYPE),
    ]
    per_gb = {"UnitPrice": 0.8, "UnitPriceDiscount": 0.8, "ChargeUnit": "GB"}
    with asking(TencentAnswers(items, {SHANGHAI: per_gb})) as (tencent, cloud):
        (record,) = fetch_egress(tencent, SHANGHAI, [TYPE], "CNY")
    assert (record.to, record.amount, record.unit) == ("internet", 0.8, "GB")
    asked = json.loads(cloud.requests[-1].body)
    assert asked["Placement"] == {"Zone": "ap-shanghai-3"}


def test_traffic_that_is_not_priced_per_gb_makes_no_sense() -> None:
    per_hour = {"UnitPrice": 0.8, "ChargeUnit": "HOUR"}
    answers = TencentAnswers([quota("ap-shanghai-3", TYPE)], {SHANGHAI: per_hour})
    with asking(answers) as (tencent, _), pytest.raises(CloudError, match="HOUR"):
        fetch_egress(tencent, SHANGHAI, [TYPE], "CNY")


def test_without_a_type_that_is_to_be_had_there_is_no_inquiry() -> None:
    answers = TencentAnswers([quota("ap-shanghai-3", TYPE, Status="SOLD_OUT")])
    with asking(answers) as (tencent, _), pytest.raises(CloudError, match=TYPE):
        fetch_egress(tencent, SHANGHAI, [TYPE], "CNY")


def test_what_an_inquiry_finds_sold_out_is_a_refusal() -> None:
    class SoldOut(TencentAnswers):
        def __call__(self, request: Any) -> Reply:
            reply = super().__call__(request)
            if request.headers["x-tc-action"] == "InquiryPriceRunInstances":
                return tencent_error("ResourcesSoldOut.SpecifiedInstanceType", "Sold out.")
            return reply

    answers = SoldOut([quota("ap-shanghai-3", TYPE)], {SHANGHAI: {}})
    with asking(answers) as (tencent, _), pytest.raises(CloudError, match="ResourcesSoldOut"):
        fetch_egress(tencent, SHANGHAI, [TYPE], "CNY")


# ------------------------------------------------------------------ trouble


@pytest.mark.parametrize(
    "trouble",
    [
        SLOW,
        tencent_error("RequestLimitExceeded.UinLimitExceeded", "too often"),
        tencent_error("InternalError", "An internal error occurred."),
        Reply(502, "text/html", "<html>Bad gateway</html>"),
        Reply(0, "", ""),
    ],
    ids=["slow", "account", "internal", "gateway", "hung-up"],
)
def test_what_passes_is_tried_again_and_does_not_last_for_ever(trouble: Reply) -> None:
    answers = TencentAnswers([quota("ap-shanghai-2", TYPE)], troubles=deque([trouble] * 2))
    with asking(answers) as (tencent, cloud):
        assert len(fetch_instances(tencent, SHANGHAI, [TYPE], "CNY")) == 1
        assert len(cloud.requests) == 3
        answers.troubles.extend([trouble] * 9)
        with pytest.raises(CloudUnreachableError):
            fetch_instances(tencent, SHANGHAI, [TYPE], "CNY")
        assert len(cloud.requests) == 6


def test_a_wrong_secret_is_refused_at_once_and_no_secret_is_shown() -> None:
    answers = TencentAnswers(secret=SECRET + "x")
    with asking(answers) as (tencent, cloud), pytest.raises(CloudError) as caught:
        fetch_instances(tencent, SHANGHAI, [TYPE], "CNY")
    assert len(cloud.requests) == 1
    assert "AuthFailure.SignatureFailure" in caught.value.message
    assert type(caught.value) is CloudError
    assert shows_no_secret(str(caught.value) + repr(caught.value))


@pytest.mark.parametrize(
    "reply",
    [
        Reply(200, "application/json", "not json"),
        Reply(200, "application/json", "[]"),
        Reply(200, "application/json", '{"Response": null}'),
        Reply(200, "application/json", '{"Response": {"Error": "no"}}'),
        Reply(200, "text/html", "<html>Please log in</html>"),
        tencent_reply(),
        tencent_reply(InstanceTypeQuotaSet=None),
        tencent_reply(InstanceTypeQuotaSet=[{"Zone": "ap-shanghai-2"}]),
        tencent_reply(InstanceTypeQuotaSet=[quota("ap-beijing-2", TYPE)]),
        tencent_reply(InstanceTypeQuotaSet=[quota("ap-shanghai-2", TYPE, Price=[1])]),
        tencent_reply(
            InstanceTypeQuotaSet=[quota("ap-shanghai-2", TYPE, Price=price(UnitPrice=-1))]
        ),
        tencent_reply(
            InstanceTypeQuotaSet=[
                quota("ap-shanghai-2", TYPE, Price={"UnitPrice": 1.0, "ChargeUnit": "MONTH"})
            ]
        ),
    ],
)
def test_answers_without_sense_are_errors(reply: Reply) -> None:
    answers = TencentAnswers(troubles=deque([reply] * 5))
    with asking(answers) as (tencent, _), pytest.raises(CloudError) as caught:
        fetch_instances(tencent, SHANGHAI, [TYPE], "CNY")
    assert type(caught.value) is CloudError


def test_an_error_counts_whatever_the_content_type() -> None:
    error = tencent_error("UnsupportedRegion", "not here")
    odd = error._replace(kind="application/json; charset=utf-8")
    answers = TencentAnswers(troubles=deque([odd]))
    with asking(answers) as (tencent, _), pytest.raises(CloudError, match="UnsupportedRegion"):
        fetch_instances(tencent, SHANGHAI, [TYPE], "CNY")


# ------------------------------------------------------------------ credentials


def test_credentials_may_be_in_the_file_of_the_sdk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("ID", "KEY"):
        monkeypatch.delenv(f"TENCENTCLOUD_SECRET_{name}")
    with pytest.raises(CloudError, match="no Tencent Cloud credentials"):
        Tencent()
    folder = tmp_path / ".tencentcloud"
    folder.mkdir()
    file = folder / "credentials"
    file.write_text(f"[default]\nsecret_id = {KEY_ID}\nsecret_key = {SECRET}\n")
    with asking(TencentAnswers([quota("ap-shanghai-2", TYPE)])) as (tencent, _):
        assert fetch_instances(tencent, SHANGHAI, [TYPE], "CNY")
    file.write_text("no section = 1\n")
    with pytest.raises(CloudError, match="no Tencent Cloud credentials"):
        Tencent()
