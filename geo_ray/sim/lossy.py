"""Loose blocks on the virtual clock: they follow the reliable part, share its link, and get lost.

The books at both ends are those of the runtime. What is modelled of the road: datagrams leave in
order of rank as fast as the link takes them, after the reliable part is acknowledged and until the
next update; each is lost with the link's loss. What is not: sessions, and a pacing that errs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from geo_ray.codecs.base import LossyBlocks
from geo_ray.codecs.differential import DifferentialCodec
from geo_ray.sim.network import Network
from geo_ray.sim.scheduler import Scheduler
from geo_ray.strategies.base import Reply, Update
from geo_ray.training.exchange.lossy_receiver import LossyReceiver
from geo_ray.training.exchange.region_wire import RegionWire
from geo_ray.transport.datagrams.datagram import blocks_per_datagram
from geo_ray.transport.datagrams.pacing import TokenBucket

_TICK_S: Final = 0.01  # datagrams of one tick arrive together


@dataclass(slots=True)
class _Flow:
    update: Update
    lossy: LossyBlocks
    bucket: TokenBucket | None
    next_rank: int = 0


@dataclass(slots=True)
class _Held:
    update: Update
    go_on: Callable[[Update], None]
    missing: int


class SimLossy:
    """The road of lossy blocks from every region to the averager.

    Args:
        codec: what the run is configured with.
        num_params: P.
        network: its links.
        scheduler: virtual time.
        averager_region: the averager's region.
        is_over: whether a region has finished; then its blocks need not flow.
    """

    def __init__(
        self,
        codec: DifferentialCodec,
        num_params: int,
        network: Network,
        scheduler: Scheduler,
        averager_region: str,
        is_over: Callable[[str], bool],
    ) -> None:
        self._codec = codec
        self._num_params = num_params
        self._network = network
        self._scheduler = scheduler
        self._averager_region = averager_region
        self._is_over = is_over
        self._flows: dict[str, _Flow] = {}
        self._held: dict[str, _Held] = {}
        self.books: dict[str, LossyReceiver] = {}

    def recall(self, name: str, wire: RegionWire) -> None:
        """The next update comes: what has not left goes with it."""
        flow = self._flows.pop(name, None)
        if flow is not None:
            wire.unsent(flow.update.seq, flow.next_rank)

    def depart(self, name: str, update: Update, carry: Callable[[Update], float]) -> None:
        """Send an update: its reliable part, then its lossy blocks.

        Args:
            name: the sender; in the averager's own region nothing needs a road.
            update: as it was encoded.
            carry: puts the reliable part on its way and tells when it arrives.
        """
        coded = update.coded
        if coded is None or coded.lossy is None or name == self._averager_region:
            carry(update)
            return
        arrival_s = carry(replace(update, coded=replace(coded, lossy=None)))
        rate_mbps = self._codec.rate_mbps
        bucket = None if rate_mbps is None else TokenBucket(rate_mbps)
        flow = self._flows[name] = _Flow(update, coded.lossy, bucket)
        if self._codec.loose == "udp":
            acknowledged_s = arrival_s + self._network.delay_s(self._averager_region, name)
            self._scheduler.at(acknowledged_s, lambda: self._tick(name, flow))

    def arrive(self, update: Update, go_on: Callable[[Update], None]) -> None:
        """Complete an update, now or when its grace is over, and go on with it."""
        books = self._of(update.region)
        missing = books.begin(update) if self._codec.grace_s else 0
        if missing <= 0:
            go_on(books.complete(update))
            return
        held = self._held[update.region] = _Held(update, go_on, missing)
        self._scheduler.after(self._codec.grace_s, lambda: self._release(held))

    def beside(self, reply: Reply) -> Reply:
        """The reply with what is to be told of lossy blocks."""
        books = self._of(reply.to)
        if reply.dropped:
            books.void(reply.seq)
            return reply
        return replace(reply, lossy=books.report(reply.seq))

    def export(self, last: Callable[[str], tuple[int, int]]) -> dict[str, object]:
        """What a checkpoint must know of the books, by region; see `LossyReceiver.export`."""
        found = {region: books.export(last(region)) for region, books in self.books.items()}
        return {region: state for region, state in found.items() if state is not None}

    def restore(self, saved: object) -> None:
        """Become what `export` saved."""
        if isinstance(saved, dict):
            for region, state in saved.items():
                self._of(region).restore(state)

    def _of(self, region: str) -> LossyReceiver:
        return self.books.setdefault(region, LossyReceiver(self._codec, self._num_params))

    def _tick(self, name: str, flow: _Flow) -> None:
        """Send what the link takes until the next tick."""
        if self._flows.get(name) is not flow or self._is_over(name):
            return
        now_s, network, home = self._scheduler.now_s, self._network, self._averager_region
        size = flow.lossy.blocks_LK.shape[1]
        per_datagram, count = blocks_per_datagram(size), flow.lossy.ids_L.numel()
        arrived: list[tuple[int, int]] = []
        latest_s = now_s
        while flow.next_rank < count and network.free_at_s(name, home) < now_s + _TICK_S:
            first, last = flow.next_rank, min(count, flow.next_rank + per_datagram)
            size_bytes = (last - first) * size
            if flow.bucket is not None and flow.bucket.take(now_s, size_bytes) > 0.0:
                break
            when_s = network.datagram_s(now_s, name, home, size_bytes)
            if when_s is not None:
                arrived.append((first, last))
                latest_s = max(latest_s, when_s)
            flow.next_rank = last
        if arrived:
            self._scheduler.at(latest_s, lambda: self._arrived(name, flow, arrived))
        if flow.next_rank < count:
            self._scheduler.after(_TICK_S, lambda: self._tick(name, flow))

    def _arrived(self, name: str, flow: _Flow, runs: list[tuple[int, int]]) -> None:
        books, update, lossy = self._of(name), flow.update, flow.lossy
        new = 0
        for first, last in runs:
            ids = lossy.ids_L[first:last].tolist()
            blocks = [row.tobytes() for row in lossy.blocks_LK[first:last].numpy()]
            new += books.on_blocks(update.epoch, update.seq, first, ids, blocks)
        held = self._held.get(name)
        if held is not None and held.update.seq == update.seq:
            held.missing -= new
            if held.missing <= 0:
                self._release(held)

    def _release(self, held: _Held) -> None:
        region = held.update.region
        if self._held.get(region) is held:
            del self._held[region]
            held.go_on(self._of(region).complete(held.update))
