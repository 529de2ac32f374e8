"""Regions are lost, come back, join and leave while real processes train."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from test_standby_chaos import actors
from train_support import events_of, experiment_of, final_digests, train

from geo_ray.config.experiment import Experiment
from geo_ray.errors import InterruptedRunError
from geo_ray.job import rundir
from geo_ray.observe.events.schema import Event
from geo_ray.runtime.cluster.local import LocalCluster
from geo_ray.runtime.control.membership.member_requests import MemberRequest, ask

HOME, SECOND, THIRD = "us-east", "eu-west", "ap-south"
pytestmark = pytest.mark.timeout(600)  # whole runs

SECTIONS: dict[str, Any] = {
    "regions": [{"name": name} for name in (HOME, SECOND, THIRD)],
    "train": {"steps": 120, "eval_every": 20, "step_timeout_s": 60},
    "emulate": {"step_s": 0.25},
    "checkpoint": {"every_s": 2},
    "members": {"min": 2},
}


def with_steps(config: Experiment, steps: int) -> Experiment:
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})


def test_a_region_is_lost_and_comes_back(ray_cluster: LocalCluster, tmp_path: Path) -> None:
    config = with_steps(experiment_of(tmp_path, **SECTIONS), 100_000)
    run = rundir.create(config, tmp_path)
    killed: list[int] = []
    joined_at: list[float] = []

    def sink(event: Event) -> None:
        if event.kind == "step" and event["step"] >= 6 and not killed:
            killed.extend(actors(ray_cluster, SECOND, "PrimaryActor"))
            os.kill(killed[0], signal.SIGKILL)
        if event.kind == "region_joined":
            joined_at.append(event.t_s)
        if event.kind == "checkpoint" and len(joined_at) == 1:
            joined_at.append(event.t_s)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(InterruptedRunError):
        train(config, tmp_path, begun=run, sink=sink)
    events = events_of(run.path)
    (lost,) = [e for e in events if e.kind == "region_lost"]
    (joined,) = [e for e in events if e.kind == "region_joined"]
    assert lost["region"] == joined["region"] == SECOND and joined["view"] == 3
    before = [e for e in events if e.t_s < joined.t_s]
    assert 0 < joined["round"] <= max(e["round"] for e in before if e.kind == "exchange")
    assert 0 < joined["step"] <= max(e["step"] for e in before if e.kind == "step")
    assert joined["bytes"] > 0
    assert not {"join_failed", "members_refused"} & {e.kind for e in events}
    between = [e for e in events if e.kind == "step" and lost.t_s < e.t_s < joined.t_s]
    assert {e["region"] for e in between} == {HOME, THIRD} and len(between) > 10  # nobody waited
    carried = [e["bytes_by_class"].get("join", 0) for e in events if e.kind == "wan"]
    assert max(carried) >= joined["bytes"], "its state came from bridge to bridge"

    last = max(e["step"] for e in events if e.kind == "step")
    done = train(with_steps(config, last + 4), tmp_path, begun=run, resume=True)
    (finished,) = done.of("run_finished")
    assert set(finished["digests"]) == {HOME, SECOND, THIRD}
    assert len(final_digests(done.events)) == 1


@pytest.mark.slow
def test_a_region_joins_another_leaves_and_the_run_is_resumed(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    members = {"min": 1, "absent": [THIRD]}
    config = experiment_of(tmp_path, **SECTIONS | {"members": members})
    run = rundir.create(config, tmp_path)
    asked: list[str] = []

    def sink(event: Event) -> None:
        if event.kind == "step" and event["step"] >= 2 and not asked:
            asked.append("add")
            ask(run.path, MemberRequest(verb="drain", region=HOME))  # refused
            ask(run.path, MemberRequest(verb="add", region=THIRD))
        if event.kind == "region_joined":
            ask(run.path, MemberRequest(verb="drain", region=SECOND))

    done = train(config, tmp_path, begun=run, sink=sink)
    (refused,), (joined,) = done.of("members_refused"), done.of("region_joined")
    (drained,) = done.of("region_drained")
    assert refused["region"] == HOME and "hosts the averager" in refused["cause"]
    assert joined["region"] == THIRD and drained["region"] == SECOND
    (finished,) = done.of("run_finished")
    assert set(finished["digests"]) == {HOME, THIRD}
    assert len(final_digests(done.events)) == 1
    before = {e["step"] for e in done.of("step") if e["region"] == THIRD}
    assert min(before) > 2 and max(before) == 120
    assert not done.of("region_lost") and not done.of("checkpoint_failed")

    again = train(with_steps(config, 124), tmp_path, begun=run, resume=True)
    (_, finished) = [e for e in events_of(run.path) if e.kind == "run_finished"]
    assert set(finished["digests"]) == {HOME, THIRD}
    assert again.summary.steps == 124
