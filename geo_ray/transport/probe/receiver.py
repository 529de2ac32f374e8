"""The receiving side of a probe: answers pings and records arrivals."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from geo_ray.clock import Clock
from geo_ray.transport.probe import plan as words
from geo_ray.transport.probe.plan import ProbeProgress, real, whole
from geo_ray.transport.probe.transfer import ArrivalLog
from geo_ray.transport.wire.frames import view_of
from geo_ray.transport.wire.message import Message
from geo_ray.transport.wire.meta import Meta

_LARGEST: Final = 2**63
_STALE_S: Final = 10.0

Answer = Callable[[str, str, Meta], None]  # peer, kind, meta; must not wait


@dataclass(slots=True)
class _Incoming:
    """A peer's transfer to this end."""

    number: int
    log: ArrivalLog
    heard_s: float
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
            incoming.heard_s = now_s
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
        return not incoming.ended and self._clock.now_s() - incoming.heard_s < _STALE_S
