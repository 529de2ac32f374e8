"""The ``averager`` section of a configuration: where updates are combined, and who stands by."""

from __future__ import annotations

from pydantic import Field

from geo_ray.codecs.config import CodecConfig
from geo_ray.config.base import StrictModel
from geo_ray.strategies.base import Strategy


class AveragerConfig(StrictModel):
    """Where the updates of the regions are combined."""

    region: str | None = Field(None, description="region whose bridge hosts it; default: the first")
    standby: str | None = Field(None, description="region that takes over when that one is lost")
    max_divergence: float = Field(
        0.0, ge=0, description="norm of updates that the standby may lack; 0: it has all that count"
    )
    takeover_s: float = Field(5.0, gt=0, description="how long it must be lost until then")
    rejoin_s: float = Field(30.0, gt=0, description="how long the lost region is waited for")

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
            if self.max_divergence:
                raise ValueError(
                    "averager.max_divergence: it says how far a standby may be behind, and there "
                    "is none: give averager.standby, or leave it at 0"
                )
            return
        traits = strategy.traits
        if self.standby == host:
            raise ValueError(
                f"averager.standby: {self.standby} hosts the averager itself: name another region"
            )
        if overlay != "star":
            raise ValueError(f"averager.standby: it needs overlay star, not {overlay}")
        if codec.up is not None and codec.up.traits.differential is not None:
            raise ValueError(
                f"averager.standby: what {codec.up.kind} loses on the way would differ there: use "
                "another codec"
            )
        if traits.averager.on_wake is not None:
            raise ValueError(
                f"averager.standby: '{strategy.kind}' goes by the averager's clock, which a "
                "standby does not share"
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
