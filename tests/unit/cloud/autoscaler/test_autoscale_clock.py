"""Changes of the system clock.

No machine is charged, late or expired for hours that did not pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from geo_ray.base.clock import VirtualClock
from geo_ray.cloud.autoscaler.actor import EndlessWork
from geo_ray.cloud.autoscaler.journal import Journal
from geo_ray.cloud.autoscaler.observation import NO_NODE_CAME
from geo_ray.cloud.autoscaler.policy import AutoscalePolicy
from geo_ray.cloud.autoscaler.reconcile import Reconciler, TickResult
from geo_ray.cloud.backtest.replay import MemoryStore
from geo_ray.cloud.backtest.simulated_cloud import (
    SimCloudBehavior,
    SimJob,
    SimulatedCloud,
    SimWorld,
    forever,
)
from geo_ray.runs.lease import Unfenced
from tests.support.autoscale_support import CONFIG, Scene, drains, ends, launches, target

DAY_S = 86_400.0
WANTED = target(budget_usd=10.0)


@dataclass
class Head:
    """A head whose clock is ``ahead_s`` ahead of the clouds'."""

    ahead_s: float = 0.0
    clock: VirtualClock = field(default_factory=lambda: VirtualClock(1_000_000.0))
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        markets = {pool: forever(0.3) for pool in WANTED.pools()}
        self.cloud = SimulatedCloud(markets, self.clock.now_s, SimCloudBehavior(10.0, 60.0))
        self.world = SimWorld(WANTED, SimJob(1e9, join_s=5.0), self.cloud, self.clock)
        self.store = MemoryStore()
        self.begin(1)

    def begin(self, token: int) -> None:
        """Start another process."""
        self.loop = Reconciler(
            AutoscalePolicy(CONFIG, "c"),
            WANTED,
            self.cloud,
            self.world,
            self.world,
            Journal(self.store, token),
            "c",
            Unfenced(),
        )

    def looks(self, count: int) -> list[TickResult]:
        found = []
        for _ in range(count):
            now_s = self.clock.now_s()
            found.append(self.loop.tick(now_s + self.ahead_s, now_s))
            self.world.advance_to_s(now_s + 10.0)
        self.errors = [error for result in found for error in result.errors]
        return found

    @property
    def paid_usd(self) -> float:
        return self.loop.journal.read().ledger.paid_usd

    def alive(self) -> set[str]:
        return {each.machine.id for each in self.cloud.alive()}


def test_an_iteration_with_a_clock_a_day_ahead_charges_no_day_and_ends_nothing() -> None:
    head = Head()
    head.looks(20)
    there = head.alive()
    head.ahead_s = DAY_S
    (result,) = head.looks(1)
    assert not result.decided.actions
    assert head.errors == ["the clock was set by +86400 s since the last iteration"]
    head.ahead_s = 0.0
    assert not any(each.decided.actions for each in head.looks(20))
    assert not head.errors
    assert head.alive() == there
    assert head.paid_usd == pytest.approx(head.cloud.bill_usd(), rel=0.05)
    assert head.loop.journal.read().required.stopped_at_usd is None


@pytest.mark.parametrize("set_s", [3 * 3600.0, -3 * 3600.0])
def test_what_was_noted_is_set_with_a_clock_that_stays_so(set_s: float) -> None:
    head = Head()
    head.looks(20)
    there = head.alive()
    head.ahead_s = set_s
    assert not any(each.decided.actions for each in head.looks(60))
    assert len(head.errors) == 2
    assert head.alive() == there
    assert head.paid_usd == pytest.approx(head.cloud.bill_usd(), rel=0.05)
    next(iter(head.cloud.alive())).ended_unix_s = head.clock.now_s()
    assert any(launches(each.decided) for each in head.looks(1))


def test_what_leaves_has_its_time_though_the_clock_is_set_meanwhile() -> None:
    head = Head()
    head.looks(20)
    head.world.job = replace(head.world.job, leave_s=25.0)
    head.loop.work = EndlessWork(is_released=True)
    assert len(drains(head.looks(1)[0].decided)) == 3
    head.ahead_s = 3600.0
    assert not any(ends(each.decided) for each in head.looks(2))
    head.looks(4)
    assert not head.alive()


def test_of_a_process_before_nothing_is_noted_for_later_than_now() -> None:
    """The process has no other clock that tells how long ago that was."""
    scene = Scene(now_s=1_000_000.0 + 3 * 3600.0)
    scene.look()
    scene.unready |= set(scene.machines)
    scene.look()
    paid_usd = scene.memory.ledger.paid_usd
    scene.look(-3 * 3600.0)
    reasons = [end.reason for decided in scene.looks(31) for end in ends(decided)]
    assert NO_NODE_CAME in reasons, "it has waited for its node as long as ever"
    assert scene.memory.ledger.paid_usd - paid_usd == pytest.approx(3 * 0.3 * 310 / 3600, rel=0.1)
