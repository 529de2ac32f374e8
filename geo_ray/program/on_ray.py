"""A program as Ray actors, each on a node of its group's region."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import ray

from geo_ray.base.errors import NodeFailedError, ProgramError, ProgramRegionError, RegionLostError
from geo_ray.base.user_code import or_meant
from geo_ray.experiment.cluster import ClusterConfig, ExistingClusterConfig, LocalClusterConfig
from geo_ray.program.bridge import NodeBridge
from geo_ray.program.graph import Program
from geo_ray.program.peers import FOREVER_S, NodeServer, NodeTable
from geo_ray.program.serialization import ShippedNode
from geo_ray.ray_cluster import ray_internals
from geo_ray.ray_cluster.calls import Handle, collect, kill
from geo_ray.ray_cluster.connect import connect
from geo_ray.ray_cluster.keys import BridgeKeys, BridgeSecrets, Introduction, RunKeys
from geo_ray.ray_cluster.labels import REGION_LABEL, in_region
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.emulation import LinkSpec, build_links
from geo_ray.transport.wire.message import EndpointIdentity
from geo_ray.transport.wire.sockets import Address

_THREADS: Final = 8  # calls of the launcher at the same time: one waits for the node's end
_BRIDGE_CPUS: Final = 0.01
_ASK_S: Final = 300.0
_PLACE_S: Final = 120.0
_END_S: Final = 30.0
_LOGGER = logging.getLogger(__name__)


def _own_host() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


class ProgramNodeActor:
    """An instance; see `NodeServer`."""

    def __init__(self, shipped: dict[str, Any]) -> None:
        self._shipped = ShippedNode.of_plain(shipped)
        self._secrets = BridgeSecrets(self._shipped.region, TransportConfig(tls="off"))

    def introduce(self) -> Introduction:
        """Tell the public half of its key."""
        return self._secrets.introduce()

    def open(self, sealed: bytes) -> Address:
        """Answer calls from now on; returns where."""
        key = self._secrets.lan_key(BridgeKeys(b"", sealed, None))
        self._server = NodeServer(self._shipped, "ray", _own_host(), key)
        return self._server.address

    def use(self, table: list[Any]) -> None:
        """Take a newer table."""
        self._server.use(NodeTable.of_plain(table))

    def stand(self) -> bool:
        """Make the node."""
        return self._server.stand()

    def run(self) -> bytes:
        """What its ``run`` returns."""
        return self._server.run()

    def attend(self) -> None:
        """Go on until the actor ends."""
        self._server.attend()

    def counts(self) -> dict[str, list[int]]:
        """Its calls."""
        return self._server.counts()


class ProgramBridgeActor:
    """A region's bridge; see `NodeBridge`."""

    def __init__(self, region: str, epoch: int, run_id: str) -> None:
        self._region, self._epoch, self._run_id = region, epoch, run_id
        self._secrets = BridgeSecrets(region, TransportConfig())

    def introduce(self) -> Introduction:
        """Tell the public halves of its keys."""
        return self._secrets.introduce()

    def open(
        self, keys: BridgeKeys, links: list[tuple[str, str, dict[str, Any]]], seed: int
    ) -> tuple[Address, Address]:
        """Listen; returns where, for other regions and for its own."""
        region = self._region
        specs = {(a, b): LinkSpec.model_validate(spec) for a, b, spec in links}
        shaping = {d: model for (s, d), model in build_links(specs, seed).items() if s == region}
        wan_key = self._secrets.wan_key(keys)
        identity = EndpointIdentity(self._run_id, region, self._epoch, wan_key)
        self._bridge = NodeBridge(
            identity,
            _own_host(),
            self._secrets.lan_key(keys),
            shaping,
            self._secrets.certificate(keys.signed),
        )
        return self._bridge.addresses

    def connect(self, region: str, address: Address) -> None:
        """Keep a link."""
        self._bridge.connect(region, address)

    def expect(self, region: str) -> None:
        """Another bridge will connect."""
        self._bridge.expect(region)

    def use(self, table: list[Any]) -> None:
        """Take a newer table."""
        self._bridge.use(NodeTable.of_plain(table))

    def attend(self) -> None:
        """Go on until the actor ends."""
        threading.Event().wait()


