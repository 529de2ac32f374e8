"""What is learned about links is written down, and survives a restart."""

from __future__ import annotations

import threading
from dataclasses import asdict
from pathlib import Path

import pytest

from geo_ray.runtime import replanning
from geo_ray.runtime.replanning import LinkNotes
from geo_ray.telemetry.totals import LinkTotals
from geo_ray.transport.links import LinkEstimator, LinkTable, load_links, save_links


def _estimate(rate_mbps: float) -> dict[str, float | None]:
    estimator = LinkEstimator()
    estimator.on_rtt(0.0, 0.1)
    for n in range(100):
        estimator.on_delivered(n * 0.1, int(rate_mbps * 1e6 / 8 * 0.1), True)
    return asdict(estimator.snapshot(10.0))


def test_records_are_stored_by_pair_and_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    notes = LinkNotes(path)
    notes.save(wait=True)
    assert not path.exists()  # nothing is known
    notes.note("eu", {"us": {"estimate": _estimate(50.0)}})
    notes.note("us", {"eu": {"estimate": asdict(LinkEstimator().snapshot(0.0))}})
    notes.save(wait=True)
    table = load_links(path)
    assert [record.pair for record in table.links] == [("eu", "us")]
    assert 49 < table.get("eu", "us").goodput_mbps < 51
    later = LinkNotes(path)
    later.note("us", {"eu": {"estimate": _estimate(20.0)}})
    later.save(wait=True)
    assert {record.pair for record in load_links(path).links} == {("eu", "us"), ("us", "eu")}


def test_a_damaged_file_is_no_reason_to_end_a_run(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    path.write_text("{")
    notes = LinkNotes(path)
    notes.note("eu", {"us": {"estimate": _estimate(50.0)}})
    notes.save(wait=True)
    assert len(load_links(path).links) == 1


def test_a_slow_disk_delays_no_other_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller notes links once a second; what is learned meanwhile is saved at the end."""
    may_write, written = threading.Event(), []

    def slow(table: LinkTable, path: Path) -> None:
        assert may_write.wait(60.0)
        written.append(len(table.links))
        save_links(table, path)

    monkeypatch.setattr(replanning, "save_links", slow)
    path = tmp_path / "links.json"
    notes = LinkNotes(path)
    notes.note("eu", {"us": {"estimate": _estimate(50.0)}})
    notes.save()
    notes.note("us", {"eu": {"estimate": _estimate(20.0)}})
    notes.save()
    assert not path.exists()
    may_write.set()
    notes.save(wait=True)
    assert written == [1, 2] and len(load_links(path).links) == 2


def test_bytes_of_a_bridge_that_was_replaced_are_not_lost(tmp_path: Path) -> None:
    """Its successor, or a region that is back, counts from 0; the sums of a link do not."""
    notes, totals = LinkNotes(tmp_path / "links.json"), LinkTotals()

    unresponsive = asdict(LinkEstimator().snapshot(0.0))
    for sent in (
        {"data": 10},
        {"data": 1000, "background": 5},
        {"data": 200},
        {"data": 1100},
        {"data": 1100},
        {},
        {"data": 3},
    ):
        told = {"eu": {"us": {"bytes_sent": sent, "estimate": unresponsive}}}
        for link in notes.record(told, force=True):
            totals.feed(*link)
    assert totals.by_class() == {"background": 5, "data": 1000 + 1100 + 3}


def test_another_run_actor_continues_the_sums_of_the_previous_one(tmp_path: Path) -> None:
    """One bridge is that of then, and has sent more; the other one has replaced it since."""
    notes = LinkNotes(tmp_path / "links.json")
    notes.resume({("eu", "us"): {"control": 70}, ("us", "eu"): {"bulk": 90, "control": 5}})
    estimate = asdict(LinkEstimator().snapshot(0.0))
    for sent in (100, 130):
        links = {
            "eu": {"us": {"bytes_sent": {"control": sent}, "estimate": estimate}},
            "us": {"eu": {"bytes_sent": {"bulk": sent - 80}, "estimate": estimate}},
        }
        told = {(src, dst): sums for src, dst, sums in notes.record(links, force=True)}
        assert told["eu", "us"] == {"control": sent}
        assert told["us", "eu"] == {"bulk": 90 + sent - 100, "control": 5}
