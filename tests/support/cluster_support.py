"""Clusters in clouds on loopback; the head is simulated without Ray."""

from __future__ import annotations

import json
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moto.server import ThreadedMotoServer

from geo_ray.api.clusters import _asked
from geo_ray.api.plan import PlanInputs
from geo_ray.base.errors import GeoRayError
from geo_ray.cloud.autoscaler.actions import AutoscalerStatus, action_report
from geo_ray.cloud.autoscaler.journal import Journal
from geo_ray.cloud.autoscaler.observation import ObservedNode, PendingGroup
from geo_ray.cloud.autoscaler.policy import AutoscalePolicy
from geo_ray.cloud.autoscaler.reconcile import Reconciler
from geo_ray.cloud.cluster.head import find_head
from geo_ray.cloud.cluster.providers import RemoteProvider, RemoteStore, open_clouds
from geo_ray.cloud.cluster.spec import ClusterSpec
from geo_ray.cloud.cluster.state import ClusterState
from geo_ray.cloud.cluster.status import ALL_ENDED, HeadStatus, read_status, write_status
from geo_ray.cloud.provider import Machine, MachineProvider, MachineState
from geo_ray.cloud.terraform import read_stack
from geo_ray.prices.price_book import bundled_book, dump_book
from geo_ray.runs.lease import LeaseSeeker
from geo_ray.storage.conditional_store import LocalConditionalStore
from geo_ray.storage.uri import s3_uri
from tests.support.cloud_servers import (
    AwsAnswers,
    LoopbackCloud,
    TencentAnswers,
    instance_product,
    quota,
)
from tests.support.cvm_server import CvmServer
from tests.support.ec2_frontend import Ec2Frontend
from tests.support.s3_support import new_bucket

RUN: dict[str, Any] = {
    "name": "asked",
    "cluster": {"kind": "existing"},
    "task": {"use": "digits"},
    "data": {"generate": {}, "batch_size": 16},
    "strategy": {"kind": "sma", "interval": 4},
    "optimizer": {"kind": "momentum", "lr": 0.05},
    "train": {"steps": 20000},
    "regions": [{"name": "east"}, {"name": "west"}],
    "averager": {"region": "east"},
    "emulate": {"link": {"rate_mbps": 100, "delay_s": 0.03}},
    "run": {"dir": "s3://bucket/runs"},
    "autoscale": {
        "every_s": 0.3,
        "floor": "averager",
        "retry": {"missing_s": 2.0, "resend_s": 5.0},
        "drain_s": 1.0,
        "calm": {"idle_s": 1.0},
    },
}


@dataclass
class CloudWorld:
    """A cloud, and the configuration of a cluster there.

    Attributes:
        cloud: its name.
        config: of the cluster.
        server: that answers for machines.
        prices: files of prices for the plan.
        stack: file of what Terraform printed of its stack there; None: there is none.
    """

    cloud: str
    config: dict[str, Any]
    server: Any
    prices: Sequence[Path] = ()
    stack: Path | None = None
    told: list[str] = field(default_factory=list)
    _provider: MachineProvider | None = None  # boto3 takes long to make a client

    @property
    def state(self) -> ClusterState:
        if self.stack is not None:
            return ClusterState.below(read_stack(self.stack).clusters or "", self.config["name"])
        return ClusterState.below(self.config["provider"]["state"], self.config["name"])

    @property
    def inputs(self) -> PlanInputs:
        return PlanInputs(prices=self.prices)

    def living(self) -> list[Machine]:
        """Return all listed machines of the cluster."""
        record = self.state.known()
        if self._provider is None:
            self._provider = open_clouds(record, self.state)
        listed = self._provider.list_machines(record.name)
        return [m for m in listed if m.state is not MachineState.ENDED]


def machine_of(type_: str) -> dict[str, Any]:
    return {"type": type_, "cap": 4, "rows_per_s": 100, "markets": ["on_demand", "spot"]}


@contextmanager
def aws_world(tmp_path: Path) -> Iterator[CloudWorld]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    moto = f"http://{host}:{port}"
    regions = ("us-east-1", "eu-central-1")
    front = Ec2Frontend(
        moto,
        prices=AwsAnswers(
            products=[instance_product(r, "m5.2xlarge", "0.4") for r in regions],
            spot=[(r, f"{r}a", "m5.2xlarge", "0.2", "2026-11-20T00:00:00Z") for r in regions],
        ),
    )
    try:
        front.reset()
        with LoopbackCloud(front) as cloud:
            state = s3_uri(new_bucket(moto), "c", endpoint_url=moto, region="us-east-1")
            place = {"image_id": "ami-12c6146b"}
            config = RUN | {
                "plan": {
                    "regions": {
                        name: {
                            "cloud": "aws",
                            "at": at,
                            "rows": 1000,
                            "machines": [machine_of("m5.2xlarge")],
                        }
                        for name, at in zip(("east", "west"), regions, strict=True)
                    }
                },
                "provider": {
                    "state": state,
                    "aws": {
                        "places": dict.fromkeys(regions, place),
                        "endpoints": dict.fromkeys(("ec2", "pricing", "secretsmanager"), cloud.url),
                        "attempts": 1,
                    },
                },
            }
            yield CloudWorld("aws", config, front)
    finally:
        server.stop()


