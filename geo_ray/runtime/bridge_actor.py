"""The bridge actor of a region, the only process that sends to other regions: its life cycle.

`runtime/bridge.py` handles updates; this actor handles the controller's calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

import ray

from geo_ray.base.errors import CheckpointCorruptError
from geo_ray.ray_cluster.keys import BridgeKeys, BridgeSecrets, Introduction
from geo_ray.runs.build import build_averager, use_cpus
from geo_ray.runtime.actor import PartActor
from geo_ray.runtime.bridge import Bridge, open_bridge
from geo_ray.runtime.exchange.build import PathSetting, averager_lives_in
from geo_ray.runtime.spec import RunSpec
from geo_ray.runtime.state_transfer import answer_of
from geo_ray.storage.manifest import AVERAGER_PART
from geo_ray.telemetry.event_buffer import EventBuffer
from geo_ray.training.averager import Averager
from geo_ray.training.command_log import Begun, ChangeInterval, ChangeMembers, resume_averager
from geo_ray.training.config import wait_limit_s
from geo_ray.training.membership import AveragerLeader, MemberChange
from geo_ray.transport.lan import LanServer
from geo_ray.transport.security.process_keys import SignedCertificate
from geo_ray.transport.wire.message import EndpointIdentity
from geo_ray.transport.wire.sockets import Address

_PIECE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class _LoadedBridge:
    """A bridge before it listens.

    Attributes:
        secrets: its private keys.
        averager: the averager, if this region hosts it at the start.
        saved: state of the averager's exchange from a checkpoint.
    """

    secrets: BridgeSecrets
    averager: Averager | None = None
    saved: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _ServingBridge:
    """A listening bridge.

    Attributes:
        bridge: the connection to other regions.
        lan: server for the own region.
        event_buffer: events of this process.
    """

    bridge: Bridge
    lan: LanServer
    event_buffer: EventBuffer

    def close(self) -> None:
        """Close all sockets."""
        self.bridge.close()
        self.lan.close()
        self.bridge.endpoint.close(1.0)


class BridgeActor(PartActor[_LoadedBridge, _ServingBridge]):
    """A region's bridge, with the averager if this region hosts it.

    Args:
        spec: the run.
        region: this region.
        is_successor: whether it replaces a dead bridge; the averager of that one has moved.
    """

    def __init__(self, spec: RunSpec, region: str, is_successor: bool = False) -> None:
        super().__init__(spec, region)
        self._is_successor = is_successor

    def introduce(self) -> Introduction:
        """Return the public halves of this process's keys; after `ready`."""
        return self._loaded.secrets.introduce()

    def ready(self) -> None:
        """Create the keys, and the averager if it is hosted here."""
        spec = self._spec
        use_cpus(spec.experiment, spec.region(self._region).cpus_per_server)
        secrets = BridgeSecrets(self._region, spec.experiment.transport)
        spec.check_run_directory(self._region)
        is_new = self._is_successor or spec.leader is not None
        is_here = not is_new and averager_lives_in(spec.experiment, self._region)
        if is_here or spec.experiment.averager.standby is not None:
            spec.places.prepare(None)  # the averager may move here later
        if not is_here:
            self._load(_LoadedBridge(secrets))
            return
        averager, saved = self._make(), {}
        if spec.resume is not None:
            tensors, meta = spec.resume.read(AVERAGER_PART)
            control = cast(dict[str, Any], meta["control"])
            resume_averager(averager, tensors, control)  # type: ignore[arg-type]
            saved = control.get("attachments", {})
        self._load(_LoadedBridge(secrets, averager, saved))

    def _make(self) -> Averager:
        spec = self._spec
        return build_averager(spec.experiment, spec.num_params, spec.data_rows, spec.layout)

    def open(
        self, origin_unix_s: float, keys: BridgeKeys, leader: AveragerLeader | None = None
    ) -> tuple[Address, Address]:
        """Listen, and start the run's clock.

        Args:
            origin_unix_s: wall-clock time of the clock's origin.
            keys: keys of this region's sockets.
            leader: the averager's leader; None: as configured.

        Returns:
            Addresses of this bridge, for other regions and for its own region.
        """
        spec, experiment, loaded = self._spec, self._spec.experiment, self._loaded
        host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        event_buffer = EventBuffer(self._region, origin_unix_s)
        setting = PathSetting(
            experiment,
            spec.num_params,
            loaded.averager,
            event_buffer,
            spec.places,
            wait_limit_s(experiment.train),
            loaded.saved,
            spec.run_dir,
            leader or spec.leader,
            self._make,
        )
        wan_key, lan_key = loaded.secrets.wan_key(keys), loaded.secrets.lan_key(keys)
        identity = EndpointIdentity(spec.run_id, self._region, spec.attempt, wan_key)
        certificate = loaded.secrets.certificate(keys.signed)
        bridge = open_bridge(identity, setting, host, certificate=certificate)
        handle, on_close = bridge.handle, bridge.on_close
        lan = LanServer(host, lan_key, handle, on_close=on_close, config=experiment.lan)
        self._serve(_ServingBridge(bridge, lan, event_buffer))
        return bridge.endpoint.advertised, lan.address

    def use_certificate(self, signed: SignedCertificate) -> None:
        """Use another certificate from now on: the answer to a request in `poll`."""
        renewed = self._loaded.secrets.renewed(signed)
        if renewed is not None:
            self._bridge.endpoint.use_certificate(renewed)

    @property
    def _bridge(self) -> Bridge:
        return self._serving.bridge

    def connect(self, peer: str, address: Address) -> None:
        """Dial another region's bridge, and redial after a failure."""
        self._bridge.connect(peer, address)

    def await_link(self, peer: str, timeout_s: float) -> None:
        """See `Bridge.await_link`."""
        self._bridge.await_link(peer, timeout_s)

    def expect(self, peer: str) -> None:
        """Prepare for a bridge that will dial."""
        self._bridge.expect(peer)

    def forget(self, peer: str) -> None:
        """Forget a region that is gone: it is not dialed, nor awaited at the end."""
        self._bridge.endpoint.forget(peer)

    def serve(self, servers: Mapping[str, Any]) -> None:
        """Serve the copy of this region's state to joining regions.

        Args:
            servers: the actor that has each file.
        """
        self._bridge.copies.serve(partial(_read_piece, servers))

    def fetch_piece(self, donor: str, file: str, offset: int, num_bytes: int) -> bytes:
        """Fetch a piece of another region's copy; blocks."""
        return self._bridge.copies.fetch(donor, file, offset, num_bytes)

    def attend(self, token: int) -> dict[str, Any]:
        """Attach a new run actor: report the state, and repeat what the last one received."""
        self._fence.check(token)
        self._serving.event_buffer.recall()
        return self._bridge.status()

    def poll(self, token: int = 0) -> dict[str, Any]:
        """Return state and new events to a run actor.

        Raises:
            LeaseLostError: a later run actor has attached.
        """
        self._fence.check(token)
        renewal = self._loaded.secrets.renewal()
        status = self._bridge.status() | {"certificate_request": renewal}
        return {"status": status, **self._serving.event_buffer.news()}

    def request_stop(self) -> None:
        """Let all regions finish."""
        self._bridge.path.request_stop()

    def request_checkpoint(self, checkpoint: int, halt: bool) -> bool:
        """Begin a checkpoint of all regions."""
        return self._bridge.path.request_checkpoint(checkpoint, halt=halt)

    def leader(self) -> AveragerLeader:
        """Return the averager's leader as known here."""
        return self._bridge.path.leader

    def report_dead(self, region: str, comes_back: bool = False) -> None:
        """Record that another region is dead, or that only its bridge is and will be replaced."""
        self._bridge.path.report_dead(region, comes_back=comes_back)

    def change_members(self, joins: Sequence[str], leaves: Sequence[str], donor: str) -> None:
        """Let regions join and leave at the next barrier."""
        change = MemberChange(tuple(joins), tuple(leaves), donor)
        self._bridge.path.submit_command(ChangeMembers(change))

    def set_interval(self, steps: int) -> None:
        """Set the number of steps between exchanges for all regions."""
        self._bridge.path.submit_command(ChangeInterval(steps))

    def begun(self, region: str) -> None:
        """Record that a region that has joined trains."""
        self._bridge.path.submit_command(Begun(region))

    def _release(self, served: _ServingBridge | None) -> None:
        if served is not None:
            served.close()


def _read_piece(servers: Mapping[str, Any], file: str, offset: int, num_bytes: int) -> bytes:
    if file not in servers:
        raise CheckpointCorruptError(f"{file} is not part of the state")
    piece: bytes = answer_of(servers[file].read_piece.remote(file, offset, num_bytes), _PIECE_S)
    return piece
