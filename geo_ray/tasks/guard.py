"""Calls into a task with its outputs checked, so that a wrong task fails at once and by name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn

from geo_ray.errors import GeoRayError, NonFiniteError, TaskOutputError
from geo_ray.tasks.base import Batch, Stats, Task
from geo_ray.tasks.seeding import seeded
from geo_ray.tasks.undrawn import Undrawn
from geo_ray.util.blame import place, source_of, summary


def checked_loss(task: Task, model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the task's loss of a batch: a finite floating scalar that has a gradient.

    Raises:
        TaskOutputError: the task raised, or returned something else.
        NonFiniteError: the loss is NaN or infinite.
    """
    with _blamed(task, "loss"):
        loss: object = task.loss(model, batch)
    name = type(task).__name__
    if not isinstance(loss, torch.Tensor):
        raise TaskOutputError(f"{name}.loss returned {type(loss).__name__}, not a tensor")
    if loss.ndim != 0:
        raise TaskOutputError(f"{name}.loss returned shape {tuple(loss.shape)}, not a scalar")
    if not loss.is_floating_point():
        raise TaskOutputError(f"{name}.loss returned {loss.dtype}, not a floating dtype")
    if not loss.requires_grad:
        raise TaskOutputError(f"{name}.loss does not depend on the parameters: it has no gradient")
    if not math.isfinite(loss.item()):
        raise NonFiniteError(f"{name}.loss is {loss.item()}")
    return loss


def checked_evaluate(task: Task, model: nn.Module, batch: Batch) -> Stats:
    """Return the task's statistics of a batch: finite float64 vectors by name.

    Raises:
        TaskOutputError: the task raised, or returned something else.
        NonFiniteError: a statistic is NaN or infinite.
    """
    with _blamed(task, "evaluate"):
        stats: object = task.evaluate(model, batch)
    name = type(task).__name__
    if not isinstance(stats, dict) or not stats:
        raise TaskOutputError(f"{name}.evaluate must return a non-empty dict of arrays", fix=_SUMS)
    for key, value in stats.items():
        if not isinstance(value, np.ndarray) or value.dtype != np.float64 or value.ndim != 1:
            found = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else ""
            raise TaskOutputError(
                f"{name}.evaluate: {key!r} is {found or type(value).__name__}, not float64[K]",
                fix=_SUMS,
            )
        if not np.isfinite(value).all():
            raise NonFiniteError(f"{name}.evaluate: {key!r} is not finite")
    return stats


def checked_model(task: Task, seed: int) -> nn.Module:
    """Return a fresh model that can be trained as one flat fp32 vector.

    Torch's generator is seeded around the call and restored after it, so a task that does not
    seed its model itself is deterministic too.

    Raises:
        TaskOutputError: not a module, nothing to train, or parameters not float32.
    """
    name = type(task).__name__
    with _blamed(task, "model"), seeded(seed):
        model: object = task.model(seed)
    if not isinstance(model, nn.Module):
        raise TaskOutputError(
            f"{name}.model returned {type(model).__name__}, not an nn.Module",
            fix="Return the module from model(seed).",
        )
    trained = [(key, p) for key, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise TaskOutputError(f"{name}.model has no trainable parameters", fix=_NOTHING_TO_TRAIN)
    for key, parameter in trained:
        if parameter.dtype != torch.float32:
            raise TaskOutputError(
                f"{name}.model: parameter {key!r} is {parameter.dtype}, not float32",
                fix="Keep parameters in float32; use autocast inside the loss for lower precision.",
            )
    return model


def outlined_model(task: Task, seed: int) -> nn.Module:
    """Return the task's model for its names, shapes and types only.

    It is made on the meta device, where tensors have no content: a model of any size costs neither
    memory nor time. A task that cannot make it there (it looks at values, say) makes it in full.

    Raises:
        TaskOutputError: as `checked_model`.
    """
    try:
        with torch.device("meta"), Undrawn():
            return checked_model(task, seed)
    except Exception:  # whatever is wrong with the task itself is told by the next line
        return checked_model(task, seed)


_NOTHING_TO_TRAIN = "Leave requires_grad of some parameters on."
_SUMS = 'Return sums over the batch\'s rows, e.g. {"rows": np.array([n], np.float64), ...}.'


@contextmanager
def _blamed(task: Task, method: str) -> Iterator[None]:
    """Name the task, the method and the line when user code raises."""
    try:
        yield
    except GeoRayError:
        raise
    except Exception as error:
        where = place(error, source_of(type(task)) or Path(type(task).__module__))
        raise TaskOutputError(
            f"{type(task).__name__}.{method} raised {summary(error)} ({where})",
            fix="Mend the named line of the task.",
        ) from error
