"""Loss and jitter: seeded, without a clock."""

from __future__ import annotations

import math
from random import Random


class Loss:
    """Decides packet by packet: independent loss, and bursts after Gilbert and Elliott.

    The bursts are a chain of two states. In the bad one every packet is lost; the chain moves
    before each packet, so the share lost to bursts is ``start / (start + stop)`` and a burst is
    ``1 / stop`` packets long on average.

    Args:
        random: the source of chance, this object's own.
        loss: probability of independent loss.
        start: probability to become bad.
        stop: probability to become good again.
    """

    __slots__ = ("_bad", "_loss", "_next", "_start", "_stop")

    def __init__(self, random: Random, loss: float, start: float, stop: float) -> None:
        self._next = random.random
        self._loss, self._start, self._stop = loss, start, stop
        self._bad = False

    def hits(self) -> bool:
        """Whether the next packet is lost."""
        if self._start:
            turn = self._stop if self._bad else self._start
            if self._next() < turn:
                self._bad = not self._bad
            if self._bad:
                return True
        return self._next() < self._loss


class Jitter:
    """Gaussian deviations of the delay that forget themselves over time.

    Independent deviations with order kept would turn into a higher mean: every packet would wait
    for the slowest before it. Correlated ones move slowly against the spacing of packets.

    Args:
        random: the source of chance, this object's own.
        deviation_s: standard deviation.
        memory_s: time constant of the correlation; 0 draws each packet's deviation afresh.
    """

    __slots__ = ("_at_ns", "_deviation_ns", "_memory_ns", "_random", "_value")

    def __init__(self, random: Random, deviation_s: float, memory_s: float) -> None:
        self._random = random
        self._deviation_ns = deviation_s * 1e9
        self._memory_ns = memory_s * 1e9
        self._value = 0.0
        self._at_ns: float | None = None

    def offset_ns(self, at_ns: float) -> float:
        """The deviation of a packet that leaves at ``at_ns``, not before the one asked for last."""
        kept = 0.0
        if self._memory_ns and self._at_ns is not None:
            kept = math.exp((self._at_ns - at_ns) / self._memory_ns)
        fresh = math.sqrt(1.0 - kept * kept)
        self._value = kept * self._value + fresh * self._random.gauss(0.0, 1.0)
        self._at_ns = at_ns
        return self._value * self._deviation_ns
