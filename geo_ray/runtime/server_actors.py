"""The Ray actors of a region's parameter server: thin shells that build it and keep it running.

Ray carries only small control messages; large data uses `geo_ray.transport`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import ray
import torch
from torch import Tensor

from geo_ray.base.memory import give_back_memory
from geo_ray.base.threads import ThreadPoolMap
from geo_ray.data.tasks.load import load_task
from geo_ray.ray_cluster.keys import LAN_KEY, Introduction
from geo_ray.runs.build import ModelStart, build_server, build_shard, model_start, use_cpus
from geo_ray.runtime.actor import PartActor
from geo_ray.runtime.primary_shard import PrimaryShard
from geo_ray.runtime.remote_shard import RemoteShard, ShardServer
from geo_ray.runtime.spec import RunSpec
from geo_ray.runtime.state_transfer import PIECES_AHEAD, StreamedParts, answer_of
from geo_ray.storage.manifest import PartInfo, shard_part_name
from geo_ray.storage.parts import read_part, write_part
from geo_ray.telemetry.event_buffer import EventBuffer
from geo_ray.training.checkpoint_parts import HeldShard, TransferredState, wire_tensors
from geo_ray.training.config import operation_s, wait_limit_s
from geo_ray.training.membership import region_state, shard_state
from geo_ray.training.parameters import digest
from geo_ray.training.state_guard import check_constants, check_same_size
from geo_ray.transport.lan import LanClient, LanServer
from geo_ray.transport.security.process_keys import SecretReceiver, seal_secret
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.sockets import Address


def _host() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class _LoadedShard:
    """A shard at the start of the run, or from a checkpoint or another region.

    Attributes:
        held: the shard.
        start: the initial model, without the parameters of the shard.
        restored: the rest of the shard's part of a checkpoint: the plain values, and under
            ``"wire"`` the tensors of the exchange.
    """

    held: HeldShard
    start: ModelStart
    restored: dict[str, Any]


def _load_shard(spec: RunSpec, region: str, index: int) -> _LoadedShard:
    experiment = spec.experiment
    use_cpus(experiment, spec.region(region).cpus_per_server)
    spec.check_run_directory(region)
    task = load_task(experiment.task, spec.here)
    start = model_start(task, experiment.seed)
    who = f"shard {index} of region '{region}'"
    check_same_size(start.params_P.numel(), spec.num_params, who)
    check_constants(start.constants, spec.constants, who)
    shard = build_shard(experiment, spec.region(region), index, start, given=True)
    held = HeldShard(shard, region, index, spec.places)
    start = start.without_parameters()  # the shard has its slice
    give_back_memory()  # of the module
    spec.places.prepare(region)
    if spec.resume is None:
        return _LoadedShard(held, start, {})
    tensors, meta = spec.resume.read(shard_part_name(region, index))
    shard.restore(tensors, meta["counters"], given=True)  # type: ignore[arg-type]
    restored = meta | {"wire": wire_tensors(tensors)}  # type: ignore[arg-type]
    return _LoadedShard(held, start, restored)


def _begin_as(
    spec: RunSpec, held: HeldShard, transferred: TransferredState, bridge: Any
) -> dict[str, Any]:
    """Initialize a shard from a transferred copy; return the contents of the primary's part.

    Args:
        spec: the run.
        held: the shard.
        transferred: the copy.
        bridge: the bridge of its region, which fetches it.
    """
    part = next(
        p for p in transferred.parts if p.name == shard_part_name(transferred.donor, held.index)
    )

    def fetch(file: str, offset: int, num_bytes: int) -> Callable[[], bytes]:
        return partial(
            answer_of, bridge.fetch_piece.remote(transferred.donor, file, offset, num_bytes)
        )

    ahead = max(1, PIECES_AHEAD // len(transferred.parts))
    tensors, meta = read_part(StreamedParts(f"region '{transferred.donor}'", fetch, ahead), part)
    counters = cast(dict[str, float], meta["counters"])
    held.shard.restore(*shard_state((dict(tensors), counters), spec.experiment.strategy.traits))
    if "control" not in meta:
        return {}
    control = cast(dict[str, object], meta["control"])
    found, on_wire = region_state(control, wire_tensors(tensors), transferred.rows)
    return {"control": found, "wire": on_wire}


@dataclass(slots=True)
class _ServingPrimary:
    """A serving primary shard.

    Attributes:
        key: key of the region's sockets.
        event_buffer: events of the region.
        shard: executes the effects of the region's server.
        lan: where workers connect.
        pool: accesses all shards of the region in parallel.
        final: vectors of the final model, once requested.
    """

    key: bytes
    event_buffer: EventBuffer
    shard: PrimaryShard
    lan: LanServer
    pool: ThreadPoolMap
    final: dict[str, Tensor] = field(default_factory=dict)

    def final_model(self) -> dict[str, Tensor]:
        """Return the final parameters, and the model's buffers if it has any."""
        if not self.final:
            server = self.shard.server
            self.final = {"params": server.model.whole_params()}
            if server.model_buffers is not None:
                self.final["model_buffers"] = server.model_buffers.final_B
        return self.final

    def close(self) -> None:
        """Close its sockets."""
        self.shard.close()
        self.lan.close()
        self.pool.close()


