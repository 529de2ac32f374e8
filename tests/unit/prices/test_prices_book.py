"""Validation of price records, price lookup, and refresh of the book."""

from __future__ import annotations

import json
import re
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from geo_ray.base.errors import CurrencyError, PriceBookError, PriceUnknownError
from geo_ray.prices.price import AgeTier, ExchangeRate, PriceRecord, VolumeTier
from geo_ray.prices.price_book import (
    PriceBook,
    bundled_book,
    dump_book,
    known_book,
    load_book,
    own_files,
    parse_book,
)

NOW = datetime(2026, 11, 21, tzinfo=UTC)


def record(**changes: Any) -> PriceRecord:
    plain: dict[str, Any] = {
        "cloud": "aws",
        "region": "us-east-1",
        "type": "g5.xlarge",
        "amount": 1.0,
        "currency": "USD",
        "unit": "hour",
        "source": "test",
        "fetched_at": NOW,
        "valid_for_s": 3600.0,
    }
    return PriceRecord(**(plain | changes))


def egress(to: str, amount: float = 0.02, **changes: Any) -> PriceRecord:
    plain = {"item": "egress", "type": None, "unit": "GB", "to": to, "amount": amount}
    return record(**(plain | changes))


def book(*records: PriceRecord, rates: tuple[ExchangeRate, ...] = ()) -> PriceBook:
    return PriceBook(records=records, rates=rates)


def rate(usd: float, day: int) -> ExchangeRate:
    return ExchangeRate(currency="CNY", usd=usd, on=date(2026, 11, day), source="test")


# ------------------------------------------------------------------ records


@pytest.mark.parametrize(
    "changes",
    [
        {"amount": 0.0},
        {"amount": -1.0},
        {"amount": float("nan")},
        {"amount": float("inf")},
        {"amount": None},
        {"lowest": 0.0},
        {"lowest": 1.5},
        {"currency": "usd"},
        {"currency": "dollars"},
        {"unit": "GB"},
        {"type": None},
        {"to": "internet"},
        {"item": "egress", "to": "*", "unit": "GB"},
        {"item": "egress", "type": None, "unit": "GB"},
        {"fetched_at": datetime(2026, 11, 21)},
        {"valid_for_s": 0.0},
        {"availability": "plenty"},
        {"market": "gray"},
        {"age_tiers": (AgeTier(after_h=9, factor=0.5), AgeTier(after_h=9, factor=0.4))},
        {"discount": 0.5},
    ],
    ids=str,
)
def test_a_record_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        record(**changes)


def test_a_record_knows_its_age_and_when_it_is_stale() -> None:
    old = record()
    now = NOW.timestamp()
    assert old.age_s(now + 60) == 60
    assert not old.is_stale(now + 3600)
    assert old.is_stale(now + 3601)


# ------------------------------------------------------------------ finding


def test_what_is_not_known_is_an_error_and_never_free() -> None:
    known = book(record(), egress("us-west-2"))
    for ask in (
        lambda: known.instance("aws", "us-east-1", "g6.xlarge"),
        lambda: known.instance("aws", "us-east-1", "g5.xlarge", "spot"),
        lambda: known.instance("tencent", "us-east-1", "g5.xlarge"),
        lambda: known.disk("aws", "us-east-1", "gp3"),
        lambda: known.egress("aws", "us-east-1", "eu-west-1"),
        lambda: known.egress("aws", "us-west-2", "us-east-1"),
    ):
        with pytest.raises(PriceUnknownError):
            ask()


def test_a_pair_comes_before_any_other_region_which_is_not_the_internet() -> None:
    known = book(egress("us-east-2", 0.01), egress("*", 0.02))
    assert known.egress("aws", "us-east-1", "us-east-2").amount == 0.01
    assert known.egress("aws", "us-east-1", "eu-west-1").amount == 0.02
    for dst in ("internet", "us-east-1"):
        with pytest.raises(PriceUnknownError):
            known.egress("aws", "us-east-1", dst)


def test_the_dearest_zone_counts_as_in_the_snapshot_and_a_sold_out_one_only_last() -> None:
    zones = [
        record(zone="a", amount=4.0, availability="none"),
        record(zone="b", amount=3.0),
        record(zone="c", amount=2.0, availability="under"),
    ]
    assert book(*zones).instance("aws", "us-east-1", "g5.xlarge").zone == "b"
    assert book(zones[0]).instance("aws", "us-east-1", "g5.xlarge").zone == "a"


def test_newer_prices_of_zones_come_before_an_older_one_of_the_region() -> None:
    whole, zone = record(amount=9.0), record(zone="a", amount=2.0)
    later = NOW + timedelta(hours=1)
    newer_zone = zone.model_copy(update={"fetched_at": later})
    newer_whole = whole.model_copy(update={"fetched_at": later})
    find = ("aws", "us-east-1", "g5.xlarge")
    assert book(whole, newer_zone).instance(*find) == newer_zone
    assert book(zone, newer_whole).instance(*find) == newer_whole


