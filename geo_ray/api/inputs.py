"""What the functions of the library take: configurations, overrides, names of tasks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from geo_ray.config.load import json_schema, load_tree, read_text
from geo_ray.config.source import ConfigSource, ConfigText, override_items, text_of

if TYPE_CHECKING:  # they import PyTorch, which takes seconds
    from geo_ray.config.experiment import Experiment
    from geo_ray.tasks.load import TaskConfig

FilePath: TypeAlias = str | os.PathLike[str]
Config: TypeAlias = "FilePath | Mapping[str, Any] | Experiment"
"""A YAML file, a mapping of its keys, or what `load_config` gave."""

Overrides: TypeAlias = Mapping[str, Any] | Sequence[str]
"""Values by dotted key, or a list of ``key.key=value`` as ``--set`` takes them."""

NamedTask: TypeAlias = "str | Mapping[str, Any] | TaskConfig"
"""What ``use`` says in a configuration's section ``task``, or the keys of that section."""


def load_config(
    config: Config, overrides: Overrides = (), *, base_dir: FilePath | None = None
) -> Experiment:
    """Read and check a configuration; complete it if its strategy is ``auto``.

    Args:
        config: a file, a mapping, or an experiment.
        overrides: changes of single keys.
        base_dir: where relative paths in it start; default: the directory of a file, else the
            working directory.

    Raises:
        ConfigError: naming every key that is wrong.
    """
    from geo_ray.api.auto import load_experiment

    with own_threads_kept():
        return load_experiment(source_of(config, base_dir), override_items(overrides))[0]


def config_schema() -> dict[str, Any]:
    """The JSON Schema of a configuration, for editors and for reading."""
    from geo_ray.config.experiment import Experiment

    return json_schema(Experiment)


def source_of(config: Config, base_dir: FilePath | None = None) -> ConfigSource:
    """What reads a configuration, wherever it comes from; see `load_config`."""
    if not isinstance(config, (str, os.PathLike)):
        return text_of(config, Path(base_dir or Path.cwd()).absolute())
    path = Path(config)
    if base_dir is None:
        return path
    return replace(ConfigText(read_text(path), Path(base_dir).absolute()), name=str(path))


def task_config(task: NamedTask) -> TaskConfig:
    """The section ``task`` of a configuration.

    Raises:
        ConfigError: it has wrong keys or values.
    """
    from geo_ray.tasks.load import TaskConfig

    tree = {"use": task} if isinstance(task, str) else task
    return load_tree(text_of(tree, Path.cwd()), (), TaskConfig)


@contextmanager
def own_threads_kept() -> Iterator[None]:
    """Give the caller's process its number of PyTorch threads back; runs compute on one."""
    import torch

    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
