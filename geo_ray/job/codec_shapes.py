"""Tell codecs that see matrices which ones the model's vector consists of."""

from __future__ import annotations

from geo_ray.config.experiment import Experiment
from geo_ray.errors import ConfigError
from geo_ray.tasks.base import Task
from geo_ray.tasks.guard import outlined_model
from geo_ray.training.compute.flat import parameter_shapes


def with_shapes(experiment: Experiment, task: Task) -> Experiment:
    """The experiment, with the shapes of the task's model where a codec was given none.

    Raises:
        ConfigError: if a codec was given shapes of another model.
    """
    both = {"up": experiment.codec.up, "down": experiment.codec.down}
    told = {
        direction: codec.traits.with_shapes
        for direction, codec in both.items()
        if codec is not None and codec.traits.with_shapes is not None
    }
    if not told:
        return experiment
    shapes = parameter_shapes(outlined_model(task, experiment.seed))
    filled = {}
    for direction, with_shapes_of in told.items():
        try:
            filled[direction] = with_shapes_of(shapes)
        except ValueError as error:
            raise ConfigError(
                f"codec.{direction}.{error}",
                fix="Leave `shapes` out: they are taken from the model.",
            ) from error
    return experiment.model_copy(update={"codec": experiment.codec.model_copy(update=filled)})
