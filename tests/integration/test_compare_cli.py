"""`geo-ray compare` as a user types it, simulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from geo_ray.cli.main import root

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
TARGET = "train.target={metric: accuracy, value: 0.3, direction: at_least}"
SMALL = ["--set", "train.steps=8", "--set", "train.eval_every=4", "--set", TARGET]


PAIR = "sma:interval=4,diloco:interval=8:codec=int8"


def run(out: Path, *more: str, strategies: str):
    arguments = ["compare", str(CONFIG), "--strategies", strategies, "--out", str(out), *SMALL]
    return CliRunner().invoke(root, [*arguments, *more], catch_exceptions=True)


def test_a_comparison_leaves_a_table_a_page_and_can_be_resumed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = run(out, "--seeds", "1", "--rates", "0.5,1", strategies=PAIR)
    assert first.exit_code == 0, first.output
    assert "6/6" in first.output and "diloco" in first.output
    result = json.loads((out / "compare.json").read_text())
    assert {row["label"] for row in result["rows"]} == {
        "sma:interval=4",
        "diloco:interval=8:codec=int8",
    }
    assert len(result["tuning"]) == 4 and len(result["runs"]) == 2
    for row in result["rows"]:
        assert row["rate"] in (0.5, 1.0) and row["wan_bytes"]["median"] > 0
    assert all(point["metrics"]["accuracy"] for r in result["runs"] for point in r["points"])
    page = (out / "compare.html").read_text()
    assert "over bytes" in page and "<script" not in page

    refused = run(out, "--seeds", "1", "--rates", "1", strategies=PAIR)
    assert refused.exit_code != 0 and "--resume" in str(refused.exception)
    made = {path: path.stat().st_mtime_ns for path in out.rglob("outcome.json")}
    again = run(out, "--seeds", "2", "--rates", "0.5,1", "--resume", strategies=PAIR)
    assert again.exit_code == 0 and "8/8" in again.output
    after = {path: path.stat().st_mtime_ns for path in out.rglob("outcome.json")}
    assert len(after) == len(made) + 2
    assert all(after[path] == stamp for path, stamp in made.items()), "runs were repeated"


@pytest.mark.slow
def test_a_comparison_can_be_of_real_runs(tmp_path: Path) -> None:
    """On a cluster that each run starts and ends; here the simulator only chose the rates."""
    out = tmp_path / "out"
    done = run(out, "--seeds", "1", "--rates", "1", "--real", strategies="bsp")
    assert done.exit_code == 0, done.output
    (row,) = json.loads((out / "compare.json").read_text())["rows"]
    assert row["label"] == "bsp" and row["wan_bytes"]["median"] > 0
    (events,) = out.rglob("events.jsonl")
    started = json.loads(events.read_text().splitlines()[0])
    assert started["kind"] == "run_started" and started["simulated"] is False


@pytest.mark.parametrize(
    ("strategies", "why"),
    [
        ("sma,nonsense", "no strategy 'nonsense'"),
        ("sma:interval", "key=value"),
        ("sma:intervall=3", "intervall"),
        ("diloco_streaming:interval=4:fragments=4:tau=1", "tau"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    tmp_path: Path, strategies: str, why: str
) -> None:
    refused = run(tmp_path / "out", strategies=strategies)
    assert refused.exit_code != 0
    assert why in str(refused.exception)
    assert not list(tmp_path.rglob("outcome.json"))
