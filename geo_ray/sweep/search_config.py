"""The file of a search: base configuration, space, objectives, schedules, trial limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeGuard

from pydantic import BeforeValidator, Field, model_validator

from geo_ray.base.canonical import JSONValue
from geo_ray.base.model import StrictModel
from geo_ray.experiment.cluster import ClusterConfig, LocalClusterConfig
from geo_ray.experiment.regions import Name

KINDS = ("choice", "grid", "uniform", "loguniform", "randint", "lograndint", "value")


class Domain(StrictModel):
    """Values of one key; exactly one kind of them, and when they count.

    Lists count as tuples although it is strict: a single domain becomes a list of one before it is
    read, and is then no JSON any more.
    """

    choice: tuple[Any, ...] | None = Field(None, strict=False, description="one of these, drawn")
    grid: tuple[Any, ...] | None = Field(
        None,
        strict=False,
        description="each of these, with every other grid's; `search.trials` times",
    )
    uniform: tuple[float, float] | None = Field(None, strict=False, description="from low to high")
    loguniform: tuple[float, float] | None = Field(
        None, strict=False, description="from low to high, drawn by its logarithm; both above 0"
    )
    randint: tuple[int, int] | None = Field(
        None, strict=False, description="a whole number, both ends included"
    )
    lograndint: tuple[int, int] | None = Field(
        None, strict=False, description="the same, drawn by its logarithm; both above 0"
    )
    value: Any = Field(None, description="this one: for what goes along with another key")
    when: dict[str, Any] = Field(
        default_factory=dict,
        description="only where other keys have these values: one, or a list of which one is meant",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = [kind for kind in KINDS if kind in self.model_fields_set]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(KINDS)}; there are {len(given)}")
        if given[0] in ("choice", "grid"):
            values = getattr(self, given[0])
            if not values:
                raise ValueError(f"`{given[0]}`: there is nothing to choose from")
        elif given[0] != "value":
            low, high = getattr(self, given[0])
            if not low < high:
                raise ValueError(f"`{given[0]}`: {low} is not below {high}")
            if given[0].startswith("log") and low <= 0:
                raise ValueError(f"`{given[0]}`: {low} has no logarithm; begin above 0")
        if self.grid is not None and self.when:
            raise ValueError("`grid`: takes no `when`, it would repeat trials; use `choice`")
        return self

    @property
    def kind(self) -> str:
        """Which of the kinds it is."""
        return next(kind for kind in KINDS if kind in self.model_fields_set)

    @property
    def edges(self) -> tuple[JSONValue, ...]:
        """Values that are tried out before anything starts: all listed ones, both ends."""
        if self.kind == "value":
            return (self.value,)
        return tuple(getattr(self, self.kind))

    @property
    def most(self) -> JSONValue:
        """The largest of them by number; of what are no numbers, the last."""
        numbers = [each for each in self.edges if _is_number(each)]
        return max(numbers) if numbers else self.edges[-1]

    def holds(self, value: JSONValue) -> bool:
        """Whether the value is one of these."""
        if self.kind in ("choice", "grid", "value"):
            return value in self.edges
        if not _is_number(value):
            return False
        low, high = getattr(self, self.kind)
        whole = "randint" not in self.kind or value == math.floor(value)
        return bool(low <= value <= high and whole)


def is_met(when: Mapping[str, Any], values: Mapping[str, JSONValue]) -> bool:
    """Whether a condition holds for some values by key; a key without a value has none of them."""
    return all(
        key in values and values[key] in (wanted if isinstance(wanted, (list, tuple)) else [wanted])
        for key, wanted in when.items()
    )


def _is_number(value: JSONValue) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _as_tuple(found: object) -> tuple[object, ...]:
    return tuple(found) if isinstance(found, list) else (found,)


Domains = Annotated[
    tuple[Domain, ...],
    BeforeValidator(_as_tuple),
]
"""One domain, or a list of them with different conditions."""

ObjectiveName = Literal["time_to_target", "usd", "loss"]


class SearchConfig(StrictModel):
    """How the next values are found."""

    kind: Literal["random", "optuna", "hyperopt"] = Field(
        "random", description="drawn at random (grids in full), or learned from trials before"
    )
    trials: int = Field(20, ge=1, description="how many; with grids: how often the whole grid")
    seed: int = Field(0, ge=0, description="of what is drawn")
    base_first: bool = Field(True, description="the base configuration is a trial, too: the first")


class WholeSchedule(StrictModel):
    """Every trial goes on to its end."""

    kind: Literal["none"] = "none"


class AshaSchedule(StrictModel):
    """Trials that are behind others at the same point are ended early."""

    kind: Literal["asha"]
    grace: float = Field(
        gt=0,
        description="nobody is ended before: seconds of the run for time_to_target, USD for usd, "
        "samples for loss",
    )
    rungs: int = Field(4, ge=1, le=20, description="how often who is behind is ended")
    factor: float = Field(
        3.0, gt=1, description="one in so many goes on from a rung; the next is so far on"
    )


class PbtSchedule(StrictModel):
    """Trials that are behind go on from a copy of a better one, with its values changed a little.

    For real trials; the keys that are searched must be such as a run can be resumed with.
    """

    kind: Literal["pbt"]
    every: int = Field(2, ge=1, description="evaluations between two such moments")
    quantile: float = Field(
        0.25,
        gt=0,
        le=0.5,
        description="fraction of the trials replaced by copies of as many of the best trials",
    )


ScheduleConfig = Annotated[WholeSchedule | AshaSchedule | PbtSchedule, Field(discriminator="kind")]


class PricesConfig(StrictModel):
    """What trials cost, for the objective `usd`."""

    worker_usd_per_h: dict[Name, float] = Field(description="of one worker, by region")
    egress_usd_per_gb: dict[Name, float] = Field(
        default_factory=dict, description="of what leaves a region; a region that is absent: 0"
    )

    @model_validator(mode="after")
    def _not_negative(self) -> Self:
        for section in ("worker_usd_per_h", "egress_usd_per_gb"):
            for name, usd in getattr(self, section).items():
                if usd < 0:
                    raise ValueError(f"`{section}.{name}`: {usd} is below 0")
        return self


class TrialsConfig(StrictModel):
    """What a trial is, and how many run at once."""

    kind: Literal["simulated", "real"] = Field(
        "simulated", description="on the virtual clock, or on real actors"
    )
    jobs: int | None = Field(
        None, ge=1, description="at once; null: simulated ones one a core, real ones one"
    )
    seeds: tuple[int, ...] = Field(
        (1000,), description="runs of each; of several the median counts"
    )
    cluster: ClusterConfig = Field(
        LocalClusterConfig(), description="where trials run: made for the search, or existing"
    )

    @model_validator(mode="after")
    def _some_seeds(self) -> Self:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError("`seeds`: give one at least, and none twice")
        return self


class TuningConfig(StrictModel):
    """A search."""

    name: Name = Field("tune", description="of the search, and of its directory")
    base: str | dict[str, Any] = Field(
        description="the configuration that it starts from: a file, or its keys"
    )
    set: tuple[str, ...] = Field((), description="key.key=value each: changes in all trials")
    space: dict[str, Domains] = Field(
        description="what keys of the configuration may be; of a list, what has its `when` met"
    )
    objectives: tuple[ObjectiveName, ...] = Field(
        ("time_to_target",), description="what is to be least; of several there is a front"
    )
    search: SearchConfig = Field(SearchConfig(), description="how the next values are found")
    schedule: ScheduleConfig = Field(WholeSchedule(), description="who is ended early")
    trials: TrialsConfig = Field(TrialsConfig(), description="what a trial is")
    prices: PricesConfig | None = Field(None, description="what trials cost")

    @model_validator(mode="after")
    def _check_compatible(self) -> Self:
        if not self.space:
            raise ValueError("`space`: there is nothing to search")
        if not self.objectives or len(set(self.objectives)) < len(self.objectives):
            raise ValueError("`objectives`: name one at least, and none twice")
        if "usd" in self.objectives and self.prices is None:
            raise ValueError("`prices`: the objective usd needs them")
        domains = [each for many in self.space.values() for each in many]
        has_grid = any(each.grid is not None for each in domains)
        if has_grid and self.search.kind != "random":
            raise ValueError(f"`search.kind`: {self.search.kind} takes no grid; use choice there")
        if self.search.kind == "hyperopt" and len(self.objectives) > 1:
            raise ValueError("`search.kind`: hyperopt goes by one objective; optuna takes several")
        if self.schedule.kind == "pbt":
            if self.trials.kind != "real":
                raise ValueError("`schedule.kind`: pbt is for real trials: trials.kind=real")
            if self.search.kind != "random" or has_grid:
                raise ValueError(
                    "`schedule.kind`: pbt looks by itself: search.kind=random, no grid"
                )
            if len(self.trials.seeds) > 1:
                raise ValueError("`trials.seeds`: pbt changes a run that goes on: give one seed")
        return self
