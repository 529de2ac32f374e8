"""A link probe: goodput, round trips and loss of one direction, over the product's own transport.

Both ends are a `ProbeNode` with an `Endpoint`. A node measures the direction away from itself; for
the other direction it asks its peer to measure (`measure_back`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Mapping
from typing import Final

from pydantic import ValidationError

from geo_ray.clock import Clock, SystemClock
from geo_ray.errors import (
    DeadlineExceededError,
    FrameError,
    GeoRayError,
    InvariantError,
    LinkDownError,
    TransportError,
    from_code,
)
from geo_ray.transport.endpoint.endpoint import Endpoint
from geo_ray.transport.flow.estimator import spread
from geo_ray.transport.links.record import LinkRecord
from geo_ray.transport.probe import plan as words
from geo_ray.transport.probe.counter import TrainCounter
from geo_ray.transport.probe.plan import ProbePlan, ProbeProgress
from geo_ray.transport.probe.receiver import ProbeReceiver
from geo_ray.transport.probe.sender import ProbeSender
from geo_ray.transport.probe.transfer import quantile
from geo_ray.transport.wire.fields import text
from geo_ray.transport.wire.message import CONTROL, Message
from geo_ray.transport.wire.meta import Meta
from geo_ray.transport.wire.sockets import Address
from geo_ray.util.threads import Workers

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
            plan: how thoroughly.
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
            heard = self._changed.wait_for(lambda: peer in self._reports or self._closed, limit_s)
            if self._closed:
                raise LinkDownError("the probe was stopped")
            if not heard:
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