@contextmanager
def tencent_world(tmp_path: Path) -> Iterator[CloudWorld]:
    zone, other = "ap-shanghai-2", "ap-tokyo-1"
    spot = {"Price": {"UnitPriceDiscount": 0.8}}
    server = CvmServer(
        prices=TencentAnswers(
            items=[
                item
                for each in (zone, other)
                for item in (
                    quota(each, "S5.LARGE8"),
                    quota(each, "S5.LARGE8", "SPOTPAID", **spot),
                )
            ]
        )
    )
    book = tmp_path / "tencent.json"
    shipped = bundled_book()
    records = []
    for record in shipped.records:
        at = {"us-east-1": "ap-shanghai", "eu-central-1": "ap-tokyo"}.get(record.region)
        if at is None or record.zone is not None or record.item == "disk":
            continue
        if record.item == "instance" and record.type != "m5.2xlarge":
            continue
        type_ = "S5.LARGE8" if record.item == "instance" else None
        to = {"us-east-1": "ap-shanghai", "eu-central-1": "ap-tokyo"}.get(
            record.to or "", record.to
        )
        changes = {"cloud": "tencent", "region": at, "type": type_, "to": to}
        records.append(record.model_copy(update=changes))
        if record.item == "instance" and record.market == "on_demand":
            records.append(records[-1].model_copy(update={"market": "spot"}))
    book.write_bytes(dump_book(shipped.model_copy(update={"records": tuple(records)})))
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    try:
        with LoopbackCloud(server) as cloud:
            address = f"http://{host}:{port}"
            state = s3_uri(new_bucket(address), "c", endpoint_url=address, region="us-east-1")

            def place(at: str) -> dict[str, Any]:
                return {
                    "image_id": "img-canary01",
                    "vpc_id": "vpc-canary01",
                    "subnets": {at: "subnet-canary01"},
                }

            config = RUN | {
                "plan": {
                    "regions": {
                        name: {
                            "cloud": "tencent",
                            "at": at,
                            "rows": 1000,
                            "machines": [machine_of("S5.LARGE8")],
                        }
                        for name, at in (("east", "ap-shanghai"), ("west", "ap-tokyo"))
                    }
                },
                "provider": {
                    "state": state,
                    "state_keys_secret": "geo-ray-state-keys",
                    "tencent": {
                        "places": {"ap-shanghai": place(zone), "ap-tokyo": place(other)},
                        "endpoint": cloud.url,
                        "attempts": 1,
                        "rates": [
                            {
                                "currency": "CNY",
                                "usd": 0.14,
                                "on": "2026-11-20",
                                "source": "a test",
                            }
                        ],
                    },
                },
            }
            yield CloudWorld("tencent", json.loads(json.dumps(config)), server, (book,))
    finally:
        moto.stop()


WORLDS: dict[str, Callable[[Path], Any]] = {"aws": aws_world, "tencent": tencent_world}
STACK_HEAD = "10.20.128.10:6379"
STACK_TOKEN = "geo-ray-demo-token"


def on_a_stack(world: CloudWorld, path: Path) -> None:
    """Provide a stack whose outputs match the configuration."""
    provider = world.config["provider"]
    regions = world.config["plan"]["regions"]
    section = provider[world.cloud]
    places = {
        name: {
            "cloud": world.cloud,
            "at": offer["at"],
            "machines": [{"type": each["type"], "cap": 4} for each in offer["machines"]],
            world.cloud: section["places"][offer["at"]],
        }
        for name, offer in regions.items()
    }
    store = {"aws": "aws-secretsmanager", "tencent": "tencent-ssm"}[world.cloud]
    first = next(iter(regions))
    home = regions[first]["at"]
    held = {
        "version": 1,
        "stack": "demo",
        "cluster": world.config["name"],
        "head": {"region": first, "address": STACK_HEAD, "machine": "i-0head", "type": "m5.large"},
        "secrets": {world.cloud: {"store": store, "region": home, "token": STACK_TOKEN}},
        "runs": "s3://bucket/runs",
        "clusters": provider["state"],
        "state_keys": provider.pop("state_keys_secret", None),
        "places": places,
    }
    world.stack = path / "outputs.json"
    world.stack.write_text(json.dumps({"geo_ray": {"sensitive": False, "value": held}}))
    # Of an older stack: what Terraform says counts.
    stale = {at: each | {"image_id": "ami-0stale"} for at, each in section["places"].items()}
    if world.cloud == "aws":
        provider["aws"] = section | {"places": stale}
    provider["state"] = "clusters"


