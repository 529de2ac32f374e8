"""A region's bridge of a program, through which all calls between regions pass."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from geo_ray.base.errors import (
    DeadlineExceededError,
    FrameError,
    GeoRayError,
    LinkDownError,
    NodeLostError,
    from_code,
)
from geo_ray.program.clock import RealClock
from geo_ray.program.rpc import NodeStubs, NodeTable
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.emulation import LinkModel
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.lan import LanConnection, LanServer
from geo_ray.transport.security.tls import TlsSource
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.frames import Buffer
from geo_ray.transport.wire.message import EndpointIdentity, Message
from geo_ray.transport.wire.record import Record
from geo_ray.transport.wire.sockets import Address

_LOGGER = logging.getLogger(__name__)
_CALL, _ANSWER = "call", "answer"
_CALLS: Final = 2**40  # more calls than one bridge will ever have


@dataclass(frozen=True, slots=True)
class CrossRegionCall:
    """A call to another region.

    Attributes:
        number: of the call, unique over all bridges that the sending region has had, because a
            later bridge receives the answers to an earlier one.
        target: the instance.
        method: name of the called method.
    """

    number: int
    target: str
    method: str


@dataclass(frozen=True, slots=True)
class CrossRegionAnswer:
    """The outcome of a call.

    Attributes:
        number: of the call.
        code: of the error; None for a result.
        message: of the error.
        fix: of the error.
    """

    number: int
    code: str | None = None
    message: str | None = None
    fix: str | None = None


CALL: Final = Record(CrossRegionCall, "number target method")
ANSWER: Final = Record(CrossRegionAnswer, "number code message fix")


class NodeBridge:
    """Accepts calls of its region over sockets, and forwards them to other regions' bridges.

    Args:
        identity: of its endpoint, with its region.
        host: address of this machine to listen on.
        key: of its region.
        shaping: link models by destination region.
        certificate: for TLS between regions; None if all are on loopback.
        config: of its endpoint; None takes the defaults.
    """

    def __init__(
        self,
        identity: EndpointIdentity,
        host: str,
        key: bytes,
        shaping: Mapping[str, LinkModel],
        certificate: TlsSource | None = None,
        config: TransportConfig | None = None,
    ) -> None:
        self._region = identity.region
        self._clock = RealClock()
        self._stubs = NodeStubs(f"bridge of {identity.region}", identity.region, key)
        self._numbers = itertools.count(identity.attempt * _CALLS)
        self._lock = threading.Lock()
        self._open: dict[int, tuple[str, Future[bytes]]] = {}
        self._attempts: dict[str, int] = {}
        self._ended = threading.Event()
        self._endpoint = Endpoint(
            identity,
            self._on_message,
            config,
            shaping,
            on_peer=self._on_peer,
            certificate=certificate,
        )
        self._endpoint.listen(host)
        self._lan = LanServer(host, key, self._pass_on)

    @property
    def addresses(self) -> tuple[Address, Address]:
        """Addresses for other regions' bridges, and for its region's processes."""
        return self._endpoint.advertised, self._lan.address

    def connect(self, region: str, address: Address) -> None:
        """Maintain a link to another region's bridge."""
        self._endpoint.connect(region, address)

    def expect(self, region: str) -> None:
        """Expect a connection of another region's bridge."""
        self._endpoint.expect(region)

    def use(self, table: NodeTable) -> None:
        """Use a newer table."""
        self._stubs.use(table)

    def attend(self) -> None:
        """Return when the bridge is closed."""
        self._ended.wait()

    def wan_bytes(self) -> dict[str, int]:
        """Bytes sent by region, headers included."""
        stats = self._endpoint.stats()
        return {peer: sum(each["bytes_sent"].values()) for peer, each in stats.items()}

    def close(self) -> None:
        """End all links; open calls get no answer."""
        self._ended.set()
        self._endpoint.close(0.0)
        self._clock.close()
        with self._lock:
            calls, self._open = self._open, {}
        for _, future in calls.values():
            future.set_exception(NodeLostError(f"the bridge of {self._region} ends"))
        self._stubs.close()
        self._lan.close(0.5)

    # ------------------------------------------------------------------ calls of the own region

    def _pass_on(
        self, connection: LanConnection, meta: Meta, payload: memoryview | None
    ) -> tuple[Meta, Buffer | None]:
        region = fields.text(meta, "region")
        answer: Future[bytes] = Future()
        with self._lock:
            number = next(self._numbers)
            self._open[number] = (region, answer)
        call = CrossRegionCall(number, fields.text(meta, "target"), fields.text(meta, "method"))
        request = b"" if payload is None else bytes(payload)  # retained until acknowledged
        try:
            self._endpoint.send(region, Message(_CALL, CALL.write(call), request, _CALL))
        except GeoRayError:
            with self._lock:
                self._open.pop(number, None)
            raise
        return {}, answer.result()

    def _on_peer(self, region: str, attempt: int, connected: bool) -> None:
        with self._lock:
            before = self._attempts.setdefault(region, attempt)
            self._attempts[region] = max(before, attempt)
            lost = [n for n, (to, _) in self._open.items() if to == region and attempt > before]
            futures = [self._open.pop(number)[1] for number in lost]
        for future in futures:
            future.set_exception(NodeLostError(f"the bridge of {region} restarted during a call"))

    # ------------------------------------------------------------------ messages of other regions

    def _on_message(self, region: str, message: Message) -> None:
        if message.kind == _CALL:
            call = CALL.read(message.meta)
            self._clock.start(partial(self._answer, region, call, bytes(message.payload)))
        elif message.kind == _ANSWER:
            self._answered(ANSWER.read(message.meta), bytes(message.payload))
        else:
            raise FrameError(f"a bridge of a program was sent a message {message.kind!r:.40}")

    def _answer(self, region: str, call: CrossRegionCall, request: bytes) -> None:
        result: bytes | memoryview = b""
        try:
            result = self._stubs.call(call.target, call.method, request)
            answer = CrossRegionAnswer(call.number)
        except GeoRayError as error:
            answer = CrossRegionAnswer(call.number, error.code, error.message, error.fix)
        try:
            self._send_answer(region, answer, result)
        except GeoRayError as error:  # for example too large; reported to the caller
            failure = CrossRegionAnswer(call.number, error.code, error.message, error.fix)
            with suppress(LinkDownError):  # this bridge ends
                self._send_answer(region, failure, b"")

    def _send_answer(
        self, region: str, answer: CrossRegionAnswer, result: bytes | memoryview
    ) -> None:
        """Queue an answer, waiting for space as long as needed: the caller waits for it."""
        message = Message(_ANSWER, ANSWER.write(answer), result, _ANSWER)
        while True:
            try:
                return self._endpoint.send(region, message)
            except DeadlineExceededError as error:
                _LOGGER.warning("an answer to %s waits: %s", region, error.message)

    def _answered(self, answer: CrossRegionAnswer, result: bytes) -> None:
        with self._lock:
            found = self._open.pop(answer.number, None)
        if found is None:
            return
        if answer.code is None:
            found[1].set_result(result)
        else:
            found[1].set_exception(from_code(answer.code, answer.message or "", answer.fix))
