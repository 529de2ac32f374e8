"""Differential transmission: lossy blocks travel as datagrams next to the reliable part.

A region's bridge sends the reliable part, then the lossy blocks until the next update comes. The
averager's bridge completes updates with the blocks that have arrived, and answers with the blocks
it applied. Keys, ports and reports use the connection.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final

from geo_ray.base.clock import Clock, SystemClock
from geo_ray.base.errors import DeadlineExceededError, GeoRayError, LinkDownError
from geo_ray.codecs.base import DifferentialCodec
from geo_ray.runtime.exchange.direct import Pass, Routes, StagedPath, UpdateStage
from geo_ray.training.averager import Averager
from geo_ray.training.lossy_blocks import LossyReceiver
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.transport.datagrams import MOST_UNDER_ONE_KEY, BlockGroup, Secret, Seen, new_session
from geo_ray.transport.emulation import DatagramShaper, LinkModel
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.udp import LossyLoad, UdpChannel, UdpSender
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.message import CONTROL, Message
from geo_ray.transport.wire.sockets import Address

log = logging.getLogger(__name__)

DATAGRAMS = b"datagrams"
"""Label for deriving the datagram key of a connection."""


def notify(endpoint: Endpoint, peer: str, kind: str, meta: Meta) -> None:
    """Send a small message ahead of all data; it is dropped if there is no capacity."""
    try:
        endpoint.send(peer, Message(kind, meta, b"", "control", CONTROL), deadline_s=0.0)
    except (DeadlineExceededError, LinkDownError) as error:
        log.debug("region %s was not sent %s: %s", peer, kind, error.message)


_SILENCE_S: Final = 5.0  # without a report for this long, another session is requested
_GUESS_MBPS: Final = 10.0  # for a link without measurements


class DifferentialSender:
    """A region's end: sends lossy blocks to the averager's region.

    Args:
        codec: the configured codec.
        endpoint: this region's endpoint.
        channel: this region's datagram channel.
        leader: the averager's region.
        address: address of the averager's endpoint; datagrams are sent to the same host.
        clock: for pacing.
        emulated: the link model of the direction and the clock's time at its 0; None: no emulation.
    """

    def __init__(
        self,
        codec: DifferentialCodec,
        endpoint: Endpoint,
        channel: UdpChannel,
        leader: str,
        address: Address,
        clock: Clock,
        emulated: tuple[LinkModel, float] | None = None,
    ) -> None:
        self._codec = codec
        self._endpoint = endpoint
        self._channel = channel
        self._leader = leader
        self._host = address[0]
        self._clock = clock
        self._target: Address | None = None
        self._asked_s = self._heard_s = clock.now_s()
        self._shaper = None
        if emulated is not None:
            self._shaper = DatagramShaper(self._release, emulated[0], clock, emulated[1])
        self.sender = UdpSender(
            self._send, self._is_drained, self._start_mbps, codec.rate_mbps, clock
        )
        self._ask()

    def depart(self, update: UpdateMessage) -> tuple[UpdateMessage, LossyLoad | None]:
        """Remove the lossy blocks from an update; unsent blocks of the last one are dropped."""
        self.sender.stop()
        coded = update.coded
        if coded is None or coded.lossy is None:
            return update, None
        lossy = coded.lossy
        # A copy: the memory of the update is reused for the next request.
        data = memoryview(lossy.blocks_LK.numpy().tobytes())
        size = lossy.blocks_LK.shape[1]
        ids = tuple(lossy.ids_L.tolist())
        load = LossyLoad(update.attempt, update.seq, ids, data, size, lossy.bands)
        return replace(update, coded=replace(coded, lossy=None)), load

    def follow(self, load: LossyLoad | None) -> None:
        """Send the blocks after the reliable part, which has been sent."""
        if load is None or not load.ids:
            return
        now_s = self._clock.now_s()
        if now_s - max(self._heard_s, self._asked_s) > _SILENCE_S:
            self._ask()  # the other end may have restarted without a session
        elif self.sender.sealed > MOST_UNDER_ONE_KEY:
            self._ask()  # another session, with another key
        if self._codec.loose == "drop":
            load = replace(load, seq=load.seq, ids=())
        self.sender.start(load)

    def recall(self) -> tuple[int, int] | None:
        """See `UdpSender.stop`."""
        return self.sender.stop()

    def on_offer(self, message: Message) -> None:
        """The averager's bridge offers a session."""
        session, link_id = fields.data(message.meta, "session"), fields.text(message.meta, "link")
        port = fields.count(message.meta, "port")
        try:
            _, key = self._endpoint.link_key(
                self._leader, DATAGRAMS, outgoing=True, link_id=link_id
            )
        except LinkDownError:  # the offer was for a connection that is closed
            self._ask()
            return
        self._heard_s = self._clock.now_s()
        self._target = self._channel.resolve((self._host, port))
        self.sender.use(Secret.derived(session, key))

    def on_seen(self, message: Message) -> None:
        """The averager's bridge reports what arrived."""
        meta = message.meta
        self._heard_s = self._clock.now_s()
        highest, received = fields.count(meta, "highest"), fields.count(meta, "received")
        seen = Seen(highest, received, fields.number(meta, "delay_s"))
        self.sender.on_seen(fields.data(meta, "session"), seen)

    def close(self) -> None:
        """End all threads."""
        self.sender.close()
        if self._shaper is not None:
            self._shaper.close()

    def _ask(self) -> None:
        self._asked_s = self._clock.now_s()
        notify(self._endpoint, self._leader, "loose_ask", {})

    def _send(self, datagram: bytes, band: int, bands: int) -> None:
        if self._shaper is not None:
            self._shaper.send(datagram)
        else:
            self._release(datagram, (bands - 1 - band) * 32 if self._codec.dscp else 0)

    def _release(self, datagram: bytes, tos: int = 0) -> None:
        if self._target is not None and not self._endpoint.is_revoked(self._leader):
            self._channel.send(datagram, self._target, tos)

    def _is_drained(self, timeout_s: float) -> bool:
        try:
            self._endpoint.flush(self._leader, timeout_s)
        except DeadlineExceededError:
            return False
        except LinkDownError:
            time.sleep(timeout_s)
            return False
        return True

    def _start_mbps(self) -> float:
        stats = self._endpoint.stats().get(self._leader)
        known_mbps = None if stats is None else stats["estimate"].get("goodput_mbps")
        return known_mbps / 2 if known_mbps else _GUESS_MBPS


