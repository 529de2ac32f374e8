"""A test cluster with one region and one policy, observed step by step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from geo_ray.cloud.autoscaler.actions import Drain, End, Launch
from geo_ray.cloud.autoscaler.observation import (
    LabelWanted,
    Observed,
    ObservedNode,
    PendingBundle,
    PendingGroup,
    PlacementStrategy,
    RegionOutage,
)
from geo_ray.cloud.autoscaler.policy import AutoscalePolicy, Decided
from geo_ray.cloud.autoscaler.state import AutoscalerState
from geo_ray.cloud.autoscaler.target import REGION_LABEL, ClusterTarget, MachineKind, RegionTarget
from geo_ray.cloud.backtest.simulated_cloud import SimCloudBehavior, SimulatedCloud, forever
from geo_ray.cloud.provider import (
    Availability,
    LaunchFailure,
    LaunchFailureKind,
    Machine,
    MachineState,
    Market,
    Pool,
)
from geo_ray.experiment.autoscale import AutoscaleConfig, CalmConfig, RetryConfig
from geo_ray.prices.price import AgeTier
from tests.support.provider_support import CloudBench, pool

BIG = MachineKind("big", 20.0, 10)
SMALL = MachineKind("small", 10.0, 10)
AGED = replace(
    SMALL, age_tiers=(AgeTier(after_h=96, factor=0.5), AgeTier(after_h=360, factor=0.34))
)
CONFIG = AutoscaleConfig(
    every_s=10.0,
    floor="none",
    start_s=60.0,
    drain_s=30.0,
    calm=CalmConfig(dwell_s=600.0, least_gain=0.05, horizon_s=3600.0, idle_s=120.0),
    retry=RetryConfig(
        first_s=60.0, longest_s=900.0, resend_s=30.0, give_up_s=300.0, join_s=300.0, missing_s=60.0
    ),
)
KNOWN = CONFIG.model_copy(
    update={"machine_resources": {"small": {"CPU": 4.0}, "big": {"CPU": 16.0}}}
)
SPOT_A = Pool("r-1", "r-1a", "small", Market.SPOT)
SPOT_B = Pool("r-1", "r-1b", "small", Market.SPOT)
ON_DEMAND_A = Pool("r-1", "r-1a", "small", Market.ON_DEMAND)
ON_DEMAND_B = Pool("r-1", "r-1b", "small", Market.ON_DEMAND)
BIG_SPOT_A = Pool("r-1", "r-1a", "big", Market.SPOT)


def region(**changes: object) -> RegionTarget:
    made = RegionTarget("r", "r-1", 30.0, (SMALL,), None, ("r-1a", "r-1b"), 0)
    return replace(made, **changes)  # type: ignore[arg-type]


def target(**changes: object) -> ClusterTarget:
    made = ClusterTarget((region(),), preemptions_per_h=0.01, lost_s=60.0)
    return replace(made, **changes)  # type: ignore[arg-type]


@dataclass
class Scene:
    """A cloud that executes every call immediately, except for failures set by a test."""

    target: ClusterTarget = field(default_factory=target)
    config: AutoscaleConfig = CONFIG
    now_s: float = 1_000_000.0
    usd: dict[Pool, float | None] = field(default_factory=dict)
    memory: AutoscalerState = field(default_factory=AutoscalerState)
    machines: dict[str, Machine] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    unready: set[str] = field(default_factory=set)
    busy: bool | set[str] = False
    begun: set[str] = field(default_factory=set)
    sold_out: set[Pool] = field(default_factory=set)
    deaf: set[Pool] = field(default_factory=set)
    left_s: float | None = None
    is_released: bool = False
    pending: tuple[PendingGroup, ...] = ()
    failures: list[LaunchFailure] = field(default_factory=list)
    left: dict[Pool, int] = field(default_factory=dict)
    cloud_ahead_s: float = 0.0
    leaves: dict[str, float] = field(default_factory=dict)  # nodes that are drained, until when
    chosen_zone: str = "r-1c"  # by the cloud, where a request names none
    resources: dict[str, dict[str, float]] = field(default_factory=dict)
    unreachable: set[str] = field(default_factory=set)
    retained: set[str] = field(default_factory=set)  # machines that the cloud does not end

    def __post_init__(self) -> None:
        for each in self.target.pools():
            usual = 1.0 if each.market is Market.ON_DEMAND else 0.3
            self.usd.setdefault(each, usual * (2 if each.type == "big" else 1))

    def look(self, after_s: float = 10.0) -> Decided:
        """Advance time, run the policy and execute its actions."""
        self.now_s += after_s
        availabilities = {pool: Availability(pool, usd) for pool, usd in self.usd.items()}
        listed = [m for m in self.machines.values() if m.pool.region not in self.unreachable]
        nodes = {
            each.id: ObservedNode(
                True,
                self.busy if isinstance(self.busy, bool) else each.id in self.busy,
                self.leaves.get(each.id),
                self.resources.get(each.pool.type, {}),
            )
            for each in listed
            if each.id not in self.unready
        }
        observed = Observed(
            self.now_s,
            tuple(listed),
            nodes,
            availabilities,
            tuple(self.failures),
            self.left_s,
            self.pending,
            {name: RegionOutage(self.now_s, "no answer") for name in self.unreachable},
            is_released=self.is_released,
        )
        self.failures = []
        before = repr(self.memory)
        decided = AutoscalePolicy(self.config, "c").decide(self.target, self.memory, observed)
        assert repr(self.memory) == before, "the policy changes nothing that it is given"
        self.memory = decided.memory
        for action in decided.actions:
            self._do(action)
        return decided

    def looks(self, count: int, after_s: float = 10.0) -> list[Decided]:
        return [self.look(after_s) for _ in range(count)]

    def pools(self) -> list[Pool]:
        """Return the pools of the running machines, sorted."""
        return sorted((m.pool for m in self.machines.values()), key=str)

    def _do(self, action: object) -> None:
        match action:
            case Launch(request=request) if request.pool in self.sold_out:
                self.failures.append(
                    LaunchFailure(
                        request.request_id,
                        request.pool,
                        request.count,
                        LaunchFailureKind.SOLD_OUT,
                        "none",
                    )
                )
            case Launch(request=request) if request.pool not in self.deaf:
                if request.request_id in self.known:
                    return
                granted = min(request.count, self.left.get(request.pool, request.count))
                self.known.add(request.request_id)
                if request.pool in self.left:
                    self.left[request.pool] -= granted
                if granted < request.count:
                    missing = request.count - granted
                    told = (
                        request.request_id,
                        request.pool,
                        missing,
                        LaunchFailureKind.SOLD_OUT,
                        "few",
                    )
                    self.failures.append(LaunchFailure(*told))
                for number in range(granted):
                    name = f"{request.request_id}.{number}"
                    self.machines.setdefault(
                        name,
                        Machine(
                            name,
                            request.request_id,
                            replace(request.pool, zone=request.pool.zone or self.chosen_zone),
                            MachineState.RUNNING,
                            self.now_s + self.cloud_ahead_s,
                            None,
                            request.labels,
                            request.ends_unix_s,
                        ),
                    )
            case Drain(machine_id=name, until_unix_s=until_s):
                self.leaves[name] = until_s
            case End(machine_id=name, only_idle=only_idle):
                if not (only_idle and name in self.begun) and name not in self.retained:
                    self.machines.pop(name, None)


@contextmanager
def simulated_bench(tmp_path: Path) -> Iterator[CloudBench]:
    """Return the simulated cloud on the machine's clock, for the contract of providers."""
    cheap, rare, south = pool(Market.SPOT), pool(type_="rare"), pool(region="south")
    markets = {pool(): forever(1.0), cheap: forever(0.5), rare: forever(1.0, 2)}
    behavior = SimCloudBehavior(start_s=0.1, unlisted_s=0.1, quota={"south": 1})
    cloud = SimulatedCloud({**markets, south: forever(1.0)}, time.time, behavior)
    yield CloudBench(cloud, cloud, pool(), cheap, rare, south, reports_availability=False)


