"""Settings of scheduled transfers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from geo_ray.config.base import StrictModel


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
