"""Which short runs a profile is made of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from geo_ray.codecs.registry import sections_of
from geo_ray.config.experiment import Experiment
from geo_ray.config.explain import explain
from geo_ray.config.own import context
from geo_ray.errors import ProfileError
from geo_ray.job.profile_points import WARM_UP
from geo_ray.planning.profile import Profile


@dataclass(frozen=True, slots=True)
class Corner:
    """One short run.

    Attributes:
        workers: in every region, or as many as it has.
        rows: of a step, of each worker.
        codec: of its exchanges; None for fp32.
    """

    workers: int
    rows: int
    codec: str | None = None


def corners(
    workers: Sequence[int], rows: Sequence[int], codecs: Sequence[str | None], *, full: bool
) -> list[Corner]:
    """The runs to make: three extremes that tell the line's three numbers, or the whole grid.

    Many workers are looked at with few rows, where what each adds is the largest part of a step.

    Args:
        workers: numbers of workers; at least one.
        rows: batch sizes; at least one.
        codecs: taken in turn, since a codec does not change a step.
        full: every combination.
    """
    counts, sizes = sorted(set(workers)), sorted(set(rows))
    extremes = [(counts[0], sizes[0]), (counts[0], sizes[-1]), (counts[-1], sizes[0])]
    grid = [(count, size) for count in counts for size in sizes]
    chosen = list(dict.fromkeys(grid if full else extremes))
    while len(chosen) < len(set(codecs)):  # every codec has a run of its own
        chosen.append(chosen[-1])
    return [Corner(*each, codecs[i % len(codecs)]) for i, each in enumerate(chosen)]


def missing(
    wanted: Sequence[Corner], experiment: Experiment, machines: Mapping[str, str], known: Profile
) -> list[Corner]:
    """Those corners whose steps or exchanges ``known`` does not have yet."""
    steps = {point.key for point in known.steps}
    codecs = {point.codec for point in known.exchanges}
    alone = len(experiment.regions) == 1
    found = []
    for corner in wanted:
        keys = {
            (r.name, machines[r.name], min(r.workers, corner.workers), corner.rows)
            for r in experiment.regions
        }
        if not keys <= steps or not (alone or corner.codec in codecs):
            found.append(corner)
    return found


def experiment_of(
    corner: Corner, experiment: Experiment, steps: int, run_dir: str, base_dir: Path
) -> Experiment:
    """The configuration of a short run.

    Args:
        corner: what differs.
        experiment: what is profiled.
        steps: that count.
        run_dir: where the run leaves its files.
        base_dir: where relative paths of the configuration start.

    Raises:
        ProfileError: the strategy does not work with so few workers or rows.
    """
    tree = experiment.model_dump(mode="json")
    for region in tree["regions"]:
        region["workers"] = min(region["workers"], corner.workers)
        region["batch_sizes"] = None
        speeds = (tree["emulate"] or {}).get("rows_per_s_by_region", {})
        if len(speeds.get(region["name"], [])) > 1:
            speeds[region["name"]] = speeds[region["name"]][: region["workers"]]
    tree["name"], tree["run"]["dir"] = "profile", run_dir
    tree["data"]["batch_size"] = corner.rows
    tree["checkpoint"]["every_s"] = None
    tree["train"] |= {
        "steps": WARM_UP + steps,
        "eval_every": WARM_UP + steps // 2,
        "target": None,
        "keep_best": None,
        "stragglers": None,
        "count": None,
        "noise_every": 1,
    }
    tree["codec"] = sections_of(corner.codec)
    often = {**tree, "strategy": {**tree["strategy"], "interval": max(1, steps // 4)}}
    if tree["strategy"].get("interval", 0) > steps // 4:
        try:
            return _validated(often, base_dir)
        except ValidationError:
            pass  # the interval has to fit other knobs: then exchanges are as rare as they are
    try:
        return _validated(tree, base_dir)
    except ValidationError as error:
        raise ProfileError(
            f"{corner.workers} workers with {corner.rows} rows cannot be measured: "
            f"{'; '.join(explain(error, Experiment, {}))}",
            fix="Choose other --workers and --batch-sizes.",
        ) from None


def _validated(tree: Mapping[str, Any], base_dir: Path) -> Experiment:
    return Experiment.model_validate_json(json.dumps(tree), context=context(base_dir))
