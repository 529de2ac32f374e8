"""Paths of simulated updates to the averager: direct, lossy, scheduled and overlay."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Protocol

import torch

from geo_ray.base.errors import InvariantError
from geo_ray.codecs.base import DifferentialCodec, LossyBlocks
from geo_ray.experiment.experiment import Experiment
from geo_ray.simulator.clock import Scheduler
from geo_ray.simulator.network import Network
from geo_ray.training.lossy_blocks import LossyReceiver
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.payload_encoding import RegionWire
from geo_ray.transport.datagrams import TokenBucket, blocks_per_datagram
from geo_ray.transport.overlay.build import (
    build_coordinator,
    build_node,
    build_policy,
    grid_of,
    links_of,
    tick_s,
)
from geo_ray.transport.overlay.messages import (
    ControlMessage,
    Ready,
    SegmentPart,
    Sent,
    Starved,
    Stuck,
    Whole,
)
from geo_ray.transport.overlay.node import Finished, Node
from geo_ray.transport.overlay.plan import SUM
from geo_ray.transport.uploads import (
    Decision,
    Drop,
    Grant,
    Take,
    TransferScheduler,
    TransfersConfig,
    UploadRequest,
)
from geo_ray.transport.wire.fields import Meta

_TICK_S: Final = 0.01  # datagrams of one tick arrive at the same time


class ExchangeHost(Protocol):
    """The simulated run, as the ways of updates use it."""

    def ship(self, name: str, update: UpdateMessage) -> float:
        """Send an update of a region; return when it arrives."""

    def take_in(self, update: UpdateMessage) -> None:
        """Pass an update to the averager."""

    def deliver(self, reply: ReplyMessage) -> None:
        """Hand a region its answer."""

    def skip(self, region: str, attempt: int, seq: int) -> None:
        """Make the averager answer an update without taking it in."""

    def version(self) -> int:
        """Commits of the averager so far."""

    def is_done(self, name: str) -> bool:
        """Tell whether a region has finished training."""


@dataclass(slots=True)
class _Flow:
    update: UpdateMessage
    lossy: LossyBlocks
    bucket: TokenBucket | None
    next_rank: int = 0


@dataclass(slots=True)
class _Held:
    update: UpdateMessage
    missing: int


class SimLossy:
    """Lossy blocks from every region to the averager.

    Args:
        codec: configured codec.
        num_params: P.
        network: links.
        scheduler: virtual time.
        averager_region: averager's region.
        host: tells whether a region has finished; its blocks are then not needed.
    """

    def __init__(
        self,
        codec: DifferentialCodec,
        num_params: int,
        network: Network,
        scheduler: Scheduler,
        averager_region: str,
        host: ExchangeHost,
    ) -> None:
        self._codec = codec
        self._num_params = num_params
        self._network = network
        self._scheduler = scheduler
        self._averager_region = averager_region
        self._host = host
        self._flows: dict[str, _Flow] = {}
        self._held: dict[str, _Held] = {}
        self.books: dict[str, LossyReceiver] = {}

    def recall(self, name: str, wire: RegionWire) -> None:
        """Stop sending a region's blocks, because its next update contains the rest."""
        flow = self._flows.pop(name, None)
        if flow is not None:
            wire.unsent(flow.update.seq, flow.next_rank)

    def depart(self, name: str, update: UpdateMessage) -> None:
        """Send an update: its reliable part, then its lossy blocks.

        Args:
            name: the sender; in the averager's own region nothing needs a road.
            update: as it was encoded.
        """
        coded = update.coded
        if coded is None or coded.lossy is None or name == self._averager_region:
            self._host.ship(name, update)
            return
        arrival_s = self._host.ship(name, replace(update, coded=replace(coded, lossy=None)))
        rate_mbps = self._codec.rate_mbps
        bucket = None if rate_mbps is None else TokenBucket(rate_mbps)
        flow = self._flows[name] = _Flow(update, coded.lossy, bucket)
        if self._codec.loose == "udp":
            acknowledged_s = arrival_s + self._network.delay_s(self._averager_region, name)
            self._scheduler.at(acknowledged_s, partial(self._tick, name, flow))

    def arrive(self, update: UpdateMessage) -> None:
        """Complete an update, now or when its grace period is over, and take it in."""
        books = self._of(update.region)
        missing = books.begin(update) if self._codec.grace_s else 0
        if missing <= 0:
            self._host.take_in(books.complete(update))
            return
        held = self._held[update.region] = _Held(update, missing)
        self._scheduler.after(self._codec.grace_s, partial(self._release, held))

    def attach(self, reply: ReplyMessage) -> ReplyMessage:
        """Return the reply with the report of lossy blocks."""
        books = self._of(reply.to)
        if reply.dropped:
            books.void(reply.seq)
            return reply
        return replace(reply, lossy=books.report(reply.seq))

    def export(self, last: Callable[[str], tuple[int, int]]) -> dict[str, object]:
        """Return the accounting for a checkpoint, by region; see `LossyReceiver.export`."""
        found = {region: books.export(last(region)) for region, books in self.books.items()}
        return {region: state for region, state in found.items() if state is not None}

    def restore(self, saved: object) -> None:
        """Restore the result of `export`."""
        if isinstance(saved, dict):
            for region, state in saved.items():
                self._of(region).restore(state)

    def _of(self, region: str) -> LossyReceiver:
        return self.books.setdefault(region, LossyReceiver(self._codec, self._num_params))

    def _tick(self, name: str, flow: _Flow) -> None:
        """Send as many datagrams as the link takes until the next tick."""
        if self._flows.get(name) is not flow or self._host.is_done(name):
            return
        now_s, network, leader = self._scheduler.now_s, self._network, self._averager_region
        size = flow.lossy.blocks_LK.shape[1]
        per_datagram, count = blocks_per_datagram(size), flow.lossy.ids_L.numel()
        arrived: list[tuple[int, int]] = []
        latest_s = now_s
        while flow.next_rank < count and network.free_at_s(name, leader) < now_s + _TICK_S:
            first, last = flow.next_rank, min(count, flow.next_rank + per_datagram)
            size_bytes = (last - first) * size
            if flow.bucket is not None and flow.bucket.take(now_s, size_bytes) > 0.0:
                break
            when_s = network.datagram_s(now_s, name, leader, size_bytes)
            if when_s is not None:
                arrived.append((first, last))
                latest_s = max(latest_s, when_s)
            flow.next_rank = last
        if arrived:
            self._scheduler.at(latest_s, partial(self._arrived, name, flow, arrived))
        if flow.next_rank < count:
            self._scheduler.after(_TICK_S, partial(self._tick, name, flow))

    def _arrived(self, name: str, flow: _Flow, runs: list[tuple[int, int]]) -> None:
        books, update, lossy = self._of(name), flow.update, flow.lossy
        new = 0
        for first, last in runs:
            ids = lossy.ids_L[first:last].tolist()
            blocks = [row.tobytes() for row in lossy.blocks_LK[first:last].numpy()]
            new += books.on_blocks(update.attempt, update.seq, first, ids, blocks)
        held = self._held.get(name)
        if held is not None and held.update.seq == update.seq:
            held.missing -= new
            if held.missing <= 0:
                self._release(held)

    def _release(self, held: _Held) -> None:
        region = held.update.region
        if self._held.get(region) is held:
            del self._held[region]
            self._host.take_in(self._of(region).complete(held.update))


