"""`geo-ray schedule`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from geo_ray.api import schedule as schedule_api
from geo_ray.base.errors import ScheduleInputError
from geo_ray.cli.schedule import schedule
from geo_ray.scheduler.workload import LoadShape

SMALL = ["--machines", "8", "--jobs", "5", "--slots", "10"]


def test_numbers_page_and_bound(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    options = ["--generate", *SMALL, "--policy", "pd_ors,fifo", "--bound", "--json"]
    done = CliRunner().invoke(schedule, [*options, "--page", str(page)], catch_exceptions=False)
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert set(found["policies"]) == {"pd_ors", "fifo"}
    assert found["policies"]["pd_ors"]["utility"] <= found["bound"]
    text = page.read_text()
    assert "upper bound" in text
    assert "<script" not in text


def test_a_table_of_all_policies() -> None:
    done = CliRunner().invoke(schedule, ["--generate", *SMALL], catch_exceptions=False)
    assert done.exit_code == 0
    assert "utility" in done.stdout
    assert done.stderr.startswith("replaying 5 generated jobs under pd_ors, oasis, fifo")


def test_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "workload.csv"
    trace.write_text("name,time,application,num_replicas,batch_size\na,0,ncf,1,128\n")
    options = [str(trace), "--format", "pollux", "--policy", "fifo", "--json"]
    done = CliRunner().invoke(schedule, options, catch_exceptions=False)
    assert json.loads(done.stdout)["policies"]["fifo"]["ended"] == 1


def test_either_a_trace_or_made_up_jobs() -> None:
    for options in ([], ["x.json", "--generate"]):
        done = CliRunner().invoke(schedule, options)
        assert done.exit_code == 2
        assert "--generate" in done.output


def test_the_library_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ScheduleInputError, match="unknown policy"):
        schedule_api.schedule(["nothing"], shape=LoadShape(3, 1, 3))
    with pytest.raises(ScheduleInputError, match="no policy given"):
        schedule_api.schedule([])
