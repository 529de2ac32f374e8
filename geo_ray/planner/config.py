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
    """Regions that may receive or store what is derived from a region's data."""

    data: dict[str, tuple[str, ...]] = Field(
        {}, description="regions that may hold raw data; data never leave their region"
    )
    gradients: dict[str, tuple[str, ...]] = Field(
        {}, description="regions that may receive updates computed on a region's data"
    )
    checkpoints: dict[str, tuple[str, ...]] = Field(
        {}, description="regions that may store a model trained on a region's data"
    )


def allowed_averagers(rules: Residency, regions: Sequence[str]) -> list[str]:
    """Return the regions that may host the averager.

    The averager receives every update and stores the model.

    Args:
        rules: residency rules.
        regions: regions of the job.

    Raises:
        PlanInfeasibleError: the rules contradict each other or leave no region; it names them.
    """
    for kind, table in (
        ("data", rules.data),
        ("gradients", rules.gradients),
        ("checkpoints", rules.checkpoints),
    ):
        _check_names(kind, table, regions)
    for region, places in rules.data.items():
        if region not in places:
            raise PlanInfeasibleError(
                f"residency.data: data of '{region}' may not be in '{region}', where they are",
                fix="Move the data, or correct the rule.",
            )
    left = list(regions)
    for kind, table in (("gradients", rules.gradients), ("checkpoints", rules.checkpoints)):
        for region, places in table.items():
            retained = [region for region in left if region in places]
            if not retained:
                raise PlanInfeasibleError(
                    f"residency.{kind}: what is derived from data of '{region}' may only be in "
                    f"{', '.join(places) or 'no region'}, which other rules exclude; "
                    "no region can host the averager",
                    fix="Allow one region to receive all updates and store the model.",
                )
            left = retained
    return left


def _check_names(kind: str, table: Mapping[str, Sequence[str]], regions: Sequence[str]) -> None:
    for region, places in table.items():
        for name in (region, *places):
            if name not in regions:
                raise PlanInfeasibleError(
                    f"residency.{kind}.{region}: unknown region '{name}'",
                    fix=f"Use one of {', '.join(regions)}.",
                )


class MachineConfig(StrictModel):
    """A machine type that a region can launch."""

    type: str = Field(min_length=1, description="instance type, as in the price records")
    cap: int = Field(ge=0, description="maximum count, by quota or availability")
    rows_per_s: float | None = Field(
        None, gt=0, description="rows that a machine trains on per second; null: as profiled"
    )
    markets: tuple[Market, ...] = Field(
        ("on_demand",), min_length=1, description="how machines may be bought"
    )
    accelerators: int | None = Field(
        None,
        ge=0,
        description="accelerators, each for one worker; null: as known for the type, else none",
    )
    accelerator_gb: float | None = Field(
        None, gt=0, description="memory of an accelerator; null: as known, else not checked"
    )
    host_gb: float | None = Field(
        None, gt=0, description="memory of the machine; null: as known, else not checked"
    )
    network_gbps: float | None = Field(
        None, gt=0, description="sustained network rate; null: as known"
    )
    count: int = Field(
        0, ge=0, description="machines of the policy `fixed`, in the first of the markets"
    )


class RegionOffer(StrictModel):
    """Cloud region, machines and data of a region of the run."""

    cloud: str = Field(description="aws, tencent, or a custom name")
    at: str = Field(description="region of the cloud")
    machines: tuple[MachineConfig, ...] = Field(description="machine types that can be rented")
    rows: float | None = Field(None, gt=0, description="rows of data; null: from the manifest")
    server: str | None = Field(
        None, description="instance type for parameter server and bridge; null: on a worker's"
    )
    disk: str | None = Field(None, description="disk type; null: no disk is counted")
    disk_gb: float = Field(0.0, ge=0, description="size of the disk")


class SpotConfig(StrictModel):
    """Assumed cost of spot preemptions in lost work.

    Clouds guarantee no preemption rate. Recorded preemptions are published by spot-traces ("Can't
    Be Late", NSDI 2024), SkyNomad (NSDI 2027) and SpotLake.
    """

    preemptions_per_h: float = Field(
        0.05, ge=0, description="preemptions per hour of one spot machine"
    )
    lost_s: float = Field(
        180.0, ge=0, description="work that each preemption costs, restart included"
    )


class PlanConfig(StrictModel):
    """Machines, limits and assumptions of a plan."""

    regions: dict[str, RegionOffer] = Field(
        description="cloud region and machines, by region of the run"
    )
    objective: Objective = Field("cost", description="minimise dollars or time")
    deadline_h: float | None = Field(None, gt=0, description="maximum time, from renting on")
    budget_usd: float | None = Field(None, gt=0, description="maximum dollars")
    loss_budget: float = Field(
        0.05, ge=0, description="maximum relative loss from interval and codec"
    )
    intervals: tuple[int, ...] | None = Field(
        None,
        min_length=1,
        description="intervals to choose from; null: the configured one and powers of 2",
    )
    codecs: tuple[str | None, ...] | None = Field(
        None,
        min_length=1,
        description="codecs to choose from; null: the configured one and common ones",
    )
    batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None,
        min_length=1,
        description="global batches to choose from, in rows; null: the configured one",
    )
    progress: AnyProgress = Field(
        FixedProgress(), description="rule for the steps that another batch needs"
    )
    spot: SpotConfig = Field(SpotConfig(), description="assumed cost of spot preemptions")
    residency: Residency = Field(
        Residency(), description="regions that may receive updates and store the model"
    )
    startup_s: float | None = Field(
        120.0,
        ge=0,
        description="seconds from renting to the first step; null: as profiled, on a running "
        "cluster",
    )
    step_overhead_s: float | None = Field(
        None,
        ge=0,
        description="seconds of each step besides computing; null: as profiled, else 0",
    )
    lan_s_per_machine: float | None = Field(
        None,
        ge=0,
        description="seconds that each machine adds to a step; null: as profiled, else computed "
        "from the network of the machine",
    )
    activation_mb_per_row: float | None = Field(
        None,
        ge=0,
        description="memory of each row of a step, in addition to the model; null: measured",
    )

    @model_validator(mode="after")
    def _kinds_once(self) -> Self:
        for name, region in self.regions.items():
            types = [machine.type for machine in region.machines]
            twice = sorted({t for t in types if types.count(t) > 1})
            if twice:
                raise ValueError(
                    f'regions."{name}".machines: {", ".join(twice)} is listed more than once'
                )
            if region.disk is not None and not region.disk_gb:
                raise ValueError(f'regions."{name}".disk_gb: a disk has more than 0 GB')
        return self


# example from the shipped prices: regions with such machines, and egress prices
_AT = ("us-east-1", "eu-west-1", "ap-south-1", "us-west-2", "eu-central-1", "ap-northeast-1")


def no_plan_section(regions: Sequence[str]) -> ConfigError:
    """Error with the smallest valid section.

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
        fix="List the machines of each region (`geo-ray config schema plan` has every key):\n"
        f"         {example}",
    )


def _places(regions: Sequence[str]) -> list[str]:
    """Cloud region for each: the one of its name, else an unused one, if any."""
    named = [next((at for at in _AT if at.startswith(name)), None) for name in regions]
    others = cycle([at for at in _AT if at not in named] or _AT)
    return [next(others) if at is None else at for at in named]
