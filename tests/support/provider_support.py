"""Benches of the three clouds for the contract of providers: real servers or real processes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from moto.server import ThreadedMotoServer

from geo_ray.cloud.aws import AwsProvider
from geo_ray.cloud.local import (
    LocalCatalog,
    LocalMachinePlace,
    LocalOffer,
    LocalProvider,
    write_catalog,
)
from geo_ray.cloud.provider import (
    LaunchRequest,
    Machine,
    MachineProvider,
    MachineState,
    Market,
    Pool,
)
from geo_ray.cloud.tencent import TencentProvider
from geo_ray.experiment.provider import (
    AwsPlaceConfig,
    AwsProviderConfig,
    NodeJoin,
    TencentPlaceConfig,
    TencentProviderConfig,
)
from geo_ray.prices.price import ExchangeRate
from tests.support.cloud_servers import (
    AwsAnswers,
    LoopbackCloud,
    TencentAnswers,
    ec2_error,
    instance_product,
    quota,
    tencent_error,
)
from tests.support.cvm_server import CvmServer
from tests.support.ec2_frontend import Ec2Frontend

CLUSTER = "contract"
LONGEST_S = 300.0


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
    reports_availability: bool = True
    server: Any = None

    def request(self, name: str, pool: Pool | None = None, count: int = 2) -> LaunchRequest:
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

    def until_gone(self, *ids: str) -> None:
        """Wait until machines have ended, or are no longer listed."""
        deadline = time.monotonic() + LONGEST_S
        while {m.id for m in self.living()} & set(ids):
            assert time.monotonic() < deadline, f"{ids} have not ended"
            time.sleep(0.05)

    def until(self, *names: str, count: int, state: MachineState) -> Sequence[Machine]:
        """Wait until a list has a number of machines of a request in a state."""
        deadline = time.monotonic() + LONGEST_S
        while True:
            found = [m for m in self.machines(*names) if m.state is state]
            if len(found) == count:
                return found
            assert time.monotonic() < deadline, f"{count} {state} expected, there are {found}"
            time.sleep(0.05)


@dataclass(frozen=True)
class Sleeper:
    """A program that runs until it is terminated."""

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


JOIN = NodeJoin(address="10.0.0.2:6379", token_secret="geo-ray/token")


@contextmanager
def aws_bench(tmp_path: Path) -> Iterator[CloudBench]:
    region, zone = "us-east-1", "us-east-1a"

    def aws_pool(type_: str, market: Market = Market.ON_DEMAND) -> Pool:
        return Pool(region, zone, type_, market)

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    front = Ec2Frontend(
        f"http://{host}:{port}",
        prices=AwsAnswers(
            products=[instance_product(region, "m5.large", "0.096")],
            spot=[(region, zone, "m5.large", "0.031", "2026-11-20T00:00:00Z")],
        ),
        left={"c5a.2xlarge": 2},
        over_quota={"p4d.24xlarge"},
    )
    try:
        front.reset()
        with LoopbackCloud(front) as cloud:
            config = AwsProviderConfig(
                places={
                    name: AwsPlaceConfig(image_id="ami-12c6146b") for name in (region, "eu-west-1")
                },
                join=JOIN,
                endpoints={"ec2": cloud.url, "pricing": cloud.url},
                attempts=1,
                timeout_s=20,
            )
            slow = ec2_error("RequestLimitExceeded", "Request limit exceeded.", 503)
            yield CloudBench(
                provider=AwsProvider(config),
                other=AwsProvider(config),
                good=aws_pool("m5.large"),
                spot=aws_pool("m5.large", Market.SPOT),
                sold_out=aws_pool("c5a.2xlarge"),
                no_quota=aws_pool("p4d.24xlarge"),
                throttle=lambda: front.troubles.append(slow),
                lose_answer=lambda: setattr(front, "lose", 1),
                forbid=lambda: front.denied.add("*") or "ec2:RunInstances",
                quota_left=0,
                reports_availability=False,
                server=front,
            )
    finally:
        server.stop()


@contextmanager
def tencent_bench(tmp_path: Path) -> Iterator[CloudBench]:
    region, zone = "ap-shanghai", "ap-shanghai-2"

    def cvm_pool(type_: str, market: Market = Market.ON_DEMAND, where: str = zone) -> Pool:
        return Pool(region, where, type_, market)

    server = CvmServer(
        prices=TencentAnswers(
            items=[
                quota(zone, "S5.LARGE8"),
                quota(zone, "S5.LARGE8", "SPOTPAID", Price={"UnitPriceDiscount": 0.8}),
                quota(zone, "GN7.LARGE20", Status="SOLD_OUT"),
            ]
        ),
        left={"GN7.LARGE20": 2},
        quota={"ap-shanghai-3": 1},
    )
    with LoopbackCloud(server) as cloud:
        place = TencentPlaceConfig(
            image_id="img-canary01",
            vpc_id="vpc-canary01",
            subnets={zone: "subnet-canary01", "ap-shanghai-3": "subnet-canary02"},
        )
        cny = ExchangeRate(currency="CNY", usd=0.14, on=date(2026, 11, 20), source="a test")
        config = TencentProviderConfig(
            places={region: place, "ap-tokyo": place},
            join=JOIN,
            endpoint=cloud.url,
            attempts=1,
            rates=(cny,),
        )
        slow = tencent_error("RequestLimitExceeded", "too many requests")
        yield CloudBench(
            provider=TencentProvider(config),
            other=TencentProvider(config),
            good=cvm_pool("S5.LARGE8"),
            spot=cvm_pool("S5.LARGE8", Market.SPOT),
            sold_out=cvm_pool("GN7.LARGE20"),
            no_quota=cvm_pool("S5.LARGE8", where="ap-shanghai-3"),
            throttle=lambda: server.troubles.append(slow),
            lose_answer=lambda: setattr(server, "lose", 1),
            forbid=lambda: server.denied.add("*") or "cvm:RunInstances",
            unknown_id="ins-ffffffff",
            quota_left=0,
            server=server,
        )
