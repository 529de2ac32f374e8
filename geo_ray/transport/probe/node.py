"""Link probe: goodput, round trips and loss of one direction, over the transport itself.

Both ends are a `ProbeNode` with an `Endpoint`. A node measures the direction away from itself
(`ProbeSender`); for the other direction it asks its peer to measure (`measure_back`). The peer
answers pings and records arrivals (`ProbeReceiver`), and counts UDP trains one at a time
(`TrainCounter`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from pydantic import ValidationError

from geo_ray.base.clock import Clock, SystemClock
from geo_ray.base.errors import (
    DeadlineExceededError,
    FrameError,
    GeoRayError,
    InvariantError,
    LinkDownError,
    TransportError,
    from_code,
)
from geo_ray.base.threads import Workers
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.links import LinkRecord, spread
from geo_ray.transport.probe import plan as words
from geo_ray.transport.probe.measurement import (
    MAX_CHUNK_BYTES,
    MAX_PACKETS,
    TOKEN_BYTES,
    ArrivalLog,
    SendWindow,
    TrainResult,
    UdpPort,
    new_token,
    packets_for,
    quantile,
)
from geo_ray.transport.probe.plan import ProbePlan, ProbeProgress, real, whole
from geo_ray.transport.wire.fields import Meta, text
from geo_ray.transport.wire.frames import view_of
from geo_ray.transport.wire.message import CONTROL, DATA, Message
from geo_ray.transport.wire.sockets import Address

_LARGEST: Final = 2**63
_STALE_S: Final = 10.0

Answer = Callable[[str, str, Meta], None]  # peer, kind, meta; must not wait


@dataclass(slots=True)
class _Incoming:
    """A peer's transfer to this end."""

    number: int
    log: ArrivalLog
    received_s: float
    ended: bool = False


class ProbeReceiver:
    """Answers the requests of `ProbeSender` in other regions.

    Args:
        answer: sends a control message at once or drops it; the asking side repeats its request.
        clock: clock for arrivals.
    """

    def __init__(self, answer: Answer, clock: Clock) -> None:
        self._answer = answer
        self._clock = clock
        self._lock = threading.Lock()
        self._incoming: dict[str, _Incoming] = {}
        self.routes: dict[str, Callable[[str, Message], None]] = {
            words.PING: self._on_ping,
            words.BEGIN: self._on_begin,
            words.DATA_KIND: self._on_data,
            words.END: self._on_end,
            words.ASK: self._on_ask,
        }

    def progress(self) -> ProbeProgress | None:
        """Return the progress of the transfer that is arriving, if there is one."""
        with self._lock:
            for incoming in self._incoming.values():
                if self._is_busy(incoming):
                    arrived = incoming.log.result()
                    rate_mbps = None if arrived is None else arrived.goodput_mbps
                    return ProbeProgress("receiving", 0.0, rate_mbps)
        return None

    def _on_ping(self, peer: str, message: Message) -> None:
        self._answer(peer, words.PONG, {"n": whole(message.meta, "n", 0, _LARGEST)})

    def _on_begin(self, peer: str, message: Message) -> None:
        number = whole(message.meta, "id", 0, _LARGEST)
        ramp_s = real(message.meta, "ramp_s", 0, 600)
        now_s = self._clock.now_s()
        with self._lock:
            others = [one for name, one in self._incoming.items() if name != peer]
            busy = any(self._is_busy(one) for one in others)
            if not busy:
                self._incoming = {peer: _Incoming(number, ArrivalLog(ramp_s), now_s)}
        if busy:
            self._answer(peer, words.BUSY, {"id": number})

    def _on_data(self, peer: str, message: Message) -> None:
        now_s = self._clock.now_s()
        with self._lock:
            incoming = self._find(peer, message)
            if incoming is None or incoming.ended:
                return
            incoming.log.add(now_s, view_of(message.payload).nbytes)
            incoming.received_s = now_s
            got_bytes = incoming.log.got_bytes
        self._answer(peer, words.GOT, {"id": incoming.number, "bytes": got_bytes})

    def _on_end(self, peer: str, message: Message) -> None:
        with self._lock:
            incoming = self._find(peer, message)
            if incoming is not None:
                incoming.ended = True
        self._on_ask(peer, message)

    def _on_ask(self, peer: str, message: Message) -> None:
        with self._lock:
            incoming = self._find(peer, message)
            if incoming is None or not incoming.ended:
                return
            arrived = incoming.log.result()
        meta: Meta = {"id": incoming.number, "ok": arrived is not None}
        if arrived is not None:
            meta |= {
                "goodput_mbps": arrived.goodput_mbps,
                "goodput_mad_mbps": arrived.goodput_mad_mbps,
                "samples": arrived.samples,
            }
        self._answer(peer, words.RESULT, meta)

    def _find(self, peer: str, message: Message) -> _Incoming | None:
        incoming = self._incoming.get(peer)
        number = whole(message.meta, "id", 0, _LARGEST)
        return incoming if incoming is not None and incoming.number == number else None

    def _is_busy(self, incoming: _Incoming) -> bool:
        return not incoming.ended and self._clock.now_s() - incoming.received_s < _STALE_S


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
                "probe-train", partial(self._count, peer, train, token, packets, to_open, wait_s)
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
                self._workers.start("probe-open", partial(self._open, udp, *to_open, token))
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