def test_of_a_key_the_newest_counts_whatever_the_order() -> None:
    old, new = record(amount=1.0), record(amount=2.0, fetched_at=NOW + timedelta(days=1))
    for records in ((old, new), (new, old)):
        assert book(*records).instance("aws", "us-east-1", "g5.xlarge").amount == 2.0


# ------------------------------------------------------------------ costs and currencies


def test_costs_follow_tiers_and_age() -> None:
    aging = record(age_tiers=(AgeTier(after_h=10, factor=0.5),))
    tiered = egress("internet", 0.09, volume_tiers=(VolumeTier(above=100, amount=0.05),))
    known = book(aging, tiered)
    assert known.usd_of_hours(aging, 20) == pytest.approx(15)
    assert known.usd_of_hours(aging, 20, age_h=10) == pytest.approx(10)
    assert known.usd_of_volume(tiered, 200) == pytest.approx(14)
    assert known.usd_of_volume(tiered, 200, used=100) == pytest.approx(10)


def test_a_price_by_bandwidth_is_that_of_an_even_flow() -> None:
    line = egress("ap-tokyo", 324.0, unit="Mbps-month")
    known = book(line)
    assert known.egress("aws", "us-east-1", "ap-tokyo") == line
    assert known.usd_of_volume(line, 10) == pytest.approx(10)
    both = book(line, egress("ap-tokyo", 0.5))
    assert both.egress("aws", "us-east-1", "ap-tokyo").unit == "GB"


def test_currencies_are_never_mixed_without_a_dated_rate() -> None:
    yuan = record(currency="CNY", amount=10.0)
    with pytest.raises(CurrencyError, match="CNY"):
        book(yuan).usd_of_hours(yuan, 1)
    with pytest.raises(CurrencyError, match="CNY"):
        book(yuan).usd_of_volume(egress("*", currency="CNY"), 1)
    known = book(yuan, rates=(rate(0.2, 20), rate(0.1, 1)))
    assert known.usd_of_hours(yuan, 1) == pytest.approx(2.0)  # the newest rate


# ------------------------------------------------------------------ renewing and joining


def test_renewing_keeps_what_was_not_read() -> None:
    known = book(record(), record(region="eu-west-1"), rates=(rate(0.1, 1),))
    later = known.renewed([record(amount=5.0, fetched_at=NOW + timedelta(days=1))])
    assert later.instance("aws", "us-east-1", "g5.xlarge").amount == 5.0
    assert later.instance("aws", "eu-west-1", "g5.xlarge").amount == 1.0
    assert later.rates == known.rates
    assert known.renewed([]).records == known.renewed(known.records).records


def test_a_zone_that_is_not_named_any_more_goes() -> None:
    later = NOW + timedelta(days=1)
    known = book(record(zone="a", amount=0.1), record(zone="b"), record(zone="b", market="spot"))
    renewed = known.renewed([record(zone="b", amount=2.0, fetched_at=later)])
    found = [(r.zone, r.market, r.amount) for r in renewed.records]
    assert found == [("b", "on_demand", 2.0), ("b", "spot", 1.0)]


def test_joining_takes_the_second_books_side_and_drops_no_zone() -> None:
    first = book(record(zone="a"), record(zone="b"), rates=(rate(0.1, 1), rate(0.2, 2)))
    later = NOW + timedelta(days=1)
    second = book(record(zone="b", amount=7.0, fetched_at=later), rates=(rate(0.3, 2),))
    joined = first.joined(second)
    assert [(r.zone, r.amount) for r in joined.records] == [("a", 1.0), ("b", 7.0)]
    assert [r.usd for r in joined.rates] == [0.1, 0.3]


# ------------------------------------------------------------------ files


def test_a_book_is_read_as_it_was_written() -> None:
    known = book(
        record(
            age_tiers=(AgeTier(after_h=96, factor=0.5),), availability="under", zone="a", lowest=0.5
        ),
        egress("*", volume_tiers=(VolumeTier(above=10, amount=0.01),)),
        rates=(rate(0.1, 1),),
    )
    assert parse_book(dump_book(known), "x") == known
    assert parse_book(dump_book(book()), "x") == book()


YAML = """
records:
  - {cloud: mine, region: hall, type: box, amount: 0.5, currency: EUR, unit: hour,
     source: "our books", fetched_at: 2026-11-01T00:00:00Z, valid_for_s: 1e9}
rates:
  - {currency: EUR, usd: 1.1, on: 2026-11-20, source: "our bank"}
"""


