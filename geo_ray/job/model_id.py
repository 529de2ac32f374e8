"""Which model a configuration trains."""

from __future__ import annotations

import hashlib
from pathlib import Path

from geo_ray.config.experiment import Experiment
from geo_ray.planning.model_id import ModelId


def model_id(experiment: Experiment, base_dir: Path, num_params: int) -> ModelId:
    """What tells the model from others.

    Args:
        experiment: the configuration.
        base_dir: where a relative path to the user's file starts.
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
