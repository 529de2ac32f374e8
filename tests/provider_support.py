"""The three clouds as the contract of providers sees them: a real server or real processes each."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from geo_ray.providers.base import (
    LaunchRequest,
    Machine,
    MachineProvider,
    MachineState,
    Market,
    Pool,
)
from geo_ray.providers.local.catalog import LocalCatalog, LocalOffer, write_catalog
from geo_ray.providers.local.provider import LocalMachinePlace, LocalProvider

CLUSTER = "contract"
LONGEST_S = 60.0


def nothing() -> None:
    pass


@dataclass
class CloudBench:
    """A cloud, and how to make it do what clouds do.

    Attributes:
        provider: talks to it.
        other: another process's provider of the same account.
        good: a pool with machines; spot: one on the spot market.
        sold_out: a pool of which two machines are left.
        no_quota: a pool of whose kind the account may rent one more machine.
        throttle: makes the next requests be refused for being too many; None: it never does.
        lose_answer: makes the next launch work and its answer get lost; None: it cannot.
    """

    provider: MachineProvider
    other: MachineProvider
    good: Pool
    spot: Pool
    sold_out: Pool
    no_quota: Pool
    throttle: Callable[[], None] | None = None
    lose_answer: Callable[[], None] | None = None
    forbid: Callable[[], str] | None = None
    unknown_id: str = "i-0123456789abcdef0"
    left: int = 2
    quota_left: int = 1
    tells_stock: bool = True
    asked: list[str] = field(default_factory=list)

    def request(self, name: str, pool: Pool | None = None, count: int = 2) -> LaunchRequest:
        self.asked.append(name)
        return LaunchRequest(
            request_id=name,
            cluster=CLUSTER,
            pool=pool or self.good,
            count=count,
            labels={"ray.io/availability-region": "north", "geo-ray/role": "worker"},
            ends_unix_s=time.time() + 3600,
        )

    def machines(self, *names: str) -> Sequence[Machine]:
        found = self.provider.list_machines(CLUSTER)
        return [m for m in found if m.request_id in names]

    def living(self) -> Sequence[Machine]:
        found = self.provider.list_machines(CLUSTER)
        return [m for m in found if m.state is not MachineState.ENDED]

    def until(self, *names: str, count: int, state: MachineState) -> Sequence[Machine]:
        """Wait until a list has so many machines of requests in a state."""
        deadline = time.monotonic() + LONGEST_S
        while True:
            found = [m for m in self.machines(*names) if m.state is state]
            if len(found) == count:
                return found
            assert time.monotonic() < deadline, f"{count} {state} expected, there are {found}"
            time.sleep(0.05)


@dataclass(frozen=True)
class Sleeper:
    """A program that does nothing until it is ended."""

    def processes(
        self, place: LocalMachinePlace, request: LaunchRequest
    ) -> dict[str, tuple[list[str], dict[str, str]]]:
        argv = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
        return {"node": (argv, {"PLACE": place.address})}


def pool(market: Market = Market.ON_DEMAND, type_: str = "small", region: str = "north") -> Pool:
    return Pool(region=region, zone=f"{region}-1", type=type_, market=market)


@contextmanager
def local_bench(tmp_path: Path, **more: object) -> Iterator[CloudBench]:
    root = tmp_path / "cloud"
    offers = {
        pool(): None,
        pool(Market.SPOT): None,
        pool(type_="rare"): 2,
        pool(region="south"): None,
    }
    catalog = LocalCatalog(
        offers=tuple(
            LocalOffer(
                region=each.region,
                zone=each.zone,
                type=each.type,
                market=each.market,
                usd_per_hour=0.5 if each.market is Market.SPOT else 1.0,
                capacity=capacity,
            )
            for each, capacity in offers.items()
        ),
        quota={"south": 1},
        start_delay_s=0.2,
        list_delay_s=0.1,
        owner_pid=os.getpid(),
    )
    write_catalog(root, catalog)
    provider = LocalProvider(root, Sleeper())
    bench = CloudBench(
        provider=provider,
        other=LocalProvider(root, Sleeper()),
        good=pool(),
        spot=pool(Market.SPOT),
        sold_out=pool(type_="rare"),
        no_quota=pool(region="south"),
    )
    try:
        yield bench
    finally:
        provider.terminate([m.id for m in provider.list_machines(CLUSTER)])
        deadline = time.monotonic() + LONGEST_S
        while bench.living():
            assert time.monotonic() < deadline
            time.sleep(0.05)
