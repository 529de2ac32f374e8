"""The Ray actors: thin shells that build the parts of a region and keep them running.

Ray carries only small control messages to them. Everything big goes over `geo_ray.transport`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
import torch

from geo_ray.checkpoint.manifest import PartInfo
from geo_ray.checkpoint.parts import write_part
from geo_ray.clock import SystemClock
from geo_ray.job.build import (
    build_averager,
    build_shard,
    initial_parameters,
    region_wire,
    server_plan,
    use_one_thread,
)
from geo_ray.runtime.actors.bridge import Bridge
from geo_ray.runtime.actors.deadlines import step_timeout_s
from geo_ray.runtime.actors.event_buffer import EventBuffer
from geo_ray.runtime.actors.parts import AVERAGER_PART, off_wire, shard_part_name
from geo_ray.runtime.actors.primary_shard import PrimaryPorts, PrimaryShard
from geo_ray.runtime.actors.remote_shard import RemoteShard
from geo_ray.runtime.actors.shard_server import ShardServer
from geo_ray.runtime.actors.spec import RunSpec
from geo_ray.runtime.paths.build import attach_roads, averager_lives_in
from geo_ray.runtime.paths.differential import DifferentialPath, PathEnds, road_for
from geo_ray.runtime.paths.overlay_attach import attach_overlay
from geo_ray.tasks.load import load_task
from geo_ray.training.averager.averager import Averager
from geo_ray.training.compute.flat import digest
from geo_ray.training.server.region_model import RegionModel, ShardPort
from geo_ray.training.server.server import Server
from geo_ray.training.server.shard import Shard
from geo_ray.transport.emulation.link_model import build_links
from geo_ray.transport.endpoint.endpoint import Endpoint
from geo_ray.transport.lan.client import LanClient
from geo_ray.transport.lan.server import LanServer
from geo_ray.transport.security.cert_store import files_of
from geo_ray.transport.security.tls import TlsBytes, TlsFiles
from geo_ray.transport.wire.message import EndpointIdentity
from geo_ray.transport.wire.meta import Meta

Address = tuple[str, int]


def _host() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _load_shard(spec: RunSpec, region: str, index: int) -> tuple[Shard, dict[str, Any]]:
    """A shard at the start of the run, or as the checkpoint has it; and what else its part holds.

    That is the plain values, and under ``"wire"`` the tensors of the exchange.
    """
    use_one_thread()
    spec.check_run_directory(region)
    experiment = spec.experiment
    task = load_task(experiment.task, spec.here)
    params_P = initial_parameters(task, experiment.seed)
    shard = build_shard(experiment, spec.region(region), index, params_P)
    if spec.resume is None:
        return shard, {}
    tensors, meta = spec.resume.read(shard_part_name(region, index))
    shard.restore(tensors, meta["counters"])  # type: ignore[arg-type]
    return shard, meta | {"wire": off_wire(tensors)}  # type: ignore[arg-type]


class BridgeActor:
    """A region's bridge, with the averager if this region hosts it.

    Args:
        spec: the run.
        region: this region.
    """

    def __init__(self, spec: RunSpec, region: str) -> None:
        self._spec = spec
        self._region = region
        self._averager: Averager | None = None
        self._road: DifferentialPath | None = None

    def ready(self) -> None:
        """Build what lives here; not in the constructor, whose errors Ray turns into text."""
        use_one_thread()
        spec = self._spec
        spec.check_run_directory(self._region)
        if not averager_lives_in(spec.experiment, self._region):
            return
        self._averager = build_averager(spec.experiment, spec.num_params)
        if spec.resume is not None:
            tensors, meta = spec.resume.read(AVERAGER_PART)
            self._averager.restore(tensors, meta["control"])  # type: ignore[arg-type]

    def open(self, origin_unix_s: float, certificate: TlsBytes | None) -> tuple[Address, Address]:
        """Listen, on the run's clock.

        Args:
            origin_unix_s: when that began.
            certificate: this region's for the run; None if it lies in a directory here, or no TLS.

        Returns:
            Where other regions, and where the own region, reach this bridge.
        """
        spec, region, experiment = self._spec, self._region, self._spec.experiment
        self._event_buffer = EventBuffer(region, origin_unix_s)
        self._bridge = Bridge(
            region,
            experiment.averager_region,
            self._averager if region == experiment.averager_region else None,
            self._event_buffer,
            spec.parts_dir,
            step_timeout_s(experiment.train, spec.num_params),
        )
        links = build_links(experiment.links(), experiment.seed)
        shaping = {dst: model for (src, dst), model in links.items() if src == region}
        run_start_s = SystemClock().now_s() - self._event_buffer.now_s()
        self._endpoint = Endpoint(
            EndpointIdentity(spec.run_id, region, spec.epoch, spec.key),
            self._bridge.on_message,
            experiment.transport,
            shaping,
            run_start_s=run_start_s,
            certificate=certificate or self._own_certificate(),
        )
        self._bridge.use(self._endpoint)
        self._lan = LanServer(_host(), spec.key, self._bridge.handle)
        bound = self._endpoint.listen(_host(), 0)
        ends = PathEnds(self._endpoint, bound, run_start_s, shaping, self._bridge.refuse)
        self._road = road_for(experiment.codec.up, spec.num_params, ends)
        self._bridge.use_lossy(self._road)
        run_dir = Path(spec.parts_dir).parent
        attach_overlay(experiment, spec.num_params, run_dir, self._bridge, self._endpoint)
        attach_roads(
            experiment,
            region,
            self._bridge,
            self._endpoint,
            self._averager,
            self._event_buffer,
            spec.num_params,
        )
        return self._endpoint.advertised, self._lan.address

    def _own_certificate(self) -> TlsFiles | None:
        directory = self._spec.experiment.transport.certs
        return None if directory is None else files_of(Path(directory), self._region)

    def connect(self, peer: str, address: Address) -> None:
        """Dial another region's bridge and keep the link up."""
        self._endpoint.connect(peer, address)
        if self._road is not None:
            self._road.connect(peer, address)

    def poll(self) -> dict[str, Any]:
        """State and new events."""
        return {"status": self._bridge.status(), "events": self._event_buffer.take()}

    def request_stop(self) -> None:
        """Let all regions finish."""
        self._bridge.request_stop()

    def request_checkpoint(self, checkpoint: int, halt: bool) -> bool:
        """Begin a checkpoint of all regions."""
        return self._bridge.request_checkpoint(checkpoint, halt=halt)

    def report_dead(self, region: str) -> None:
        """Another region is dead and will not come back."""
        self._bridge.report_dead(region)

    def close(self) -> None:
        """Close all sockets."""
        self._bridge.close()
        self._lan.close()
        self._endpoint.close(1.0)


