"""Counts peers' UDP trains, one at a time, each in a thread of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from geo_ray.clock import Clock
from geo_ray.errors import FrameError, TransportError
from geo_ray.transport.probe import plan as words
from geo_ray.transport.probe.plan import real, whole
from geo_ray.transport.probe.receiver import Answer
from geo_ray.transport.probe.udp_train import MAX_PACKETS, TOKEN_BYTES, TrainResult, UdpPort
from geo_ray.transport.wire.message import Message
from geo_ray.transport.wire.meta import Meta
from geo_ray.transport.wire.sockets import Address
from geo_ray.util.threads import Workers

_LARGEST: Final = 2**63
_LATE_S: Final = 30.0
_OPENINGS: Final = 5
_OPEN_EVERY_S: Final = 0.05


@dataclass(slots=True)
class _Train:
    """One peer's UDP train to this end; ``counted`` once the counting thread is done."""

    number: int
    port: int | None = None  # None until it is known; 0 if no port could be bound
    is_over: bool = False
    counted: bool = False
    result: TrainResult | None = None


class TrainCounter:
    """Answers the requests of `ProbeSender.loss` in other regions.

    Args:
        answer: sends a control message at once or drops it; the asking side repeats its request.
        clock: clock for pauses between opening packets.
        udp: host and port to bind.
        workers: owner of the counting threads.
        host_of: returns where a peer was dialed; None if it dialed here.
    """

    def __init__(
        self,
        answer: Answer,
        clock: Clock,
        udp: Address,
        workers: Workers,
        host_of: Callable[[str], str | None],
    ) -> None:
        self._answer = answer
        self._clock = clock
        self._udp = udp
        self._workers = workers
        self._host_of = host_of
        self._lock = threading.Lock()
        self._trains: dict[str, _Train] = {}
        self.routes: dict[str, Callable[[str, Message], None]] = {
            words.TRAIN: self._on_train,
            words.TRAIN_END: self._on_train_end,
            words.TRAIN_ASK: self._on_train_ask,
        }

    def cancel(self) -> None:
        """End the counting threads."""
        with self._lock:
            for train in self._trains.values():
                train.is_over = True

    def _on_train(self, peer: str, message: Message) -> None:
        meta = message.meta
        number = whole(meta, "id", 0, _LARGEST)
        token = meta.get("token")
        if type(token) is not bytes or len(token) != TOKEN_BYTES:
            raise FrameError("a probe's train has no token")
        packets = whole(meta, "packets", 1, MAX_PACKETS)
        seconds = real(meta, "seconds", 0, 60)
        port = whole(meta, "port", 1, 65535)
        train = _Train(number)
        with self._lock:
            known = self._find_train(peer, message)
            is_free = all(one.counted for name, one in self._trains.items() if name != peer)
            if known is None and is_free:
                for earlier in self._trains.values():
                    earlier.is_over = True
                self._trains = {peer: train}
        if known is not None:
            self._send_way(peer, known)
        elif is_free:
            to_open = self._host_of(peer), port
            wait_s = seconds + _LATE_S
            self._workers.start(
                "probe-train", lambda: self._count(peer, train, token, packets, to_open, wait_s)
            )
        else:
            self._answer(peer, words.WAY, {"id": number, "port": 0})

    def _count(
        self,
        peer: str,
        train: _Train,
        token: bytes,
        packets: int,
        to_open: tuple[str | None, int],
        wait_s: float,
    ) -> None:
        result = None
        try:
            with contextlib.closing(UdpPort(*self._udp)) as udp:
                train.port = udp.port
                self._send_way(peer, train)
                # Beside the counting: the train may start at the first of these.
                self._workers.start("probe-open", lambda: self._open(udp, *to_open, token))
                result = udp.count_train(token, packets, wait_s, lambda: train.is_over)
        except TransportError:
            train.port = 0
            self._send_way(peer, train)
        finally:
            with self._lock:
                train.result, train.counted = result, True
            self._send_result(peer, train)

    def _send_way(self, peer: str, train: _Train) -> None:
        if train.port is not None:
            self._answer(peer, words.WAY, {"id": train.number, "port": train.port})

    def _open(self, udp: UdpPort, host: str | None, port: int, token: bytes) -> None:
        to = None if host is None else resolve(host, port)
        if to is None:
            return
        for _ in range(_OPENINGS):
            udp.open_way(to, token)
            self._clock.sleep_s(_OPEN_EVERY_S)

    def _on_train_end(self, peer: str, message: Message) -> None:
        with self._lock:
            train = self._find_train(peer, message)
            if train is not None:
                train.is_over = True

    def _on_train_ask(self, peer: str, message: Message) -> None:
        with self._lock:
            train = self._find_train(peer, message)
        if train is not None and train.counted:
            self._send_result(peer, train)

    def _send_result(self, peer: str, train: _Train) -> None:
        result = train.result
        meta: Meta = {"id": train.number, "arrived": None}
        if result is not None:
            meta |= {"arrived": result.arrived, "loss_mad": result.loss_mad}
        self._answer(peer, words.TRAIN_RESULT, meta)

    def _find_train(self, peer: str, message: Message) -> _Train | None:
        train = self._trains.get(peer)
        number = whole(message.meta, "id", 0, _LARGEST)
        return train if train is not None and train.number == number else None


def resolve(host: str, port: int) -> Address | None:
    """The first UDP address of a host; None if its name is unknown."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][4]
    except OSError:
        return None
    return str(found[0]), int(found[1])
