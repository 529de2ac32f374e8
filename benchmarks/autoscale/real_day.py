"""A made-up day of spot markets, squeezed into minutes, on real processes and in the simulator.

Two regions of AWS with two zones each, two types of machines with accelerators, a job that takes
most of the day; all of it so many times faster (an hour lasts 9 s), and dollars so many times
denser, so that the bill is a day's. On real processes: the local cloud, whose prices and stock
follow the day and which takes machines back with a notice (`real_market.py`); a Ray node on each;
the autoscaler in its actor, with its journal; a job that holds the machines and goes by the clock
(`real_job.py`). In the simulator: the same policy, markets, job and moments of looking; of the real
processes it is told how long two nodes take to come, and a machine to go, which are measured before
the day begins. Both begin with all machines there, and the bill begins then.

  usd_real_over_sim   the autoscaler's books on real processes, over the simulator's bill
  error               how far that is from 1
  books_error         of these books against a bill kept from what was seen of machines
  node_start          from a launch of two machines to actors that answer on both
  node_end            from the order to end machines until they have ended
"""

from __future__ import annotations

import math
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from benchmarks.autoscale.real_job import PacedJob, held
from benchmarks.autoscale.real_market import PlayedMarket
from benchmarks.common import support
from geo_ray.base.clock import VirtualClock
from geo_ray.cloud.autoscaler.actions import actions_text
from geo_ray.cloud.autoscaler.actor import AutoscaleOrder, start_autoscaler
from geo_ray.cloud.autoscaler.journal import JOURNAL_KEY, Journal
from geo_ray.cloud.autoscaler.policy import AutoscalePolicy
from geo_ray.cloud.autoscaler.reconcile import Reconciler
from geo_ray.cloud.autoscaler.state import decode_memory
from geo_ray.cloud.autoscaler.target import REGION_LABEL, ClusterTarget, MachineKind, RegionTarget
from geo_ray.cloud.backtest.markets import DayKind, MarketTrace, generated_day
from geo_ray.cloud.backtest.replay import MemoryStore
from geo_ray.cloud.backtest.simulated_cloud import (
    SimCloudBehavior,
    SimJob,
    SimulatedCloud,
    SimWorld,
)
from geo_ray.cloud.cluster.local_program import RayMachineProgram
from geo_ray.cloud.local import LocalCatalog, LocalProvider
from geo_ray.cloud.provider import (
    Availability,
    LaunchFailure,
    LaunchRequest,
    Machine,
    MachineState,
    Market,
    Pool,
)
from geo_ray.experiment.autoscale import AutoscaleConfig, CalmConfig, RetryConfig
from geo_ray.experiment.cluster import LocalClusterConfig
from geo_ray.prices.price_book import bundled_book
from geo_ray.ray_cluster import ray_internals
from geo_ray.ray_cluster.labels import MACHINE_LABEL
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.ray_cluster.settings import AUTH_TOKEN_PATH, driver_environment
from geo_ray.runs.lease import Unfenced
from geo_ray.storage.conditional_store import LocalConditionalStore

TIMES = 400.0  # a day's hour lasts 9 s
WORK_H = 16.0
EVERY_S = 1.0
NOTICE_S = 5.0
LEAVE_S = 0.5
LONGEST_S = 120.0
SPEED = {"g5.xlarge": 120.0, "g6.2xlarge": 90.0}
REGIONS = {"us": "us-east-1", "eu": "eu-central-1"}
CLUSTER = "day"
_BEGINS_S = 1_000_000.0
Markets = Mapping[Pool, MarketTrace]


@dataclass(frozen=True, slots=True)
class Day:
    """A day as it is played.

    Attributes:
        target: what the job needs.
        markets: squeezed; they begin at 0.
        config: of the autoscaler.
        work_s: of the job, squeezed.
    """

    target: ClusterTarget
    markets: Markets
    config: AutoscaleConfig
    work_s: float


