"""How large a task's model is, without any memory for it: counted on PyTorch's meta device."""

from __future__ import annotations

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

_META: Final = torch.device("meta")
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
    """Return the size; a model that cannot be made on the meta device is made on the CPU.

    Raises:
        TaskOutputError: if the model cannot be trained as one flat fp32 vector.
    """
    module = outlined_model(task, seed)
    check_module(module)
    num_params = count_parameters(module)
    if not all(parameter.is_meta for parameter in module.parameters()):
        return ModelSize(num_params, None)
    try:
        few, more = (_kept_bytes(task, module, rows) for rows in (_FEW, _MORE))
    except Exception:  # a loss may do whatever works on a CPU
        return ModelSize(num_params, None)
    return ModelSize(num_params, max(0.0, (more - few) / (_MORE - _FEW)))


def _kept_bytes(task: Task, module: nn.Module, rows: int) -> int:
    """What autograd keeps of a forward pass over so many rows, parameters left out."""
    known = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    kept: dict[int, Tensor] = {}  # held, so that no storage takes the place of another

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in known:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with _META, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = task.loss(module, task.collate(_rows_of(task.columns, rows), _META))
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