@contextmanager
def stack_world(tmp_path: Path) -> Iterator[CloudWorld]:
    """Return AWS with a Terraform stack."""
    with aws_world(tmp_path) as world:
        on_a_stack(world, tmp_path)
        yield world


def near_store(root: Path) -> Callable[[ClusterState, str], LocalConditionalStore]:
    """Keep the cluster's state in a directory instead of a bucket, which is faster."""

    def store(_: ClusterState, below: str) -> LocalConditionalStore:
        path = root / below
        path.mkdir(parents=True, exist_ok=True)
        return LocalConditionalStore(path)

    return store


def boots(world: CloudWorld) -> list[str]:
    """Return the user data of every launch, in order."""
    return [b64decode(each["UserData"]).decode() for each in world.server.launches]


class ReadyNodes:
    """Nodes that join as soon as their machines run, and stay idle."""

    def observe(self, machines: Sequence[Machine]) -> dict[str, ObservedNode]:
        running = [m for m in machines if m.state is MachineState.RUNNING]
        return {machine.id: ObservedNode(is_ready=True, is_busy=False) for machine in running}

    def drain(self, machine: Machine, reason: str, until_unix_s: float) -> None:
        pass

    def end_idle(self, machine: Machine, reason: str) -> bool:
        return True

    def pending(self) -> tuple[PendingGroup, ...]:
        return ()


@dataclass
class Work:
    is_released: bool = False

    def left_s(self) -> float:
        return 0.0 if self.is_released else 5000.0


@contextmanager
def played_head(state: ClusterState, ahead_s: float = 0.0) -> Iterator[None]:
    """Do what the head does as soon as it runs: the same reconciler, without Ray.

    Args:
        state: of the cluster.
        ahead_s: what its clock is ahead of ours.
    """
    stop = threading.Event()

    def live() -> None:
        provider: MachineProvider | None = None
        while not stop.wait(0.1):
            try:
                record, _ = state.read()
                if record is None or record.phase == "down":
                    continue
                provider = provider or open_clouds(record, state)
                head = find_head(provider.list_machines(record.name), record)
                runs = head is not None and head.state is MachineState.RUNNING
                if not runs and record.head.existing is None:
                    continue
                _serve(state, stop, ahead_s)
            except GeoRayError:
                continue

    thread = threading.Thread(target=live)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _serve(state: ClusterState, stop: threading.Event, ahead_s: float) -> None:
    record = state.known()
    work, actions = Work(), []
    keeper = LeaseSeeker(RemoteStore(state), record.name, lambda _: None).take()
    try:
        loop = Reconciler(
            AutoscalePolicy(record.autoscale, record.name, record.id, record.made),
            record.target,
            RemoteProvider(state, record.made),
            ReadyNodes(),
            work,
            Journal(RemoteStore(state), keeper.token),
            record.name,
            keeper,
        )
        _, tag = read_status(state.store(), record.made)
        while not stop.wait(record.autoscale.every_s):
            phase = state.known().phase
            if phase == "down":
                return
            work.is_released = phase == "ending"
            result = loop.tick(time.time())
            actions += [action_report(each, time.time()) for each in result.decided.actions]
            living = [
                m for m in result.observed.machines or () if m.state is not MachineState.ENDED
            ]
            own = 0 if record.head.existing is not None else 1
            did = (ALL_ENDED,) if work.is_released and len(living) <= own else ()
            status = AutoscalerStatus(
                True, time.time(), tuple(living), left_s=5000.0, actions=tuple(actions)
            )
            told_s = time.time() + ahead_s
            said = HeadStatus(unix_s=told_s, made=record.made, did=did, status=status)
            tag = write_status(state.store(), said, tag)
            if own and len(living) == 0:
                return
    finally:
        keeper.close()


def nobody(_: str) -> None:
    """Discard a message."""


def until(what: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    deadline_s = time.monotonic() + 60.0
    while not what():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def asked_of(world: CloudWorld) -> ClusterSpec:
    """Return the specification that `geo-ray up` creates for a world."""
    words: Any = (world.config, (), "local", None, "optimal", None, None, nobody)
    found: ClusterSpec = _asked(*words)
    return found


@dataclass
class PlayedRay:
    """Simulates the calls of a head to Ray."""

    looks: int = 0
    saves: bool = False
    ended: list[str] = field(default_factory=list)
    allowed: list[float | None] = field(default_factory=list)

    def start(self, order: object) -> None:
        pass

    def status(self) -> AutoscalerStatus:
        self.looks += 1
        assert self.looks < 5, "it serves a cluster that is there no more"
        return AutoscalerStatus(True, saves=self.saves)

    def end(self, cluster: str) -> None:
        self.ended.append(cluster)

    def release(self) -> None:
        pass

    def allow(self, budget_usd: float | None) -> None:
        self.allowed.append(budget_usd)

    def stop_jobs(self, longest_s: float, notify: Callable[[str | None], None]) -> None:
        notify("geo-ray-queue-all is served no more")
        notify("stopping job one, which saves its run first")
