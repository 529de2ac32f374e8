"""Differential transmission, a region's end: the lossy blocks of its updates leave from here."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

from geo_ray.clock import Clock
from geo_ray.codecs.differential import DifferentialCodec
from geo_ray.errors import DeadlineExceededError, LinkDownError
from geo_ray.runtime.paths.differential_messages import DATAGRAMS, notify
from geo_ray.strategies.base import Update
from geo_ray.transport.datagrams.datagram import MOST_UNDER_ONE_KEY, Secret
from geo_ray.transport.datagrams.pacing import Seen
from geo_ray.transport.datagrams.udp_channel import UdpChannel
from geo_ray.transport.datagrams.udp_sender import LossyLoad, UdpSender
from geo_ray.transport.emulation.datagram_shaper import DatagramShaper
from geo_ray.transport.emulation.link_model import LinkModel
from geo_ray.transport.endpoint.endpoint import Endpoint
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.message import Message
from geo_ray.transport.wire.sockets import Address

_SILENCE_S: Final = 5.0  # without a report for so long, a session is asked for anew
_GUESS_MBPS: Final = 10.0  # where nothing is known of a link


class DifferentialSender:
    """A region's end: sends lossy blocks to the averager's region.

    Args:
        codec: what the run is configured with.
        endpoint: this region's.
        channel: this region's.
        home: the averager's region.
        address: of the averager's endpoint; datagrams go to the same host.
        clock: for pacing.
        emulated: the link model of the way there and the clock's time at its 0; None for none.
    """

    def __init__(
        self,
        codec: DifferentialCodec,
        endpoint: Endpoint,
        channel: UdpChannel,
        home: str,
        address: Address,
        clock: Clock,
        emulated: tuple[LinkModel, float] | None = None,
    ) -> None:
        self._codec = codec
        self._endpoint = endpoint
        self._channel = channel
        self._home = home
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

    def depart(self, update: Update) -> tuple[Update, LossyLoad | None]:
        """Take the lossy blocks off an update; those of the last one leave no more."""
        self.sender.stop()
        coded = update.coded
        if coded is None or coded.lossy is None:
            return update, None
        lossy = coded.lossy
        # A copy: what the update came in is used again for the next request.
        data = memoryview(lossy.blocks_LK.numpy().tobytes())
        size = lossy.blocks_LK.shape[1]
        ids = tuple(lossy.ids_L.tolist())
        load = LossyLoad(update.epoch, update.seq, ids, data, size, lossy.bands)
        return replace(update, coded=replace(coded, lossy=None)), load

    def follow(self, load: LossyLoad | None) -> None:
        """The reliable part is on its way: let the blocks follow."""
        if load is None or not load.ids:
            return
        now_s = self._clock.now_s()
        if now_s - max(self._heard_s, self._asked_s) > _SILENCE_S:
            self._ask()  # the other end may have begun anew, and knows no session
        elif self.sender.sealed > MOST_UNDER_ONE_KEY:
            self._ask()  # another session, and with it another key
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
            _, key = self._endpoint.link_key(self._home, DATAGRAMS, outgoing=True, link_id=link_id)
        except LinkDownError:  # the offer was for a connection that is no more
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
        notify(self._endpoint, self._home, "loose_ask", {})

    def _send(self, datagram: bytes, band: int, bands: int) -> None:
        if self._shaper is not None:
            self._shaper.send(datagram)
        else:
            self._release(datagram, (bands - 1 - band) * 32 if self._codec.dscp else 0)

    def _release(self, datagram: bytes, tos: int = 0) -> None:
        if self._target is not None and not self._endpoint.is_revoked(self._home):
            self._channel.send(datagram, self._target, tos)

    def _is_drained(self, timeout_s: float) -> bool:
        try:
            self._endpoint.flush(self._home, timeout_s)
        except DeadlineExceededError:
            return False
        except LinkDownError:
            time.sleep(timeout_s)
            return False
        return True

    def _start_mbps(self) -> float:
        stats = self._endpoint.stats().get(self._home)
        known_mbps = None if stats is None else stats["estimate"].get("goodput_mbps")
        return known_mbps / 2 if known_mbps else _GUESS_MBPS
