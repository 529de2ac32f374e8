"""Flow control of a link: congestion window and number of streams. Pure.

Window: TCP fills whatever queue the bottleneck has, and heartbeats would wait behind it. The
window covers all streams and aims at a short queue as LEDBAT does (RFC 6817), but its step is
proportional to the window. It starts at 256 KiB and doubles until the first queue. Then it grows by
up to a quarter per 1.5 round trips while the queue is shorter than 30 % of the minimum round trip,
and shrinks otherwise, to at least 128 KiB; loss alone does not shrink it. Chunks are at most an
eighth of it. Twice a minute, at the same times on all hosts, full windows shrink to 40 % for a
round trip and a half (at least 0.1 s), so that the minimum round trip is measured on an empty
queue; it counts for a minute. Control messages have a second window of its size. Peers on one host
(one address, round trips below 3 ms) use at least 32 MiB, chunks of 1 MiB and fewer heartbeats, and
acknowledge several chunks at once: there, each costs more than the bytes.

Streams: the number is found by trial. While data waits and the link has no queue it is doubled.
If four times as many streams carry hardly more (15 %), the earlier number is restored, and the next
trial waits a minute, then twice as long after each failure, up to 16 minutes. A burst that doubling
made much slower also counts as failure: the first flights overflowed a queue. After a first queue
there is at most one stream per 13 KiB of the window.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from geo_ray.base.errors import FrameError
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.links import LinkEstimate, LinkEstimator
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.frames import Frame, FrameKind

_START_BYTES: Final = 256 * 1024  # a slow link has no more room; on a fast one it soon doubles
_LARGEST_BYTES: Final = 1024**3
_QUEUE_SHARE: Final = 0.3  # the aimed queue, as a share of the shortest round trip
QUEUE_MIN_S: Final = 0.010
"""The shortest queue that is aimed at; shorter delays come from the machine, not the link."""

_BASE_MEMORY_S: Final = 60.0
_LOOK_RTTS: Final = 1.5
_FULL: Final = 0.9  # share of the window under way from which on the window limits the data
_CLEAR: Final = 0.7  # above that pull there is hardly a queue
_CLEAR_LOOKS: Final = 30
_BLIND_RTTS: Final = 2.5
_LOOK_SAMPLES: Final = 4
_GAIN: Final = 0.25  # largest growth between two looks
_YOUNG_GAIN: Final = 1.0  # largest growth until the first queue
_STEEPEST: Final = -2.0
_DRAIN_EVERY_S: Final = 30.0  # twice in the memory of the shortest round trip
_DRAIN_SHARE: Final = 0.4
_DRAIN_RTTS: Final = 1.5
_DRAIN_MIN_S: Final = 0.1  # many times the spread of clocks and heartbeats


class Window:
    """Window of one direction of a link.

    Args:
        smallest_bytes: lower bound; enough for a chunk per stream.
        unix_offset_s: of the time of day to that of the calls, so that windows of several hosts
            whose data share a line let it run empty together.

    Attributes:
        size_bytes: bytes that may be in flight, except while the line runs empty.
        base_rtt_s: the shortest round trip lately, or None.
    """

    def __init__(self, smallest_bytes: int, unix_offset_s: float = 0.0) -> None:
        self.size_bytes = float(_START_BYTES)
        self.base_rtt_s: float | None = None
        self._smallest_bytes = smallest_bytes
        self._is_young = True
        self._base: deque[tuple[float, float]] = deque()  # (when, rtt), ascending in both
        self._unix_offset_s = unix_offset_s
        self._slot: float | None = None
        self._begun_s = 0.0  # since when the link was never idle
        self._drain_s = (-1.0, 0.0)  # from when, and for how long
        self._looked_s = 0.0
        self._quiet_until_s = 0.0
        self._held_bytes: float | None = None  # what the path held when there was a short queue
        self._clear_looks = 0
        self._rtts: list[float] = []  # since the last look
        self._acked_bytes = 0
        self._was_full = False

    @property
    def has_met_queue(self) -> bool:
        """Whether a queue was seen, so that the size says something about the path."""
        return not self._is_young

    def begin(self, now_s: float) -> None:
        """Begin a busy time after a pause.

        Until its first round trips are complete no queue is visible, and the window must not grow.
        """
        self._begun_s = now_s
        if self._is_young:  # round trips from before the first data say nothing of their queue
            self._looked_s, self._rtts = now_s, []
        self._quiet_until_s = now_s + _BLIND_RTTS * (self.base_rtt_s or 0.0)
        if self._held_bytes is not None:
            self.size_bytes = min(self.size_bytes, self._held_bytes)

    def free_bytes(self, now_s: float) -> float:
        """Return the bytes that may be in flight now."""
        start_s, length_s = self._drain_s
        since_s = now_s - start_s
        if not 0.0 <= since_s < 2.0 * length_s:
            return self.size_bytes
        back = max(0.0, since_s / length_s - 1.0)  # not all at once: that would make a queue
        return self.size_bytes * (_DRAIN_SHARE + (1.0 - _DRAIN_SHARE) * back)

    def _plan_drain(self, now_s: float, rtt_s: float) -> bool:
        """Start to let the line run empty if it is time; return whether it is running empty."""
        slot = (now_s + self._unix_offset_s) // _DRAIN_EVERY_S
        earlier, self._slot = self._slot, slot
        if earlier is not None and slot != earlier:
            start_s = slot * _DRAIN_EVERY_S - self._unix_offset_s
            if not self._is_young and now_s - self._begun_s > _DRAIN_EVERY_S / 2:
                self._drain_s = start_s, max(_DRAIN_MIN_S, _DRAIN_RTTS * rtt_s)
        start_s, length_s = self._drain_s
        return 0.0 <= now_s - start_s < 2.0 * length_s + rtt_s

    def on_rtt(self, now_s: float, rtt_s: float) -> None:
        """Record a heartbeat's round trip."""
        while self._base and self._base[-1][1] >= rtt_s:
            self._base.pop()
        self._base.append((now_s, rtt_s))
        while now_s - self._base[0][0] > _BASE_MEMORY_S:
            self._base.popleft()
        self.base_rtt_s = self._base[0][1]
        if self._plan_drain(now_s, rtt_s):
            self._looked_s, self._rtts = now_s, []
            self._acked_bytes, self._was_full = 0, False
            return
        if self._is_young and now_s - rtt_s <= self._looked_s:
            return  # begun before the window doubled: it would double again into a queue
        self._rtts.append(rtt_s)
        is_time = now_s - self._looked_s >= _LOOK_RTTS * self.base_rtt_s
        if is_time and len(self._rtts) >= _LOOK_SAMPLES:
            self._look(now_s, self.base_rtt_s)

    def on_acked(self, size_bytes: int, in_flight_bytes: int) -> None:
        """Record acknowledged chunks.

        Args:
            size_bytes: size of the chunks.
            in_flight_bytes: bytes under way before that.
        """
        self._acked_bytes += size_bytes
        self._was_full = self._was_full or in_flight_bytes > _FULL * self.size_bytes

    def _look(self, now_s: float, base_s: float) -> None:
        # A lost packet of the heartbeats' own stream delays some of them, but not the last ones of
        # the batch that then comes: the shortest round trip is the queue's.
        queue_s = min(self._rtts) - base_s
        pull = max(_STEEPEST, 1.0 - queue_s / max(QUEUE_MIN_S, _QUEUE_SHARE * base_s))
        if pull < 0.5:
            self._is_young = False
        self._remember(pull)
        is_blind = now_s < self._quiet_until_s and not self._is_young
        if pull < 0.0 or (self._was_full and not is_blind):  # else it is no limit
            gain = _YOUNG_GAIN if self._is_young else _GAIN
            moved = gain * pull * min(self._acked_bytes, self.size_bytes)
            grown = self.size_bytes + moved
            self.size_bytes = min(float(_LARGEST_BYTES), max(float(self._smallest_bytes), grown))
        self._looked_s, self._rtts = now_s, []
        self._acked_bytes, self._was_full = 0, False

    def _remember(self, pull: float) -> None:
        """Store the size that made a short queue: the next burst begins with it.

        While TCP recovers from a loss the window fills with unsent bytes of the kernel, and shows
        nothing about the path.
        """
        if pull > _CLEAR:
            self._clear_looks += 1
            if self._clear_looks >= _CLEAR_LOOKS:  # the link has become faster
                self._held_bytes = None
            return
        self._clear_looks = 0
        if pull >= -0.5:
            held = self.size_bytes if self._held_bytes is None else self._held_bytes
            self._held_bytes = 0.5 * (held + self.size_bytes)


