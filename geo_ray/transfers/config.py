"""Settings of scheduled transfers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from geo_ray.codecs.config import CodecConfig
from geo_ray.config.base import StrictModel
from geo_ray.strategies.base import Strategy


class TransfersConfig(StrictModel):
    """Whether and how updates take turns on the way to the averager (asynchronous strategies)."""

    order: Literal["fifo", "shortest_first"] = Field(
        "shortest_first", description="which waiting update goes next"
    )
    max_staleness: int | None = Field(
        None, ge=1, description="commits of others an update may be behind; null: no bound"
    )
    hub_mbps: float | None = Field(
        None, gt=0, description="what the averager's region can receive; null: learned"
    )
    small_bytes: int = Field(
        64 * 1024, ge=0, description="updates up to this size are sent without asking first"
    )
    max_overtaken: int = Field(
        16, ge=1, description="an update that was overtaken so often goes next whatever its size"
    )
    grant_s: float = Field(
        30.0, gt=0, description="a transfer that takes longer no longer keeps others waiting"
    )
    aggregate: bool = Field(
        False, description="sum waiting updates at a helper region (asgd and asgd_ga)"
    )

    def check(self, strategy: Strategy, codec: CodecConfig, *, has_standby: bool) -> None:
        """Refuse what does not go with turns: they are for updates that do not wait for each other.

        Args:
            strategy: the run's.
            codec: the run's codecs.
            has_standby: whether there is a standby averager.

        Raises:
            ValueError: naming the key.
        """
        traits, name = strategy.traits, strategy.kind
        if traits.in_rounds:
            raise ValueError(
                f"transfers: '{name}' works in rounds, which end with their slowest update "
                "whatever the order: use an overlay"
            )
        if codec.up is not None and codec.up.traits.differential is not None:
            raise ValueError(
                f"transfers: codec {codec.up.kind} has its own order of sending: leave one of the "
                "two out"
            )
        if traits.averager.bound is not None:
            raise ValueError(
                "strategy.staleness.bound: leave it out, transfers.max_staleness bounds the age of "
                "updates"
            )
        adds_up = traits.averager.adds_up is not None
        if self.max_staleness is not None and not adds_up:
            raise ValueError(
                f"transfers.max_staleness: what '{name}' sends counts from the last answer, so "
                "that one that is dropped must not be added to the next: leave it out"
            )
        if not self.aggregate:
            return
        if not adds_up:
            raise ValueError(
                f"transfers.aggregate: updates of '{name}' do not add up: leave it out"
            )
        if codec.up is not None or codec.down is not None:
            raise ValueError("transfers.aggregate: coded updates do not add up; leave codecs out")
        if has_standby:
            raise ValueError("transfers.aggregate: sums are not replicated; leave out the standby")
