"""A plan as changes of a configuration: what `geo-ray train --plan` does with it."""

from __future__ import annotations

import json

from geo_ray.config.experiment import Experiment
from geo_ray.errors import PlanError
from geo_ray.planning.plan import Plan


def changes_of(plan: Plan, experiment: Experiment) -> list[str]:
    """Overrides, as for ``--set``: workers, batches, averager, interval and codec of the plan.

    Machines are not rented: the cluster has them, one worker on each.

    Raises:
        PlanError: it is for other regions or another number of steps.
    """
    names = [region.region for region in plan.regions]
    if sorted(names) != sorted(experiment.region_names):
        raise PlanError(
            f"the plan is for regions {', '.join(names)}, the configuration has "
            f"{', '.join(experiment.region_names)}",
            fix="Plan this configuration with `geo-ray plan --out`.",
        )
    steps = experiment.train.steps * max(1, experiment.worker_steps)
    if plan.steps != steps:
        raise PlanError(
            f"the plan is for {plan.steps:g} steps, the configuration has {steps}",
            fix="Plan this configuration with `geo-ray plan --out`.",
        )
    by_name = {region.region: region for region in plan.regions}
    regions = [
        region.model_dump(mode="json", exclude_defaults=True)
        | {
            "workers": by_name[region.name].workers,
            "batch_sizes": by_name[region.name].batch_sizes,
        }
        for region in experiment.regions
    ]
    changes = [f"regions={json.dumps(regions)}", f"averager.region={plan.averager}"]
    if getattr(experiment.strategy, "interval", None) is not None:
        changes.append(f"strategy.interval={plan.interval}")
    up = experiment.codec.up
    if plan.codec != (None if up is None else up.kind):
        both = {"kind": plan.codec}
        codec = {} if plan.codec is None else {"up": both}
        if plan.codec not in (None, "chunked_topk"):
            codec["down"] = both
        changes.append(f"codec={json.dumps(codec)}")
    return changes
