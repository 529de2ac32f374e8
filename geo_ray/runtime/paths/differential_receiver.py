"""Differential transmission, the averager's end: updates are completed with lossy blocks here."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from geo_ray.codecs.differential import DifferentialCodec
from geo_ray.errors import GeoRayError, LinkDownError
from geo_ray.runtime.paths.base import StagedPath
from geo_ray.runtime.paths.differential_messages import DATAGRAMS, notify
from geo_ray.strategies.base import Reply, Update
from geo_ray.training.exchange.lossy_receiver import LossyReceiver
from geo_ray.transport.datagrams.datagram import BlockGroup, Secret, new_session
from geo_ray.transport.datagrams.pacing import Seen
from geo_ray.transport.datagrams.udp_channel import UdpChannel
from geo_ray.transport.endpoint.endpoint import Endpoint
from geo_ray.transport.wire.meta import Meta


@dataclass(slots=True)
class _Held:
    """An update that waits for its lossy blocks, until they are here or its grace is over."""

    update: Update
    missing: int
    go_on: Callable[[Update], None]
    timer: threading.Timer


class DifferentialReceiver:
    """The averager's end: takes in every region's lossy blocks.

    Args:
        codec: what the run is configured with.
        num_params: P.
        endpoint: this region's.
        path: tells a region that its update makes no sense, and the controller of what fails here.
        saved: what `export` gave for the checkpoint from which the run goes on, by region.
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
        """A region wants to send datagrams."""
        try:
            link_id, key = self._endpoint.link_key(peer, DATAGRAMS, outgoing=False)
        except LinkDownError:
            return  # it asks again
        session = new_session()
        channel.expect(peer, Secret.derived(session, key))
        offer: Meta = {"session": session, "link": link_id, "port": channel.port}
        notify(self._endpoint, peer, "loose_offer", offer)

    def on_group(self, peer: str, group: BlockGroup) -> None:
        """Lossy blocks have come; perhaps an update waits for them."""
        due = None
        with self._lock:
            received = self._of(peer)
            new = received.on_blocks(
                group.epoch, group.seq, group.first_rank, group.ids, group.blocks
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

    def arrive(self, update: Update, go_on: Callable[[Update], None]) -> None:
        """Complete an update, now or when its grace is over, and go on with it."""
        try:
            with self._lock:
                received = self._of(update.region)
                missing = received.begin(update) if self._codec.grace_s else 0
                if missing > 0:
                    held = self._hold(update, missing, go_on)
                    self._held[update.region] = held
                    held.timer.start()
                    return
                update = received.complete(update)
        except GeoRayError as error:
            self._path.refuse(update, error)
        else:
            go_on(update)

    def beside(self, reply: Reply) -> Reply:
        """The reply with the lossy blocks that were taken in."""
        with self._lock:
            received = self._of(reply.to)
            if reply.dropped:
                received.void(reply.seq)
                return reply
            return replace(reply, lossy=received.report(reply.seq))

    def export(self, last: Callable[[str], tuple[int, int]]) -> dict[str, object]:
        """What a checkpoint must know of the books, by region; see `LossyReceiver.export`."""
        with self._lock:
            found = {region: books.export(last(region)) for region, books in self._received.items()}
        return {region: state for region, state in found.items() if state is not None}

    def counts(self) -> dict[str, int]:
        """What became of lossy blocks, over all regions."""
        total: Counter[str] = Counter()
        with self._lock:
            for received in self._received.values():
                total.update(asdict(received.counts))
        return dict(total)

    def close(self) -> None:
        """Let go of what waits."""
        with self._lock:
            held, self._held = self._held, {}
        for one in held.values():
            one.timer.cancel()

    def _of(self, region: str) -> LossyReceiver:
        return self._received.setdefault(region, LossyReceiver(self._codec, self._num_params))

    def _hold(self, update: Update, missing: int, go_on: Callable[[Update], None]) -> _Held:
        release = partial(self._on_timer, update.region, update.seq)
        timer = threading.Timer(self._codec.grace_s, release)
        timer.daemon = True
        return _Held(update, missing, go_on, timer)

    def _on_timer(self, region: str, seq: int) -> None:
        with self._lock:
            held = self._held.get(region)
        if held is not None and held.update.seq == seq:
            self._release(region, held)

    def _release(self, region: str, held: _Held) -> None:
        with self._lock:
            if self._held.get(region) is not held:
                return  # the timer and the last block came together
            del self._held[region]
        held.timer.cancel()
        try:  # in a thread of the datagrams or of the timer: nobody else hears of an error
            try:
                with self._lock:
                    update = self._of(region).complete(held.update)
            except GeoRayError as error:
                self._path.refuse(held.update, error)
            else:
                held.go_on(update)
        except Exception as error:
            what = f"update {held.update.seq} of region '{region}'"
            self._path.fail(error, f"{what}, which waited for datagrams")