@dataclass(slots=True)
class _Held:
    """An update that waits for its lossy blocks, until they arrive or its grace period ends."""

    update: UpdateMessage
    missing: int
    apply: Pass
    timer: threading.Timer


class DifferentialReceiver:
    """The averager's end: receives the lossy blocks of all regions.

    Args:
        codec: the configured codec.
        num_params: P.
        endpoint: this region's endpoint.
        path: reports invalid updates to their regions, and failures to the controller.
        saved: result of `export` in the checkpoint that the run resumes from, by region.
    """

    def __init__(
        self,
        codec: DifferentialCodec,
        num_params: int,
        endpoint: Endpoint,
        path: StagedPath,
        saved: Mapping[str, Any],
    ) -> None:
        self._codec = codec
        self._num_params = num_params
        self._endpoint = endpoint
        self._path = path
        self._lock = threading.Lock()
        self._received: dict[str, LossyReceiver] = {}
        self._held: dict[str, _Held] = {}
        for region, state in saved.items():
            self._of(region).restore(state)

    def on_ask(self, peer: str, channel: UdpChannel) -> None:
        """Handle a region's request for a datagram session."""
        try:
            link_id, key = self._endpoint.link_key(peer, DATAGRAMS, outgoing=False)
        except LinkDownError:
            return  # the region repeats its request
        session = new_session()
        channel.expect(peer, Secret.derived(session, key))
        offer: Meta = {"session": session, "link": link_id, "port": channel.port}
        notify(self._endpoint, peer, "loose_offer", offer)

    def on_group(self, peer: str, group: BlockGroup) -> None:
        """Record received lossy blocks; an update may be waiting for them."""
        due = None
        with self._lock:
            received = self._of(peer)
            new = received.on_blocks(
                group.attempt, group.seq, group.first_rank, group.ids, group.blocks
            )
            held = self._held.get(peer)
            if held is not None and held.update.seq == group.seq:
                held.missing -= new
                due = held if held.missing <= 0 else None
        if due is not None:
            self._release(peer, due)

    def on_report(self, peer: str, session: bytes, seen: Seen) -> None:
        """Report to a sender what has arrived."""
        meta: Meta = {"session": session, **asdict(seen)}
        notify(self._endpoint, peer, "loose_seen", meta)

    def arrive(self, update: UpdateMessage, apply: Pass) -> None:
        """Complete an update, now or at the end of its grace period, and pass it on."""
        try:
            with self._lock:
                received = self._of(update.region)
                missing = received.begin(update) if self._codec.grace_s else 0
                if missing > 0:
                    held = self._hold(update, missing, apply)
                    self._held[update.region] = held
                    held.timer.start()
                    return
                update = received.complete(update)
        except GeoRayError as error:
            self._path.refuse(update, error)
        else:
            apply(update)

    def attach(self, reply: ReplyMessage) -> ReplyMessage:
        """Attach a report of the received lossy blocks to the reply."""
        with self._lock:
            received = self._of(reply.to)
            if reply.dropped:
                received.void(reply.seq)
                return reply
            return replace(reply, lossy=received.report(reply.seq))

    def export(self, averager: Averager) -> dict[str, object]:
        """Return the block accounting for a checkpoint, by region; see `LossyReceiver.export`."""
        with self._lock:
            found = {
                region: books.export(averager.last(region))
                for region, books in self._received.items()
            }
        return {region: state for region, state in found.items() if state is not None}

    def counts(self) -> dict[str, int]:
        """Return the counts of lossy blocks by outcome, over all regions."""
        total: Counter[str] = Counter()
        with self._lock:
            for received in self._received.values():
                total.update(asdict(received.counts))
        return dict(total)

    def close(self) -> None:
        """Release waiting updates."""
        with self._lock:
            held, self._held = self._held, {}
        for one in held.values():
            one.timer.cancel()

    def _of(self, region: str) -> LossyReceiver:
        return self._received.setdefault(region, LossyReceiver(self._codec, self._num_params))

    def _hold(self, update: UpdateMessage, missing: int, apply: Pass) -> _Held:
        release = partial(self._on_timer, update.region, update.seq)
        timer = threading.Timer(self._codec.grace_s, release)
        timer.daemon = True
        return _Held(update, missing, apply, timer)

    def _on_timer(self, region: str, seq: int) -> None:
        with self._lock:
            held = self._held.get(region)
        if held is not None and held.update.seq == seq:
            self._release(region, held)

    def _release(self, region: str, held: _Held) -> None:
        with self._lock:
            if self._held.get(region) is not held:
                return  # the timer and the last block coincided
            del self._held[region]
        held.timer.cancel()
        try:  # in a thread of the datagrams or of the timer, whose errors would be lost
            try:
                with self._lock:
                    update = self._of(region).complete(held.update)
            except GeoRayError as error:
                self._path.refuse(held.update, error)
            else:
                held.apply(update)
        except Exception as error:
            what = f"update {held.update.seq} of region '{region}'"
            self._path.fail(error, f"{what}, which waited for datagrams")


