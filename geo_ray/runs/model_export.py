"""Export of a trained model to the formats of PyTorch, Hugging Face and PEFT.

File formats contain the state dictionary of the task's module, buffers included; tied parameters
are stored once. Directory formats appear complete or not at all, and contain `ABOUT_FILE`.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal, Protocol, cast, get_args

import torch
from safetensors import SafetensorError
from torch import nn

from geo_ray.base.errors import ConfigError, TaskOutputError
from geo_ray.base.files import TEMPORARY_SUFFIX, sync_directory, unwritable, write_atomic
from geo_ray.data.tasks.base import Task
from geo_ray.data.tasks.checked_calls import SkipSampling
from geo_ray.runs.model_file import save_module
from geo_ray.training.parameters import BufferLayout

ExportFormat = Literal["safetensors", "pt", "hf", "adapter", "dcp"]
"""Format of an exported model; see `export_model`."""

ABOUT_FILE: Final = "geo_ray.json"
"""File of an exported directory: task, options, seed, step and metrics of the model."""

_SUFFIXES: Final[Mapping[str, ExportFormat]] = {
    ".safetensors": "safetensors",
    ".pt": "pt",
    ".pth": "pt",
}


class _Pretrained(Protocol):
    """The part of transformers' `PreTrainedModel` and tokenizers that an export uses."""

    config: Any

    def save_pretrained(self, save_directory: str) -> object:
        """Write the files that `from_pretrained` reads."""


def format_of(path: Path, wanted: ExportFormat | None) -> ExportFormat:
    """Return the format of an export, and check that it fits the output path.

    Args:
        path: output file or directory.
        wanted: format; None: that of the path's suffix.

    Raises:
        ConfigError: the format is unknown, or the path is not one of its outputs.
    """
    by_suffix = _SUFFIXES.get(path.suffix)
    if wanted is None and by_suffix is None:
        raise ConfigError(
            f"{path}: not the name of a model file",
            fix="Use the suffix .safetensors or .pt, or give a format: "
            f"{', '.join(get_args(ExportFormat))}.",
        )
    if wanted is not None and wanted not in get_args(ExportFormat):
        raise ConfigError(
            f"no export format {wanted!r}", fix=f"Use one of {', '.join(get_args(ExportFormat))}."
        )
    found = wanted or cast(ExportFormat, by_suffix)
    is_file = found in ("safetensors", "pt")
    if is_file and by_suffix != found:
        raise ConfigError(
            f"{path}: not the name of a file of format {found}", fix=f"Use the suffix .{found}."
        )
    if not is_file and by_suffix is not None:
        raise ConfigError(
            f"{path}: format {found} writes a directory", fix=f"Use {path.with_suffix('')}."
        )
    if is_file and path.is_dir():
        raise ConfigError(f"{path} is a directory, not a file", fix="Choose another file.")
    if not is_file and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(
            f"{path} exists: an export does not overwrite a directory",
            fix="Choose another directory, or remove it.",
        )
    return found


def export_model(
    task: Task,
    module: nn.Module,
    path: Path,
    about: Mapping[str, str],
    wanted: ExportFormat | None = None,
) -> None:
    """Write a trained model.

    Args:
        task: task of the model.
        module: module with its parameters, on the CPU.
        path: output file or directory.
        about: metadata from `about_model`; not in ``pt``.
        wanted: None: by the path's suffix. ``safetensors``: a file whose metadata has the second
            names of tied parameters. ``pt``: a file for ``torch.load(path, weights_only=True)``.
            ``hf``: a directory for ``from_pretrained`` of the model's class, with the task's
            ``tokenizer``, if it has one. ``adapter``: a directory for
            ``PeftModel.from_pretrained``. ``dcp``: a directory for
            ``torch.distributed.checkpoint.load``, with both names of tied parameters.

    Raises:
        ConfigError: the format is unknown or does not fit the path.
        TaskOutputError: the model cannot be written in this format without changing its results.
        RunDirectoryError: the file or directory cannot be written.
    """
    form = format_of(path, wanted)
    if form == "safetensors":
        save_module(module, path, about)
    elif form == "pt":
        buffer = io.BytesIO()
        torch.save({name: t.detach().clone() for name, t in module.state_dict().items()}, buffer)
        try:
            write_atomic(path, buffer.getvalue())
        except OSError as error:
            raise unwritable(path, error) from error
    else:
        inner = _uncompiled(module)
        with _new_directory(path) as folder:
            if form == "hf":
                _save_pretrained(task, inner, folder)
            elif form == "adapter":
                _save_adapter(task, inner, folder)
            else:
                _save_distributed(inner, folder)
            text = json.dumps(dict(about), indent=2, sort_keys=True)
            (folder / ABOUT_FILE).write_text(text + "\n", encoding="utf-8")


def is_instance_of(module: object, package: str, name: str) -> bool:
    """Tell whether an object's class derives from a class of a package, without importing it."""
    return any(
        each.__name__ == name and each.__module__.split(".")[0] == package
        for each in type(module).__mro__
    )


