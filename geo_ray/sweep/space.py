"""The search space, and the configuration of a trial from its sampled values.

Also checks the directory of a search.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_ray.base.canonical import JSONValue
from geo_ray.base.errors import ConfigError, TuningDirectoryError
from geo_ray.base.load import load_tree, text_of
from geo_ray.base.overrides import apply_overrides
from geo_ray.base.yaml import ConfigText, YamlTree, parse_yaml, read_text
from geo_ray.codecs.registry import CODECS, sections_of
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs import directory
from geo_ray.strategies.config import default_section
from geo_ray.sweep.search_config import Domain, TuningConfig, is_met

_KINDS = ("kind", "use")
_CODEC = "codec"


@dataclass(frozen=True, slots=True)
class Base:
    """The base of a search's trials.

    Attributes:
        text: its configuration as YAML.
        parent: base of its relative paths.
        name: its name in messages.
        changes: changes in all trials, as for ``--set``.
    """

    text: str
    parent: str
    name: str
    changes: tuple[str, ...] = ()

    @property
    def source(self) -> ConfigText:
        """Return the source of the configuration."""
        return ConfigText(self.text, Path(self.parent), self.name)

    def tree(self) -> dict[str, JSONValue]:
        """Return its tree, without defaults.

        Raises:
            ConfigError: the YAML is invalid.
        """
        tree = apply_overrides(parse_yaml(self.text, self.name), self.changes)
        return tree.value if isinstance(tree.value, dict) else {}

    def experiment(
        self, values: Mapping[str, JSONValue] | None = None, more: Sequence[str] = ()
    ) -> Experiment:
        """Return the configuration with other values.

        Args:
            values: values by key.
            more: further changes, as for ``--set``.

        Raises:
            ConfigError: the configuration is invalid; names every wrong key.
        """
        changes = (*self.changes, *self.overrides(values or {}), *more)
        return load_tree(self.source, changes, Experiment)

    def overrides(self, values: Mapping[str, JSONValue]) -> tuple[str, ...]:
        """Convert values by key to changes of single keys, sections before their keys.

        A section whose kind changes loses the keys of the previous kind.

        Raises:
            ConfigError: a custom strategy cannot be used.
        """
        tree, changes = self.tree(), list[str]()
        for key in sorted(values, key=_turn):
            made = list(self._of(tree, key, values[key]))
            changes += made
            tree = _changed(tree, made)
        return tuple(changes)

    def key(self, written: str) -> str:
        """Convert a key for overrides: regions by index, where a search uses their name."""
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
        """Add the default kind to a section of the strategy of which a single key is set."""
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
    except (ConfigError, ValueError):  # the complete validation reports the error
        return {}


def _sections(codec: str | None) -> dict[str, Any]:
    return dict(sections_of(codec))


def _turn(key: str) -> tuple[bool, int, str]:
    """Sort keys: kinds first, then by depth."""
    return not _is_kind(key), key.count("."), key


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
    """Return the value of a tree at a key, or None."""
    return _at(tree, key)


def _text(value: JSONValue) -> str:
    return json.dumps(value)


def base_of(
    config: str | os.PathLike[str] | Mapping[str, Any] | Experiment,
    changes: Sequence[str],
    base_dir: str | os.PathLike[str] | None = None,
) -> Base:
    """Return the base of trials as plain text, which can be sent to other processes.

    Raises:
        ConfigError: the file cannot be read.
    """
    if isinstance(config, (str, os.PathLike)):
        path = Path(config)
        parent = path.parent if base_dir is None else Path(base_dir)
        return Base(read_text(path), str(parent.absolute()), str(path), tuple(changes))
    text: ConfigText = text_of(config, Path(base_dir or Path.cwd()).absolute())
    return Base(text.text, str(text.parent), text.name, tuple(changes))


def base_of_search(search: TuningConfig, parent: Path) -> Base:
    """Return the base of a search's trials.

    Args:
        search: the search.
        parent: base of a relative path to the base configuration, or of relative paths in it.

    Raises:
        ConfigError: the file cannot be read.
    """
    if isinstance(search.base, str):
        return base_of(parent / search.base, search.set)
    return base_of(search.base, search.set, parent)


Values = dict[str, JSONValue]
"""Values by key of the configuration."""


@dataclass(frozen=True, slots=True)
class SpaceEntry:
    """A sampled parameter.

    Attributes:
        name: name in Ray Tune: its key, numbered if the key has several domains.
        key: key of the configuration, as in the file.
        domain: domain of its values.
    """

    name: str
    key: str
    domain: Domain


@dataclass(frozen=True, slots=True)
class Space:
    """A search space and its base.

    Attributes:
        base: the base of trials.
        entries: sampled parameters, in the order of the file.
    """

    base: Base
    entries: tuple[SpaceEntry, ...]

    @classmethod
    def of(cls, config: TuningConfig, base: Base) -> Space:
        """Return the space of a file."""
        entries = []
        for key, domains in config.space.items():
            for number, domain in enumerate(domains, 1):
                name = key if len(domains) == 1 else f"{key} ({number})"
                entries.append(SpaceEntry(name, key, domain))
        return cls(base, tuple(entries))

    def values(self, drawn: Mapping[str, JSONValue]) -> Values:
        """Return the values by key of a sample, for entries whose condition holds.

        Args:
            drawn: sampled values by name, as written by `written`.

        Raises:
            ConfigError: conditions form a cycle, or two domains of one key apply.
        """
        found: Values = {}
        left = list(self.entries)
        keys = {entry.key for entry in self.entries}
        tree = json.loads(self.base.experiment().model_dump_json()) if self._needs_base else {}
        while left:
            open_keys = {entry.key for entry in left}
            ready = [e for e in left if not open_keys.intersection(e.domain.when)]
            if not ready:
                raise self._circle(left)
            for entry in ready:
                known = found | {
                    key: value_at(tree, self.base.key(key))
                    for key in entry.domain.when
                    if key not in keys
                }
                if not is_met(entry.domain.when, known):
                    continue
                if entry.key in found:
                    raise ConfigError(
                        f"space.{entry.key}: two of its domains apply to one trial",
                        fix="Give them mutually exclusive conditions (`when`).",
                    )
                found[entry.key] = self._read(entry, drawn)
            left = [entry for entry in left if entry not in ready]
        return {entry.key: found[entry.key] for entry in self.entries if entry.key in found}

    def experiment(self, drawn: Mapping[str, JSONValue], more: Sequence[str] = ()) -> Experiment:
        """Return the configuration of a sample.

        Raises:
            ConfigError: the configuration is invalid.
        """
        return self.base.experiment(self.values(drawn), more)

    def check(self) -> list[Experiment]:
        """Validate every key at the edges of its domain, where its condition holds.

        Returns:
            The validated configurations, for further checks.

        Raises:
            ConfigError: a key is unknown, or a value is rejected; names them all.
        """
        self.base.experiment()
        for entry in self.entries:
            self._check_condition(entry)
        complaints: dict[str, str] = {}
        tried = []
        for entry, drawn in self._edges():
            try:
                tried.append(self.experiment(drawn))
            except ConfigError as error:
                complaint, values = self._complaint(error), self._read(entry, drawn)
                complaints.setdefault(complaint, f"{entry.key} = {json.dumps(values)}")
        if complaints:
            lines = "\n    ".join(f"{at}: {complaint}" for complaint, at in complaints.items())
            raise ConfigError(
                f"the space has values that are not valid for any run:\n    {lines}",
                fix="Correct them: `geo-ray config schema KEY` shows the values of a key; `when` "
                "restricts keys to the strategies that have them.",
            )
        return tried

    def written(self, entry: SpaceEntry, value: JSONValue) -> JSONValue:
        """Return a value for sampling; values that are not plain become text, for comparisons."""
        return json.dumps(value) if isinstance(value, (dict, list)) else value

    def base_draw(self) -> Values | None:
        """Return the sample of the base; None if it is outside the space."""
        tree = json.loads(self.base.experiment().model_dump_json())
        drawn: Values = {}
        for entry in self.entries:
            key = self.base.key(entry.key.replace("regions.*.", "regions.0."))
            value = value_at(tree, key)
            if isinstance(value, dict) and set(value) == {"kind"}:
                value = value["kind"]
            inside = entry.domain.holds(value)
            drawn[entry.name] = self.written(entry, value if inside else entry.domain.edges[0])
        try:
            same = self.experiment(drawn) == self.base.experiment()
        except ConfigError:
            return None
        return drawn if same else None

    # ------------------------------------------------------------------ checking

    @property
    def _needs_base(self) -> bool:
        keys = {entry.key for entry in self.entries}
        return any(key not in keys for entry in self.entries for key in entry.domain.when)

    def _read(self, entry: SpaceEntry, drawn: Mapping[str, JSONValue]) -> JSONValue:
        if entry.domain.kind == "value":
            return entry.domain.edges[0]
        value = drawn[entry.name]
        for each in entry.domain.edges:  # the value as written in a list of choices
            if entry.domain.kind in ("choice", "grid") and self.written(entry, each) == value:
                return each
        return value

    def _edges(self) -> Iterator[tuple[SpaceEntry, Values]]:
        """Yield a sample for every edge of every entry, with its condition met."""
        first = {e.name: self.written(e, e.domain.edges[0]) for e in self.entries}
        for entry in self.entries:
            for value in entry.domain.edges:
                drawn = dict(first)
                self._meet(entry, drawn, 0)
                yield entry, drawn | {entry.name: self.written(entry, value)}
        yield self.entries[0], {e.name: self.written(e, e.domain.most) for e in self.entries}

    def _meet(self, entry: SpaceEntry, drawn: Values, depth: int) -> None:
        """Sample values that meet a condition, including conditions of those keys."""
        if depth > len(self.entries):
            raise self._circle([entry])
        for key, wanted in entry.domain.when.items():
            options = wanted if isinstance(wanted, (list, tuple)) else [wanted]
            for other in self.entries:
                matching = [each for each in options if other.domain.holds(each)]
                if other.key == key and matching:
                    drawn[other.name] = self.written(other, matching[0])
                    self._meet(other, drawn, depth + 1)
                    break

    def _check_condition(self, entry: SpaceEntry) -> None:
        for key, wanted in entry.domain.when.items():
            options = wanted if isinstance(wanted, (list, tuple)) else [wanted]
            mine = [other.domain for other in self.entries if other.key == key]
            lost = [e for e in options if mine and not any(d.holds(e) for d in mine)]
            if lost:
                raise ConfigError(
                    f"space.{entry.key}.when.{key}: {lost[0]!r} is not in the space of {key}",
                    fix=f"Add it to space.{key}, or remove it from the condition.",
                )
            if not mine:
                tree = json.loads(self.base.experiment().model_dump_json())
                if value_at(tree, self.base.key(key)) is None:
                    raise ConfigError(
                        f"space.{entry.key}.when.{key}: neither the space nor the base has {key}",
                        fix="Use an existing key, such as strategy.kind.",
                    )

    def _complaint(self, error: ConfigError) -> str:
        lines = [line.strip() for line in error.message.splitlines()]
        return "; ".join(lines[1:] or lines).replace(" (overrides)", "")

    def _circle(self, left: Sequence[SpaceEntry]) -> ConfigError:
        keys = ", ".join(dict.fromkeys(entry.key for entry in left))
        return ConfigError(
            f"space: the conditions of {keys} form a cycle",
            fix="Use keys in `when` whose own conditions do not depend on it.",
        )


def directory_of(config: TuningConfig, start: Experiment, out: Path | None) -> Path:
    """Return the directory of a search.

    Args:
        config: the search.
        start: its base.
        out: given directory; None: the default, ``runs/tune-NAME``.
    """
    return Path(out or directory.local_root(start) / f"tune-{config.name}").absolute()


def check_directory(out: Path, *, resume: bool) -> None:
    """Check that a new search has a new directory, and a resumed one an existing directory.

    Raises:
        TuningDirectoryError: the directory exists already, or is missing.
    """
    if resume and not out.exists():
        raise TuningDirectoryError(
            f"no search in {out} to resume",
            fix="Give the directory of a search with --out, or omit --resume to start one.",
        )
    if not resume and out.exists():
        raise TuningDirectoryError(f"{out} exists")
