"""What intervals and codecs cost a task in loss, as measured: one JSON file that plans read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from geo_ray.config.base import StrictModel
from geo_ray.config.json_file import load_json
from geo_ray.errors import OtherModelError, ProfileError
from geo_ray.planning.model_id import ModelId
from geo_ray.planning.tradeoffs import BITS_PER_PARAM

LEAST_LOSS: Final = 1e-50
MOST_LOSS: Final = 1e50
"""Beyond these a relative difference is no number any more; what is larger has diverged."""

_Loss = Annotated[float, Field(ge=LEAST_LOSS, le=MOST_LOSS, allow_inf_nan=False)]

LossKey = tuple[int, str | None]
"""Interval in local steps, and codec."""


class LossSubject(StrictModel):
    """What the loss was measured of."""

    model: ModelId
    data: str = Field(description="digest: of the manifest, or of how the data are generated")
    regions: tuple[str, ...] = Field(description="whose data were trained on")
    strategy: str = Field(description="that exchanged")
    settings: dict[str, str] = Field({}, description="digest of each other section that matters")

    def differs(self, other: LossSubject) -> str | None:
        """Return in words why ``other`` is another task; None if it is the same, or a variant."""
        mine, its = self.model, other.model
        if mine.task != its.task:
            return f"the task is {its.task}, not {mine.task}"
        if mine.source != its.source:
            return "the task's file has changed since"
        if self.strategy != other.strategy:
            return f"the strategy is {other.strategy}, not {self.strategy}"
        if self.regions != other.regions:
            return f"the regions are {', '.join(other.regions)}, not {', '.join(self.regions)}"
        return None if self.data == other.data else "the data are others"

    def varies(self, other: LossSubject) -> list[str]:
        """Return what ``other`` has in another way without being another task."""
        found = [] if self.model.differs(other.model) is None else ["task.options"]
        names = sorted(self.settings.keys() | other.settings.keys())
        return found + [n for n in names if self.settings.get(n) != other.settings.get(n)]


class LossPoint(StrictModel):
    """What training ended with at one interval and with one codec."""

    interval: int = Field(ge=1, description="local steps between exchanges")
    codec: str | None = Field(description="of the updates; null: fp32")
    losses: tuple[_Loss | None, ...] = Field(
        description="held-out, at the end, by seed; null: training diverged"
    )

    @field_validator("codec")
    @classmethod
    def _known(cls, codec: str | None) -> str | None:
        if codec not in BITS_PER_PARAM:
            known = ", ".join(name for name in BITS_PER_PARAM if name is not None)
            raise ValueError(f"no plan chooses codec {codec}; they are {known}")
        return codec

    @property
    def key(self) -> LossKey:
        """The key of the point."""
        return self.interval, self.codec


class LossProfile(StrictModel):
    """All measurements of one task, strategy and length of training."""

    version: Literal[1] = 1
    subject: LossSubject
    steps: int = Field(ge=1, description="local steps of every region in each run")
    seeds: tuple[int, ...] = Field(min_length=2, description="of the runs, paired")
    plain: tuple[_Loss, ...] = Field(
        description="loss of `bsp` without codec, by seed: what all is compared with"
    )
    codecs_at: int = Field(ge=1, description="interval that codecs were measured at")
    points: tuple[LossPoint, ...] = ()
    spent_s: float = Field(0.0, ge=0, description="what measuring took")

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: one is there twice in {list(self.seeds)}")
        keys = [point.key for point in self.points]
        for interval, codec in keys:
            if keys.count((interval, codec)) > 1:
                raise ValueError(f"points: interval {interval}, codec {codec} is there twice")
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
        """Whether there is anything to plan by."""
        return any(point.codec is None for point in self.points)

    def with_point(self, point: LossPoint, spent_s: float) -> Self:
        """Return the profile with one more point, and the seconds that it took added."""
        merged = {**self.by_key, point.key: point}
        keys = sorted(merged, key=lambda key: (key[1] is not None, str(key[1]), key[0]))
        points = tuple(merged[key] for key in keys)
        return self.model_copy(update={"points": points, "spent_s": self.spent_s + spent_s})

    def check_subject(self, subject: LossSubject) -> None:
        """Refuse the measurement for another task.

        Raises:
            OtherModelError: says in what they differ.
        """
        difference = self.subject.differs(subject)
        if difference is not None:
            raise OtherModelError(
                f"the loss was measured for another task: {difference}",
                fix="Measure this configuration with `geo-ray profile --loss`, or plan without "
                "--loss, by the rough table.",
            )


def load_loss_profile(path: Path) -> LossProfile:
    """Read a measurement.

    Raises:
        ProfileError: there is none, or it is not valid.
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
    return ProfileError(message, fix="Measure anew with `geo-ray profile CONFIG --loss --fresh`.")
