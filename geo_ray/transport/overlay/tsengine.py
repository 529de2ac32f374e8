"""TSENGINE policy: aggregation and distribution decided during a round, from measured links.

Sums: the two regions that are ready first merge first; the goodput between them decides which one
sends, and the root always receives. With pipelined segments the receiver is ready again at once,
so a chain grows in the order of readiness (`best_chain` orders one by its slowest link); whole
messages form a tree of log2 N levels.

Results: a region that has the result, or is promised it, serves one more region at a time. The
transfer predicted to end first is next. A random share epsilon of decisions explores, so that
every link is measured again. All state is keyed by round and bucket.

Shape legend: N = regions; rows send, columns receive.

Source: reconstructed from the public descriptions of TSEngine (IEEE TNSM 18(4), 2021); goodput by
wall clock, ageing, exploration rate, keys, segments and failure handling are ours.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from random import Random
from typing import Final

import numpy as np
from numpy.typing import NDArray

from geo_ray.transport.overlay.config import TsengineOverlay
from geo_ray.transport.overlay.links import Links
from geo_ray.transport.overlay.plan import RESULT, SUM, Grid, SendOrder, equal_slices, full_mask

_PASSES: Final = 8


def best_chain(
    rate_NN: NDArray[np.float64],
    nodes: Sequence[int],
    start: int | None = None,
    end: int | None = None,
) -> list[int]:
    """Return ``nodes`` in a good order, after ``start`` and before ``end`` if these are given.

    Regions that make no difference stay in the order in which they are given.
    """
    slow = (1.0 / rate_NN).tolist()
    head = [] if start is None else [start]
    tail = [] if end is None else [end]
    inner: list[int] = []
    for node in nodes:
        inner = _insert(slow, head, inner, tail, node)
    for _ in range(_PASSES):
        before = inner
        for node in nodes:
            rest = [other for other in inner if other != node]
            moved = _insert(slow, head, rest, tail, node)
            if _cost(slow, [*head, *moved, *tail]) < _cost(slow, [*head, *inner, *tail]):
                inner = moved
        if inner == before:
            break
    return [*head, *inner, *tail]


def _insert(
    slow: list[list[float]], head: list[int], inner: list[int], tail: list[int], node: int
) -> list[int]:
    options = [[*inner[:at], node, *inner[at:]] for at in range(len(inner), -1, -1)]
    return min(options, key=lambda order: _cost(slow, [*head, *order, *tail]))


def _cost(slow: list[list[float]], order: list[int]) -> tuple[float, float]:
    """Return the cost of the slowest link, then of all; rounded, so that equal links are equal."""
    links = [slow[a][b] for a, b in pairwise(order)]
    return round(max(links, default=0.0), 12), round(sum(links), 12)


@dataclass(slots=True)
class _Holder:
    """A region that has the result or is promised it.

    Attributes:
        first_s: when it has the first segment.
        whole_s: when it has all.
        free_s: when it may begin to serve a region.
        busy: whether it serves a region.
    """

    first_s: float
    whole_s: float
    free_s: float
    busy: bool = False


class Distribution:
    """Chooses which region sends a bucket's result to which next, by predicted times.

    Times are seconds, sizes and rates segments and segments per second. A region that was promised
    the result counts as one that has it: it passes segments on as they arrive.

    Args:
        num_regions: N.
        root: has the result.
        num_segments: of the bucket.
        now_s: the time.

    Attributes:
        left: regions that no other serves yet.
        tail: the region that was promised the result last.
        at_random: whether the next transfer is chosen at random; None if undecided.
    """

    def __init__(self, num_regions: int, root: int, num_segments: int, now_s: float) -> None:
        self.left = [node for node in range(num_regions) if node != root]
        self.tail = root
        self.at_random: bool | None = None
        self._num_segments = num_segments
        self._holders = {root: _Holder(now_s, now_s, now_s)}

    def next_pair(
        self,
        rate_NN: NDArray[np.float64],
        down: Collection[int],
        now_s: float,
        receivers: Sequence[int],
    ) -> tuple[int, int] | None:
        """Return the transfer to one of ``receivers`` that ends first, as (from, to).

        Args:
            rate_NN: of links.
            down: regions that serve others only if there are no others to do so.
            now_s: the time.
            receivers: some of those that are left.

        Returns:
            The transfer; None if waiting for a busy region is faster.
        """
        able = {node: h for node, h in self._holders.items() if node not in down}
        able = able or self._holders
        _, busy, src, dst = min(
            (self._end_s(holder, rate_NN[src, dst], now_s), holder.busy, src, dst)
            for src, holder in able.items()
            for dst in receivers
        )
        return None if busy else (src, dst)

    def promise(self, src: int, dst: int, rate_NN: NDArray[np.float64], now_s: float) -> None:
        """Record that ``src`` serves ``dst``."""
        holder = self._holders[src]
        end_s = self._end_s(holder, rate_NN[src, dst], now_s)
        start_s = max(holder.first_s, holder.free_s, now_s)
        first_s = min(end_s, start_s + 1.0 / rate_NN[src, dst])
        self._holders[dst] = _Holder(first_s, end_s, first_s)
        holder.free_s, holder.busy = end_s, True
        self.left.remove(dst)
        self.tail, self.at_random = dst, None

    def is_free(self, src: int, dst: int, now_s: float) -> None:
        """Note that ``src`` has served ``dst``."""
        if (holder := self._holders.get(dst)) is not None:
            holder.first_s, holder.whole_s = min(holder.first_s, now_s), now_s
        if (holder := self._holders.get(src)) is not None:
            holder.busy, holder.free_s = False, now_s

    def gives_up(self, src: int, dst: int, now_s: float) -> None:
        """Record an abandoned transfer: neither end counts as able to serve the other."""
        if (holder := self._holders.get(src)) is not None:
            holder.busy, holder.free_s = False, now_s
        self._holders.pop(dst, None)
        if self.tail == dst:
            self.tail = src

    def _end_s(self, holder: _Holder, rate: float, now_s: float) -> float:
        start_s = max(holder.first_s, holder.free_s, now_s)
        return max(start_s + self._num_segments / rate, holder.whole_s + 1.0 / rate)


_ELEMENT_MBIT: Final = 4 * 8e-6  # fp32


@dataclass(slots=True)
class _Merge:
    """The sums of one bucket.

    Attributes:
        queue: regions with a partial sum that is assigned to no transfer, the oldest first.
        masks: sets of contributions that each of them holds or is promised.
        fed: regions with a transfer in progress.
        seen: regions whose contribution was counted.
    """

    queue: list[int] = field(default_factory=list)
    masks: dict[int, int] = field(default_factory=dict)
    fed: set[int] = field(default_factory=set)
    seen: set[int] = field(default_factory=set)


class Tsengine:
    """TSENGINE: distribution and aggregation decided while a round runs, from measured links.

    Sums: the two regions that are ready first merge first. The goodput between them decides which
        one
    sends; the root always receives. Where segments pipeline, the receiver of a merge is ready again
    at once and passes on what arrives, so that a chain grows in the order of readiness and the root
    takes part last. Whole messages (one segment) cannot be passed on early, so the receiver is
    ready again when it has everything, and pairs form a tree of log2 N levels.

    Results: a region that has the result, or is promised it, may serve one more region at a time.
        The
    next transfer is the one that is predicted to end first; if it would come from a busy region,
    the receiver waits for that region. A share epsilon of all decisions is random, so that every
    link is measured again.

    Everything is keyed by round and bucket.

    Source: reconstructed from the public descriptions of TSEngine (IEEE TNSM 18(4), 2021); goodput
        by
    wall clock, ageing, the exploration rate, keys, segments and what happens after failures are
    ours.

    Args:
        links: measurements of links.
        root: the region where sums meet and results begin.
        grid: the vector's segments.
        config: the configured options.
        seed: of random decisions.

    Attributes:
        decisions: choices among several so far.
        explored: how many of them were random.
    """

    fused = False

    def __init__(
        self, links: Links, root: int, grid: Grid, config: TsengineOverlay, seed: int = 0
    ) -> None:
        self.settle_s = config.settle_s
        self.probes = config.probes
        self.decisions = 0
        self.explored = 0
        self._links = links
        self._root = root
        self._slices = equal_slices(min(config.buckets, grid.count), grid.count)
        self._segment_mbit = grid.segment * _ELEMENT_MBIT
        self._epsilon = config.epsilon
        self._random = Random(seed)
        self._merges: dict[tuple[int, int], _Merge] = {}
        self._spreads: dict[tuple[int, int], Distribution] = {}

    # ------------------------------------------------------------------ sums

    def open(self, rnd: int) -> list[SendOrder]:
        """Return no orders, because the first ready region is not known yet."""
        for bucket in range(len(self._slices)):
            self._merges[rnd, bucket] = _Merge()
        return []

    def ready(self, rnd: int, ready: Sequence[int], now_s: float) -> list[SendOrder]:
        """See `Policy.ready`."""
        sends = []
        for bucket in range(len(self._slices)):
            merge = self._merges[rnd, bucket]
            for node in ready:
                if node not in merge.seen:
                    merge.seen.add(node)
                    merge.queue.append(node)
                    merge.masks[node] = merge.masks.get(node, 0) | 1 << node
            sends += self._pair(merge, bucket)
        return sends

    def _pair(self, merge: _Merge, bucket: int) -> list[SendOrder]:
        """Order merges between regions that are ready."""
        sends = []
        first, stop = self._slices[bucket]
        pipelined = self._pipelines(stop - first)
        while (pair := self._choose(merge, pipelined)) is not None:
            src, dst = pair
            sends.append(SendOrder(src, dst, SUM, first, stop, merge.masks[src]))
            merge.masks[dst] = merge.masks.get(dst, 1 << dst) | merge.masks.pop(src)
            merge.queue = [node for node in merge.queue if node not in pair]
            if pipelined:
                merge.fed.add(dst)
                merge.queue.insert(0, dst)  # it passes on what it receives from here on
        return sends

    def _choose(self, merge: _Merge, pipelined: bool) -> tuple[int, int] | None:
        """Return the next sender and receiver; None while no two regions may merge."""
        root, queue = self._root, merge.queue
        others = [node for node in queue if node != root]
        if not others:
            return None
        everyone = full_mask(self._links.num_regions)
        if merge.masks[others[0]] | merge.masks.get(root, 1 << root) == everyone:
            return others[0], root  # the root takes sums in before it has its own contribution
        if not pipelined:
            return self._two(merge)
        return self._partners(merge, others) if len(others) > 1 else None

    def _two(self, merge: _Merge) -> tuple[int, int] | None:
        """Return the two that wait longest and can reach each other, the faster sender first."""
        pairs = list(combinations(merge.queue, 2))
        pair = next((pair for pair in pairs if not self._links.is_broken(*pair)), None)
        if pair is None:
            present = 0
            for node in merge.queue:
                present |= merge.masks[node]
            if not pairs or present != full_mask(self._links.num_regions):
                return None  # another region may become ready that can reach them
            pair = pairs[0]
        one, two = pair
        if self._root in pair:
            return (two, one) if one == self._root else (one, two)
        there, back = self._links.mbps(one, two), self._links.mbps(two, one)
        return (one, two) if there >= back else (two, one)

    def _partners(self, merge: _Merge, others: list[int]) -> tuple[int, int]:
        """Return the next link of the fastest known chain through all regions that are ready."""
        fed = others[0] if others[0] in merge.fed else None
        fresh = [node for node in others if node != fed]
        missing = full_mask(self._links.num_regions)
        for node in [*others, self._root]:
            missing &= ~merge.masks.get(node, 1 << node)
        end = None if missing else self._root
        chain = best_chain(self._links.matrix(), fresh, fed, end)
        if self._rolls(len(fresh)):
            return chain[0], self._random.choice([node for node in fresh if node != chain[0]])
        return chain[0], chain[1]

    def _pipelines(self, segments: int) -> bool:
        """Return whether a chain of all regions is faster than a tree of whole messages."""
        regions = self._links.num_regions
        return segments + regions - 2 < segments * math.ceil(math.log2(regions))

    # ------------------------------------------------------------------ results

    def summed(self, rnd: int, now_s: float) -> list[SendOrder]:
        """See `Policy.summed`."""
        sends = []
        for bucket, (first, stop) in enumerate(self._slices):
            spread = Distribution(self._links.num_regions, self._root, stop - first, now_s)
            self._spreads[rnd, bucket] = spread
            sends += self._spread(spread, first, stop, now_s)
        return sends

    def _spread(self, spread: Distribution, first: int, stop: int, now_s: float) -> list[SendOrder]:
        """Order transfers of the result by regions that may serve."""
        sends = []
        rate_NN = self._links.matrix() / self._segment_mbit
        waiting: list[int] = []  # a region that is busy now serves these later
        while left := [node for node in spread.left if node not in waiting]:
            left = [node for node in left if node not in self._links.down] or left
            if spread.at_random is None:
                spread.at_random = self._rolls(len(left))
            if spread.at_random:
                left = [self._random.choice(left)]
            elif self._pipelines(stop - first):
                left = best_chain(rate_NN, left, start=spread.tail)[1:2]
            pair = spread.next_pair(rate_NN, self._links.down, now_s, left)
            if pair is None:
                waiting += left
                continue
            spread.promise(*pair, rate_NN, now_s)
            sends.append(SendOrder(*pair, RESULT, first, stop))
        return sends

    def _rolls(self, options: int) -> bool:
        """Return whether a decision among so many options is to be random."""
        if options < 2:
            return False
        self.decisions += 1
        explores = self._random.random() < self._epsilon
        self.explored += explores
        return explores

    # ------------------------------------------------------------------ changes

    def sent(self, rnd: int, send: SendOrder, now_s: float) -> list[SendOrder]:
        """End a transfer: its receiver is ready again, or its sender may serve another."""
        if (send.first, send.stop) not in self._slices:
            return []  # a part that a region had missed and asked for
        bucket = self._slices.index((send.first, send.stop))
        key = (rnd, bucket)
        if send.phase == RESULT:
            if key not in self._spreads:
                return []
            self._spreads[key].is_free(send.src, send.dst, now_s)
            return self._spread(self._spreads[key], send.first, send.stop, now_s)
        merge = self._merges.get(key)
        if merge is None or self._pipelines(send.stop - send.first):
            return []
        if merge.masks.get(send.dst) and send.dst not in merge.queue:
            merge.queue.append(send.dst)
        return self._pair(merge, bucket)

    def lost(self, rnd: int, src: int, dst: int, now_s: float) -> list[SendOrder]:
        """See `Policy.lost`."""
        sends = []
        for bucket, (first, stop) in enumerate(self._slices):
            if (spread := self._spreads.get((rnd, bucket))) is not None:
                spread.gives_up(src, dst, now_s)
                sends += self._spread(spread, first, stop, now_s)
        return sends

    def restart(self, rnd: int, ready: Sequence[int], now_s: float) -> list[SendOrder]:
        """See `Policy.restart`."""
        self.open(rnd)
        return self.ready(rnd, ready, now_s)

    def close(self, rnd: int) -> None:
        """See `Policy.close`."""
        for turns in (self._merges, self._spreads):
            for key in [key for key in turns if key[0] == rnd]:
                del turns[key]
