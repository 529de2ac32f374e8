"""`geo-ray prices`: listing, refresh, and messages if a cloud does not answer."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from geo_ray.api.prices import refresh_prices
from geo_ray.base.errors import (
    CloudError,
    ConfigError,
    GeoRayError,
    PriceBookError,
    PriceUnknownError,
)
from geo_ray.cli.prices import prices
from geo_ray.prices.price_book import load_book, parse_book
from tests.support.cloud_servers import (
    SECRET,
    AwsAnswers,
    LoopbackCloud,
    Reply,
    Request,
    TencentAnswers,
    as_caller,
    instance_product,
    pricing_error,
    product,
    quota,
    shows_no_secret,
    tencent_error,
)
from tests.support.wan_support import WAIT_S, leaving_nothing_behind

TYPE = "GN7.2XLARGE32"
INTERNATIONAL = ("--cloud", "tencent", "--endpoint", "https://cvm.intl.tencentcloudapi.com")


@pytest.fixture(autouse=True)
def caller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    as_caller(monkeypatch, tmp_path)
    monkeypatch.chdir(tmp_path)


def run(*arguments: str, error: type[GeoRayError] | None = None, code: int = 0) -> Result:
    result = CliRunner().invoke(prices, arguments)
    told = result.output + str(result.exception)
    if error is not None:
        assert type(result.exception) is error, told
    else:
        assert result.exit_code == code, told
    assert shows_no_secret(told)
    return result


def refresh(answers: Any, cloud: str, *more: str, error: type[GeoRayError] | None = None) -> Result:
    with leaving_nothing_behind(), LoopbackCloud(answers) as server:
        options = ("--cloud", cloud, "--endpoint", server.url, "--tries", "2", *more)
        return run("refresh", *options, error=error)


def aws_answers() -> AwsAnswers:
    between = {"fromRegionCode": "us-east-1", "toRegionCode": "eu-west-1"}
    return AwsAnswers(
        [
            instance_product("us-east-1", "g5.xlarge", "1.1"),
            instance_product("eu-west-1", "g5.xlarge", "1.2"),
            product({**between, "transferType": "InterRegion Outbound"}, ("GB", "0", "0.025")),
        ],
        [("us-east-1", "us-east-1a", "g5.xlarge", "0.4", "2026-11-20T10:00:00.000Z")],
    )


# ------------------------------------------------------------------ show


def test_the_shipped_prices_are_shown_with_their_sources() -> None:
    shown = run("show", "--cloud", "aws", "--region", "us-east-1").output
    assert "p4d.24xlarge" in shown and "2.47-8.19 USD/hour" in shown
    assert "0.085 above 10,240" in shown
    assert "SkyPilot catalog v8" in shown
    assert "eu-west-1" not in shown


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--type", "nothing"), "no price is known of type 'nothing'"),
        (
            ("--region", "us-east-9"),
            "of region 'us-east-9'; did you mean us-east",
        ),
    ],
)
def test_a_price_that_is_nowhere_is_an_error(options: tuple[str, ...], what: str) -> None:
    for more in ((), ("--json",)):
        done = run("show", *options, *more, error=PriceUnknownError)
        assert done.exit_code != 0 and what in str(done.exception)


def test_own_prices_rates_ages_and_availability_are_shown() -> None:
    Path("mine.yaml").write_text(
        "records:\n"
        "  - {cloud: tencent, region: ap-tokyo, item: egress, to: ap-seoul, amount: 40,\n"
        "     currency: CNY, unit: Mbps-month, source: our contract,\n"
        "     fetched_at: 2020-01-01T00:00:00Z, valid_for_s: 60}\n"
        "  - {cloud: tencent, region: ap-tokyo, type: X, amount: 4, currency: CNY, unit: hour,\n"
        "     age_tiers: [{after_h: 96, factor: 0.5}], availability: none, source: our contract,\n"
        "     fetched_at: 2020-01-01T00:00:00Z, valid_for_s: 1e12}\n"
        "rates: [{currency: CNY, usd: 0.14, on: 2026-11-20, source: our bank}]\n"
    )
    shown = run("show", "--cloud", "tencent", "--file", "mine.yaml").output
    assert "40 CNY/Mbps-month" in shown and "to ap-seoul" in shown and "STALE" in shown
    assert "x0.5 after 96 h" in shown and "sold out" in shown
    assert "1 CNY = 0.14 USD on 2026-11-20 (our bank)" in shown
    stale = run("show", "--cloud", "tencent", "--stale", "--file", "mine.yaml").output
    assert "to ap-seoul" in stale and "X " not in stale


def test_json_is_a_file_of_prices() -> None:
    shown = run("show", "--type", "g5.xlarge", "--json").output
    book = parse_book(shown, "shown")
    assert {r.type for r in book.records} == {"g5.xlarge"}


def test_a_file_that_is_wrong_is_an_error_with_exit_code_10() -> None:
    Path("prices.json").write_text('{"records": [{"cloud": "aws", "amount": 0}]}')
    result = run("show", error=PriceBookError)
    assert result.exception.exit_code == 10  # type: ignore[union-attr]


# ------------------------------------------------------------------ refresh: AWS


def test_refresh_writes_what_aws_says_and_show_shows_it() -> None:
    done = refresh(aws_answers(), "aws", "--regions", "us-east-1", "--types", "g5.xlarge")
    assert "prices.json, 3 read" in done.output
    book = load_book(Path("prices.json"))
    assert [(r.item, r.to or r.zone, r.amount) for r in book.records] == [
        ("egress", "eu-west-1", 0.025),
        ("instance", None, 1.1),
        ("instance", "us-east-1a", 0.4),
    ]
    shown = run("show", "--region", "us-east-1", "--type", "g5.xlarge").output
    assert "1.1 USD/hour" in shown and "1.006" not in shown
    assert "0.4 USD/hour" in shown


def test_without_names_every_known_region_and_type_is_asked() -> None:
    done = refresh(AwsAnswers(), "aws")
    assert "ap-south-1 on_demand: no price of c5a.2xlarge (on_demand)" in done.output
    assert "eu-south-2 spot: no price of g6.2xlarge (spot)" in done.output
    assert not Path("prices.json").exists()


def test_a_region_that_fails_keeps_its_prices_and_says_how_old_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = aws_answers()
    names = ("--regions", "us-east-1,eu-west-1", "--types", "g5.xlarge")
    refresh(answers, "aws", *names)
    before = load_book(Path("prices.json"))
    answers.refused_regions.add("us-east-1")
    answers.products[1] = instance_product("eu-west-1", "g5.xlarge", "1.3")
    done = refresh(answers, "aws", *names)
    assert "us-east-1 on_demand was not read: aws pricing in us-east-1 refused" in done.output
    assert re.search(r"1 older price stays, the oldest \d+ (s|min) old, 0 stale", done.output)
    with LoopbackCloud(answers) as server:
        names_there = {"regions": ["us-east-1", "eu-west-1"], "types": ["g5.xlarge"]}
        found = refresh_prices("aws", **names_there, endpoints=[server.url], tries=2)
    assert [r.region for r in found.stored] == ["us-east-1"] * len(found.stored) and found.failed
    assert {row["error"] is None for row in found.table().to_pylist()} == {True, False}
    assert (
        "was not read" not in capsys.readouterr().err and "<td>aws us-east-1" in found._repr_html_()
    )
    after = load_book(Path("prices.json"))
    assert after.instance("aws", "eu-west-1", "g5.xlarge").amount == 1.3
    for market in ("on_demand", "spot"):
        find = ("aws", "us-east-1", "g5.xlarge", market)
        assert after.instance(*find) == before.instance(*find)  # type: ignore[arg-type]


def test_if_all_fails_the_file_stays_as_it_was_and_the_exit_code_says_so() -> None:
    names = ("--regions", "us-east-1", "--types", "g5.xlarge")
    refresh(aws_answers(), "aws", *names)
    text = Path("prices.json").read_bytes()
    failed = refresh(AwsAnswers(secret=SECRET + "x"), "aws", *names, error=CloudError)
    assert failed.exception.exit_code == 11  # type: ignore[union-attr]
    assert "older price" in failed.output
    assert Path("prices.json").read_bytes() == text
    slow = AwsAnswers(troubles=deque([pricing_error("ThrottlingException", "Rate")] * 99))
    assert "throttled" in refresh(slow, "aws", *names, error=CloudError).output
    assert Path("prices.json").read_bytes() == text


def test_without_credentials_the_known_prices_are_dated_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    failed = run("refresh", "--cloud", "aws", error=CloudError)
    assert re.search(r"\d+ older prices stay, the oldest \d+ d old, \d+ stale", failed.output)


def test_what_is_in_the_file_already_stays_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = {"currency": "CNY", "usd": 0.14, "on": "2026-11-20", "source": "our bank"}
    Path("a.json").write_text(json.dumps({"rates": [rate]}))
    monkeypatch.setenv("GEO_RAY_PRICES", "a.json")
    refresh(aws_answers(), "aws", "--regions", "us-east-1", "--types", "g5.xlarge")
    book = load_book(Path("a.json"))
    assert len(book.records) == 3 and book.rates[0].usd == 0.14
    assert not Path("prices.json").exists()


def test_what_was_read_before_an_interrupt_is_kept() -> None:
    answers, reached, over = aws_answers(), threading.Event(), threading.Event()

    def answer(request: Request) -> Reply:
        if b"DescribeSpotPriceHistory" not in request.body:
            return answers(request)
        reached.set()
        over.wait(WAIT_S)
        return Reply(0, "", "")

    command = [sys.executable, "-m", "geo_ray.cli.main", "prices", "refresh", "--cloud", "aws"]
    command += ["--regions", "us-east-1", "--types", "g5.xlarge", "--endpoint"]
    with leaving_nothing_behind(), LoopbackCloud(answer) as server:
        process = subprocess.Popen([*command, server.url], stderr=subprocess.PIPE, text=True)
        try:
            assert reached.wait(WAIT_S)
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=WAIT_S)
        finally:
            over.set()
            process.kill()
            process.wait()
            process.stderr.close()  # type: ignore[union-attr]
    assert process.returncode == 130, told
    assert [r.amount for r in load_book(Path("prices.json")).records] == [1.1]


# ------------------------------------------------------------------ refresh: Tencent Cloud


def test_refresh_asks_tencent_for_types_and_traffic() -> None:
    region = "ap-shanghai"
    answers = TencentAnswers(
        [quota("ap-shanghai-2", TYPE), quota("ap-shanghai-2", TYPE, "SPOTPAID")],
        {region: {"UnitPrice": 0.8, "ChargeUnit": "GB"}},
        troubles=deque([tencent_error("RequestLimitExceeded", "slowly")]),
    )
    done = refresh(answers, "tencent", "--regions", region, "--types", TYPE)
    assert "3 read" in done.output
    book = load_book(Path("prices.json"))
    assert {r.currency for r in book.records} == {"CNY"}
    assert book.egress("tencent", region, "internet").amount == 0.8
    # Later the same is asked without names.
    answers.items[0] = quota("ap-shanghai-2", TYPE, Status="SOLD_OUT")
    done = refresh(answers, "tencent", "--currency", "USD")
    assert "is available" in done.output
    book = load_book(Path("prices.json"))
    assert book.instance("tencent", region, TYPE).availability == "none"
    assert book.egress("tencent", region, "internet").currency == "CNY"  # the old one


def test_one_region_of_tencent_does_not_take_the_other_with_it() -> None:
    answers = TencentAnswers(
        [quota("ap-shanghai-2", TYPE), quota("ap-tokyo-1", TYPE)],
        {"ap-shanghai": {"UnitPrice": 0.8, "ChargeUnit": "GB"}},
        refused_regions={"ap-tokyo"},
    )
    done = refresh(answers, "tencent", "--regions", "ap-tokyo,ap-shanghai", "--types", TYPE)
    assert "UnsupportedRegion" in done.output and "no older price is known" in done.output
    assert {r.region for r in load_book(Path("prices.json")).records} == {"ap-shanghai"}


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--cloud", "tencent"), "--regions"),
        (("--cloud", "aws", "--regions", "xx-north-9"), "--types"),
        (("--cloud", "aws", "--currency", "USD"), "--currency"),
        (("--cloud", "aws", "--file", "x.yaml"), "JSON"),
        ((*INTERNATIONAL, "--regions", "a", "--types", "b"), "--currency"),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused(options: tuple[str, ...], said: str) -> None:
    refused = run("refresh", *options, error=ConfigError).exception
    assert said in str(refused) and refused.exit_code == 2  # type: ignore[union-attr]


def test_a_cloud_that_cannot_be_asked_is_refused() -> None:
    assert "azure" in run("refresh", "--cloud", "azure", code=2).output
    with pytest.raises(ConfigError, match="azure"):
        refresh_prices("azure")


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "host",
        "https://",
        "ftp://host",
        "http://[::1",
        "http://host/path",
        "http://host:99999",
        "http://user:word@host",
        "s3=http://host",
    ],
)
def test_an_endpoint_must_be_an_address(endpoint: str) -> None:
    run("refresh", "--cloud", "aws", "--endpoint", endpoint, error=CloudError)


def test_a_file_that_cannot_be_written_is_an_error() -> None:
    Path("taken").write_text("")
    names = ("--regions", "us-east-1", "--types", "g5.xlarge", "--file", "nowhere/prices.json")
    refresh(aws_answers(), "aws", *names, error=PriceBookError)


def test_ages_are_shown_in_a_suitable_unit() -> None:
    from geo_ray.base.text import age_text

    told = {
        -5: "in the future",
        0: "0 s",
        59: "59 s",
        60: "1 min",
        7200: "2 h",
        172800: "48 h",
        345600: "4 d",
    }
    assert {age: age_text(age) for age in told} == told
