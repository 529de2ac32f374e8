"""What an interval and a codec cost in loss: as assumed for any task, or as measured for one.

A measured difference counts with its upper end: the mean over pairs of runs of equal seed, and as
much more as would cover the true mean in 19 of 20 cases (one-sided Student's t). What noise hides
is then reckoned as a cost, since the loss budget is an upper limit; more seeds make it smaller.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol

from geo_ray.planning.loss_profile import LossKey, LossProfile
from geo_ray.planning.tradeoffs import LOSS_BY_CODEC, LOSS_OF_DELAY, loss_of_interval

_T_95: Final = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)
"""Quantiles of Student's t by degrees of freedom, from 1 on; the last one serves for more."""


class LossTable(Protocol):
    """Predicts the relative loss of a way to exchange."""

    @property
    def is_measured(self) -> bool:
        """Whether it is of the task at hand."""

    def loss(self, interval: int, codec: str | None, *, trains_on: bool) -> float:
        """Return the loss against plain training; infinite if training diverged.

        Args:
            interval: local steps between exchanges.
            codec: of the updates.
            trains_on: whether regions do not stand still for exchanges.
        """


@dataclass(frozen=True, slots=True)
class AssumedLoss:
    """The rough table for any task."""

    @property
    def is_measured(self) -> bool:
        """Whether it is of the task at hand."""
        return False

    def loss(self, interval: int, codec: str | None, *, trains_on: bool) -> float:
        """Return the loss; see `LossTable`."""
        late = LOSS_OF_DELAY if trains_on else 0.0
        return loss_of_interval(interval) + LOSS_BY_CODEC[codec] + late


@dataclass(frozen=True, slots=True)
class Difference:
    """A relative difference of loss over pairs of runs.

    Attributes:
        mean: over the pairs; infinite if a run diverged.
        upper: that counts: at least 0.
    """

    mean: float
    upper: float


@dataclass(frozen=True, slots=True)
class MeasuredLoss:
    """The table of one task.

    Attributes:
        intervals: (local steps, loss) without codec, ascending; at least one.
        codecs: loss that each adds; what was not measured is assumed.
    """

    intervals: tuple[tuple[int, float], ...]
    codecs: Mapping[str | None, float]

    @classmethod
    def of(cls, profile: LossProfile) -> MeasuredLoss:
        """Return the table of a measurement."""
        found = differences(profile)
        intervals = [(h, each.upper) for (h, codec), each in found.items() if codec is None]
        codecs = {codec: each.upper for (_, codec), each in found.items() if codec is not None}
        return cls(tuple(sorted(intervals)), {None: 0.0} | codecs)

    @property
    def is_measured(self) -> bool:
        """Whether it is of the task at hand."""
        return True

    def loss(self, interval: int, codec: str | None, *, trains_on: bool) -> float:
        """Return the loss; see `LossTable`. That regions train on is in the measurement."""
        added = self.codecs[codec] if codec in self.codecs else LOSS_BY_CODEC[codec]
        return self._of_interval(interval) + added

    def _of_interval(self, interval: int) -> float:
        points = self.intervals
        if interval <= points[0][0]:
            return points[0][1]
        for (low, less), (high, more) in pairwise(points):
            if low < interval < high:
                if math.isinf(less) or math.isinf(more):
                    return math.inf
                return less + math.log(interval / low) / math.log(high / low) * (more - less)
            if interval == high:
                return more
        return self._beyond(interval)

    def _beyond(self, interval: int) -> float:
        """Return the loss beyond the longest interval: nobody has measured it, so the worse."""
        last, loss = self.intervals[-1]
        assumed = loss_of_interval(interval) - loss_of_interval(last)
        if len(self.intervals) == 1 or math.isinf(loss):
            return loss + assumed
        before, less = self.intervals[-2]
        slope = 0.0 if math.isinf(less) else (loss - less) / math.log(last / before)
        return loss + max(assumed, slope * math.log(interval / last))


def differences(profile: LossProfile) -> dict[LossKey, Difference]:
    """Return what each point costs: intervals against plain training, codecs against none.

    Codecs at another interval than the one that they are compared at are left out.
    """
    found: dict[LossKey, Difference] = {}
    by_key = profile.by_key
    uncoded = by_key.get((profile.codecs_at, None))
    for (interval, codec), point in by_key.items():
        if codec is None:
            found[interval, codec] = difference(point.losses, profile.plain)
        elif interval == profile.codecs_at and uncoded is not None:
            found[interval, codec] = difference(point.losses, uncoded.losses)
    return found


def difference(losses: Sequence[float | None], base: Sequence[float | None]) -> Difference:
    """Return the relative difference of paired runs.

    Args:
        losses: by seed; None if training diverged.
        base: of the same seeds.
    """
    pairs = list(zip(losses, base, strict=True))
    shares = [a / b - 1 for a, b in pairs if a is not None and b is not None]
    if len(shares) < len(pairs):
        return Difference(math.inf, math.inf)
    mean, count = statistics.fmean(shares), len(shares)
    quantile = _T_95[min(count - 1, len(_T_95)) - 1]
    return Difference(mean, max(0.0, mean + quantile * statistics.stdev(shares) / math.sqrt(count)))
