"""Totals, the summary and the table at the end of a run."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from geo_ray.base.errors import RunDirectoryError
from geo_ray.base.text import bytes_text, coarse_text, duration_text, number_text
from geo_ray.telemetry.summary import (
    Summary,
    Target,
    final_table,
    load_summary,
    save_summary,
    summarise,
)
from geo_ray.telemetry.totals import Rate, RunTotals, StepTotals
from tests.support.observe_support import (
    Row,
    evaluation,
    events,
    exchange,
    noise,
    small_run,
    started,
    step,
    wan,
)


def totals(rows: list[Row]) -> RunTotals:
    folded = RunTotals()
    for event in events(rows):
        folded.feed(event)
    return folded


def test_summary_of_a_small_run() -> None:
    summary = summarise(events(small_run()), startup_s=2.5, digest="abc")
    assert summary == Summary(
        strategy="diloco",
        seed=7,
        steps=4,
        samples=2 * 4 * 32,
        seconds=4.5,
        startup_s=2.5,
        time_to_target_s=None,
        wan_bytes={"reply": 2000, "control": 10, "update": 2000},
        rounds=2,
        usd=None,
        eval={"accuracy": 0.4, "loss": 0.5},
        digest="abc",
        faults={
            "worker_lost": 0,
            "worker_replaced": 0,
            "step_refused": 0,
            "bridge_replaced": 0,
            "region_lost": 0,
            "state_changed": 0,
        },
    )


def test_codecs_are_named_with_what_they_saved() -> None:
    rows = [
        started(codec={"up": "topk", "down": None}),
        exchange("east", 1, 1.0, bytes_sent=100, bytes_received=1000, bytes_before=1000),
        exchange("west", 1, 1.0, bytes_sent=300, bytes_received=1000, bytes_before=1000),
        exchange("west", 2, 2.0),  # of an older release
    ]
    summary = summarise(events(rows))
    assert summary.codec == {"up": "topk"}
    assert summary.payload_bytes == {"before": 6200, "after": 4600}
    console = Console(file=io.StringIO(), width=200)
    console.print(final_table(summary, totals(rows)))
    assert "codec topk up: payloads of 6.2 kB encoded to 4.6 kB" in console.file.getvalue()
    assert Summary.model_validate_json(summary.model_dump_json()) == summary


def test_only_payloads_that_cross_count_as_coded() -> None:
    """The averager's region hands its own over at home; the averager may move."""
    rows = [
        started(codec={"up": "topk", "down": None}, averager="east"),
        exchange("east", 1, 1.0, bytes_sent=100, bytes_received=1000, bytes_before=1000),
        exchange("west", 1, 1.0, bytes_sent=300, bytes_received=1000, bytes_before=1000),
    ]
    assert summarise(events(rows)).payload_bytes == {"before": 2000, "after": 1300}
    rows.append(("averager_moved", 1.5, {"region": "west", "term": 2}))
    rows.append(exchange("west", 2, 2.0, bytes_sent=300, bytes_received=1000, bytes_before=1000))
    rows.append(exchange("east", 2, 2.0, bytes_sent=100, bytes_received=1000, bytes_before=1000))
    assert summarise(events(rows)).payload_bytes == {"before": 4000, "after": 2400}


def test_noise_of_regions_is_put_together_before_it_is_divided() -> None:
    rows = [
        *small_run(),
        noise("east", 16, 9.0, 9.0, 32),
        noise("east", 32, -1.0, 300.0, 32),
        noise("west", 32, 3.0, 100.0, 96),
    ]
    summary = summarise(events(rows))
    assert summary.noise == {"grad_sq": 2.0, "trace": 150.0, "b_simple": 75.0}
    together = [*rows, noise(None, 32, 4.0, 40.0, 128), noise("west", 48, 1.0, 1.0, 96)]
    summary = summarise(events(together))
    assert summary.noise == {"grad_sq": 4.0, "trace": 40.0, "b_simple": 10.0}
    assert Summary.model_validate_json(summary.model_dump_json()) == summary


def test_noise_that_outweighs_the_gradient_has_no_number() -> None:
    summary = summarise(events([*small_run(), noise(None, 16, -1.0, 40.0, 128)]))
    assert summary.noise == {"grad_sq": -1.0, "trace": 40.0, "b_simple": None}
    assert summarise(events(small_run())).noise is None


@pytest.mark.parametrize(
    ("metric", "value", "direction", "reached_s"),
    [
        ("accuracy", 0.2, "at_least", 2.5),
        ("accuracy", 0.4, "at_least", 4.5),
        ("accuracy", 0.9, "at_least", None),
        ("loss", 0.6, "at_most", 4.5),
        ("loss", 0.1, "at_most", None),
        ("auc", 0.1, "at_least", None),
    ],
)
def test_time_to_target(metric: str, value: float, direction: str, reached_s: float | None) -> None:
    target = Target.model_validate({"metric": metric, "value": value, "direction": direction})
    assert summarise(events(small_run()), target=target).time_to_target_s == reached_s


def test_only_the_evaluation_of_all_regions_reaches_a_target() -> None:
    rows = [started(), evaluation(1, 1.0, "east", accuracy=0.9), evaluation(1, 2.0, accuracy=0.3)]
    target = Target(metric="accuracy", value=0.5, direction="at_least")
    assert summarise(events(rows), target=target).time_to_target_s is None


