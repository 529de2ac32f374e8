"""The trained model as a PyTorch state dictionary: names of the module, without code."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import file_digest
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from geo_ray.base.errors import RunDirectoryError, TaskOutputError
from geo_ray.base.files import TEMPORARY_SUFFIX, sync_directory, unwritable
from geo_ray.data.tasks.base import Task
from geo_ray.data.tasks.checked_calls import checked_model
from geo_ray.experiment.experiment import Experiment
from geo_ray.training.parameters import BufferLayout, write_parameters

_DIGEST = "data_sha256"
"""Key of a file's metadata: the SHA-256 of all its tensors' bytes."""


def about_model(
    experiment: Experiment, step: int, metrics: Mapping[str, float | None]
) -> dict[str, str]:
    """Return the metadata of a model file: task, options, step, metrics.

    Args:
        experiment: the run that trained the model.
        step: step of the model.
        metrics: metrics of the newest evaluation of all regions.
    """
    return {
        "format": "pt",
        "task": experiment.task.use,
        "options": json.dumps(experiment.task.options, sort_keys=True),
        "seed": str(experiment.seed),
        "step": str(step),
        "metrics": json.dumps(dict(metrics), sort_keys=True),
    }


def save_trained(
    task: Task,
    seed: int,
    params_P: Tensor,
    path: Path,
    about: Mapping[str, str] | None = None,
    buffers_B: Tensor | None = None,
) -> None:
    """Write the parameters as a state dictionary of the task's module.

    Load it with ``safetensors.torch.load_model(module, path)``.

    Args:
        task: builds the module.
        seed: seed of the run.
        params_P: fp32 (P,).
        path: output file.
        about: metadata from `about_model`.
        buffers_B: model buffers, uint8 (B,); None: initial values.

    Raises:
        RunDirectoryError: the file cannot be written.
    """
    save_module(module_with(task, seed, [params_P], buffers_B), path, about or {})


def keep_longer(path: Path, step: int) -> Path | None:
    """Rename an existing model that was trained for more steps than the new one.

    A run that resumes from an older checkpoint may end after fewer steps than before.

    Args:
        path: destination of the new model.
        step: step of the new model.

    Returns:
        The new path of the older file; None if no model with more steps existed.

    Raises:
        RunDirectoryError: the file cannot be renamed.
    """
    try:
        with safe_open(path, framework="pt") as file:
            there = int((file.metadata() or {})["step"])
    except (OSError, SafetensorError, KeyError, ValueError):
        return None  # missing, or without the number of steps
    if there <= step:
        return None
    aside = path.with_name(f"{path.stem}-{there}{path.suffix}")
    try:
        path.replace(aside)
        sync_directory(path.parent)
    except OSError as error:
        raise unwritable(path, error) from error
    return aside


def module_with(
    task: Task, seed: int, slices: Sequence[Tensor], buffers_B: Tensor | None = None
) -> nn.Module:
    """Return the task's module with these parameters.

    Args:
        task: builds the module.
        seed: seed of the run.
        slices: fp32, together (P,), in the order of the flat vector.
        buffers_B: model buffers, uint8 (B,); None: initial values.

    Raises:
        TaskOutputError: the module has another number of parameters.
    """
    module = checked_model(task, seed)
    write_parameters(module, torch.cat(list(slices)) if len(slices) > 1 else slices[0])
    if buffers_B is not None:
        BufferLayout.of(task, module).write(buffers_B, module)
    return module


def load_trained(task: Task, seed: int, path: Path) -> nn.Module:
    """Return the task's module with the parameters of a file of `save_trained`.

    Raises:
        RunDirectoryError: the file is missing, unreadable or damaged.
        TaskOutputError: the task's module has other parameters.
    """
    if not path.exists():
        raise RunDirectoryError(
            f"{path} does not exist: the run has no final model",
            fix="Finish the run, or use one of its checkpoints.",
        )
    module = checked_model(task, seed)
    try:
        _check_digest(path)
        load_model(module, path)
    except (OSError, SafetensorError) as error:
        raise RunDirectoryError(f"cannot read {path}: {error}") from error
    except RuntimeError as error:
        raise TaskOutputError(
            f"{path} is not a model of this task: {error}",
            fix="Use the task and options in the file's metadata.",
        ) from error
    return module


def save_module(module: nn.Module, path: Path, about: Mapping[str, str]) -> None:
    """Write a module's state dictionary as a safetensors file with a digest.

    Args:
        module: module with its parameters; tied ones are stored once, and the metadata has their
            other names.
        path: output file.
        about: metadata.

    Raises:
        RunDirectoryError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    try:
        save_model(module, str(temporary), {**about, _DIGEST: "0" * 64})
        _complete_metadata(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise unwritable(path, error) from error
    except SafetensorError as error:  # which does not distinguish system errors
        failure = OSError(str(error)) if path.parent.exists() else FileNotFoundError(str(error))
        raise unwritable(path, failure) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _complete_metadata(path: Path) -> None:
    """Insert the digest, and sort the metadata, whose order the library does not fix."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"][_DIGEST] = file_digest(file, "sha256").hexdigest()
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) > size:
            raise OSError(f"the header of {path} takes {len(text)} bytes and has {size}")
        file.seek(8)
        file.write(text.ljust(size))


def _check_digest(path: Path) -> None:
    with safe_open(path, framework="pt") as opened:  # checks the header
        wanted = (opened.metadata() or {}).get(_DIGEST)
    with path.open("rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        found = file_digest(file, "sha256").hexdigest()
    if found != wanted:
        raise RunDirectoryError(
            f"{path} is damaged: its tensors differ from those that were written",
            fix="Restore the file, or use the model of a checkpoint: `geo-ray export RUN --from "
            "ID`; `geo-ray checkpoints RUN` lists them.",
        )
