"""The page and the table of a comparison: nothing cut off, failures told, curves over all axes."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from geo_ray.api.run import metric_table
from geo_ray.base.load import load_tree
from geo_ray.experiment.experiment import Experiment
from geo_ray.sweep.compare import Comparison, ordered, result_table, row_of, standing, write_page
from geo_ray.sweep.trial import Outcome, Point, outcome_of
from geo_ray.telemetry.charts import AXES
from geo_ray.telemetry.columns import record
from geo_ray.telemetry.html_page import STYLE
from geo_ray.telemetry.report import _SoFar
from geo_ray.telemetry.summary import Target, summarise
from tests.support.observe_support import evaluation, events, exchange, started, step, wan, write

CONFIG = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
TARGET = Target(metric="accuracy", value=0.5, direction="at_least")
LONG = "diloco_streaming:interval=128:fragments=4:outer.lr=0.7:codec=int4"
WHY = "[NON_FINITE] region 'us' refused <3> steps\n  fix: Lower the learning rate"


def outcome(label: str, seed: int, failed: str | None = None, usd: float | None = None) -> Outcome:
    points = tuple(
        Point(
            t_s=100.0 * n,
            samples=1000 * n,
            step=8 * n,
            wan_bytes=10**9 * n,
            metrics={"accuracy": n / 10 + seed / 50},
        )
        for n in range(1, 6)
    )
    return Outcome(
        label=label,
        rate=0.125,
        lr=0.0625,
        seed=seed,
        digest="",
        seconds=12_345.6 + seed * 777,
        time_to_target_s=None if failed else 9_876.5 + 1000 * seed,
        samples_to_target=None if failed else 12_345_678 + seed * 10**6,
        rounds=1234 + seed,
        wan_bytes=123_456_789_012 + seed * 10**9,
        idle_fraction=0.25 + seed / 10,
        usd=usd,
        eval={} if failed else {"accuracy": 0.8 + seed / 100},
        points=() if failed else points,
        failed=failed,
    )


def comparison(outcomes: list[Outcome], tuning: list[Outcome] | None = None) -> Comparison:
    labels = dict.fromkeys(one.label for one in outcomes)
    rows = [row_of([o for o in outcomes if o.label == name], TARGET) for name in labels]
    return Comparison(ordered(rows, grows=True), tuning or [], outcomes, "accuracy", TARGET)


def shown(found: Comparison) -> str:
    console = Console(file=StringIO(), width=160, record=True)
    console.print(result_table(found))
    return console.export_text()


def page_of(tmp_path: Path, found: Comparison) -> str:
    return write_page(found, "trial", tmp_path / "compare.html").read_text()


def test_the_result_scrolls_and_its_ranges_are_below_the_medians(tmp_path: Path) -> None:
    page = page_of(tmp_path, comparison([outcome(LONG, s, usd=1e3 + s) for s in range(3)]))
    table = re.search(r'<div class="scroll wide"><table>.*?</table></div>', page)
    assert table is not None and "<th class=n>USD</th>" in table[0]
    assert '0.81<br><span class="range">0.8 to 0.82</span>' in table[0]
    assert "interval=128:<wbr>fragments=4:<wbr>" in table[0]
    assert len(re.findall(r'<span class="range">', table[0])) == 8
    assert re.search(r"\.range \{[^}]*white-space: normal", STYLE)


def test_what_was_never_priced_has_no_column(tmp_path: Path) -> None:
    assert "<th class=n>USD</th>" not in page_of(tmp_path, comparison([outcome("bsp", 0)]))


def test_without_a_target_no_column_is_about_it(tmp_path: Path) -> None:
    outcomes = [outcome("bsp", 0), outcome("sma", 0)]
    rows = [row_of([one], None) for one in outcomes]
    without = Comparison(rows, outcomes, outcomes, "accuracy", None)
    page, text = page_of(tmp_path, without), shown(without)
    assert "to target" not in page and "reached</th>" not in page and "samples to it" not in page
    assert "to target" not in text and "reached" not in text
    whole = comparison(outcomes)
    assert "to target" in shown(whole) and "samples to it" in page_of(tmp_path, whole)


def test_the_terminal_has_rates_as_they_are_seconds_of_runs_and_the_links() -> None:
    found = comparison([outcome("bsp", 0)])
    text = shown(replace(found, links="links assumed: 100 Mbit/s"))
    assert "0.0625" in text and "x0.125" not in text
    assert "run" in text.splitlines()[1].split() and "3:25:46" in text
    assert "links assumed: 100 Mbit/s" in text
    assert "links" not in shown(found)


def test_rows_whose_ranges_overlap_are_within_noise(tmp_path: Path) -> None:
    def times(label: str, *seconds: float | None) -> list[Outcome]:
        return [
            outcome(label, n).model_copy(update={"time_to_target_s": s})
            for n, s in enumerate(seconds)
        ]

    found = comparison(
        [
            *times("fast", 10.0, 11.0, 12.0),
            *times("alike", 11.5, 12.5, 14.0),
            *times("slow", 13.0, 14.0, 15.0),
            *times("late", 11.0, None, 30.0),
            *times("never", None, None, None),
        ]
    )
    said = {row.label: found.standing(row) for row in found.rows}
    assert said == {
        "fast": "best",
        "alike": "within noise",
        "slow": "behind",
        "late": "within noise",
        "never": "behind",
    }
    assert (
        shown(found).count("within noise") == 2 == page_of(tmp_path, found).count(">within noise")
    )
    ends = [0.80, 0.81, 0.82], [0.815, 0.79, 0.8], [0.7, 0.71, 0.72]
    alike, best, worse = (
        row_of(
            [
                outcome(str(n), s).model_copy(update={"eval": {"accuracy": v}})
                for s, v in enumerate(values)
            ],
            None,
        )
        for n, values in enumerate(ends)
    )
    alike, best, worse = (replace(row, reached=0) for row in (alike, best, worse))
    assert standing(alike, best) == "within noise" and standing(worse, best) == "behind"
    (one,), (other,) = comparison([outcome("a", 0)]).rows, comparison([outcome("b", 0)]).rows
    assert standing(one, other) == "one run"


def test_curves_can_be_looked_at_over_every_axis(tmp_path: Path) -> None:
    page = page_of(tmp_path, comparison([outcome("bsp", 0), outcome("bsp", 1), outcome("sma", 0)]))
    assert re.findall(r'<div class="view x-(\w+)"><figure>', page) == list(AXES)
    assert len(re.findall(r'id="axis-\w+" class="x-\w+" checked>', page)) == 1
    assert "bytes between regions</text>" in page and ">4 GB</text>" in page


def test_points_of_an_older_release_have_no_steps_and_no_such_axis(tmp_path: Path) -> None:
    old = outcome("bsp", 0)
    points = tuple(point.model_copy(update={"step": None}) for point in old.points)
    page = page_of(tmp_path, comparison([old.model_copy(update={"points": points})]))
    assert re.findall(r'<div class="view x-(\w+)"><figure>', page) == ["time", "samples", "wan"]


def test_runs_that_failed_are_told_with_their_reason(tmp_path: Path) -> None:
    outcomes = [outcome("bsp", 0), outcome("bsp", 1, WHY), outcome("asgd", 0, WHY)]
    found = comparison(outcomes, [outcome("asgd", 9, WHY)])
    page = page_of(tmp_path, found)
    assert "Failed runs" in page
    assert page.count("refused &lt;3&gt; steps<br>  fix: Lower the learning rate") == 2
    assert '<span class="range">[NON_FINITE] region &#x27;us&#x27; refused' in page
    console = Console(file=StringIO(), width=100, record=True)
    console.print(result_table(found))
    assert "2 of 3 runs failed; bsp: [NON_FINITE] region 'us' refused <3>" in console.export_text()
    whole = comparison([outcome("bsp", 0)])
    assert "Failed runs" not in page_of(tmp_path, whole)
    console.print(result_table(whole))
    assert "failed" not in console.export_text()


def test_a_comparison_of_failures_only_has_a_page(tmp_path: Path) -> None:
    page = page_of(tmp_path, comparison([outcome("bsp", 0, WHY)]))
    assert "no data recorded" in page and page.count("<input") == 1


@pytest.mark.parametrize("between", [0.0, 1.0])
def test_points_have_steps_and_the_bytes_that_left_a_region(tmp_path: Path, between: float) -> None:
    """What the averager's own region exchanges never leaves it; links are told of by the way."""
    rows = [started()]
    for n in (1, 2):
        rows += [step("east", n, float(n)), exchange("east", n, float(n), bytes_sent=10**6)]
        rows.append(evaluation(n, float(n), accuracy=n / 4))
        rows += [wan("east", "west", n + between, update=300 * n)]
        rows += [wan("west", "east", n + between, reply=100 * n)]
    write(tmp_path / "events.jsonl", rows)
    found = outcome_of(
        "bsp", 1.0, load_tree(CONFIG, [], Experiment), summarise(events(rows)), tmp_path
    )
    assert [point.step for point in found.points] == [1, 2]
    expected = [400, 800] if between == 0 else [200, 400]
    assert [point.wan_bytes for point in found.points] == expected
    # Whoever asks for bytes over time is told the same.
    assert metric_table(events(rows), "eval.accuracy")["wan_bytes"] == expected
    drawn = _SoFar.of(record(events(rows))).wan_at(np.array([1.0, 2.0]))
    assert list(drawn) == expected
    assert [point.samples for point in found.points] == [32, 64]