def squeezed_day(seed: int, start_s: float) -> Day:
    """Make a day up, and squeeze it."""
    zones = {at: (f"{at}a", f"{at}b") for at in REGIONS.values()}
    wide = generated_day(bundled_book(), "aws", zones, tuple(SPEED), seed, DayKind(hours=24))
    markets = {
        pool: MarketTrace(
            tuple((at / TIMES, usd * TIMES) for at, usd in market.prices),
            tuple((at / TIMES, availability) for at, availability in market.availabilities),
        )
        for pool, market in wide.items()
    }
    kinds = tuple(MachineKind(name, speed, 6) for name, speed in SPEED.items())
    regions = tuple(
        RegionTarget(name, at, 360.0, kinds, None, zones[at], floor=1)
        for name, at in REGIONS.items()
    )
    target = ClusterTarget(regions, preemptions_per_h=0.05 * TIMES, lost_s=start_s / 3)
    config = AutoscaleConfig(
        every_s=EVERY_S,
        start_s=start_s,
        drain_s=NOTICE_S,
        preemption_weight_h=20.0 / TIMES,
        calm=CalmConfig(dwell_s=1800 / TIMES, horizon_s=4 * 3600 / TIMES, idle_s=2.0),
        retry=RetryConfig(first_s=2.0, longest_s=20.0, resend_s=20.0, give_up_s=90.0, join_s=90.0),
    )
    return Day(target, markets, config, WORK_H * 3600.0 / TIMES)


# ------------------------------------------------------------------ in the simulator


def simulated(day: Day, start_s: float, end_s: float) -> tuple[float, float, int, int]:
    """Return the bill, how long the job took, machines taken and launched."""
    clock = VirtualClock(_BEGINS_S - 4 * start_s - 60.0)
    markets = {pool: _later(market, _BEGINS_S) for pool, market in day.markets.items()}
    cloud = SimulatedCloud(markets, clock.now_s, SimCloudBehavior(start_s=0.0, notice_s=NOTICE_S))
    times = {"join_s": start_s, "change_s": 0.0, "lost_s": 0.0, "leave_s": LEAVE_S}
    world = SimWorld(day.target, SimJob(day.work_s, **times), cloud, clock)

    class Work:
        @property
        def is_released(self) -> bool:
            return world.finished_unix_s is not None

        def left_s(self) -> float | None:
            return None

    loop = Reconciler(
        AutoscalePolicy(day.config, CLUSTER),
        *(day.target, cloud, world, Work(), Journal(MemoryStore(), 1), CLUSTER),
        fence=Unfenced(),
    )
    while clock.now_s() < _BEGINS_S:
        loop.tick(clock.now_s())
        world.advance_to_s(min(_BEGINS_S, clock.now_s() + EVERY_S))
        world.done_s = 0.0
    before_usd = cloud.bill_usd()
    while cloud.alive():
        loop.tick(clock.now_s())
        world.advance_to_s(clock.now_s() + EVERY_S)
    taken = sum(
        (each.machine.ends_unix_s or math.inf) < each.machine.launched_unix_s + 3600.0
        for each in cloud.machines.values()
    )
    usd = cloud.bill_usd() - before_usd
    for each in cloud.machines.values():
        gone_s = each.ended_unix_s or 0.0  # paid until it has gone
        usd += markets[each.machine.pool].usd_between(gone_s, gone_s + end_s)
    return usd, (world.finished_unix_s or 0.0) - _BEGINS_S, taken, len(cloud.machines)


def _later(market: MarketTrace, by_s: float) -> MarketTrace:
    return MarketTrace(
        tuple((at + by_s, usd) for at, usd in market.prices),
        tuple((at + by_s, availability) for at, availability in market.availabilities),
    )


# ------------------------------------------------------------------ on real processes


