"""The bridge actor of a region: the only process that sends to other regions.

The primary shard hands it one update at a time and waits for the answer. How the update reaches
the averager is decided by the bridge's exchange transport.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

import ray

from geo_ray.base.clock import SystemClock
from geo_ray.base.errors import CheckpointCorruptError, GeoRayError, InvariantError
from geo_ray.ray_cluster.keys import BridgeKeys, BridgeSecrets, Introduction
from geo_ray.runs.build import build_averager, use_cpus
from geo_ray.runtime.actor import PartActor
from geo_ray.runtime.bridge_client import AskedOnce, PlacedReplies
from geo_ray.runtime.exchange.base import BridgeFailure, UpdatePath, joined
from geo_ray.runtime.exchange.build import PathSetting, averager_lives_in, build_path
from geo_ray.runtime.exchange.differential import EndpointSite
from geo_ray.runtime.exchange.messages import read_refusal, refusal_meta
from geo_ray.runtime.spec import RunSpec
from geo_ray.runtime.state_transfer import CopyTransfer, answer_of
from geo_ray.storage.manifest import AVERAGER_PART
from geo_ray.telemetry.event_buffer import EventBuffer
from geo_ray.training.averager import Averager
from geo_ray.training.command_log import Begun, ChangeMembers, ChangePace, resume_averager
from geo_ray.training.config import wait_limit_s
from geo_ray.training.membership import AveragerHome, MemberChange
from geo_ray.transport.emulation import build_links
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.lan import LanConnection, LanServer
from geo_ray.transport.security.process_keys import SignedCertificate
from geo_ray.transport.security.tls import TlsSource
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.message import CONTROL, EndpointIdentity, Message
from geo_ray.transport.wire.sockets import Address

log = logging.getLogger(__name__)


class Bridge:
    """Brings updates of its region to the averager, whose home it may be.

    Args:
        endpoint: this region's; it belongs to its owner, who closes it after the bridge.
        path: of all updates; the bridge closes it.
        failure: of this bridge; the averager's home tells all other regions.
    """

    def __init__(self, endpoint: Endpoint, path: UpdatePath, failure: BridgeFailure) -> None:
        self._region = endpoint.identity.region
        self.endpoint = endpoint
        self.path = path
        self._failure = failure
        self._closed = False
        self.copies = CopyTransfer(endpoint.send)
        own = {"failed": self._on_failed}
        self._routes = joined(path.routes(), path.stage.routes(), self.copies.routes(), own)
        failure.listen(self._tell)
        self._placed, self._asked = PlacedReplies(), AskedOnce()

    def connect(self, peer: str, address: Address) -> None:
        """Dial another region's bridge and keep the link up."""
        self.endpoint.connect(peer, address)
        self.path.stage.on_address(peer, address)

    def expect(self, peer: str) -> None:
        """Another region is going to dial: what is for it waits until it has."""
        self.endpoint.expect(peer)

    def await_link(self, peer: str, timeout_s: float) -> None:
        """Wait until another region is reached, or has reached this one.

        Raises:
            LinkDownError: with the reason why it is not, such as a certificate that is refused.
        """
        self.endpoint.wait_connected([peer], timeout_s)

    def status(self) -> dict[str, Any]:
        """Links, the averager's home, and what the path has to report: plain values."""
        links = self.endpoint.stats()
        beside = self.path.stage.status(links)
        found = {"links": links, "home": self.path.home, "failure": self._failure.first}
        return {**found, **self.path.status(), **beside}

    def close(self) -> None:
        """Release whoever waits for an answer."""
        self._closed = True
        self.copies.close()
        self.path.close()
        self.path.stage.close()

    def handle(
        self, conn: LanConnection, meta: Meta, payload: memoryview | None
    ) -> tuple[Meta, memoryview | None]:
        """One update of the own region; blocks until the averager's answer is here."""
        operation = fields.text(meta, "op")
        if operation == "recall":
            return self.path.stage.recall(), None
        if operation == "fetch":
            return self._placed.fetch(conn, meta)
        update = self._placed.read(conn, meta, payload)
        if update.region != self._region:
            raise InvariantError(f"bridge of '{self._region}' got an update of '{update.region}'")
        try:
            reply = self._asked.ask(update, self.path.exchange)
        except GeoRayError:
            raise
        except Exception as error:
            raise self._failure.note(error, f"update {update.seq} of its own region") from error
        return self._placed.tell(conn, meta, reply)

    def on_close(self, conn: LanConnection) -> None:
        """A connection of the own region has ended."""
        self._placed.forget(conn)

    def on_message(self, peer: str, message: Message) -> None:
        """Hand a message of another region to whoever takes that kind."""
        route = self._routes.get(message.kind)
        if route is None:
            log.warning("region '%s' sent an unexpected '%s'", peer, message.kind)
            return
        try:
            route(peer, message)
        except Exception as error:  # it counts as received, and will not come again
            if not self._closed:
                self._failure.note(error, f"'{message.kind}' of region '{peer}'")

    def _tell(self, error: GeoRayError) -> None:
        """At the averager's home: no other region will be answered any more."""
        if self.path.home.region != self._region:
            return
        for peer in self.endpoint.stats():
            try:
                told = Message("failed", refusal_meta(0, error), b"", "control", CONTROL)
                self.endpoint.send(peer, told, 0.0)
            except GeoRayError as problem:  # then it hears of it by the controller
                log.warning("region '%s' was not told of the failure: %s", peer, problem)

    def _on_failed(self, peer: str, message: Message) -> None:
        if peer == self.path.home.region:
            self._failure.note(read_refusal(message.meta)[1], "the averager")