def test_a_yaml_file_is_a_book_too_and_a_later_file_counts_more(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine.yaml", tmp_path / "other.json"
    mine.write_text(YAML)
    own = load_book(mine).records[0]
    other.write_bytes(dump_book(book(own.model_copy(update={"amount": 0.6}))))
    known = known_book([mine, other])
    assert known.instance("mine", "hall", "box").amount == 0.6
    assert known.usd_of_hours(known.instance("mine", "hall", "box"), 1) == pytest.approx(0.66)
    assert known.instance("aws", "us-east-1", "g5.xlarge").amount == 1.006  # shipped


def test_the_documented_file_is_a_book(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "guides" / "prices.md").read_text()
    (block,) = re.findall(r"```yaml\n(records:\n.*?)```", text, flags=re.S)
    (tmp_path / "mine.yaml").write_text(block)
    known = load_book(tmp_path / "mine.yaml")
    line = known.egress("tencent", "ap-shanghai", "ap-tokyo")
    assert line.unit == "Mbps-month"
    assert known.usd_of_volume(line, 324) > 0


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "{", "JSON"),
        ("a.json", '{"prices": []}', "prices"),
        ("a.json", '{"version": 2}', "version"),
        ("a.json", '{"records": [{"cloud": "aws"}]}', "records.0.region"),
        ("a.json", json.dumps({"rates": [{"currency": "CNY", "usd": 0.1, "source": "x"}]}), "on"),
        ("a.yaml", "records: [", "YAML"),
        ("a.yaml", YAML.replace("0.5", "-0.5"), "records.0.amount"),
        ("a.yaml", YAML.replace("amount: 0.5, ", ""), "records.0.amount"),
        ("a.yaml", YAML.replace("usd: 1.1", "usd: 0"), "rates.0.usd"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(PriceBookError, match=said):
        load_book(tmp_path / name)


def test_a_file_that_is_named_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PriceBookError, match="nowhere"):
        load_book(tmp_path / "nowhere.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    assert own_files() == []
    Path("prices.json").write_bytes(dump_book(book()))
    assert own_files() == [Path("prices.json")]
    monkeypatch.setenv("GEO_RAY_PRICES", "a.json:b.yaml")
    assert own_files() == [Path("a.json"), Path("b.yaml")]


# ------------------------------------------------------------------ the shipped snapshot


def test_the_snapshot_has_the_figures_of_its_sources() -> None:
    known = bundled_book()
    on_demand = {
        ("us-east-1", "c5a.2xlarge"): 0.308,
        ("ap-south-1", "c5a.2xlarge"): 0.188,
        ("eu-west-1", "m5.2xlarge"): 0.428,
        ("ap-southeast-1", "g4dn.xlarge"): 0.736,
        ("eu-central-1", "g5.xlarge"): 1.258,
        ("ap-northeast-1", "p5.48xlarge"): 68.80,
        ("eu-south-2", "g6.2xlarge"): 1.030,
        ("us-west-2", "p5.4xlarge"): 6.88,
    }
    for (region, type_), amount in on_demand.items():
        assert known.instance("aws", region, type_).amount == amount
    spot = known.instance("aws", "us-east-1", "p4d.24xlarge", "spot")
    assert (spot.lowest, spot.amount) == (2.47, 8.19)
    single = known.instance("aws", "eu-west-1", "p4d.24xlarge", "spot")
    assert (single.lowest, single.amount) == (None, 9.76)
    for src, dst, amount in [
        ("us-east-1", "us-east-2", 0.01),
        ("us-east-2", "us-east-1", 0.01),
        ("us-east-1", "us-west-2", 0.02),
        ("ap-south-1", "us-east-1", 0.086),
        ("af-south-1", "eu-west-1", 0.147),
        ("sa-east-1", "internet", 0.15),
    ]:
        assert known.egress("aws", src, dst).amount == amount
    out = known.egress("aws", "us-east-1", "internet")
    assert known.usd_of_volume(out, 10_241) == pytest.approx(10_240 * 0.09 + 0.085)


def test_the_snapshot_invents_nothing() -> None:
    known = bundled_book()
    assert {r.cloud for r in known.records} == {"aws"}
    assert {r.fetched_at.date() for r in known.records} == {date(2026, 11, 20)}
    assert not known.rates
    for region, type_ in [("us-west-2", "g4dn.xlarge"), ("eu-west-1", "p5.48xlarge")]:
        with pytest.raises(PriceUnknownError):
            known.instance("aws", region, type_)
    with pytest.raises(PriceUnknownError):
        known.instance("aws", "us-east-1", "p5.4xlarge", "spot")


def test_age_counts_from_the_day_of_the_source_and_not_from_its_copy() -> None:
    read = record(valid_for_s=86400.0)
    copied = read.model_copy(update={"dated": read.fetched_at - timedelta(days=30)})
    soon = read.fetched_at.timestamp() + 3600
    assert not read.is_stale(soon) and copied.is_stale(soon)
    assert copied.age_s(soon) == pytest.approx(30 * 86400 + 3600)


def test_the_shipped_prices_are_of_the_days_of_their_sources() -> None:
    old = {record.source[:8]: record.dated.year for record in bundled_book().records}
    assert old == {"Skyplane": 2022, "SkyPilot": 2025}
