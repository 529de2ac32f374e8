"""A region's bridge over sockets: the only process that sends to other regions.

The primary shard of the region's parameter server hands it one update at a time and waits for the
answer. How the update gets to the averager is the business of the bridge's `UpdatePath`.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any

from geo_ray.clock import SystemClock
from geo_ray.errors import GeoRayError, InvariantError
from geo_ray.runtime.actors.copy_transfer import CopyTransfer
from geo_ray.runtime.actors.uplink import AskedOnce, PlacedReplies
from geo_ray.runtime.messages.exchange import read_refusal, refusal_meta
from geo_ray.runtime.paths.base import UpdatePath, joined
from geo_ray.runtime.paths.build import PathSetting, build_path
from geo_ray.runtime.paths.differential import EndpointSite
from geo_ray.runtime.paths.failure import BridgeFailure
from geo_ray.transport.emulation.link_model import build_links
from geo_ray.transport.endpoint.endpoint import Endpoint
from geo_ray.transport.lan.server import LanConnection
from geo_ray.transport.security.tls import TlsSource
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.message import CONTROL, EndpointIdentity, Message
from geo_ray.transport.wire.meta import Meta
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
        self._routes = joined(path.routes(), path.stage.routes, self.copies.routes(), own)
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
