"""Whole regions in the threads of one process: real sockets, real gradients, no Ray."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from geo_ray.base.errors import GeoRayError
from geo_ray.base.threads import ThreadPoolMap
from geo_ray.base.types import Span
from geo_ray.data.manifest import Manifest
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.experiment.regions import RegionConfig
from geo_ray.runs.build import (
    build_averager,
    build_server,
    build_shard,
    build_worker,
    model_start,
    with_shapes,
)
from geo_ray.runs.data import data_rows, open_readers, prepare_manifest
from geo_ray.runs.evaluation import EvalSetting
from geo_ray.runtime.bridge import Bridge, open_bridge
from geo_ray.runtime.exchange.build import PathSetting, dials
from geo_ray.runtime.exchange.upload_scheduling import Transfers
from geo_ray.runtime.primary_shard import PrimaryShard
from geo_ray.runtime.remote_shard import RemoteShard, ShardServer, dial_shards, links_over
from geo_ray.runtime.worker_loop import WorkerLoop
from geo_ray.storage.places import CheckpointPlaces
from geo_ray.telemetry.event_buffer import EventBuffer
from geo_ray.training.averager import Averager
from geo_ray.training.checkpoint_parts import HeldShard
from geo_ray.training.membership import AveragerLeader
from geo_ray.training.parameters import digest
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.lan import LanClient, LanServer
from geo_ray.transport.wire.message import EndpointIdentity

KEY = bytes(32)
WAIT_S = 240.0


def eventually(condition: Callable[[], Any], what: str = "the condition") -> Any:
    """Poll until the condition is true; its value."""
    deadline_s = time.monotonic() + WAIT_S
    while not (value := condition()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"{what} did not come true within {WAIT_S} s")
        time.sleep(0.005)
    return value


def parts_reported(sites: Iterable[Any], count: int) -> list[str]:
    """The names of the checkpoint's parts that the regions have reported, once there are enough.

    A region reports a part after it has written it: the file is there before the event.
    """
    names: list[str] = []

    def take() -> bool:
        events = [event for site in sites for event in site.event_buffer.take(100_000)]
        parts = [part for event in events if event["kind"] == "parts" for part in event["parts"]]
        names.extend(part.name for part in parts)
        return len(names) >= count

    eventually(take, f"{count} parts of the checkpoint")
    return sorted(names)


class Gate:
    """Lets each worker take some steps, and the rest only once it is open.

    A free-running worker may be done before a loaded machine has noticed that it began: with a gate
    a run cannot be over before the test has done to it what it is about.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._open = threading.Event()
        self.reached: set[str] = set()
        self.workers: set[int] = set()  # those that wait, by the address of what paces them

    def open(self) -> None:
        self._open.set()

    def pacer(self, region: str) -> Callable[[Span], float]:
        """What one worker's loop calls after each step; no padding, but the wait at the gate."""
        taken = 0

        def pace(_: Span) -> float:
            nonlocal taken
            taken += 1
            if taken >= self._steps:
                self.reached.add(region)
                self.workers.add(id(pace))
                assert self._open.wait(WAIT_S), "the gate was not opened"
            return 0.0

        return pace


