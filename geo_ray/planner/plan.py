"""A plan: machines, exchange and the prediction term by term, as one JSON file.

`ModelId` identifies the model of a plan or profile; `tfvars_text` writes a plan's machines as
Terraform variables.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import Field

from geo_ray.base.errors import PlanError
from geo_ray.base.load import load_json
from geo_ray.base.model import StrictModel
from geo_ray.base.text import bytes_text
from geo_ray.planner.memory import terms_text
from geo_ray.prices.price import Market


class ModelId(StrictModel):
    """Properties of a model that determine step time and exchange size."""

    task: str = Field(description="task as named in the configuration")
    options: dict[str, str | int | float | bool | None] = Field({}, description="of the task")
    source: str | None = Field(
        None, description="digest of the user's file; null for a built-in task"
    )
    num_params: int = Field(ge=1, description="parameters of the model")

    def differs(self, other: ModelId) -> str | None:
        """Return how ``other`` differs; None if it is the same model."""
        if self.task != other.task:
            return f"the task is {other.task}, not {self.task}"
        if self.num_params != other.num_params:
            return f"the model has {other.num_params:,} parameters, not {self.num_params:,}"
        changed = sorted(
            name
            for name in self.options.keys() | other.options.keys()
            if self.options.get(name) != other.options.get(name)
        )
        if changed:
            return f"the task's options differ: {', '.join(changed)}"
        return "the task's file has changed" if self.source != other.source else None


class Machines(StrictModel):
    """Machines of one type in one market."""

    type: str = Field(description="instance type")
    market: Market = Field(description="market")
    count: int = Field(ge=1, description="how many")
    rows: int = Field(ge=1, description="rows per step of each machine")
    workers: int = Field(1, ge=1, description="workers per machine, one per accelerator")
    rows_per_s: float = Field(gt=0, description="assumed speed")
    usd_per_h: float = Field(ge=0, description="price of one, averaged over the job")
    since_h: float = Field(
        0.0, ge=0, description="hours from the launch of the first machines to its launch"
    )

    @property
    def worker_rows(self) -> tuple[int, ...]:
        """Return the rows of each worker of one machine."""
        part, more = divmod(self.rows, self.workers)
        return tuple(part + (number < more) for number in range(self.workers))


class RankMemory(StrictModel):
    """Predicted memory of the ranks of a group."""

    ranks: int = Field(ge=1, description="ranks of one machine")
    device: dict[str, float] = Field(
        description="bytes of one rank on its device by term, at the peak of a step"
    )
    host: dict[str, float] = Field(description="bytes of one rank on its host by term, in addition")
    device_gb: float | None = Field(
        None, description="memory of its accelerator; null: unknown, or the device is the CPU"
    )
    host_gb: float | None = Field(None, description="memory of the machine; null: unknown")

    def text(self, *, explain: bool = False) -> str:
        """Return the memory as text, such as ``8.8 GB of 80 GB per accelerator``.

        Args:
            explain: whether to add every term.
        """

        def shown(terms: Mapping[str, float], has_gb: float | None, count: int = 1) -> str:
            has = "" if has_gb is None else f" of {has_gb:g} GB"
            return f"{bytes_text(count * sum(terms.values()))}{has}"

        on_host = {**self.device, **self.host}
        found = []
        if "reserve" in self.device:
            on_host = dict(self.host)
            found.append(f"{shown(self.device, self.device_gb)} per accelerator")
        found.append(f"{shown(on_host, self.host_gb, self.ranks)} per machine")
        if explain:
            if "reserve" in self.device:
                found.append(f"on an accelerator {terms_text(self.device)}")
            found.append(f"a rank on its host {terms_text(on_host)}")
        return "; ".join(found)


class RegionPlan(StrictModel):
    """Machines and speed of one region."""

    region: str
    machines: tuple[Machines, ...] = Field(min_length=1)
    step_s: float = Field(gt=0, description="seconds of a step")
    fixed_s: float = Field(0.0, ge=0, description="constant part of a step")
    fixed_usd_per_h: float = Field(
        0.0, ge=0, description="price of servers and disks, averaged over the job"
    )
    server: str | None = Field(
        None, description="instance type for parameter server and bridge; null: on a worker's"
    )
    server_since_h: float = Field(0.0, ge=0, description="`since_h` of the server")
    memory: RankMemory | None = Field(
        None, description="memory of the region's group; null: the region has no group"
    )

    @property
    def workers(self) -> int:
        """Number of workers on all machines."""
        return sum(each.count * each.workers for each in self.machines)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Rows of a step by worker, in the order of `machines`."""
        return tuple(rows for each in self.machines for rows in each.count * each.worker_rows)

    @property
    def machines_text(self) -> str:
        """All machines as text: ``2 x g5.xlarge spot + 1 x g6.xlarge spot``."""
        return " + ".join(
            f"{each.count} x {each.type} {each.market.replace('_', '-')}" for each in self.machines
        )


