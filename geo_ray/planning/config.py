"""The ``plan`` section of a configuration: what could be rented where, what a plan must keep."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from geo_ray.clouds.price import Market
from geo_ray.config.base import StrictModel
from geo_ray.planning.model.progress import AnyProgress, FixedProgress
from geo_ray.planning.residency import Residency
from geo_ray.planning.search.ways import Objective


class MachineConfig(StrictModel):
    """A type of machine that a region could rent."""

    type: str = Field(min_length=1, description="instance type, as the price has it")
    cap: int = Field(ge=0, description="most of them: quota or stock")
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
    """What spot machines are expected to cost in lost work. An assumption: nobody publishes it."""

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
