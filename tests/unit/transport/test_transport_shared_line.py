"""Flow control of several regions on one line, on a virtual clock: queues, heartbeats, base.

The line is a fluid queue that serves all senders in proportion to what each has in it, with no
limit: what the window does not hold back waits in it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import pytest

from geo_ray.transport.config import TransportConfig
from geo_ray.transport.flow import FlowControl

FOR_EVER: Final = math.inf


@dataclass
class Sender:
    """One end of a link over the line: its flow control and what is on its way."""

    joins_s: float
    burst_bytes: float
    pause_s: float
    offset_s: float
    flow: FlowControl = field(init=False)
    in_flight: float = 0.0
    queued: float = 0.0
    carried: float = 0.0
    left: float = 0.0
    pinged_s: float = -FOR_EVER
    acks: deque[tuple[float, float]] = field(default_factory=deque)
    pongs: deque[tuple[float, float]] = field(default_factory=deque)
    rtts_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.left, self.resumes_s = self.burst_bytes, self.joins_s
        self.flow = FlowControl(TransportConfig(), is_shaped=False, unix_offset_s=-self.offset_s)

    def turn(self, now_s: float, wait_s: float) -> None:
        """What a connection's loop does; a heartbeat that leaves now takes ``wait_s``.

        The times of this sender's clock are later by an offset, as those of another host.
        """
        here_s = now_s + self.offset_s
        while self.acks and self.acks[0][0] <= now_s:
            size = self.acks.popleft()[1]
            self.flow.on_acked(here_s, int(size), int(self.in_flight))
            self.in_flight -= size
            self.carried += size
        while self.pongs and self.pongs[0][0] <= now_s:
            rtt_s = self.pongs.popleft()[1]
            self.flow.on_rtt(here_s, rtt_s)
            self.rtts_s.append(rtt_s)
        if now_s - self.pinged_s >= (self.flow.ping_every_s() or 1.0):
            self.pinged_s = now_s
            self.pongs.append((now_s + wait_s, wait_s))
        sends = now_s >= self.resumes_s and bool(self.rtts_s)
        while sends and self.left > 0 and self.flow.may_send(int(self.in_flight)):
            size = self.flow.chunk_bytes(4)
            self.in_flight += size
            self.queued += size
            self.left -= size
        is_busy = self.in_flight > 1.0
        if self.left <= 0 and not is_busy:
            self.left, self.resumes_s = self.burst_bytes, now_s + self.pause_s
        more = sends and self.left > 0
        self.flow.look(here_s, 4, is_busy=is_busy, has_more=more, waits=False)


@dataclass(frozen=True)
class Played:
    """What became of a line."""

    queue_s: list[float]  # once a second
    used: float  # share of the line's capacity, after the first two minutes


def play(
    senders: Sequence[Sender], mbps: float, base_s: float, seconds: float, tick_s: float
) -> Played:
    rate, served, queues = mbps * 125_000, 0.0, []
    warm_s = min(120.0, seconds / 2)
    for tick in range(round(seconds / tick_s)):
        now_s = tick * tick_s
        waits = sum(sender.queued for sender in senders)
        share = min(1.0, rate * tick_s / waits) if waits else 0.0
        for sender in senders:
            size = share * sender.queued
            sender.queued -= size
            if size:
                sender.acks.append((now_s + base_s, size))
        served += share * waits if now_s >= warm_s else 0.0
        for sender in senders:
            if now_s >= sender.joins_s:
                sender.turn(now_s, base_s + sum(each.queued for each in senders) / rate)
        if tick % round(1.0 / tick_s) == 0:
            queues.append(sum(sender.queued for sender in senders) / rate)
    return Played(queues, served / (rate * (seconds - warm_s)))


def test_a_line_that_is_full_for_twenty_minutes_keeps_its_queue_short() -> None:
    """1 Gbit/s, 100 ms, never idle; those that come later never saw it empty by themselves.

    Each sender is on a host of its own, whose clock began at another time.
    """
    joins_s = 0.0, 20.0, 35.0
    senders = [Sender(s, FOR_EVER, 0.0, 1000.0 * n) for n, s in enumerate(joins_s)]
    played = play(senders, 1000.0, 0.1, 1200.0, 0.01)
    for sender in senders:
        assert sender.flow.window.base_rtt_s == pytest.approx(0.1, rel=0.02)
    assert max(played.queue_s[120:]) < 0.1
    assert played.used > 0.95


@pytest.mark.parametrize("burst_mb", [FOR_EVER, 4.0], ids=["always", "bursts"])
def test_heartbeats_on_a_slow_line_stay_under_three_round_trips_from_the_start(
    burst_mb: float,
) -> None:
    """20 Mbit/s, 40 ms, and a buffer without end: the first five seconds."""
    sender = Sender(0.0, 1e6 * burst_mb, 1.0, 0.0)
    played = play([sender], 20.0, 0.04, 5.0, 0.001)
    ordered = sorted(sender.rtts_s)
    assert ordered[int(0.99 * len(ordered))] < 3 * 0.04
    assert played.used > (0.95 if burst_mb == FOR_EVER else 0.5)
