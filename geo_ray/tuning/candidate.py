"""From values by key to the configuration of a trial, on top of what a search starts from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_ray.codecs.registry import CODECS, sections_of
from geo_ray.config.canonical import JSONValue
from geo_ray.config.experiment import Experiment
from geo_ray.config.load import load_tree, read_text
from geo_ray.config.overrides import apply_overrides
from geo_ray.config.source import ConfigText, text_of
from geo_ray.config.yaml_text import YamlTree, parse_yaml
from geo_ray.errors import ConfigError
from geo_ray.strategies.registry import default_section
from geo_ray.tuning.config import TuningConfig

_KINDS = ("kind", "use")
_CODEC = "codec"


@dataclass(frozen=True, slots=True)
class Base:
    """What trials start from.

    Attributes:
        text: its configuration, as YAML.
        parent: where relative paths in it start.
        name: what messages call it.
        changes: in all trials, as for ``--set``.
    """

    text: str
    parent: str
    name: str
    changes: tuple[str, ...] = ()

    @property
    def source(self) -> ConfigText:
        """It, as a configuration is read."""
        return ConfigText(self.text, Path(self.parent), self.name)

    def tree(self) -> dict[str, JSONValue]:
        """What is written there, without defaults.

        Raises:
            ConfigError: it is broken.
        """
        tree = apply_overrides(parse_yaml(self.text, self.name), self.changes)
        return tree.value if isinstance(tree.value, dict) else {}

    def experiment(
        self, values: Mapping[str, JSONValue] | None = None, more: Sequence[str] = ()
    ) -> Experiment:
        """The configuration with other values.

        Args:
            values: by key.
            more: changes after them, as for ``--set``.

        Raises:
            ConfigError: it cannot be; names every key that is wrong.
        """
        changes = (*self.changes, *self.overrides(values or {}), *more)
        return load_tree(self.source, changes, Experiment)

    def overrides(self, values: Mapping[str, JSONValue]) -> tuple[str, ...]:
        """Values by key as changes of single keys, sections before what is in them.

        A section that becomes of another kind loses what was written for the kind before.

        Raises:
            ConfigError: a strategy of the user's cannot be used.
        """
        tree, changes = self.tree(), list[str]()
        for key in sorted(values, key=lambda name: (not _is_kind(name), name.count("."), name)):
            made = list(self._of(tree, key, values[key]))
            changes += made
            tree = _changed(tree, made)
        return tuple(changes)

    def key(self, written: str) -> str:
        """A key as overrides take it: regions by their place, where a search has their name."""
        section, _, rest = written.partition(".")
        regions = self.tree().get("regions")
        if section != "regions" or not isinstance(regions, list):
            return written
        for index, region in enumerate(regions):
            name = region.get("name") if isinstance(region, dict) else None
            if isinstance(name, str) and rest.startswith(f"{name}."):
                return f"regions.{index}.{rest.removeprefix(name + '.')}"
        return written

    def _of(self, tree: dict[str, JSONValue], written: str, value: JSONValue) -> Sequence[str]:
        key = self.key(written)
        if written.startswith("regions.*."):
            regions = tree.get("regions")
            count = len(regions) if isinstance(regions, list) else 0
            rest = written.removeprefix("regions.*.")
            return [f"regions.{index}.{rest}={_text(value)}" for index in range(count)]
        head, _, last = key.rpartition(".")
        if key == _CODEC and (value is None or (isinstance(value, str) and value in CODECS)):
            return [f"codec={_text(_sections(value))}"]
        if head == _CODEC and last in ("up", "down") and isinstance(value, str):
            return [f"{key}={_text({'kind': value})}"]
        if last in _KINDS and head:
            before = _at(tree, head)
            if not isinstance(before, dict) or before.get(last) != value:
                return [f"{head}={_text({last: value})}"]
        return [*self._inner_kind(tree, key), f"{key}={_text(value)}"]

    def _inner_kind(self, tree: dict[str, JSONValue], key: str) -> Sequence[str]:
        """A section of the strategy of which a single key is set is still of its default kind."""
        parts = key.split(".")
        strategy = tree.get("strategy")
        if parts[0] != "strategy" or len(parts) < 3 or not isinstance(strategy, dict):
            return []
        if isinstance(strategy.get(parts[1]), dict):
            return []
        plain = {name: strategy[name] for name in _KINDS if name in strategy}
        inner: Any = _default(plain, self.parent).get(parts[1])
        if not isinstance(inner, dict) or "kind" not in inner:
            return []
        return [f"strategy.{parts[1]}={_text({'kind': inner['kind']})}"]


def _default(section: dict[str, JSONValue], parent: str) -> dict[str, Any]:
    try:
        return default_section(section, Path(parent))
    except (ConfigError, ValueError):  # whoever reads the whole says what is wrong
        return {}


def _sections(codec: str | None) -> dict[str, Any]:
    return dict(sections_of(codec))


def _is_kind(key: str) -> bool:
    return key.rpartition(".")[2] in _KINDS or "." not in key


def _changed(tree: dict[str, JSONValue], changes: Sequence[str]) -> dict[str, JSONValue]:
    changed = apply_overrides(YamlTree(tree), changes).value
    return changed if isinstance(changed, dict) else tree


def _at(tree: JSONValue, key: str) -> JSONValue:
    for part in key.split("."):
        if isinstance(tree, dict):
            tree = tree.get(part)
        elif isinstance(tree, list) and part.isdecimal() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            return None
    return tree


def value_at(tree: JSONValue, key: str) -> JSONValue:
    """What a tree has at a key; None if nothing is there."""
    return _at(tree, key)


def _text(value: JSONValue) -> str:
    return json.dumps(value)


def base_of(
    config: str | os.PathLike[str] | Mapping[str, Any] | Experiment,
    changes: Sequence[str],
    base_dir: str | os.PathLike[str] | None = None,
) -> Base:
    """What trials start from, as plain text that can travel.

    Raises:
        ConfigError: it cannot be read.
    """
    if isinstance(config, (str, os.PathLike)):
        path = Path(config)
        parent = path.parent if base_dir is None else Path(base_dir)
        return Base(read_text(path), str(parent.absolute()), str(path), tuple(changes))
    text: ConfigText = text_of(config, Path(base_dir or Path.cwd()).absolute())
    return Base(text.text, str(text.parent), text.name, tuple(changes))


def base_of_search(search: TuningConfig, parent: Path) -> Base:
    """Return what the trials of a search start from.

    Args:
        search: its file.
        parent: where a relative path to the base, or relative paths in it, start.

    Raises:
        ConfigError: it cannot be read.
    """
    if isinstance(search.base, str):
        return base_of(parent / search.base, search.set)
    return base_of(search.base, search.set, parent)
