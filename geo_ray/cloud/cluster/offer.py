"""Machines that would be launched for a cluster, with prices and alternatives."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pydantic import Field

from geo_ray.base.model import StrictModel
from geo_ray.base.notebooks import ShownModel
from geo_ray.base.text import counted
from geo_ray.cloud.autoscaler.actions import Launch
from geo_ray.cloud.autoscaler.observation import Observed
from geo_ray.cloud.autoscaler.policy import AutoscalePolicy
from geo_ray.cloud.autoscaler.state import AutoscalerState
from geo_ray.cloud.cluster.providers import LOCAL, open_clouds
from geo_ray.cloud.cluster.spec import ClusterSpec
from geo_ray.cloud.local import LocalProvider, write_catalog
from geo_ray.cloud.provider import Availability, MachineProvider, Pool
from geo_ray.planner.plan import Plan

_HOUR_S: Final = 3600.0


class OfferedMachines(StrictModel):
    """Machines of one pool: chosen, or an alternative."""

    region: str = Field(description="region of the run; empty: machine of the head")
    role: str
    at: str
    type: str
    market: str
    count: int = Field(description="machines to launch")
    usd_per_hour: float | None = Field(description="price of one; null: unknown")
    usd_per_million_rows: float | None = Field(None, description="cost with expected preemptions")
    note: str = Field("", description="why it is not chosen")


class ClusterOffer(ShownModel):
    """Preview of `geo-ray up`."""

    name: str
    clouds: tuple[str, ...]
    state: str
    machines: tuple[OfferedMachines, ...] = Field(
        description="chosen ones first, then alternatives"
    )
    usd_per_hour: float = Field(description="of all machines to launch")
    total_s: float = Field(description="planned duration of the run")
    total_usd: float = Field(description="planned cost of the run without the head")
    head_usd: float = Field(
        0.0, description="cost of the head in the same time; 0: not part of the cluster, or unknown"
    )
    budget_usd: float | None = Field(
        None, description="maximum cost of all machines, including the head"
    )
    plan: Plan = Field(description="what should run")

    def view(self) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
        """See `ShownModel.view`."""
        count = sum(each.count for each in self.machines)
        line = f"{self.name}: {counted(count, 'machine')} for {self.usd_per_hour:.4g} USD/h, "
        line += f"the run {self.total_usd:.4g} USD as planned"
        rows = [
            (
                each.region,
                each.role,
                each.type,
                each.market.replace("_", "-"),
                each.at,
                f"{each.count}",
                "not known" if each.usd_per_hour is None else f"{each.usd_per_hour:.4g}",
                each.note,
            )
            for each in self.machines
        ]
        headings = ("region", "role", "machine", "market", "in", "rented", "USD/h each", "")
        return line, headings, rows


def cluster_offer(asked: ClusterSpec) -> ClusterOffer:
    """Read prices and let the autoscaler's policy choose machines; nothing is launched.

    Raises:
        CloudError: a cloud refuses a call.
    """
    record = asked.record
    if record.clouds == (LOCAL,) and asked.catalog is not None:
        with tempfile.TemporaryDirectory() as scratch:
            write_catalog(Path(scratch), asked.catalog)
            availabilities = _availabilities(LocalProvider(Path(scratch)), asked)
    else:
        availabilities = _availabilities(open_clouds(record, asked.state), asked)
    return _offer(asked, availabilities)


def _head_row(head: Pool, availabilities: dict[Pool, Availability]) -> OfferedMachines:
    return OfferedMachines(
        region="",
        role="head",
        at=head.zone or head.region,
        type=head.type,
        market=head.market.value,
        count=1,
        usd_per_hour=availabilities[head].usd_per_hour,
    )


def _head_usd(asked: ClusterSpec, availabilities: dict[Pool, Availability]) -> float:
    """Cost of the head during the planned run."""
    head = asked.record.target.head
    if head is None:
        return 0.0
    hours = asked.record.plan.total_s / _HOUR_S
    usd = availabilities[head.pool].usd_per_hour or 0.0
    return usd * hours * head.kind.age_factor(0.0, hours)


def _availabilities(provider: MachineProvider, asked: ClusterSpec) -> dict[Pool, Availability]:
    head = asked.record.head
    pools = [*([head.pool] if head.existing is None else []), *asked.record.target.pools()]
    wanted = list(dict.fromkeys(pools))
    return dict(zip(wanted, provider.availability(wanted), strict=True))


def _offer(asked: ClusterSpec, availabilities: dict[Pool, Availability]) -> ClusterOffer:
    record = asked.record
    policy = AutoscalePolicy(record.autoscale, record.name, record.id)
    observed = Observed(time.time(), (), availabilities=availabilities, left_s=record.plan.total_s)
    decided = policy.decide(record.target, AutoscalerState(), observed)
    rows = [] if record.head.existing is not None else [_head_row(record.head.pool, availabilities)]
    others: list[OfferedMachines] = []
    seen = set()
    for action in decided.actions:
        if not isinstance(action, Launch):
            continue
        role = action.request.labels.get("geo-ray/role", "worker")
        for each in action.alternatives:
            if (action.region, role, each.pool) in seen:
                continue
            seen.add((action.region, role, each.pool))
            row = OfferedMachines(
                region=action.region,
                role=role,
                at=each.pool.zone or each.pool.region,
                type=each.pool.type,
                market=each.pool.market.value,
                count=each.chosen,
                usd_per_hour=each.usd_per_hour,
                usd_per_million_rows=each.usd_per_million_rows,
                note=each.note,
            )
            (rows if each.chosen else others).append(row)
    usd = sum(row.count * (row.usd_per_hour or 0.0) for row in rows)
    return ClusterOffer(
        name=record.name,
        clouds=record.clouds,
        state=asked.state.uri,
        machines=(*rows, *others),
        usd_per_hour=usd,
        total_s=record.plan.total_s,
        total_usd=record.plan.total_usd,
        head_usd=_head_usd(asked, availabilities),
        budget_usd=record.target.budget_usd,
        plan=record.plan,
    )
