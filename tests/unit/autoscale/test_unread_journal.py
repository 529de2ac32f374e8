"""A journal that cannot be read stops nobody: it is kept aside, and what is there goes on."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from autoscale_support import CONFIG, Scene, ends, launches, region, target

from geo_ray.autoscale.journal import JOURNAL_KEY, Journal
from geo_ray.autoscale.loop import Reconciler
from geo_ray.autoscale.memory import AutoscalerMemory, encode_memory
from geo_ray.autoscale.policy import AutoscalePolicy
from geo_ray.autoscale.replay.sim_cloud import SimTemper, SimulatedCloud, forever
from geo_ray.autoscale.replay.world import SimJob, SimWorld
from geo_ray.autoscale.target import ClusterTarget
from geo_ray.clock import VirtualClock
from geo_ray.lease.local_store import LocalConditionalStore
from geo_ray.runtime.autoscaler.actor import AutoscaleOrder, AutoscalerActor
from geo_ray.runtime.autoscaler.unread import memory_of, put_aside, read_journal

GOOD = encode_memory(AutoscalerMemory(launches=3))
DAMAGED = {
    "torn": GOOD[:-4],
    "empty": b"",
    "no journal": b"{",
    "another version": zlib.compress(b'{"version": 2, "duties": []}'),
}


def store_with(tmp_path: Path, data: bytes) -> LocalConditionalStore:
    store = LocalConditionalStore(tmp_path)
    store.write(JOURNAL_KEY, data, None)
    return store


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_it_is_kept_aside_and_another_one_begins(tmp_path: Path, data: bytes) -> None:
    store = store_with(tmp_path, data)
    assert "cannot be read" in read_journal(store).trouble
    key = put_aside(store, lambda: AutoscalerMemory(launches=1))
    assert key is not None and (tmp_path / key).read_bytes() == data
    assert read_journal(store).memory.launches == 1
    assert put_aside(store) is None
    store.write(JOURNAL_KEY, data, read_tag(store))  # once more
    again = put_aside(store)
    assert again is not None and (tmp_path / again).read_bytes() == data
    assert Journal(store, 4).read().epoch == 4


def read_tag(store: LocalConditionalStore) -> str:
    found = store.read(JOURNAL_KEY)
    assert found is not None
    return found.tag


def test_a_journal_that_can_be_read_stays(tmp_path: Path) -> None:
    store = store_with(tmp_path, GOOD)
    assert put_aside(store) is None
    assert read_journal(store).memory.launches == 3
    assert put_aside(LocalConditionalStore(tmp_path / "none")) is None


def test_machines_that_are_there_go_on_and_are_paid_since_they_are() -> None:
    scene = Scene()
    scene.looks(3)
    there = set(scene.machines)
    assert there
    prefix = AutoscalePolicy(CONFIG, "c").prefix
    scene.memory = memory_of(list(scene.machines.values()), prefix, scene.now_s)
    scene.memory.epoch = 7
    for _ in range(3):
        decided = scene.look()
        assert launches(decided) == [] and ends(decided) == []
    assert set(scene.machines) == there
    assert scene.memory.ledger.paid_usd > 0
    other = memory_of(list(scene.machines.values()), "as-other-", scene.now_s)
    assert other.duties == {}


# ------------------------------------------------------------------ an actor that finds one


EAST = region(name="east", at="r-1", zones=("r-1a",), rows_per_s=20.0)
WEST = region(name="west", at="r-2", zones=("r-2a",), rows_per_s=20.0)
PREFIX = AutoscalePolicy(CONFIG, "c").prefix


class Cluster:
    """Two regions, each with two machines at 0.3 USD an hour, and the actors that look after them.

    Actors go by the time of day, so the cloud's begins with that.
    """

    def __init__(self, where: Path, wanted: ClusterTarget) -> None:
        self.store, self.wanted = LocalConditionalStore(where), wanted
        self.clock = VirtualClock(time.time())
        markets = {pool: forever(0.3) for pool in wanted.pools()}
        self.cloud = SimulatedCloud(markets, self.clock.now_s, SimTemper(10.0, 60.0))
        self.world = SimWorld(wanted, SimJob(1e9, join_s=5.0), self.cloud, self.clock)
        self.epoch = 0
        self.begin()

    def begin(self) -> None:
        """Let another actor look after it."""
        self.actor = AutoscalerActor(
            AutoscaleOrder("c", self.cloud, self.store, CONFIG, self.wanted)
        )
        self.actor._mend_journal(PREFIX)
        self.epoch += 1
        self.loop = Reconciler(
            AutoscalePolicy(CONFIG, "c"),
            self.wanted,
            self.cloud,
            self.world,
            self.world,
            Journal(self.store, self.epoch),
            "c",
            lambda: None,
        )

    def looks(self, count: int) -> None:
        for _ in range(count):
            self.actor._tell(self.loop.tick(self.clock.now_s()))
            self.world.advance_to_s(self.clock.now_s() + 10.0)

    def tear(self) -> None:
        self.store.write(JOURNAL_KEY, b"{", read_tag(self.store))

    def alive(self) -> set[str]:
        return {each.machine.id for each in self.cloud.alive()}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Cluster]:
    monkeypatch.setattr(AutoscalerActor, "_live", lambda _: None)
    return lambda **fields: Cluster(tmp_path, target(regions=(EAST, WEST), **fields))


def test_a_region_that_is_silent_meanwhile_keeps_nobody_from_looking_and_its_machines_go_on(
    cluster: Callable[..., Cluster],
) -> None:
    found = cluster()
    found.looks(10)
    there = found.alive()
    found.tear()
    found.cloud.silent = {"r-1"}
    found.begin()
    found.looks(20)
    assert found.actor.status().is_acting
    assert len(found.loop.journal.read().duties) == 2, "those of the region that answers"
    found.cloud.silent = set()
    found.looks(20)
    assert found.alive() == there
    memory = found.loop.journal.read()
    assert set(memory.duties) == there and memory.unseen == ()
    assert memory.ledger.paid_usd == pytest.approx(found.cloud.bill_usd(), rel=0.05)
