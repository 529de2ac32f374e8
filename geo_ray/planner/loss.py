"""Loss cost of exchange intervals and codecs.

Assumed for any task, or measured for one. Codec sizes.

A measurement is stored in a loss profile.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final, Literal, Protocol, Self

from pydantic import Field, field_validator, model_validator

from geo_ray.base.errors import OtherModelError, ProfileError
from geo_ray.base.load import load_json
from geo_ray.base.model import StrictModel
from geo_ray.codecs.base import FP32_BITS
from geo_ray.codecs.feedback import bits_of_last
from geo_ray.codecs.registry import CODECS
from geo_ray.planner.plan import ModelId
from geo_ray.strategies.traits import Traits

LOSS_BY_INTERVAL: Final = ((1, 0.0), (25, 0.01), (100, 0.025), (500, 0.05))
"""(H, relative loss compared with H = 1), ascending."""

_PROPOSED: Final = {
    kind: traits
    for kind, traits in ((kind, each().traits) for kind, each in CODECS.items())
    if traits.expected_loss is not None
}

BITS_PER_PARAM: Final[dict[str | None, tuple[float, float]]] = {None: (FP32_BITS, FP32_BITS)} | {
    kind: (
        traits.bits_per_value,
        traits.bits_per_value if traits.suits_answers else FP32_BITS,
    )
    for kind, traits in _PROPOSED.items()
}
"""Codec -> bits per parameter up and down; a codec for updates only sends replies uncompressed."""


@cache  # encodes a sample vector to measure its size
def last_bits(codec: str | None, errors: tuple[float, float]) -> tuple[float, float]:
    """Return the bits per parameter, up and down, of the exchange after the last step.

    Args:
        codec: one of `BITS_PER_PARAM`.
        errors: allowed relative errors up and down; 0 for full precision.
    """
    if codec is None:
        return FP32_BITS, FP32_BITS
    up, down = (bits_of_last(CODECS[codec](), error) for error in errors)
    return up, down if _PROPOSED[codec].suits_answers else FP32_BITS


def owes(codec: str | None) -> bool:
    """Return whether the sender accumulates the codec's error and sends it at the end."""
    if codec is None:
        return False
    traits = _PROPOSED[codec]
    return traits.lossy and not traits.feeds_back


LOSS_BY_CODEC: Final[dict[str | None, float]] = {None: 0.0} | {
    kind: traits.expected_loss or 0.0 for kind, traits in _PROPOSED.items()
}
"""Codec -> relative loss, with error feedback."""

LOSS_OF_DELAY: Final = 0.005
"""Relative loss of merging the replies of a round one round late."""

LOSS_OF_ASYNCHRONY: Final = 0.01
"""Relative loss of merging updates one by one."""


_SMALL_INTERVAL: Final = 16
_SMALL_WITH_MOMENTUM: Final = 128


def outer_of(
    traits: Traits, interval: int, *, inner_momentum: bool = False
) -> Mapping[str, float | str] | None:
    """Return the option ``outer`` if the strategy's outer momentum would overshoot; else None.

    An outer momentum of 0.9 moves seven times as far as the regions' mean, and momentum in the
    inner optimizer ten times as far as a gradient. Together, over rounds of 16 to 64 steps, they
    can make a model diverge that either alone trains (docs/reference/strategies.md has the
    measurements).

    Args:
        traits: traits of the strategy.
        interval: local steps of a round.
        inner_momentum: whether the regions' optimizer has momentum and the averager's momentum was
            not configured for it.
    """
    small = _SMALL_WITH_MOMENTUM if inner_momentum else _SMALL_INTERVAL
    return traits.averager.plain_outer if interval < small else None


def loss_of_interval(steps: int) -> float:
    """Return the relative loss of rounds of ``steps`` local steps."""
    last = LOSS_BY_INTERVAL[-1]
    for (low, loss), (high, more) in pairwise(LOSS_BY_INTERVAL):
        if steps <= high:
            fraction = math.log(max(steps, low) / low) / math.log(high / low)
            return loss + fraction * (more - loss)
    return last[1] * math.log(steps) / math.log(last[0])


LEAST_LOSS: Final = 1e-50
MOST_LOSS: Final = 1e50
"""Larger relative differences count as divergence."""

_Loss = Annotated[float, Field(ge=LEAST_LOSS, le=MOST_LOSS, allow_inf_nan=False)]