def _save_pretrained(task: Task, module: nn.Module, folder: Path) -> None:
    name = type(task).__name__
    if is_instance_of(module, "peft", "PeftModel"):
        raise TaskOutputError(
            f"the model of {name} has adapters, which the format hf does not contain",
            fix="Use the format adapter; or merge the adapters in Python: "
            "run.model().merge_and_unload().save_pretrained(DIR).",
        )
    if not is_instance_of(module, "transformers", "PreTrainedModel"):
        raise TaskOutputError(
            f"the model of {name} is a {type(module).__name__}, not a PreTrainedModel of "
            "transformers",
            fix="Use the format safetensors.",
        )
    model = cast(_Pretrained, module)
    _check_described(name, module, model)
    with _calling(f"{type(module).__name__}.save_pretrained"):
        model.save_pretrained(str(folder))
    tokenizer = getattr(task, "tokenizer", None)
    if tokenizer is not None:
        if not hasattr(tokenizer, "save_pretrained"):
            raise TaskOutputError(
                f"{name}.tokenizer is a {type(tokenizer).__name__} without save_pretrained",
                fix="Wrap it: transformers.PreTrainedTokenizerFast(tokenizer_object=...).",
            )
        with _calling(f"{type(tokenizer).__name__}.save_pretrained"):
            tokenizer.save_pretrained(str(folder))


def _check_described(name: str, module: nn.Module, model: _Pretrained) -> None:
    """Refuse a model that `from_pretrained` would build differently from its configuration."""
    fix = f"Let {name}.model build it from its configuration alone, or use the format safetensors."
    try:
        with torch.device("meta"), SkipSampling():
            described = type(module)(model.config)
    except Exception as error:  # foreign code
        raise TaskOutputError(
            f"{type(module).__name__} cannot be built from the model's configuration: {error}",
            fix=fix,
        ) from error
    wanted, found = _shapes(described), _shapes(module)
    other = sorted(key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key))
    if other:
        raise TaskOutputError(
            f"the configuration of {name}'s model describes another model: {_some(other)}", fix=fix
        )
    tied, expected = _tied(module), _tied(described)
    if tied != expected:
        (names, *_) = sorted(map(sorted, tied ^ expected))
        raise TaskOutputError(
            f"the configuration of {name}'s model ties other parameters: {_some(names)}", fix=fix
        )


def _save_adapter(task: Task, module: nn.Module, folder: Path) -> None:
    name = type(task).__name__
    if not is_instance_of(module, "peft", "PeftModel"):
        raise TaskOutputError(
            f"the model of {name} is a {type(module).__name__}, not a PeftModel of peft",
            fix="Use the format hf or safetensors.",
        )
    from peft import get_peft_model_state_dict

    (active,) = adapters if len(adapters := list(cast(Any, module).peft_config)) == 1 else ("",)
    if not active:
        raise TaskOutputError(
            f"the model of {name} has the adapters {_some(adapters)}; the format adapter contains "
            "one",
            fix="Export them in Python: run.model().save_pretrained(DIR).",
        )
    with _calling("get_peft_model_state_dict"):
        stored = get_peft_model_state_dict(module, adapter_name=active, save_embedding_layers=False)
    storages = {tensor.data_ptr() for tensor in stored.values()}
    trained = [key for key, p in module.named_parameters() if p.requires_grad]
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    changing = [*trained, *sorted(BufferLayout.of(task, module).names())]
    outside = [key for key in changing if state[key].data_ptr() not in storages]
    if outside:
        raise TaskOutputError(
            f"{name} also trains values outside of the adapter: {_some(outside)}",
            fix="Name their modules in modules_to_save of the adapter's configuration, or use the "
            "format safetensors.",
        )
    with _calling(f"{type(module).__name__}.save_pretrained"):
        cast(Any, module).save_pretrained(str(folder), save_embedding_layers=False)
    if active != "default":  # which has a folder of its own
        for file in (folder / active).iterdir():
            file.replace(folder / file.name)
        (folder / active).rmdir()


def _save_distributed(module: nn.Module, folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save  # takes long to import

    state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    with _calling("torch.distributed.checkpoint.save"):
        save(state, checkpoint_id=str(folder), no_dist=True)


def _uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` has wrapped, whose names have no prefix."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, nn.Module) else module


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def _tied(module: nn.Module) -> set[frozenset[str]]:
    """Return the names of every parameter that has several."""
    names: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return {frozenset(each) for each in names.values() if len(each) > 1}


def _some(names: Iterable[str]) -> str:
    first, *rest = names
    return f"{first} and {len(rest)} more" if len(rest) > 1 else ", ".join((first, *rest))


@contextmanager
def _calling(what: str) -> Iterator[None]:
    """Convert exceptions of a library; hide its warnings about what an export intends.

    Args:
        what: called object and method.

    Raises:
        OSError: a file cannot be written.
        TaskOutputError: the block raised another exception.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except OSError:
        raise
    except SafetensorError as error:  # which does not distinguish system errors
        raise OSError(str(error)) from error
    except Exception as error:  # foreign code
        raise TaskOutputError(
            f"{what} raised {type(error).__name__}: {error}", fix="Use the format safetensors."
        ) from error


@contextmanager
def _new_directory(path: Path) -> Iterator[Path]:
    """Give a temporary directory that becomes ``path`` at the end of the block.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    try:
        temporary.mkdir()
        yield temporary
        for file in [each for each in temporary.rglob("*") if each.is_file()]:
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        temporary.replace(path)  # an empty directory is replaced
        sync_directory(path.parent)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        with suppress(OSError):
            shutil.rmtree(temporary, ignore_errors=True)
