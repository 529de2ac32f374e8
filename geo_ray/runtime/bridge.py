"""A region's bridge to the averager, and the region's client of it; without Ray.

`Bridge` serves its region's requests and passes messages of other regions to the exchange transport
(`runtime.exchange`). `BridgeClient` is the region's end of a connection to it, `PlacedReplies` and
`AskedOnce` are the bridge's end, `ReconnectingBridgeClient` reconnects.

On one host an unencoded update stays in shared memory while its answer is awaited, and the answer
replaces it on a separate fetch; until then a checkpoint may need the update. A broken connection
does not imply a dead bridge: it is dialed again until another bridge is announced, and the status
reports for how long that has failed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import Tensor

from geo_ray.base.clock import SystemClock
from geo_ray.base.errors import (
    FrameError,
    GeoRayError,
    InvariantError,
    LinkDownError,
    TransportError,
)
from geo_ray.runtime.exchange.build import PathSetting, build_path
from geo_ray.runtime.exchange.differential import EndpointSite
from geo_ray.runtime.exchange.direct import BridgeFailure, UpdatePath, joined
from geo_ray.runtime.state_transfer import CopyTransfer
from geo_ray.training.config import UNREACHABLE_S
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.wire_format import (
    as_bytes,
    as_tensor,
    payload_bytes,
    read_refusal,
    read_reply,
    read_update,
    refusal_meta,
    reply_meta,
    update_meta,
)
from geo_ray.transport.emulation import build_links
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.lan import LanClient, LanConnection
from geo_ray.transport.security.tls import TlsSource
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.message import CONTROL, EndpointIdentity, Message
from geo_ray.transport.wire.sockets import Address

log = logging.getLogger(__name__)


class Bridge:
    """Sends updates of its region to the averager, which it may host.

    Args:
        endpoint: this region's endpoint; its owner closes it after the bridge.
        path: transport of all updates; the bridge closes it.
        failure: the bridge's failure; the averager's bridge reports it to all other regions.
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
        failure.listen(self._report_failure)
        self._placed, self._asked = PlacedReplies(), AskedOnce()

    def connect(self, peer: str, address: Address) -> None:
        """Dial another region's bridge, and redial after a failure."""
        self.endpoint.connect(peer, address)
        self.path.stage.on_address(peer, address)

    def expect(self, peer: str) -> None:
        """Prepare for a bridge that will dial; messages for it wait."""
        self.endpoint.expect(peer)

    def await_link(self, peer: str, timeout_s: float) -> None:
        """Wait until a link to another region is established, in either direction.

        Raises:
            LinkDownError: with the reason, such as a rejected certificate.
        """
        self.endpoint.wait_connected([peer], timeout_s)

    def status(self) -> dict[str, Any]:
        """Return links, the averager's leader, and the status of the path: plain values."""
        links = self.endpoint.stats()
        beside = self.path.stage.status(links)
        found = {"links": links, "leader": self.path.leader, "failure": self._failure.first}
        return {**found, **self.path.status(), **beside}

    def close(self) -> None:
        """Release threads that wait for an answer."""
        self._closed = True
        self.copies.close()
        self.path.close()
        self.path.stage.close()

    def handle(
        self, conn: LanConnection, meta: Meta, payload: memoryview | None
    ) -> tuple[Meta, memoryview | None]:
        """Handle one update of the own region; blocks until the averager's answer has arrived."""
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
        """Handle the end of a connection of the own region."""
        self._placed.forget(conn)

    def on_message(self, peer: str, message: Message) -> None:
        """Pass a message of another region to its handler."""
        route = self._routes.get(message.kind)
        if route is None:
            log.warning("region '%s' sent an unexpected '%s'", peer, message.kind)
            return
        try:
            route(peer, message)
        except Exception as error:  # the message counts as received and is not repeated
            if not self._closed:
                self._failure.note(error, f"'{message.kind}' of region '{peer}'")

    def _report_failure(self, error: GeoRayError) -> None:
        """Report the failure to all regions, if the averager is here."""
        if self.path.leader.region != self._region:
            return
        for peer in self.endpoint.stats():
            try:
                failure = Message("failed", refusal_meta(0, error), b"", "control", CONTROL)
                self.endpoint.send(peer, failure, 0.0)
            except GeoRayError as problem:  # the controller reports it to that region
                log.warning("region '%s' was not notified of the failure: %s", peer, problem)

    def _on_failed(self, peer: str, message: Message) -> None:
        if peer == self.path.leader.region:
            self._failure.note(read_refusal(message.meta)[1], "the averager")