_PING_EVERY_S: Final = 0.025
_LOADED_PING_EVERY_S: Final = 0.1
_ASK_EVERY_S: Final = 1.0
_OPEN_WAIT_S: Final = 5.0
_FASTEST_MBPS: Final = 1e7


@dataclass(frozen=True, slots=True)
class Goodput:
    """A transfer as its receiver measured it, and the round trips during it."""

    goodput_mbps: float
    goodput_mad_mbps: float
    samples: int
    loaded_rtts_s: tuple[float, ...]


class ProbeSender:
    """Measures the direction to one peer; one measurement at a time.

    Args:
        endpoint: endpoint that is connected to the peer.
        peer: region of the endpoint at the other end.
        plan: settings of the measurement.
        clock: clock for round trips.
    """

    def __init__(self, endpoint: Endpoint, peer: str, plan: ProbePlan, clock: Clock) -> None:
        self.peer = peer
        self.progress = ProbeProgress()
        self._endpoint = endpoint
        self._plan = plan
        self._clock = clock
        self._number = secrets.randbits(48)  # number of this measurement
        self._changed = threading.Condition()  # guards the attributes below
        self._pings: dict[int, float] = {}
        self._next_ping = 0
        self._rtts: list[float] = []
        self._window: SendWindow | None = None
        self._answers: dict[str, Meta] = {}
        self._cancelled = False
        self.routes: dict[str, Callable[[Message], None]] = {
            words.PONG: self._on_pong,
            words.GOT: self._on_got,
            words.RESULT: self._on_answer,
            words.BUSY: self._on_answer,
            words.WAY: self._on_answer,
            words.TRAIN_RESULT: self._on_answer,
        }

    def cancel(self) -> None:
        """Let a running measurement raise `LinkDownError` at once."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    # ------------------------------------------------------------------ round trips

    def round_trips(self) -> list[float]:
        """Measure round trips in seconds, on an idle link.

        Raises:
            DeadlineExceededError: the peer does not answer.
        """
        for number in range(self._plan.pings):
            self.progress = ProbeProgress("round trips", number / self._plan.pings)
            self._ping()
            self._clock.sleep_s(_PING_EVERY_S)
        self._wait_pings()
        return self._take_rtts()

    def _ping(self) -> None:
        with self._changed:
            number = self._next_ping
            self._next_ping += 1
            self._pings[number] = self._clock.now_s()
        self._send(words.PING, {"n": number}, CONTROL)

    def _on_pong(self, message: Message) -> None:
        now_s = self._clock.now_s()
        with self._changed:
            sent_s = self._pings.pop(whole(message.meta, "n", 0, _LARGEST), None)
            if sent_s is not None:
                self._rtts.append(now_s - sent_s)
                self._changed.notify_all()

    def _take_rtts(self) -> list[float]:
        with self._changed:
            taken, self._rtts = self._rtts, []
            return taken

    # ------------------------------------------------------------------ goodput

    def goodput(self, rtt_s: float) -> Goodput:
        """Fill the link for the plan's time.

        Args:
            rtt_s: the idle link's.

        Raises:
            DeadlineExceededError: the peer does not answer.
            TransportError: another region is probing the peer, or almost nothing arrived.
        """
        ramp_s = self._plan.ramp_for(rtt_s)
        payload = memoryview(os.urandom(MAX_CHUNK_BYTES))  # random: cannot be compressed
        with self._changed:
            self._window = window = SendWindow(rtt_s)
        self._send(words.BEGIN, {"id": self._number, "ramp_s": ramp_s}, DATA)
        began_s = self._clock.now_s()
        total_s = ramp_s + self._plan.counted_for(rtt_s)
        ping_at_s = began_s + ramp_s
        while (passed_s := self._clock.now_s() - began_s) < total_s:
            with self._changed:
                self.progress = ProbeProgress("goodput", passed_s / total_s, window.rate_mbps)
                self._raise_if_over()
                if began_s + passed_s < ping_at_s and not window.has_capacity():
                    self._changed.wait(min(_LOADED_PING_EVERY_S, total_s - passed_s))
                    continue
                size_bytes = window.chunk_bytes if window.has_capacity() else 0
            if began_s + passed_s >= ping_at_s:
                ping_at_s = max(ping_at_s + _LOADED_PING_EVERY_S, began_s + passed_s)
                self._ping()
            if size_bytes:
                self._send(words.DATA_KIND, {"id": self._number}, DATA, payload[:size_bytes])
                with self._changed:
                    window.sent(size_bytes)
        self._send(words.END, {"id": self._number}, DATA)
        result = self._ask(words.ASK, words.RESULT)
        self._wait_pings()
        if result.get("ok") is not True:
            raise TransportError(
                f"too little arrived at region {self.peer} to tell a rate",
                fix="Probe for longer (--duration).",
            )
        return Goodput(
            real(result, "goodput_mbps", 0, _FASTEST_MBPS),
            real(result, "goodput_mad_mbps", 0, _FASTEST_MBPS),
            whole(result, "samples", 1, 10**6),
            tuple(self._take_rtts()),
        )

    def _on_got(self, message: Message) -> None:
        now_s = self._clock.now_s()
        got_bytes = whole(message.meta, "bytes", 0, _LARGEST)
        with self._changed:
            if self._window is not None and message.meta.get("id") == self._number:
                self._window.arrived(now_s, got_bytes)
                self._changed.notify_all()

    # ------------------------------------------------------------------ loss

    def loss(self, goodput_mbps: float, udp: Address, host: str | None) -> TrainResult | None:
        """Send a UDP train at half of the link's rate.

        Args:
            goodput_mbps: the link's rate.
            udp: host and port to bind.
            host: where the peer was dialed; None if it dialed here, and must open the way through
                firewalls.

        Returns:
            None if the plan has none, or UDP does not get through.
        """
        seconds = self._plan.udp_s
        if not seconds:
            return None
        packets, token = packets_for(goodput_mbps, seconds), new_token()
        self.progress = ProbeProgress("loss")
        try:
            bound = UdpPort(*udp)
        except TransportError:
            return None
        with contextlib.closing(bound) as port:
            meta: Meta = {"id": self._number, "packets": packets, "seconds": seconds}
            meta |= {"token": token, "port": port.port}
            self._send(words.TRAIN, meta, CONTROL)
            theirs = whole(self._ask(words.TRAIN, words.WAY, meta), "port", 0, 65535)
            if not theirs:
                return None
            to = (
                resolve(host, theirs) if host is not None else port.wait_opened(token, _OPEN_WAIT_S)
            )
            if to is not None:
                port.send_train(to, token, packets, seconds)
            self._send(words.TRAIN_END, {"id": self._number}, CONTROL)
            result = self._ask(words.TRAIN_ASK, words.TRAIN_RESULT)
        if result.get("arrived") is None:
            return None
        arrived = whole(result, "arrived", 1, packets)
        return TrainResult(packets, arrived, 1 - arrived / packets, real(result, "loss_mad", 0, 1))

    # ------------------------------------------------------------------ messages

    def _send(self, kind: str, meta: Meta, lane: int, payload: memoryview | bytes = b"") -> None:
        message = Message(kind, meta, payload, words.TRAFFIC, lane)
        self._endpoint.send(self.peer, message, self._plan.timeout_s)

    def _on_answer(self, message: Message) -> None:
        with self._changed:
            if message.meta.get("id") == self._number:
                self._answers[message.kind] = message.meta
                self._changed.notify_all()

    def _ask(self, question: str, answer: str, meta: Meta | None = None) -> Meta:
        """Repeat a request until it is answered: the other end may drop answers."""
        deadline_s = self._clock.now_s() + self._plan.timeout_s
        while (left_s := deadline_s - self._clock.now_s()) > 0:
            with self._changed:
                self._changed.wait_for(
                    lambda: answer in self._answers or self._is_over(), min(_ASK_EVERY_S, left_s)
                )
                self._raise_if_over()
                if answer in self._answers:
                    return self._answers.pop(answer)
            self._send(question, meta or {"id": self._number}, CONTROL)
        raise self._unanswered(question)

    def _wait_pings(self) -> None:
        with self._changed:
            is_done = self._changed.wait_for(
                lambda: not self._pings or self._is_over(), self._plan.timeout_s
            )
            if not is_done:
                raise self._unanswered("a ping")
            self._raise_if_over()

    def _unanswered(self, what: str) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"region {self.peer} has not answered {what} within {self._plan.timeout_s} s",
            fix="Check that the link is up; on a very slow one wait longer (--timeout).",
        )

    def _is_over(self) -> bool:
        return self._cancelled or words.BUSY in self._answers

    def _raise_if_over(self) -> None:
        if self._cancelled:
            raise LinkDownError("the probe was stopped")
        if words.BUSY in self._answers:
            raise TransportError(
                f"region {self.peer} is being probed by another region",
                fix="Probe one pair at a time.",
            )


_LOGGER = logging.getLogger(__name__)
_MOST_TEXT: Final = 10_000
_JOIN_S: Final = 60.0
_MOST_ASKED: Final = 8


class ProbeNode:
    """One end of a probe. Hand `on_message` to an endpoint, then the endpoint to `use`.

    Args:
        region: name of this end in records.
        udp: host and port to bind for UDP trains.
        hosts: where peers were dialed, by region of their endpoints.
        clock: None takes the machine's.
    """

    def __init__(
        self,
        region: str,
        udp: Address,
        hosts: Mapping[str, str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.region = region
        self._udp = udp
        self._hosts = dict(hosts or {})
        self._clock = clock or SystemClock()
        self._endpoint: Endpoint | None = None
        self._workers = Workers()
        self._receiver = ProbeReceiver(self._answer, self._clock)
        self._counter = TrainCounter(self._answer, self._clock, udp, self._workers, self._hosts.get)
        self._answers = self._receiver.routes | self._counter.routes
        self._measuring = threading.Lock()
        self._changed = threading.Condition()  # guards the attributes below
        self._sender: ProbeSender | None = None
        self._reports: dict[str, Meta] = {}
        self._serving = 0
        self._served = 0
        self._closed = False

    def use(self, endpoint: Endpoint) -> None:
        """Send all messages through ``endpoint``."""
        self._endpoint = endpoint

    def dialed(self, peer: str, host: str) -> None:
        """Note that a peer was dialed at ``host``, where UDP packets are sent, too."""
        self._hosts[peer] = host

    def progress(self) -> ProbeProgress:
        """Return the progress of the present measurement."""
        sender = self._sender
        if sender is not None:
            return sender.progress
        return self._receiver.progress() or ProbeProgress()

    def measure(self, peer: str, plan: ProbePlan, name: str | None = None) -> LinkRecord:
        """Measure the direction from here to ``peer``; waits for an earlier measurement.

        Args:
            peer: region of the endpoint at the other end, connected.
            plan: settings of the measurement.
            name: of the peer in the record; None takes ``peer``.

        Raises:
            DeadlineExceededError: the peer does not answer.
            TransportError: the link cannot be measured; the message says why.
        """
        with self._measuring:
            sender = ProbeSender(self._wan(), peer, plan, self._clock)
            with self._changed:
                if self._closed:
                    raise LinkDownError("the probe was stopped")
                self._sender = sender
            try:
                rtts_s = sender.round_trips()
                found = sender.goodput(quantile(rtts_s, 0.5))
                train = sender.loss(found.goodput_mbps, self._udp, self._hosts.get(peer))
                loss = None if train is None else train.loss
                if train is None and plan.udp_s:
                    # UDP does not get through. What TCP sent again contains the queue's losses.
                    loss = self._wan().stats()[peer]["estimate"]["loss"]
            finally:
                self._sender = None
        loaded_s = found.loaded_rtts_s
        return LinkRecord(
            src=self.region,
            dst=name or peer,
            goodput_mbps=found.goodput_mbps,
            goodput_mad_mbps=found.goodput_mad_mbps,
            rtt_s=quantile(rtts_s, 0.5),
            rtt_p99_s=quantile(rtts_s, 0.99),
            rtt_mad_s=spread(rtts_s) or 0.0,
            rtt_loaded_s=quantile(loaded_s, 0.5) if loaded_s else None,
            rtt_loaded_p99_s=quantile(loaded_s, 0.99) if loaded_s else None,
            loss=loss,
            loss_mad=None if train is None else train.loss_mad,
            samples=found.samples,
            measured_at_unix_s=time.time(),
        )

    def measure_back(self, peer: str, plan: ProbePlan) -> LinkRecord:
        """Have ``peer`` measure the direction from there to here, and wait for its record.

        Raises:
            DeadlineExceededError: it does not answer.
            GeoRayError: the error of the peer's measurement.
        """
        limit_s = plan.counted_for(1.0) + plan.udp_s + plan.ramp_for(1.0) + 4 * plan.timeout_s
        with self._changed:
            self._reports.pop(peer, None)
        asked: Meta = {"plan": plan.model_dump_json(), "name": self.region}
        self._wan().send(peer, Message(words.PLEASE, asked, b"", words.TRAFFIC, CONTROL))
        with self._changed:
            received = self._changed.wait_for(
                lambda: peer in self._reports or self._closed, limit_s
            )
            if self._closed:
                raise LinkDownError("the probe was stopped")
            if not received:
                raise DeadlineExceededError(
                    f"region {peer} has not measured the way back within {limit_s:g} s"
                )
            report = self._reports.pop(peer)
        if "error" in report:
            raise from_code(text(report, "error"), text(report, "message"), None)
        try:
            return LinkRecord.model_validate_json(text(report, "record"))
        except ValidationError:
            raise TransportError(f"region {peer} sent a record that is not valid") from None

    def wait_served(self, count: int, timeout_s: float | None = None) -> bool:
        """Wait until ``count`` reports were sent to peers in all; return whether they were."""
        with self._changed:
            self._changed.wait_for(lambda: self._served >= count or self._closed, timeout_s)
            return self._served >= count

    def close(self) -> None:
        """Stop measurements under way and wait for the node's threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            sender = self._sender
        if sender is not None:
            sender.cancel()
        self._counter.cancel()
        self._workers.join(_JOIN_S)

    # ------------------------------------------------------------------ messages

    def on_message(self, peer: str, message: Message) -> None:
        """Handle a received message; a malformed one is logged and dropped."""
        try:
            self._dispatch(peer, message)
        except FrameError as error:
            _LOGGER.warning("region %s: %s", peer, error.message)

    def _dispatch(self, peer: str, message: Message) -> None:
        sender = self._sender
        answering = self._answers.get(message.kind)
        if answering is not None:
            answering(peer, message)
        elif sender is not None and sender.peer == peer and message.kind in sender.routes:
            sender.routes[message.kind](message)
        elif message.kind == words.PLEASE:
            self._on_request(peer, message)
        elif message.kind == words.REPORT:
            with self._changed:
                self._reports[peer] = message.meta
                self._changed.notify_all()

    def _on_request(self, peer: str, message: Message) -> None:
        asked, name = text(message.meta, "plan"), text(message.meta, "name")
        if len(asked) > _MOST_TEXT or not 0 < len(name) < 256:
            raise FrameError("a probe's request is too long")
        try:
            plan = ProbePlan.model_validate(json.loads(asked))
        except (ValidationError, ValueError):
            raise FrameError("a probe's request has a plan that is not valid") from None

        def serve() -> None:
            try:
                record = self.measure(peer, plan, name)
                report: Meta = {"record": record.model_dump_json()}
            except GeoRayError as error:
                report = {"error": error.code, "message": error.message}
            with contextlib.suppress(LinkDownError, DeadlineExceededError):
                answer = Message(words.REPORT, report, b"", words.TRAFFIC, CONTROL)
                self._wan().send(peer, answer, plan.timeout_s)
            with self._changed:
                self._serving -= 1
                self._served += 1
                self._changed.notify_all()

        with self._changed:
            if self._closed or self._serving >= _MOST_ASKED:
                raise FrameError("too many probes are requested at the same time")
            self._serving += 1
        self._workers.start("probe-back", serve)

    def _answer(self, peer: str, kind: str, meta: Meta) -> None:
        # At once or not at all: this runs in the receiving thread.
        with contextlib.suppress(DeadlineExceededError, LinkDownError):
            self._wan().send(peer, Message(kind, meta, b"", words.TRAFFIC, CONTROL), 0.0)

    def _wan(self) -> Endpoint:
        if self._endpoint is None:
            raise InvariantError("a probe has no endpoint yet")
        return self._endpoint