def until(what: Callable[[], object], longest_s: float = LONGEST_S) -> None:
    """Wait for something.

    Raises:
        SystemExit: it does not come.
    """
    deadline_s = time.monotonic() + longest_s
    while not what():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"waited {longest_s:.0f} s in vain")
        time.sleep(0.05)


@dataclass(slots=True)
class ReticentCloud:
    """The local cloud without what real ones do not tell: how many machines of a pool are left."""

    inner: LocalProvider
    name: str = "local"

    def list_machines(self, cluster: str) -> Sequence[Machine]:
        """See `MachineProvider.list_machines`."""
        return self.inner.list_machines(cluster)

    def launch(self, request: LaunchRequest) -> Sequence[LaunchFailure]:
        """See `MachineProvider.launch`."""
        return self.inner.launch(request)

    def terminate(self, machine_ids: Sequence[str]) -> None:
        """See `MachineProvider.terminate`."""
        self.inner.terminate(machine_ids)

    def poll_failures(self, cluster: str) -> Sequence[LaunchFailure]:
        """See `MachineProvider.poll_failures`."""
        return self.inner.poll_failures(cluster)

    def availability(self, pools: Sequence[Pool]) -> Sequence[Availability]:
        """See `MachineProvider.availability`."""
        return [
            Availability(each.pool, each.usd_per_hour) for each in self.inner.availability(pools)
        ]


def trial(cloud: LocalProvider, pool: Pool, number: int) -> tuple[float, float]:
    """How long two machines at once take to come, with an actor that answers, and to go."""
    request = LaunchRequest(f"trial-{number}", "trial", pool, 2, {REGION_LABEL: "trial"})
    began_s = time.monotonic()
    cloud.launch(request)
    ids = {m.id for m in cloud.list_machines("trial") if m.request_id == request.request_id}

    def mine() -> list[dict[str, Any]]:
        nodes = [node for node in ray_internals.nodes() if node["Alive"]]
        return [node for node in nodes if node["Labels"].get(MACHINE_LABEL) in ids]

    until(lambda: len(mine()) == 2)
    actors = [held(node) for node in mine()]
    ray.get([actor.is_there.remote() for actor in actors], timeout=LONGEST_S)
    came_s = time.monotonic()
    for actor in actors:
        ray.kill(actor)
    ordered_s = time.monotonic()
    cloud.terminate(sorted(ids))
    until(lambda: all(m.state is MachineState.ENDED for m in cloud.list_machines("trial")))
    return came_s - began_s, time.monotonic() - ordered_s


def real(seed: int, work: Path) -> dict[str, float]:
    """Play one day on real processes, then in the simulator with what nodes took to start."""
    machines = dict.fromkeys(SPEED, 4)
    catalog = LocalCatalog(cpus=machines, owner_pid=os.getpid())
    with (
        LocalCluster(LocalClusterConfig(temp_dir=str(work)), []) as cluster,
        driver_environment(cluster.environment),
    ):
        root = work / "cloud"
        token = Path(cluster.environment[AUTH_TOKEN_PATH])
        cloud = LocalProvider(root, RayMachineProgram(cluster.address, token, agent=False))
        ray.init(cluster.address, namespace="day", log_to_driver=False)
        try:
            return _played(seed, work, root, catalog, cloud)
        finally:
            ray.shutdown()