LEVELS: Final = (1, 2, 4, 8, 16, 32, 64, 96)
_MEMORY_S: Final = 60.0
_BETTER: Final = 1.15
_LOOK_BACK: Final = 2  # number of doublings that are compared
_SETTLED: Final = 3  # busy periods at a level before it is compared; TCP ramps up in the first
_EASY: Final = 20  # busy periods without waiting after which fewer streams are tried
_LONG: Final = 0  # the kind of all long transfers
_MUCH_WORSE: Final = 0.6  # of the worst at the level below: one burst is enough to go back
_MOST_PATIENCE: Final = 16  # times the first wait
_WAITED: Final = 0.2  # share of the time; below it, streams are not what delays the data


@dataclass(frozen=True, slots=True)
class BusyPeriod:
    """Measurements of a time in which a link was busy.

    Attributes:
        size_bytes: bytes acknowledged in it.
        lasted_s: its duration.
        streams: number of streams that carried it.
        waited: fraction of the time in which data waited for a stream, not for the window.
        is_whole: a whole burst between two pauses, rather than a part of a long one.
        most: streams whose first flights together fill the link's window. More streams would
            overflow the link's queue, each with so few segments that TCP must wait for timeouts.
    """

    size_bytes: int
    lasted_s: float
    streams: int
    waited: float
    is_whole: bool
    most: int = LEVELS[-1]

    @property
    def score(self) -> float:
        """The goodput in bytes per second."""
        return self.size_bytes / self.lasted_s


