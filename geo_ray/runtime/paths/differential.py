"""Differential transmission between bridges: an update's lossy blocks go beside its reliable part.

A region's bridge sends the reliable part as any update, then the lossy blocks as datagrams, until
the next update comes (`DifferentialSender`). The averager's bridge completes updates with the
blocks that are here, and answers with the blocks that it took in (`DifferentialReceiver`). A
session's key and port, and reports of what arrived, go over the connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from geo_ray.clock import SystemClock
from geo_ray.codecs.differential import DifferentialCodec
from geo_ray.errors import LinkDownError
from geo_ray.runtime.paths.base import Pass, StagedPath, UpdateStage
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
class EndpointSite:
    """An endpoint that listens, and the links that lead away from it.

    Attributes:
        endpoint: the endpoint.
        address: that it listens on.
        run_start_s: the machine's clock's time at which the link models' time is 0.
        links: its link models by destination.
    """

    endpoint: Endpoint
    address: Address
    run_start_s: float
    links: Mapping[str, LinkModel]


class Differential:
    """Both ends in one bridge; the averager's region itself sends no lossy blocks.

    Args:
        codec: what the run is configured with.
        num_params: P.
        site: the endpoint beside which datagrams go.
        path: that this is a stage of.
        saved: what the stage has left in the checkpoint from which the run goes on.
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
        self._home = path.home.region
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

    @property
    def stage(self) -> UpdateStage:
        """What the path calls."""
        return UpdateStage(
            depart=self._depart,
            recall=self._recall,
            arrive=lambda update, take, again: self._receiver.arrive(update, take),
            beside=self._receiver.beside,
            on_address=self._on_address,
            routes={
                "loose_ask": lambda peer, _: self._receiver.on_ask(peer, self._channel),
                "loose_offer": self._on_offer,
                "loose_seen": self._on_seen,
            },
            export=self._receiver.export,
            status=self._status,
            close=self._close,
        )

    def _on_address(self, peer: str, address: Address) -> None:
        """Lossy blocks go to the averager's region."""
        if peer != self._home:
            return
        model = self._site.links.get(peer)
        emulated = None if model is None else (model, self._site.run_start_s)
        self._sender = DifferentialSender(
            self._codec, self._site.endpoint, self._channel, peer, address, self._clock, emulated
        )

    def _depart(self, update: Update, ship: Pass, again: bool) -> None:
        if self._sender is None:
            raise LinkDownError("there is no region to send lossy blocks to")
        rest, load = self._sender.depart(update)
        ship(rest)
        self._sender.follow(load)

    def _recall(self) -> Meta:
        stopped = None if self._sender is None else self._sender.recall()
        if stopped is None:
            return {"seq": None}
        return {"seq": stopped[0], "first_rank": stopped[1]}

    def _status(self, links: Mapping[str, Any]) -> dict[str, Any]:
        """Counts of both ends; bytes of datagrams are a class of their own in ``links``."""
        counts = self._channel.counts
        found: dict[str, Any] = {"blocks": self._receiver.counts(), "strange": counts.strange}
        for peer, num_bytes in counts.bytes_in.items():
            if peer in links:
                links[peer]["bytes_in"]["loose"] = num_bytes
        if self._sender is not None:
            sender = self._sender.sender
            found |= {"sent": asdict(sender.counts), "mbps": sender.mbps, "loss": sender.loss}
            if self._home in links:
                links[self._home]["bytes_out"]["loose"] = sender.counts.bytes_out
        return {"loose": found}

    def _close(self) -> None:
        self._receiver.close()
        if self._sender is not None:
            self._sender.close()
        self._channel.close()

    def _on_offer(self, peer: str, message: Message) -> None:
        if self._sender is not None and peer == self._home:
            self._sender.on_offer(message)

    def _on_seen(self, peer: str, message: Message) -> None:
        if self._sender is not None and peer == self._home:
            self._sender.on_seen(message)
