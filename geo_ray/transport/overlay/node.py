"""A region's state in all rounds: accepts segments and chooses the next one to send. Pure.

`PeerFlow` limits what is in flight to another region to its delivery rate times the round trip,
with a margin that lets the rate grow, so that transfers sharing a line do not flood it. Goodput is
the acknowledged bytes over the time in which something was in flight; if there was often nothing to
send, it is a lower bound.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from geo_ray.base.errors import FrameError, InvariantError
from geo_ray.transport.overlay.messages import (
    Commit,
    ControlMessage,
    Fetch,
    Orders,
    Ready,
    SegmentAck,
    SegmentPart,
    Sent,
    Starved,
    Stuck,
    Want,
    Whole,
)
from geo_ray.transport.overlay.plan import PROBE, RESULT, SUM, Grid, SendOrder
from geo_ray.transport.overlay.vector import Floats, Vector
from geo_ray.transport.wire.fields import Meta

_OFTEN: Final = 0.25  # of the busy time
_GAIN: Final = 2.0  # on rate times round trip: doubles what is under way until the rate stays
_SLACK_S: Final = 0.1  # added to the round trip, for busy processes and a short queue
_START: Final = 4  # parts, before a rate is known
_LEAST: Final = 4
_RATES: Final = 32  # acknowledgements over which the highest rate counts


@dataclass(frozen=True, slots=True)
class _Out:
    """A part under way, and how much had been delivered when it was sent."""

    size_bytes: int
    sent_s: float
    delivered_bytes: int
    delivered_s: float


class PeerFlow:
    """Counts the parts to one region.

    Args:
        window: most parts that may be in flight at a time.

    Attributes:
        sent: number of parts sent.
        rtt_s: round trip of the path; 0 while it is not known.
        limit: parts that may be in flight at present.
    """

    def __init__(self, window: int) -> None:
        self.sent = 0
        self.rtt_s = 0.0
        self.limit = min(window, _START)
        self._window = window
        self._out: deque[_Out] = deque()
        self._asked = 0  # the last part for which an acknowledgement was asked
        self._progress_s = 0.0
        self._delivered_bytes = 0
        self._delivered_s = 0.0
        self._rates: deque[float] = deque(maxlen=_RATES)  # bytes per second
        self._least_s = float("inf")  # from sending a part to its acknowledgement
        self._busy_from_s = 0.0
        self._lacks_from_s: float | None = None
        self._seen = [0.0, 0.0, 0.0]  # since `take`: bytes, busy seconds, of them without a part

    @property
    def acked(self) -> int:
        """The number of parts that have arrived."""
        return self.sent - len(self._out)

    @property
    def has_capacity(self) -> bool:
        """Return whether one more part may be sent."""
        # The limit may have shrunk below what is under way: ask, or no acknowledgement comes.
        return len(self._out) < self.limit or self._asked <= self.acked

    def push(self, size_bytes: int, now_s: float) -> None:
        """Count a part that is sent."""
        if not self._out:
            self._busy_from_s = self._delivered_s = now_s
        elif self._lacks_from_s is not None:
            self._seen[2] += now_s - self._lacks_from_s
        self._lacks_from_s = None
        if self._asked <= self.acked:
            self._progress_s = now_s
        self._out.append(_Out(size_bytes, now_s, self._delivered_bytes, self._delivered_s))
        self.sent += 1

    def ask(self, *, is_last: bool) -> bool:
        """Return whether the part just pushed asks for an acknowledgement."""
        due = is_last or not self.has_capacity or self.sent - self._asked >= max(1, self.limit // 4)
        if due:
            self._asked = self.sent
        return due

    def lacks(self, now_s: float) -> None:
        """Note that there is space, but the next part to send has not arrived."""
        if self._lacks_from_s is None:
            self._lacks_from_s = now_s

    def ack(self, count: int, now_s: float) -> None:
        """Record that ``count`` parts have arrived so far.

        Raises:
            FrameError: fewer parts were sent.
        """
        if count > self.sent:
            raise FrameError(f"{count} parts are acknowledged, {self.sent} were sent")
        if count <= self.acked:
            return
        while self.acked < count:
            last = self._out.popleft()
            self._delivered_bytes += last.size_bytes
            self._seen[0] += last.size_bytes
        self._delivered_s = now_s
        self._seen[1] += now_s - self._busy_from_s
        self._busy_from_s = self._progress_s = now_s
        self._learn(last, now_s)

    def _learn(self, last: _Out, now_s: float) -> None:
        took_s = now_s - last.delivered_s
        if took_s <= 0:
            return
        self._rates.append((self._delivered_bytes - last.delivered_bytes) / took_s)
        self._least_s = min(self._least_s, now_s - last.sent_s)
        path_s = (self.rtt_s or self._least_s) + _SLACK_S
        parts = _GAIN * max(self._rates) * path_s / last.size_bytes
        self.limit = max(_LEAST, min(self._window, 1 + round(parts)))

    def idle_s(self, now_s: float) -> float:
        """Return the seconds without expected progress; 0 if no progress is expected."""
        # A part for which no acknowledgement was asked is no trouble while the next part is
        # awaited.
        waits = self._asked > self.acked or (bool(self._out) and self._lacks_from_s is None)
        return now_s - self._progress_s if waits else 0.0

    def excuse(self, now_s: float) -> None:
        """Count the seconds without progress from now on."""
        self._progress_s = now_s

    def take(self) -> tuple[int, float, bool]:
        """Return the measurements since the last call.

        Returns:
            Bytes that have arrived, the busy seconds for them, and whether there was often nothing
            to send meanwhile.
        """
        size_bytes, busy_s, lacked_s = self._seen
        self._seen = [0.0, 0.0, 0.0]
        # The last part's round trip is no time in which it was sent.
        sending_s = busy_s - min(self.rtt_s, busy_s / 2)
        return int(size_bytes), sending_s, lacked_s > _OFTEN * busy_s


_LOGGER = logging.getLogger(__name__)
_AHEAD = 2  # maximum lead of other regions, in rounds
_PER_STALL: Final = 4  # attempts of a round after which the wait grows by `stall_s`


@dataclass(slots=True)
class _ActiveSend:
    """An order that is being carried out; ``next`` is its next segment."""

    rnd: int
    attempt: int
    send: SendOrder
    next: int
    last: int | None = None  # number of the order's last part, once that is sent


@dataclass(slots=True)
class _Round:
    vector: Vector
    contributed: bool = False
    commit: Commit | None = None
    reported_whole: bool = False
    moved_s: float = 0.0  # time of the last arrival


@dataclass(frozen=True, slots=True)
class Finished:
    """The outcome of a round in this region."""

    rnd: int
    about: Meta
    result_P: Floats


@dataclass(slots=True)
class Node:
    """A state machine without clock, socket or thread.

    The caller passes it the region's contribution and received messages, and asks it for the next
    part to each other region. Other messages are in `out`, finished rounds in `done`.

    Attributes:
        me: this region's number.
        num_regions: N.
        leader: the coordinator's region.
        grid: the vector's segments.
        fused: see `Policy`.
        window: parts in flight to one region.
        stall_s: first time without progress after which the coordinator is notified.
        out: (receiver, message) in order; the caller takes them.
        clashes: number of partial sums refused because they held a contribution a second time.
        done: finished rounds; the caller takes them.
        finished: number of the last of them.
    """

    me: int
    num_regions: int
    leader: int
    grid: Grid
    fused: bool
    window: int = 32
    stall_s: float = 20.0
    out: list[tuple[int, ControlMessage]] = field(default_factory=list)
    done: list[Finished] = field(default_factory=list)
    finished: int = 0
    clashes: int = 0
    _rounds: dict[int, _Round] = field(default_factory=dict)
    _flows: dict[int, PeerFlow] = field(default_factory=dict)
    _active: dict[int, list[_ActiveSend]] = field(default_factory=dict)
    _received: dict[int, int] = field(default_factory=dict)  # parts by sender
    _owed: dict[int, int] = field(default_factory=dict)  # acknowledgements not sent yet

    # ------------------------------------------------------------------ own contribution

    def contribute(self, rnd: int, own_P: Floats, weight: float, about: Meta, now_s: float) -> None:
        """Take part in a round.

        Raises:
            InvariantError: the region has contributed already, or the round is out of turn.
        """
        if rnd != self.finished + 1 or self._round(rnd, now_s).contributed:
            raise InvariantError(f"region {self.me} contributes to round {rnd} out of turn")
        entry = self._round(rnd, now_s)
        entry.contributed = True
        entry.vector.contribute(own_P, weight)
        self.out.append((self.leader, Ready(rnd, about)))
        self._check(rnd)

    def is_summed(self, rnd: int) -> bool:
        """Return whether the complete sum of a round has arrived."""
        entry = self._rounds.get(rnd)
        return entry is not None and entry.vector.is_summed

    def is_whole(self, rnd: int) -> bool:
        """Return whether the complete result of a round has arrived."""
        entry = self._rounds.get(rnd)
        return entry is not None and entry.vector.is_whole

    def mean(self, rnd: int) -> Floats:
        """Return the mean of a round: of its sum, or its result if that is made of means."""
        vector = self._rounds[rnd].vector
        return vector.result_P if self.fused else vector.mean()

    def set_result(self, rnd: int, result_P: Floats) -> None:
        """Set the result of a round; only in the coordinator's region, and not if `fused`."""
        self._rounds[rnd].vector.set_result(result_P)
        self._check(rnd)

    # ------------------------------------------------------------------ arrivals

    def on_message(self, peer: int, message: ControlMessage, now_s: float) -> None:
        """Process a message of a region or the coordinator.

        Raises:
            FrameError: the message does not fit the round.
        """
        if isinstance(message, SegmentAck):
            self._on_ack(peer, message.count, now_s)
        elif isinstance(message, Want):
            self._on_want(peer, message)
        elif peer != self.leader:
            raise FrameError(
                f"region {peer} sends {type(message).__name__}; only {self.leader} may"
            )
        elif isinstance(message, Orders):
            self._on_orders(message, now_s)
        elif isinstance(message, Fetch):
            self._on_fetch(message)
        elif isinstance(message, Commit):
            self._on_commit(message, now_s)

    def on_part(self, peer: int, part: SegmentPart, now_s: float) -> None:
        """Process a segment.

        Raises:
            FrameError: the segment does not fit the round.
        """
        self._received[peer] = self._received.get(peer, 0) + 1
        if part.wants_ack:
            self._owed[peer] = self._received[peer]
        if part.acked:
            self._on_ack(peer, part.acked, now_s)
        if part.rnd <= self.finished:
            return  # it was sent twice, after something was lost
        entry = self._round(part.rnd, now_s)
        vector = entry.vector
        if part.attempt > vector.attempt and (part.phase == SUM or self.fused):
            self._restart(part.rnd, part.attempt)
        if part.attempt < vector.attempt and (part.phase == SUM or self.fused):
            return
        if part.phase == RESULT:
            moved = vector.put(part.index, part.data)
        else:
            moved = vector.add(part.index, part.mask, part.weight, part.data)
            self.clashes += not moved
        if moved:
            entry.moved_s = now_s
            self._check(part.rnd)

    def _on_ack(self, peer: int, count: int, now_s: float) -> None:
        flow = self._flow(peer)
        flow.ack(count, now_s)
        active = self._active.get(peer, [])
        for order in [o for o in active if o.last is not None and o.last <= flow.acked]:
            active.remove(order)
            self.out.append((self.leader, Sent(order.rnd, order.attempt, order.send, *flow.take())))

    def _on_orders(self, orders: Orders, now_s: float) -> None:
        if orders.rnd <= self.finished - 1:
            return
        vector = self._round(orders.rnd, now_s).vector
        if orders.attempt > vector.attempt:
            self._restart(orders.rnd, orders.attempt)
        if orders.attempt < vector.attempt:
            return
        for send in orders.sends:
            if send.src != self.me or send.dst == self.me or not self._fits(send.first, send.stop):
                raise FrameError(f"region {self.me} is ordered to do what it cannot: {send}")
            active = _ActiveSend(orders.rnd, orders.attempt, send, send.first)
            self._active.setdefault(send.dst, []).append(active)

    def _on_fetch(self, fetch: Fetch) -> None:
        entry = self._rounds.get(fetch.rnd)
        if entry is None or fetch.rnd <= self.finished or fetch.source == self.me:
            return
        ranges = tuple(entry.vector.missing())
        if ranges:
            self.out.append((fetch.source, Want(fetch.rnd, ranges)))

    def _on_want(self, peer: int, want: Want) -> None:
        entry = self._rounds.get(want.rnd)
        if entry is None:
            return
        for first, stop in want.ranges:
            if not self._fits(first, stop):
                raise FrameError(f"region {peer} wants segments {first} to {stop}")
            send = SendOrder(self.me, peer, RESULT, first, stop)
            active = _ActiveSend(want.rnd, entry.vector.attempt, send, first)
            self._active.setdefault(peer, []).append(active)

    def _on_commit(self, commit: Commit, now_s: float) -> None:
        if commit.rnd <= self.finished:
            return
        entry = self._round(commit.rnd, now_s)
        if self.fused and commit.attempt > entry.vector.attempt:
            self._restart(commit.rnd, commit.attempt)
        entry.commit, entry.moved_s = commit, now_s
        self._check(commit.rnd)

    # ------------------------------------------------------------------ sending

    def targets(self) -> list[int]:
        """Return the regions with pending transfers, now or later."""
        return [peer for peer, active in self._active.items() if active]

    def next_part(self, peer: int, now_s: float) -> SegmentPart | None:
        """Return the next segment for a region and count it as sent; None if there is none now."""
        flow = self._flow(peer)
        order = self._sendable(peer) if flow.has_capacity else None
        if order is None:
            if flow.has_capacity and self._is_sending(peer):
                flow.lacks(now_s)
            return None
        vector, index, send = self._rounds[order.rnd].vector, order.next, order.send
        if send.phase == SUM:
            mask, weight, data = vector.sum_of(index)
        else:
            mask, weight, data = 0, 0.0, vector.result_of(index)
        flow.push(data.nbytes, now_s)
        order.next += 1
        if order.next == send.stop:
            order.last = flow.sent
        wants_ack = flow.ask(is_last=order.last is not None)
        phase = SUM if send.phase == SUM else RESULT
        acked = self._owed.pop(peer, 0)
        return SegmentPart(
            order.rnd, vector.attempt, phase, index, mask, weight, wants_ack, data, acked
        )

    def acknowledge(self) -> None:
        """Send acknowledgements that no part carried; call after the last `next_part` for now."""
        self.out += [(peer, SegmentAck(count)) for peer, count in self._owed.items()]
        self._owed.clear()

    def _sendable(self, peer: int) -> _ActiveSend | None:
        for order in self._active.get(peer, []):
            if order.last is not None:
                continue
            vector, index, send = self._rounds[order.rnd].vector, order.next, order.send
            if send.phase == SUM and vector.can_send_sum(index, send.need):
                return order
            if send.phase == RESULT and vector.can_send_result(index):
                return order
            if send.phase == PROBE and order.rnd == self.finished and not self._is_contributing():
                return order
        return None

    def _is_sending(self, peer: int) -> bool:
        """Return whether an order is begun and not finished."""
        active = self._active.get(peer, [])
        return any(o.last is None and o.next > o.send.first for o in active)

    def _is_contributing(self) -> bool:
        """Return whether a round is in progress."""
        entry = self._rounds.get(self.finished + 1)
        return entry is not None and entry.contributed

    # ------------------------------------------------------------------ time

    def tick(self, now_s: float) -> None:
        """Report transfers without progress to the coordinator."""
        for peer, flow in self._flows.items():
            active = self._active.get(peer, [])
            if flow.idle_s(now_s) <= max((self._patience_s(o.rnd) for o in active), default=0.0):
                continue
            flow.excuse(now_s)
            self.out += [(self.leader, Stuck(rnd, peer)) for rnd in sorted({o.rnd for o in active})]
            # The coordinator finds another source for a result. A sum waits for the coordinator.
            self._active[peer] = [o for o in active if o.send.phase == SUM]
        for rnd, entry in self._rounds.items():
            if entry.commit is None or entry.vector.is_whole or rnd <= self.finished:
                continue
            if now_s - entry.moved_s > self._patience_s(rnd):
                entry.moved_s = now_s
                self.out.append((self.leader, Starved(rnd)))

    def _patience_s(self, rnd: int) -> float:
        """Return how long a round's transfers may stall: longer after several restarts.

        Otherwise a round whose processes are slower than `stall_s` would be restarted forever.
        """
        entry = self._rounds.get(rnd)
        return self.stall_s * (1 + (0 if entry is None else entry.vector.attempt) // _PER_STALL)

    def set_rtt(self, peer: int, rtt_s: float) -> None:
        """Set the measured round trip to a region."""
        self._flow(peer).rtt_s = rtt_s

    # ------------------------------------------------------------------ inside

    def _check(self, rnd: int) -> None:
        """Finish a round if it is over."""
        entry = self._rounds[rnd]
        if not entry.vector.is_whole:
            return
        if not entry.reported_whole:
            entry.reported_whole = True
            self.out.append((self.leader, Whole(rnd)))
        if entry.commit is None or not entry.contributed or rnd <= self.finished:
            return
        self.finished = rnd
        self.done.append(Finished(rnd, entry.commit.about, entry.vector.result_P))
        # All regions have contributed to this round, so all had the result of the round before.
        self._drop(lambda order: order.rnd < rnd)
        for old in [known for known in self._rounds if known < rnd]:
            del self._rounds[old]

    def _restart(self, rnd: int, attempt: int) -> None:
        self._drop(lambda order: order.rnd == rnd and (self.fused or order.send.phase == SUM))
        self._rounds[rnd].reported_whole = False
        self._rounds[rnd].vector.restart(attempt)

    def _drop(self, is_void: Callable[[_ActiveSend], bool]) -> None:
        for peer, active in self._active.items():
            self._active[peer] = [order for order in active if not is_void(order)]

    def _round(self, rnd: int, now_s: float) -> _Round:
        if rnd not in self._rounds:
            if not self.finished < rnd <= self.finished + _AHEAD:
                raise FrameError(f"round {rnd} is far from round {self.finished}, the last one")
            vector = Vector(self.me, self.num_regions, self.grid, fused=self.fused)
            self._rounds[rnd] = _Round(vector, moved_s=now_s)
        return self._rounds[rnd]

    def _fits(self, first: int, stop: int) -> bool:
        return 0 <= first < stop <= self.grid.count

    def _flow(self, peer: int) -> PeerFlow:
        if peer not in self._flows:
            self._flows[peer] = PeerFlow(self.window)
        return self._flows[peer]
