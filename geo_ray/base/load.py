"""Loads a typed configuration tree from a YAML file, a Python mapping or a JSON file.

Applies overrides, explains errors, and computes a tree's digest, YAML text, JSON schema and
differences.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from geo_ray.base.canonical import JSONValue, canonical_json, sha256_hex
from geo_ray.base.errors import ConfigError, GeoRayError, RunDirectoryError
from geo_ray.base.explain import dotted, explain, keys_in, problem_line
from geo_ray.base.overrides import applied_keys, apply_overrides
from geo_ray.base.user_section import context
from geo_ray.base.yaml import (
    ConfigSource,
    ConfigText,
    KeyPath,
    YamlTree,
    parse_yaml,
    read_text,
    write_yaml,
)


def text_of(tree: Mapping[str, Any] | BaseModel, base_dir: Path) -> ConfigText:
    """Return the source of a configuration given as a tree of values.

    Args:
        tree: plain JSON values, or a loaded configuration.
        base_dir: base of its relative paths.

    Raises:
        ConfigError: it contains something that is not a plain value.
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
    """Return changes of single keys as ``key.key=value``, as for ``--set``.

    Args:
        overrides: values by dotted key, or a list of ``key.key=value``.

    Raises:
        ConfigError: a value is not a plain value, or the overrides are a single string.
    """
    if isinstance(overrides, str):
        raise ConfigError(
            f"overrides: {overrides!r} is a single string",
            fix="Give a list of strings, or a mapping.",
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
    raise TypeError(f"{value!r} ({type(value).__name__}) is not a plain value")


T = TypeVar("T", bound=BaseModel)

_MOST_SECTIONS = 3
_ABSENT = object()


def load_tree(
    path: ConfigSource,
    overrides: Sequence[str],
    root: type[T],
    advice: str | None = None,
    *,
    base_dir: Path | None = None,
    may_change: Collection[str] = (),
    read_only: bool = False,
    found: Mapping[KeyPath, str] = MappingProxyType({}),
) -> T:
    """Read a configuration file.

    Args:
        path: a YAML file, or a result of `text_of`.
        overrides: entries ``key.key=value``, applied in order (see `apply_overrides`).
        root: class of the whole tree.
        advice: description of its keys; None: `geo-ray config schema`.
        base_dir: base of relative paths to custom classes; default: the file's directory.
        may_change: as for `geo_ray.base.user_section.context`.
        read_only: import no custom classes; see `geo_ray.base.user_section.context`.
        found: problems that the caller has found, by key; reported with the others.

    Raises:
        ConfigError: names the file and every wrong key; no other error escapes.
        ConfigChangedError: a custom class has changed since the file was written.
    """
    where = context(
        path.parent if base_dir is None else base_dir,
        may_change=may_change,
        read_only=read_only,
    )
    return load_text(read_text(path), overrides, root, str(path), advice, where, found)


def load_text(
    text: str,
    overrides: Sequence[str],
    root: type[T],
    source: str,
    advice: str | None = None,
    where: Mapping[str, Any] | None = None,
    found: Mapping[KeyPath, str] = MappingProxyType({}),
) -> T:
    """Read a configuration from text; see `load_tree`.

    Args:
        text: YAML.
        overrides: as for `load_tree`.
        root: the class of the whole tree.
        source: name of the text in messages.
        advice: as for `load_tree`.
        where: `geo_ray.base.user_section.context`, if there may be custom classes.
        found: as for `load_tree`.
    """
    tree = parse_yaml(text, source)
    if tree.value is None:
        needed = [name for name, field in root.model_fields.items() if field.is_required()]
        if needed and not overrides:
            raise ConfigError(
                f"{source}: the file is empty; it needs at least the keys {', '.join(needed)}",
                fix="Start with a file of `geo-ray init`, such as configs/quickstart.yaml."
                if advice is None
                else advice,
            )
        tree = YamlTree({}, tree.origins)
    if not isinstance(tree.value, dict):
        raise ConfigError(
            f"{source}: the file must be a mapping of keys to values",
            fix="Write `key: value` on each line; configs/quickstart.yaml is a complete example.",
        )
    tree = apply_overrides(tree, overrides)
    return checked(tree, root, source, advice=advice, where=where, found=found)


def override_notes(path: ConfigSource, overrides: Sequence[str]) -> list[str]:
    """Return notes about keys that overrides leave although they belong to another kind.

    Raises:
        ConfigError: as for `load_tree`, if the tree cannot be read.
    """
    tree = parse_yaml(read_text(path), str(path))
    return applied_keys(tree, overrides) if isinstance(tree.value, dict) else []


def checked(
    tree: YamlTree,
    root: type[T],
    source: str,
    section: str | None = None,
    advice: str | None = None,
    where: Mapping[str, Any] | None = None,
    found: Mapping[KeyPath, str] = MappingProxyType({}),
) -> T:
    """Validate a tree, or one section of it.

    Args:
        tree: result of `parse_yaml`.
        root: class of the tree or of the section.
        source: its name in messages.
        section: the key of the section; None for the whole tree.
        advice: as for `load_tree`.
        where: as for `load_text`.
        found: as for `load_tree`.

    Raises:
        ConfigError: names every wrong key.
    """
    under: KeyPath = () if section is None else (section,)
    value = tree.value.get(section) if section and isinstance(tree.value, dict) else tree.value
    lines: list[str] = []
    sections: list[str] = []
    try:
        valid = root.model_validate_json(json.dumps(value, allow_nan=False), context=where)
        if not found:
            return valid
    except ValidationError as error:
        lines, sections = explain(error, root, tree.origins, under), keys_in(error, root)
    lines += [problem_line(path, text, tree.origins) for path, text in found.items()]
    sections = list(dict.fromkeys([*sections, *(str(path[0]) for path in found)]))
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    fix = advice or _advice(len(lines), sections)
    raise ConfigError("\n    ".join([f"{source}: {count}:", *lines]), fix=fix)


def _advice(problems: int, sections: Sequence[str]) -> str:
    correct = "Correct it" if problems == 1 else "Correct all of them"
    if not sections or len(sections) > _MOST_SECTIONS:
        return f"{correct}. `geo-ray config schema` lists every key."
    shown = " and ".join(f"`geo-ray config schema {name}`" for name in sections)
    return f"{correct}. {shown} show{'s' if len(sections) == 1 else ''} the valid keys and values."


def digest(model: BaseModel) -> str:
    """Return the SHA-256 (hex) of the whole tree, defaults included, whatever its key order."""
    return sha256_hex(canonical_json(_tree(model)))


def diff(a: BaseModel, b: BaseModel) -> list[str]:
    """List the keys whose values differ, as ``key.key: old -> new``; empty if none does."""
    return [f"{key}: {change}" for key, change in changes(a, b).items()]


def changes(a: BaseModel, b: BaseModel) -> dict[str, str]:
    """Give the keys whose values differ, dotted, each with ``old -> new``; empty if none does."""
    old, new = dict(_leaves(_tree(a), ())), dict(_leaves(_tree(b), ()))
    found = {}
    for path in dict.fromkeys([*old, *new]):
        before, after = old.get(path, _ABSENT), new.get(path, _ABSENT)
        if type(before) is not type(after) or before != after:
            found[dotted(path)] = f"{_shown(before)} -> {_shown(after)}"
    return found


def dump_yaml(model: BaseModel) -> str:
    """Write the whole tree, defaults included, as YAML that `load_tree` reads back unchanged."""
    return write_yaml(_tree(model))


def json_schema(root: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON Schema of the whole tree, for editors."""
    return root.model_json_schema()


def _tree(model: BaseModel) -> JSONValue:
    tree: JSONValue = model.model_dump(mode="json")
    return tree


def _leaves(value: JSONValue, path: KeyPath) -> Iterator[tuple[KeyPath, JSONValue]]:
    """Yield every scalar and every empty container with its path."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value


def _shown(value: object) -> str:
    return "(absent)" if value is _ABSENT else json.dumps(value, ensure_ascii=False)


_MOST_BYTES: Final = 16 * 1024 * 1024
_MOST_COMPLAINTS: Final = 5
_MOST_BYTES_SEARCHED: Final = 1_000_000


def load_json(path: Path, root: type[T], what: str, wrong: Callable[[str], GeoRayError]) -> T:
    """Read a file.

    Args:
        path: the file; read up to 16 MiB.
        root: the class of the whole tree.
        what: kind of the file, for messages.
        wrong: creates the error from its message.

    Raises:
        GeoRayError: from ``wrong``; the file cannot be read, or is not valid: names the first keys.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise wrong(f"{what} {path} is larger than {_MOST_BYTES} bytes")
        return root.model_validate_json(data)
    except OSError as error:
        raise wrong(f"{what} {path} cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        raise wrong(f"{what} {path} is not valid: {complaints(error, root, data)}") from None


def load_run_json(path: Path, root: type[T]) -> T | None:
    """Read a small file of a run; None if it does not exist.

    Raises:
        RunDirectoryError: the file cannot be read, or is of another kind.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunDirectoryError(
            f"cannot read {path}: {error.strerror or error}",
            fix="Check the permissions of the file.",
        ) from None
    try:
        return root.model_validate_json(data)
    except ValidationError as error:
        raise RunDirectoryError(
            f"cannot read {path}: {complaints(error, root, data)}",
            fix="Remove the file if it was edited; the run's other files are enough for a report.",
        ) from None


def complaints(error: ValidationError, root: type[BaseModel], text: bytes | str) -> str:
    """Describe the first errors in a file on one line.

    Args:
        error: the error that ``root`` raised.
        root: class of the whole tree.
        text: the file, JSON or YAML.
    """
    lines = explain(error, root, _origins(text))
    more = [f"and {len(lines) - _MOST_COMPLAINTS} more"] if len(lines) > _MOST_COMPLAINTS else []
    return "; ".join([*lines[:_MOST_COMPLAINTS], *more])


def _origins(text: bytes | str) -> dict[KeyPath, str]:
    """Return the line of each key; empty if the file is too large or unreadable."""
    if len(text) > _MOST_BYTES_SEARCHED:
        return {}
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8-sig")
        return parse_yaml(decoded, "").origins
    except (ConfigError, UnicodeDecodeError):
        return {}