def open_bridge(
    identity: EndpointIdentity,
    setting: PathSetting,
    host: str = "127.0.0.1",
    port: int = 0,
    certificate: TlsSource | None = None,
) -> Bridge:
    """Open a bridge.

    Args:
        identity: identity of its endpoint.
        setting: arguments of its exchange transport.
        host: where to listen.
        port: where to listen; 0 takes a free one.
        certificate: its own, if the run needs one.
    """
    experiment = setting.experiment
    models = build_links(experiment.links(), experiment.seed)
    links = {dst: model for (src, dst), model in models.items() if src == identity.region}
    run_start_s = SystemClock().now_s() - setting.event_buffer.now_s()
    built: Future[Bridge] = Future()  # early messages wait for it
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


_PLACED = "placed"  # number of payload bytes in shared memory


@dataclass(frozen=True, slots=True)
class BridgeAnswer:
    """An answer of the bridge.

    Attributes:
        reply: the answer; without its payload if that must be fetched.
        waits: whether the payload must be fetched.
    """

    reply: ReplyMessage
    waits: bool = False


class BridgeClient:
    """The region's end of a connection; for one thread.

    Args:
        client: the connection to the bridge.
    """

    def __init__(self, client: LanClient) -> None:
        self._client = client

    @property
    def is_lost(self) -> bool:
        """Whether the connection is broken."""
        return self._client.is_closed

    def close(self) -> None:
        """Close the connection, and free the shared memory once no tensor uses it."""
        self._client.close()

    def again(self, connect_timeout_s: float) -> BridgeClient:
        """Open another connection to the same bridge.

        Raises:
            TransportError: the bridge cannot be reached.
        """
        return BridgeClient(self._client.again(connect_timeout_s))

    def place(self, update: UpdateMessage) -> UpdateMessage:
        """Return the update with its payload in shared memory, if it fits.

        The previous payload there is overwritten, so it must not be in use.
        """
        count = update.payload_P.numel()
        payload_P = self.buffer(count) if update.coded is None else None
        if payload_P is None:
            return update
        if not self.is_shared(update.payload_P):
            payload_P.copy_(update.payload_P)
        return replace(update, payload_P=payload_P)

    def buffer(self, count: int) -> Tensor | None:
        """Return shared memory for a payload of that many fp32 values, if it fits."""
        buffer = self._client.shared
        if buffer is None or not 0 < 4 * count <= buffer.nbytes:
            return None
        return as_tensor(buffer[: 4 * count], count)

    def is_shared(self, tensor: Tensor) -> bool:
        """Return whether a tensor's content is in the shared memory."""
        buffer = self._client.shared
        return buffer is not None and as_tensor(buffer[:4]).data_ptr() == tensor.data_ptr()

    def request(
        self, meta: Mapping[str, object], timeout_s: float, payload: memoryview | None = None
    ) -> tuple[Meta, memoryview | None]:
        """See `LanClient.request`."""
        return self._client.request(dict(meta), payload, timeout_s=timeout_s)  # type: ignore[arg-type]

    def ask(self, update: UpdateMessage, timeout_s: float) -> BridgeAnswer:
        """Send an update, placed or not, to the averager; blocks until it has answered."""
        meta = {"op": "update", **update_meta(update)}
        if self.is_shared(update.payload_P):
            placed: Meta = {_PLACED: as_bytes(update.payload_P).nbytes}
            answer, found = self.request(meta | placed, timeout_s, _model_buffers(update))
        else:
            answer, found = self.request(meta, timeout_s, payload_bytes(update))
        return BridgeAnswer(read_reply(answer, found), _PLACED in answer)

    def fetch(self, answer: BridgeAnswer, timeout_s: float, *, in_place: bool) -> ReplyMessage:
        """Return the answer with its payload.

        Args:
            answer: the answer without the payload.
            timeout_s: longest wait.
            in_place: write the payload over the update, until the next update is placed.
        """
        if not answer.waits:
            return answer.reply
        meta, payload = self.request({"op": "fetch", "in_place": in_place}, timeout_s)
        buffer = self._client.shared
        if _PLACED in meta and buffer is not None:
            payload = buffer[: fields.count(meta, _PLACED)]
        return replace(answer.reply, payload_P=as_tensor(payload))


