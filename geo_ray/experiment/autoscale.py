"""The ``autoscale`` section of a configuration: what machines may be had, and how calm it is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from geo_ray.base.model import StrictModel

Floor = Literal["servers", "averager", "none"]


def _some_zones(zones: tuple[str, ...]) -> tuple[str, ...]:
    if not zones or not all(zones):
        raise ValueError("names no zone: name some, or leave the region out and the cloud chooses")
    twice = sorted({zone for zone in zones if zones.count(zone) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} is there more than once")
    return zones


Zones = Annotated[tuple[str, ...], AfterValidator(_some_zones)]
Amounts = Annotated[dict[str, Annotated[float, Field(gt=0)]], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class _Order:
    """One time that must not be longer than another: else a rule of the two would be empty.

    Attributes:
        less: key of the one.
        more: key of the other.
        why: what would become of the rule.
        is_strict: whether they may not even be the same.
    """

    less: str
    more: str
    why: str
    is_strict: bool = False

    def check(self, config: AutoscaleConfig) -> str | None:
        """Return what is wrong; None: nothing."""
        less, more = _value(config, self.less), _value(config, self.more)
        if less < more or (less == more and not self.is_strict):
            return None
        than, most, least = (
            ("not shorter than", "below", "above")
            if self.is_strict
            else ("longer than", "to at most", "to at least")
        )
        or_less = f"`{self.less}` {most} {more:g}, or " if more > 0 else ""
        return (
            f"`{self.less}` ({less:g} s) is {than} `{self.more}` ({more:g} s): {self.why}; set "
            f"{or_less}`{self.more}` {least} {less:g}"
        )


_ORDERS: Final = (
    _Order("every_s", "start_s", "the margin of a deadline would pass between two looks"),
    _Order("every_s", "drain_s", "what leaves would be ended only long after its time"),
    _Order("every_s", "calm.idle_s", "what is idle would leave at the first look that sees it so"),
    _Order("every_s", "retry.first_s", "a pool that gave nothing would not be left alone at all"),
    _Order("every_s", "retry.resend_s", "launches would be given up later than is said"),
    _Order("every_s", "retry.missing_s", "one list that lacks a machine would end it", True),
    _Order("every_s", "calm.dwell_s", "machines would be exchanged at each look"),
    _Order("start_s", "calm.horizon_s", "no exchange would ever pay", True),
    _Order("start_s", "retry.join_s", "machines would be ended before they can join", True),
    _Order("retry.first_s", "retry.longest_s", "no pool would be left alone for longer each time"),
    _Order("retry.resend_s", "retry.give_up_s", "no launch would be sent again", True),
    _Order("retry.missing_s", "retry.give_up_s", "launches would be given up while lists lag"),
)


def _value(config: AutoscaleConfig, key: str) -> float:
    found: object = reduce(getattr, key.split("."), config)
    return found if isinstance(found, float) else 0.0


class CalmConfig(StrictModel):
    """What keeps the autoscaler from following every price and every load."""

    dwell_s: float = Field(
        1800.0, ge=0, description="seconds in which a region's machines are exchanged at most once"
    )
    least_gain: float = Field(
        0.05, ge=0, lt=1, description="fraction of a region's price that an exchange must save"
    )
    horizon_s: float = Field(
        3600.0,
        gt=0,
        description="seconds for which a price is assumed to hold; an exchange must pay in them",
    )
    idle_s: float = Field(
        300.0,
        ge=0,
        description="seconds for which machines must be surplus or idle, or the run over, before "
        "they are ended",
    )


class RetryConfig(StrictModel):
    """What is done about pools that give nothing, and machines that do not come."""

    first_s: float = Field(
        60.0, gt=0, description="seconds for which a pool without capacity is left alone"
    )
    longest_s: float = Field(
        3600.0, gt=0, description="longest such time; it doubles with each failure"
    )
    resend_s: float = Field(
        30.0, gt=0, description="seconds until a launch without a machine is resent"
    )
    give_up_s: float = Field(
        300.0,
        gt=0,
        description="seconds until it is given up, and its pool left alone for `longest_s`",
    )
    join_s: float = Field(
        600.0, gt=0, description="seconds until a machine without a Ray node is ended"
    )
    missing_s: float = Field(
        90.0, ge=0, description="seconds until an unlisted machine counts as lost"
    )


class AutoscaleConfig(StrictModel):
    """How machines are rented for a run. What they are is in the section ``plan``."""

    every_s: float = Field(
        15.0,
        gt=0,
        description="seconds between two iterations; prices are requested in every fourth, or once "
        "a minute if that is longer",
    )
    answer_s: float = Field(
        30.0, gt=0, description="seconds after which a region that does not answer is unreachable"
    )
    floor: Floor = Field(
        "servers",
        description="machines that are never spot: those of all parameter servers (a worker's "
        "machine where the server has none), those of the averager's region, or none",
    )
    zones: dict[str, Zones] = Field(
        default_factory=dict,
        description="zones by region of the run; absent: the cloud chooses, and prices and "
        "failures are those of the region",
    )
    substitutes: bool = Field(
        False,
        description="whether types outside the plan may replace planned ones; not allowed where "
        "the run's `nodes` name types, as with `geo-ray train --plan`",
    )
    machine_resources: dict[str, Amounts] = Field(
        default_factory=dict,
        description="Ray resources by type, such as {CPU: 8}, to rent machines for waiting demand; "
        "absent: demand is not followed. Once a machine exists, its real resources count",
    )
    start_s: float = Field(
        180.0,
        ge=0,
        description="seconds from a launch to a node that computes; the margin of a deadline",
    )
    drain_s: float = Field(
        120.0, ge=0, description="longest time in seconds for a drained machine to become free"
    )
    most_speed: float = Field(
        1.5, ge=1, description="most machines, as a multiple of the plan's, to meet a deadline"
    )
    preemption_weight_h: float = Field(
        20.0,
        gt=0,
        description="machine hours that the assumed preemptions of `plan.spot` weigh against "
        "observed ones",
    )
    life_h: float = Field(
        24.0,
        gt=0,
        description="hours after which a machine terminates itself; it is replaced before",
    )
    calm: CalmConfig = CalmConfig()
    retry: RetryConfig = RetryConfig()

    @model_validator(mode="after")
    def _no_empty_rule(self) -> Self:
        """Refuse times of which one makes a rule of another empty."""
        wrong = [found for order in _ORDERS if (found := order.check(self))]
        least_s = self.lead_s + self.retry.give_up_s
        if not wrong and self.life_h * 3600.0 <= least_s:
            wrong.append(
                f"`life_h` ({self.life_h:g} h) is not longer than `start_s` + `drain_s` + 2 "
                f"`every_s` + `retry.give_up_s` ({least_s:g} s): every machine would be replaced "
                f"as soon as it is there; set `life_h` above {least_s / 3600.0:.3g}"
            )
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    @property
    def lead_s(self) -> float:
        """How long before its end a machine is replaced."""
        return self.start_s + self.drain_s + 2 * self.every_s
