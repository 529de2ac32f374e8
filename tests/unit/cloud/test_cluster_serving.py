"""The cluster service: runs are saved, budgets passed on, and progress reported."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from benchmarks.autoscale.cluster_kills import local_world
from geo_ray.base.errors import ClusterError, ClusterStateError
from geo_ray.cloud.autoscaler.actions import AutoscalerStatus
from geo_ray.cloud.cluster.down import end_cluster
from geo_ray.cloud.cluster.serve import ClusterServer, RunStops
from geo_ray.cloud.cluster.up import make_cluster
from geo_ray.runs import directory, requests
from geo_ray.runs.lease import LEASE_KEY, driving, seeker_of
from geo_ray.runs.remote import REQUESTS
from geo_ray.runs.status import StatusReader
from geo_ray.telemetry.event_log import EVENTS_FILE, EventLog
from tests.support.cluster_support import CloudWorld, PlayedRay, asked_of, nobody, until
from tests.support.job_support import experiment as job_experiment


@pytest.fixture
def world(tmp_path: Path) -> Iterator[CloudWorld]:
    with ExitStack() as stack:
        yield stack.enter_context(local_world(tmp_path))


def run_of(tmp_path: Path, name: str = "asked") -> Path:
    config = job_experiment(f"run.dir={tmp_path / 'runs'}", f"name={name}")
    return directory.create(config, tmp_path).path


def driven(stack: ExitStack, path: Path) -> None:
    stack.enter_context(driving(seeker_of(path, nobody)))
    stack.enter_context(EventLog(path / EVENTS_FILE))


# ------------------------------------------------------------------ budget


def test_a_budget_is_changed_while_the_cluster_is_up(world: CloudWorld) -> None:
    world.config["plan"]["budget_usd"] = 500.0
    asked = asked_of(world)
    made = make_cluster(asked, nobody)
    assert made.target.budget_usd == 500.0
    ray: Any = PlayedRay(looks=-1000)
    thread = Thread(target=ClusterServer(asked.state, ray, made).run)
    thread.start()
    world.config["plan"]["budget_usd"] = 700.0
    said: list[str] = []
    again = make_cluster(asked_of(world), said.append)
    assert again.target == replace(made.target, budget_usd=700.0)
    assert again.made == made.made and "the budget of asked changed: 700 USD" in said
    until(lambda: ray.allowed == [500.0, 700.0])
    world.config["train"] = {"steps": 7}
    with pytest.raises(ClusterStateError, match="another configuration"):
        make_cluster(asked_of(world), nobody)
    end_cluster(asked.state, nobody)
    thread.join()


def test_runs_are_saved_once_before_a_budget_ends_their_machines(
    world: CloudWorld, tmp_path: Path
) -> None:
    world.config["run"] = {"dir": str(tmp_path / "runs")}
    asked = asked_of(world)
    made = make_cluster(asked, nobody)
    path = directory.create(
        job_experiment(f"run.dir={tmp_path / 'runs'}", "name=asked"), tmp_path
    ).path
    ray: Any = PlayedRay(looks=-1000)
    with ExitStack() as stack:
        stack.enter_context(driving(seeker_of(path, nobody)))
        stack.enter_context(EventLog(path / EVENTS_FILE))
        thread = Thread(target=ClusterServer(asked.state, ray, made).run)
        thread.start()
        until(lambda: ray.looks > -998)
        assert not requests.take_stop_request(path)
        ray.saves = True
        until(lambda: requests.take_stop_request(path))
        looks = ray.looks
        until(lambda: ray.looks > looks + 3)
        assert not requests.take_stop_request(path), "once"
    said: list[str] = []
    end_cluster(asked.state, said.append)
    thread.join()
    assert said[0] == "the budget is nearly used up" and f"{path}" in said[1]


def test_a_run_that_comes_again_while_the_money_ends_is_saved_again(
    world: CloudWorld, tmp_path: Path
) -> None:
    world.config["run"] = {"dir": str(tmp_path / "runs")}
    asked, path = asked_of(world), run_of(tmp_path)
    made = make_cluster(asked, nobody)
    ray: Any = PlayedRay(looks=-1000, saves=True)
    thread = Thread(target=ClusterServer(asked.state, ray, made).run)
    thread.start()
    for _ in range(2):
        with ExitStack() as stack:
            driven(stack, path)
            until(lambda: requests.take_stop_request(path))
    ray.saves = False  # there is a larger budget
    looks = ray.looks
    until(lambda: ray.looks > looks + 2)
    said: list[str] = []
    end_cluster(asked.state, said.append)
    thread.join()
    assert "the budget is nearly used up" not in said


class StartingAnew(PlayedRay):
    """An autoscaler that stops answering once there is something to save."""

    def status(self) -> AutoscalerStatus:
        if self.saves and self.looks < 0:
            self.looks = 0
            super().status()
            return AutoscalerStatus(True, saves=True)
        if self.saves:
            raise ClusterError("the autoscaler does not answer: it is starting anew")
        return super().status()


def test_runs_are_saved_though_the_autoscaler_does_not_answer(
    world: CloudWorld, tmp_path: Path
) -> None:
    world.config["run"] = {"dir": str(tmp_path / "runs")}
    asked, path = asked_of(world), run_of(tmp_path)
    made = make_cluster(asked, nobody)
    ray: Any = StartingAnew(looks=-1000, saves=True)
    with ExitStack() as stack:
        driven(stack, path)
        with pytest.raises(ClusterError, match="starting anew"):
            ClusterServer(asked.state, ray, made).run()
        assert requests.take_stop_request(path)
    end_cluster(asked.state, nobody, at_once=True)


# ------------------------------------------------------------------ the end


def test_down_reports_all_steps_of_a_fast_head(world: CloudWorld) -> None:
    asked = asked_of(world)
    record = make_cluster(asked, nobody)
    ray: Any = PlayedRay(looks=-1000)
    server = ClusterServer(asked.state, ray, record)
    thread = Thread(target=server.run)
    thread.start()
    said: list[str] = []
    assert end_cluster(asked.state, said.append).in_order
    thread.join()
    assert said[:5] == [
        "stopping runs",
        "geo-ray-queue-all is served no more",
        "stopping job one, which saves its run first",
        "runs have stopped; draining and ending machines",
        "all machines have ended",
    ]


def test_down_waits_for_a_run_that_is_still_saving(
    world: CloudWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("geo_ray.cloud.cluster.down._SILENT_S", 3.0)
    world.config["run"] = {"dir": str(tmp_path / "runs")}
    asked, path = asked_of(world), run_of(tmp_path)
    made = make_cluster(asked, nobody)
    ray: Any = PlayedRay(looks=-1000)
    said: list[str] = []
    ended: list[bool] = []
    with ExitStack() as stack:
        driven(stack, path)
        server = Thread(target=ClusterServer(asked.state, ray, made).run)
        server.start()
        down = Thread(target=lambda: ended.append(end_cluster(asked.state, said.append).in_order))
        down.start()
        until(lambda: requests.take_stop_request(path))
        time.sleep(5.0)  # as long as the save takes
        assert not ended
    down.join()
    server.join()
    assert ended == [True] and not any("has not reported" in text for text in said)


# ------------------------------------------------------------------ which run


def test_the_active_run_is_stopped_in_any_directory(tmp_path: Path) -> None:
    first, second, other, broken, torn, deaf = (
        run_of(tmp_path, name) for name in ("trial",) * 2 + ("trial-7",) + ("trial",) * 3
    )
    (broken / directory.CONFIG_FILE).write_text("x: [")
    (torn / LEASE_KEY).write_text("")
    (deaf / REQUESTS).write_text("no folder")
    stops = RunStops(tmp_path / "runs" / "trial", 0.0)
    with ExitStack() as stack:
        for path in (second, other, deaf):
            driven(stack, path)
        assert stops.ask() == [second]
        assert stops.ask() == []
        assert stops.any_going()
    assert not stops.any_going()
    assert [path.name for path in (first, second, other)] == ["trial", "trial-2", "trial-7"]
    assert (requests.take_stop_request(first), requests.take_stop_request(other)) == (False, False)
    assert requests.take_stop_request(second)


def test_a_run_that_is_driven_elsewhere_is_asked_though_it_is_not_known_yet(tmp_path: Path) -> None:
    path = run_of(tmp_path)
    with driving(seeker_of(path, nobody)):
        there = json.loads((path / LEASE_KEY).read_text())
    there |= {"released": False, "owner": there["owner"] | {"host": "far", "machine": "another"}}
    (path / LEASE_KEY).write_text(json.dumps(there))
    assert StatusReader(path).read().is_going is None
    stops = RunStops(path, 0.0)
    assert stops.ask() == [path] and stops.any_going()
    assert requests.take_stop_request(path)