class AskedOnce:
    """The bridge's end: sends each update once, however often its region repeats it.

    After a broken connection a region repeats its open request. Sums, turns and block accounting
    must not see it twice, and the answer may have arrived already.
    books of blocks are not made for that; and the answer may have been here already.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: tuple[int, int] | None = None
        self._answer = Future[ReplyMessage]()

    def ask(
        self, update: UpdateMessage, exchange: Callable[[UpdateMessage], ReplyMessage]
    ) -> ReplyMessage:
        """Return the answer to an update.

        Args:
            update: the only open update of the region.
            exchange: sends it to the averager; its errors are not cached.
        """
        number = update.attempt, update.seq
        with self._lock:
            answer, is_known = self._answer, number == self._newest
            if not is_known:
                self._newest, self._answer = number, Future[ReplyMessage]()
                answer = self._answer
        if is_known:
            return answer.result()
        try:
            answer.set_result(exchange(update))
        except BaseException as error:
            with self._lock:
                if self._answer is answer:
                    self._newest = None
            answer.set_exception(error)
            raise
        return answer.result()


class PlacedReplies:
    """The bridge's end: reads placed updates, and stores answers until they are fetched."""

    def __init__(self) -> None:
        self._waiting: dict[LanConnection, ReplyMessage] = {}

    def read(self, conn: LanConnection, meta: Meta, payload: memoryview | None) -> UpdateMessage:
        """Return the update of a request.

        Raises:
            FrameError: the request is invalid.
        """
        if _PLACED in meta:
            size_bytes = fields.count(meta, _PLACED)
            if conn.shared is None or size_bytes > conn.shared.nbytes:
                raise FrameError(f"an update of {size_bytes} bytes is not in shared memory")
            placed_P = as_tensor(conn.shared[:size_bytes])
            return replace(read_update(meta, payload), payload_P=placed_P)
        return read_update(meta, payload)

    def tell(
        self, conn: LanConnection, meta: Meta, reply: ReplyMessage
    ) -> tuple[Meta, memoryview | None]:
        """Return the answer to a request; the payload of a placed update's answer is stored."""
        if _PLACED not in meta or reply.coded is not None or not reply.payload_P.numel():
            return reply_meta(reply), payload_bytes(reply)
        self._waiting[conn] = reply
        size_bytes = as_bytes(reply.payload_P).nbytes
        return {**reply_meta(reply), _PLACED: size_bytes}, _model_buffers(reply)

    def fetch(self, conn: LanConnection, meta: Meta) -> tuple[Meta, memoryview | None]:
        """Return the stored payload.

        Raises:
            FrameError: there is none.
        """
        reply = self._waiting.pop(conn, None)
        if reply is None:
            raise FrameError("there is no answer to fetch")
        payload, buffer = as_bytes(reply.payload_P), conn.shared
        if not fields.flag(meta, "in_place") or buffer is None or payload.nbytes > buffer.nbytes:
            return {}, payload
        as_tensor(buffer[: payload.nbytes]).copy_(reply.payload_P)
        return {_PLACED: payload.nbytes}, None

    def forget(self, conn: LanConnection) -> None:
        """Drop the stored answer of a closed connection."""
        self._waiting.pop(conn, None)


