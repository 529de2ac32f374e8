"""The size of a task's model: its parameters, and what a row needs in the backward pass."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from geo_ray.tasks.base import Task
from geo_ray.tasks.guard import outlined_model
from geo_ray.training.compute.flat import check_module, count_parameters
from geo_ray.util.generators import generators_restored

_MOST_PARAMS: Final = 50_000_000  # of a model that computes a few rows to be measured
_SCHEMA: Final = re.compile(r"(\w+?)(?:\[(\d+)\])?")
_FEW, _MORE = 2, 4  # rows


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The size of a model.

    Attributes:
        num_params: trainable parameters.
        row_bytes: that the backward pass needs of the forward pass, for each row; None if that
            cannot be told without computing.
    """

    num_params: int
    row_bytes: float | None


def model_size(task: Task, seed: int) -> ModelSize:
    """Return the size; see `outlined_model` for where the model is made.

    Raises:
        TaskOutputError: if the model cannot be trained as one flat fp32 vector.
    """
    module = outlined_model(task, seed)
    check_module(module)
    num_params = count_parameters(module)
    is_real = not any(parameter.is_meta for parameter in module.parameters())
    if is_real and num_params > _MOST_PARAMS:
        return ModelSize(num_params, None)
    device = torch.device("cpu" if is_real else "meta")
    try:
        with generators_restored():
            few, more = (_kept_bytes(task, module, rows, device) for rows in (_FEW, _MORE))
    except Exception:  # a loss may refuse rows of zeros
        return ModelSize(num_params, None)
    return ModelSize(num_params, max(0.0, (more - few) / (_MORE - _FEW)))


def _kept_bytes(task: Task, module: nn.Module, rows: int, device: torch.device) -> int:
    """What autograd keeps of a forward pass over so many rows, parameters left out."""
    module = copy.deepcopy(module)  # the pass may change what the task uses again, to train
    known = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    kept: dict[int, Tensor] = {}  # held, so that no storage takes the place of another

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in known:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with device, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = task.loss(module, task.collate(_rows_of(task.columns, rows), device))
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del loss
    return size


def _rows_of(columns: Mapping[str, str], rows: int) -> dict[str, np.ndarray]:
    found = {}
    for name, schema in columns.items():
        match = _SCHEMA.fullmatch(schema)
        if match is None:
            raise ValueError(schema)
        length = (int(match[2]),) if match[2] else ()
        found[name] = np.zeros((rows, *length), dtype=match[1])
    return found