def waiting(
    count: int = 1, strategy: PlacementStrategy = "independent", at: str = "r", **resources: float
) -> PendingGroup:
    """Return pending bundles of a region; each needs one CPU by default."""
    labels = (LabelWanted(REGION_LABEL, (at,)),)
    return PendingGroup((PendingBundle(resources or {"CPU": 1.0}, labels, count),), strategy)


def scene(*waits: PendingGroup, **changes: Any) -> Scene:
    """Return a scene without a plan; ``region`` changes its region."""
    fields: dict[str, Any] = {"rows_per_s": 0.0, "kinds": (SMALL, BIG), **changes.pop("region", {})}
    made = target(regions=(region(**fields),))
    return Scene(made, changes.pop("config", KNOWN), pending=waits, **changes)


def with_one_busy(*prices: tuple[Any, float]) -> tuple[Scene, str, str]:
    """Return a scene with a busy and a cheaper idle machine, and their names."""
    found = scene(waiting(2, CPU=4.0), region={"kinds": (SMALL,)})
    found.usd |= dict(prices)
    found.looks(2)
    busy, idle = sorted(found.machines)
    found.pending, found.busy = (), {busy}
    return found, busy, idle


def launches(decided: Decided) -> list[Launch]:
    return [each for each in decided.actions if isinstance(each, Launch)]


def drains(decided: Decided) -> list[Drain]:
    return [each for each in decided.actions if isinstance(each, Drain)]


def ends(decided: Decided) -> list[End]:
    return [each for each in decided.actions if isinstance(each, End)]
