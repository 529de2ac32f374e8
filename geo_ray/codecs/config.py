"""The ``codec`` section of a configuration."""

from __future__ import annotations

from pydantic import Field

from geo_ray.codecs.bisparse import BiSparse
from geo_ray.codecs.dgt import Dgt
from geo_ray.codecs.registry import AnyCodec
from geo_ray.config.base import StrictModel
from geo_ray.strategies.base import Strategy

_UP_ONLY = ("bisparse", "dgt")


class CodecConfig(StrictModel):
    """How payloads are made small on their way between regions; none sends fp32 as it is."""

    up: AnyCodec | None = Field(None, description="updates, from a region to the averager")
    down: AnyCodec | None = Field(None, description="replies, from the averager to a region")

    def check(self, strategy: Strategy, name: str) -> None:
        """Refuse codecs that make no sense with a strategy.

        Args:
            strategy: the run's.
            name: what the configuration calls it.

        Raises:
            ValueError: naming the key.
        """
        if self.down is not None and self.down.kind in _UP_ONLY:
            raise ValueError(f"codec.down: {self.down.kind} is for codec.up only")
        if isinstance(self.up, BiSparse) and (strategy.sends != "change" or not strategy.in_rounds):
            raise ValueError(
                f"codec.up: bisparse accumulates gradients that all regions apply together, as bsp "
                f"does; {name} sends something else: use topk"
            )
        if isinstance(self.up, Dgt):
            _check_dgt(self.up, strategy, name)
        for direction, codec in (("up", self.up), ("down", self.down)):
            if codec is not None and codec.feeds_back and _must_add_up(strategy):
                raise ValueError(
                    f"codec.{direction}: with {codec.kind} nobody knows what was lost, so the "
                    f"regions of {name} would not end with the same model: use randomk or topk"
                )


def _check_dgt(codec: Dgt, strategy: Strategy, name: str) -> None:
    if strategy.sends != "change":
        raise ValueError(
            f"codec.up: dgt lets a part of a change come later; {name} sends models: use asgd, "
            "asgd_ga or bsp"
        )
    if codec.late == "merge" and _must_add_up(strategy):
        raise ValueError(
            f"codec.up: with dgt and `late: merge` nobody knows what was lost, so the regions of "
            f"{name} would not end with the same model: use `late: put_back`"
        )


def _must_add_up(strategy: Strategy) -> bool:
    """Whether each region applies its own changes at home, so that others must get all of them."""
    return strategy.sends == "change" and not strategy.in_rounds