def test_the_fastest_of_strategies_whose_losses_are_within_noise_is_the_best(
    tmp_path: Path,
) -> None:
    def runs(label: str, seconds: float, *losses: float) -> list[Outcome]:
        return [
            outcome(label, seed).model_copy(
                update={"eval": {"loss": loss}, "seconds": seconds, "time_to_target_s": None}
            )
            for seed, loss in enumerate(losses)
        ]

    outcomes = [
        *runs("slow", 90.0, 0.50, 0.52),
        *runs("fast", 30.0, 0.51, 0.53),
        *runs("worse", 10.0, 0.60, 0.70),
    ]
    rows = [
        row_of([o for o in outcomes if o.label == name], None) for name in ("slow", "fast", "worse")
    ]
    found = Comparison(ordered(rows, grows=False), [], outcomes, "loss", None)
    assert [(row.label, found.standing(row)) for row in found.rows] == [
        ("fast", "best"),
        ("slow", "within noise"),
        ("worse", "behind"),
    ]
    told = "loss of fast and slow is within noise; the fastest is fast, 30.0 s."
    assert told in " ".join(shown(found).split()) and told in page_of(tmp_path, found)
    single = ordered(
        [row_of(runs(name, s, loss), None) for name, s, loss in (("a", 9.0, 0.5), ("b", 1.0, 0.6))],
        grows=False,
    )
    assert [row.label for row in single] == ["a", "b"], "one run of each says nothing about noise"
