"""Inputs of the library functions, and `init_project`.

Configurations, overrides, task names, and starter projects.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from geo_ray.base.errors import ConfigError, RunDirectoryError
from geo_ray.base.files import save_text
from geo_ray.base.load import json_schema, load_tree, override_items, text_of
from geo_ray.base.yaml import ConfigSource, ConfigText, read_text

if TYPE_CHECKING:
    from geo_ray.data.tasks.load import TaskConfig
    from geo_ray.experiment.experiment import Experiment


FilePath: TypeAlias = str | os.PathLike[str]
Config: TypeAlias = "FilePath | Mapping[str, Any] | Experiment"
"""A YAML file, a mapping of its keys, or a result of `load_config`."""

Overrides: TypeAlias = Mapping[str, Any] | Sequence[str]
"""Values by dotted key, or a list of ``key.key=value`` as for ``--set``."""

NamedTask: TypeAlias = "str | Mapping[str, Any] | TaskConfig"
"""Value of ``use`` in the section ``task`` of a configuration, or the keys of that section."""


def load_config(
    config: Config, overrides: Overrides = (), *, base_dir: FilePath | None = None
) -> Experiment:
    """Read and check a configuration; complete it if its strategy is ``auto``.

    Args:
        config: a file, a mapping, or an experiment.
        overrides: changed values by dotted key.
        base_dir: base of relative paths; default: the directory of a file, else the working
            directory.

    Raises:
        ConfigError: names every invalid key.
    """
    from geo_ray.api.auto import load_experiment

    with preserving_threads():
        return load_experiment(source_of(config, base_dir), override_items(overrides))[0]


def config_schema() -> dict[str, Any]:
    """Return the JSON Schema of a configuration, for editors and documentation."""
    from geo_ray.experiment.experiment import Experiment

    return json_schema(Experiment)


def source_of(config: Config, base_dir: FilePath | None = None) -> ConfigSource:
    """Return the reader of a configuration from any source; see `load_config`."""
    if not isinstance(config, (str, os.PathLike)):
        return text_of(config, Path(base_dir or Path.cwd()).absolute())
    path = Path(config)
    if base_dir is None:
        return path
    return replace(ConfigText(read_text(path), Path(base_dir).absolute()), name=str(path))


def task_config(task: NamedTask) -> TaskConfig:
    """Return the section ``task`` of a configuration.

    Raises:
        ConfigError: a key or value is invalid.
    """
    from geo_ray.data.tasks.load import TaskConfig

    tree = {"use": task} if isinstance(task, str) else task
    return load_tree(text_of(tree, Path.cwd()), (), TaskConfig)


@contextmanager
def preserving_threads() -> Iterator[None]:
    """Restore the number of PyTorch threads of the process afterwards; runs compute on one."""
    import torch

    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


STARTERS = ("quickstart", "csv", "language_model", "own")
_SHARED = {
    "quickstart": ("quickstart.yaml", "planned.yaml", "auto.yaml", "cluster.yaml"),
}
"""Configurations of geo_ray that are copied into a starter's ``configs``."""

_CODE = ".in"  # Python files have another name, because they are not part of the library


def init_project(
    directory: FilePath = ".", starter: str = "quickstart", *, force: bool = False
) -> tuple[Path, ...]:
    """Write a project that runs without changes: configuration, task and README.

    Args:
        directory: directory of the project; created if missing.
        starter: one of `STARTERS`: quickstart, csv, language_model or own.
        force: replace existing files.

    Returns:
        The written files.

    Raises:
        ConfigError: the starter does not exist, or a file exists already.
        RunDirectoryError: a file cannot be written.
    """
    if starter not in STARTERS:
        raise ConfigError(f"no starter {starter!r}", fix=f"Choose among {', '.join(STARTERS)}.")
    root = resources.files("geo_ray") / "cli" / "starters"
    files = _files_below(root / starter)
    for name in _SHARED.get(starter, ()):
        files[f"configs/{name}"] = root / "configs" / name
    texts = {Path(directory) / name: source for name, source in sorted(files.items())}
    taken = [path for path in texts if path.exists()]
    if taken and not force:
        raise ConfigError(
            f"{taken[0]} exists already", fix="Choose another directory, or add --force."
        )
    for path, source in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(f"cannot create {path.parent}: {error.strerror}") from error
        save_text(path, source.read_text(encoding="utf-8"))
    return tuple(texts)


def _files_below(folder: Traversable, prefix: str = "") -> dict[str, Traversable]:
    found: dict[str, Traversable] = {}
    for item in folder.iterdir():
        if item.is_dir():
            found |= _files_below(item, f"{prefix}{item.name}/")
        else:
            found[prefix + item.name.removesuffix(_CODE)] = item
    return found
