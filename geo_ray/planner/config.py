"""The `plan` section: machines available, residency rules, limits and objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from geo_ray.base.errors import ConfigError, PlanInfeasibleError
from geo_ray.base.model import StrictModel
from geo_ray.planner.progress import AnyProgress, FixedProgress
from geo_ray.prices.price import Market

Objective = Literal["cost", "time"]


class Residency(StrictModel):
    """Rules by home region."""

    data: dict[str, tuple[str, ...]] = Field(
        {}, description="where raw data may be; only the home region itself can be carried out"
    )
    gradients: dict[str, tuple[str, ...]] = Field(
        {}, description="where updates that are made of a region's data may go"
    )
    checkpoints: dict[str, tuple[str, ...]] = Field(
        {}, description="where a model that has seen a region's data may be kept"
    )


def allowed_averagers(rules: Residency, regions: Sequence[str]) -> list[str]:
    """Return the regions that may host the averager, which sees every update and keeps the model.

    Args:
        rules: all of them.
        regions: of the job.

    Raises:
        PlanInfeasibleError: rules contradict each other or leave no region; names them.
    """
    for kind, table in (
        ("data", rules.data),
        ("gradients", rules.gradients),
        ("checkpoints", rules.checkpoints),
    ):
        _check_names(kind, table, regions)
    for home, places in rules.data.items():
        if home not in places:
            raise PlanInfeasibleError(
                f"residency.data: data of '{home}' may not be in '{home}', where they are",
                fix="Move the data, or correct the rule.",
            )
    left = list(regions)
    for kind, table in (("gradients", rules.gradients), ("checkpoints", rules.checkpoints)):
        for home, places in table.items():
            retained = [region for region in left if region in places]
            if not retained:
                raise PlanInfeasibleError(
                    f"residency.{kind}: what is made of data of '{home}' may only be in "
                    f"{', '.join(places) or 'no region'}, which other rules exclude; "
                    "no region can host the averager",
                    fix="Let one region receive updates of all, and keep the model.",
                )
            left = retained
    return left


def _check_names(kind: str, table: Mapping[str, Sequence[str]], regions: Sequence[str]) -> None:
    for home, places in table.items():
        for name in (home, *places):
            if name not in regions:
                raise PlanInfeasibleError(
                    f"residency.{kind}.{home}: there is no region '{name}'",
                    fix=f"Use one of {', '.join(regions)}.",
                )


class MachineConfig(StrictModel):
    """A type of machine that a region could rent."""

    type: str = Field(min_length=1, description="instance type, as the price has it")
    cap: int = Field(ge=0, description="maximum count, by quota or availability")
    rows_per_s: float | None = Field(
        None, gt=0, description="rows that one trains on per second; null: as profiled"
    )
    markets: tuple[Market, ...] = Field(
        ("on_demand",), min_length=1, description="how it may be bought"
    )
    accelerators: int | None = Field(
        None, ge=0, description="how many it has, each for a worker; null: as known, else none"
    )
    accelerator_gb: float | None = Field(
        None, gt=0, description="memory of an accelerator; null: as known, else not looked at"
    )
    host_gb: float | None = Field(
        None, gt=0, description="its own memory; null: as known, else not looked at"
    )
    network_gbps: float | None = Field(
        None, gt=0, description="what its network keeps up; null: as known"
    )
    count: int = Field(
        0, ge=0, description="policy `fixed`: how many there are, in the first of the markets"
    )


class RegionOffer(StrictModel):
    """What a region of the run is in a cloud."""

    cloud: str = Field(description="aws, tencent, or a name of your own")
    at: str = Field(description="the cloud's region")
    machines: tuple[MachineConfig, ...] = Field(description="what could be rented")
    rows: float | None = Field(None, gt=0, description="rows of data; null: as the manifest says")
    server: str | None = Field(
        None, description="instance type for parameter server and bridge; null: on a worker's"
    )
    disk: str | None = Field(None, description="kind of disk; null: none is counted")
    disk_gb: float = Field(0.0, ge=0, description="its size")


class SpotConfig(StrictModel):
    """Assumed cost of spot preemptions in lost work.

    Clouds guarantee no preemption rate. Recorded preemptions are published by spot-traces ("Can't
    Be Late", NSDI 2024), SkyNomad (NSDI 2027) and SpotLake.
    """

    preemptions_per_h: float = Field(0.05, ge=0, description="of one machine")
    lost_s: float = Field(180.0, ge=0, description="of its work each time, restart included")


class PlanConfig(StrictModel):
    """Everything a plan depends on beside the run itself, prices and links."""

    regions: dict[str, RegionOffer] = Field(description="by region of the run")
    objective: Objective = Field("cost", description="fewest dollars, or least time")
    deadline_h: float | None = Field(None, gt=0, description="longest time")
    budget_usd: float | None = Field(None, gt=0, description="most dollars")
    loss_budget: float = Field(
        0.05, ge=0, description="relative loss that long rounds and codecs may cost"
    )
    intervals: tuple[int, ...] | None = Field(
        None, min_length=1, description="to choose from; null: the configured one and powers of 2"
    )
    codecs: tuple[str | None, ...] | None = Field(
        None, min_length=1, description="to choose from; null: the configured one and the usual"
    )
    batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None, min_length=1, description="rows of a step, all workers; null: the configured ones"
    )
    progress: AnyProgress = Field(
        FixedProgress(), description="steps to the target with another batch"
    )
    spot: SpotConfig = SpotConfig()
    residency: Residency = Residency()
    startup_s: float | None = Field(
        120.0,
        ge=0,
        description="from renting to the first step; null: on a cluster that stands, as profiled",
    )
    step_overhead_s: float | None = Field(
        None,
        ge=0,
        description="of every step of the run, beside computing; null: as profiled, else 0",
    )
    lan_s_per_machine: float | None = Field(
        None,
        ge=0,
        description="that each machine adds to a step of the run; null: as profiled, else by what "
        "its workers send and get over its network",
    )
    activation_mb_per_row: float | None = Field(
        None,
        ge=0,
        description="memory that each row of a step needs beside the model; null: as counted",
    )

    @model_validator(mode="after")
    def _kinds_once(self) -> Self:
        for name, region in self.regions.items():
            types = [machine.type for machine in region.machines]
            twice = sorted({t for t in types if types.count(t) > 1})
            if twice:
                raise ValueError(
                    f'regions."{name}".machines: {", ".join(twice)} is there more than once'
                )
            if region.disk is not None and not region.disk_gb:
                raise ValueError(f'regions."{name}".disk_gb: a disk has more than 0 GB')
        return self


# Of the shipped prices: places with such machines, and what leaves them.
_AT = ("us-east-1", "eu-west-1", "ap-south-1", "us-west-2", "eu-central-1", "ap-northeast-1")


def no_plan_section(regions: Sequence[str]) -> ConfigError:
    """The error, with the smallest section that can be planned with.

    Args:
        regions: names of the run's regions.
    """
    lines = ["plan:", "  regions:"]
    for name, at in zip(regions, _places(regions), strict=True):
        machines = "[{type: g5.xlarge, cap: 4, rows_per_s: 100}]"
        lines.append(f"    {name}: {{cloud: aws, at: {at}, machines: {machines}}}")
    example = "\n         ".join(lines)
    return ConfigError(
        "the configuration has no section 'plan'",
        fix="List what can be rented in each region (`geo-ray config schema plan` has every key):\n"
        f"         {example}",
    )


def _places(regions: Sequence[str]) -> list[str]:
    """A place of the cloud for each: the one of its name, else one that no other has, if any."""
    named = [next((at for at in _AT if at.startswith(name)), None) for name in regions]
    others = cycle([at for at in _AT if at not in named] or _AT)
    return [next(others) if at is None else at for at in named]
