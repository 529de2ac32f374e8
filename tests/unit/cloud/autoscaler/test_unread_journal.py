"""An unreadable journal is saved under another name, and its machines continue."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from geo_ray.base.clock import VirtualClock
from geo_ray.base.errors import RunDirectoryError
from geo_ray.cloud.autoscaler import actor
from geo_ray.cloud.autoscaler.actor import AutoscaleOrder, AutoscalerActor
from geo_ray.cloud.autoscaler.journal import JOURNAL_KEY, Journal
from geo_ray.cloud.autoscaler.journal_read import (
    SPENT_KEY,
    SpentRecord,
    SpentRecorder,
    memory_of,
    put_aside,
    read_journal,
    read_spent,
)
from geo_ray.cloud.autoscaler.policy import BUDGET, AutoscalePolicy
from geo_ray.cloud.autoscaler.reconcile import Reconciler
from geo_ray.cloud.autoscaler.state import AutoscalerState, decode_memory, encode_memory
from geo_ray.cloud.autoscaler.target import ROLE_LABEL, ClusterTarget, HeadTarget
from geo_ray.cloud.backtest.simulated_cloud import (
    SimCloudBehavior,
    SimJob,
    SimulatedCloud,
    SimWorld,
    forever,
)
from geo_ray.cloud.provider import Machine, MachineState, Market, Pool
from geo_ray.runs.lease import Unfenced
from geo_ray.storage.conditional_store import LocalConditionalStore
from tests.support.autoscale_support import CONFIG, SMALL, Scene, ends, launches, region, target

GOOD = encode_memory(AutoscalerState(launches=3))
DAMAGED = {
    "torn": GOOD[:-4],
    "empty": b"",
    "no journal": b"{",
    "another release": zlib.compress(b'{"token": 2, "duties": {}}'),
}


PREFIX = AutoscalePolicy(CONFIG, "c").prefix


def store_with(tmp_path: Path, data: bytes) -> LocalConditionalStore:
    store = LocalConditionalStore(tmp_path)
    store.write(JOURNAL_KEY, data, None)
    return store


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_it_is_kept_aside_and_another_one_begins(tmp_path: Path, data: bytes) -> None:
    store = store_with(tmp_path, data)
    assert "cannot be read" in read_journal(store).trouble
    key = put_aside(store, lambda: AutoscalerState(launches=1))
    assert key is not None and (tmp_path / key).read_bytes() == data
    assert read_journal(store).memory.launches == 1
    assert put_aside(store) is None
    store.write(JOURNAL_KEY, data, read_tag(store))  # once more
    again = put_aside(store)
    assert again is not None and (tmp_path / again).read_bytes() == data
    assert Journal(store, 4).read().token == 4


def test_a_journal_of_another_format_is_rejected_by_name() -> None:
    with pytest.raises(RunDirectoryError, match=r"autoscaler-journal-1, and this .*-journal-3"):
        decode_memory(DAMAGED["another release"])


def read_tag(store: LocalConditionalStore) -> str:
    found = store.read(JOURNAL_KEY)
    assert found is not None
    return found.tag


def test_a_journal_that_can_be_read_stays(tmp_path: Path) -> None:
    store = store_with(tmp_path, GOOD)
    assert put_aside(store) is None
    assert read_journal(store).memory.launches == 3
    assert put_aside(LocalConditionalStore(tmp_path / "none")) is None


def test_existing_machines_continue_and_are_charged_from_their_launch() -> None:
    scene = Scene()
    scene.looks(3)
    there = set(scene.machines)
    assert there
    prefix = AutoscalePolicy(CONFIG, "c").prefix
    scene.memory = memory_of(list(scene.machines.values()), prefix, scene.now_s)
    scene.memory.token = 7
    for _ in range(3):
        decided = scene.look()
        assert launches(decided) == [] and ends(decided) == []
    assert set(scene.machines) == there
    assert scene.memory.ledger.paid_usd > 0
    other = memory_of(list(scene.machines.values()), "as-other-", scene.now_s)
    assert other.instances == {}


def test_what_was_noted_as_spent_has_the_head_and_the_machines_that_are_there_in_it() -> None:
    pool = Pool("r-1", None, "small", Market.ON_DEMAND)
    scene = Scene(target(head=HeadTarget(pool, SMALL)), usd={pool: 1.0})
    scene.machines["head"] = Machine(
        "head", "head-1", pool, MachineState.RUNNING, scene.now_s, None, {ROLE_LABEL: "head"}
    )
    scene.looks(361)
    paid_usd = scene.memory.ledger.paid_usd
    assert paid_usd == pytest.approx(1.9, rel=0.01)
    spent = SpentRecord(1, paid_usd, scene.now_s)
    scene.memory = memory_of(list(scene.machines.values()), PREFIX, scene.now_s, spent=spent)
    assert scene.memory.ledger.paid_usd == paid_usd
    scene.looks(360)
    assert scene.memory.ledger.paid_usd == pytest.approx(2 * 1.9, rel=0.01)


# ------------------------------------------------------------------ an actor that finds one


EAST = region(name="east", at="r-1", zones=("r-1a",), rows_per_s=20.0)
WEST = region(name="west", at="r-2", zones=("r-2a",), rows_per_s=20.0)


class Cluster:
    """Two regions with two machines at 0.3 USD per hour each, and their autoscaler."""

    def __init__(self, where: Path, wanted: ClusterTarget, clock: VirtualClock) -> None:
        self.store, self.wanted, self.clock = LocalConditionalStore(where), wanted, clock
        markets = {pool: forever(0.3) for pool in wanted.pools()}
        self.cloud = SimulatedCloud(markets, self.clock.now_s, SimCloudBehavior(10.0, 60.0))
        self.world = SimWorld(wanted, SimJob(1e9, join_s=5.0), self.cloud, self.clock)
        self.token = 0
        self.begin()

    def begin(self) -> None:
        """Start another actor."""
        self.actor = AutoscalerActor(
            AutoscaleOrder("c", self.cloud, self.store, CONFIG, self.wanted)
        )
        self.actor._mend_journal(PREFIX)
        self.token += 1
        self.loop = Reconciler(
            AutoscalePolicy(CONFIG, "c"),
            self.wanted,
            self.cloud,
            self.world,
            self.world,
            Journal(self.store, self.token),
            "c",
            Unfenced(),
        )

    def looks(self, count: int) -> None:
        for _ in range(count):
            self.actor._report(self.loop.tick(self.clock.now_s()))
            self.world.advance_to_s(self.clock.now_s() + 10.0)

    def tear(self) -> None:
        self.store.write(JOURNAL_KEY, b"{", read_tag(self.store))

    def alive(self) -> set[str]:
        return {each.machine.id for each in self.cloud.alive()}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Cluster]:
    clock = VirtualClock(1_000_000.0)
    monkeypatch.setattr(AutoscalerActor, "_live", lambda _: None)
    monkeypatch.setattr(actor, "time", SimpleNamespace(time=clock.now_s))
    return lambda **fields: Cluster(tmp_path, target(regions=(EAST, WEST), **fields), clock)


def test_an_unreachable_region_does_not_stop_the_recovery_of_the_journal(
    cluster: Callable[..., Cluster],
) -> None:
    found = cluster()
    found.looks(10)
    there = found.alive()
    found.tear()
    found.cloud.unreachable = {"r-1"}
    found.begin()
    found.looks(20)
    assert found.actor.status().is_acting
    assert len(found.loop.journal.read().instances) == 2, "those of the region that answers"
    found.cloud.unreachable = set()
    found.looks(20)
    assert found.alive() == there
    memory = found.loop.journal.read()
    assert set(memory.instances) == there and memory.unreached == ()
    assert memory.ledger.paid_usd == pytest.approx(found.cloud.bill_usd(), rel=0.05)


def until_paid(found: Cluster, usd: float) -> None:
    while found.cloud.bill_usd() < usd:
        found.looks(1)


def test_a_budget_holds_though_the_journal_is_lost(cluster: Callable[..., Cluster]) -> None:
    found = cluster(budget_usd=1.0)
    until_paid(found, 0.6)
    there = found.alive()
    found.tear()
    found.begin()
    found.looks(1)
    memory = found.loop.journal.read()
    assert memory.ledger.paid_usd == pytest.approx(found.cloud.bill_usd(), abs=0.02)
    assert any(
        "0.5967 USD" in each and "as recorded" in each for each in found.actor.status().errors
    )
    assert found.alive() == there
    found.looks(600)
    assert found.alive() == set()
    assert 0.9 <= found.cloud.bill_usd() <= 1.0
    found.tear()
    found.begin()
    found.looks(20)
    assert found.alive() == set(), "and what was stopped stays so"
    assert found.cloud.bill_usd() <= 1.0


@pytest.mark.parametrize("torn", [b"{", b'{"made": 1, "paid": 3}', b'{"made": 7}'])
def test_where_nothing_is_known_of_the_spend_the_budget_counts_as_used_up_until_it_is_raised(
    cluster: Callable[..., Cluster], torn: bytes
) -> None:
    found = cluster(budget_usd=1.0)
    found.looks(20)
    found.tear()
    held = found.store.read(SPENT_KEY)
    assert held is not None
    found.store.write(SPENT_KEY, torn, held.tag)
    found.begin()
    found.looks(20)
    assert found.alive() == set()
    status = found.actor.status()
    assert any("plan.budget_usd" in each and "1 USD" in each for each in status.errors)
    assert {a.reason for a in status.actions if a.what.startswith("drain")} == {BUDGET}
    found.loop.target = target(regions=(EAST, WEST), budget_usd=1.2)
    before_usd = found.cloud.bill_usd()
    found.looks(5)
    assert len(found.alive()) == 4
    found.looks(200)
    assert found.alive() == set()
    assert found.cloud.bill_usd() - before_usd <= 0.2, "what was added, and no more"


def test_without_a_budget_machines_are_paid_since_they_are_there(
    cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    found = cluster()
    found.looks(20)
    there = found.alive()
    found.tear()
    (tmp_path / SPENT_KEY).unlink()
    found.begin()
    found.looks(20)
    assert found.alive() == there
    assert found.loop.journal.read().ledger.paid_usd == pytest.approx(
        found.cloud.bill_usd(), rel=0.05
    )


def test_the_writer_of_the_journal_records_the_spend(tmp_path: Path) -> None:
    store = LocalConditionalStore(tmp_path)
    first, second = SpentRecorder(store, 2), SpentRecorder(store, 2)
    memory, later = AutoscalerState(), AutoscalerState()
    memory.ledger.add("east", "the plan", 1.0, 3.0, 2.0)
    later.ledger.add("east", "the plan", 2.0, 6.0, 4.0)
    first.write(memory, 100.0)
    second.write(later, 200.0)
    memory.ledger.add("east", "the plan", 0.5, 1.0, 1.0)
    first.write(memory, 150.0)  # it was overtaken, and wakes up
    found = read_spent(store, 2)
    assert found is not None and (found.paid_usd, found.until_unix_s) == (4.0, 200.0)
    assert read_spent(store, 3) is None, "of an earlier cluster"
    before = store.read(SPENT_KEY)
    second.write(later, 300.0)
    assert store.read(SPENT_KEY) == before, "the same again writes nothing"
