"""AWS prices, against servers on loopback that check SigV4 and answer as AWS does."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from geo_ray.base.errors import CloudError, CloudUnreachableError
from geo_ray.prices.aws import Aws, fetch_on_demand, fetch_spot, fetch_transfer
from tests.support.cloud_servers import (
    KEY_ID,
    SECRET,
    TOKEN,
    AwsAnswers,
    LoopbackCloud,
    Reply,
    as_caller,
    ec2_error,
    instance_product,
    pricing_error,
    product,
    shows_no_secret,
)
from tests.support.wan_support import leaving_nothing_behind

SLOW_PRICING = pricing_error("ThrottlingException", "Rate exceeded")
SLOW_EC2 = ec2_error("RequestLimitExceeded", "Request limit exceeded.", 503)


@pytest.fixture(autouse=True)
def caller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    as_caller(monkeypatch, tmp_path)


@contextmanager
def asking(answers: Any, attempts: int = 2) -> Iterator[tuple[Aws, LoopbackCloud]]:
    with leaving_nothing_behind(), LoopbackCloud(answers) as cloud:
        endpoints = dict.fromkeys(("ec2", "pricing"), cloud.url)
        yield Aws(endpoints, attempts=attempts, timeout_s=30), cloud


# ------------------------------------------------------------------ on demand


def test_on_demand_prices_are_read_page_by_page() -> None:
    products = [
        instance_product("eu-west-1", "g5.xlarge", "0.0000000000", usagetype="Reservation"),
        instance_product("eu-west-1", "g5.xlarge", "0.0000000000", usagetype="UnusedBox"),
        instance_product("eu-west-1", "g5.xlarge", "1.1230000000", usagetype="BoxUsage"),
        instance_product("eu-west-1", "g5.xlarge", "9.0", tenancy="Dedicated"),
        instance_product("us-east-1", "g5.xlarge", "1.006"),
        instance_product("eu-west-1", "m5.2xlarge", "0.428"),
    ]
    with asking(AwsAnswers(products)) as (aws, cloud):
        found = fetch_on_demand(aws, "eu-west-1", ["g5.xlarge", "m5.2xlarge", "p5.48xlarge"])
    assert [(r.type, r.amount) for r in found] == [("g5.xlarge", 1.123), ("m5.2xlarge", 0.428)]
    record = found[0]
    assert (record.region, record.zone, record.market) == ("eu-west-1", None, "on_demand")
    assert (record.currency, record.unit, record.source) == ("USD", "hour", "AWS Price List")
    assert len(cloud.requests) == 4  # two pages of the first type


def test_a_region_in_china_is_billed_in_yuan_by_its_own_service() -> None:
    products = [
        instance_product("cn-north-1", "g5.xlarge", "10.5", money="CNY"),
        instance_product("cn-north-1", "m5.2xlarge", "9.9", money="USD"),  # not what is billed
    ]
    with asking(AwsAnswers(products)) as (aws, cloud):
        (record,) = fetch_on_demand(aws, "cn-north-1", ["g5.xlarge", "m5.2xlarge"])
    assert (record.amount, record.currency) == (10.5, "CNY")
    assert "/cn-northwest-1/pricing/" in cloud.requests[0].headers["authorization"]


def test_of_several_products_of_a_type_the_dearest_counts() -> None:
    prices = ("1.0", "1.5", "1.2")
    with asking(AwsAnswers([instance_product("a-b-1", "x", p) for p in prices])) as (aws, _):
        (record,) = fetch_on_demand(aws, "a-b-1", ["x"])
    assert record.amount == 1.5


# ------------------------------------------------------------------ spot


def test_spot_prices_are_those_of_the_zones_now() -> None:
    rows = [
        ("us-east-1", "us-east-1a", "g5.xlarge", "0.425000", "2026-11-20T10:00:00.000Z"),
        ("us-east-1", "us-east-1b", "g5.xlarge", "0.500000", "2026-11-20T10:00:00.000Z"),
        ("us-east-1", "us-east-1b", "g5.xlarge", "0.451000", "2026-11-20T11:00:00.000Z"),
        ("us-east-1", "us-east-1-bos-1a", "g5.xlarge", "0.1", "2026-11-20T10:00:00.000Z"),
        ("us-east-1", "us-east-1c", "g5.xlarge", "0.000000", "2026-11-20T10:00:00.000Z"),
        ("us-east-1", "us-east-1a", "m5.2xlarge", "0.14", "2026-11-20T10:00:00.000Z"),
        ("us-west-2", "us-west-2a", "g5.xlarge", "0.483", "2026-11-20T10:00:00.000Z"),
    ]
    with asking(AwsAnswers(spot=rows)) as (aws, cloud):
        found = fetch_spot(aws, "us-east-1", ["g5.xlarge", "m5.2xlarge"])
    assert [(r.zone, r.type, r.amount) for r in found] == [
        ("us-east-1a", "g5.xlarge", 0.425),
        ("us-east-1b", "g5.xlarge", 0.451),
        ("us-east-1a", "m5.2xlarge", 0.14),
    ]
    assert {r.market for r in found} == {"spot"}
    assert len(cloud.requests) == 3


def test_a_region_without_spot_prices_has_none() -> None:
    with asking(AwsAnswers()) as (aws, _):
        assert fetch_spot(aws, "us-east-1", ["g5.xlarge"]) == []


# ------------------------------------------------------------------ transfers


def transfer(src: str, dst: str, *steps: tuple[str, str, str], **more: str) -> str:
    outside = dst == "internet"
    attributes = {
        "fromRegionCode": src,
        "transferType": "AWS Outbound" if outside else "InterRegion Outbound",
        **({"toLocation": "External"} if outside else {"toRegionCode": dst}),
        **more,
    }
    return product(attributes, *steps)


def test_transfers_have_a_price_per_region_and_tiers_to_the_internet() -> None:
    products = [
        transfer("us-east-1", "us-east-2", ("GB", "0", "0.0100000000")),
        transfer("us-east-1", "eu-west-1", ("GB", "0", "0.0200000000")),
        transfer("us-east-1", "lax", ("GB", "0", "0.3"), toLocationType="AWS Local Zone"),
        transfer("eu-west-1", "us-east-1", ("GB", "0", "0.02")),
        transfer(
            "us-east-1",
            "internet",
            ("GB", "10240", "0.0850000000"),
            ("GB", "0", "0.0900000000"),
            ("GB", "51200", "0.0700000000"),
        ),
        transfer("us-east-1", "internet", ("GB", "0", "0.0000000000"), usagetype="free"),
    ]
    with asking(AwsAnswers(products)) as (aws, _):
        found = {r.to: r for r in fetch_transfer(aws, "us-east-1")}
    amounts = {to: record.amount for to, record in found.items()}
    assert amounts == {"us-east-2": 0.01, "eu-west-1": 0.02, "internet": 0.09}
    tiers = [(tier.above, tier.amount) for tier in found["internet"].volume_tiers]
    assert tiers == [(10240, 0.085), (51200, 0.07)]


def test_a_free_allowance_makes_nothing_cheaper() -> None:
    steps = (("GB", "0", "0.0000000000"), ("GB", "1", "0.0900000000"))
    with asking(AwsAnswers([transfer("us-east-1", "internet", *steps)])) as (aws, _):
        (record,) = fetch_transfer(aws, "us-east-1")
    assert (record.amount, record.volume_tiers) == (0.09, ())


# ------------------------------------------------------------------ trouble


@pytest.mark.parametrize(
    "slow", [SLOW_PRICING, SLOW_EC2, Reply(0, "", "")], ids=["json", "xml", "-"]
)
def test_who_asks_to_slow_down_is_asked_again(slow: Reply) -> None:
    answers = AwsAnswers(
        [instance_product("us-east-1", "g5.xlarge", "1.006")],
        [("us-east-1", "us-east-1a", "g5.xlarge", "0.4", "2026-11-20T10:00:00.000Z")],
        troubles=deque([slow]),
    )
    with asking(answers) as (aws, cloud):
        if slow is SLOW_PRICING:
            (record,) = fetch_on_demand(aws, "us-east-1", ["g5.xlarge"])
        else:
            (record,) = fetch_spot(aws, "us-east-1", ["g5.xlarge"])
    assert record.amount in (1.006, 0.4)
    assert len(cloud.requests) == 2


def test_slowing_down_for_ever_ends() -> None:
    answers = AwsAnswers(troubles=deque([SLOW_EC2] * 9))
    with (
        asking(answers) as (aws, cloud),
        pytest.raises(CloudUnreachableError, match=r"throttled.*RequestLimitExceeded"),
    ):
        fetch_spot(aws, "us-east-1", ["g5.xlarge"])
    assert len(cloud.requests) == 2


def test_no_answer_is_unreachable() -> None:
    with LoopbackCloud(AwsAnswers()) as cloud:
        url = cloud.url
    with leaving_nothing_behind():
        aws = Aws({"ec2": url}, attempts=2, timeout_s=5)
        with pytest.raises(CloudUnreachableError, match="did not answer"):
            fetch_spot(aws, "us-east-1", ["g5.xlarge"])


@pytest.mark.parametrize("fetch", [fetch_spot, fetch_on_demand], ids=["ec2", "pricing"])
def test_a_wrong_secret_is_refused_and_no_secret_is_shown(fetch: Any) -> None:
    with asking(AwsAnswers(secret=SECRET + "x")) as (aws, _), pytest.raises(CloudError) as caught:
        fetch(aws, "us-east-1", ["g5.xlarge"])
    assert "refused" in caught.value.message and "signature" in caught.value.message
    assert type(caught.value) is CloudError
    assert shows_no_secret(str(caught.value) + repr(caught.value))


def test_without_credentials_no_request_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    with pytest.raises(CloudError, match="no AWS credentials"):
        Aws({})


@pytest.mark.parametrize("fetch", [fetch_spot, fetch_on_demand], ids=["ec2", "pricing"])
def test_keys_that_were_rotated_are_read_again(
    fetch: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    keys = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))

    def rotate(secret: str) -> None:
        keys.write_text(
            f"[default]\naws_access_key_id={KEY_ID}\naws_secret_access_key={secret}\n"
            f"aws_session_token={TOKEN}\n"
        )

    answers = AwsAnswers(secret="first/" + SECRET)
    rotate(answers.secret)
    with asking(answers) as (aws, cloud):
        assert fetch(aws, "us-east-1", ["g5.xlarge"]) == []
        answers.secret = "second/" + SECRET
        rotate(answers.secret)
        assert fetch(aws, "us-east-1", ["g5.xlarge"]) == []
        answers.secret = "third/" + SECRET
        before = len(cloud.requests)
        with pytest.raises(CloudError, match="signature") as caught:
            fetch(aws, "us-east-1", ["g5.xlarge"])
        assert len(cloud.requests) == before + 1, "the same keys are not tried again"
    assert shows_no_secret(str(caught.value))


XML, JSON = "text/xml;charset=UTF-8", "application/x-amz-json-1.1"


@pytest.mark.parametrize(
    "reply",
    [
        Reply(200, XML, "not xml at all"),
        Reply(200, XML, "<a/>"),
        Reply(200, "text/html", "<html><body>Please log in</body></html>"),
        Reply(
            200,
            XML,
            "<R><spotPriceHistorySet><item><instanceType>g5.xlarge</instanceType>"
            "<spotPrice>cheap</spotPrice><availabilityZone>us-east-1a</availabilityZone>"
            "<timestamp>2026-11-20T10:00:00.000Z</timestamp></item></spotPriceHistorySet></R>",
        ),
        Reply(200, XML, "<R><spotPriceHistorySet><item/></spotPriceHistorySet></R>"),
    ],
    ids=["text", "empty", "page", "word", "hole"],
)
def test_spot_answers_without_sense_are_errors(reply: Reply) -> None:
    answers = AwsAnswers(troubles=deque([reply] * 3))
    with asking(answers) as (aws, _), pytest.raises(CloudError, match="is not valid"):
        fetch_spot(aws, "us-east-1", ["g5.xlarge"])


@pytest.mark.parametrize(
    "body",
    [
        "not json",
        "{}",
        '{"PriceList": "none"}',
        '{"PriceList": ["not json"]}',
        '{"PriceList": ["[]"]}',
        '{"PriceList": ["{\\"product\\": {}}"]}',
    ],
)
def test_price_lists_without_sense_are_errors(body: str) -> None:
    answers = AwsAnswers(troubles=deque([Reply(200, JSON, body)] * 3))
    with asking(answers) as (aws, _), pytest.raises(CloudError, match="is not valid"):
        fetch_on_demand(aws, "us-east-1", ["g5.xlarge"])


@pytest.mark.parametrize("price", ["-1", "NaN", "inf", "a lot"])
def test_amounts_without_sense_are_errors(price: str) -> None:
    answers = AwsAnswers([instance_product("us-east-1", "g5.xlarge", price)])
    with asking(answers) as (aws, _), pytest.raises(CloudError, match="is not valid"):
        fetch_on_demand(aws, "us-east-1", ["g5.xlarge"])


def test_pages_that_go_round_in_a_circle_end() -> None:
    body = '{"PriceList": [], "NextToken": "again"}'
    answers = AwsAnswers(troubles=deque([Reply(200, JSON, body)] * 9))
    with asking(answers) as (aws, _), pytest.raises(CloudError):
        fetch_on_demand(aws, "us-east-1", ["g5.xlarge"])
