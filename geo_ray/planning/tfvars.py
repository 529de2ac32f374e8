"""A plan's machines as variables of Terraform, for stacks whose counts Terraform owns; pure."""

from __future__ import annotations

import json

from geo_ray.planning.plan import Plan, RegionPlan


def tfvars_text(plan: Plan) -> str:
    """Return the variable `workers` as a file that `terraform -var-file` takes.

    Every region of the plan is in it, so that a file of a later plan replaces all of an earlier
    one's machines.
    """
    workers = {region.region: _pools(region) for region in plan.regions}
    return json.dumps({"workers": workers}, indent=2) + "\n"


def _pools(region: RegionPlan) -> dict[str, dict[str, str | int]]:
    pools: dict[str, dict[str, str | int]] = {}
    counts: dict[tuple[str, str], int] = {}
    for each in region.machines:  # the same machines may be there twice, rented at other times
        key = (each.type, each.market)
        counts[key] = counts.get(key, 0) + each.count
    for (kind, market), count in counts.items():
        name = f"worker-{kind}-{market.replace('_', '-')}"
        pools[name] = {"type": kind, "market": market, "role": "worker", "count": count}
    if region.server is not None:
        kind, name = region.server, f"server-{region.server}"
        pools[name] = {"type": kind, "market": "on_demand", "role": "server", "count": 1}
    return pools
