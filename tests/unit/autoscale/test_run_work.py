"""How much of a run is left, as its directory tells."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_support import experiment

from geo_ray.clock import VirtualClock
from geo_ray.errors import RegionLostError
from geo_ray.job import rundir
from geo_ray.lease.driving import driving, seeker_of
from geo_ray.observe.events.log import EVENTS_FILE, EventLog
from geo_ray.observe.report.ending import note_failure
from geo_ray.planning.plan import Machines, Plan, RegionPlan
from geo_ray.runtime.autoscaler.run_work import RunWork

MACHINES = (Machines(type="m", market="spot", count=1, rows=8, rows_per_s=8, usd_per_h=1.0),)
PLAN = Plan(
    policy="optimal",
    regions=(RegionPlan(region="eu", machines=MACHINES, step_s=10.0),),
    averager="eu",
    interval=1,
    codec=None,
    steps=10,
    seconds={"start": 60.0, "compute": 100.0},
    usd={},
)


def begin(log: EventLog) -> None:
    log.write(
        "run_started", 0.0, run="trial", digest="d", strategy="sma", regions=["eu", "us"],
        task="digits", seed=0, simulated=False, averager="eu", steps={"eu": 10, "us": 10},
    )  # fmt: skip


def write_steps(log: EventLog, first: int, last: int) -> None:
    for number in range(first, last + 1):
        for region in ("eu", "us"):
            log.write(
                "step", float(number), region=region, step=number, samples=16, loss=1.0,
                compute_s=0.5, wait_s=0.0, start_s=number - 1.0,
            )  # fmt: skip


def test_all_is_left_before_it_begins_then_what_the_steps_say_and_nothing_when_it_is_done(
    tmp_path: Path,
) -> None:
    clock = VirtualClock()
    work = RunWork(tmp_path / "runs" / "trial", PLAN, 300.0, clock.now_s)
    assert work.left_s() == 160.0
    run = rundir.create(experiment(f"run.dir={tmp_path / 'runs'}"), tmp_path)
    assert work.left_s() == 160.0
    with driving(seeker_of(run.path, print)), EventLog(run.path / EVENTS_FILE) as log:
        begin(log)
        write_steps(log, 1, 2)
        assert work.left_s() == pytest.approx(8 * 10.0)
        write_steps(log, 3, 6)
        clock.advance_to_s(100.0)
        assert work.left_s() == pytest.approx(4 * 100.0 / 4), "as planned until it is measured"
        write_steps(log, 7, 9)
        clock.advance_to_s(140.0)
        assert work.left_s() == pytest.approx(1 * 40.0 / 3)
        write_steps(log, 10, 10)
        log.write("run_finished", 10.0, summary={})
    assert work.left_s() == 0.0


def test_a_run_that_failed_keeps_its_machines_for_a_while(tmp_path: Path) -> None:
    clock = VirtualClock()
    run = rundir.create(experiment(f"run.dir={tmp_path / 'runs'}"), tmp_path)
    work = RunWork(run.path, PLAN, 300.0, clock.now_s)
    with driving(seeker_of(run.path, print)), EventLog(run.path / EVENTS_FILE) as log:
        begin(log)
        write_steps(log, 1, 5)
    note_failure(run.path, RegionLostError("us is lost"))
    assert work.left_s() == pytest.approx(50.0)
    clock.advance_to_s(299.0)
    assert work.left_s() == pytest.approx(50.0)
    clock.advance_to_s(301.0)
    assert work.left_s() == 0.0
