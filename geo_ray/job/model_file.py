"""The trained model as a file that PyTorch users expect: names of the module, no code in it."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import Tensor

from geo_ray.errors import RunDirectoryError
from geo_ray.tasks.base import Task
from geo_ray.tasks.guard import checked_model
from geo_ray.training.compute.flat import FlatModel


def save_trained(task: Task, seed: int, params_P: Tensor, path: Path) -> None:
    """Write the parameters as a state dictionary of the task's module.

    Load it with ``safetensors.torch.load_model(module, path)``.

    Args:
        task: gives the module.
        seed: of the run.
        params_P: fp32 (P,).
        path: the file.

    Raises:
        RunDirectoryError: if it cannot be written.
    """
    module = checked_model(task, seed)
    FlatModel(module, params_P.clone(), params_P.clone())
    for param in module.parameters():
        param.data = param.data.clone()  # views of one buffer would count as shared tensors
    try:
        save_model(module, str(path))
    except (OSError, SafetensorError) as error:
        raise RunDirectoryError(f"cannot write {path}: {error}") from error
