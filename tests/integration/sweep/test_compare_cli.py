"""`geo-ray compare` as a user types it, simulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from geo_ray.base.load import load_tree
from geo_ray.cli.main import root
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.actual_cost import Bill
from geo_ray.planner.plan import load_plan

CONFIG = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
PLANNED = CONFIG.with_name("planned.yaml")
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
        assert row["usd"]["median"] is None, "there are no prices"
    assert "USD" not in first.output
    assert all(point["metrics"]["accuracy"] for r in result["runs"] for point in r["points"])
    page = (out / "compare.html").read_text()
    assert "over bytes" in page and "<script" not in page

    refused = run(out, "--seeds", "1", "--rates", "1", strategies=PAIR)
    assert refused.exit_code != 0 and "--resume" in str(refused.exception)
    made = (out / "simulated" / "trials.jsonl").read_text().splitlines()
    again = run(out, "--seeds", "2", "--rates", "0.5,1", "--resume", strategies=PAIR)
    assert again.exit_code == 0 and "8/8" in again.output
    after = (out / "simulated" / "trials.jsonl").read_text().splitlines()
    assert len(made) == 6 and len(after) == len(made) + 2
    assert after[: len(made)] == made, "runs were repeated"


@pytest.mark.slow
def test_a_plan_prices_a_comparison_and_leaves_each_variant_its_exchanges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    changes = ["task.options={size: 0.1M}", "train.steps=4", "train.eval_every=2"]
    changes += ["train.eval_batch_size=64", "data.batch_size=4", "emulate.step_s=0.5"]
    changes += [f"run.dir={tmp_path}", "optimizer.schedule=null"]
    common = [str(PLANNED), *(word for one in changes for word in ("--set", one))]
    file, out = str(tmp_path / "p.json"), tmp_path / "out"
    made = CliRunner().invoke(root, ["plan", *common, "--out", file])
    assert made.exit_code == 0, made.output
    options = ["--strategies", "bsp,diloco:interval=2:codec=int8", "--seeds", "1", "--rates", "1"]
    line = ["compare", *common, *options, "--out", str(out)]
    done = CliRunner().invoke(root, [*line, "--plan", file])
    assert done.exit_code == 0, (done.output, done.exception)
    result = json.loads((out / "compare.json").read_text())
    usd = {row["label"]: row["usd"]["median"] for row in result["rows"]}
    assert usd["bsp"] > usd["diloco:interval=2:codec=int8"] > 0
    plan = load_plan(Path(file))
    for run in result["runs"]:
        pairs = {(src, dst): n for src, to in run["sent_bytes"].items() for dst, n in to.items()}
        bill = Bill.of(plan).usd(run["seconds"], pairs)
        assert run["usd"] == pytest.approx(sum(bill.values())) and bill["egress"] > 0
        assert sum(pairs.values()) == run["wan_bytes"]
    for lock in out.rglob("config.lock.yaml"):
        made_of = load_tree(lock, [], Experiment)
        assert {r.name: r.workers for r in made_of.regions} == {
            r.region: r.workers for r in plan.regions
        }
        assert made_of.strategy.kind == "bsp" or made_of.strategy.interval == 2
    assert "USD" in done.output


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
    assert not list(tmp_path.rglob("trials.jsonl"))
