"""A region's bridge to the averager, and the region's client of it; without Ray.

`Bridge` serves its region's requests and hands messages of other regions to the exchange transport
(`runtime.exchange`). `BridgeClient` is the region's end of a connection to it, `PlacedReplies` and
`AskedOnce` are the bridge's end, `ReconnectingBridgeClient` reconnects.

On one host an uncoded update lies in shared memory while its answer is awaited, and the answer
replaces it on a separate fetch; until then a checkpoint may need the update. A broken connection
says nothing about the bridge: it is dialled again until another bridge is announced, and the
controller learns for how long that has failed.
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
from geo_ray.runtime.exchange.messages import (
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
from geo_ray.runtime.state_transfer import CopyTransfer
from geo_ray.training.config import UNREACHABLE_S
from geo_ray.training.messages import ReplyMessage, UpdateMessage
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
        found = {"links": links, "leader": self.path.leader, "failure": self._failure.first}
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
        if self.path.leader.region != self._region:
            return
        for peer in self.endpoint.stats():
            try:
                failure = Message("failed", refusal_meta(0, error), b"", "control", CONTROL)
                self.endpoint.send(peer, failure, 0.0)
            except GeoRayError as problem:  # then it hears of it by the controller
                log.warning("region '%s' was not told of the failure: %s", peer, problem)

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


_PLACED = "placed"  # bytes of a payload in the shared memory


@dataclass(frozen=True, slots=True)
class BridgeAnswer:
    """An answer as the bridge has told it.

    Attributes:
        reply: the answer; without its payload, if that waits.
        waits: whether it is to be fetched.
    """

    reply: ReplyMessage
    waits: bool = False


class BridgeClient:
    """The region's end; for one thread.

    Args:
        client: the connection to the bridge.
    """

    def __init__(self, client: LanClient) -> None:
        self._client = client

    @property
    def is_lost(self) -> bool:
        """Whether its bridge is gone, and another one is needed."""
        return self._client.is_closed

    def close(self) -> None:
        """End the connection, and free the shared memory once no tensor lies there."""
        self._client.close()

    def again(self, connect_timeout_s: float) -> BridgeClient:
        """Another one to the same bridge, whose connection was lost.

        Raises:
            TransportError: the bridge is not there.
        """
        return BridgeClient(self._client.again(connect_timeout_s))

    def place(self, update: UpdateMessage) -> UpdateMessage:
        """The same update with its payload in the shared memory, if it has room there.

        What lay there before is overwritten: it must not be in use any more.
        """
        count = update.payload_P.numel()
        payload_P = self.buffer(count) if update.coded is None else None
        if payload_P is None:
            return update
        if not self.lies_there(update.payload_P):
            payload_P.copy_(update.payload_P)
        return replace(update, payload_P=payload_P)

    def buffer(self, count: int) -> Tensor | None:
        """The place of a payload of so many fp32, if there is room for it."""
        buffer = self._client.shared
        if buffer is None or not 0 < 4 * count <= buffer.nbytes:
            return None
        return as_tensor(buffer[: 4 * count], count)

    def lies_there(self, tensor: Tensor) -> bool:
        """Whether a tensor's content is in the shared memory."""
        buffer = self._client.shared
        return buffer is not None and as_tensor(buffer[:4]).data_ptr() == tensor.data_ptr()

    def request(
        self, meta: Mapping[str, object], timeout_s: float, payload: memoryview | None = None
    ) -> tuple[Meta, memoryview | None]:
        """See `LanClient.request`."""
        return self._client.request(dict(meta), payload, timeout_s=timeout_s)  # type: ignore[arg-type]

    def ask(self, update: UpdateMessage, timeout_s: float) -> BridgeAnswer:
        """Bring an update, placed or not, to the averager; blocks until that has answered."""
        meta = {"op": "update", **update_meta(update)}
        if self.lies_there(update.payload_P):
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
    """The bridge's end: an update is on its way once, however often its region says it.

    A region whose connection breaks says its open request again on the next one. Sums, turns and
    books of blocks are not made for that; and the answer may have been here already.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: tuple[int, int] | None = None
        self._answer = Future[ReplyMessage]()

    def ask(
        self, update: UpdateMessage, exchange: Callable[[UpdateMessage], ReplyMessage]
    ) -> ReplyMessage:
        """The answer to an update.

        Args:
            update: the region has no other one open.
            exchange: brings it to the averager; what it raises is not remembered.
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
    """The bridge's end: takes placed updates, keeps answers until they are fetched."""

    def __init__(self) -> None:
        self._waiting: dict[LanConnection, ReplyMessage] = {}

    def read(self, conn: LanConnection, meta: Meta, payload: memoryview | None) -> UpdateMessage:
        """The update of a request.

        Raises:
            FrameError: it makes no sense.
        """
        if _PLACED in meta:
            size_bytes = fields.count(meta, _PLACED)
            if conn.shared is None or size_bytes > conn.shared.nbytes:
                raise FrameError(f"an update of {size_bytes} bytes does not lie in shared memory")
            placed_P = as_tensor(conn.shared[:size_bytes])
            return replace(read_update(meta, payload), payload_P=placed_P)
        return read_update(meta, payload)

    def tell(
        self, conn: LanConnection, meta: Meta, reply: ReplyMessage
    ) -> tuple[Meta, memoryview | None]:
        """The answer to a request; its payload stays here if the update was placed."""
        if _PLACED not in meta or reply.coded is not None or not reply.payload_P.numel():
            return reply_meta(reply), payload_bytes(reply)
        self._waiting[conn] = reply
        size_bytes = as_bytes(reply.payload_P).nbytes
        return {**reply_meta(reply), _PLACED: size_bytes}, _model_buffers(reply)

    def fetch(self, conn: LanConnection, meta: Meta) -> tuple[Meta, memoryview | None]:
        """The payload that waits.

        Raises:
            FrameError: none does.
        """
        reply = self._waiting.pop(conn, None)
        if reply is None:
            raise FrameError("no answer waits to be fetched")
        payload, buffer = as_bytes(reply.payload_P), conn.shared
        if not fields.flag(meta, "in_place") or buffer is None or payload.nbytes > buffer.nbytes:
            return {}, payload
        as_tensor(buffer[: payload.nbytes]).copy_(reply.payload_P)
        return {_PLACED: payload.nbytes}, None

    def forget(self, conn: LanConnection) -> None:
        """A connection has ended."""
        self._waiting.pop(conn, None)