@dataclass(slots=True)
class _Climb:
    """The search for one kind of busy period; scores are bytes per second."""

    index: int
    seen_s: float = 0.0
    scores: list[float] = field(default_factory=list)  # scores at the present level
    path: dict[int, float] = field(default_factory=dict)  # scores of the levels below
    easy: int = 0
    blocked_until_s: float = 0.0
    patience: int = 1  # how many times `_MEMORY_S` the next failure blocks
    given_up: float = 0.0  # score of the level that carried hardly more

    def move(self, index: int) -> None:
        self.index, self.scores, self.easy = index, [], 0

    def give_up(self, now_s: float, index: int, score: float) -> None:
        """Return to fewer streams; ``score`` is the goodput of those on trial."""
        self.blocked_until_s, self.given_up = now_s + self.patience * _MEMORY_S, score
        self.patience = min(2 * self.patience, _MOST_PATIENCE)
        self.path.clear()
        self.move(index)


class StreamCount:
    """Chooses the number of data streams.

    Args:
        smallest: fewest streams.
        largest: most streams.
        first: number to begin with.
    """

    def __init__(self, smallest: int, largest: int, first: int) -> None:
        within = [level for level in LEVELS if smallest <= level <= largest]
        self._levels = within or [smallest]
        self._first = max(i for i, n in enumerate(self._levels) if n <= max(first, self._levels[0]))
        self._climbs: dict[int, _Climb] = {}
        self._now_s = 0.0

    @property
    def target(self) -> int:
        """Return the number of streams for the most demanding recent kind of traffic."""
        fresh = [c.index for c in self._climbs.values() if self._now_s - c.seen_s < _MEMORY_S]
        return self._levels[max(fresh, default=self._first)]

    def observe(self, now_s: float, period: BusyPeriod) -> int:
        """Learn from a busy time; return the new target.

        A time with another number of streams than the target is ignored: streams are being opened
        or closed.
        """
        self._now_s = now_s
        if period.streams != self.target or period.lasted_s <= 0.0:
            return self.target
        present = self._levels.index(self.target)
        kind = self._kind(period, present)
        climb = self._climbs.setdefault(kind, _Climb(present))
        climb.seen_s = now_s
        if climb.index != present:  # another kind wants more
            return self.target
        climb.scores.append(period.score)
        below = climb.path.get(present - 1, 0.0)
        if kind != _LONG and period.score < _MUCH_WORSE * below:
            climb.give_up(now_s, present - 1, period.score)
            return self.target
        waits = period.waited > _WAITED
        climb.easy = 0 if waits else climb.easy + 1
        if len(climb.scores) >= _SETTLED:
            upwards = self._levels[present + 1 :]
            self._judge(now_s, climb, waits=waits and bool(upwards) and upwards[0] <= period.most)
        return self.target

    def _kind(self, period: BusyPeriod, present: int) -> int:
        """Return the class of a busy period: bursts by size, all long transfers in one."""
        if period.is_whole:
            return period.size_bytes.bit_length()
        for kind, climb in self._climbs.items():
            on_trial = climb.index == present and len(climb.scores) < _SETTLED
            if on_trial and period.score < climb.path.get(present - 1, 0.0):
                return kind  # bursts last so long now that none is whole
        return _LONG

    def _judge(self, now_s: float, climb: _Climb, *, waits: bool) -> None:
        # New streams begin with a burst, so the level below is compared by its worse busy period.
        lower, upper = min(climb.scores[-_SETTLED:]), max(climb.scores[-_SETTLED:])
        before = climb.path.pop(climb.index - _LOOK_BACK, None)  # compared only once
        if before is not None and upper < _BETTER * before:
            climb.give_up(now_s, climb.index - _LOOK_BACK, upper)
        elif waits and (now_s >= climb.blocked_until_s or _BETTER * upper < climb.given_up):
            climb.given_up, climb.blocked_until_s = 0.0, now_s
            climb.patience = 1 if before is not None else climb.patience  # more did carry more
            climb.path[climb.index] = lower
            climb.move(climb.index + 1)
        elif climb.easy >= _EASY and climb.index > self._first:
            climb.path.clear()
            climb.move(climb.index - 1)


