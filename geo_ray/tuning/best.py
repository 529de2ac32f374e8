"""The best trial as a configuration that runs by itself, from wherever it lies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from geo_ray.config.canonical import JSONValue
from geo_ray.config.overrides import apply_overrides
from geo_ray.config.yaml_text import YamlTree, write_yaml
from geo_ray.tuning.candidate import Base
from geo_ray.util.atomic_file import save_text

_OWN_CLASS: Final = re.compile(r"(.+\.py)(:\w+)")
_NO_PATHS: Final = ("name", "run", "seed")


def write_best(base: Base, values: Mapping[str, JSONValue], note: str, path: Path) -> Path:
    """Write the base with a trial's values, as YAML that `geo-ray train` takes.

    Files that it names relative to the base's directory are named from the root on.

    Args:
        base: what the search started from.
        values: of the trial, by key.
        note: a line about it; a comment in the file.
        path: where to.

    Raises:
        RunDirectoryError: it cannot be written.
        ConfigError: the values do not make a configuration.
    """
    base.experiment(values)  # what is wrong with it is told before anything is written
    tree = apply_overrides(YamlTree(dict(base.tree())), base.overrides(values)).value
    assert isinstance(tree, dict)  # noqa: S101 - as the base's
    placed = {
        key: value if key in _NO_PATHS else _placed(value, Path(base.parent))
        for key, value in tree.items()
    }
    comment = "".join(f"# {line}\n" for line in note.splitlines())
    save_text(path, comment + write_yaml(placed))
    return path


def _placed(value: JSONValue, parent: Path) -> JSONValue:
    """The same with paths that start at the root."""
    if isinstance(value, dict):
        return {key: _placed(each, parent) for key, each in value.items()}
    if isinstance(value, list):
        return [_placed(each, parent) for each in value]
    if not isinstance(value, str):
        return value
    own = _OWN_CLASS.fullmatch(value)
    file, rest = (own[1], own[2]) if own else (value, "")
    is_path = "/" in file or "." in file
    if is_path and not Path(file).is_absolute() and (parent / file).exists():
        return str((parent / file).absolute()) + rest
    return value