S = TypeVar("S")


class _ServerActor(PartActor[_LoadedShard, S]):
    """An actor that holds a shard of a region.

    Args:
        spec: the run.
        region: this region.
        index: number of the shard; 0 is the primary one.
    """

    def __init__(self, spec: RunSpec, region: str, index: int) -> None:
        super().__init__(spec, region)
        self._index = index
        self._receiver = SecretReceiver()

    def introduce(self) -> Introduction:
        """Return the public half of this process's key."""
        return Introduction(self._receiver.public)

    def ready(self) -> None:
        """Load the shard."""
        self._load(_load_shard(self._spec, self._region, self._index))

    def begin_as(self, transferred: TransferredState, bridge: Any) -> None:
        """Continue from a copy of another region; before the region's primary shard starts."""
        loaded = self._loaded
        loaded.restored = _begin_as(self._spec, loaded.held, transferred, bridge)

    def read_piece(self, file: str, offset: int, num_bytes: int) -> bytes:
        """Return a piece of this shard's part of the copy for joining regions."""
        return self._loaded.held.transferred.piece(file, offset, num_bytes)

    def end_transfer(self) -> None:
        """Drop the copy for joining regions."""
        self._loaded.held.transferred.clear()


class PrimaryActor(_ServerActor[_ServingPrimary]):
    """The primary shard of a region, and with it the region's server.

    Args:
        spec: the run.
        region: this region.
    """

    def __init__(self, spec: RunSpec, region: str) -> None:
        super().__init__(spec, region, 0)
        self._clients: list[LanClient] = []

    def start(
        self, origin_unix_s: float, bridge: Address | None, others: list[Address], lan_key: bytes
    ) -> Address:
        """Connect to the region's other parts and serve workers, on the run's clock.

        Args:
            origin_unix_s: wall-clock time of the clock's origin.
            bridge: address of the region's bridge; None if there is one region only.
            others: addresses of its other shards, in order.
            lan_key: key of the region's sockets, sealed for this process.

        Returns:
            Where workers connect.
        """
        spec, experiment, loaded = self._spec, self._spec.experiment, self._loaded
        key = self._receiver.open(lan_key, LAN_KEY)
        timeout_s = operation_s(experiment.train, spec.num_params)
        event_buffer = EventBuffer(self._region, origin_unix_s)
        remotes = [RemoteShard(self._dial(key, address), timeout_s) for address in others]
        pool = ThreadPoolMap(1 + len(others), "shards")
        server = build_server(
            experiment,
            spec.region(self._region),
            [loaded.held.shard, *remotes],
            spec.num_params,
            spec.attempt,
            pool,
            loaded.start,
        )
        if loaded.restored:
            server.restore(loaded.restored["control"], loaded.restored["wire"])
            loaded.restored = {}  # it may contain a payload as large as the model
        bridge_client = None if bridge is None else self._dial_bridge(key, bridge)
        writers = [RemoteShard(self._dial(key, address), timeout_s) for address in others]
        limit_s = wait_limit_s(experiment.train)
        shard = PrimaryShard(server, loaded.held, writers, bridge_client, event_buffer, limit_s)
        lan = LanServer(_host(), key, shard.handle, on_close=shard.on_close, config=experiment.lan)
        self._serve(_ServingPrimary(key, event_buffer, shard, lan, pool))
        return lan.address

    def pause(self, is_paused: bool) -> None:
        """Stop workers from beginning steps, or allow it again."""
        self._serving.shard.pause(is_paused)

    def use_bridge(self, bridge: Address) -> None:
        """Continue with a new bridge: the previous one is lost.

        Args:
            bridge: its address.
        """
        serving = self._serving
        serving.shard.use_bridge(self._dial_bridge(serving.key, bridge))

    def _dial_bridge(self, key: bytes, bridge: Address) -> LanClient:
        # Shared memory, for an update and then its answer.
        return self._dial(key, bridge, shared_bytes=4 * self._spec.num_params)

    def _dial(self, key: bytes, address: Address, *, shared_bytes: int = 0) -> LanClient:
        hello: Meta = {"peer": f"{self._region}/primary", "role": "primary"}
        config = self._spec.experiment.lan
        client = LanClient(address, key, hello, shared_bytes=shared_bytes, config=config)
        self._clients.append(client)
        return client

    def seal_key(self, worker: Introduction) -> bytes:
        """Return the key of the region's sockets, sealed for a worker."""
        return seal_secret(self._serving.key, worker.public, LAN_KEY)

    def attend(self, token: int) -> dict[str, Any]:
        """See `BridgeActor.attend`."""
        self._fence.check(token)
        if self._is_starting:
            return {"phase": "starting"}
        self._serving.event_buffer.recall()
        return self._serving.shard.status()

    def poll(self, token: int = 0) -> dict[str, Any]:
        """Return state and new events to a run actor.

        Raises:
            LeaseLostError: a later run actor has attached.
        """
        self._fence.check(token)
        if self._is_starting:
            return {"status": {"phase": "starting"}, "events": []}
        return {"status": self._serving.shard.status(), **self._serving.event_buffer.news()}

    def stop(self) -> None:
        """Finish after the current step; for a single region."""
        self._serving.shard.stop()

    def lose_worker(self, worker: int, attempt: int) -> None:
        """Forget a worker's attempt that has ended; its connection may still be open."""
        self._serving.shard.lose(worker, attempt)

    def drain_worker(self, worker: int) -> None:
        """Release a worker between two steps."""
        self._serving.shard.drain(worker)

    def snapshot(self, checkpoint: int, halt: bool) -> None:
        """Copy the region's state for a checkpoint that has begun."""
        self._serving.shard.snapshot(checkpoint, halt=halt)

    def use_statistics(self, model_buffers: bytes) -> None:
        """Set the final model buffers, with statistics over all regions."""
        self._serving.shard.use_statistics(model_buffers)

    def write_model(self, whole: bool) -> tuple[PartInfo | None, str]:
        """Write the region's parameters as one vector, and the model buffers, at the run's end.

        Args:
            whole: whether to write a file.

        Returns:
            The file's fingerprint, and the digest of the parameters.

        Raises:
            InvariantError: if the actor does not serve.
        """
        if not whole:
            return None, digest(self._serving.shard.server.model.whole_params())
        tensors = self._serving.final_model()
        folder = self._spec.places.model_folder(self._spec.run_dir)
        part = write_part(folder, f"model-{self._region}", tensors, {})
        return part, digest(tensors["params"])

    def model_bytes(self) -> tuple[dict[str, int], str]:
        """Describe the final model for a run actor that fetches it in pieces, without a store.

        Returns:
            Bytes of each vector, as for `write_model`; the digest of the parameters.

        Raises:
            InvariantError: if the actor does not serve.
        """
        tensors = self._serving.final_model()
        return {k: v.numel() * v.element_size() for k, v in tensors.items()}, digest(
            tensors["params"]
        )

    def model_piece(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes of one vector of the final model; see `model_bytes`."""
        whole = self._serving.final_model()[name]
        return whole.view(torch.uint8)[start:stop].numpy().tobytes()

    def _release(self, served: _ServingPrimary | None) -> None:
        for client in self._clients:  # includes those of a failed start
            client.close()
        if served is not None:
            served.close()


class ShardServerActor(_ServerActor[LanServer]):
    """A secondary shard of a region."""

    def attend(self, token: int) -> dict[str, Any]:
        """See `BridgeActor.attend`."""
        self._fence.check(token)
        return {}

    def poll(self, token: int = 0) -> dict[str, Any]:
        """Return a heartbeat; the primary shard reports the events.

        Raises:
            LeaseLostError: a later run actor has attached.
        """
        self._fence.check(token)
        return {"status": {}, "events": []}

    def open(self, lan_key: bytes) -> Address:
        """Listen.

        Args:
            lan_key: key of the region's sockets, sealed for this process.

        Returns:
            Where workers and the primary shard connect.
        """
        key, config = self._receiver.open(lan_key, LAN_KEY), self._spec.experiment.lan
        lan = LanServer(_host(), key, ShardServer(self._loaded.held).handle, config=config)
        self._serve(lan)
        return lan.address

    def _release(self, served: LanServer | None) -> None:
        if served is not None:
            served.close()