@dataclass(frozen=True, slots=True)
class EndpointSite:
    """A listening endpoint, and the models of its outgoing links.

    Attributes:
        endpoint: the endpoint.
        address: its listening address.
        run_start_s: the machine's clock's time at which the link models' time is 0.
        links: its link models by destination.
    """

    endpoint: Endpoint
    address: Address
    run_start_s: float
    links: Mapping[str, LinkModel]


class Differential(UpdateStage):
    """Both ends in one bridge; the averager's region itself sends no lossy blocks.

    Args:
        codec: the configured codec.
        num_params: P.
        site: the endpoint that the datagram channel accompanies.
        path: the path of this stage.
        saved: state of the stage from the checkpoint that the run resumes from.
    """

    def __init__(
        self,
        codec: DifferentialCodec,
        num_params: int,
        site: EndpointSite,
        path: StagedPath,
        saved: Mapping[str, Any],
    ) -> None:
        self._codec = codec
        self._site = site
        self._leader = path.leader.region
        self._clock = SystemClock()
        self._receiver = DifferentialReceiver(codec, num_params, site.endpoint, path, saved)
        self._sender: DifferentialSender | None = None
        self._channel = UdpChannel(
            site.address,
            self._receiver.on_group,
            self._receiver.on_report,
            self._clock,
            site.endpoint.is_revoked,
        )

    def routes(self) -> Routes:
        """See `UpdateStage`."""
        return {
            "loose_ask": self._on_ask,
            "loose_offer": self._on_offer,
            "loose_seen": self._on_seen,
        }

    def arrive(self, update: UpdateMessage, take: Pass, *, again: bool) -> None:
        """See `UpdateStage`."""
        self._receiver.arrive(update, take)

    def attach(self, reply: ReplyMessage) -> ReplyMessage:
        """See `UpdateStage`."""
        return self._receiver.attach(reply)

    def export(self, averager: Averager) -> dict[str, object]:
        """See `UpdateStage`."""
        return self._receiver.export(averager)

    def on_address(self, region: str, address: Address) -> None:
        """Set the address of the averager's region, which receives the lossy blocks."""
        if region != self._leader:
            return
        model = self._site.links.get(region)
        emulated = None if model is None else (model, self._site.run_start_s)
        self._sender = DifferentialSender(
            self._codec, self._site.endpoint, self._channel, region, address, self._clock, emulated
        )

    def depart(self, update: UpdateMessage, ship: Pass, *, again: bool) -> None:
        """See `UpdateStage`."""
        if self._sender is None:
            raise LinkDownError("the region that receives lossy blocks is not known")
        rest, load = self._sender.depart(update)
        ship(rest)
        self._sender.follow(load)

    def recall(self) -> Meta:
        """See `UpdateStage`."""
        stopped = None if self._sender is None else self._sender.recall()
        if stopped is None:
            return {"seq": None}
        return {"seq": stopped[0], "first_rank": stopped[1]}

    def status(self, links: Mapping[str, Any]) -> dict[str, Any]:
        """Return the counts of both ends; ``links`` gets the datagrams as a traffic class."""
        counts = self._channel.counts
        found: dict[str, Any] = {"blocks": self._receiver.counts(), "strange": counts.strange}
        for peer, num_bytes in counts.bytes_received.items():
            if peer in links:
                links[peer]["bytes_received"]["loose"] = num_bytes
        if self._sender is not None:
            sender = self._sender.sender
            found |= {"sent": asdict(sender.counts), "mbps": sender.mbps, "loss": sender.loss}
            if self._leader in links:
                links[self._leader]["bytes_sent"]["loose"] = sender.counts.bytes_sent
        return {"loose": found}

    def close(self) -> None:
        """See `UpdateStage`."""
        self._receiver.close()
        if self._sender is not None:
            self._sender.close()
        self._channel.close()

    def _on_ask(self, peer: str, message: Message) -> None:
        self._receiver.on_ask(peer, self._channel)

    def _on_offer(self, peer: str, message: Message) -> None:
        if self._sender is not None and peer == self._leader:
            self._sender.on_offer(message)

    def _on_seen(self, peer: str, message: Message) -> None:
        if self._sender is not None and peer == self._leader:
            self._sender.on_seen(message)
