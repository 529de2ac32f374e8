"""The ``autoscale`` section of a configuration: what machines may be had, and how calm it is."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from geo_ray.config.base import StrictModel

Floor = Literal["servers", "averager", "none"]


class CalmConfig(StrictModel):
    """What keeps the autoscaler from following every price and every load."""

    dwell_s: float = Field(
        1800.0, ge=0, description="a region's machines are exchanged for cheaper ones at most once"
    )
    least_gain: float = Field(
        0.05, ge=0, lt=1, description="share of a region's price that such an exchange must save"
    )
    horizon_s: float = Field(
        3600.0, gt=0, description="for how long a price is taken to hold, to pay for the exchange"
    )
    idle_s: float = Field(
        300.0, ge=0, description="how long there is too much before machines are ended"
    )


class RetryConfig(StrictModel):
    """What is done about pools that give nothing, and machines that do not come."""

    first_s: float = Field(60.0, gt=0, description="a pool that gave nothing is left alone")
    longest_s: float = Field(3600.0, gt=0, description="it doubles each time, up to this")
    resend_s: float = Field(30.0, gt=0, description="a launch without trace is sent again")
    give_up_s: float = Field(
        300.0, gt=0, description="and is given up, its pool left alone for the longest time"
    )
    join_s: float = Field(600.0, gt=0, description="a machine whose node is not there is ended")
    missing_s: float = Field(90.0, ge=0, description="a machine not listed counts as gone")


class AutoscaleConfig(StrictModel):
    """How machines are rented for a run. What they are is in the section ``plan``."""

    every_s: float = Field(15.0, gt=0, description="between two looks at the cloud")
    answer_s: float = Field(
        30.0, gt=0, description="a region that does not answer for so long is left as it is"
    )
    floor: Floor = Field(
        "servers",
        description="what is never on a spot machine: the machines of parameter servers, that of "
        "the averager's region alone, or nothing",
    )
    zones: dict[str, tuple[str, ...]] = Field(
        default_factory=dict, description="by region of the run; absent: the cloud chooses"
    )
    substitutes: bool = Field(
        False,
        description="whether types that the plan does not have may stand in for those that it has: "
        "not where the run's `nodes` name types",
    )
    machine_resources: dict[str, dict[str, float]] = Field(
        default_factory=dict,
        description="by type: what Ray finds there, such as {CPU: 8}, to know how many machines "
        "what waits for a place needs; absent: such demand of the type's regions is not followed",
    )
    start_s: float = Field(
        180.0, ge=0, description="from a launch to a node that computes; the margin of a deadline"
    )
    drain_s: float = Field(120.0, ge=0, description="what leaves may take to end what it does")
    most_speed: float = Field(
        1.5, ge=1, description="times the plan's machines at most, to catch up with a deadline"
    )
    hazard_weight_h: float = Field(
        20.0, gt=0, description="machine hours that the assumed preemptions of `plan.spot` weigh"
    )
    life_h: float = Field(
        24.0, gt=0, description="a machine ends by itself after so long, and is replaced before"
    )
    calm: CalmConfig = CalmConfig()
    retry: RetryConfig = RetryConfig()