class PlannedLoss(StrictModel):
    """Expected loss of a plan's interval and codec."""

    expected: float | None = Field(
        description="relative to plain training; null: training diverged"
    )
    measured: bool = Field(description="measured for this task, or assumed")


class Plan(StrictModel):
    """A plan with its predicted time and cost."""

    version: Literal[1] = 1
    policy: str = Field(description="planning policy")
    regions: tuple[RegionPlan, ...] = Field(min_length=1)
    averager: str = Field(description="region of the averager")
    interval: int = Field(ge=1, description="local steps between exchanges")
    codec: str | None = Field(description="codec of the updates; null: fp32")
    steps: float = Field(gt=0, description="local steps of each region")
    model: ModelId | None = Field(None, description="model of the plan; null: not checked")
    loss: PlannedLoss | None = Field(
        None, description="expected loss; null: unknown (older releases)"
    )
    usd_per_gb: dict[str, dict[str, float]] = Field(
        {}, description="egress price by source and destination, for pairs with the averager"
    )
    seconds: dict[str, float] = Field(description="predicted seconds by term")
    usd: dict[str, float] = Field(description="predicted dollars by term")
    seconds_range: tuple[float, float] | None = Field(
        None, description="expected range of the time"
    )
    usd_range: tuple[float, float] | None = Field(None, description="expected range of the dollars")
    from_step: int = Field(
        0,
        ge=0,
        description="completed steps at planning; predictions cover the rest",
    )
    base_steps: float = Field(0.0, ge=0, description="steps with the configured batch")
    lr_gain: float = Field(
        1.0, gt=0, description="factor on the learning rate of plain SGD for the batch"
    )
    gap: float = Field(0.0, ge=0, description="maximum relative distance to the optimum")
    serving: dict[str, float] = Field(
        {}, description="bytes of the process that serves a run of groups, by term"
    )
    reason: str = Field("", description="why this one")
    notes: tuple[str, ...] = Field((), description="limitations of the prediction")

    @property
    def total_s(self) -> float:
        """Predicted seconds of the job."""
        return sum(self.seconds.values())

    @property
    def total_usd(self) -> float:
        """Predicted dollars of the job."""
        return sum(self.usd.values())

    @property
    def machines_text(self) -> str:
        """Machines of all regions as text."""
        return "; ".join(f"{each.region}: {each.machines_text}" for each in self.regions)

    @property
    def usd_per_h(self) -> float:
        """Hourly price of the machines."""
        return sum(m.count * m.usd_per_h for region in self.regions for m in region.machines)

    @property
    def fixed_usd_per_h(self) -> float:
        """Hourly price of servers and disks."""
        return sum(region.fixed_usd_per_h for region in self.regions)


def load_plan(path: Path) -> Plan:
    """Read a plan file.

    Raises:
        PlanError: the file is missing or invalid.
    """
    return load_json(
        path, Plan, "plan", partial(PlanError, fix="Create one with `geo-ray plan --out`.")
    )


def differing_machines(plans: Sequence[Plan]) -> list[str]:
    """Machines of each plan, for regions in which the plans differ."""
    by_plan = [{each.region: each.machines_text for each in plan.regions} for plan in plans]
    regions = by_plan[0] if by_plan else {}
    names = [name for name in regions if len({texts.get(name) for texts in by_plan}) > 1]
    return ["; ".join(f"{name}: {texts[name]}" for name in names) for texts in by_plan]


def tfvars_text(plan: Plan) -> str:
    """Return the Terraform variable `workers`, for `terraform -var-file`.

    The file contains every region of the plan, so it replaces all machines of an earlier plan.
    """
    workers = {region.region: _pools(region) for region in plan.regions}
    return json.dumps({"workers": workers}, indent=2) + "\n"


def _pools(region: RegionPlan) -> dict[str, dict[str, str | int]]:
    pools: dict[str, dict[str, str | int]] = {}
    counts: dict[tuple[str, str], int] = {}
    for (
        each
    ) in region.machines:  # the same machines may be listed twice, with different launch times
        key = (each.type, each.market)
        counts[key] = counts.get(key, 0) + each.count
    for (kind, market), count in counts.items():
        name = f"worker-{kind}-{market.replace('_', '-')}"
        pools[name] = {"type": kind, "market": market, "role": "worker", "count": count}
    if region.server is not None:
        kind, name = region.server, f"server-{region.server}"
        pools[name] = {"type": kind, "market": "on_demand", "role": "server", "count": 1}
    return pools
