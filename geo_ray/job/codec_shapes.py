"""Tell codecs that see matrices which ones the model's vector consists of."""

from __future__ import annotations

import math

from geo_ray.codecs.powersgd import PowerSgd
from geo_ray.config.experiment import Experiment
from geo_ray.errors import ConfigError
from geo_ray.tasks.base import Task
from geo_ray.tasks.guard import checked_model
from geo_ray.training.compute.flat import parameter_shapes


def with_shapes(experiment: Experiment, task: Task) -> Experiment:
    """The experiment, with the shapes of the task's model where a codec was given none.

    Raises:
        ConfigError: if a codec was given shapes of another model.
    """
    both = {"up": experiment.codec.up, "down": experiment.codec.down}
    found = {name: codec for name, codec in both.items() if isinstance(codec, PowerSgd)}
    if not found:
        return experiment
    shapes = parameter_shapes(checked_model(task, experiment.seed))
    filled = {}
    for direction, codec in found.items():
        given, needed = (sum(map(math.prod, s)) for s in (codec.shapes, shapes))
        if codec.shapes and given != needed:
            raise ConfigError(
                f"codec.{direction}.shapes have {given} elements, the model has {needed}",
                fix="Leave `shapes` out: they are taken from the model.",
            )
        filled[direction] = codec.model_copy(update={"shapes": codec.shapes or shapes})
    return experiment.model_copy(update={"codec": experiment.codec.model_copy(update=filled)})
