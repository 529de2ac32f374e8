"""The sending side of a probe: round trips, a transfer that fills the link, a UDP train."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from geo_ray.clock import Clock
from geo_ray.errors import DeadlineExceededError, LinkDownError, TransportError
from geo_ray.transport.endpoint.endpoint import Endpoint
from geo_ray.transport.probe import plan as words
from geo_ray.transport.probe.counter import resolve
from geo_ray.transport.probe.plan import ProbePlan, ProbeProgress, real, whole
from geo_ray.transport.probe.transfer import MAX_CHUNK_BYTES, SendWindow
from geo_ray.transport.probe.udp_train import TrainResult, UdpPort, new_token, packets_for
from geo_ray.transport.wire.message import CONTROL, DATA, Message
from geo_ray.transport.wire.meta import Meta
from geo_ray.transport.wire.sockets import Address

_LARGEST: Final = 2**63
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
        """Seconds, on a link that carries nothing else of ours.

        Raises:
            DeadlineExceededError: the peer does not answer.
        """
        for number in range(self._plan.pings):
            self.progress = ProbeProgress("round trips", number / self._plan.pings)
            self._ping()
            self._clock.sleep_s(_PING_EVERY_S)
        self._wait(lambda: not self._pings, self._plan.timeout_s, "a ping")
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
                if began_s + passed_s < ping_at_s and not window.has_room():
                    self._changed.wait(min(_LOADED_PING_EVERY_S, total_s - passed_s))
                    continue
                size_bytes = window.chunk_bytes if window.has_room() else 0
            if began_s + passed_s >= ping_at_s:
                ping_at_s = max(ping_at_s + _LOADED_PING_EVERY_S, began_s + passed_s)
                self._ping()
            if size_bytes:
                self._send(words.DATA_KIND, {"id": self._number}, DATA, payload[:size_bytes])
                with self._changed:
                    window.sent(size_bytes)
        self._send(words.END, {"id": self._number}, DATA)
        result = self._ask(words.ASK, words.RESULT)
        self._wait(lambda: not self._pings, self._plan.timeout_s, "a ping")
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
        """Send a UDP train at half of what the link can do.

        Args:
            goodput_mbps: what the link can do.
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
        raise self._silent(question)

    def _wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: condition() or self._is_over(), timeout_s):
                raise self._silent(what)
            self._raise_if_over()

    def _silent(self, what: str) -> DeadlineExceededError:
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
