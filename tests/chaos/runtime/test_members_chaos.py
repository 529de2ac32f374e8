"""Regions are lost, come back, join and leave while real processes train."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from test_standby_chaos import actors

from geo_ray.base.errors import InterruptedRunError
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.runs import directory
from geo_ray.runs.directory import RunDirectory
from geo_ray.runs.requests import Interruption, MemberRequest, request_member_change
from geo_ray.telemetry.events import Event
from tests.support.train_support import books_of, events_of, experiment_of, final_digests, train

HOME, SECOND, THIRD = "us-east", "eu-west", "ap-south"
pytestmark = pytest.mark.timeout(900)  # whole runs

SECTIONS: dict[str, Any] = {
    "regions": [{"name": name} for name in (HOME, SECOND, THIRD)],
    "train": {"steps": 120, "eval_every": 20, "step_timeout_s": 60},
    "emulate": {"step_s": 0.25},
    "checkpoint": {"every_s": 2},
    "members": {"min": 2},
}


def with_steps(config: Experiment, steps: int) -> Experiment:
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})


def test_regions_are_lost_together_and_come_back(ray_cluster: LocalCluster, tmp_path: Path) -> None:
    """All members but one: two are brought up side by side."""
    config = with_steps(experiment_of(tmp_path, **SECTIONS | {"members": {"min": 1}}), 100_000)
    run = directory.create(config, tmp_path)
    killed: list[int] = []
    back: set[str] = set()

    interruption = Interruption()

    def sink(event: Event) -> None:
        if event.kind == "step" and event["step"] >= 6 and not killed:
            for region in (SECOND, THIRD):
                killed.extend(actors(ray_cluster, region, "PrimaryActor"))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        if event.kind == "region_joined":
            back.add(event["region"])
        if event.kind == "checkpoint" and back == {SECOND, THIRD}:
            back.add("saved")
            interruption.set()

    with pytest.raises(InterruptedRunError):
        train(config, tmp_path, begun=run, sink=sink, interruption=interruption)
    events = events_of(run.path)
    lost = [e for e in events if e.kind == "region_lost"]
    joins = [e for e in events if e.kind == "region_joined"]
    for found in (lost, joins):
        assert sorted(e["region"] for e in found) == sorted((SECOND, THIRD))
    assert {e["view"] for e in joins} <= {4, 5}, "at one border, or at two"
    for joined in joins:
        before = [e for e in events if e.t_s < joined.t_s]
        assert 0 < joined["round"] <= max(e["round"] for e in before if e.kind == "exchange")
        assert 0 < joined["step"] <= max(e["step"] for e in before if e.kind == "step")
    assert not {"join_failed", "members_refused"} & {e.kind for e in events}
    away = max(e.t_s for e in lost), min(e.t_s for e in joins)
    between = Counter(e["region"] for e in events if e.kind == "step" and away[0] < e.t_s < away[1])
    assert between.pop(HOME) > 5, "it waited for nobody"
    assert max(between.values(), default=0) <= 1, "the steps that they were in, and no other"
    carried = [e["bytes_by_class"].get("join", 0) for e in events if e.kind == "wan"]
    assert max(carried) >= joins[0]["bytes"] > 0, "its state came from bridge to bridge"

    last = max(e["step"] for e in events if e.kind == "step")
    done = train(with_steps(config, last + 4), tmp_path, begun=run, resume=True)
    (finished,) = done.of("run_finished")
    assert set(finished["digests"]) == {HOME, SECOND, THIRD}
    assert len(final_digests(done.events)) == 1


def check_resumed_without(config: Experiment, run: RunDirectory, base_dir: Path) -> None:
    """The checkpoint has all regions, and one is away; it comes back, and reads on."""
    before, earlier = books_of(run), len(events_of(run.path))
    asked: list[str] = []

    interruption = Interruption()

    def sink(event: Event) -> None:
        if event.kind == "step" and not asked:
            asked.append(request_member_change(run.path, MemberRequest(verb="add", region=THIRD)))
        if event.kind == "step" and event["region"] == THIRD and len(asked) == 1:
            asked.append("to stop")
            interruption.set()

    with pytest.raises(InterruptedRunError):
        train(
            config,
            base_dir,
            begun=run,
            resume=True,
            away=frozenset({THIRD}),
            sink=sink,
            interruption=interruption,
        )
    events = events_of(run.path)[earlier:]
    assert events[0]["regions"] == [HOME, SECOND]
    (joined,) = [e for e in events if e.kind == "region_joined"]
    assert joined["region"] == THIRD and not [e for e in events if e.kind == "region_lost"]
    after = books_of(run)[THIRD]
    assert after.cursor > before[THIRD].cursor and after.applied > before[THIRD].applied


@pytest.mark.slow
def test_a_region_dies_as_it_comes_back_and_the_pause_is_saved(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    """The others wait for it; Ctrl-C then, and the resume continues without it until it is back."""
    config = with_steps(experiment_of(tmp_path, **SECTIONS | {"members": {}}), 100_000)
    run = directory.create(config, tmp_path)
    killed: list[int] = []

    def kill_next() -> None:
        while not (found := set(actors(ray_cluster, SECOND, "PrimaryActor")) - set(killed)):
            time.sleep(0.05)
        killed.extend(found)
        for pid in found:
            os.kill(pid, signal.SIGKILL)

    interruption = Interruption()

    def sink(event: Event) -> None:
        if event.kind == "step" and event["step"] >= 6 and not killed:
            kill_next()
        if event.kind == "run_paused":
            threading.Thread(target=kill_next).start()
        if event.kind == "join_failed":
            interruption.set()

    with pytest.raises(InterruptedRunError, match="state is saved"):
        train(config, tmp_path, begun=run, sink=sink, interruption=interruption)
    events = events_of(run.path)
    kinds = [e.kind for e in events if e.kind not in ("step", "exchange", "wan")]
    for first, then in (("region_lost", "run_paused"), ("run_paused", "join_failed"),
                        ("join_failed", "checkpoint")):  # fmt: skip
        assert kinds.index(first) < len(kinds) - kinds[::-1].index(then)
    assert "region_joined" not in kinds

    stop = Interruption()  # of the resumption

    def again(event: Event) -> None:
        if event.kind == "region_joined":
            stop.set()

    with pytest.raises(InterruptedRunError, match="state is saved"):
        train(config, tmp_path, begun=run, resume=True, sink=again, interruption=stop)
    later = events_of(run.path)[len(events) :]
    assert [e["region"] for e in later if e.kind == "region_joined"] == [SECOND]
    assert "run_paused" not in {e.kind for e in later}  # by itself, and nobody has waited
    last = max(e["step"] for e in later if e.kind == "step")
    done = train(with_steps(config, last + 4), tmp_path, begun=run, resume=True)
    assert set(done.of("run_finished")[-1]["digests"]) == {HOME, SECOND, THIRD}
    assert len(final_digests(done.events)) == 1
    check_resumed_without(config, run, tmp_path)


@pytest.mark.slow
def test_a_region_joins_another_leaves_and_the_run_is_resumed(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    members = {"min": 1, "absent": [THIRD]}
    config = experiment_of(tmp_path, **SECTIONS | {"members": members})
    run = directory.create(config, tmp_path)
    asked: list[str] = []

    def sink(event: Event) -> None:
        if event.kind == "step" and event["step"] >= 2 and not asked:
            asked.append("add")
            request_member_change(run.path, MemberRequest(verb="drain", region=HOME))  # refused
            request_member_change(run.path, MemberRequest(verb="add", region=THIRD))
        if event.kind == "region_joined":
            request_member_change(run.path, MemberRequest(verb="drain", region=SECOND))

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