@dataclass
class Site:
    """One region: bridge, primary shard, other shards; workers are started one by one."""

    region: RegionConfig
    world: InProcess

    def __post_init__(self) -> None:
        world, name, count = self.world, self.region.name, self.region.ps_shards
        experiment, timeout_s = world.experiment, world.timeout_s
        self.event_buffer = EventBuffer(name, time.time())
        self.servers: list[LanServer] = []
        self.clients: list[LanClient] = []
        self.endpoint: Endpoint | None = None
        self.bridge: Bridge | None = None
        self._bridge_attempt = 1
        if world.averager is not None:
            identity = EndpointIdentity("test-run", name, self._bridge_attempt, KEY)
            self.bridge = open_bridge(identity, self._path_setting())
            self.endpoint = self.bridge.endpoint
        self.shards = [build_shard(experiment, self.region, i, world.start) for i in range(count)]
        hello = {"peer": f"{name}/primary", "role": "primary"}
        own, *others = [
            HeldShard(shard, name, i, world.places) for i, shard in enumerate(self.shards)
        ]
        slots = [self._serve(ShardServer(other).handle) for other in others]
        remotes = [RemoteShard(self._dial(slot.address, hello), timeout_s) for slot in slots]
        bridge_client = None
        if self.bridge is not None:
            self.bridge_lan = self._serve(self.bridge.handle, self.bridge.on_close)
            bridge_client = self._dial(self.bridge_lan.address, hello, 4 * world.params_P.numel())
        shards = [self.shards[0], *remotes]
        self.pool = ThreadPoolMap(count, "shards")
        self.server = build_server(
            experiment,
            self.region,
            shards,
            world.params_P.numel(),
            in_parallel=self.pool,
            start=world.start,
        )
        writers = [RemoteShard(self._dial(slot.address, hello), timeout_s) for slot in slots]
        self.primary = PrimaryShard(
            self.server, own, writers, bridge_client, self.event_buffer, timeout_s
        )
        lan = self._serve(self.primary.handle, self.primary.on_close)
        self.addresses = [lan.address, *[slot.address for slot in slots]]

    def kill_bridge(self) -> None:
        """End the bridge as its process would end: without notice, sockets close."""
        assert self.bridge is not None and self.endpoint is not None
        self.bridge_lan.close(0.0)
        self.endpoint.close(0.0)
        self.bridge.close()

    def replace_bridge(self, leader: AveragerLeader | None = None) -> None:
        """A new bridge in the place of one that was killed; the averager lives at ``leader``."""
        world, name = self.world, self.region.name
        leader = leader or AveragerLeader(world.experiment.averager_region)
        setting = replace(self._path_setting(), averager=None, leader=leader)
        self._bridge_attempt += 1
        identity = EndpointIdentity("test-run", name, self._bridge_attempt, KEY)
        self.bridge = open_bridge(identity, setting)
        self.endpoint = self.bridge.endpoint
        self.bridge_lan = self._serve(self.bridge.handle, self.bridge.on_close)
        for who, whom in {(name, leader.region), *world.dials()}:
            dialer, dialed = world.sites[who].bridge, world.sites[whom].bridge
            if name in (who, whom):
                assert dialer is not None and dialed is not None
                dialer.connect(whom, dialed.endpoint.advertised)
                dialed.expect(who)
        hello = {"peer": f"{name}/primary", "role": "primary"}
        size_bytes = 4 * world.params_P.numel()
        self.primary.use_bridge(self._dial(self.bridge_lan.address, hello, size_bytes))

    def _path_setting(self) -> PathSetting:
        world = self.world
        return PathSetting(
            world.experiment,
            world.params_P.numel(),
            self._averager(),
            self.event_buffer,
            world.places,
            world.timeout_s,
            run_dir=str(Path(world.places.main).parent),
            make=self._fresh_averager,
        )

    def _fresh_averager(self) -> Averager:
        world = self.world
        rows = data_rows(world.experiment, world.manifest)
        return build_averager(world.experiment, world.params_P.numel(), rows, world.start.layout)

    def _averager(self) -> Averager | None:
        """The averager, or the standby's own copy of it."""
        world, name = self.world, self.region.name
        if name == world.experiment.first_standby:
            return self._fresh_averager()
        return world.averager if name == world.experiment.averager_region else None

    def _serve(self, handler: Any, on_close: Any = None) -> LanServer:
        server = LanServer("127.0.0.1", KEY, handler, on_close=on_close)
        self.servers.append(server)
        return server

    def _dial(self, address: tuple[str, int], hello: Any, shared_bytes: int = 0) -> LanClient:
        client = LanClient(address, KEY, hello, shared_bytes=shared_bytes)
        self.clients.append(client)
        return client

    @property
    def digest(self) -> str:
        return digest(torch.cat([shard.params_S for shard in self.shards]))

    def join(self, rank: int, attempt: int = 1, *, shared: bool = True) -> list[LanClient]:
        """Connections of one worker to all shards, primary first; nothing is asked yet."""
        hello = {"peer": f"{self.region.name}/{rank}", "role": "worker", "worker": rank}
        num_params = self.world.params_P.numel()
        clients = dial_shards(
            self.addresses,
            KEY,
            hello | {"attempt": attempt},
            num_params,
            shared=shared,
            buffer_floats=self.world.start.layout.size_floats,
        )
        self.clients += clients
        return clients

    def loop(self, rank: int, attempt: int = 1, *, shared: bool = True) -> WorkerLoop:
        world, experiment = self.world, self.world.experiment
        clients = self.join(rank, attempt, shared=shared)
        buffer_floats = world.start.layout.size_floats
        params_P, grad_P, links = links_over(
            clients, world.params_P.numel(), world.timeout_s, buffer_floats
        )
        name = self.region.name
        worker = build_worker(experiment, name, world.task, params_P, grad_P)
        train, heldout = open_readers(experiment, world.manifest, name)
        pace = world.gate and world.gate.pacer(name)
        return WorkerLoop(
            worker,
            links,
            train,
            heldout,
            rank=rank,
            evals=EvalSetting(statistics=experiment.statistics_spans),
            step_s=pace,
        )

    def start(self, rank: int, attempt: int = 1, *, shared: bool = True) -> WorkerThread:
        thread = WorkerThread(self.loop(rank, attempt, shared=shared))
        thread.start()
        return thread

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.event_buffer.take(100_000)]

    def close(self) -> None:
        if self.bridge is not None:
            self.bridge.close()
        for client in self.clients:
            client.close()
        self.primary.close()
        self.pool.close()
        if self.endpoint is not None:
            self.endpoint.close(0.0)
        for server in self.servers:
            server.close()


