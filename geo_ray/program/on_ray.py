"""A program as Ray actors, each on a node of its group's region."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import ray

from geo_ray.base.errors import NodeFailedError, ProgramError, ProgramRegionError, RegionLostError
from geo_ray.base.user_code import or_meant
from geo_ray.experiment.cluster import ClusterConfig, ExistingClusterConfig, LocalClusterConfig
from geo_ray.program.graph import Program
from geo_ray.program.node_process import HeldPart
from geo_ray.program.rpc import FOREVER_S
from geo_ray.ray_cluster import ray_internals
from geo_ray.ray_cluster.calls import Handle, RayThreads, collect, kill
from geo_ray.ray_cluster.connect import connect
from geo_ray.ray_cluster.keys import BridgeKeys, BridgeSecrets, Introduction, RunKeys
from geo_ray.ray_cluster.labels import REGION_LABEL, in_region
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.wire.sockets import Address

_THREADS: Final = 8  # concurrent calls of the launcher: one of them waits for the node's end
_BRIDGE_CPUS: Final = 0.01
_ASK_S: Final = 300.0
_PLACE_S: Final = 120.0


class ProgramActor:
    """Hosts an instance or a region's bridge; see `HeldPart`.

    Args:
        region: where it runs.
        order: see `HeldPart`.
    """

    def __init__(self, region: str, order: dict[str, Any]) -> None:
        self._order = order
        config = TransportConfig(tls="off") if "node" in order else TransportConfig()
        self._secrets = BridgeSecrets(region, config)

    def introduce(self) -> Introduction:
        """Return the public halves of its keys."""
        return self._secrets.introduce()

    def open(self, keys: BridgeKeys) -> tuple[Address, ...]:
        """Listen; returns the addresses of the part."""
        host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        lan_key = self._secrets.lan_key(keys)
        if "node" in self._order:
            self._held = HeldPart(self._order, "ray", host, lan_key)
        else:
            certificate = self._secrets.certificate(keys.signed)
            wan_key = self._secrets.wan_key(keys)
            self._held = HeldPart(self._order, "ray", host, lan_key, wan_key, certificate)
        return self._held.addresses

    def ask(self, what: str, given: list[Any]) -> Any:
        """See `HeldPart.ask`."""
        return self._held.ask(what, given)


class StartedActor:
    """A `NodeProcess` on Ray.

    Args:
        what: its description in messages.
        actor: its handle.
        threads: call Ray.
    """

    def __init__(self, what: str, actor: Handle, threads: RayThreads) -> None:
        self.what = what
        self.addresses: tuple[Address, ...] = ()
        self._actor, self._threads = actor, threads

    def ask(self, what: str, *given: Any, forever: bool = False) -> Any:
        """See `NodeProcess.ask`."""
        return self.call("ask", what, list(given), timeout_s=FOREVER_S if forever else _ASK_S)

    def call(self, method: str, *given: Any, timeout_s: float = _ASK_S) -> Any:
        """Call a method of the actor.

        Raises:
            NodeFailedError: the actor is gone or unresponsive, or the program ends.
            GeoRayError: the error that the method raised.
        """

        def work() -> Any:
            return collect({"": getattr(self._actor, method).remote(*given)}, timeout_s)[""]

        return _done(self.what, self._threads, work)

    def end(self) -> None:
        """See `NodeProcess.end`."""
        kill(self._actor)


def _done(what: str, threads: RayThreads, work: Callable[[], Any]) -> Any:
    """Return the result of Ray calls, which end before this process disconnects."""
    try:
        return threads.submit(what, work).result()
    except RegionLostError as error:
        raise NodeFailedError(f"{what}: {error.message}") from error


class RayActors:
    """A `Launcher` of actors.

    Args:
        program: the program.
        cluster: None: the one that this process is connected to or runs in, else a new one on
            this machine.
    """

    def __init__(self, program: Program, cluster: ClusterConfig | None = None) -> None:
        self._program = program
        self._cluster = cluster or default_cluster()
        self._groups = {each.name: each.group for each in program.instances}
        self._run_id = secrets.token_hex(8)
        self._keys = RunKeys(self._run_id, program.regions, TransportConfig())
        self._stack, self._threads = ExitStack(), RayThreads()
        self._actors: list[Handle] = []

    def begin(self) -> None:
        """See `Launcher.begin`.

        Raises:
            ProgramRegionError: no node of the cluster is in a group's region.
            ClusterError: there is no cluster.
        """
        program = self._program
        regions = program.regions
        cpus = dict.fromkeys(regions, 1.0)  # also for processes that nodes start
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

    def start(self, name: str, region: str, order: dict[str, Any]) -> StartedActor:
        """See `Launcher.start`."""
        what = f"the actor of {name!r}"
        actor = _done(what, self._threads, partial(self._made, name, region, order))
        started = StartedActor(what, actor, self._threads)
        introduction = self._placed(started, region)
        if "node" in order:
            keys = BridgeKeys(b"", self._keys.for_server(region, introduction), None)
        else:
            keys = self._keys.for_bridge(region, introduction)
        started.addresses = tuple(tuple(each) for each in started.call("open", keys))
        return started

    def end(self) -> None:
        """See `Launcher.end`."""
        try:
            self._kill_all()
            self._threads.close()
            self._kill_all()  # an actor whose creation was in progress
        finally:
            self._stack.close()

    def _kill_all(self) -> None:
        for actor in list(self._actors):
            kill(actor)

    def _made(self, name: str, region: str, order: dict[str, Any]) -> Handle:
        group = self._groups.get(name) if "node" in order else None
        cpus, gpus = (_BRIDGE_CPUS, 0.0) if group is None else (group.cpus, group.gpus)
        actor: Handle = (
            ray.remote(ProgramActor)
            .options(
                num_cpus=cpus,
                num_gpus=gpus,
                label_selector=in_region(region),
                max_concurrency=_THREADS,
                max_restarts=0,
            )
            .remote(region, {**order, "run_id": self._run_id})
        )
        self._actors.append(actor)
        return actor

    def _placed(self, started: StartedActor, region: str) -> Introduction:
        began_s = time.monotonic()
        try:
            introduction: Introduction = started.call("introduce", timeout_s=_PLACE_S)
        except NodeFailedError as error:
            if time.monotonic() - began_s < _PLACE_S:
                raise
            raise ProgramError(
                f"{started.what} was not placed in region {region} within {_PLACE_S:g} s",
                fix="Let the group ask for fewer cpus and gpus, or add machines there.",
            ) from error
        return introduction


def default_cluster() -> ClusterConfig:
    """Return the cluster that this process is connected to or runs in, else a new one."""
    if ray.is_initialized() or os.environ.get("RAY_ADDRESS"):
        return ExistingClusterConfig()
    return LocalClusterConfig()
