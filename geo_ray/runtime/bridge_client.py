"""A region's client of its bridge: requests, deduplication and reconnection.

On one host an uncoded update lies in shared memory while its answer is awaited, and the answer
replaces it on a separate fetch; until then a checkpoint may need the update. A broken
connection says nothing about the bridge: it is dialled again until another bridge is announced,
and the controller learns for how long that has failed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor

from geo_ray.base.errors import FrameError, GeoRayError, LinkDownError, TransportError
from geo_ray.runtime.exchange.messages import (
    as_bytes,
    as_tensor,
    payload_bytes,
    read_reply,
    read_update,
    reply_meta,
    update_meta,
)
from geo_ray.training.config import UNREACHABLE_S
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.transport.lan import LanClient, LanConnection
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Meta

_PLACED = "placed"  # bytes of a payload in the shared memory


@dataclass(frozen=True, slots=True)
class Told:
    """An answer as the bridge has told it.

    Attributes:
        reply: the answer; without its payload, if that waits.
        waits: whether it is to be fetched.
    """

    reply: ReplyMessage
    waits: bool = False


class Uplink:
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

    def again(self, connect_timeout_s: float) -> Uplink:
        """Another one to the same bridge, whose connection was lost.

        Raises:
            TransportError: the bridge is not there.
        """
        return Uplink(self._client.again(connect_timeout_s))

    def place(self, update: UpdateMessage) -> UpdateMessage:
        """The same update with its payload in the shared memory, if it has room there.

        What lay there before is overwritten: it must not be in use any more.
        """
        count = update.payload_P.numel()
        payload_P = self.room(count) if update.coded is None else None
        if payload_P is None:
            return update
        if not self.lies_there(update.payload_P):
            payload_P.copy_(update.payload_P)
        return replace(update, payload_P=payload_P)

    def room(self, count: int) -> Tensor | None:
        """The place of a payload of so many fp32, if there is room for it."""
        room = self._client.shared
        if room is None or not 0 < 4 * count <= room.nbytes:
            return None
        return as_tensor(room[: 4 * count], count)

    def lies_there(self, tensor: Tensor) -> bool:
        """Whether a tensor's content is in the shared memory."""
        room = self._client.shared
        return room is not None and as_tensor(room[:4]).data_ptr() == tensor.data_ptr()

    def request(
        self, meta: Mapping[str, object], timeout_s: float, payload: memoryview | None = None
    ) -> tuple[Meta, memoryview | None]:
        """See `LanClient.request`."""
        return self._client.request(dict(meta), payload, timeout_s=timeout_s)  # type: ignore[arg-type]

    def ask(self, update: UpdateMessage, timeout_s: float) -> Told:
        """Bring an update, placed or not, to the averager; blocks until that has answered."""
        meta = {"op": "update", **update_meta(update)}
        if self.lies_there(update.payload_P):
            placed: Meta = {_PLACED: as_bytes(update.payload_P).nbytes}
            answer, found = self.request(meta | placed, timeout_s, _carried(update))
        else:
            answer, found = self.request(meta, timeout_s, payload_bytes(update))
        return Told(read_reply(answer, found), _PLACED in answer)

    def fetch(self, told: Told, timeout_s: float, *, in_place: bool) -> ReplyMessage:
        """The answer with its payload.

        Args:
            told: the answer.
            timeout_s: longest wait.
            in_place: put the payload where the update lies, until the next is placed.
        """
        if not told.waits:
            return told.reply
        answer, payload = self.request({"op": "fetch", "in_place": in_place}, timeout_s)
        room = self._client.shared
        if _PLACED in answer and room is not None:
            payload = room[: fields.count(answer, _PLACED)]
        return replace(told.reply, payload_P=as_tensor(payload))


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
        number = update.epoch, update.seq
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
        return {**reply_meta(reply), _PLACED: size_bytes}, _carried(reply)

    def fetch(self, conn: LanConnection, meta: Meta) -> tuple[Meta, memoryview | None]:
        """The payload that waits.

        Raises:
            FrameError: none does.
        """
        reply = self._waiting.pop(conn, None)
        if reply is None:
            raise FrameError("no answer waits to be fetched")
        payload, room = as_bytes(reply.payload_P), conn.shared
        if not fields.flag(meta, "in_place") or room is None or payload.nbytes > room.nbytes:
            return {}, payload
        as_tensor(room[: payload.nbytes]).copy_(reply.payload_P)
        return {_PLACED: payload.nbytes}, None

    def forget(self, conn: LanConnection) -> None:
        """A connection has ended."""
        self._waiting.pop(conn, None)


def _carried(message: UpdateMessage | ReplyMessage) -> memoryview | None:
    return as_bytes(message.carried_E) if message.carried_E.numel() else None


_DIAL_S: Final = 1.0  # longest attempt, and least time between two
_STEADY_S: Final = 5.0  # what breaks sooner was no mending


class BridgeLine:
    """Gives the present uplink; for one thread that asks, and any that tell.

    Args:
        region: this region.
        client: the connection to its first bridge.
    """

    def __init__(self, region: str, client: LanClient) -> None:
        self._region = region
        self._changed = threading.Condition()
        self._end: GeoRayError | None = None
        self._old: list[Uplink] = []
        self._dialled: Uplink | None = None  # this line's own to close
        self._lost_s: float | None = None
        self._dialled_s = -_STEADY_S
        self.uplink = Uplink(client)

    @property
    def away_s(self) -> float | None:
        """For how long the bridge has not been reached; None: it is, or nobody has tried."""
        lost_s = self._lost_s
        is_lost = lost_s is not None and self.uplink.is_lost
        return time.monotonic() - lost_s if lost_s is not None and is_lost else None

    def use(self, client: LanClient) -> None:
        """There is another bridge: the one before is lost."""
        with self._changed:
            self._follow(Uplink(client))
            self._lost_s = None

    def drop_old(self) -> None:
        """Free the memory that was shared with earlier bridges: nothing that is needed lies there.

        A bridge may have died while nothing was asked of it, so that nobody has noticed.
        """
        with self._changed:
            old, self._old = self._old, []
        for uplink in old:
            uplink.close()

    def end(self, error: GeoRayError) -> None:
        """Let every present and later `await_next` raise ``error``."""
        with self._changed:
            self._end = self._end or error
            dialled, self._dialled = self._dialled, None
            self._changed.notify_all()
        if dialled is not None:
            dialled.close()

    def await_next(self) -> Uplink:
        """Return an uplink that is not lost, once there is one.

        Raises:
            LinkDownError: there was none for so long that nobody waits any more.
            GeoRayError: what `end` was given.
        """
        began_s = time.monotonic()
        with self._changed:
            if self.uplink.is_lost and began_s - self._dialled_s > _STEADY_S:
                self._lost_s = began_s
        while True:
            with self._changed:
                lost = self.uplink
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

    def _dial(self, lost: Uplink) -> None:
        """Try the same bridge again; nobody who tells of another one waits for that."""
        fresh: Uplink | None = None
        with suppress(TransportError):  # it is dead, or who has its port now is somebody else
            fresh = lost.again(_DIAL_S)
        with self._changed:
            self._dialled_s = time.monotonic()
            if fresh is not None and self.uplink is lost and self._end is None:
                self._follow(fresh)
                self._dialled = fresh
                return
        if fresh is not None:
            fresh.close()

    def _follow(self, uplink: Uplink) -> None:
        self._old.append(self.uplink)
        self.uplink = uplink
        self._changed.notify_all()
