"""A discrete-event model of bridges whose lines are shared: what a round takes, without sockets.

The very coordinator and nodes of a run, over a network in which every region has an uplink and a
downlink that its transfers share fairly, every pair may have a limit of its own, and every message
a delay. Only parts take time on a line. For tests and predictions.

Shape legend: N = regions; rows send, columns receive.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final

import numpy as np
from numpy.typing import NDArray

from geo_ray.base.errors import InvariantError
from geo_ray.transport.overlay.coordinator import Coordinator
from geo_ray.transport.overlay.messages import (
    ControlMessage,
    Ready,
    SegmentPart,
    Sent,
    Starved,
    Stuck,
    Whole,
)
from geo_ray.transport.overlay.node import Node
from geo_ray.transport.overlay.plan import Grid
from geo_ray.transport.overlay.vector import Floats

_TO_COORDINATOR: Final = (Ready, Sent, Whole, Stuck, Starved)
_NOTHING: Final = 1e-9
_GIVE_UP_S: Final = 10_000.0
Pair = tuple[int, int]
_Line = tuple[str, int, int]


@dataclass(slots=True)
class Lines:
    """Rates in 10^6 bit/s and the one-way delay.

    Attributes:
        up_N: of every region's uplink.
        down_N: of every region's downlink.
        pair_NN: of every ordered pair.
        delay_s: of every message.
        cut: ordered pairs that carry nothing at present.
    """

    up_N: NDArray[np.float64]
    down_N: NDArray[np.float64]
    pair_NN: NDArray[np.float64]
    delay_s: float = 0.0
    cut: set[Pair] = field(default_factory=set)

    @classmethod
    def capped(cls, num_regions: int, mbps: float, delay_s: float = 0.0) -> Lines:
        """Equal lines, and no limits of pairs."""
        caps_N = np.full(num_regions, mbps)
        return cls(caps_N, caps_N.copy(), np.full((num_regions, num_regions), np.inf), delay_s)

    def rates(self, pairs: Sequence[Pair]) -> dict[Pair, float]:
        """Max-min fair rates of transfers between ``pairs``."""
        left: dict[_Line, float] = {("up", i, -1): float(v) for i, v in enumerate(self.up_N)}
        left |= {("down", i, -1): float(v) for i, v in enumerate(self.down_N)}
        left |= {("pair", *p): float(self.pair_NN[p]) for p in pairs}
        open_pairs = [pair for pair in pairs if pair not in self.cut]
        rates = dict.fromkeys(pairs, 0.0)
        while open_pairs:
            users: dict[_Line, list[Pair]] = {}
            for pair in open_pairs:
                for line in _lines_of(pair):
                    users.setdefault(line, []).append(pair)
            tightest = min(users, key=lambda one: left[one] / len(users[one]))
            share = left[tightest] / len(users[tightest])
            for pair in users[tightest]:
                rates[pair] = share
                for line in _lines_of(pair):
                    left[line] -= share
                open_pairs.remove(pair)
        return rates


@dataclass(slots=True)
class _Transfer:
    part: SegmentPart
    left_mbit: float


class OverlayModel:
    """Bridges on a virtual clock.

    Args:
        lines: the network; may be changed while it runs, through `change`.
        coordinator: of the run.
        grid: the vector's segments; may be small, see ``segment_bytes``.
        segment_bytes: what a whole segment counts for on a line.
        node_options: more options of `Node`.
    """

    def __init__(
        self,
        lines: Lines,
        coordinator: Coordinator,
        grid: Grid,
        segment_bytes: int,
        **node_options: float,
    ) -> None:
        num = len(lines.up_N)
        self.now_s = 0.0
        self.lines = lines
        self.coordinator = coordinator
        self.sent_mbit: dict[Pair, float] = {}
        self.times_s: list[float] = []
        self.committed: list[int] = []
        self.results: dict[int, dict[int, Floats]] = {}
        fused = coordinator.policy.fused
        self.nodes = [
            Node(me, num, coordinator.leader, grid, fused, **node_options)  # type: ignore[arg-type]
            for me in range(num)
        ]
        self._grid = grid
        self._segment_mbit = segment_bytes * 8e-6
        self._moving: dict[Pair, _Transfer] = {}
        self._rates: dict[Pair, float] = {}
        self._moved_s = 0.0
        self._plan = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._held: dict[Pair, list[Callable[[], None]]] = {}

    # ------------------------------------------------------------------ use

    def at(self, when_s: float, callback: Callable[[], None]) -> None:
        """Call back at a time."""
        heapq.heappush(self._queue, (max(when_s, self.now_s), next(self._numbers), callback))

    def change(self, edit: Callable[[Lines], None]) -> None:
        """Change the network now; what was held back by a cut goes on when that is mended."""
        self._move()
        edit(self.lines)
        for pair in [pair for pair in self._held if pair not in self.lines.cut]:
            for callback in self._held.pop(pair):
                self.at(self.now_s + self.lines.delay_s, callback)
        self._share()

    def run_round(
        self,
        rnd: int,
        vectors: Sequence[Floats],
        ready_s: Sequence[float] | None = None,
        compute_s: float = 0.0,
        without: Collection[int] = (),
    ) -> dict[int, Floats]:
        """One round, until every region has the result.

        Args:
            rnd: its number, from 1.
            vectors: what each region contributes, all with weight 1.
            ready_s: when, after ``compute_s``; None for all at once.
            compute_s: how long all regions compute before.
            without: regions that are not waited for.

        Returns:
            The result in every region that has it.

        Raises:
            InvariantError: the round does not end.
        """
        began_s = self.now_s + compute_s
        if rnd not in self.results:
            self.results[rnd] = {}
            self.coordinator.open(rnd)
        for node, vector in zip(self.nodes, vectors, strict=True):
            after_s = 0.0 if ready_s is None else ready_s[node.me]
            self.at(began_s + after_s, partial(self._contribute, node, rnd, vector))
        self.run_until(lambda: len(self.results[rnd].keys() | without) == len(self.nodes))
        self.times_s.append(self.now_s - began_s)
        return self.results[rnd]

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """Let time pass until something is so.

        Raises:
            InvariantError: it does not happen.
        """
        give_up_s = self.now_s + _GIVE_UP_S
        self._flush()
        while not is_over():
            if not self._queue or self.now_s > give_up_s:
                had = {rnd: sorted(results) for rnd, results in self.results.items()}
                raise InvariantError(f"nothing more happens at {self.now_s:.1f} s: {had}")
            when_s, _, callback = heapq.heappop(self._queue)
            self.now_s = max(self.now_s, when_s)
            callback()
            self._flush()

    # ------------------------------------------------------------------ inside

    def _contribute(self, node: Node, rnd: int, vector: Floats) -> None:
        node.contribute(rnd, vector, 1.0, {"region": node.me}, self.now_s)

    def _flush(self) -> None:
        """Deliver what everybody says, let the averager commit, and fill the lines."""
        self._pull()
        for node in self.nodes:
            node.acknowledge()
        busy = True
        while busy:
            busy = self._commit()
            for me, out in [(n.me, n.out) for n in self.nodes] + [
                (self.coordinator.leader, self.coordinator.out)
            ]:
                said, out[:] = out[:], []
                for dst, message in said:
                    busy = True
                    self._say(me, dst, message)
        self._pull()
        for node in self.nodes:
            self._arm(node)
            for done in node.done:
                self.results.setdefault(done.rnd, {})[node.me] = done.result_P
            node.done.clear()
        if self.coordinator.wakes_s is not None:
            self.at(self.coordinator.wakes_s, lambda: self.coordinator.tick(self.now_s))

    def _arm(self, node: Node) -> None:
        if self._queue or not (self.lines.cut or self.coordinator.links.down):
            return
        # Nothing happens by itself: time passes until somebody complains.
        self.at(self.now_s + node.stall_s / 2, self._tick)

    def _tick(self) -> None:
        hub = self.coordinator.leader
        for node in self.nodes:
            pairs = {(hub, node.me), (node.me, hub)}
            self.coordinator.on_peer(node.me, up=not pairs & self.lines.cut)
            node.tick(self.now_s)

    def _say(self, src: int, dst: int, message: ControlMessage) -> None:
        def deliver() -> None:
            if isinstance(message, _TO_COORDINATOR):
                self.coordinator.on_message(src, message, self.now_s)
            else:
                self.nodes[dst].on_message(src, message, self.now_s)

        self._carry((src, dst), deliver)

    def _carry(self, pair: Pair, deliver: Callable[[], None]) -> None:
        if pair in self.lines.cut:
            self._held.setdefault(pair, []).append(deliver)
        elif pair[0] == pair[1]:
            deliver()
        else:
            self.at(self.now_s + self.lines.delay_s, deliver)

    def _commit(self) -> bool:
        hub, rnd = self.nodes[self.coordinator.leader], len(self.committed) + 1
        ready = hub.is_whole(rnd) if hub.fused else hub.is_summed(rnd)
        if not ready or not self.coordinator.is_complete(rnd):
            return False
        self.committed.append(rnd)
        if not hub.fused:
            hub.set_result(rnd, hub.mean(rnd))
        about = [(node.me, {"round": rnd}) for node in self.nodes]
        self.coordinator.commit(rnd, about, self.now_s)  # type: ignore[arg-type]
        return True

    def _pull(self) -> None:
        changed = False
        for node in self.nodes:
            for peer in range(len(self.nodes)):
                pair = (node.me, peer)
                if pair in self._moving or peer == node.me:
                    continue
                part = node.next_part(peer, self.now_s)
                if part is not None:
                    if not changed:
                        self._move()
                        changed = True
                    whole = len(part.data) / (4 * self._grid.segment)
                    mbit = self._segment_mbit * whole
                    self._moving[pair] = _Transfer(part, mbit)
                    self.sent_mbit[pair] = self.sent_mbit.get(pair, 0.0) + mbit
        if changed:
            self._share()

    def _move(self) -> None:
        passed_s, self._moved_s = self.now_s - self._moved_s, self.now_s
        for pair, transfer in self._moving.items():
            transfer.left_mbit -= self._rates.get(pair, 0.0) * passed_s
        for pair in [p for p, t in self._moving.items() if t.left_mbit <= _NOTHING]:
            self._arrive(pair, self._moving.pop(pair).part)

    def _arrive(self, pair: Pair, part: SegmentPart) -> None:
        src, dst = pair
        self._carry(pair, lambda: self.nodes[dst].on_part(src, part, self.now_s))

    def _share(self) -> None:
        self._rates = self.lines.rates(list(self._moving))
        self._plan += 1
        plan = self._plan
        ends_s = [
            t.left_mbit / self._rates[p] for p, t in self._moving.items() if self._rates[p] > 0
        ]
        if ends_s:
            self.at(self.now_s + min(ends_s), lambda: self._end(plan))

    def _end(self, plan: int) -> None:
        if plan == self._plan:
            self._move()
            self._share()


def _lines_of(pair: Pair) -> tuple[_Line, _Line, _Line]:
    return ("up", pair[0], -1), ("down", pair[1], -1), ("pair", *pair)