def transfers_of(site: Site) -> Transfers:
    """The stage of a region's path that makes transfers take turns."""
    assert site.bridge is not None
    found = site.bridge.path.stage
    assert isinstance(found, Transfers)
    return found


class WorkerThread(threading.Thread):
    """Runs a worker's loop; `result` gives its steps or raises what stopped it."""

    def __init__(self, loop: WorkerLoop) -> None:
        super().__init__(daemon=True)
        self._loop = loop
        self._steps = -1
        self._error: GeoRayError | None = None

    def run(self) -> None:
        try:
            self._steps = self._loop.run()
        except GeoRayError as error:
            self._error = error

    def result(self) -> int:
        self.join(WAIT_S)
        assert not self.is_alive(), "the worker still runs"
        if self._error is not None:
            raise self._error
        return self._steps


class InProcess:
    """All regions of an experiment; use as a context manager."""

    def __init__(
        self,
        experiment: Experiment,
        directory: Path,
        timeout_s: float = WAIT_S,
        gate: Gate | None = None,
        places: CheckpointPlaces | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self.gate = gate
        self.parts = directory / "checkpoints"
        self.places = places or CheckpointPlaces(str(self.parts))
        self.task = load_task(experiment.task, directory)
        self.experiment = experiment = with_shapes(experiment, self.task)
        self.start = model_start(self.task, experiment.seed)
        self.params_P = self.start.params_P
        self.manifest: Manifest
        self.manifest, _ = prepare_manifest(experiment, self.task, directory, directory / "data")
        many = len(experiment.regions) > 1
        rows = data_rows(experiment, self.manifest)
        self.averager: Averager | None = (
            build_averager(experiment, self.params_P.numel(), rows, self.start.layout)
            if many
            else None
        )
        self.sites = {region.name: Site(region, self) for region in experiment.regions}
        for name, peer in self.dials() if many else []:
            dialer, dialed = self.sites[name].bridge, self.sites[peer].bridge
            assert dialer is not None and dialed is not None
            dialer.connect(peer, dialed.endpoint.advertised)
            dialed.expect(name)  # it may have something to say before it is reached

    def dials(self) -> list[tuple[str, str]]:
        """Which region's bridge dials which."""
        leader = self.experiment.averager_region
        pairs = [(name, leader) for name in self.sites if name != leader]
        return pairs + dials(self.experiment)

    def run(self, *, shared: bool = True) -> list[str]:
        """Train to the end, undisturbed; the regions' digests in order."""
        workers = [
            site.start(rank, shared=shared)
            for site in self.sites.values()
            for rank in range(site.region.workers)
        ]
        for worker in workers:
            worker.result()
        return [site.digest for site in self.sites.values()]

    def check_books(self) -> None:
        for site in self.sites.values():
            ledger = site.server.ledger
            ledger.check()
            assert not ledger.in_flight and not ledger.returned

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        for site in self.sites.values():
            site.close()


def experiment_of(**changes: Any) -> Experiment:
    """A tiny experiment; keywords replace whole sections."""
    tree: dict[str, Any] = {
        "name": "tiny",
        "task": {"use": "digits", "options": {"width": 2}},
        "data": {"generate": {}, "batch_size": 8},
        "regions": [{"name": "us-east", "workers": 2}, {"name": "eu-west", "workers": 2}],
        "strategy": {"kind": "sma", "interval": 2},
        "optimizer": {"kind": "momentum", "lr": 0.05},
        "train": {"steps": 6, "eval_every": 3},
        "cluster": {"kind": "existing"},
        "checkpoint": {"every_s": None},
    }
    return Experiment.model_validate_json(json.dumps(tree | changes))
