"""The link table: holes are explicit, files are checked, what is old counts for less."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from geo_ray.base.errors import ConfigError, LinkUnknownError, RunDirectoryError
from geo_ray.transport.emulation import LinkSpec
from geo_ray.transport.links import (
    LinkEstimator,
    LinkRecord,
    LinkTable,
    load_links,
    record_of,
    save_links,
    table_of,
)


def record(src: str = "eu", dst: str = "us", **values: float) -> LinkRecord:
    usual = {"goodput_mbps": 100.0, "rtt_s": 0.1, "samples": 10, "measured_at_unix_s": 1000.0}
    return LinkRecord.model_validate({"src": src, "dst": dst} | usual | values)


def test_a_pair_that_was_not_measured_is_named() -> None:
    table = LinkTable(links=(record(),))
    assert table.get("eu", "us").goodput_mbps == 100.0
    with pytest.raises(LinkUnknownError, match="'us' to region 'eu'"):
        table.get("us", "eu")
    assert table.find("us", "eu") is None


def test_holes_are_listed() -> None:
    table = LinkTable(links=(record(), record("us", "ap")))
    assert table.regions == ["ap", "eu", "us"]
    assert table.holes() == [("ap", "eu"), ("ap", "us"), ("eu", "ap"), ("us", "eu")]
    assert table.holes(["us", "eu"]) == [("us", "eu")]
    assert table.holes(["eu", "af"]) == [("af", "eu"), ("eu", "af")]
    assert LinkTable().holes() == []


def test_records_are_replaced_by_pair() -> None:
    table = LinkTable(links=(record(), record("us", "eu")))
    new = table.with_records([record(goodput_mbps=50.0), record("ap", "eu")])
    assert [r.pair for r in new.links] == [("ap", "eu"), ("eu", "us"), ("us", "eu")]
    assert new.get("eu", "us").goodput_mbps == 50.0
    assert table.get("eu", "us").goodput_mbps == 100.0


def test_outdated_blocks_become_holes() -> None:
    table = LinkTable(links=(record(), record("us", "eu", measured_at_unix_s=5000.0)))
    assert table.fresh(5100.0, 200.0).holes(["eu", "us"]) == [("eu", "us")]
    assert table.fresh(5100.0, 1e9) == table


@pytest.mark.parametrize(
    "wrong",
    [
        {"dst": "eu"},
        {"goodput_mbps": -1.0},
        {"rtt_s": -0.1},
        {"loss": 1.5},
        {"samples": 0},
        {"goodput_mbps": float("nan")},
        {"rtt_s": float("inf")},
        {"surprise": 1.0},
    ],
    ids=str,
)
def test_records_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        record(**wrong)


# ------------------------------------------------------------------ merging


def test_tables_are_joined_and_shared_pairs_averaged() -> None:
    one = LinkTable(links=(record(), record("us", "eu")))
    two = LinkTable(links=(record(goodput_mbps=200.0, samples=30, rtt_s=0.2), record("ap", "eu")))
    merged = one.merge(two, half_life_s=60.0)
    assert [r.pair for r in merged.links] == [("ap", "eu"), ("eu", "us"), ("us", "eu")]
    both = merged.get("eu", "us")
    assert both.goodput_mbps == pytest.approx(175.0)
    assert both.rtt_s == pytest.approx(0.175)
    assert both.samples == pytest.approx(40)
    assert both.goodput_mad_mbps > 30  # the sides differ by 100
    assert merged == two.merge(one, half_life_s=60.0)


def test_the_older_side_counts_less() -> None:
    old = LinkTable(links=(record(goodput_mbps=100.0),))
    new = LinkTable(links=(record(goodput_mbps=200.0, measured_at_unix_s=1120.0),))
    merged = old.merge(new, half_life_s=60.0).get("eu", "us")
    assert merged.goodput_mbps == pytest.approx((100 * 2.5 + 200 * 10) / 12.5)
    assert merged.samples == pytest.approx(12.5)
    assert merged.measured_at_unix_s == 1120.0
    far = LinkTable(links=(record(goodput_mbps=200.0, measured_at_unix_s=1e9),))
    assert old.merge(far, half_life_s=60.0).get("eu", "us").goodput_mbps == pytest.approx(200.0)


def test_each_side_learns_the_other_s_values() -> None:
    with_loss = LinkTable(links=(record(loss=0.01, loss_mad=0.002, rtt_loaded_s=0.5),))
    without = LinkTable(links=(record(),))
    merged = with_loss.merge(without, half_life_s=60.0).get("eu", "us")
    assert (merged.loss, merged.loss_mad, merged.rtt_loaded_s) == (0.01, 0.002, 0.5)
    assert without.merge(without, half_life_s=60.0).get("eu", "us").loss is None


# ------------------------------------------------------------------ where records come from


def test_a_passive_estimate_becomes_a_record_when_it_knows_enough() -> None:
    estimator = LinkEstimator()
    assert record_of("eu", "us", estimator.snapshot(0.0), 1000.0) is None
    for tenth in range(101):
        estimator.on_delivered(tenth / 10, 1_250_000, inflight_limited=tenth > 0)
    assert record_of("eu", "us", estimator.snapshot(10.0), 1000.0) is None  # no round trip
    estimator.on_rtt(10.0, 0.08)
    found = record_of("eu", "us", estimator.snapshot(15.0), 1000.0)
    assert found is not None and found.source == "passive" and found.loss is None
    assert found.goodput_mbps == pytest.approx(100.0) and found.rtt_s == 0.08
    assert found.measured_at_unix_s == pytest.approx(995.0, abs=0.5)


def test_emulated_links_have_a_table_too() -> None:
    specs = {
        ("eu", "us"): LinkSpec(rate_mbps=50.0, delay_s=0.04, loss=0.01),
        ("us", "eu"): LinkSpec(rate_mbps=20.0, delay_s=0.05),
        ("us", "ap"): LinkSpec(delay_s=0.1),
    }
    table = table_of(specs)
    assert table.get("eu", "us").rtt_s == pytest.approx(0.09)
    assert table.get("eu", "us").loss == 0.01 and table.get("us", "eu").goodput_mbps == 20.0
    assert ("us", "ap") in table.holes(["us", "ap"])  # unlimited is no goodput


# ------------------------------------------------------------------ files


def test_a_table_is_read_as_saved(tmp_path: Path) -> None:
    table = LinkTable(links=(record(loss=0.01), record("us", "eu", goodput_mad_mbps=3.25)))
    path = tmp_path / "links.json"
    save_links(table, path)
    assert load_links(path) == table
    save_links(LinkTable(), path)
    assert load_links(path) == LinkTable()
    assert [p.name for p in tmp_path.iterdir()] == ["links.json"]


def test_a_table_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"links\.json"):
        save_links(LinkTable(), tmp_path / "nowhere" / "links.json")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not valid"),
        ("[]", "not valid"),
        ('{"version": 2, "links": []}', "version"),
        ('{"version": 1, "links": [], "more": 1}', "more"),
        (json.dumps({"links": [record().model_dump()] * 2}), "more than once"),
        (json.dumps({"links": [record().model_dump() | {"rtt_s": "fast"}]}), r"links\.0\.rtt_s"),
        (json.dumps({"links": [record().model_dump() | {"rtt_s": None}]}), r"links\.0\.rtt_s"),
        ('{"links": [{"src": "eu"}]}', "dst"),
        ('{"links": [NaN]}', "not valid"),
    ],
)
def test_problems_of_a_file_are_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "links.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_links(path)


def test_a_missing_or_huge_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_links(tmp_path / "links.json")
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(17 * 1024 * 1024)
    with pytest.raises(ConfigError, match="larger"):
        load_links(tmp_path / "huge.json")
