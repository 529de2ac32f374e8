"""The ``averager`` section of a configuration: where updates are combined, and who stands by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pydantic import Field

from geo_ray.codecs.config import CodecConfig
from geo_ray.config.base import StrictModel
from geo_ray.strategies.base import Strategy

AUTO: Final = "auto"
"""In place of a region's name: any region may stand by."""


class AveragerConfig(StrictModel):
    """Where the updates of the regions are combined."""

    region: str | None = Field(None, description="region whose bridge hosts it; default: the first")
    standby: str | None = Field(
        None, description="region that takes over when that one is lost; auto: any region"
    )
    next_standbys: tuple[str, ...] = Field(
        (),
        description="who stands by after it has taken over or is gone, the best first; then the "
        "nearest",
    )
    max_divergence: float = Field(
        0.0, ge=0, description="norm of updates that the standby may lack; 0: it has all that count"
    )
    takeover_s: float = Field(5.0, gt=0, description="how long it must be lost until then")
    rejoin_s: float = Field(30.0, gt=0, description="how long the lost region is waited for")

    @property
    def named_standbys(self) -> tuple[str, ...]:
        """The regions that are to stand by, the best first."""
        first = () if self.standby in {None, AUTO} else (str(self.standby),)
        return (*first, *self.next_standbys)

    def first_standby(self, host: str, present: Sequence[str]) -> str | None:
        """Who stands by at the start; None if nobody does.

        Args:
            host: the averager's region.
            present: the regions that are there.
        """
        if self.standby is None:
            return None
        able = [name for name in (*self.named_standbys, *present) if name in present]
        return next((name for name in able if name != host), None)

    def check(self, host: str, overlay: str, strategy: Strategy, codec: CodecConfig) -> None:
        """Refuse a standby that could not repeat what the averager is told, in the same order.

        Args:
            host: the averager's region.
            overlay: kind of the run's.
            strategy: the run's.
            codec: the run's codecs.

        Raises:
            ValueError: naming the key.
        """
        if self.standby is None:
            if self.next_standbys:
                raise ValueError(
                    "averager.next_standbys: nobody stands by first: give averager.standby, or "
                    "leave it out"
                )
            if self.max_divergence:
                raise ValueError(
                    "averager.max_divergence: it says how far a standby may be behind, and there "
                    "is none: give averager.standby, or leave it at 0"
                )
            return
        traits = strategy.traits
        if host in self.named_standbys:
            key = "standby" if host == self.standby else "next_standbys"
            raise ValueError(
                f"averager.{key}: {host} hosts the averager itself: name another region"
            )
        if len(set(self.named_standbys)) < len(self.named_standbys):
            raise ValueError("averager.next_standbys: name each region once")
        if overlay != "star":
            raise ValueError(f"averager.standby: it needs overlay star, not {overlay}")
        if codec.up is not None and codec.up.traits.differential is not None:
            raise ValueError(
                f"averager.standby: what {codec.up.kind} loses on the way would differ there: use "
                "another codec"
            )
        if self.max_divergence and traits.averager.bound is not None:
            raise ValueError(
                "averager.max_divergence: with strategy.staleness.bound regions wait for each "
                "other, so the standby has every update first: leave it at 0"
            )
        if self.max_divergence and traits.in_rounds:
            raise ValueError(
                f"averager.max_divergence: a round of '{strategy.kind}' counts in every "
                "region or in none, so the standby has it first: leave it at 0"
            )
