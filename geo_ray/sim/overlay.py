"""Simulates rounds over an overlay with the runtime's own coordinator, nodes and policies.

The state machines of a real run decide who sends what to whom, and when. Their parts take the time
of the emulated links, one after the other in each direction; control messages take one delay. Every
pair of regions has links of its own. The simulation leaves out lines that several pairs share, the
time that processors take for adding and copying, and connections that break. A link that carries
nothing for ``transfer.stall_s`` is avoided, as in a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import torch

from geo_ray.config.experiment import Experiment
from geo_ray.errors import InvariantError
from geo_ray.overlay.build import (
    build_coordinator,
    build_node,
    build_policy,
    grid_of,
    links_of,
    tick_s,
)
from geo_ray.overlay.messages import ControlMessage, Ready, SegmentPart, Sent, Starved, Stuck, Whole
from geo_ray.overlay.node import Finished, Node
from geo_ray.overlay.plan import SUM
from geo_ray.sim.network import Network
from geo_ray.sim.scheduler import Scheduler
from geo_ray.strategies.base import Reply, Update
from geo_ray.transport.wire.meta import Meta

_TO_COORDINATOR: Final = (Ready, Sent, Whole, Stuck, Starved)


@dataclass(slots=True)
class _Round:
    updates: dict[str, Update] = field(default_factory=dict)
    replies: dict[str, Reply] = field(default_factory=dict)


class SimOverlay:
    """All regions' ends of the overlay, and the coordinator beside the averager.

    Args:
        experiment: its ``overlay`` and ``strategy`` fit, see `check_overlay`.
        num_params: P.
        network: its links.
        scheduler: virtual time.
        take: lets the averager take in an update; its answers come to `answered`.
        deliver: hands a region its answer.
    """

    def __init__(
        self,
        experiment: Experiment,
        num_params: int,
        network: Network,
        scheduler: Scheduler,
        take: Callable[[Update], None],
        deliver: Callable[[Reply], None],
    ) -> None:
        mean, config = experiment.strategy.traits.averager.round_mean, experiment.overlay
        if mean is None:
            raise InvariantError(f"an overlay cannot sum the rounds of {experiment.strategy}")
        self._mean, self._network, self._time = mean, network, scheduler
        self._take, self._deliver = take, deliver
        self._names = sorted(experiment.region_names)
        self._home = home = self._names.index(experiment.averager_region)
        num, seed, grid = len(self._names), experiment.seed, grid_of(config, num_params)
        links = links_of(config, num)
        policy = build_policy(config, self._names, home, grid, links, seed)
        self._coordinator = build_coordinator(home, policy, links, grid, seed)
        self._nodes = [
            build_node(config, me, num, home, grid, fused=policy.fused) for me in range(num)
        ]
        for node in self._nodes:
            for peer in range(num):
                node.set_rtt(peer, self._delay_s(node.me, peer) + self._delay_s(peer, node.me))
        self._rounds: dict[int, _Round] = {}
        self._committed = 0
        self._flying = 0  # messages and parts under way
        self._wakes_s: float | None = None
        self._tick_s = tick_s(config)
        self._is_ticking = False
        self._coordinator.open(1)
        self._settle(home)

    def send(self, name: str, update: Update) -> None:
        """A region takes part in the next round."""
        node = self._nodes[self._names.index(name)]
        rnd = node.finished + 1
        self._rounds.setdefault(rnd, _Round()).updates[name] = update
        self._time.hold()  # until it has its answer: all that happens here happens idly
        own_P = update.payload_P.detach().contiguous().cpu().numpy()
        node.contribute(rnd, own_P, self._mean.weight_of(update.num_samples), {}, self._time.now_s)
        self._settle(node.me)
        self._tick()

    def answered(self, reply: Reply) -> None:
        """The averager answers one of the updates of the round that is being committed."""
        self._rounds[self._committed].replies[reply.to] = reply

    # ------------------------------------------------------------------ what goes out

    def _settle(self, *changed: int) -> None:
        """Carry what regions, and the coordinator, have to say after something has changed."""
        todo = sorted(set(changed) | {self._home})
        while todo:
            node = self._nodes[todo.pop(0)]
            more = self._hand_out(node.me, node.out)
            self._send_parts(node)
            node.acknowledge()
            more |= self._hand_out(node.me, node.out)
            if self._commit():
                more.add(self._home)
            more |= self._hand_out(self._home, self._coordinator.out)
            self._finish(node)
            todo = sorted(set(todo) | more)
        self._wake()

    def _hand_out(self, src: int, out: list[tuple[int, ControlMessage]]) -> set[int]:
        """Say what is to be said; whom it has reached already, being in the same region."""
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
        """One to each region in turn, as long as there are any."""
        targets = node.targets()
        while targets:
            more = []
            for peer in targets:
                part = node.next_part(peer, self._time.now_s)
                if part is not None:
                    self._carry(node.me, peer, part)
                    more.append(peer)
            targets = more

    def _carry(self, src: int, dst: int, part: SegmentPart) -> None:
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
        """Let the averager take the next round in, if its sum is whole where the averager is."""
        home, rnd = self._nodes[self._home], self._committed + 1
        is_whole = home.is_whole(rnd) if home.fused else home.is_summed(rnd)
        if not is_whole or not self._coordinator.is_complete(rnd):
            return False
        self._committed = rnd
        self._coordinator.seal(rnd)
        mean_P, updates = torch.from_numpy(home.mean(rnd)), self._rounds[rnd].updates
        for name in sorted(updates):
            self._take(replace(updates[name], payload_P=mean_P))
        replies = self._rounds[rnd].replies
        if set(replies) != set(self._names):
            raise InvariantError(f"a round of {sorted(updates)} was answered to {sorted(replies)}")
        if not home.fused:
            home.set_result(rnd, replies[self._names[0]].payload_P.contiguous().numpy())
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
        # Not in the middle of a round's bookkeeping: the region may go on, and speak, at once.
        self._time.after(0.0, lambda: self._deliver(reply))

    # ------------------------------------------------------------------ time

    def _wake(self) -> None:
        wakes_s = self._coordinator.wakes_s
        if wakes_s is not None and wakes_s != self._wakes_s:
            self._wakes_s = wakes_s
            tick = partial(self._coordinator.tick, wakes_s)
            self._fly(wakes_s, tick, self._home)

    def _tick(self) -> None:
        """Look for transfers that make no progress, as long as there are any."""
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
