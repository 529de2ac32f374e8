"""Coordinates rounds: asks the policy, issues its send orders, and avoids broken links. Pure.

It runs next to the averager. Messages of regions come in through `on_message`; messages to them
are collected in `out`. Between rounds, while links are idle, it probes those measured longest ago,
in pairs that share no sender and no receiver.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Final

from geo_ray.base.errors import FrameError
from geo_ray.transport.overlay.links import LinkFlow, Links
from geo_ray.transport.overlay.messages import (
    Commit,
    ControlMessage,
    Fetch,
    Orders,
    Ready,
    Sent,
    Starved,
    Stuck,
    Whole,
)
from geo_ray.transport.overlay.plan import PROBE, RESULT, SUM, SendOrder
from geo_ray.transport.overlay.policy import Policy
from geo_ray.transport.wire.fields import Meta


def probes(links: Links, num_segments: int, random: Random) -> list[SendOrder]:
    """Return orders to send a few segments, at most one from and to every region.

    Args:
        links: present knowledge of links.
        num_segments: segments per probe.
        random: breaks ties.
    """
    regions = [node for node in range(links.num_regions) if node not in links.down]
    pairs = [(a, b) for a in regions for b in regions if a != b and not links.is_broken(a, b)]
    random.shuffle(pairs)
    pairs.sort(key=lambda pair: -links.age(*pair))
    senders: set[int] = set()
    receivers: set[int] = set()
    chosen = []
    for src, dst in pairs:
        if src not in senders and dst not in receivers and links.age(src, dst) > 0:
            senders.add(src)
            receivers.add(dst)
            chosen.append(SendOrder(src, dst, PROBE, 0, num_segments))
    return chosen


_LOGGER = logging.getLogger(__name__)
_KEPT_ROUNDS: Final = 3


@dataclass(slots=True)
class _Round:
    attempt: int = 0
    ready: dict[int, Meta] = field(default_factory=dict)  # regions in the order of becoming ready
    asked: int = 0  # how many of these were reported to the policy
    settles_s: float | None = None
    is_summed: bool = False
    is_committed: bool = False
    whole: set[int] = field(default_factory=set)
    sources: dict[int, set[int]] = field(default_factory=dict)  # sources of each region
    flows: dict[int, dict[tuple[int, int], LinkFlow]] = field(default_factory=dict)  # by phase
    pending: dict[int, int] = field(default_factory=dict)  # orders not carried out yet, by phase
    probed: int = 0


@dataclass(slots=True)
class Coordinator:
    """Runs the rounds: asks the policy, issues its orders, and avoids broken links. Pure.

    It runs next to the averager. Messages of regions come in through `on_message`; messages to them
    are in `out`.

    Attributes:
        leader: its region.
        policy: the overlay's policy.
        links: measurements of links.
        probe_segments: how much a probe sends.
        seed: of the choice among links to probe.
        out: (receiver, message), in order; the caller takes them.
        restarts: how often sums were restarted.
    """

    leader: int
    policy: Policy
    links: Links
    probe_segments: int = 2
    seed: int = 0
    out: list[tuple[int, ControlMessage]] = field(default_factory=list)
    restarts: int = 0
    _rounds: dict[int, _Round] = field(default_factory=dict)
    _random: Random = field(init=False)

    def __post_init__(self) -> None:
        """Seed the choices."""
        self._random = Random(self.seed)

    # ------------------------------------------------------------------ rounds

    def open(self, rnd: int) -> None:
        """Give a round's orders before any region is ready; rounds are opened in order."""
        self._fold(rnd)
        self._rounds[rnd] = _Round()
        self._order(rnd, self.policy.open(rnd))

    def about(self, rnd: int) -> dict[int, Meta]:
        """Return what the regions reported of their contributions."""
        return dict(self._rounds[rnd].ready)

    def is_complete(self, rnd: int) -> bool:
        """Return whether every region has reported its contribution."""
        entry = self._rounds.get(rnd)
        return entry is not None and len(entry.ready) == self.links.num_regions

    def seal(self, rnd: int) -> None:
        """Fix the attempt: the sum is complete at the averager and will be committed."""
        self._rounds[rnd].is_summed = True

    def commit(self, rnd: int, about: Iterable[tuple[int, Meta]], now_s: float) -> None:
        """Commit the sum: notify every region, and order the distribution of the result.

        Args:
            rnd: the round.
            about: facts for each region's caller.
            now_s: the time.
        """
        entry = self._rounds[rnd]
        entry.is_summed = entry.is_committed = True
        self.out += [(node, Commit(rnd, entry.attempt, meta)) for node, meta in about]
        if not self.policy.fused:
            self._fold(rnd)
            self._order(rnd, self.policy.summed(rnd, now_s))

    def tick(self, now_s: float) -> None:
        """Let the policy decide for the regions that have become ready."""
        for rnd, entry in list(self._rounds.items()):
            if entry.settles_s is not None and now_s >= entry.settles_s:
                self._ask(rnd, now_s)

    @property
    def wakes_s(self) -> float | None:
        """Return when `tick` has something to do."""
        times = [e.settles_s for e in self._rounds.values() if e.settles_s is not None]
        return min(times, default=None)

    # ------------------------------------------------------------------ messages of regions

    def on_message(self, node: int, message: ControlMessage, now_s: float) -> None:
        """Process a region's message.

        Raises:
            FrameError: the message does not fit the round.
        """
        if not isinstance(message, Ready | Sent | Whole | Stuck | Starved):
            raise FrameError(f"region {node} sends {type(message).__name__} to the coordinator")
        entry = self._rounds.get(message.rnd)
        if entry is None:
            return  # of a round that is long over
        if isinstance(message, Ready):
            self._on_ready(node, message, entry, now_s)
        elif isinstance(message, Sent):
            self._on_sent(node, message, entry, now_s)
        elif isinstance(message, Whole):
            entry.whole.add(node)
            self._probe(message.rnd, entry)
        elif isinstance(message, Stuck):
            self._on_stuck(node, message, entry, now_s)
        else:
            self._feed(message.rnd, entry, node, avoid=entry.sources.get(node, set()))

    def on_peer(self, node: int, *, up: bool) -> None:
        """Record whether a region is reachable from here."""
        (self.links.down.discard if up else self.links.down.add)(node)

    def _on_ready(self, node: int, message: Ready, entry: _Round, now_s: float) -> None:
        entry.ready.setdefault(node, message.about)
        if self.is_complete(message.rnd) or self.policy.settle_s == 0:
            self._ask(message.rnd, now_s)
        elif entry.settles_s is None:
            entry.settles_s = now_s + self.policy.settle_s

    def _ask(self, rnd: int, now_s: float) -> None:
        entry = self._rounds[rnd]
        entry.settles_s = None
        self._fold(rnd)
        self._order(rnd, self.policy.ready(rnd, list(entry.ready), now_s))

    def _on_sent(self, node: int, message: Sent, entry: _Round, now_s: float) -> None:
        send = message.send
        if send.src != node or not 0 <= send.dst < self.links.num_regions:
            raise FrameError(f"region {node} reports that it has sent {send}")
        phase = self._phase(send)
        entry.pending[phase] = entry.pending.get(phase, 0) - 1
        if send.phase == PROBE:
            if self._is_idle(message.rnd) and message.size_bytes > 0 and message.busy_s > 0:
                mbit = message.size_bytes * 8e-6
                self.links.note([LinkFlow(node, send.dst, mbit, message.busy_s)])
            self._probe(message.rnd, entry)
            return
        if message.size_bytes > 0 and message.busy_s > 0:
            flows, pair = entry.flows.setdefault(phase, {}), (node, send.dst)
            seen = LinkFlow(
                *pair, message.size_bytes * 8e-6, message.busy_s, message.starved, now_s
            )
            flows[pair] = flows[pair] + seen if pair in flows else seen
        if message.attempt == entry.attempt:
            self._order(message.rnd, self.policy.sent(message.rnd, send, now_s))

    # ------------------------------------------------------------------ probes

    def _is_idle(self, rnd: int) -> bool:
        """Return whether links are idle: a round is over everywhere, and the next has not begun."""
        following = self._rounds.get(rnd + 1)
        is_over = len(self._rounds[rnd].whole) == self.links.num_regions
        return is_over and (following is None or not following.ready)

    def _probe(self, rnd: int, entry: _Round) -> None:
        """Order measurements of some links, if they are idle and the last ones are done."""
        if not self._is_idle(rnd) or entry.pending.get(PROBE, 0) > 0:
            return
        if entry.probed < self.policy.probes:
            entry.probed += 1
            self._order(rnd, probes(self.links, self.probe_segments, self._random))

    # ------------------------------------------------------------------ trouble

    def _on_stuck(self, node: int, message: Stuck, entry: _Round, now_s: float) -> None:
        dst = message.dst
        _LOGGER.warning("round %d: what region %d sends to %d is stuck", message.rnd, node, dst)
        self.links.break_link(node, dst)
        if not entry.is_summed:
            # If the region is gone, the round needs it in any case, and continues when it is back.
            # If only the link is gone, others can send what it cannot.
            if dst not in self.links.down and node not in self.links.down:
                self._restart(message.rnd, entry, now_s)
            return
        orphans = [n for n, sources in entry.sources.items() if dst in sources]
        for orphan in [dst, *orphans]:
            self._feed(message.rnd, entry, orphan, avoid={node, dst})
        self._order(message.rnd, self.policy.lost(message.rnd, node, dst, now_s))

    def _restart(self, rnd: int, entry: _Round, now_s: float) -> None:
        entry.attempt += 1
        self.restarts += 1
        entry.sources.clear()
        entry.whole.clear()
        _LOGGER.warning("round %d: the sums are restarted, attempt %d", rnd, entry.attempt)
        sends = self.policy.restart(rnd, list(entry.ready), now_s)
        self._order(rnd, sends, everyone=True)

    def _feed(self, rnd: int, entry: _Round, node: int, avoid: set[int]) -> None:
        """Order a region to fetch the missing segments of a result from another."""
        if node in entry.whole or not entry.is_committed:
            return
        usable = (entry.whole | {self.leader}) - {node}
        good = usable - avoid - self.links.down
        good = {n for n in good if not self.links.is_broken(n, node)}
        mbps_NN = self.links.matrix()
        source = max(sorted(good or usable), key=lambda n: float(mbps_NN[n, node]), default=None)
        if source is None:
            return
        entry.sources[node] = {source}
        self.out.append((node, Fetch(rnd, source)))

    # ------------------------------------------------------------------ inside

    def _order(self, rnd: int, sends: Iterable[SendOrder], *, everyone: bool = False) -> None:
        entry = self._rounds[rnd]
        by_node: dict[int, list[SendOrder]] = {}
        if everyone:  # regions without orders must be notified of a new attempt, too
            by_node = {node: [] for node in range(self.links.num_regions)}
        for send in sends:
            by_node.setdefault(send.src, []).append(send)
            phase = self._phase(send)
            entry.pending[phase] = entry.pending.get(phase, 0) + 1
            if send.phase == RESULT:
                entry.sources.setdefault(send.dst, set()).add(send.src)
        for node, orders in sorted(by_node.items()):
            self.out.append((node, Orders(rnd, entry.attempt, tuple(orders))))

    def _phase(self, send: SendOrder) -> int:
        """Return the phase of flows that share lines at the same time."""
        if send.phase == PROBE:
            return PROBE
        return SUM if self.policy.fused else send.phase

    def _fold(self, rnd: int) -> None:
        """Pass the measured flows to `links`, and drop old ones."""
        for number, entry in self._rounds.items():
            for phase, flows in list(entry.flows.items()):
                # Flows that shared a line must be evaluated together, unless some never end.
                alone = phase == SUM and not self.policy.fused
                is_over = entry.is_summed if alone else number < rnd - 1
                if entry.pending.get(phase, 0) <= 0 or is_over:
                    self.links.note(flows.values())
                    del entry.flows[phase]
        self.links.advance(rnd)
        for old in [known for known in self._rounds if known <= rnd - _KEPT_ROUNDS]:
            self.policy.close(old)
            del self._rounds[old]
