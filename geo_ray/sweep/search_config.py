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
    """The values of one key, of exactly one kind, and the condition under which they apply.

    Lists are accepted as tuples in spite of strict mode: a single domain becomes a list before
    validation, and is no longer JSON then.
    """

    choice: tuple[Any, ...] | None = Field(
        None, strict=False, description="one of these, at random"
    )
    grid: tuple[Any, ...] | None = Field(
        None,
        strict=False,
        description="each of these, combined with every other grid; `search.trials` times",
    )
    uniform: tuple[float, float] | None = Field(
        None, strict=False, description="a number from low to high"
    )
    loguniform: tuple[float, float] | None = Field(
        None,
        strict=False,
        description="a number from low to high, uniform in its logarithm; both above 0",
    )
    randint: tuple[int, int] | None = Field(
        None, strict=False, description="an integer, both ends included"
    )
    lograndint: tuple[int, int] | None = Field(
        None, strict=False, description="an integer, uniform in its logarithm; both above 0"
    )
    value: Any = Field(None, description="a fixed value, for a key that follows another one")
    when: dict[str, Any] = Field(
        default_factory=dict,
        description="values of other keys that this domain requires; a list allows several",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = [kind for kind in KINDS if kind in self.model_fields_set]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(KINDS)}; there are {len(given)}")
        if given[0] in ("choice", "grid"):
            values = getattr(self, given[0])
            if not values:
                raise ValueError(f"`{given[0]}`: no values to choose from")
        elif given[0] != "value":
            low, high = getattr(self, given[0])
            if not low < high:
                raise ValueError(f"`{given[0]}`: {low} is not below {high}")
            if given[0].startswith("log") and low <= 0:
                raise ValueError(f"`{given[0]}`: {low} has no logarithm; use a value above 0")
        if self.grid is not None and self.when:
            raise ValueError("`grid`: takes no `when`, it would repeat trials; use `choice`")
        return self

    @property
    def kind(self) -> str:
        """Name of the kind."""
        return next(kind for kind in KINDS if kind in self.model_fields_set)

    @property
    def edges(self) -> tuple[JSONValue, ...]:
        """Values that are validated before the search starts: all listed ones, or both ends."""
        if self.kind == "value":
            return (self.value,)
        return tuple(getattr(self, self.kind))

    @property
    def most(self) -> JSONValue:
        """The largest number of the domain; the last value if it has no numbers."""
        numbers = [each for each in self.edges if _is_number(each)]
        return max(numbers) if numbers else self.edges[-1]

    def holds(self, value: JSONValue) -> bool:
        """Return whether the value is in the domain."""
        if self.kind in ("choice", "grid", "value"):
            return value in self.edges
        if not _is_number(value):
            return False
        low, high = getattr(self, self.kind)
        whole = "randint" not in self.kind or value == math.floor(value)
        return bool(low <= value <= high and whole)


def is_met(when: Mapping[str, Any], values: Mapping[str, JSONValue]) -> bool:
    """Return whether a condition holds for values by key; missing keys have no value."""
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
    """The search algorithm."""

    kind: Literal["random", "optuna", "hyperopt"] = Field(
        "random", description="random values (grids in full), or values learned from earlier trials"
    )
    trials: int = Field(
        20, ge=1, description="number of trials; with grids, repetitions of the whole grid"
    )
    seed: int = Field(0, ge=0, description="seed of the random values")
    base_first: bool = Field(True, description="make the base configuration the first trial")


class WholeSchedule(StrictModel):
    """Every trial runs to its end."""

    kind: Literal["none"] = Field("none", description="stop no trial early")


class AshaSchedule(StrictModel):
    """Trials that are behind others at equal progress are stopped early."""

    kind: Literal["asha"] = Field(description="stop trials that are behind")
    grace: float = Field(
        gt=0,
        description="progress before which no trial is stopped: seconds of the run for "
        "time_to_target, USD for usd, samples for loss",
    )
    rungs: int = Field(4, ge=1, le=20, description="number of comparisons")
    factor: float = Field(
        3.0,
        gt=1,
        description="one of this many trials continues; also the ratio of successive comparisons",
    )


