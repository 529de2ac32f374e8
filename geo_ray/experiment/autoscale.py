"""The ``autoscale`` section: rules for renting machines, and limits on changes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from geo_ray.base.model import StrictModel

Floor = Literal["servers", "averager", "none"]


def _some_zones(zones: tuple[str, ...]) -> tuple[str, ...]:
    if not zones or not all(zones):
        raise ValueError(
            "lists no zone: list at least one, or omit the region so that the cloud chooses"
        )
    twice = sorted({zone for zone in zones if zones.count(zone) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} is listed more than once")
    return zones


Zones = Annotated[tuple[str, ...], AfterValidator(_some_zones)]
Amounts = Annotated[dict[str, Annotated[float, Field(gt=0)]], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class _Order:
    """A time that must not be longer than another one, because a rule would have no effect.

    Attributes:
        less: key of the shorter time.
        more: key of the longer time.
        why: consequence of the wrong order.
        is_strict: whether the times must differ.
    """

    less: str
    more: str
    why: str
    is_strict: bool = False

    def check(self, config: AutoscaleConfig) -> str | None:
        """Return the violation, or None."""
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
    _Order("every_s", "start_s", "the margin of a deadline would pass between two iterations"),
    _Order("every_s", "drain_s", "draining machines would be terminated long after their deadline"),
    _Order(
        "every_s",
        "calm.idle_s",
        "an idle machine would be drained at the first iteration that sees it idle",
    ),
    _Order("every_s", "retry.first_s", "a pool without capacity would be requested again at once"),
    _Order("every_s", "retry.resend_s", "launches would be abandoned later than configured"),
    _Order("every_s", "retry.missing_s", "one list without a machine would end it", True),
    _Order("every_s", "calm.dwell_s", "machines would be replaced at each iteration"),
    _Order("start_s", "calm.horizon_s", "no replacement would ever pay", True),
    _Order("start_s", "retry.join_s", "machines would be terminated before they can join", True),
    _Order("retry.first_s", "retry.longest_s", "the backoff of a pool would not grow"),
    _Order("retry.resend_s", "retry.give_up_s", "no launch would be resent", True),
    _Order("retry.missing_s", "retry.give_up_s", "launches would be abandoned while lists lag"),
)


def _value(config: AutoscaleConfig, key: str) -> float:
    found: object = reduce(getattr, key.split("."), config)
    return found if isinstance(found, float) else 0.0


class CalmConfig(StrictModel):
    """Hysteresis of the autoscaler, so that it does not follow every price and every load."""

    dwell_s: float = Field(
        1800.0, ge=0, description="minimum seconds between two replacements of a region's machines"
    )
    least_gain: float = Field(
        0.05,
        ge=0,
        lt=1,
        description="minimum saving of a replacement, as a fraction of the region's price",
    )
    horizon_s: float = Field(
        3600.0,
        gt=0,
        description="seconds for which a price is assumed to hold; a replacement must pay off "
        "within that time",
    )
    idle_s: float = Field(
        300.0,
        ge=0,
        description="seconds for which machines must be surplus or idle, or the run finished, "
        "before they are terminated",
    )


class RetryConfig(StrictModel):
    """Handling of pools without capacity and of machines that do not start."""

    first_s: float = Field(
        60.0, gt=0, description="seconds before a pool without capacity is requested again"
    )
    longest_s: float = Field(
        3600.0, gt=0, description="maximum of that time; it doubles with each failure"
    )
    resend_s: float = Field(
        30.0, gt=0, description="seconds until a launch without a machine is resent"
    )
    give_up_s: float = Field(
        300.0,
        gt=0,
        description="seconds until such a launch is abandoned and its pool is not requested for "
        "`longest_s`",
    )
    join_s: float = Field(
        600.0, gt=0, description="seconds until a machine without a Ray node is terminated"
    )
    missing_s: float = Field(
        90.0, ge=0, description="seconds until an unlisted machine counts as lost"
    )


class AutoscaleConfig(StrictModel):
    """How machines are rented for a run. The section ``plan`` lists the machines."""

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
        description="seconds from a launch until the node computes; also the margin of a deadline",
    )
    drain_s: float = Field(
        120.0, ge=0, description="maximum seconds until a drained machine is free"
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
        description="hours after which a machine terminates itself; it is replaced before that",
    )
    calm: CalmConfig = CalmConfig()
    retry: RetryConfig = RetryConfig()

    @model_validator(mode="after")
    def _no_empty_rule(self) -> Self:
        """Reject times that leave another rule without effect."""
        wrong = [found for order in _ORDERS if (found := order.check(self))]
        least_s = self.lead_s + self.retry.give_up_s
        if not wrong and self.life_h * 3600.0 <= least_s:
            wrong.append(
                f"`life_h` ({self.life_h:g} h) is not longer than `start_s` + `drain_s` + 2 "
                f"`every_s` + `retry.give_up_s` ({least_s:g} s): every machine would be replaced "
                f"as soon as it is running; set `life_h` above {least_s / 3600.0:.3g}"
            )
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    @property
    def lead_s(self) -> float:
        """Seconds before its end at which a machine is replaced."""
        return self.start_s + self.drain_s + 2 * self.every_s