def _model_buffers(message: UpdateMessage | ReplyMessage) -> memoryview | None:
    return as_bytes(message.buffers_E) if message.buffers_E.numel() else None


_DIAL_S: Final = 1.0  # longest attempt, and least time between two
_STEADY_S: Final = 5.0  # a connection that breaks sooner counts as not repaired


class ReconnectingBridgeClient:
    """Provides the current bridge client; one thread requests it, any thread announces bridges.

    Args:
        region: this region.
        client: the connection to its first bridge.
    """

    def __init__(self, region: str, client: LanClient) -> None:
        self._region = region
        self._changed = threading.Condition()
        self._end: GeoRayError | None = None
        self._old: list[BridgeClient] = []
        self._dialled: BridgeClient | None = None  # opened here, so closed here
        self._lost_s: float | None = None
        self._dialled_s = -_STEADY_S
        self.client = BridgeClient(client)

    @property
    def away_s(self) -> float | None:
        """Seconds since the bridge was last reached; None: it is reachable, or was not tried."""
        lost_s = self._lost_s
        is_lost = lost_s is not None and self.client.is_lost
        return time.monotonic() - lost_s if lost_s is not None and is_lost else None

    def use(self, client: LanClient) -> None:
        """Switch to another bridge: the previous one is lost."""
        with self._changed:
            self._follow(BridgeClient(client))
            self._lost_s = None

    def drop_old(self) -> None:
        """Free the memory shared with earlier bridges, which is no longer needed.

        A bridge may have died while it was idle, so that its loss was not noticed.
        """
        with self._changed:
            old, self._old = self._old, []
        for each in old:
            each.close()

    def end(self, error: GeoRayError) -> None:
        """Make every current and later `await_next` raise ``error``."""
        with self._changed:
            self._end = self._end or error
            dialled, self._dialled = self._dialled, None
            self._changed.notify_all()
        if dialled is not None:
            dialled.close()

    def await_next(self) -> BridgeClient:
        """Wait for a client whose connection is not broken.

        Raises:
            LinkDownError: there was none within the time limit.
            GeoRayError: the error given to `end`.
        """
        began_s = time.monotonic()
        with self._changed:
            if self.client.is_lost and began_s - self._dialled_s > _STEADY_S:
                self._lost_s = began_s
        while True:
            with self._changed:
                lost = self.client
                if not lost.is_lost:
                    return lost
                if self._end is not None:
                    raise self._end
                if time.monotonic() - began_s > UNREACHABLE_S:
                    raise LinkDownError(
                        f"the bridge of region '{self._region}' is lost, and was not replaced "
                        f"within {UNREACHABLE_S:g} s"
                    )
                pause_s = self._dialled_s + _DIAL_S - time.monotonic()
                if pause_s > 0:
                    self._changed.wait(pause_s)
                    continue
            self._dial(lost)

    def _dial(self, lost: BridgeClient) -> None:
        """Dial the same bridge again, without blocking the announcement of another one."""
        fresh: BridgeClient | None = None
        with suppress(TransportError):  # it is dead, or its port has another owner
            fresh = lost.again(_DIAL_S)
        with self._changed:
            self._dialled_s = time.monotonic()
            if fresh is not None and self.client is lost and self._end is None:
                self._follow(fresh)
                self._dialled = fresh
                return
        if fresh is not None:
            fresh.close()

    def _follow(self, client: BridgeClient) -> None:
        self._old.append(self.client)
        self.client = client
        self._changed.notify_all()
