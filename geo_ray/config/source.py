"""Where a configuration comes from: a file, or a tree of values that Python code has made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import BaseModel

from geo_ray.config.yaml_text import write_yaml
from geo_ray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ConfigText:
    """A configuration that lies in no file; read like one.

    Attributes:
        text: YAML.
        parent: where relative paths in it start.
        name: what messages call it.
    """

    text: str
    parent: Path
    name: str = "the configuration given"

    def __str__(self) -> str:
        return self.name


ConfigSource: TypeAlias = Path | ConfigText


def text_of(tree: Mapping[str, Any] | BaseModel, base_dir: Path) -> ConfigText:
    """Make a configuration of a tree of values.

    Args:
        tree: plain values that JSON has, or a configuration that was read before.
        base_dir: where relative paths in it start.

    Raises:
        ConfigError: it holds something that is no plain value.
    """
    if isinstance(tree, BaseModel):
        return ConfigText(write_yaml(tree.model_dump(mode="json")), base_dir)
    try:
        plain = json.loads(json.dumps(dict(tree), allow_nan=False, default=_plain))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the configuration given: {error}",
            fix="Use plain values: mappings, lists, text, finite numbers, booleans and None.",
        ) from None
    return ConfigText(write_yaml(plain), base_dir)


def override_items(overrides: Mapping[str, Any] | Sequence[str]) -> tuple[str, ...]:
    """Changes of single keys as ``key.key=value``, which is how ``--set`` takes them.

    Args:
        overrides: values by dotted key, or a list of ``key.key=value``.

    Raises:
        ConfigError: a value is no plain value, or the overrides are a single text.
    """
    if isinstance(overrides, str):
        raise ConfigError(
            f"overrides: {overrides!r} is one text", fix="Give a list of texts, or a mapping."
        )
    if not isinstance(overrides, Mapping):
        return tuple(overrides)
    items = []
    for key, value in overrides.items():
        try:
            items.append(f"{key}={json.dumps(value, allow_nan=False, default=_plain)}")
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"overrides: {key}: {error}",
                fix="Use plain values: mappings, lists, text, finite numbers, booleans and None.",
            ) from None
    return tuple(items)


def _plain(value: object) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r} ({type(value).__name__}) is no plain value")
