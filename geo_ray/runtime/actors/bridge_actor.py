"""The Ray actor of a region's bridge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

import ray

from geo_ray.checkpoint.names import AVERAGER_PART
from geo_ray.errors import CheckpointCorruptError
from geo_ray.job.build import build_averager, use_cpus
from geo_ray.runtime.actors.bridge import open_bridge
from geo_ray.runtime.actors.copy_transfer import answer_of
from geo_ray.runtime.actors.deadlines import wait_limit_s
from geo_ray.runtime.actors.driver_fence import DriverFence
from geo_ray.runtime.actors.event_buffer import EventBuffer
from geo_ray.runtime.actors.introduction import BridgeKeys, BridgeSecrets, Introduction
from geo_ray.runtime.actors.spec import RunSpec
from geo_ray.runtime.desk.carried_folder import DeskEntry
from geo_ray.runtime.desk.part_desk import DeskGrant
from geo_ray.runtime.paths.build import PathSetting, averager_lives_in
from geo_ray.training.averager.averager import Averager
from geo_ray.training.averager.home import AveragerHome
from geo_ray.training.averager.log import Begun, ChangeMembers, ChangePace
from geo_ray.training.averager.resume import resume
from geo_ray.training.membership.border import MemberChange
from geo_ray.transport.lan.server import LanServer
from geo_ray.transport.security.own_certificate import SignedCertificate
from geo_ray.transport.wire.message import EndpointIdentity
from geo_ray.transport.wire.sockets import Address

_PIECE_S: Final = 30.0


class BridgeActor:
    """A region's bridge, with the averager if this region hosts it.

    Args:
        spec: the run.
        region: this region.
        is_successor: a bridge before it has died; what that hosted lives elsewhere now.
    """

    def __init__(self, spec: RunSpec, region: str, is_successor: bool = False) -> None:
        self._spec = spec
        self._region = region
        self._is_successor = is_successor
        self._averager: Averager | None = None
        self._saved: Mapping[str, Any] = {}
        self._entry = DeskEntry(spec, region)
        self._fence = DriverFence()

    def sight(self) -> bytes | None:
        """See `DeskEntry.sight`; before `ready`."""
        return self._entry.sight()

    def use_desk(self, grant: DeskGrant) -> None:
        """Send the averager's part to the driver's machine, and read it there; before `ready`."""
        self._spec = self._entry.spec(grant)

    def introduce(self) -> Introduction:
        """Tell the public halves of this process's keys; after `ready`."""
        return self._secrets.introduce()

    def ready(self) -> None:
        """Build what lives here; not in the constructor, whose errors Ray turns into text."""
        spec = self._spec
        use_cpus(spec.experiment, spec.region(self._region).cpus_per_server)
        self._secrets = BridgeSecrets(self._region, spec.experiment.transport)
        spec.check_run_directory(self._region)
        is_new = self._is_successor or spec.home is not None
        is_here = not is_new and averager_lives_in(spec.experiment, self._region)
        if is_here or spec.experiment.averager.standby is not None:
            spec.places.prepare(None)  # it may come here later
        if not is_here:
            return
        self._averager = self._make()
        if spec.resume is not None:
            tensors, meta = spec.resume.read(AVERAGER_PART)
            control = cast(dict[str, Any], meta["control"])
            resume(self._averager, tensors, control)  # type: ignore[arg-type]
            self._saved = control.get("beside", {})

    def _make(self) -> Averager:
        spec = self._spec
        return build_averager(spec.experiment, spec.num_params, spec.data_rows, spec.layout)

    def open(
        self, origin_unix_s: float, keys: BridgeKeys, home: AveragerHome | None = None
    ) -> tuple[Address, Address]:
        """Listen, on the run's clock.

        Args:
            origin_unix_s: when that began.
            keys: what this region was given for its sockets.
            home: where the averager lives; None: where the configuration says.

        Returns:
            Where other regions, and where the own region, reach this bridge.
        """
        spec, experiment = self._spec, self._spec.experiment
        host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self._event_buffer = EventBuffer(self._region, origin_unix_s)
        setting = PathSetting(
            experiment,
            spec.num_params,
            self._averager,
            self._event_buffer,
            spec.places,
            wait_limit_s(experiment.train),
            self._saved,
            spec.run_dir,
            home or spec.home,
            self._make,
        )
        wan_key, lan_key = self._secrets.wan_key(keys), self._secrets.lan_key(keys)
        identity = EndpointIdentity(spec.run_id, self._region, spec.epoch, wan_key)
        certificate = self._secrets.certificate(keys.signed)
        self._bridge = open_bridge(identity, setting, host, certificate=certificate)
        handle, on_close = self._bridge.handle, self._bridge.on_close
        self._lan = LanServer(host, lan_key, handle, on_close=on_close, config=experiment.lan)
        return self._bridge.endpoint.advertised, self._lan.address

    def use_certificate(self, signed: SignedCertificate) -> None:
        """Use another certificate from now on: the answer to a request in `poll`."""
        renewed = self._secrets.renewed(signed)
        if renewed is not None:
            self._bridge.endpoint.use_certificate(renewed)

    def connect(self, peer: str, address: Address) -> None:
        """Dial another region's bridge and keep the link up."""
        self._bridge.connect(peer, address)

    def await_link(self, peer: str, timeout_s: float) -> None:
        """See `Bridge.await_link`."""
        self._bridge.await_link(peer, timeout_s)

    def expect(self, peer: str) -> None:
        """Another region is going to dial."""
        self._bridge.expect(peer)

    def forget(self, peer: str) -> None:
        """Another region is gone: nobody dials it, nor waits for it at the end."""
        self._bridge.endpoint.forget(peer)

    def lend(self, servers: Mapping[str, Any]) -> None:
        """Give the copy of this region's state to the newcomer that asks for it.

        Args:
            servers: the actor that has it, by file.
        """
        self._bridge.copies.lend(partial(_lent_piece, servers))

    def fetch_piece(self, giver: str, file: str, offset: int, num_bytes: int) -> bytes:
        """A piece of the copy that another region lends; blocks."""
        return self._bridge.copies.fetch(giver, file, offset, num_bytes)

    def attend(self, driver: int) -> dict[str, Any]:
        """Another driver comes: tell it how things stand, and then what the last one heard, too."""
        self._fence.check(driver)
        self._event_buffer.recall()
        return self._bridge.status()

    def poll(self, driver: int = 0) -> dict[str, Any]:
        """State and new events, for a driver.

        Raises:
            LeaseLostError: a later one has asked.
        """
        self._fence.check(driver)
        status = self._bridge.status() | {"certificate_request": self._secrets.renewal()}
        return {"status": status, **self._event_buffer.news()}

    def request_stop(self) -> None:
        """Let all regions finish."""
        self._bridge.path.request_stop()

    def request_checkpoint(self, checkpoint: int, halt: bool) -> bool:
        """Begin a checkpoint of all regions."""
        return self._bridge.path.request_checkpoint(checkpoint, halt=halt)

    def home(self) -> AveragerHome:
        """Where the averager lives, as far as is known here."""
        return self._bridge.path.home

    def report_dead(self, region: str, comes_back: bool = False) -> None:
        """Another region is dead, or only its bridge, and there will be another one."""
        self._bridge.path.report_dead(region, comes_back=comes_back)

    def change_members(self, joins: Sequence[str], leaves: Sequence[str], giver: str) -> None:
        """Let regions join and leave at the next border."""
        change = MemberChange(tuple(joins), tuple(leaves), giver)
        self._bridge.path.tell_members(ChangeMembers(change))

    def pace(self, steps: int) -> None:
        """Ask regions to exchange after so many steps from now on."""
        self._bridge.path.tell_members(ChangePace(steps))

    def begun(self, region: str) -> None:
        """A region that has joined is there."""
        self._bridge.path.tell_members(Begun(region))

    def close(self) -> None:
        """Close all sockets."""
        self._bridge.close()
        self._lan.close()
        self._bridge.endpoint.close(1.0)


def _lent_piece(servers: Mapping[str, Any], file: str, offset: int, num_bytes: int) -> bytes:
    if file not in servers:
        raise CheckpointCorruptError(f"{file} is not lent here")
    piece: bytes = answer_of(servers[file].lent_piece.remote(file, offset, num_bytes), _PIECE_S)
    return piece