LossKey = tuple[int, str | None]
"""Interval in local steps, and codec."""


class LossSubject(StrictModel):
    """Task and settings of a loss measurement."""

    model: ModelId
    data: str = Field(description="digest of the manifest or of the generator's settings")
    regions: tuple[str, ...] = Field(description="regions with the training data")
    strategy: str = Field(description="strategy")
    settings: dict[str, str] = Field({}, description="digests of other relevant sections")

    def differs(self, other: LossSubject) -> str | None:
        """Return why ``other`` is another task; None if it is the same, or a variant."""
        mine, its = self.model, other.model
        if mine.task != its.task:
            return f"the task is {its.task}, not {mine.task}"
        if mine.source != its.source:
            return "the task's file has changed since"
        if self.strategy != other.strategy:
            return f"the strategy is {other.strategy}, not {self.strategy}"
        if self.regions != other.regions:
            return f"the regions are {', '.join(other.regions)}, not {', '.join(self.regions)}"
        return None if self.data == other.data else "the data differ"

    def varies(self, other: LossSubject) -> list[str]:
        """Return the settings in which ``other`` differs without being another task."""
        found = [] if self.model.differs(other.model) is None else ["task.options"]
        names = sorted(self.settings.keys() | other.settings.keys())
        return found + [n for n in names if self.settings.get(n) != other.settings.get(n)]


def _in_file(key: LossKey) -> tuple[bool, str, int]:
    """Sort key of points: intervals without a codec first."""
    interval, codec = key
    return codec is not None, str(codec), interval


class LossPoint(StrictModel):
    """Final loss of training with one interval and codec."""

    interval: int = Field(ge=1, description="local steps between exchanges")
    codec: str | None = Field(description="codec of the updates; null: fp32")
    losses: tuple[_Loss | None, ...] = Field(
        description="held-out loss at the end, by seed; null: training diverged"
    )

    @field_validator("codec")
    @classmethod
    def _known(cls, codec: str | None) -> str | None:
        if codec not in BITS_PER_PARAM:
            known = ", ".join(name for name in BITS_PER_PARAM if name is not None)
            raise ValueError(f"plans do not support codec {codec}; supported: {known}")
        return codec

    @property
    def key(self) -> LossKey:
        """Key of the point."""
        return self.interval, self.codec


class LossProfile(StrictModel):
    """All loss measurements of one task, strategy and training length."""

    version: Literal[1] = 1
    subject: LossSubject
    steps: int = Field(ge=1, description="local steps of every region in each run")
    seeds: tuple[int, ...] = Field(min_length=2, description="seeds of the paired runs")
    plain: tuple[_Loss, ...] = Field(
        description="loss of `bsp` without codec, by seed: the baseline"
    )
    codecs_at: int = Field(ge=1, description="interval of the codec measurements")
    points: tuple[LossPoint, ...] = ()
    spent_s: float = Field(0.0, ge=0, description="seconds spent on measurements")

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: duplicate in {list(self.seeds)}")
        keys = [point.key for point in self.points]
        for interval, codec in keys:
            if keys.count((interval, codec)) > 1:
                raise ValueError(f"points: interval {interval}, codec {codec} is duplicated")
        if any(codec for _, codec in keys) and (self.codecs_at, None) not in keys:
            raise ValueError(
                f"codecs_at: {self.codecs_at} steps without codec, which codecs are compared "
                "with, are not among the points"
            )
        return self

    @property
    def by_key(self) -> Mapping[LossKey, LossPoint]:
        """Points by interval and codec."""
        return {point.key: point for point in self.points}

    @property
    def has_intervals(self) -> bool:
        """Whether the profile is sufficient for planning."""
        return any(point.codec is None for point in self.points)

    def with_point(self, point: LossPoint, spent_s: float) -> Self:
        """Return the profile with another point and its measuring time."""
        merged = {**self.by_key, point.key: point}
        keys = sorted(merged, key=_in_file)
        points = tuple(merged[key] for key in keys)
        return self.model_copy(update={"points": points, "spent_s": self.spent_s + spent_s})

    def check_subject(self, subject: LossSubject) -> None:
        """Reject a measurement of another task.

        Raises:
            OtherModelError: states the difference.
        """
        difference = self.subject.differs(subject)
        if difference is not None:
            raise OtherModelError(
                f"the loss was measured for another task: {difference}",
                fix="Measure this configuration with `geo-ray profile --loss`, or plan without "
                "--loss, with the assumed table.",
            )