class SimTurns:
    """Senders and the averager's upload server in one.

    Args:
        config: configuration of upload scheduling.
        averager_region: averager's region.
        scheduler: virtual time.
        network: round trips between regions.
        host: sends updates, passes them to `arrived` on arrival, and has the averager.
    """

    def __init__(
        self,
        config: TransfersConfig,
        averager_region: str,
        scheduler: Scheduler,
        network: Network,
        host: ExchangeHost,
    ) -> None:
        self._config = config
        self._averager_region = averager_region
        self._time = scheduler
        self._network = network
        self._host = host
        self._line = TransferScheduler(config)
        self._updates: dict[str, UpdateMessage] = {}  # open ones by region
        self._closed: set[str] = set()  # regions that must wait for a grant
        self._wakes_s = math.inf

    def send(self, name: str, update: UpdateMessage) -> None:
        """A region has an update."""
        self._updates[name] = update
        if name == self._averager_region:
            self.arrived(update)
            return
        ask = self._ask_of(update)
        there_s = self._network.delay_s(name, self._averager_region)
        back_s = self._network.delay_s(self._averager_region, name)
        self._line.rates.latency_s[name] = there_s + back_s
        if name not in self._closed or update.size_bytes <= self._config.small_bytes:
            self._line.began(self._time.now_s + there_s, ask)
            self._host.ship(name, update)
        else:
            self._time.after(there_s, lambda: self._decide(self._asked(ask)))

    def arrived(self, update: UpdateMessage) -> None:
        """An update is at the averager."""
        now_s, version = self._time.now_s, self._host.version()
        self._decide(self._line.arrived(now_s, version, self._ask_of(update)))

    def _asked(self, ask: UploadRequest) -> list[Decision]:
        return self._line.ask(self._time.now_s, self._host.version(), ask)

    @staticmethod
    def _ask_of(update: UpdateMessage) -> UploadRequest:
        norm = float(update.payload_P.norm()) if update.coded is None else 0.0
        return UploadRequest(
            update.region,
            update.attempt,
            update.seq,
            update.size_bytes,
            update.base_version,
            norm,
            update.final,
        )

    def _decide(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Take(ask):
                    self._host.take_in(self._updates[ask.region])
                    self._note_gate(ask.region)
                case Drop(ask):
                    self._host.skip(ask.region, ask.attempt, ask.seq)
                    self._note_gate(ask.region)
                case Grant(ask):
                    back_s = self._network.delay_s(self._averager_region, ask.region)
                    self._time.after(back_s, partial(self._granted, ask.region))
        self._wake()

    def _granted(self, name: str) -> None:
        self._host.ship(name, self._updates[name])

    def _note_gate(self, name: str) -> None:
        (self._closed.discard if self._line.is_quiet else self._closed.add)(name)

    def _wake(self) -> None:
        deadline_s = self._line.next_deadline_s()
        if deadline_s is None or deadline_s >= self._wakes_s:
            return
        self._wakes_s = deadline_s

        def tick() -> None:
            if self._wakes_s == deadline_s:
                self._wakes_s = math.inf
                self._decide(self._line.tick(self._time.now_s, self._host.version()))

        self._time.idly_at(deadline_s, tick)


_TO_COORDINATOR: Final = (Ready, Sent, Whole, Stuck, Starved)


@dataclass(slots=True)
class _Round:
    updates: dict[str, UpdateMessage] = field(default_factory=dict)
    replies: dict[str, ReplyMessage] = field(default_factory=dict)


class SimOverlay:
    """All regions' overlay nodes, and the coordinator next to the averager.

    Args:
        experiment: experiment with a valid ``overlay``, see `overlay_problems`.
        num_params: P.
        network: links.
        scheduler: virtual time.
        host: receives updates, and passes answers to `answered` and to the regions.
    """

    def __init__(
        self,
        experiment: Experiment,
        num_params: int,
        network: Network,
        scheduler: Scheduler,
        host: ExchangeHost,
    ) -> None:
        mean, config = experiment.strategy.traits.averager.round_mean, experiment.overlay
        if mean is None:
            raise InvariantError(f"an overlay cannot sum the rounds of {experiment.strategy}")
        self._mean, self._network, self._time = mean, network, scheduler
        self._host = host
        self._names = sorted(experiment.region_names)
        self._leader = leader = self._names.index(experiment.averager_region)
        num, seed, grid = len(self._names), experiment.seed, grid_of(config, num_params)
        links = links_of(config, num)
        policy = build_policy(config, self._names, leader, grid, links, seed)
        self._coordinator = build_coordinator(leader, policy, links, grid, seed)
        self._nodes = [
            build_node(config, me, num, leader, grid, fused=policy.fused) for me in range(num)
        ]
        for node in self._nodes:
            for peer in range(num):
                node.set_rtt(peer, self._delay_s(node.me, peer) + self._delay_s(peer, node.me))
        self._rounds: dict[int, _Round] = {}
        self._committed = 0
        self._flying = 0  # messages and parts in flight
        self._wakes_s: float | None = None
        self._tick_s = tick_s(config)
        self._is_ticking = False
        self._coordinator.open(1)
        self._settle(leader)

    def send(self, name: str, update: UpdateMessage) -> None:
        """A region takes part in the next round."""
        node = self._nodes[self._names.index(name)]
        rnd = node.finished + 1
        self._rounds.setdefault(rnd, _Round()).updates[name] = update
        self._time.hold()  # until it has its answer: all that happens here happens idly
        own_P = update.payload_P.detach().contiguous().cpu().numpy()
        node.contribute(rnd, own_P, self._mean.weight_of(update.num_samples), {}, self._time.now_s)
        self._settle(node.me)
        self._tick()

    def answered(self, reply: ReplyMessage) -> None:
        """The averager answers one of the updates of the round that is being committed."""
        self._rounds[self._committed].replies[reply.to] = reply

    # ------------------------------------------------------------------ what goes out

    def _settle(self, *changed: int) -> None:
        """Deliver all messages of nodes and coordinator after a change."""
        todo = sorted(set(changed) | {self._leader})
        while todo:
            node = self._nodes[todo.pop(0)]
            more = self._hand_out(node.me, node.out)
            self._send_parts(node)
            node.acknowledge()
            more |= self._hand_out(node.me, node.out)
            if self._commit():
                more.add(self._leader)
            more |= self._hand_out(self._leader, self._coordinator.out)
            self._finish(node)
            todo = sorted(set(todo) | more)
        self._wake()

    def _hand_out(self, src: int, out: list[tuple[int, ControlMessage]]) -> set[int]:
        """Send messages; returns the nodes in the same region, which they reach at once."""
        reached = set()
        while out:
            dst, message = out.pop(0)
            if dst == src:
                self._on_message(src, dst, message)
                reached.add(dst)
            else:
                heard = partial(self._on_message, src, dst, message)
                self._fly(self._time.now_s + self._delay_s(src, dst), heard, dst)
        return reached

    def _on_message(self, src: int, dst: int, message: ControlMessage) -> None:
        if isinstance(message, _TO_COORDINATOR):
            self._coordinator.on_message(src, message, self._time.now_s)
        else:
            self._nodes[dst].on_message(src, message, self._time.now_s)

    def _send_parts(self, node: Node) -> None:
        """Send parts round-robin over the receivers, as long as there are any."""
        targets = node.targets()
        while targets:
            more = []
            for peer in targets:
                part = node.next_part(peer, self._time.now_s)
                if part is not None:
                    self._send_part(node.me, peer, part)
                    more.append(peer)
            targets = more

    def _send_part(self, src: int, dst: int, part: SegmentPart) -> None:
        traffic = "update" if part.phase == SUM else "reply"
        here, there, size_bytes = self._names[src], self._names[dst], len(part.data)
        arrival_s = self._network.arrival_s(self._time.now_s, here, there, size_bytes, traffic)
        node = self._nodes[dst]
        self._fly(arrival_s, lambda: node.on_part(src, part, self._time.now_s), dst)

    def _fly(self, arrival_s: float, land: Callable[[], None], dst: int) -> None:
        self._flying += 1

        def arrive() -> None:
            self._flying -= 1
            land()
            self._settle(dst)

        self._time.idly_at(arrival_s, arrive)

    def _delay_s(self, src: int, dst: int) -> float:
        return self._network.delay_s(self._names[src], self._names[dst])

    # ------------------------------------------------------------------ rounds

    def _commit(self) -> bool:
        """Commit the next round if its sum is complete at the averager."""
        leader, rnd = self._nodes[self._leader], self._committed + 1
        is_whole = leader.is_whole(rnd) if leader.fused else leader.is_summed(rnd)
        if not is_whole or not self._coordinator.is_complete(rnd):
            return False
        self._committed = rnd
        self._coordinator.seal(rnd)
        mean_P, updates = torch.from_numpy(leader.mean(rnd)), self._rounds[rnd].updates
        for name in sorted(updates):
            self._host.take_in(replace(updates[name], payload_P=mean_P))
        replies = self._rounds[rnd].replies
        if set(replies) != set(self._names):
            raise InvariantError(f"a round of {sorted(updates)} was answered to {sorted(replies)}")
        if not leader.fused:
            leader.set_result(rnd, replies[self._names[0]].payload_P.contiguous().numpy())
        about: list[tuple[int, Meta]] = [(node.me, {}) for node in self._nodes]
        self._coordinator.commit(rnd, about, self._time.now_s)
        self._coordinator.open(rnd + 1)
        return True

    def _finish(self, node: Node) -> None:
        done, node.done[:] = list(node.done), []
        for each in done:
            self._answer(node, each)

    def _answer(self, node: Node, done: Finished) -> None:
        name, entry = self._names[node.me], self._rounds[done.rnd]
        reply = replace(entry.replies.pop(name), payload_P=torch.from_numpy(done.result_P))
        if not entry.replies:
            del self._rounds[done.rnd]
        self._time.let_go()
        # Deferred, since the region may continue and send at once, in the middle of this round.
        self._time.after(0.0, partial(self._host.deliver, reply))

    # ------------------------------------------------------------------ time

    def _wake(self) -> None:
        wakes_s = self._coordinator.wakes_s
        if wakes_s is not None and wakes_s != self._wakes_s:
            self._wakes_s = wakes_s
            tick = partial(self._coordinator.tick, wakes_s)
            self._fly(wakes_s, tick, self._leader)

    def _tick(self) -> None:
        """Look for stalled transfers, as long as there are any transfers."""
        if self._is_ticking:
            return
        self._is_ticking = True

        def look() -> None:
            self._is_ticking = False
            for node in self._nodes:
                node.tick(self._time.now_s)
            self._settle(*range(len(self._nodes)))
            if self._flying:
                self._tick()

        self._time.idly_at(self._time.now_s + self._tick_s, look)


def build_paths(
    experiment: Experiment,
    num_params: int,
    network: Network,
    scheduler: Scheduler,
    host: ExchangeHost,
) -> tuple[SimLossy | None, SimTurns | None, SimOverlay | None]:
    """Build those that a run has: updates in two parts, turns, an overlay."""
    averager_region, up = experiment.averager_region, experiment.codec.up
    differential = None if up is None else up.traits.differential
    lossy = turns = overlay = None
    if differential is not None:
        lossy = SimLossy(differential, num_params, network, scheduler, averager_region, host)
    if experiment.transfers is not None:
        turns = SimTurns(
            experiment.transfers,
            averager_region,
            scheduler,
            network,
            host,
        )
    if experiment.overlay.kind != "star" and len(experiment.regions) > 1:
        overlay = SimOverlay(experiment, num_params, network, scheduler, host)
    return lossy, turns, overlay
