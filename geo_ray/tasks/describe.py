"""The size and shape of a task, for plans and reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from geo_ray.tasks.base import SelfContained, Task
from geo_ray.tasks.guard import checked_model


@dataclass(frozen=True)
class Description:
    """What a task trains.

    Attributes:
        name: class of the task.
        parameters: trainable numbers; a tied weight counts once.
        tensors: trainable tensors.
        parameter_bytes: bytes of one uncompressed float32 update.
        columns: schema of its shards.
        label_column: integer column for histograms, or None.
        self_contained: whether it brings its own data.
    """

    name: str
    parameters: int
    tensors: int
    parameter_bytes: int
    columns: Mapping[str, str]
    label_column: str | None
    self_contained: bool


def describe(task: Task, seed: int = 0) -> Description:
    """Build the model once and measure it.

    Raises:
        TaskOutputError: the task's model cannot be trained here (see `checked_model`).
    """
    model = checked_model(task, seed)
    sizes = [p.numel() for p in model.parameters() if p.requires_grad]
    return Description(
        name=type(task).__name__,
        parameters=sum(sizes),
        tensors=len(sizes),
        parameter_bytes=4 * sum(sizes),
        columns=dict(task.columns),
        label_column=task.label_column,
        self_contained=isinstance(task, SelfContained),
    )