_LONG_RTTS: Final = 8.0
_LONG_S: Final = 0.4
_SHORT_RTTS: Final = 1.5
_NEAR_S: Final = 0.003  # a link with a shorter round trip is no wide-area link
_FIRST_FAR: Final = 4
_MOST_NEAR: Final = 4
_MANY: Final = 32
_FIRST_FLIGHT_BYTES: Final = 13 * 1024  # with frame and TLS records less than 10 x 1448
_SHORTEST_BYTES: Final = 16 * 1024
_CHUNKS_IN_WINDOW: Final = 8
_WIDER: Final = 4  # longest chunk on a fast link, over that of others
_CHUNKS_IN_WIDE: Final = 64
_WIDEST: Final = 16  # the same between two processes of one host
_LARGEST_CHUNK_BYTES: Final = 1024**2  # peers take no longer ones
_WIDE_S: Final = 0.02  # a chunk on one host takes no longer than that
_ON_HOST_BYTES: Final = 32 * 1024**2  # least window on one host
_KERNEL_BYTES: Final = 512 * 1024  # limit of unsent bytes in the kernel, over all streams
_ON_HOST_KERNEL_CHUNKS: Final = 4  # the same on one host, for each stream
_ACK_BYTES: Final = 4 * 1024**2  # on one host, so many bytes are acknowledged at once
_ACK_DELAY_S: Final = 0.002
_MOST_STALL_FACTOR: Final = 64.0
_PROMPT: Final = 4.0
_CALM: Final = 0.9
_ESTIMATE_EVERY_S: Final = 1.0
_PING_MAX_S: Final = 0.05
_PING_MIN_S: Final = 0.01


