"""Serves a `JoinService` over the network: one listening endpoint, no Ray.

Messages of ranks are handled one at a time, in receiving threads. One thread per rank sends the
answers: a receiving thread must not wait for space in an outbox, nor one rank for another that is
slow. A further thread continues without lost regions, and wakes strategies that asked for it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from geo_ray.base.errors import GeoRayError
from geo_ray.joining.credentials import JoinCredentials
from geo_ray.joining.protocol import SERVER, JoinTerms, Outbound, region_of
from geo_ray.joining.service import JoinService, Stage
from geo_ray.joining.slices import SavedRun
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.wire.message import EndpointIdentity, Message, PeerStats
from geo_ray.transport.wire.sockets import Address

log = logging.getLogger(__name__)

_CLOSE_S: Final = 5.0
_TICK_S: Final = 0.1


class JoinServer:
    """A listening `JoinService`.

    Attributes:
        service: the run's state machine; use it under `lock`.
        lock: guards the service.
        address: where it listens.

    Args:
        terms: the run.
        credentials: those of `SERVER`.
        host: where to listen.
        port: where to listen; 0 takes a free one.
        transport: settings of connections.
        lost_after_s: a region is lost if one of its ranks is not connected for so long.
        resumed: the checkpoint from which the run continues; None: it begins.
        least: with fewer regions, the others wait for one that was lost to join again.
        wait_s: longest such wait, and longest time between updates of the ranks of a region.
    """

    def __init__(
        self,
        terms: JoinTerms,
        credentials: JoinCredentials,
        host: str = "127.0.0.1",
        port: int = 0,
        transport: TransportConfig | None = None,
        lost_after_s: float = 600.0,
        resumed: SavedRun | None = None,
        least: int = 1,
        wait_s: float = 600.0,
    ) -> None:
        self._origin_s = time.monotonic()
        self.service = JoinService(terms, self.now_s, resumed, least)
        self.lock = threading.Lock()
        self._lost_after_s, self._wait_s = lost_after_s, wait_s
        self._away_s: dict[str, float] = {}
        self._senders: dict[str, _Sender] = {}
        self._closing = threading.Event()
        identity = EndpointIdentity(
            credentials.run_id, SERVER, time.time_ns() // 1_000_000, credentials.key
        )
        self._endpoint = Endpoint(
            identity, self._on_message, transport, certificate=credentials.certificate
        )
        self.address: Address = self._endpoint.listen(host, port)
        self._ticker = threading.Thread(target=self._tick_all, name="join-tick", daemon=True)
        self._ticker.start()

    def now_s(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._origin_s

    def _tick_all(self) -> None:
        while not self._closing.wait(_TICK_S):
            try:
                self._tick()
            except GeoRayError:
                log.exception("the averager failed")

    def _tick(self) -> None:
        """Wake strategies; continue without regions that have been away, or hung, for too long."""
        with self.lock:
            self._post(self.service.on_wake())
            self._post(self.service.check_late(self._wait_s))
            self._post(self.service.check_held(self._wait_s))
            self._post(self.service.check_save())
        stats, now_s = self._endpoint.stats(), time.monotonic()
        with self.lock:
            awaited = {peer for peer in stats if self.service.is_awaited(peer)}
        for peer, each in stats.items():
            if each["connected"] or peer not in awaited:
                self._away_s.pop(peer, None)
            elif now_s - self._away_s.setdefault(peer, now_s) > self._lost_after_s:
                self._away_s.pop(peer)
                self.lose(
                    region_of(peer), f"rank '{peer}' has been away for {self._lost_after_s} s"
                )

    def lose(self, region: str, cause: str) -> None:
        """Continue without a region."""
        with self.lock:
            self._post(self.service.lose(region, cause))

    def request_stop(self) -> None:
        """Ask every region to finish."""
        with self.lock:
            self._post(self.service.request_stop())

    def begin_save(self, checkpoint: int, keep: Sequence[int], timeout_s: float) -> int | None:
        """Begin a checkpoint, see `JoinService.begin_save`; return its id, or None if not now."""
        with self.lock:
            if self.service.save is not None:
                return None
            self._post(self.service.begin_save(checkpoint, keep, timeout_s))
            return None if self.service.save is None else self.service.save.id

    def links(self) -> dict[str, PeerStats]:
        """Return the counters of all connections, by rank."""
        return self._endpoint.stats()

    def news(self) -> list[dict[str, Any]]:
        """Return the events since the last call."""
        with self.lock:
            return self.service.news()

    @property
    def stage(self) -> Stage:
        """The run's progress."""
        return self.service.stage

    def close(self) -> None:
        """Send what is queued, and close all connections."""
        self._closing.set()
        self._ticker.join(_CLOSE_S)
        with self.lock:
            senders = list(self._senders.values())
        for each in senders:
            each.outbox.put(None)
        until_s = time.monotonic() + _CLOSE_S
        for each in senders:
            each.join(max(0.0, until_s - time.monotonic()))
        self._endpoint.close(_CLOSE_S)

    def _on_message(self, peer: str, message: Message) -> None:
        with self.lock:
            self._post(self.service.on_message(peer, message))

    def _post(self, found: Sequence[Outbound]) -> None:
        """Queue messages in their order; under `lock`."""
        for each in found:
            sender = self._senders.get(each.peer)
            if sender is None:
                sender = self._senders[each.peer] = _Sender(self._endpoint, each.peer)
                sender.start()
            sender.outbox.put(each.message)


class _Sender(threading.Thread):
    """Sends the messages to one rank.

    Attributes:
        outbox: messages; None ends the thread.
    """

    def __init__(self, endpoint: Endpoint, peer: str) -> None:
        threading.Thread.__init__(self, name=f"join-send-{peer}", daemon=True)
        self.outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._endpoint, self._peer = endpoint, peer

    def run(self) -> None:
        """Send until the end."""
        while (message := self.outbox.get()) is not None:
            try:
                self._endpoint.send(self._peer, message)
            except GeoRayError as error:
                log.warning("'%s' was not sent to '%s': %s", message.kind, self._peer, error)
            del message  # not held while the next one is awaited: its payload may be a whole model