def _played(
    seed: int, work: Path, root: Path, catalog: LocalCatalog, cloud: LocalProvider
) -> dict[str, float]:
    store = LocalConditionalStore(work / "journal")
    (work / "journal").mkdir()
    guess = squeezed_day(seed, 8.0)
    with PlayedMarket(guess.markets, root, catalog, CLUSTER, NOTICE_S) as market:
        pool = next(p for p in guess.markets if p.market is Market.ON_DEMAND)
        trials = [trial(cloud, pool, number) for number in range(2)]
        start_s, end_s = (statistics.mean(each) for each in zip(*trials, strict=True))
        support.say(f"nodes start and end in {trials} s")
        day = squeezed_day(seed, start_s)
        with PacedJob(day.target, day.work_s) as job:
            quiet = ReticentCloud(cloud)
            order = AutoscaleOrder(CLUSTER, quiet, store, day.config, day.target)
            actor: Any = start_autoscaler(order, f"day-{secrets.token_hex(2)}")
            until(lambda: job.speed() >= 1.0)
            time.sleep(2 * EVERY_S)
            before_usd = _booked(store)
            market.began_unix_s = began_s = time.time()
            job.is_begun = True
            until(lambda: job.finished_unix_s is not None, 600.0)
            ray.get(actor.release.remote(), timeout=LONGEST_S)
            until(lambda: not _living(cloud))
            time.sleep(2 * EVERY_S)
            ended_s = time.time()
            for line in actions_text(ray.get(actor.status.remote()).actions):
                support.say(line)
            ray.kill(actor)
    ledger_usd = _booked(store) - before_usd
    took_s = (job.finished_unix_s or 0.0) - began_s
    bill_usd = market.bill_usd(began_s, ended_s)
    sim_usd, sim_s, sim_taken, sim_launches = simulated(day, start_s, end_s)
    support.say(
        f"seed {seed}: real {ledger_usd:.2f} USD booked, {bill_usd:.2f} seen, {took_s:.1f} s, "
        f"{len(market.taken)} of {market.launches} taken; simulated {sim_usd:.2f} USD, "
        f"{sim_s:.1f} s, {sim_taken} of {sim_launches} taken"
    )
    return {
        "usd_real": ledger_usd,
        "usd_simulated": sim_usd,
        "usd_real_over_sim": ledger_usd / sim_usd,
        "error": abs(ledger_usd / sim_usd - 1.0),
        "books_error": abs(ledger_usd / bill_usd - 1.0),
        "took_real": took_s,
        "took_simulated": sim_s,
        "taken_real": float(len(market.taken)),
        "taken_simulated": float(sim_taken),
        "launches_real": float(market.launches),
        "launches_simulated": float(sim_launches),
        "node_start": start_s,
        "node_end": end_s,
    }


def _booked(store: LocalConditionalStore) -> float:
    found = store.read(JOURNAL_KEY)
    return 0.0 if found is None else decode_memory(found.data).ledger.paid_usd


def _living(cloud: LocalProvider) -> list[str]:
    listed = cloud.list_machines(CLUSTER)
    return [machine.id for machine in listed if machine.state is not MachineState.ENDED]


_UNITS = {"usd": "USD", "took": "s", "node": "s", "taken": "machines", "launches": "machines"}
_OTHER = {"usd_real_over_sim": "ratio", "error": "share", "books_error": "share"}


def main() -> None:
    """Play days, and report."""
    parser = support.parser(__doc__)
    parser.add_argument("--seeds", default="0,1,2", help="of the days")
    parser.add_argument("--simulated", action="store_true", help="only look what a day has")
    arguments = parser.parse_args()
    machine = support.hardware()
    seeds = [int(each) for each in arguments.seeds.split(",")]
    if arguments.simulated:
        for seed in seeds:
            support.say(f"seed {seed}: {simulated(squeezed_day(seed, 8.0), 8.0, 0.0)}")
        return
    found: dict[str, list[float]] = {}
    for seed in seeds[: 1 if arguments.quick else None]:
        with tempfile.TemporaryDirectory(prefix="gd", dir="/tmp") as scratch:
            for name, value in real(seed, Path(scratch)).items():
                found.setdefault(name, []).append(value)
    figures = []
    for name, values in found.items():
        unit = _OTHER.get(name) or _UNITS[name.partition("_")[0]]
        value = max(values) if name.endswith("error") else statistics.median(values)
        target = "<= 0.05" if name == "error" else None
        figures.append(support.Figure(name, value, unit, target, None, values))
    support.finish("real_day", machine, figures, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
