"""Real processes of the averager's region are killed; the run continues with its standby."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_train_faults import check_whole

from geo_ray.base.errors import InterruptedRunError, RegionLostError
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.runs import directory
from geo_ray.runs.requests import Interruption, MemberRequest, request_member_change
from geo_ray.telemetry.events import Event
from tests.support.train_support import (
    Trained,
    events_of,
    experiment_of,
    final_digests,
    simulate,
    train,
)

HUB, STANDBY, THIRD = "us-east", "eu-west", "ap-south"
STEPS = 30
pytestmark = pytest.mark.timeout(900)  # several whole commands per test

SECTIONS: dict[str, Any] = {
    "regions": [{"name": name} for name in (HUB, STANDBY, THIRD)],
    "train": {"steps": STEPS, "eval_every": 10, "step_timeout_s": 60},
    "emulate": {"step_s": 0.15},
    "checkpoint": {"every_s": 0.5, "restarts": 0},
    "averager": {"region": HUB, "standby": STANDBY, "failover_s": 1.0, "rejoin_s": 2.0},
    "members": {"rejoin": False},
}


def actors(cluster: LocalCluster, region: str, *kinds: str) -> list[int]:
    """Process ids of a region's actors of some classes; of all without one."""
    names = kinds or ("BridgeActor", "PrimaryActor", "ShardServerActor", "WorkerActor")
    return cluster.actor_pids(region, *names)


def kill_at(step: int, pids: Callable[[], list[int]], killed: list[int]) -> Callable[[Event], None]:
    def sink(event: Event) -> None:
        if event.kind == "step" and event["step"] >= step and not killed:
            killed.extend(pids())
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    return sink


def check_went_on(done: Trained, exact: bool) -> None:
    (lost,) = done.of("region_lost")
    assert lost["region"] == HUB
    assert [(e["region"], e["term"]) for e in done.of("averager_moved")] == [(STANDBY, 2)]
    assert [(e["region"], e["name"]) for e in done.of("region_left")] == [(STANDBY, HUB)]
    assert done.summary.faults["region_lost"] == 1
    (finished,) = done.of("run_finished")
    assert set(finished["digests"]) == {STANDBY, THIRD}
    if exact:
        assert len(final_digests(done.events)) == 1
    last = {e["region"]: e["step"] for e in done.of("step")}
    assert last[STANDBY] == last[THIRD] == STEPS
    final = [e for e in done.of("eval") if e["final"] and e["region"] is None]
    assert len(final) == 1
    after = done.events[done.events.index(lost) :]
    assert [e for e in after if e.kind == "checkpoint"]  # of the regions that are left
    assert (done.run.path / "summary.json").is_file()


def with_steps(config: Experiment, steps: int) -> Experiment:
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})


@pytest.mark.slow
def test_successive_leaders_are_lost_and_come_back(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    """All processes of the averager's region die; where it moves to, too; both come back."""
    sections = SECTIONS | {"strategy": {"kind": "sma", "interval": 1}, "members": {"min": 1}}
    config = with_steps(experiment_of(tmp_path, **sections), 100_000)
    run = directory.create(config, tmp_path)
    seen, stop = list[str](), Interruption()

    def strike(region: str) -> None:
        for pid in actors(ray_cluster, region):
            os.kill(pid, signal.SIGKILL)

    def sink(event: Event) -> None:
        if event.kind == "step" and event["step"] >= 5 and not seen:
            seen.append("first")
            strike(HUB)
        if event.kind in {"region_joined", "standby_ready"}:
            seen.append(f"{event.kind} {event['region']}")
        both = {f"region_joined {HUB}", f"standby_ready {STANDBY}"}
        if both <= set(seen) and "second" not in seen:
            seen.append("second")
            strike(STANDBY)
        if f"region_joined {STANDBY}" in seen and "third" not in seen:
            seen.append("third")
            stop.set()

    with pytest.raises(InterruptedRunError):
        train(config, tmp_path, begun=run, sink=sink, interruption=stop)
    events = events_of(run.path)
    moved = [e["term"] for e in events if e.kind == "averager_moved"]
    assert moved == [2, 3]
    assert [e["region"] for e in events if e.kind == "region_lost"] == [HUB, STANDBY]

    last = max(e["step"] for e in events if e.kind == "step")
    done = train(with_steps(config, last + 4), tmp_path, begun=run, resume=True)
    (finished,) = done.of("run_finished")
    assert set(finished["digests"]) == {HUB, STANDBY, THIRD}
    assert len(final_digests(done.events)) == 1


@pytest.mark.slow
def test_the_averagers_region_is_lost_and_the_others_finish(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    experiment = experiment_of(tmp_path, **SECTIONS | {"strategy": {"kind": "sma", "interval": 1}})
    killed: list[int] = []
    sink = kill_at(5, lambda: actors(ray_cluster, HUB), killed)
    done = train(experiment, tmp_path, sink=sink)
    assert len(killed) == 3
    check_went_on(done, exact=True)


@pytest.mark.slow
def test_a_region_that_lost_only_its_bridge_continues_as_an_ordinary_one(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    strategy = {"kind": "sma", "interval": 1}
    averager = {"region": HUB, "standby": STANDBY, "failover_s": 60}
    experiment = experiment_of(tmp_path, **SECTIONS | {"strategy": strategy, "averager": averager})
    killed: list[int] = []
    sink = kill_at(5, lambda: actors(ray_cluster, HUB, "BridgeActor"), killed)
    done = train(experiment, tmp_path, sink=sink)
    assert len(killed) == 1
    check_whole(done, simulate(experiment, tmp_path))  # nothing is lost
    assert [e["region"] for e in done.of("bridge_replaced")] == [HUB]
    assert [(e["region"], e["term"]) for e in done.of("averager_moved")] == [(STANDBY, 2)]
    assert not done.of("region_lost") and not done.of("region_left")


@pytest.mark.slow
def test_another_region_is_not_replaced(ray_cluster: LocalCluster, tmp_path: Path) -> None:
    experiment = experiment_of(tmp_path, **SECTIONS)
    run = directory.create(experiment, tmp_path)
    killed: list[int] = []
    sink = kill_at(5, lambda: actors(ray_cluster, THIRD, "PrimaryActor"), killed)
    with pytest.raises(RegionLostError, match=THIRD):
        train(experiment, tmp_path, begun=run, sink=sink)
    assert not [e for e in events_of(run.path) if e.kind == "averager_moved"]


@pytest.mark.slow
def test_the_averagers_region_leaves_with_all_it_has_done(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    """Nothing died: its standby takes over, and it leaves like any other region."""
    sections = SECTIONS | {"strategy": {"kind": "sma", "interval": 1}, "members": {"min": 2}}
    config = with_steps(experiment_of(tmp_path, **sections), 120)
    run = directory.create(config, tmp_path)
    asked: list[str] = []

    def sink(event: Event) -> None:
        if event.kind == "step" and event["step"] >= 5 and not asked:
            asked.append(HUB)
            request_member_change(run.path, MemberRequest(verb="drain", region=HUB))

    done = train(config, tmp_path, begun=run, sink=sink)
    assert [(e["region"], e["term"]) for e in done.of("averager_moved")] == [(STANDBY, 2)]
    assert [e["region"] for e in done.of("region_drained")] == [HUB]
    assert not done.of("region_lost") and not done.of("members_refused")
    (finished,) = done.of("run_finished")
    assert set(finished["digests"]) == {STANDBY, THIRD}
    assert len(final_digests(done.events)) == 1