class PrimaryActor:
    """The lead of a region's parameter server.

    Args:
        spec: the run.
        region: this region.
    """

    def __init__(self, spec: RunSpec, region: str) -> None:
        self._spec = spec
        self._region = region
        self._lead: PrimaryShard | None = None
        self._remotes: list[RemoteShard] = []
        self._clients: list[LanClient] = []

    def ready(self) -> None:
        """Load the shard."""
        self._shard, self._restored = _load_shard(self._spec, self._region, 0)

    def start(
        self, origin_unix_s: float, bridge: Address | None, followers: list[Address]
    ) -> Address:
        """Connect to the region's other parts and begin to serve workers, on the run's clock.

        Returns:
            Where workers connect.
        """
        spec, experiment = self._spec, self._spec.experiment
        timeout_s = step_timeout_s(experiment.train, spec.num_params)
        self._event_buffer = EventBuffer(self._region, origin_unix_s)
        hello: Meta = {"peer": f"{self._region}/lead", "role": "lead"}
        follower_clients = [LanClient(a, spec.key, hello) for a in followers]
        bridge_client = None if bridge is None else LanClient(bridge, spec.key, hello)
        self._clients = [*follower_clients, *([bridge_client] if bridge_client else [])]
        self._remotes = [RemoteShard(client, timeout_s) for client in follower_clients]
        shards: list[ShardPort] = [self._shard, *self._remotes]
        server = Server(
            server_plan(experiment, spec.region(self._region), spec.epoch),
            RegionModel(shards, spec.num_params, experiment.strategy.traits.exchange.fragments),
            wire=region_wire(experiment, self._region, spec.num_params),
        )
        if self._restored:
            server.restore(self._restored["control"], self._restored["wire"])
        ports = PrimaryPorts(bridge_client, follower_clients)
        self._lead = PrimaryShard(
            server, self._shard, ports, self._event_buffer, spec.parts_dir, timeout_s
        )
        self._lan = LanServer(_host(), spec.key, self._lead.handle, on_close=self._lead.on_close)
        return self._lan.address

    def poll(self) -> dict[str, Any]:
        """State and new events."""
        if self._lead is None:
            return {"status": {"phase": "starting"}, "events": []}
        return {"status": self._lead.status(), "events": self._event_buffer.take()}

    def stop(self) -> None:
        """Finish after the present step; for a region that is alone."""
        if self._lead is not None:
            self._lead.stop()

    def checkpoint_now(self, checkpoint: int, halt: bool) -> bool:
        """Save; for a region that is alone. False if it has ended."""
        return self._lead is not None and self._lead.checkpoint_now(checkpoint, halt=halt)

    def write_model(self, directory: str) -> tuple[PartInfo, str]:
        """Write the region's parameters as one vector; for the end of the run.

        Returns:
            The file's fingerprint, and the digest of the parameters.
        """
        slices = [self._shard.params_S, *[remote.params() for remote in self._remotes]]
        params_P = torch.cat(slices)
        part = write_part(Path(directory), f"model-{self._region}", {"params": params_P}, {})
        return part, digest(params_P)

    def close(self) -> None:
        """Close all sockets."""
        for client in self._clients:
            client.close()
        if self._lead is not None:
            self._lead.close()
            self._lan.close()


class ShardServerActor:
    """One more shard of a region's parameter server.

    Args:
        spec: the run.
        region: this region.
        index: number of the shard, 1 or more.
    """

    def __init__(self, spec: RunSpec, region: str, index: int) -> None:
        self._spec = spec
        self._region = region
        self._index = index

    def ready(self) -> None:
        """Load the shard and listen."""
        spec = self._spec
        shard, _ = _load_shard(spec, self._region, self._index)
        follower = ShardServer(shard, self._region, self._index, spec.parts_dir)
        self._lan = LanServer(_host(), spec.key, follower.handle)

    def poll(self) -> dict[str, Any]:
        """A sign of life; the lead tells what happens."""
        return {"status": {}, "events": []}

    def address(self) -> Address:
        """Where workers and the lead connect."""
        return self._lan.address

    def close(self) -> None:
        """Close all sockets."""
        self._lan.close()
