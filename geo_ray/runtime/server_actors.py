"""The Ray actors of a region's parameter server: thin shells that build it and keep it running.

Ray carries only small control messages to them. Everything big goes over `geo_ray.transport`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import ray
import torch
from torch import Tensor

from geo_ray.base.errors import InvariantError
from geo_ray.base.memory import give_back_memory
from geo_ray.base.threads import Together
from geo_ray.data.tasks.load import load_task
from geo_ray.ray_cluster.keys import LAN_KEY, Introduction
from geo_ray.runs.build import ModelStart, build_server, build_shard, model_start, use_cpus
from geo_ray.runtime.checkpoint_upload import DeskEntry, DeskGrant
from geo_ray.runtime.primary_shard import PrimaryShard
from geo_ray.runtime.remote_shard import RemoteShard, ShardServer
from geo_ray.runtime.spec import DriverFence, RunSpec
from geo_ray.runtime.state_transfer import PIECES_AHEAD, CarriedParts, answer_of
from geo_ray.storage.manifest import PartInfo, shard_part_name
from geo_ray.storage.parts import read_part, write_part
from geo_ray.telemetry.event_buffer import EventBuffer
from geo_ray.training.checkpoint_parts import Handed, HeldShard, wire_tensors
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


def _load_shard(
    spec: RunSpec, region: str, index: int
) -> tuple[HeldShard, ModelStart, dict[str, Any]]:
    """A shard at the start of the run, or as the checkpoint has it; and what else its part holds.

    That is the plain values, and under ``"wire"`` the tensors of the exchange.
    """
    experiment = spec.experiment
    use_cpus(experiment, spec.region(region).cpus_per_server)
    spec.check_run_directory(region)
    task = load_task(experiment.task, spec.here)
    start = model_start(task, experiment.seed)
    who = f"shard {index} of region '{region}'"
    check_same_size(start.params_P.numel(), spec.num_params, who)
    check_constants(start.constants, spec.constants, who)
    place, groups = spec.region(region), start.groups
    shard = build_shard(experiment, place, index, start.params_P, groups, given=True)
    held = HeldShard(shard, region, index, spec.places)
    start = start.without_parameters()  # the shard has its slice
    give_back_memory()  # the module that these came from
    spec.places.prepare(region)
    if spec.resume is None:
        return held, start, {}
    tensors, meta = spec.resume.read(shard_part_name(region, index))
    shard.restore(tensors, meta["counters"], given=True)  # type: ignore[arg-type]
    return held, start, meta | {"wire": wire_tensors(tensors)}  # type: ignore[arg-type]


def _begin_as(spec: RunSpec, held: HeldShard, handed: Handed, bridge: Any) -> dict[str, Any]:
    """Let a shard begin as the copy that is handed over; what the primary shard's part holds.

    Args:
        spec: the run.
        held: the shard.
        handed: the copy.
        bridge: its own region's, which fetches it.
    """
    part = next(p for p in handed.parts if p.name == shard_part_name(handed.giver, held.index))

    def fetch(file: str, offset: int, num_bytes: int) -> Callable[[], bytes]:
        return partial(answer_of, bridge.fetch_piece.remote(handed.giver, file, offset, num_bytes))

    ahead = max(1, PIECES_AHEAD // len(handed.parts))
    tensors, meta = read_part(CarriedParts(f"region '{handed.giver}'", fetch, ahead), part)
    counters = cast(dict[str, float], meta["counters"])
    held.shard.restore(*shard_state((dict(tensors), counters), spec.experiment.strategy.traits))
    if "control" not in meta:
        return {}
    control = cast(dict[str, object], meta["control"])
    found, on_wire = region_state(control, wire_tensors(tensors), handed.rows)
    return {"control": found, "wire": on_wire}


class PrimaryActor:
    """The primary shard of a region, and with it the region's server.

    Args:
        spec: the run.
        region: this region.
    """

    def __init__(self, spec: RunSpec, region: str) -> None:
        self._spec = spec
        self._region = region
        self._primary: PrimaryShard | None = None
        self._final: dict[str, Tensor] | None = None
        self._clients: list[LanClient] = []
        self._receiver = SecretReceiver()
        self._entry = DeskEntry(spec, region)
        self._fence = DriverFence()

    def sight(self) -> bytes | None:
        """See `DeskEntry.sight`; before `ready`."""
        return self._entry.sight()

    def use_desk(self, grant: DeskGrant) -> None:
        """Send parts to the driver's machine, and read them there; before `ready`."""
        self._spec = self._entry.spec(grant)

    def introduce(self) -> Introduction:
        """Tell the public half of this process's key."""
        return Introduction(self._receiver.public)

    def ready(self) -> None:
        """Load the shard."""
        self._held, self._start, self._restored = _load_shard(self._spec, self._region, 0)

    def begin_as(self, handed: Handed, bridge: Any) -> None:
        """Begin as a copy of another region; before `start`."""
        self._restored = _begin_as(self._spec, self._held, handed, bridge)

    def lent_piece(self, file: str, offset: int, num_bytes: int) -> bytes:
        """A piece of this shard's part of the copy that is handed over."""
        return self._held.handed.piece(file, offset, num_bytes)

    def end_lending(self) -> None:
        """The newcomer has it, or will not."""
        self._held.handed.clear()

    def start(
        self, origin_unix_s: float, bridge: Address | None, others: list[Address], lan_key: bytes
    ) -> Address:
        """Connect to the region's other parts and begin to serve workers, on the run's clock.

        Args:
            origin_unix_s: when that began.
            bridge: where the region's bridge is; None if the region is alone.
            others: where its other shards are, in order.
            lan_key: key of the region's sockets, sealed for this process.

        Returns:
            Where workers connect.
        """
        spec, experiment = self._spec, self._spec.experiment
        self._key = self._receiver.open(lan_key, LAN_KEY)
        timeout_s = operation_s(experiment.train, spec.num_params)
        self._event_buffer = EventBuffer(self._region, origin_unix_s)
        remotes = [RemoteShard(self._dial(address), timeout_s) for address in others]
        self._together = Together(1 + len(others), "shards")
        server = build_server(
            experiment,
            spec.region(self._region),
            [self._held.shard, *remotes],
            spec.num_params,
            spec.epoch,
            self._together,
            self._start,
        )
        if self._restored:
            server.restore(self._restored["control"], self._restored["wire"])
            self._restored = {}  # it may hold a payload as large as the model
        # Memory that both see holds an update, then its answer.
        uplink = None if bridge is None else self._dial(bridge, shared_bytes=4 * spec.num_params)
        writers = [RemoteShard(self._dial(address), timeout_s) for address in others]
        self._primary = PrimaryShard(
            server,
            self._held,
            writers,
            uplink,
            self._event_buffer,
            wait_limit_s(experiment.train),
        )
        handle, on_close = self._primary.handle, self._primary.on_close
        self._lan = LanServer(_host(), self._key, handle, on_close=on_close, config=experiment.lan)
        return self._lan.address

    def pause(self, is_paused: bool) -> None:
        """Let workers begin no more steps, or again."""
        if self._primary is not None:
            self._primary.pause(is_paused)

    def use_bridge(self, bridge: Address) -> None:
        """Go on with a new bridge: the one before is lost; after `start`.

        Args:
            bridge: where it is.
        """
        if self._primary is not None:
            self._primary.use_bridge(self._dial(bridge, shared_bytes=4 * self._spec.num_params))

    def _dial(self, address: Address, *, shared_bytes: int = 0) -> LanClient:
        hello: Meta = {"peer": f"{self._region}/lead", "role": "lead"}
        config = self._spec.experiment.lan
        client = LanClient(address, self._key, hello, shared_bytes=shared_bytes, config=config)
        self._clients.append(client)
        return client

    def seal_key(self, worker: Introduction) -> bytes:
        """Return the key of the region's sockets, sealed for a worker; after `start`."""
        return seal_secret(self._key, worker.public, LAN_KEY)

    def attend(self, driver: int) -> dict[str, Any]:
        """See `BridgeActor.attend`."""
        self._fence.check(driver)
        if self._primary is None:
            return {"phase": "starting"}
        self._event_buffer.recall()
        return self._primary.status()

    def poll(self, driver: int = 0) -> dict[str, Any]:
        """State and new events, for a driver.

        Raises:
            LeaseLostError: a later one has asked.
        """
        self._fence.check(driver)
        if self._primary is None:
            return {"status": {"phase": "starting"}, "events": []}
        return {"status": self._primary.status(), **self._event_buffer.news()}

    def stop(self) -> None:
        """Finish after the present step; for a region that is alone."""
        if self._primary is not None:
            self._primary.stop()

    def lose_worker(self, worker: int, epoch: int) -> None:
        """An incarnation of a worker has ended, though its connection may not have told."""
        if self._primary is not None:
            self._primary.lose(worker, epoch)

    def dismiss_worker(self, worker: int) -> None:
        """Send a worker home between two steps."""
        if self._primary is not None:
            self._primary.dismiss(worker)

    def cut(self, checkpoint: int, halt: bool) -> None:
        """A checkpoint has begun: copy the region's state."""
        if self._primary is not None:
            self._primary.cut(checkpoint, halt=halt)

    def use_statistics(self, carried: bytes) -> None:
        """What the final model carries, with statistics over all regions."""
        if self._primary is not None:
            self._primary.use_statistics(carried)

    def write_model(self, whole: bool) -> tuple[PartInfo | None, str]:
        """Write the region's parameters as one vector, and what is carried; for the run's end.

        Args:
            whole: whether a file is wanted; else nothing is written.

        Returns:
            The file's fingerprint, and the digest of the parameters.

        Raises:
            InvariantError: if the actor was not started.
        """
        if self._primary is None:
            raise InvariantError(f"the parameter server of '{self._region}' was not started")
        if not whole:
            return None, digest(self._primary.server.model.whole_params())
        tensors = self._final_model()
        folder = self._spec.places.model_folder(self._spec.run_dir)
        part = write_part(folder, f"model-{self._region}", tensors, {})
        return part, digest(tensors["params"])

    def model_bytes(self) -> tuple[dict[str, int], str]:
        """Describe the final model for a driver that takes it piece by piece, without a store.

        Returns:
            Bytes of each vector, as for `write_model`; the digest of the parameters.

        Raises:
            InvariantError: if the actor was not started.
        """
        tensors = self._final_model()
        return {k: v.numel() * v.element_size() for k, v in tensors.items()}, digest(
            tensors["params"]
        )

    def model_piece(self, name: str, start: int, stop: int) -> bytes:
        """Give bytes of one vector of the final model; see `model_bytes`."""
        return self._final_model()[name].view(torch.uint8)[start:stop].numpy().tobytes()

    def _final_model(self) -> dict[str, Tensor]:
        if self._primary is None:
            raise InvariantError(f"the parameter server of '{self._region}' was not started")
        if self._final is None:
            server = self._primary.server
            self._final = {"params": server.model.whole_params()}
            if server.carry is not None:
                self._final["carried"] = server.carry.final_B
        return self._final

    def close(self) -> None:
        """Close all sockets."""
        for client in self._clients:
            client.close()
        if self._primary is not None:
            self._primary.close()
            self._lan.close()
            self._together.close()


