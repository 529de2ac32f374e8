"""Failures of pools count once per machine, and the backoff grows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest

from geo_ray.base.clock import VirtualClock
from geo_ray.base.errors import ClusterError, RunDirectoryError
from geo_ray.cloud.autoscaler.journal import Journal
from geo_ray.cloud.autoscaler.policy import AutoscalePolicy, Decided
from geo_ray.cloud.autoscaler.reconcile import Reconciler
from geo_ray.cloud.autoscaler.state import outstanding
from geo_ray.cloud.backtest.replay import MemoryStore
from geo_ray.cloud.backtest.simulated_cloud import SimJob, SimulatedCloud, SimWorld, forever
from geo_ray.cloud.provider import LaunchFailure, LaunchFailureKind, MachineState, Market, Pool
from geo_ray.runs.lease import Unfenced
from tests.support.autoscale_support import (
    CONFIG,
    SPOT_A,
    SPOT_B,
    Scene,
    launches,
    region,
    target,
)


def gaps_s(asked_s: list[float]) -> list[float]:
    return [later - before for before, later in itertools.pairwise(asked_s)]


def only(pool: Pool) -> Scene:
    """Return a region with one cheapest pool."""
    scene = Scene()
    scene.usd = {each: 0.1 if each == pool else usd for each, usd in scene.usd.items()}
    return scene


def not_started(
    scene: Scene, pool: Pool, kind: LaunchFailureKind = LaunchFailureKind.SOLD_OUT
) -> None:
    """The pending machines of a pool have failed; every iteration reports it."""
    for name, machine in scene.machines.items():
        if machine.pool == pool:
            scene.machines[name] = replace(machine, state=MachineState.ENDED)
            failed = LaunchFailure(machine.request_id or "", pool, 1, kind, "none", name)
            scene.failures.append(failed)


def test_each_machine_of_a_fleet_that_does_not_start_is_counted() -> None:
    scene = only(SPOT_A)
    (launch,) = launches(scene.look())
    names = sorted(scene.machines)
    assert len(names) == 3
    scene.unready |= set(names)
    retained = names.pop()
    kept_machine = scene.machines.pop(retained)
    not_started(scene, SPOT_A)  # two of them; the third is still on its way
    decided = scene.look()
    pending_launch = decided.memory.pending_launches[launch.request.request_id]
    assert outstanding(decided.memory, pending_launch) == 1
    assert sum(each.request.count for each in launches(decided)) == 2, "replaced at once"
    not_started(scene, SPOT_A)
    scene.machines[retained] = kept_machine
    assert not scene.look().actions, "told again, and the third has come: neither is ended"
    assert retained in scene.memory.instances


def test_a_listed_machine_that_fails_counts_once() -> None:
    scene = only(SPOT_A)
    scene.look()
    names = sorted(scene.machines)
    scene.unready |= set(names)
    late = scene.machines.pop(names[2])
    scene.look()
    assert sorted(scene.memory.instances) == names[:2]
    scene.machines[names[1]] = replace(scene.machines[names[1]], state=MachineState.ENDED)
    failed = LaunchFailure(
        late.request_id or "", SPOT_A, 1, LaunchFailureKind.SOLD_OUT, "none", names[1]
    )
    scene.failures.append(failed)
    decided = scene.look()
    assert sum(each.request.count for each in launches(decided)) == 1
    scene.machines[names[2]] = late
    assert not scene.look().actions
    assert names[2] in scene.memory.instances
    assert scene.memory.pool(SPOT_A).preemptions == 0, "it never ran"


def test_a_machine_of_a_fleet_that_was_complete_and_then_failed_leaves_its_pool_alone() -> None:
    scene = only(SPOT_A)
    scene.look()
    scene.unready |= set(scene.machines)
    scene.look()
    assert not scene.memory.pending_launches
    not_started(scene, SPOT_A)
    decided = scene.look()
    assert {each.request.pool for each in launches(decided)} == {SPOT_B}
    assert scene.memory.pool(SPOT_A).refusals == 1


def asked_of(scene: Scene, pool: Pool, decided: Decided, asked_s: list[float]) -> None:
    if any(each.request.pool == pool for each in launches(decided)):
        asked_s.append(scene.now_s)


def test_a_pool_whose_machines_never_start_is_left_alone_for_longer_each_time() -> None:
    scene, asked_s = only(SPOT_A), list[float]()
    scene.target = target(regions=(region(zones=("r-1a",)),))
    scene.sold_out = {each for each in scene.usd if each.market is Market.ON_DEMAND}
    for _ in range(300):
        asked_of(scene, SPOT_A, scene.look(), asked_s)
        scene.unready |= set(scene.machines)
        asked_of(scene, SPOT_A, scene.look(), asked_s)  # they are seen, and pending
        not_started(scene, SPOT_A)
    gaps = gaps_s(asked_s)
    assert gaps == sorted(gaps)
    assert gaps[0] >= 60
    assert gaps[-1] == pytest.approx(CONFIG.retry.longest_s, abs=40)


def test_a_pool_that_gives_a_part_each_time_is_left_alone_for_longer_each_time() -> None:
    scene, asked_s = only(SPOT_A), list[float]()
    scene.target = target(regions=(region(zones=("r-1a",), rows_per_s=60.0),))
    scene.sold_out = {each for each in scene.usd if each.market is Market.ON_DEMAND}
    for _ in range(200):
        scene.left[SPOT_A] = 1
        asked_of(scene, SPOT_A, scene.look(), asked_s)
    gaps = gaps_s(asked_s)
    assert len(scene.machines) == 6
    assert len(gaps) == 5
    longest_s = CONFIG.retry.longest_s
    for before, later in itertools.pairwise(gaps):
        assert later >= min(2 * before - 20, longest_s)


def test_the_backoff_of_a_pool_resets_after_a_full_launch() -> None:
    scene = only(SPOT_A)
    scene.sold_out = {SPOT_A}
    scene.look()
    scene.looks(20)
    scene.sold_out = set()
    scene.machines.clear()
    scene.looks(20)
    assert {each.pool for each in scene.machines.values()} == {SPOT_A}
    assert scene.memory.pool(SPOT_A).refusals == 0


def test_a_quota_is_of_a_zone_whose_price_is_not_known_yet_too() -> None:
    scene = Scene()
    scene.usd = {pool: None if pool == SPOT_B else usd for pool, usd in scene.usd.items()}
    (launch,) = launches(scene.look())
    scene.machines.clear()
    told = LaunchFailure(
        launch.request.request_id, SPOT_A, 3, LaunchFailureKind.QUOTA, "VcpuLimitExceeded"
    )
    scene.failures.append(told)
    scene.usd[SPOT_B] = 0.1
    decided = scene.look()
    assert {each.request.pool.market for each in launches(decided)} == {Market.ON_DEMAND}


# ------------------------------------------------------------------ a look that breaks off


@dataclass
class Trouble:
    """An error of the next iteration."""

    nodes: bool = False
    journal: bool = False


@pytest.mark.parametrize("what", ["nodes", "journal"])
def test_failures_survive_an_aborted_iteration(what: str) -> None:
    trouble = Trouble()

    class Store(MemoryStore):
        def write(self, key: str, data: bytes, expected: str | None) -> str | None:
            if trouble.journal:
                raise RunDirectoryError("the journal cannot be written")
            return super().write(key, data, expected)

    class World(SimWorld):
        def observe(self, machines):  # type: ignore[no-untyped-def]
            if trouble.nodes:
                raise ClusterError("Ray does not tell of its nodes")
            return super().observe(machines)

    class Cloud(SimulatedCloud):
        def poll_failures(self, cluster: str) -> list[LaunchFailure]:
            return []  # a refusal is told by the launch alone, as by most clouds

    wanted, clock = target(), VirtualClock(1000.0)
    markets = {pool: forever(0.3, 9) for pool in wanted.pools()} | {SPOT_A: forever(0.1, 0)}
    cloud = Cloud(markets, clock.now_s)
    world = World(wanted, SimJob(1e9), cloud, clock)
    loop = Reconciler(
        AutoscalePolicy(CONFIG, "c"),
        wanted,
        cloud,
        world,
        world,
        Journal(Store(), 1),
        "c",
        Unfenced(),
    )
    asked = [each.request.pool for each in launches(loop.tick(clock.now_s()).decided)]
    assert asked == [SPOT_A]
    setattr(trouble, what, True)
    world.advance_to_s(clock.now_s() + 10)
    if what == "journal":
        with pytest.raises(RunDirectoryError):
            loop.tick(clock.now_s())
    else:
        assert not loop.tick(clock.now_s()).decided.actions
    setattr(trouble, what, False)
    world.advance_to_s(clock.now_s() + 10)
    others = {each.request.pool for each in launches(loop.tick(clock.now_s()).decided)}
    assert others and SPOT_A not in others
