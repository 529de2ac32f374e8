"""A run actor's handoff record restores the same group of processes in the next one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.keys import RunKeys
from geo_ray.runtime import actor_group
from geo_ray.runtime.actor_group import ActorGroup, GroupWorker
from geo_ray.runtime.launcher import GoneRegions, Handoff, HandoffRecord, ProcessSpec
from geo_ray.runtime.spec import RunSpec
from geo_ray.training.membership import AveragerLeader

REGIONS = [{"name": "eu", "ps_shards": 2, "workers": 2}, {"name": "us"}]


@pytest.fixture(autouse=True)
def nobody_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would start a cluster for that."""
    monkeypatch.setattr(actor_group, "kill", lambda handle: None)


class Call:
    """A method of a handle; a call's reference is what was asked."""

    def __init__(self, about: tuple[str, str], asked: list[tuple[object, ...]]) -> None:
        self._about, self._asked = about, asked

    def remote(self, *arguments: object) -> tuple[object, ...]:
        self._asked.append((*self._about, *arguments))
        return self._asked[-1]


class Remote:
    """Stands for a handle; what is asked of it is kept."""

    def __init__(self, name: str, asked: list[tuple[object, ...]]) -> None:
        self.name, self._asked = name, asked

    def __getattr__(self, method: str) -> Any:
        return Call((self.name, method), self._asked)


class Launcher:
    """Keeps what is noted and ordered."""

    def __init__(self, asked: list[tuple[object, ...]]) -> None:
        self.records: list[HandoffRecord] = []
        self.specs: list[ProcessSpec] = []
        self._asked = asked

    def make(self, specs: Sequence[ProcessSpec]) -> list[Remote]:
        self.specs += specs
        return [Remote(f"made {len(self.specs)}", self._asked) for _ in specs]

    def place(self, demands: object, timeout_s: float) -> Mapping[str, Any]:
        raise NotImplementedError

    def remove(self, placed: object) -> None:
        raise NotImplementedError

    def is_ours(self) -> bool:
        return True

    def note(self, record: HandoffRecord) -> None:
        self.records.append(record)


class Place:
    def strategy(self, role: str, rank: int) -> str:
        return f"{role} {rank}"


def group_of(asked: list[tuple[object, ...]], token: int) -> tuple[ActorGroup, Launcher]:
    tree = {
        "name": "tiny",
        "task": {"use": "digits"},
        "data": {"generate": {}},
        "regions": REGIONS,
        "strategy": {"kind": "sma"},
        "optimizer": {"kind": "sgd"},
        "train": {"steps": 1},
    }
    experiment = Experiment.model_validate_json(json.dumps(tree))
    spec = RunSpec(experiment.model_dump_json(), "/", "/", "", "run", "/", attempt=3)
    keys = RunKeys("run", experiment.region_names, experiment.transport)
    launcher, place = Launcher(asked), Place()
    placed: Any = {"eu": place, "us": place}
    return ActorGroup(spec, placed, keys, launcher, token), launcher  # type: ignore[arg-type]


def filled(asked: list[tuple[object, ...]]) -> tuple[ActorGroup, Launcher]:
    group, launcher = group_of(asked, 1)
    for name in ("eu", "us"):
        group.bridges[name] = Remote(f"{name} bridge", asked)
        group.primaries[name] = Remote(f"{name} ps", asked)
        group.shard_addresses[name] = [("127.0.0.1", 1)]
        group.bridge_addresses[name] = (("127.0.0.1", 2), ("127.0.0.1", 3))
    group.shard_servers = {"eu": [Remote("eu ps 1", asked)], "us": []}
    for place in (("eu", 0), ("eu", 1), ("us", 0)):
        group.workers[place] = GroupWorker(*place, 1, Remote(f"worker {place}", asked))
    return group, launcher


def test_the_next_group_is_the_same_and_waits_for_the_same_workers() -> None:
    asked: list[tuple[object, ...]] = []
    before, launcher = filled(asked)
    before.standby, before.former_leaders = "us", {"us"}
    before.leader = AveragerLeader("eu", 4)
    before.note(10.0, GoneRegions(("us",)), is_changing=False)
    record = launcher.records[-1]
    after, _ = group_of(asked, 2)
    after.restore(Handoff(record, {("eu", 1): 5}, 9), record)
    assert after.servers() == before.servers()
    assert [after.leader, after.standby, after.former_leaders] == [
        AveragerLeader("eu", 4), "us", {"us"},
    ]  # fmt: skip
    assert after.shard_addresses == before.shard_addresses
    assert after.bridge_addresses == before.bridge_addresses
    assert {p: (w.attempt, w.handle) for p, w in after.workers.items()} == {
        p: (w.attempt, w.handle) for p, w in before.workers.items()
    }
    assert all(worker.is_out for worker in after.workers.values())
    assert [call for call in asked if call[1] == "outcome"] == [
        (f"worker {place}", "outcome", 2) for place in before.workers
    ]
    assert after.next_attempt() == 10
    assert after.replace_worker(after.workers["eu", 1]).attempt == 6, (
        "later than all that were made"
    )
    assert after.replace_worker(after.workers["eu", 0]).attempt == 2


def test_only_changes_are_recorded() -> None:
    group, launcher = filled([])
    for _ in range(3):
        group.note(10.0, GoneRegions(), is_changing=False)
    assert len(launcher.records) == 1
    group.replace_worker(group.workers["us", 0])
    group.note(10.0, GoneRegions(), is_changing=False)
    group.note(10.0, GoneRegions(), is_changing=True)
    group.note(10.0, GoneRegions(("us",)), is_changing=True)
    group.expect_failover()
    group.note(10.0, GoneRegions(("us",)), is_changing=True)
    assert len(launcher.records) == 4
    assert launcher.records[1].workers["us", 0][0] == 2
    assert [record.gone.awaited for record in launcher.records] == [(), (), (), ("us",)]
    assert [record.is_changing for record in launcher.records] == [False, False, True, True]


def test_an_excluded_region_is_not_brought_back() -> None:
    """A run actor learns while attaching: one worker was lost, another was asked to leave."""
    rows = {"us": {"cursor": 4}}
    before = GoneRegions(("us", "asia"), ("eu",), rows)
    assert before.but_for({"us", "eu"}) == GoneRegions(("asia",), ("eu", "us"), rows)
    assert before.but_for(()) == before
