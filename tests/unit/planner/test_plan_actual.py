"""A plan compared with its run: terms, unknown values, files and the command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from geo_ray.base.errors import (
    CheckpointMissingError,
    ConfigChangedError,
    PlanError,
    RunDirectoryError,
)
from geo_ray.cli.main import root
from geo_ray.planner.actual_cost import Spent, compare_cost
from geo_ray.planner.plan import Machines, Plan, RegionPlan
from geo_ray.runs import directory
from geo_ray.runs.follow_plan import emulation_of
from geo_ray.telemetry.report import render_report
from geo_ray.telemetry.summary import Cost, CostRow, cost_line, load_cost, load_summary, save_cost
from geo_ray.telemetry.totals import RunTotals
from tests.support.observe_support import events, exchange, small_run, started, step, wan, write

CONFIG = Path(__file__).parents[3] / "configs" / "planned.yaml"
SMALL = [
    "task.options={size: 0.1M}",
    "train.steps=4",
    "train.eval_every=2",
    "train.eval_batch_size=64",
    "data.batch_size=4",
    "emulate.step_s=0.5",
    "optimizer.schedule=null",
    "plan.startup_s=90",
]


def plan_of(**changes) -> Plan:
    """Return a plan with two regions.

    36 USD/h for machines, 3.6 USD/h fixed, 0.01 USD per second.
    """
    machines = Machines(
        type="box", market="spot", count=1, rows=32, rows_per_s=64.0, usd_per_h=18.0
    )
    fields = {
        "policy": "test",
        "regions": tuple(
            RegionPlan(region=name, machines=(machines,), step_s=0.5, fixed_usd_per_h=1.8)
            for name in ("east", "west")
        ),
        "averager": "east",
        "interval": 2,
        "codec": None,
        "steps": 4.0,
        "usd_per_gb": {"east": {"west": 0.02}, "west": {"east": 0.09}},
        "seconds": {
            "start": 10.0,
            "compute": 2.0,
            "inside the region": 0.5,
            "between regions": 0.25,
            "last exchange": 0.25,
        },
        "usd": {
            "machines spot": 0.1,
            "work lost to preemption": 0.02,
            "servers and disks": 0.01,
            "egress": 0.5,
        },
    }
    return Plan(**{**fields, **changes})


def spent_of(rows) -> Spent:
    totals = RunTotals()
    for event in events(rows):
        totals.feed(event)
    return Spent.of(totals)


def table(cost: Cost) -> dict[tuple[str, str], tuple[float, float | None]]:
    return {(row.unit, row.term): (row.estimated, row.actual) for row in cost.rows}


def test_terms_are_those_of_the_region_that_sets_the_pace():
    rows = [
        started(startup_s=12.0),
        step("east", 1, 1.0, compute_s=0.75),
        step("west", 1, 1.0, compute_s=1.0),
        exchange("east", 1, 2.0, start_s=1.0),
        exchange("west", 1, 1.5, start_s=1.0),
        exchange("west", 2, 2.5, start_s=1.5, blocking=False),
        wan("west", "east", 2.5, update=2_000_000_000, control=1),
        wan("east", "west", 2.5, reply=1_000_000_000),
        wan("east", "east", 2.5, reply=7),
    ]
    cost = compare_cost(plan_of(), spent_of(rows))
    found = table(cost)
    assert found["s", "start"] == (10.0, 12.5)  # the first step began half a second later
    assert found["s", "compute"] == (2.0, 1.0)
    assert found["s", "between regions"] == (0.5, 0.5)
    assert found["s", "the rest"] == (0.5, 0.5)
    assert found["s", "total"] == (13.0, 14.5)
    assert found["USD", "machines"] == pytest.approx((0.12, 0.145))
    assert found["USD", "servers and disks"] == pytest.approx((0.01, 0.0145))
    assert found["USD", "egress"] == pytest.approx((0.5, 0.2))
    assert found["USD", "total"] == pytest.approx((0.63, 0.3595))
    assert cost.notes == ()
    assert cost.total("s").error == pytest.approx(14.5 / 13 - 1)
    assert cost_line(cost) == "estimated 13.0 s and 0.63 USD, actual 14.5 s (+12%) and " + (
        "0.3595 USD (-43%)"
    )


def test_a_pair_without_a_price_makes_money_unknown_and_never_free():
    pair = {"usd_per_gb": {"east": {"west": 0.02}}}
    cost = compare_cost(plan_of(**pair), spent_of(small_run()))
    found = table(cost)
    assert found["USD", "egress"] == (0.5, None) and found["USD", "total"] == (0.63, None)
    assert found["USD", "machines"][1] > 0
    assert any("west to east" in note for note in cost.notes)
    assert cost_line(cost).endswith("and USD unknown")
    silent = wan("west", "east", 1.0, update=0)
    quiet = compare_cost(plan_of(**pair), spent_of([started(), silent]))
    assert table(quiet)["USD", "egress"] == (0.5, 0.0)


def test_a_simulated_run_has_the_start_that_was_estimated():
    cost = compare_cost(plan_of(), spent_of(small_run()))
    assert table(cost)["s", "start"] == (10.0, 10.0)
    assert any("the estimate is used" in note for note in cost.notes)
    assert table(cost)["s", "total"][1] == 10.0 + 4.5


def test_a_resumed_run_has_started_twice_and_a_stopped_one_says_so():
    stop = ("stop_requested", 4.5, {"cause": "accuracy reached 0.9"})
    again = started(startup_s=5.0)
    cost = compare_cost(plan_of(), spent_of([started(startup_s=7.0), again, stop]))
    assert table(cost)["s", "start"] == (10.0, 12.0)
    assert any("accuracy reached 0.9" in note for note in cost.notes)


def test_workers_side_by_side_do_not_compute_longer_than_the_run():
    rows = [
        started(startup_s=1.0),
        *(step("east", n, 1.0, compute_s=1.0, start_s=0.0) for n in (1, 2, 3)),
    ]
    found = table(compare_cost(plan_of(), spent_of(rows)))
    assert found["s", "compute"][1] == 1.0 and found["s", "the rest"][1] == 0.0


def test_the_file_is_written_whole_and_read_again(tmp_path):
    assert load_cost(tmp_path) is None
    cost = Cost(rows=(CostRow(term="total", unit="USD", estimated=0.0, actual=None),))
    assert cost.rows[0].error is None and cost.total("s") is None
    save_cost(cost, tmp_path)
    assert load_cost(tmp_path) == cost
    assert [path.name for path in tmp_path.iterdir()] == ["cost.json"]
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        save_cost(cost, tmp_path / "missing")
    for text in ("", "{}", '{"rows": []}', '{"rows": [{"term": 1}]}'):
        (tmp_path / "cost.json").write_text(text)
        with pytest.raises(RunDirectoryError, match="cannot read"):
            load_cost(tmp_path)


def test_a_run_without_a_plan_has_no_such_section_and_no_line(tmp_path):
    write(tmp_path / "events.jsonl", small_run())
    assert "Plan and run" not in render_report(tmp_path)
    save_cost(compare_cost(plan_of(), spent_of(small_run())), tmp_path)
    page = render_report(tmp_path)
    assert "Plan and run" in page and "time: between regions" in page


def words(*more: str) -> list[str]:
    return [str(CONFIG), *(word for one in SMALL for word in ("--set", one)), *more]


def test_a_simulation_that_follows_a_plan_ends_with_its_bill(tmp_path, monkeypatch):
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    monkeypatch.chdir(tmp_path)
    made = CliRunner().invoke(root, ["plan", *words("--out", "p.json")])
    assert made.exit_code == 0, made.output
    done = CliRunner().invoke(root, ["simulate", *words("--plan", "p.json", "--plain")])
    assert done.exit_code == 0, (done.output, done.exception)
    run, _ = directory.reopen(tmp_path / "runs" / "planned")
    plan = directory.followed_plan(run)
    summary, cost = load_summary(run.path), load_cost(run.path)
    assert (
        plan.model_dump_json()
        == Plan.model_validate_json((tmp_path / "p.json").read_bytes()).model_dump_json()
    )
    kept = json.loads((run.path / directory.PLAN_FILE).read_text())
    assert (kept["predicted_seconds"], kept["predicted_usd"]) == (plan.total_s, plan.total_usd)
    found = table(cost)
    assert found["s", "start"] == (90.0, 90.0)
    assert found["s", "compute"][1] == pytest.approx(found["s", "compute"][0], rel=0.05)
    assert found["s", "between regions"][1] >= 0  # of the slowest region, which others wait for
    assert found["s", "total"] == (plan.total_s, pytest.approx(90 + summary.seconds))
    assert summary.usd == found["USD", "total"][1] > 0
    assert found["USD", "egress"][1] > 0
    said = re.sub(r"\s+", " ", done.output)
    assert "USD" in said and "plan estimated" in said
    assert "Plan and run" in (run.path / "report.html").read_text()

    # Resuming finds the plan: nothing differs, and all that is missing is a checkpoint.
    machines = [word for one in emulation_of(plan) for word in ("--set", one)]
    resume = words(*machines, "--resume", str(run.path), "--plain")
    assert isinstance(
        CliRunner().invoke(root, ["train", *resume]).exception, CheckpointMissingError
    )
    other = tmp_path / "other.yaml"
    other.write_text(CONFIG.read_text().replace("lr: 0.001", "lr: 0.5"))
    refused = CliRunner().invoke(root, ["train", str(other), *resume[1:]]).exception
    assert isinstance(refused, ConfigChangedError) and "optimizer.lr" in str(refused)

    (run.path / directory.FOLLOWED_FILE).write_text("{}")
    with pytest.raises(PlanError, match="policy"):
        directory.followed_plan(run)


@pytest.mark.parametrize(
    "policy",
    ["optimal", *(pytest.param(p, marks=pytest.mark.slow) for p in ("cloudless", "everything"))],
)
def test_a_simulation_takes_as_long_as_its_plan_says(tmp_path, monkeypatch, policy):
    """Regions of unequal speed, of which one has no exchange to wait for."""
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    monkeypatch.chdir(tmp_path)
    uneven = ("data.batch_size=16", "train.steps=24", "train.eval_every=0", "plan.startup_s=0")
    uneven += ("emulate.link={rate_mbps: 40, delay_s: 0.02}", "plan.intervals=[4]")
    caps = {"us": 2, "eu": 1, "asia": 2}
    uneven += tuple(
        f"plan.regions.{name}.machines=[{{type: g4dn.xlarge, cap: {cap}, rows_per_s: 50}}]"
        for name, cap in caps.items()
    )
    more = [word for one in uneven for word in ("--set", one)]
    made = CliRunner().invoke(root, ["plan", *words(*more, "--policy", policy, "--out", "p.json")])
    assert made.exit_code == 0, made.output
    done = CliRunner().invoke(root, ["simulate", *words(*more, "--plan", "p.json", "--plain")])
    assert done.exit_code == 0, (done.output, done.exception)
    run, _ = directory.reopen(tmp_path / "runs" / "planned")
    found = table(load_cost(run.path))
    assert found["s", "between regions"][0] > 0 or policy == "optimal"
    assert found["s", "total"][1] == pytest.approx(found["s", "total"][0], rel=0.03)
    assert found["USD", "total"][1] == pytest.approx(found["USD", "total"][0], rel=0.03)
