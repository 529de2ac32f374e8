"""What a benchmark in the WAN lab keeps, repeats and resumes. No lab is needed for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.lab_runs import LabRuns, lab_runs, source_digest
from geo_ray.base.errors import LabLateError
from geo_ray.lab.stats import LabStats, LinkStats


def stats(late_packets: int) -> LabStats:
    """Counters of a run of 1,000 packets over a link with 100 ms round trip."""
    link = LinkStats(
        rate_mbps=100.0, delay_s=0.05, loss=0.0, in_packets=1000, in_bytes=1, out_packets=1000,
        out_bytes=1, lost=0, queue_drops=0, cap_drops=0, cut_drops=0, device_drops=0,
        late_packets=late_packets, late_mean_s=0.0002, late_max_s=0.05, round_trip_s=0.1,
        taken_late_packets=0, taken_late_mean_s=0.0, queue_bytes=0, queue_peak_bytes=0, waiting=0,
        is_cut=False,
    )  # fmt: skip
    return LabStats(
        seconds=10.0, cpu_s=1.0, realtime=True, read_packets=1000, pass_max_s=0.001, late_s=0.2,
        own_s=0.0, late_max_s=0.05, waited_s=0.001, stolen_s=0.9, cores=2, unrouted=0,
        links={("A", "B"): link}, up={}, down={}, congestion_control={},
    )  # fmt: skip


def measuring(*outcomes: tuple[Any, int]) -> Callable[[], tuple[Any, LabStats]]:
    """Measures these, one after the other; fails when asked once more."""
    left = list(outcomes)

    def measure() -> tuple[Any, LabStats]:
        value, late = left.pop(0)
        return value, stats(late)

    return measure


def test_only_the_spoiled_run_is_repeated(tmp_path: Path) -> None:
    runs = LabRuns(tmp_path / "a.runs.jsonl", "subject")
    assert runs.take("first", measuring((1.0, 0))) == 1.0
    assert runs.take("second", measuring((9.0, 500), (2.0, 10))) == 2.0
    assert runs.take("first", measuring()) == 1.0
    kept = runs.finish()
    assert [(e["name"], e["value"], e["accepted"]) for e in kept] == [
        ("first", 1.0, True), ("second", 9.0, False), ("second", 2.0, True),
    ]  # fmt: skip
    assert kept[1]["why"] == ["A -> B, 100 ms: 50.0% of the packets late (allowed: 5 %)"]
    assert kept[1]["lab"]["relay"]["cause"] == "stolen"
    assert not list(tmp_path.iterdir())  # all is in the result


def test_an_interrupted_benchmark_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.runs.jsonl"
    first = LabRuns(path, "subject")
    first.take("done", measuring(([1, 2], 0)))
    first.take("late", measuring((3, 900)), attempts=1)
    with path.open("a") as file:
        file.write('{"name": "cut off", "accepted": tr')
    again = LabRuns(path, "subject")
    assert again.has("done") and not again.has("late") and not again.has("cut off")
    assert again.take("done", measuring(), tuple) == (1, 2)
    assert again.take("late", measuring((4, 0))) == 4
    assert [entry["value"] for entry in again.finish()] == [[1, 2], 3, 4]


def test_a_run_that_is_always_late_has_no_result_but_its_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.runs.jsonl"
    runs = LabRuns(path, "subject")
    assert runs.take("late", measuring((1, 900), (2, 800)), attempts=2) is None
    with pytest.raises(LabLateError, match="'late'"):
        runs.need("late", measuring((3, 700)), attempts=1)
    assert [entry["value"] for entry in runs.finish()] == [1, 2, 3]
    assert len(path.read_text().splitlines()) == 4  # it stays, to be resumed


def test_runs_without_a_lab_count(tmp_path: Path) -> None:
    runs = LabRuns(tmp_path / "a.runs.jsonl", "subject")
    assert runs.take("emulated", lambda: (5, None)) == 5
    assert runs.finish()[0]["lab"] is None


def test_runs_of_other_sources_are_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "a.runs.jsonl"
    LabRuns(path, "one")
    with pytest.raises(SystemExit, match="move it away"):
        LabRuns(path, "other")
    assert source_digest() == source_digest()


def test_a_benchmark_that_cannot_go_on_keeps_what_it_has(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    with pytest.raises(SystemExit, match="same command resumes"), lab_runs(out) as runs:
        runs.take("good", measuring((1, 0)))
        runs.need("late", measuring((2, 900)), attempts=1)
    lines = (tmp_path / "result.runs.jsonl").read_text().splitlines()[1:]
    assert [json.loads(line)["accepted"] for line in lines] == [True, False]
    with lab_runs(out) as runs:
        assert runs.has("good")


def test_threads_may_take_runs_at_once(tmp_path: Path) -> None:
    runs = LabRuns(tmp_path / "a.runs.jsonl", "subject")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: runs.take(str(n), measuring((n, 0))), range(50)))
    assert found == list(range(50))
    assert sorted(entry["value"] for entry in runs.finish()) == found
