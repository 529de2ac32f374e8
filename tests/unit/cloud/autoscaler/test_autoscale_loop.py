"""Iterations of the reconcile loop on a simulated cloud: requests and actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from geo_ray.base.clock import VirtualClock
from geo_ray.base.errors import ClusterError
from geo_ray.cloud.autoscaler.journal import Journal
from geo_ray.cloud.autoscaler.observation import ObservedNode, PendingGroup
from geo_ray.cloud.autoscaler.policy import AutoscalePolicy
from geo_ray.cloud.autoscaler.reconcile import Reconciler
from geo_ray.cloud.backtest.simulated_cloud import SimCloudBehavior, SimulatedCloud, forever
from geo_ray.cloud.provider import Machine
from geo_ray.runs.lease import Unfenced
from geo_ray.storage.conditional_store import LocalConditionalStore
from tests.support.autoscale_support import CONFIG, region, target, waiting

KNOWN = CONFIG.model_copy(update={"machine_resources": {"small": {"CPU": 4.0}}})


@dataclass
class Nodes:
    """Nodes that join with their machines; pending demand is placed as soon as possible."""

    pending_: tuple[PendingGroup, ...] = ()
    begun: set[str] = field(default_factory=set)
    is_unreachable: bool = False

    def observe(self, machines: Sequence[Machine]) -> dict[str, ObservedNode]:
        found = {each.id: ObservedNode(is_ready=True, is_busy=False) for each in machines}
        if found:
            self.pending_ = ()  # in the moment after
        return found

    def drain(self, machine: Machine, reason: str, until_unix_s: float) -> None:
        raise AssertionError("nothing is drained that is only idle")

    def end_idle(self, machine: Machine, reason: str) -> bool:
        return machine.id not in self.begun

    def pending(self) -> tuple[PendingGroup, ...]:
        if self.is_unreachable:
            raise ClusterError("Ray does not tell what waits for a place")
        return self.pending_


class Endless:
    is_released = False

    def left_s(self) -> float | None:
        return None


@dataclass
class Looks:
    """A reconciler without a plan, with its clock and its cloud."""

    where: Path
    nodes: Nodes
    clock: VirtualClock = field(default_factory=lambda: VirtualClock(1e6))

    def __post_init__(self) -> None:
        wanted = target(regions=(region(rows_per_s=0.0),))
        markets = {pool: forever(1.0) for pool in wanted.pools()}
        self.cloud = SimulatedCloud(markets, self.clock.now_s, SimCloudBehavior(start_s=0.0))
        self.loop = Reconciler(
            AutoscalePolicy(KNOWN, "c"),
            wanted,
            self.cloud,
            self.nodes,
            Endless(),
            Journal(LocalConditionalStore(self.where), 1),
            "c",
            Unfenced(),
        )

    def looks(self, count: int) -> list[str]:
        """Run iterations; return the reported errors."""
        found: list[str] = []
        for _ in range(count):
            self.clock.advance_to_s(self.clock.now_s() + 10.0)
            found += self.loop.tick(self.clock.now_s()).errors
        return found

    @property
    def alive(self) -> list[str]:
        return [each.machine.id for each in self.cloud.alive()]


def test_a_machine_on_which_ray_says_that_something_began_is_not_ended(tmp_path: Path) -> None:
    looks = Looks(tmp_path, Nodes((waiting(CPU=4.0),)))
    looks.looks(1)
    (name,) = looks.alive
    looks.nodes.begun = {name}
    told = looks.looks(20)
    assert looks.alive == [name]
    assert told and all(f"{name} stays" in each for each in told)
    looks.nodes.begun = set()
    assert looks.looks(20) == []
    assert looks.alive == []


def test_what_found_a_place_between_two_questions_rents_nothing(tmp_path: Path) -> None:
    looks = Looks(tmp_path, Nodes((waiting(CPU=4.0),)))
    looks.looks(1)
    looks.nodes.pending_ = (waiting(2, CPU=4.0),)  # gone once the nodes were looked at
    looks.looks(1)
    assert len(looks.alive) == 1


def test_while_it_is_not_known_what_waits_nothing_ends(tmp_path: Path) -> None:
    looks = Looks(tmp_path, Nodes((waiting(CPU=4.0),)))
    looks.looks(2)
    looks.nodes.is_unreachable = True
    assert len(looks.looks(50)) == 50
    assert len(looks.alive) == 1