def test_a_resumed_run_counts_steps_that_stand_once_and_bytes_always() -> None:
    rows = [started(), *(step("east", number, float(number)) for number in (1, 2, 3, 4))]
    rows.append(wan("east", "west", 4.0, update=100))
    rows += [started(), step("east", 3, 6.0, loss=9.0), wan("east", "west", 6.0, update=40)]
    summary = summarise(events(rows))
    assert (summary.steps, summary.samples) == (3, 3 * 32)
    assert summary.wan_bytes == {"update": 140}
    folded = totals(rows)
    assert folded.regions["east"].compute_s == 5 * 0.5
    assert folded.finished is None


def test_standing_still_after_the_last_step_is_waiting() -> None:
    first, last = step("a", 1, 1.0, wait_s=0.25), step("a", 2, 4.0, wait_s=2.0)
    between = exchange("a", 1, 3.0, blocking=True, start_s=1.0)
    end = exchange("a", 2, 9.0, blocking=True, start_s=4.0)
    found = totals([started(), first, between]).region("a")
    assert found.wait_s == pytest.approx(0.25 + 2.0), "as long as there is no step after it"
    found = totals([started(), first, between, last]).region("a")
    assert found.wait_s == pytest.approx(0.25 + 2.0), "a step's waiting has the exchange before it"
    found = totals([started(), first, between, last, end]).region("a")
    assert found.wait_s == pytest.approx(0.25 + 2.0 + 5.0) and found.blocked_s == pytest.approx(7.0)
    extended = step("a", 3, 20.0, wait_s=0.5)
    found = totals([started(), first, between, last, end, started(), extended]).region("a")
    assert found.wait_s == pytest.approx(0.25 + 2.0 + 5.0 + 0.5), "it began anew"


def test_rounds_of_an_abandoned_branch_do_not_count() -> None:
    before = [exchange("a", number, number, round=number) for number in range(1, 11)]
    again = [exchange("a", number, 20 + number, round=number) for number in range(6, 9)]
    assert len(totals([started(), *before, started(), *again]).rounds) == 8


def test_faults_are_counted_and_cut_off_runs_have_a_summary() -> None:
    lost: Row = ("worker_lost", 3.0, {"region": "west", "worker": "w1", "cause": "oom"})
    summary = summarise(events([started(), step("west", 1, 1.0), lost, lost]))
    assert summary.faults["worker_lost"] == 2
    assert summary.eval == {}
    with pytest.raises(RunDirectoryError, match="run_started"):
        summarise([])


def test_summary_file_round_trip(tmp_path: Path) -> None:
    assert load_summary(tmp_path) is None
    rows = [started(), evaluation(1, 1.0, accuracy=float("nan"))]
    summary = summarise(events(rows))
    assert summary.eval == {"accuracy": None}
    save_summary(summary, tmp_path)
    assert load_summary(tmp_path) == summary
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(RunDirectoryError, match=r"summary\.json"):
        load_summary(tmp_path)
    with pytest.raises(RunDirectoryError, match=r"summary\.json"):
        save_summary(summary, tmp_path / "missing")


def test_final_table_has_a_row_per_region() -> None:
    rows = [*small_run(), step("[b]odd", 1, 5.0)]
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(final_table(summarise(events(rows)), totals(rows)))
    text = console.export_text()
    assert "[b]odd" in text
    east = next(line.split() for line in text.splitlines() if "east" in line)
    assert east[1:4] == ["4", "128", "1.042"]
    assert "accuracy 0.4, loss 0.5; 2 rounds" in text


def test_end_loss_is_weighted_by_samples_and_passes_over_what_is_not_finite() -> None:
    book = StepTotals()
    assert math.isnan(book.end_loss())
    book.add(1, 10, 1.0)
    book.add(2, 30, 3.0)
    book.add(3, 10, math.nan)
    assert book.end_loss() == pytest.approx(2.5)
    assert book.end_loss(last=2) == 3.0


def test_rate_looks_back_over_its_window() -> None:
    rate = Rate(window_s=10.0)
    assert rate.per_s(5.0) == 0.0
    rate.start(0.0)
    rate.add(1.0, 20.0)
    rate.add(2.0, 20.0)
    assert rate.per_s(4.0) == 10.0
    assert rate.per_s(11.5) == 2.0
    assert rate.per_s(99.0) == 0.0


def test_numbers_as_people_read_them() -> None:
    values = (0.0, 0.12345, 12.3456, 1234.5, 1e-5, 3e8, float("nan"), None)
    shown = ["0", "0.1235", "12.35", "1,234", "1.00e-05", "3.00e+08", "-", "-"]
    assert [number_text(value) for value in values] == shown
    sizes = (0, 999, 1000, 4_100_000, 999_600, 2.5e12, 3e15)
    shown = ["0 B", "999 B", "1 kB", "4.1 MB", "1 MB", "2.5 TB", "3,000 TB"]
    assert [bytes_text(size) for size in sizes] == shown
    times = (0.0, 0.085, 4.2, 187.0, 7389.0, 59.97, -3.0, None)
    shown = ["0 s", "85 ms", "4.2 s", "3:07", "2:03:09", "1:00", "-3.0 s", "-"]
    assert [duration_text(time) for time in times] == shown
    assert [coarse_text(time) for time in (0.04, 41.8, 59.7, 187.0)] == [
        "0 s",
        "42 s",
        "1:00",
        "3:07",
    ]
