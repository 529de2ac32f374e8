"""A region's part in all rounds: takes parts in, and says which to send next. Pure; see `Node`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from geo_ray.errors import FrameError, InvariantError
from geo_ray.overlay.messages import (
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
from geo_ray.overlay.pace import Pace
from geo_ray.overlay.plan import PROBE, RESULT, SUM, Grid, SendOrder
from geo_ray.overlay.vector import Floats, Vector
from geo_ray.transport.wire.meta import Meta

_LOGGER = logging.getLogger(__name__)
_AHEAD = 2  # others may be so many rounds ahead of what is finished here


@dataclass(slots=True)
class _Going:
    """An order that is being carried out; ``next`` is its next segment."""

    rnd: int
    attempt: int
    send: SendOrder
    next: int
    last: int | None = None  # number of its last part, once that is sent


@dataclass(slots=True)
class _Round:
    vector: Vector
    contributed: bool = False
    commit: Commit | None = None
    told_whole: bool = False
    moved_s: float = 0.0  # when something of it last arrived


@dataclass(frozen=True, slots=True)
class Finished:
    """What a round came to in this region."""

    rnd: int
    about: Meta
    result_P: Floats


@dataclass(slots=True)
class Node:
    """A state machine without clock, socket or thread.

    It is told what the region contributes and what arrives, and asked for the next part to each
    other region. What it wants to say beside parts is in `out`; what is finished, in `done`.

    Attributes:
        me: this region's number.
        num_regions: N.
        home: the coordinator's region.
        grid: the vector's segments.
        fused: see `Policy`.
        window: parts under way to one region.
        stall_s: how long to wait for progress before the coordinator is told.
        out: (to whom, what), in order; the caller takes them.
        clashes: partial sums that were refused because they held something once more.
        done: rounds that are over; the caller takes them.
        finished: number of the last of them.
    """

    me: int
    num_regions: int
    home: int
    grid: Grid
    fused: bool
    window: int = 32
    stall_s: float = 20.0
    out: list[tuple[int, ControlMessage]] = field(default_factory=list)
    done: list[Finished] = field(default_factory=list)
    finished: int = 0
    clashes: int = 0
    _rounds: dict[int, _Round] = field(default_factory=dict)
    _paces: dict[int, Pace] = field(default_factory=dict)
    _going: dict[int, list[_Going]] = field(default_factory=dict)
    _received: dict[int, int] = field(default_factory=dict)  # parts by sender
    _owed: dict[int, int] = field(default_factory=dict)  # acknowledgements not sent yet

    # ------------------------------------------------------------------ the region's own

    def contribute(self, rnd: int, own_P: Floats, weight: float, about: Meta, now_s: float) -> None:
        """Take part in a round.

        Raises:
            InvariantError: the region did so already, or it is not that round's turn.
        """
        if rnd != self.finished + 1 or self._round(rnd, now_s).contributed:
            raise InvariantError(f"region {self.me} contributes to round {rnd} out of turn")
        entry = self._round(rnd, now_s)
        entry.contributed = True
        entry.vector.contribute(own_P, weight)
        self.out.append((self.home, Ready(rnd, about)))
        self._check(rnd)

    def is_summed(self, rnd: int) -> bool:
        """Whether the whole sum of a round is here."""
        entry = self._rounds.get(rnd)
        return entry is not None and entry.vector.is_summed

    def is_whole(self, rnd: int) -> bool:
        """Whether the whole result of a round is here."""
        entry = self._rounds.get(rnd)
        return entry is not None and entry.vector.is_whole

    def mean(self, rnd: int) -> Floats:
        """The mean of a round: what its sum comes to, or its result if that is made of means."""
        vector = self._rounds[rnd].vector
        return vector.result_P if self.fused else vector.mean()

    def set_result(self, rnd: int, result_P: Floats) -> None:
        """In the coordinator's region, if not `fused`: what the sum came to."""
        self._rounds[rnd].vector.set_result(result_P)
        self._check(rnd)

    # ------------------------------------------------------------------ what arrives

    def on_word(self, peer: int, word: ControlMessage, now_s: float) -> None:
        """Take in what a region or the coordinator says.

        Raises:
            FrameError: it makes no sense.
        """
        if isinstance(word, SegmentAck):
            self._on_ack(peer, word.count, now_s)
        elif isinstance(word, Want):
            self._on_want(peer, word)
        elif peer != self.home:
            raise FrameError(f"region {peer} says {type(word).__name__}; only {self.home} may")
        elif isinstance(word, Orders):
            self._on_orders(word, now_s)
        elif isinstance(word, Fetch):
            self._on_fetch(word)
        elif isinstance(word, Commit):
            self._on_commit(word, now_s)

    def on_part(self, peer: int, part: SegmentPart, now_s: float) -> None:
        """Take in a segment.

        Raises:
            FrameError: it makes no sense.
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
        pace = self._pace(peer)
        pace.ack(count, now_s)
        going = self._going.get(peer, [])
        for order in [o for o in going if o.last is not None and o.last <= pace.acked]:
            going.remove(order)
            self.out.append((self.home, Sent(order.rnd, order.attempt, order.send, *pace.take())))

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
            going = _Going(orders.rnd, orders.attempt, send, send.first)
            self._going.setdefault(send.dst, []).append(going)

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
            going = _Going(want.rnd, entry.vector.attempt, send, first)
            self._going.setdefault(peer, []).append(going)

    def _on_commit(self, commit: Commit, now_s: float) -> None:
        if commit.rnd <= self.finished:
            return
        entry = self._round(commit.rnd, now_s)
        if self.fused and commit.attempt > entry.vector.attempt:
            self._restart(commit.rnd, commit.attempt)
        entry.commit, entry.moved_s = commit, now_s
        self._check(commit.rnd)

    # ------------------------------------------------------------------ what goes out

    def targets(self) -> list[int]:
        """Regions to which something is to be sent, now or later."""
        return [peer for peer, going in self._going.items() if going]

    def next_part(self, peer: int, now_s: float) -> SegmentPart | None:
        """The next segment for a region; it counts as sent. None if there is none now."""
        pace = self._pace(peer)
        order = self._sendable(peer) if pace.has_room else None
        if order is None:
            if pace.has_room and self._is_sending(peer):
                pace.lacks(now_s)
            return None
        vector, index, send = self._rounds[order.rnd].vector, order.next, order.send
        if send.phase == SUM:
            mask, weight, data = vector.sum_of(index)
        else:
            mask, weight, data = 0, 0.0, vector.result_of(index)
        pace.push(data.nbytes, now_s)
        order.next += 1
        if order.next == send.stop:
            order.last = pace.sent
        wants_ack = pace.ask(is_last=order.last is not None)
        phase = SUM if send.phase == SUM else RESULT
        acked = self._owed.pop(peer, 0)
        return SegmentPart(
            order.rnd, vector.attempt, phase, index, mask, weight, wants_ack, data, acked
        )

    def acknowledge(self) -> None:
        """Say what is owed and did not go out with a part; after the last `next_part` for now."""
        self.out += [(peer, SegmentAck(count)) for peer, count in self._owed.items()]
        self._owed.clear()

    def _sendable(self, peer: int) -> _Going | None:
        for order in self._going.get(peer, []):
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
        """Whether an order is begun and not finished."""
        going = self._going.get(peer, [])
        return any(o.last is None and o.next > o.send.first for o in going)

    def _is_contributing(self) -> bool:
        """Whether a round is under way."""
        entry = self._rounds.get(self.finished + 1)
        return entry is not None and entry.contributed

    # ------------------------------------------------------------------ time

    def tick(self, now_s: float) -> None:
        """Tell the coordinator of what makes no progress."""
        for peer, pace in self._paces.items():
            if pace.silent_s(now_s) <= self.stall_s:
                continue
            pace.excuse(now_s)
            going = self._going.get(peer, [])
            self.out += [(self.home, Stuck(rnd, peer)) for rnd in sorted({o.rnd for o in going})]
            # The coordinator finds somebody else for a result. A sum has to wait for its word.
            self._going[peer] = [o for o in going if o.send.phase == SUM]
        for rnd, entry in self._rounds.items():
            if entry.commit is None or entry.vector.is_whole or rnd <= self.finished:
                continue
            if now_s - entry.moved_s > self.stall_s:
                entry.moved_s = now_s
                self.out.append((self.home, Starved(rnd)))

    def set_rtt(self, peer: int, rtt_s: float) -> None:
        """The round trip to a region, for what is measured."""
        self._pace(peer).rtt_s = rtt_s

    # ------------------------------------------------------------------ inside

    def _check(self, rnd: int) -> None:
        """A round may be over."""
        entry = self._rounds[rnd]
        if not entry.vector.is_whole:
            return
        if not entry.told_whole:
            entry.told_whole = True
            self.out.append((self.home, Whole(rnd)))
        if entry.commit is None or not entry.contributed or rnd <= self.finished:
            return
        self.finished = rnd
        self.done.append(Finished(rnd, entry.commit.about, entry.vector.result_P))
        # All have contributed to this round, so all had the result of the one before.
        self._drop(lambda order: order.rnd < rnd)
        for old in [known for known in self._rounds if known < rnd]:
            del self._rounds[old]

    def _restart(self, rnd: int, attempt: int) -> None:
        self._drop(lambda order: order.rnd == rnd and (self.fused or order.send.phase == SUM))
        self._rounds[rnd].told_whole = False
        self._rounds[rnd].vector.restart(attempt)

    def _drop(self, is_void: Callable[[_Going], bool]) -> None:
        for peer, going in self._going.items():
            self._going[peer] = [order for order in going if not is_void(order)]

    def _round(self, rnd: int, now_s: float) -> _Round:
        if rnd not in self._rounds:
            if not self.finished < rnd <= self.finished + _AHEAD:
                raise FrameError(f"round {rnd} is far from round {self.finished}, the last one")
            vector = Vector(self.me, self.num_regions, self.grid, fused=self.fused)
            self._rounds[rnd] = _Round(vector, moved_s=now_s)
        return self._rounds[rnd]

    def _fits(self, first: int, stop: int) -> bool:
        return 0 <= first < stop <= self.grid.count

    def _pace(self, peer: int) -> Pace:
        if peer not in self._paces:
            self._paces[peer] = Pace(self.window)
        return self._paces[peer]
