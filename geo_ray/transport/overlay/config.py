"""The ``overlay`` section of a configuration: how bridges sum a round and distribute its answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Final, Literal

from pydantic import Field

from geo_ray.base.model import StrictModel
from geo_ray.strategies.base import Strategy
from geo_ray.strategies.config import CodecConfig


class TransferOptions(StrictModel):
    """Transfer of parts of a vector between two bridges; the same for every kind except star."""

    segment_bytes: int = Field(
        default=128 * 1024,
        ge=4,
        description="Part of a vector that is forwarded as a whole; larger than the model: "
        "whole messages without pipelining.",
    )
    window_bytes: int = Field(
        default=4 * 1024 * 1024,
        gt=0,
        description="Unacknowledged bytes to one bridge; at least rate times round trip.",
    )
    stall_s: float = Field(
        default=20.0,
        gt=0,
        description="A transfer without progress for that long is reassigned to another bridge.",
    )


class StarOverlay(StrictModel):
    """Every region exchanges with the averager."""

    kind: Literal["star"] = "star"


class BinaryOverlay(StrictModel):
    """A balanced binary tree with the averager's region at its root."""

    kind: Literal["binary"] = "binary"
    transfer: TransferOptions = TransferOptions()


class RackOverlay(StrictModel):
    """Two levels: the regions of a group send to one of them, which sends to the averager."""

    kind: Literal["rack"] = "rack"
    groups: tuple[Annotated[tuple[str, ...], Field(min_length=1)], ...] | None = Field(
        default=None,
        description="Regions of each group, its aggregator first; null: groups of about the "
        "square root of the number of regions.",
    )
    transfer: TransferOptions = TransferOptions()


class RingOverlay(StrictModel):
    """Reduce-scatter, then all-gather: every region sums an equal slice of the model."""

    kind: Literal["ring"] = "ring"
    transfer: TransferOptions = TransferOptions()


class TsengineOverlay(StrictModel):
    """Regions that are ready first merge first; answers use the links that were fast before."""

    kind: Literal["tsengine"] = "tsengine"
    buckets: int = Field(
        default=1, ge=1, le=64, description="Parts of the vector with separate schedules."
    )
    epsilon: float = Field(
        default=0.05, ge=0, le=1, description="Fraction of decisions that are random."
    )
    probes: int = Field(
        default=2,
        ge=0,
        le=64,
        description="Links that each region measures between rounds.",
    )
    forget_rounds: int = Field(default=5, ge=1, description="Measurements older than that expire.")
    smoothing: float = Field(default=0.5, gt=0, le=1, description="Weight of a new measurement.")
    settle_s: float = Field(
        default=0.02,
        ge=0,
        description="Regions that become ready within that time are planned together.",
    )
    transfer: TransferOptions = TransferOptions()


class NetstormOverlay(StrictModel):
    """Several roots: each slice of the model has its own tree over measured links."""

    kind: Literal["netstorm"] = "netstorm"
    roots: int | None = Field(
        default=None, ge=1, le=256, description="Largest number of slices; null: one per region."
    )
    probes: int = Field(
        default=2,
        ge=0,
        le=64,
        description="Links that each region measures between rounds.",
    )
    forget_rounds: int = Field(default=5, ge=1, description="Measurements older than that expire.")
    smoothing: float = Field(default=0.5, gt=0, le=1, description="Weight of a new measurement.")
    hysteresis: float = Field(
        default=0.05, ge=0, description="Predicted relative gain that new trees require."
    )
    transfer: TransferOptions = TransferOptions()


PeerOverlay = BinaryOverlay | RackOverlay | RingOverlay | TsengineOverlay | NetstormOverlay
"""Kinds that need links between all regions."""

AnyOverlay = Annotated[StarOverlay | PeerOverlay, Field(discriminator="kind")]
"""The ``overlay`` section of a configuration: ``kind`` chooses the class."""

MAX_REGIONS: Final = 60  # sets of regions must fit into a 64-bit field


def overlay_problems(
    config: AnyOverlay, regions: Sequence[str], strategy: Strategy, codec: CodecConfig
) -> Iterator[str]:
    """Yield why an overlay does not fit: only plain sums may pass through other regions.

    Args:
        config: the overlay.
        regions: names of all of them.
        strategy: the run's.
        codec: the run's codecs.
    """
    if isinstance(config, StarOverlay):
        return
    mean = strategy.traits.averager.round_mean
    if mean is None:
        yield (
            f"overlay.kind: {config.kind} sums the updates of a round on the way; strategy "
            f"'{strategy.kind}' is not made of such rounds: use bsp or sma, or overlay star"
        )
    elif isinstance(config, RingOverlay | NetstormOverlay) and not mean.is_answer:
        yield (
            f"overlay.kind: {config.kind} hands the mean itself out; strategy '{strategy.kind}' "
            "answers with something else: use tsengine"
        )
    for direction, each in (("up", codec.up), ("down", codec.down)):
        if each is not None:
            yield (
                f"overlay.kind: {config.kind} adds the regions' updates on their way, and updates "
                f"that codec.{direction} ({each.kind}) has encoded cannot be added: leave "
                f"codec.{direction} out, or use overlay star"
            )
    if len(regions) > MAX_REGIONS:
        yield f"overlay.kind: {config.kind} takes at most {MAX_REGIONS} regions"
    if isinstance(config, RackOverlay) and config.groups is not None:
        named = sorted(name for group in config.groups for name in group)
        if named != sorted(regions):
            yield (
                f"overlay.groups: they must name every region once; they have {', '.join(named)}, "
                f"regions are {', '.join(sorted(regions))}"
            )