def _model_buffers(message: UpdateMessage | ReplyMessage) -> memoryview | None:
    return as_bytes(message.buffers_E) if message.buffers_E.numel() else None


_DIAL_S: Final = 1.0  # longest attempt, and least time between two
_STEADY_S: Final = 5.0  # what breaks sooner was no mending


class ReconnectingBridgeClient:
    """Gives the present uplink; for one thread that asks, and any that tell.

    Args:
        region: this region.
        client: the connection to its first bridge.
    """

    def __init__(self, region: str, client: LanClient) -> None:
        self._region = region
        self._changed = threading.Condition()
        self._end: GeoRayError | None = None
        self._old: list[BridgeClient] = []
        self._dialled: BridgeClient | None = None  # this line's own to close
        self._lost_s: float | None = None
        self._dialled_s = -_STEADY_S
        self.client = BridgeClient(client)

    @property
    def away_s(self) -> float | None:
        """For how long the bridge has not been reached; None: it is, or nobody has tried."""
        lost_s = self._lost_s
        is_lost = lost_s is not None and self.client.is_lost
        return time.monotonic() - lost_s if lost_s is not None and is_lost else None

    def use(self, client: LanClient) -> None:
        """There is another bridge: the one before is lost."""
        with self._changed:
            self._follow(BridgeClient(client))
            self._lost_s = None

    def drop_old(self) -> None:
        """Free the memory that was shared with earlier bridges: nothing that is needed lies there.

        A bridge may have died while nothing was asked of it, so that nobody has noticed.
        """
        with self._changed:
            old, self._old = self._old, []
        for each in old:
            each.close()

    def end(self, error: GeoRayError) -> None:
        """Let every present and later `await_next` raise ``error``."""
        with self._changed:
            self._end = self._end or error
            dialled, self._dialled = self._dialled, None
            self._changed.notify_all()
        if dialled is not None:
            dialled.close()

    def await_next(self) -> BridgeClient:
        """Return an uplink that is not lost, once there is one.

        Raises:
            LinkDownError: there was none for so long that nobody waits any more.
            GeoRayError: what `end` was given.
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
                        f"the bridge of region '{self._region}' is lost, and there was no other "
                        f"one within {UNREACHABLE_S:g} s"
                    )
                pause_s = self._dialled_s + _DIAL_S - time.monotonic()
                if pause_s > 0:
                    self._changed.wait(pause_s)
                    continue
            self._dial(lost)

    def _dial(self, lost: BridgeClient) -> None:
        """Try the same bridge again; nobody who tells of another one waits for that."""
        fresh: BridgeClient | None = None
        with suppress(TransportError):  # it is dead, or who has its port now is somebody else
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
