"""Loss and jitter: seeded, without a clock."""

from __future__ import annotations

import math
from random import Random


class Loss:
    """Decides which packets are lost: independent loss, and bursts after Gilbert and Elliott.

    The bursts are a chain of two states. In the bad one every packet is lost; the chain moves
    before each packet, so the share lost to bursts is ``start / (start + stop)`` and a burst is
    ``1 / stop`` packets long on average.

    Args:
        random: random numbers of this object only.
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
        """Return whether the next packet is lost."""
        if self._start:
            turn = self._stop if self._bad else self._start
            if self._next() < turn:
                self._bad = not self._bad
            if self._bad:
                return True
        return self._next() < self._loss


class Jitter:
    """Gaussian deviations of the delay, correlated over a limited time.

    Since order is kept, independent deviations would raise the mean delay: every packet would wait
    for the slowest before it. Correlated deviations change slowly compared with the spacing of
    packets.

    Args:
        random: random numbers of this object only.
        deviation_s: standard deviation.
        memory_s: time constant of the correlation; 0 draws each packet's deviation afresh.
    """

    __slots__ = ("_at_s", "_deviation_s", "_memory_s", "_random", "_value")

    def __init__(self, random: Random, deviation_s: float, memory_s: float) -> None:
        self._random = random
        self._deviation_s = deviation_s
        self._memory_s = memory_s
        self._value = 0.0
        self._at_s: float | None = None

    def offset_s(self, at_s: float) -> float:
        """Return the deviation of a packet that leaves at ``at_s``."""
        kept = 0.0
        if self._memory_s and self._at_s is not None:
            # after a cut or a higher rate a packet may leave earlier than the last one asked for
            kept = math.exp(min(0.0, self._at_s - at_s) / self._memory_s)
        fresh = math.sqrt(1.0 - kept * kept)
        self._value = kept * self._value + fresh * self._random.gauss(0.0, 1.0)
        self._at_s = at_s
        return self._value * self._deviation_s