def load_loss_profile(path: Path) -> LossProfile:
    """Read a loss profile.

    Raises:
        ProfileError: the file is missing or invalid.
    """
    found = load_json(path, LossProfile, "measured loss", _invalid)
    lengths = {len(point.losses) for point in found.points} | {len(found.plain)}
    if lengths != {len(found.seeds)}:
        raise _invalid(
            f"measured loss {path} is not valid: {len(found.seeds)} seeds, and losses of others"
        )
    if not found.has_intervals:
        raise _invalid(f"measured loss {path} is not complete: no interval without codec")
    return found


def _invalid(message: str) -> ProfileError:
    return ProfileError(message, fix="Measure again with `geo-ray profile CONFIG --loss --fresh`.")


_T_95: Final = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)
"""Quantiles of Student's t by degrees of freedom, from 1; the last one is used beyond."""


class LossTable(Protocol):
    """Predicts the relative loss of an exchange option."""

    @property
    def is_measured(self) -> bool:
        """Whether it was measured for this task."""

    def loss(self, interval: int, codec: str | None, *, trains_on: bool) -> float:
        """Return the loss compared with plain training; infinite if training diverged.

        Args:
            interval: local steps between exchanges.
            codec: codec of the updates.
            trains_on: whether regions train during exchanges.
        """


@dataclass(frozen=True, slots=True)
class AssumedLoss:
    """Assumed table for any task."""

    @property
    def is_measured(self) -> bool:
        """Whether it was measured for this task."""
        return False

    def loss(self, interval: int, codec: str | None, *, trains_on: bool) -> float:
        """Return the loss; see `LossTable`."""
        late = LOSS_OF_DELAY if trains_on else 0.0
        return loss_of_interval(interval) + LOSS_BY_CODEC[codec] + late


@dataclass(frozen=True, slots=True)
class Difference:
    """Relative difference of loss over pairs of runs.

    Attributes:
        mean: mean over the pairs; infinite if a run diverged.
        upper: upper confidence bound, at least 0, which is used.
    """

    mean: float
    upper: float


@dataclass(frozen=True, slots=True)
class MeasuredLoss:
    """Table measured for one task.

    Attributes:
        intervals: (local steps, loss) without codec, ascending; at least one.
        codecs: additional loss by codec; unmeasured ones are assumed.
    """

    intervals: tuple[tuple[int, float], ...]
    codecs: Mapping[str | None, float]

    @classmethod
    def of(cls, profile: LossProfile) -> MeasuredLoss:
        """Return the table of a loss profile."""
        found = differences(profile)
        intervals = [(h, each.upper) for (h, codec), each in found.items() if codec is None]
        codecs = {codec: each.upper for (_, codec), each in found.items() if codec is not None}
        return cls(tuple(sorted(intervals)), {None: 0.0} | codecs)

    @property
    def is_measured(self) -> bool:
        """Whether it was measured for this task."""
        return True

    def loss(self, interval: int, codec: str | None, *, trains_on: bool) -> float:
        """Return the loss; see `LossTable`. The measurement includes the effect of `trains_on`."""
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
        """Return the loss beyond the longest measured interval: the larger of both tables."""
        last, loss = self.intervals[-1]
        assumed = loss_of_interval(interval) - loss_of_interval(last)
        if len(self.intervals) == 1 or math.isinf(loss):
            return loss + assumed
        before, less = self.intervals[-2]
        slope = 0.0 if math.isinf(less) else (loss - less) / math.log(last / before)
        return loss + max(assumed, slope * math.log(interval / last))


def differences(profile: LossProfile) -> dict[LossKey, Difference]:
    """Return the loss of each point: intervals relative to plain training, codecs to none.

    Codecs at other intervals than `codecs_at` are skipped.
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
        losses: loss by seed; None if training diverged.
        base: baseline loss by seed.
    """
    pairs = list(zip(losses, base, strict=True))
    fractions = [a / b - 1 for a, b in pairs if a is not None and b is not None]
    if len(fractions) < len(pairs):
        return Difference(math.inf, math.inf)
    mean, count = statistics.fmean(fractions), len(fractions)
    quantile = _T_95[min(count - 1, len(_T_95)) - 1]
    return Difference(
        mean, max(0.0, mean + quantile * statistics.stdev(fractions) / math.sqrt(count))
    )
