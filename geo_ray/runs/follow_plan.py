"""Applies a plan to a configuration, as `geo-ray train --plan` does.

Also identifies the model of a configuration.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

from geo_ray.base.errors import OtherModelError, PlanError
from geo_ray.base.load import load_tree
from geo_ray.codecs.registry import sections_of
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.loss import outer_of
from geo_ray.planner.plan import ModelId, Plan, RegionPlan
from geo_ray.runs.build import parameter_count
from geo_ray.runs.directory import CONFIG_FILE, RunDirectory
from geo_ray.training.optimizers import Muon, TaskSteps


def model_id(experiment: Experiment, base_dir: Path, num_params: int) -> ModelId:
    """Return the identity of a configuration's model.

    Args:
        experiment: the configuration.
        base_dir: base of a relative path to the user's file.
        num_params: of the model.
    """
    use = experiment.task.use
    where, _, _ = use.rpartition(":")
    source = None
    if where.endswith(".py"):
        source = hashlib.sha256((base_dir / where).read_bytes()).hexdigest()
        use = f"{Path(where).name}:{use.rpartition(':')[2]}"
    return ModelId(
        task=use, options=dict(experiment.task.options), source=source, num_params=num_params
    )


def _nodes(region: RegionPlan) -> list[dict[str, object]]:
    """Return the machines of the workers, in the order of their batches."""
    return [
        {"type": each.type, "count": each.count, "workers": each.workers}
        for each in region.machines
    ]


def check_model(plan: Plan, experiment: Experiment, base_dir: Path) -> None:
    """Reject a plan for another model.

    Args:
        plan: the plan.
        experiment: the configuration.
        base_dir: base of its relative paths.

    Raises:
        OtherModelError: names the differences.
        TaskLoadError: the task cannot be loaded.
    """
    if plan.model is None:
        return
    task = load_task(experiment.task, base_dir)
    num_params = parameter_count(task, experiment.seed)
    difference = plan.model.differs(model_id(experiment, base_dir, num_params))
    if difference is not None:
        raise OtherModelError(f"the plan is for another model: {difference}")


def emulation_of(plan: Plan) -> list[str]:
    """Return overrides that give a simulation the machines of the plan."""
    speeds = {
        region.region: [
            m.rows_per_s / m.workers for m in region.machines for _ in range(m.count * m.workers)
        ]
        for region in plan.regions
    }
    fixed_s = {r.region: r.fixed_s for r in plan.regions if r.fixed_s > 0}
    return [
        "emulate.step_s=null",
        f"emulate.step_s_by_region={json.dumps(fixed_s)}",
        f"emulate.rows_per_s_by_region={json.dumps(speeds)}",
    ]


def changes_of(plan: Plan, experiment: Experiment, *, exchanges: bool = True) -> list[str]:
    """Return overrides for the plan's workers, batches, averager, interval and codec.

    Machines are not rented: the cluster must have them, labelled with their type. Each runs exactly
    the workers that the plan assigns to it.

    Args:
        plan: the plan.
        experiment: the configuration.
        exchanges: whether to include interval and codec, in addition to the placement.

    Raises:
        PlanError: the plan is for other regions or another number of steps.
    """
    names = [region.region for region in plan.regions]
    if sorted(names) != sorted(experiment.region_names):
        raise PlanError(
            f"the plan is for regions {', '.join(names)}, the configuration has "
            f"{', '.join(experiment.region_names)}",
            fix="Plan this configuration with `geo-ray plan --out`.",
        )
    local = max(1, experiment.worker_steps)
    steps = experiment.train.steps * local
    if plan.base_steps != steps:
        raise PlanError(
            f"the plan is for {plan.base_steps:g} steps, the configuration has {steps}",
            fix="Plan this configuration with `geo-ray plan --out`.",
        )
    by_name = {region.region: region for region in plan.regions}
    regions = [
        region.model_dump(mode="json", exclude_defaults=True)
        | {
            "workers": by_name[region.name].workers,
            "batch_sizes": by_name[region.name].batch_sizes,
            "nodes": _nodes(by_name[region.name]),
            "server_node": by_name[region.name].server,
        }
        for region in experiment.regions
    ]
    changes = [f"regions={json.dumps(regions)}", f"averager.region={plan.averager}"]
    if experiment.groups:  # their machines are configured
        changes = []
    if plan.steps != steps:
        changes.append(f"train.steps={math.ceil(plan.steps / local)}")
    optimizer = experiment.optimizer
    if plan.lr_gain != 1 and not isinstance(optimizer, TaskSteps):
        # Steps that do not grow with the gradient: their rate grows with the root only.
        factor = plan.lr_gain if optimizer.kind in {"sgd", "momentum"} else plan.lr_gain**0.5
        changes.append(f"optimizer.lr={optimizer.lr * factor!r}")
        if isinstance(optimizer, Muon) and optimizer.adamw.lr is not None:
            changes.append(f"optimizer.adamw.lr={optimizer.adamw.lr * factor!r}")
    if not exchanges:
        return changes
    exchange = exchange_of(experiment, plan.interval, plan.codec)
    return changes + [f"{key}={json.dumps(value)}" for key, value in exchange.items()]


def exchange_of(experiment: Experiment, interval: int, codec: str | None) -> dict[str, object]:
    """Return the overrides of an exchange setting, by dotted key.

    Args:
        experiment: the configuration.
        interval: local steps between exchanges.
        codec: of the updates.
    """
    changes: dict[str, object] = {}
    if experiment.strategy.traits.exchange.interval is not None:
        changes["strategy.interval"] = max(1, interval // max(1, experiment.worker_steps))
    outer = outer_of(experiment.strategy.traits, interval)
    if outer is not None:
        changes["strategy.outer"] = outer
    up = experiment.codec.up
    if codec != (None if up is None else up.kind):
        changes["codec"] = sections_of(codec)
    return changes


def following(run: RunDirectory, experiment: Experiment, plan: Plan) -> Experiment:
    """Return the configuration of a run that follows another plan after its next resume.

    Args:
        run: directory of the run; not changed.
        experiment: its current configuration.
        plan: the new plan, from `geo-ray plan --from`.

    Raises:
        PlanError: the plan does not fit.
    """
    from geo_ray.experiment.experiment import Experiment

    steps = experiment.train.steps * max(1, experiment.worker_steps)
    own = plan.model_copy(update={"base_steps": steps, "steps": steps, "lr_gain": 1.0})
    changed = load_tree(
        run.path / CONFIG_FILE, changes_of(own, experiment), Experiment, base_dir=run.base_dir
    )
    check_model(plan, changed, run.base_dir)
    return changed
