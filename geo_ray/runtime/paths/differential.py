"""Differential transmission between bridges: the path of an update's lossy blocks.

A region's bridge sends the reliable part as any update, then the lossy blocks as datagrams, until
the next update comes (`DifferentialSender`). The averager's bridge completes updates with what is
here, and says beside each reply which blocks were taken in (`DifferentialReceiver`). A session's
key and port, and reports of what arrived, go over the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from geo_ray.clock import SystemClock
from geo_ray.codecs.base import Codec
from geo_ray.codecs.dgt import Dgt
from geo_ray.errors import GeoRayError, LinkDownError
from geo_ray.runtime.paths.differential_receiver import DifferentialReceiver
from geo_ray.runtime.paths.differential_sender import DifferentialSender
from geo_ray.strategies.base import Update
from geo_ray.transport.datagrams.udp_channel import UdpChannel
from geo_ray.transport.emulation.link_model import LinkModel
from geo_ray.transport.endpoint.endpoint import Endpoint
from geo_ray.transport.wire.message import Message
from geo_ray.transport.wire.meta import Meta
from geo_ray.transport.wire.sockets import Address


@dataclass(frozen=True, slots=True)
class PathEnds:
    """What the road is joined to.

    Attributes:
        endpoint: this region's.
        address: that it listens on.
        run_start_s: the machine's clock's time at which the link models' time is 0.
        links: the endpoint's link models by destination.
        refuse: tells a region that its update makes no sense.
    """

    endpoint: Endpoint
    address: Address
    run_start_s: float
    links: Mapping[str, LinkModel]
    refuse: Callable[[Update, GeoRayError], None]


class DifferentialPath:
    """Both ends in one bridge; a region that hosts the averager sends no lossy blocks.

    Args:
        codec: what the run is configured with.
        num_params: P.
        ends: what it is joined to.
    """

    def __init__(self, codec: Dgt, num_params: int, ends: PathEnds) -> None:
        self._codec = codec
        self._ends = ends
        self._clock = SystemClock()
        self.sink = DifferentialReceiver(codec, num_params, ends.endpoint, ends.refuse)
        self._hub: str | None = None
        self._feed: DifferentialSender | None = None
        self._channel = UdpChannel(
            ends.address, self.sink.on_group, self.sink.on_report, self._clock
        )

    def connect(self, hub: str, address: Address) -> None:
        """Send lossy blocks to the averager's region, whose endpoint is at ``address``."""
        model = self._ends.links.get(hub)
        emulated = None if model is None else (model, self._ends.run_start_s)
        self._feed = DifferentialSender(
            self._codec, self._ends.endpoint, self._channel, hub, address, self._clock, emulated
        )
        self._hub = hub

    def routes(self) -> dict[str, Callable[[str, Message], None]]:
        """Handlers of this road's messages by kind."""
        return {
            "loose_ask": lambda peer, _: self.sink.on_ask(peer, self._channel),
            "loose_offer": self._on_offer,
            "loose_seen": self._on_seen,
        }

    def send(self, update: Update, reliably: Callable[[Update], None]) -> None:
        """Send an update: its reliable part with ``reliably``, then its lossy blocks."""
        if self._feed is None:
            raise LinkDownError("there is no region to send lossy blocks to")
        rest, load = self._feed.depart(update)
        reliably(rest)
        self._feed.follow(load)

    def recall(self) -> Meta:
        """Stop sending lossy blocks; what did not leave, as a header."""
        stopped = None if self._feed is None else self._feed.recall()
        if stopped is None:
            return {"seq": None}
        return {"seq": stopped[0], "first_rank": stopped[1]}

    def status(self) -> dict[str, Any]:
        """Counts of both ends: plain values."""
        found: dict[str, Any] = {"blocks": self.sink.counts()}
        found["strange"] = self._channel.counts.strange
        if self._feed is not None:
            sender = self._feed.sender
            found |= {"sent": asdict(sender.counts), "mbps": sender.mbps, "loss": sender.loss}
        return found

    def count_into(self, links: Mapping[str, Any]) -> None:
        """Add the bytes of datagrams to an endpoint's books, as the class ``lossy``."""
        hub, feed = self._hub, self._feed
        if feed is not None and hub is not None and hub in links:
            links[hub]["bytes_out"]["loose"] = feed.sender.counts.bytes_out
        for peer, num_bytes in self._channel.counts.bytes_in.items():
            if peer in links:
                links[peer]["bytes_in"]["loose"] = num_bytes

    def close(self) -> None:
        """End all threads, free the socket."""
        self.sink.close()
        if self._feed is not None:
            self._feed.close()
        self._channel.close()

    def _on_offer(self, peer: str, message: Message) -> None:
        if self._feed is not None and peer == self._hub:
            self._feed.on_offer(message)

    def _on_seen(self, peer: str, message: Message) -> None:
        if self._feed is not None and peer == self._hub:
            self._feed.on_seen(message)


def road_for(codec: Codec | None, num_params: int, ends: PathEnds) -> DifferentialPath | None:
    """The road that updates' codec needs; None if it needs none."""
    differential = None if codec is None else codec.traits.differential
    return None if differential is None else DifferentialPath(differential, num_params, ends)