class ActorCalls:
    """Calls of actors: all end before this process lets go of Ray, which they would crash else."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = 0
        self._is_over = False

    def ask(self, what: str, begin: Callable[[], Any], timeout_s: float = _ASK_S) -> Any:
        """The value of a call.

        Args:
            what: is called.
            begin: begins the call.
            timeout_s: longest wait.

        Raises:
            NodeFailedError: the actor is gone, or does not answer.
            GeoRayError: what it raised.
        """
        with self.counted(what):
            try:
                return collect({"": begin()}, timeout_s)[""]
            except RegionLostError as error:
                raise NodeFailedError(f"{what}: {error.message}") from error

    @contextmanager
    def counted(self, what: str) -> Iterator[None]:
        """Be waited for while Ray is used.

        Raises:
            NodeFailedError: the program ends.
        """
        with self._changed:
            if self._is_over:
                raise NodeFailedError(f"{what}: the program ends")
            self._open += 1
        try:
            yield
        finally:
            with self._changed:
                self._open -= 1
                self._changed.notify_all()

    def end(self, kill_all: Callable[[], None]) -> None:
        """Begin none any more, end those who would answer, and wait for what is under way."""
        with self._changed:
            self._is_over = True
        kill_all()
        with self._changed:
            if not self._changed.wait_for(lambda: self._open == 0, _END_S):
                _LOGGER.warning("%d calls of a program's actors do not end", self._open)
        kill_all()  # also what was on its way into being


class RayNode:
    """See `RemoteNode`."""

    def __init__(self, what: str, actor: Handle, address: Address, calls: ActorCalls) -> None:
        self._what, self._actor, self._calls = what, actor, calls
        self.address = address

    def use(self, table: NodeTable) -> None:
        """See `RemoteNode.use`."""
        self._calls.ask(self._what, lambda: self._actor.use.remote(table.plain()))

    def stand(self) -> bool:
        """See `RemoteNode.stand`."""
        return bool(self._calls.ask(self._what, lambda: self._actor.stand.remote(), FOREVER_S))

    def run(self) -> bytes:
        """See `RemoteNode.run`."""
        return bytes(self._calls.ask(self._what, lambda: self._actor.run.remote(), FOREVER_S))

    def attend(self) -> None:
        """See `RemoteNode.attend`."""
        self._calls.ask(self._what, lambda: self._actor.attend.remote(), FOREVER_S)

    def counts(self) -> dict[str, list[int]]:
        """See `RemoteNode.counts`."""
        return dict(self._calls.ask(self._what, lambda: self._actor.counts.remote()))

    def end(self) -> None:
        """See `RemoteNode.end`."""
        kill(self._actor)


class RayBridge:
    """See `RemoteBridge`."""

    def __init__(
        self, what: str, actor: Handle, addresses: tuple[Address, Address], calls: ActorCalls
    ) -> None:
        self._what, self._actor, self._calls = what, actor, calls
        self.addresses = addresses

    def connect(self, region: str, address: Address) -> None:
        """See `RemoteBridge.connect`."""
        self._calls.ask(self._what, lambda: self._actor.connect.remote(region, address))

    def expect(self, region: str) -> None:
        """See `RemoteBridge.expect`."""
        self._calls.ask(self._what, lambda: self._actor.expect.remote(region))

    def use(self, table: NodeTable) -> None:
        """See `RemoteBridge.use`."""
        self._calls.ask(self._what, lambda: self._actor.use.remote(table.plain()))

    def attend(self) -> None:
        """See `RemoteBridge.attend`."""
        self._calls.ask(self._what, lambda: self._actor.attend.remote(), FOREVER_S)

    def end(self) -> None:
        """See `RemoteBridge.end`."""
        kill(self._actor)


class RayActors:
    """Makes them; see `NodeMaker`.

    Args:
        program: the whole.
        cluster: None: the one that this process is connected to or in, else one of this machine.
    """

    def __init__(self, program: Program, cluster: ClusterConfig | None = None) -> None:
        self._program = program
        self._cluster = cluster or default_cluster()
        self._groups = {each.name: each.group for each in program.instances}
        self._run_id = secrets.token_hex(8)
        self._keys = RunKeys(self._run_id, program.regions, TransportConfig())
        self._stack, self._calls = ExitStack(), ActorCalls()
        self._actors: list[Handle] = []

    def begin(self) -> None:
        """See `NodeMaker.begin`.

        Raises:
            ProgramRegionError: no node of the cluster is in a group's region.
            ClusterError: there is no cluster.
        """
        program = self._program
        regions = program.regions
        cpus = dict.fromkeys(regions, 1.0)  # also for what nodes bring up
        for group in program.groups:
            cpus[group.region] += group.cpus * group.replicas * len(group.nodes)
        cluster = connect(
            self._cluster,
            regions,
            namespace=f"geo_ray-{program.name}",
            cpus_per_region=max(cpus.values()),
        )
        self._stack.enter_context(cluster)
        there = {
            node["Labels"].get(REGION_LABEL) for node in ray_internals.nodes() if node["Alive"]
        }
        for region in regions:
            if region not in there:
                known = sorted(filter(None, there))
                raise ProgramRegionError(
                    f"no node of the cluster is in region {region!r}{or_meant(region, known)}"
                )

    def node(self, shipped: ShippedNode, incarnation: int) -> RayNode:
        """See `NodeMaker.node`."""
        group = self._groups[shipped.name]
        actor = self._made(
            ProgramNodeActor, shipped.region, (group.cpus, group.gpus), [shipped.plain()]
        )
        what = f"the actor of node {shipped.name!r}"
        introduction = self._placed(what, actor, shipped.region)
        sealed = self._keys.for_server(shipped.region, introduction)
        address = self._calls.ask(what, lambda: actor.open.remote(sealed))
        return RayNode(what, actor, tuple(address), self._calls)

    def bridge(self, region: str, epoch: int) -> RayBridge:
        """See `NodeMaker.bridge`."""
        given = [region, epoch, self._run_id]
        actor = self._made(ProgramBridgeActor, region, (_BRIDGE_CPUS, 0.0), given)
        what = f"the bridge of {region}"
        keys = self._keys.for_bridge(region, self._placed(what, actor, region))
        links = [(a, b, s.model_dump()) for (a, b), s in self._program.both_ways.items()]
        seed = self._program.seed
        opened = self._calls.ask(what, lambda: actor.open.remote(keys, links, seed))
        return RayBridge(what, actor, opened, self._calls)

    def end(self) -> None:
        """See `NodeMaker.end`."""
        try:
            self._calls.end(self._kill_all)
        finally:
            self._stack.close()

    def _kill_all(self) -> None:
        for actor in self._actors:
            kill(actor)

    def _made(
        self, kind: type, region: str, share: tuple[float, float], given: Sequence[Any]
    ) -> Handle:
        cpus, gpus = share
        with self._calls.counted(f"an actor in {region}"):
            actor: Handle = (
                ray.remote(kind)
                .options(
                    num_cpus=cpus,
                    num_gpus=gpus,
                    label_selector=in_region(region),
                    max_concurrency=_THREADS,
                    max_restarts=0,
                )
                .remote(*given)
            )
            self._actors.append(actor)
        return actor

    def _placed(self, what: str, actor: Handle, region: str) -> Introduction:
        began_s = time.monotonic()
        try:
            told: Introduction = self._calls.ask(what, actor.introduce.remote, _PLACE_S)
        except NodeFailedError as error:
            if time.monotonic() - began_s < _PLACE_S:
                raise
            raise ProgramError(
                f"{what} has no place in region {region} after {_PLACE_S:g} s",
                fix="Let the group ask for fewer cpus and gpus, or add machines there.",
            ) from error
        return told


def default_cluster() -> ClusterConfig:
    """The cluster that this process is connected to or runs in; else one made for the program."""
    if ray.is_initialized() or os.environ.get("RAY_ADDRESS"):
        return ExistingClusterConfig()
    return LocalClusterConfig()