class FlowControl:
    """The window, stream count and chunk size of one direction of a link; outlives connections.

    Args:
        config: bounds.
        is_shaped: whether the link is emulated: it then needs neither window nor streams.
        unix_offset_s: see `Window`.

    Attributes:
        window: how much may be under way.
        streams: how many data streams there should be.
        estimate: what was learned about the link, as of a second ago; any thread may read it.
    """

    def __init__(
        self, config: TransportConfig, *, is_shaped: bool, unix_offset_s: float = 0.0
    ) -> None:
        self.window = Window(_CHUNKS_IN_WINDOW * _SHORTEST_BYTES, unix_offset_s)
        self._now_s = 0.0
        self._estimator = LinkEstimator()
        self.estimate: LinkEstimate = self._estimator.snapshot(0.0)
        self._estimated_s = 0.0
        self._config = config
        self._is_shaped = is_shaped
        self._has_one_address = False
        self._count: StreamCount | None = None
        self._begun_s: float | None = None
        self._acked_bytes = 0
        self._waited_s = 0.0
        self._looked_s = 0.0
        self._was_waiting = False
        self._had_more = False
        self._is_whole = True
        self._stall_factor = 1.0

    def connected(self, *, one_address: bool) -> None:
        """Record that a connection has begun, and whether both of its ends have one address."""
        self._has_one_address = one_address

    @property
    def is_on_host(self) -> bool:
        """Return whether the peer is on this host, and not behind a tunnel that begins here.

        There is no line to share. Heartbeats are delayed by a busy processor, which fewer bytes in
        flight or more streams would not help; every chunk costs processor time.
        """
        base_s = self.window.base_rtt_s
        near = self._has_one_address and base_s is not None and base_s < _NEAR_S
        return near and not self._is_shaped

    @property
    def streams(self) -> int:
        """The number of data streams wanted now."""
        smallest = self._config.min_streams
        if self._is_shaped or self._count is None or self.is_on_host:
            return smallest
        return self._count.target

    def chunk_bytes(self, streams: int) -> int:
        """Return the longest chunk for that many streams: small chunks wait less for a slow stream.

        With many, a chunk is what TCP sends at once after a pause (ten segments, RFC 6928). A small
        window is that of a slow link, where a heartbeat waits for the chunk before it.
        """
        if self.is_on_host:
            # A relay on this host may lead over a slow line: only what was seen to pass is wide.
            peak_mbps = self.estimate.goodput_peak_mbps or 0.0
            fast_bytes = int(peak_mbps * 1e6 / 8 * _WIDE_S / max(1, streams))
            wide_bytes = min(fast_bytes, _WIDEST * self._config.chunk_bytes)
            return min(_LARGEST_CHUNK_BYTES, max(self._config.chunk_bytes, wide_bytes))
        if streams >= _MANY:
            return min(self._config.chunk_bytes, _FIRST_FLIGHT_BYTES)
        part_bytes, most_bytes = 1024**2 // max(1, streams), self._config.chunk_bytes
        if not self._is_shaped:
            window_bytes = int(self.window.size_bytes)
            part_bytes = min(part_bytes, window_bytes // _CHUNKS_IN_WINDOW)
            # A window that holds that many of them causes short waits only; each has its cost.
            wide_bytes = min(_WIDER * most_bytes, window_bytes // _CHUNKS_IN_WIDE)
            most_bytes = max(most_bytes, wide_bytes)
        return max(_SHORTEST_BYTES, min(most_bytes, part_bytes))

    def shares(self, streams: int) -> int:
        """Return the smallest number of chunks of a message: one for each of its streams.

        After a pause TCP sends a few segments per stream and waits for a round trip, or spreads
        them over a part of it, whatever the line could carry. So an update that is small compared
        with the window arrives after half a round trip only if all streams carry a part of it.
        """
        return 1 if self._is_shaped or self.is_on_host else max(1, streams)

    def unsent_bytes(self, streams: int) -> int:
        """Return how many unsent bytes a stream's kernel buffer may hold."""
        if self.is_on_host:  # what others could overtake there has passed in a moment
            return _ON_HOST_KERNEL_CHUNKS * self.chunk_bytes(streams)
        return max(16 * 1024, min(256 * 1024, _KERNEL_BYTES // max(1, streams)))

    def ping_every_s(self) -> float | None:
        """The interval between heartbeats while the link is busy; None takes the usual one."""
        base_s = self.window.base_rtt_s
        if self._begun_s is None or base_s is None:
            return None
        if self.is_on_host:
            return _PING_MAX_S
        return min(_PING_MAX_S, max(_PING_MIN_S, base_s / 4))

    def ack_delay_s(self, owed_bytes: int) -> float:
        """Return how long received chunks may wait to be acknowledged with others.

        Args:
            owed_bytes: size of the chunks.
        """
        is_bulk = _LARGEST_CHUNK_BYTES // 2 <= owed_bytes < _ACK_BYTES
        return _ACK_DELAY_S if is_bulk and self.is_on_host else 0.0

    @property
    def stall_limit_s(self) -> float:
        """Return the time without progress after which a stream is closed.

        A chunk is acknowledged as a whole. If one takes longer than the limit, every new stream
        would be closed as well, so the limit doubles each time, until chunks arrive in a small
        part of it again.
        """
        return self._config.unresponsive_after_s * self._stall_factor

    def on_stall(self) -> None:
        """Record that streams were closed because they made no progress."""
        self._stall_factor = min(_MOST_STALL_FACTOR, 2.0 * self._stall_factor)

    def on_chunk(self, took_s: float) -> None:
        """Record the time of a chunk from the sender to its acknowledgement."""
        if self._stall_factor > 1.0 and took_s < self._config.unresponsive_after_s / _PROMPT:
            self._stall_factor = max(1.0, _CALM * self._stall_factor)

    def may_send(self, in_flight_bytes: int) -> bool:
        """Return whether the window has space for a chunk."""
        if self._is_shaped or (self.is_on_host and in_flight_bytes < _ON_HOST_BYTES):
            return True
        return in_flight_bytes < self.window.free_bytes(self._now_s)

    def on_rtt(self, now_s: float, rtt_s: float) -> None:
        """Record a heartbeat's round trip; the first one shows the distance of the peer."""
        self._now_s = now_s
        self.window.on_rtt(now_s, rtt_s)
        self._estimator.on_rtt(now_s, rtt_s)
        if self._count is None:
            smallest, largest = self._config.min_streams, self._config.max_streams
            if rtt_s > _NEAR_S:
                self._count = StreamCount(smallest, largest, _FIRST_FAR)
            else:
                self._count = StreamCount(smallest, max(smallest, min(largest, _MOST_NEAR)), 1)

    def on_acked(self, now_s: float, size_bytes: int, in_flight_bytes: int) -> None:
        """Record acknowledged chunks; ``in_flight_bytes`` were in flight before."""
        self._acked_bytes += size_bytes
        self._estimator.on_delivered(now_s, size_bytes, self._had_more)
        self.window.on_acked(size_bytes, in_flight_bytes)

    def on_segments(self, now_s: float, sent: int, retransmitted: int) -> None:
        """Record the segments that the kernel has sent since the last call, over all streams."""
        self._estimator.on_segments(now_s, sent, retransmitted)

    def look(
        self, now_s: float, streams: int, *, is_busy: bool, has_more: bool, waits: bool
    ) -> None:
        """Observe the link's state at the end of a turn of the loop.

        Args:
            now_s: the time.
            streams: data streams that are open.
            is_busy: whether anything is in flight or waits.
            has_more: whether something waits that is not in flight.
            waits: whether it waits for a stream although the window has space.
        """
        self._now_s, self._had_more = now_s, has_more
        if now_s - self._estimated_s >= _ESTIMATE_EVERY_S:
            self._estimated_s = now_s
            self.estimate = self._estimator.snapshot(now_s)
        if self._was_waiting:
            self._waited_s += now_s - self._looked_s
        self._looked_s, self._was_waiting = now_s, waits
        if self._begun_s is None:
            if is_busy:
                self._begin(now_s, is_whole=True)
                self.window.begin(now_s)
            return
        base_s = self.window.base_rtt_s or 0.0
        if not is_busy:
            self._end(now_s, streams, base_s)
            self._begun_s = None
            self._was_waiting = False
        elif now_s - self._begun_s > max(_LONG_S, _LONG_RTTS * base_s):
            self._is_whole = False
            self._end(now_s, streams, base_s)
            self._begin(now_s, is_whole=False)

    def _begin(self, now_s: float, *, is_whole: bool) -> None:
        self._begun_s, self._is_whole = now_s, is_whole
        self._acked_bytes, self._waited_s = 0, 0.0

    def _end(self, now_s: float, streams: int, base_s: float) -> None:
        if self._begun_s is None or self._count is None:
            return
        lasted_s = now_s - self._begun_s
        # The tail of a long transfer is neither a whole burst nor a full busy period.
        is_tail = not self._is_whole and lasted_s < max(_LONG_S, _LONG_RTTS * base_s)
        if is_tail or self._acked_bytes < self._config.chunk_bytes:
            return
        waited = self._waited_s / lasted_s if lasted_s > 0.0 else 0.0
        if self._is_whole and lasted_s > _SHORT_RTTS * base_s:
            # After a pause TCP begins slowly on every stream, with the data in the kernel already.
            waited = 1.0
        most = self._config.max_streams
        if self.window.has_met_queue:
            most = int(self.window.size_bytes) // _FIRST_FLIGHT_BYTES
        period = BusyPeriod(self._acked_bytes, lasted_s, streams, waited, self._is_whole, most)
        self._count.observe(now_s, period)


class Heartbeat:
    """The pings that are due and the peer's pings to answer, of one connection.

    Args:
        interval_s: time between two pings while little happens, in seconds.

    Attributes:
        rtt_s: the last round trip, or None.
        rtt_min_s: the shortest round trip, or None.
    """

    def __init__(self, interval_s: float) -> None:
        self.rtt_s: float | None = None
        self.rtt_min_s: float | None = None
        self._interval_s = interval_s
        self._last_s: float | None = None
        self._unanswered_s: float | None = None  # the peer's time of its last ping

    def due_s(self, interval_s: float | None = None) -> float:
        """When the next ping is due; at once if there was none.

        Args:
            interval_s: between two pings, if that is to be shorter now.
        """
        if self._last_s is None:
            return 0.0
        return self._last_s + min(self._interval_s, interval_s or self._interval_s)

    def frames(self, now_s: float, interval_s: float | None = None) -> list[Frame]:
        """Return the frames to send now: an answer, a ping, both or none."""
        due = []
        if self._unanswered_s is not None:
            due.append(Frame(FrameKind.PONG, {"at_s": self._unanswered_s}))
            self._unanswered_s = None
        if now_s >= self.due_s(interval_s):
            self._last_s = now_s
            due.append(Frame(FrameKind.PING, {"at_s": now_s}))
        return due

    def ping(self, meta: Meta) -> None:
        """Record the peer's ping; only the last one is answered.

        Raises:
            FrameError: the frame is malformed.
        """
        self._unanswered_s = _seconds(meta)

    def pong(self, meta: Meta, now_s: float) -> float:
        """Process the peer's answer and return the round trip in seconds.

        Raises:
            FrameError: the frame is malformed.
        """
        rtt_s = now_s - _seconds(meta)
        if rtt_s < 0.0:
            raise FrameError(f"a heartbeat came back {-rtt_s} s before it was sent")
        self.rtt_s = rtt_s
        self.rtt_min_s = self.rtt_s if self.rtt_min_s is None else min(self.rtt_min_s, self.rtt_s)
        return self.rtt_s


def _seconds(meta: Meta) -> float:
    at_s = meta.get("at_s")
    if type(at_s) is not float or not math.isfinite(at_s):
        raise FrameError(f"a heartbeat's time is {at_s!r:.100}")
    return at_s