def open_bridge(
    identity: EndpointIdentity,
    setting: PathSetting,
    host: str = "127.0.0.1",
    port: int = 0,
    certificate: TlsSource | None = None,
) -> Bridge:
    """A bridge that listens.

    Args:
        identity: of its endpoint.
        setting: what its updates' path is made for.
        host: where to listen.
        port: where to listen; 0 takes a free one.
        certificate: its own, if the run needs one.
    """
    experiment = setting.experiment
    models = build_links(experiment.links(), experiment.seed)
    links = {dst: model for (src, dst), model in models.items() if src == identity.region}
    run_start_s = SystemClock().now_s() - setting.event_buffer.now_s()
    built: Future[Bridge] = Future()  # a message that comes early waits for it
    endpoint = Endpoint(
        identity,
        lambda peer, message: built.result().on_message(peer, message),
        experiment.transport,
        links,
        run_start_s=run_start_s,
        certificate=certificate,
    )
    bound = endpoint.listen(host, port)
    failure = BridgeFailure(identity.region)
    path = build_path(setting, EndpointSite(endpoint, bound, run_start_s, links), failure)
    built.set_result(Bridge(endpoint, path, failure))
    return built.result()


_PIECE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class _LoadedBridge:
    """A bridge before it listens.

    Attributes:
        secrets: its keys.
        averager: the averager, if this region hosts it at the start.
        saved: what a checkpoint holds of the averager's exchange.
    """

    secrets: BridgeSecrets
    averager: Averager | None = None
    saved: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _ServingBridge:
    """A bridge that listens.

    Attributes:
        bridge: to other regions.
        lan: where the own region connects.
        event_buffer: what happens here.
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
        is_successor: a bridge before it has died; what that hosted lives elsewhere now.
    """

    def __init__(self, spec: RunSpec, region: str, is_successor: bool = False) -> None:
        super().__init__(spec, region)
        self._is_successor = is_successor

    def introduce(self) -> Introduction:
        """Return the public halves of this process's keys; after `ready`."""
        return self._loaded.secrets.introduce()

    def ready(self) -> None:
        """Make the keys, and the averager if it is hosted here."""
        spec = self._spec
        use_cpus(spec.experiment, spec.region(self._region).cpus_per_server)
        secrets = BridgeSecrets(self._region, spec.experiment.transport)
        spec.check_run_directory(self._region)
        is_new = self._is_successor or spec.home is not None
        is_here = not is_new and averager_lives_in(spec.experiment, self._region)
        if is_here or spec.experiment.averager.standby is not None:
            spec.places.prepare(None)  # it may come here later
        if not is_here:
            self._load(_LoadedBridge(secrets))
            return
        averager, saved = self._make(), {}
        if spec.resume is not None:
            tensors, meta = spec.resume.read(AVERAGER_PART)
            control = cast(dict[str, Any], meta["control"])
            resume_averager(averager, tensors, control)  # type: ignore[arg-type]
            saved = control.get("beside", {})
        self._load(_LoadedBridge(secrets, averager, saved))

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
            home or spec.home,
            self._make,
        )
        wan_key, lan_key = loaded.secrets.wan_key(keys), loaded.secrets.lan_key(keys)
        identity = EndpointIdentity(spec.run_id, self._region, spec.epoch, wan_key)
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
        self._serving.event_buffer.recall()
        return self._bridge.status()

    def poll(self, driver: int = 0) -> dict[str, Any]:
        """State and new events, for a driver.

        Raises:
            LeaseLostError: a later one has asked.
        """
        self._fence.check(driver)
        renewal = self._loaded.secrets.renewal()
        status = self._bridge.status() | {"certificate_request": renewal}
        return {"status": status, **self._serving.event_buffer.news()}

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

    def _release(self, served: _ServingBridge | None) -> None:
        if served is not None:
            served.close()


def _lent_piece(servers: Mapping[str, Any], file: str, offset: int, num_bytes: int) -> bytes:
    if file not in servers:
        raise CheckpointCorruptError(f"{file} is not lent here")
    piece: bytes = answer_of(servers[file].lent_piece.remote(file, offset, num_bytes), _PIECE_S)
    return piece