class PbtSchedule(StrictModel):
    """Trials that are behind continue from a copy of a better one, with slightly changed values.

    Only for real trials; the searched keys must be keys with which a run can be resumed.
    """

    kind: Literal["pbt"] = Field(description="population based training")
    every: int = Field(2, ge=1, description="evaluations between replacements")
    quantile: float = Field(
        0.25,
        gt=0,
        le=0.5,
        description="fraction of the trials replaced by copies of as many of the best trials",
    )


ScheduleConfig = Annotated[WholeSchedule | AshaSchedule | PbtSchedule, Field(discriminator="kind")]


class PricesConfig(StrictModel):
    """Prices for the objective `usd`."""

    worker_usd_per_h: dict[Name, float] = Field(description="USD per hour of one worker, by region")
    egress_usd_per_gb: dict[Name, float] = Field(
        default_factory=dict,
        description="USD per GB that leaves a region; 0 for regions that are not listed",
    )

    @model_validator(mode="after")
    def _not_negative(self) -> Self:
        for section in ("worker_usd_per_h", "egress_usd_per_gb"):
            for name, usd in getattr(self, section).items():
                if usd < 0:
                    raise ValueError(f"`{section}.{name}`: {usd} is below 0")
        return self


class TrialsConfig(StrictModel):
    """The kind of trials, and how many run at the same time."""

    kind: Literal["simulated", "real"] = Field(
        "simulated", description="in the simulator, or on real actors"
    )
    jobs: int | None = Field(
        None,
        ge=1,
        description="trials at the same time; null: one per core if simulated, one if real",
    )
    seeds: tuple[int, ...] = Field(
        (1000,), description="seeds of the runs of each trial; the median counts"
    )
    cluster: ClusterConfig = Field(
        LocalClusterConfig(),
        description="cluster of real trials: local, made for the search, or existing",
    )

    @model_validator(mode="after")
    def _some_seeds(self) -> Self:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError("`seeds`: give at least one, without duplicates")
        return self


class TuningConfig(StrictModel):
    """The file of `geo-ray tune`."""

    name: Name = Field("tune", description="name of the search and of its directory")
    base: str | dict[str, Any] = Field(
        description="configuration to start from: a file or its keys"
    )
    set: tuple[str, ...] = Field((), description="changes in all trials, each key.key=value")
    space: dict[str, Domains] = Field(
        description="domains by key; of a list, the one whose `when` holds applies"
    )
    objectives: tuple[ObjectiveName, ...] = Field(
        ("time_to_target",), description="what to minimise; several give a Pareto front"
    )
    search: SearchConfig = Field(SearchConfig(), description="search algorithm")
    schedule: ScheduleConfig = Field(WholeSchedule(), description="rule that stops trials early")
    trials: TrialsConfig = Field(TrialsConfig(), description="kind, number and seeds of trials")
    prices: PricesConfig | None = Field(None, description="prices for the objective usd")

    @model_validator(mode="after")
    def _check_compatible(self) -> Self:
        if not self.space:
            raise ValueError("`space`: empty")
        if not self.objectives or len(set(self.objectives)) < len(self.objectives):
            raise ValueError("`objectives`: give at least one, without duplicates")
        if "usd" in self.objectives and self.prices is None:
            raise ValueError("`prices`: required by the objective usd")
        domains = [each for many in self.space.values() for each in many]
        has_grid = any(each.grid is not None for each in domains)
        if has_grid and self.search.kind != "random":
            raise ValueError(f"`search.kind`: {self.search.kind} takes no grid; use choice there")
        if self.search.kind == "hyperopt" and len(self.objectives) > 1:
            raise ValueError(
                "`search.kind`: hyperopt supports one objective; optuna supports several"
            )
        if self.schedule.kind == "pbt":
            if self.trials.kind != "real":
                raise ValueError("`schedule.kind`: pbt requires real trials: trials.kind=real")
            if self.search.kind != "random" or has_grid:
                raise ValueError(
                    "`schedule.kind`: pbt searches by itself: use search.kind=random, no grid"
                )
            if len(self.trials.seeds) > 1:
                raise ValueError("`trials.seeds`: pbt changes a running trial: use one seed")
        return self