class ShardServerActor:
    """One more shard of a region.

    Args:
        spec: the run.
        region: this region.
        index: number of the shard, 1 or more.
    """

    def __init__(self, spec: RunSpec, region: str, index: int) -> None:
        self._spec = spec
        self._region = region
        self._index = index
        self._receiver = SecretReceiver()
        self._entry = DeskEntry(spec, region)
        self._fence = DriverFence()

    def sight(self) -> bytes | None:
        """See `DeskEntry.sight`; before `ready`."""
        return self._entry.sight()

    def use_desk(self, grant: DeskGrant) -> None:
        """See `PrimaryActor.use_desk`."""
        self._spec = self._entry.spec(grant)

    def introduce(self) -> Introduction:
        """Tell the public half of this process's key."""
        return Introduction(self._receiver.public)

    def ready(self) -> None:
        """Load the shard."""
        self._held, *_ = _load_shard(self._spec, self._region, self._index)

    def begin_as(self, handed: Handed, bridge: Any) -> None:
        """Begin as a copy of another region; before that starts."""
        _begin_as(self._spec, self._held, handed, bridge)

    def lent_piece(self, file: str, offset: int, num_bytes: int) -> bytes:
        """See `PrimaryActor.lent_piece`."""
        return self._held.handed.piece(file, offset, num_bytes)

    def end_lending(self) -> None:
        """See `PrimaryActor.end_lending`."""
        self._held.handed.clear()

    def attend(self, driver: int) -> dict[str, Any]:
        """See `BridgeActor.attend`."""
        self._fence.check(driver)
        return {}

    def poll(self, driver: int = 0) -> dict[str, Any]:
        """A sign of life; the primary shard reports what happens.

        Raises:
            LeaseLostError: a later driver has asked.
        """
        self._fence.check(driver)
        return {"status": {}, "events": []}

    def open(self, lan_key: bytes) -> Address:
        """Listen.

        Args:
            lan_key: key of the region's sockets, sealed for this process.

        Returns:
            Where workers and the primary shard connect.
        """
        key, config = self._receiver.open(lan_key, LAN_KEY), self._spec.experiment.lan
        self._lan = LanServer(_host(), key, ShardServer(self._held).handle, config=config)
        return self._lan.address

    def close(self) -> None:
        """Close all sockets."""
        self._lan.close()
