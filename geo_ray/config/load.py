"""A configuration file becomes a typed tree; a tree becomes text, a digest or a difference.

Reading is: safe YAML (`yaml_text`) -> ``--set`` (`overrides`) -> JSON -> strict validation by the
root class, whose complaints `explain` turns into one `ConfigError` that lists them all.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from geo_ray.config.canonical import JSONValue, canonical_json, sha256_hex
from geo_ray.config.describe import describe
from geo_ray.config.explain import dotted, explain, keys_in
from geo_ray.config.overrides import apply_overrides, kept_keys
from geo_ray.config.own import context
from geo_ray.config.source import ConfigSource, ConfigText
from geo_ray.config.yaml_text import KeyPath, YamlTree, parse_yaml, write_yaml
from geo_ray.errors import ConfigError

__all__ = [
    "MAX_FILE_BYTES",
    "changes",
    "checked",
    "describe",
    "diff",
    "digest",
    "dump_yaml",
    "json_schema",
    "load_text",
    "load_tree",
    "override_notes",
    "read_text",
]

T = TypeVar("T", bound=BaseModel)

MAX_FILE_BYTES = 1_000_000
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
    to_look_at: bool = False,
) -> T:
    """Read a configuration file.

    Args:
        path: a YAML file of at most `MAX_FILE_BYTES`, or what `source.text_of` made.
        overrides: ``key.key=value`` each, applied in order (see `apply_overrides`).
        root: the class of the whole tree.
        advice: where its keys are described; None if `geo-ray config schema` does.
        base_dir: where relative paths to the user's classes start; default: the file's directory.
        may_change: as for `geo_ray.config.own.context`.
        to_look_at: import none of them; see `geo_ray.config.own.context`.

    Raises:
        ConfigError: naming the file and every key that is wrong; nothing else escapes.
        ConfigDriftError: a class of the user's has changed since the file was written.
    """
    where = context(
        path.parent if base_dir is None else base_dir,
        may_change=may_change,
        to_look_at=to_look_at,
    )
    return load_text(read_text(path), overrides, root, str(path), advice, where)


def read_text(path: ConfigSource) -> str:
    """The text of a configuration.

    Raises:
        ConfigError: it cannot be read, or is larger than `MAX_FILE_BYTES`.
    """
    if isinstance(path, ConfigText):
        return path.text
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fix = "Save the file as UTF-8."
        raise ConfigError(f"{path}: not UTF-8 text: {error}", fix=fix) from None
    except (OSError, ValueError) as error:
        fix = "Name a YAML file that exists and can be read."
        raise ConfigError(f"{path}: cannot be read: {error}", fix=fix) from None
    if len(data) > MAX_FILE_BYTES:
        fix = "Name a configuration; data and tables have files of their own."
        raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes", fix=fix)
    return text


def load_text(
    text: str,
    overrides: Sequence[str],
    root: type[T],
    source: str,
    advice: str | None = None,
    where: Mapping[str, Any] | None = None,
) -> T:
    """Read a configuration from text; see `load_tree`.

    Args:
        text: YAML.
        overrides: as for `load_tree`.
        root: the class of the whole tree.
        source: name of the text in messages.
        advice: as for `load_tree`.
        where: `geo_ray.config.own.context`, if there may be classes of the user's.
    """
    tree = parse_yaml(text, source)
    if tree.value is None:
        needed = [name for name, field in root.model_fields.items() if field.is_required()]
        if needed and not overrides:
            raise ConfigError(
                f"{source}: the file is empty; it needs at least the keys {', '.join(needed)}",
                fix="Begin with a file that `geo-ray init` writes, such as configs/quickstart.yaml."
                if advice is None
                else advice,
            )
        tree = YamlTree({}, tree.origins)
    if not isinstance(tree.value, dict):
        raise ConfigError(
            f"{source}: the file must be a mapping of keys to values",
            fix="Write `key: value` on each line; configs/quickstart.yaml is a whole file.",
        )
    tree = apply_overrides(tree, overrides)
    return checked(tree, root, source, advice=advice, where=where)


def override_notes(path: ConfigSource, overrides: Sequence[str]) -> list[str]:
    """What overrides leave as it was although it was written for something else.

    Raises:
        ConfigError: as for `load_tree`, as far as the tree can be read.
    """
    tree = parse_yaml(read_text(path), str(path))
    return kept_keys(tree, overrides) if isinstance(tree.value, dict) else []


def checked(
    tree: YamlTree,
    root: type[T],
    source: str,
    section: str | None = None,
    advice: str | None = None,
    where: Mapping[str, Any] | None = None,
) -> T:
    """Validate a tree, or one section of it.

    Args:
        tree: as `parse_yaml` gives it.
        root: the class of the tree or of the section.
        source: its name in messages.
        section: the key of the section; None for the whole tree.
        advice: as for `load_tree`.
        where: as for `load_text`.

    Raises:
        ConfigError: naming every key that is wrong.
    """
    under: KeyPath = () if section is None else (section,)
    value = tree.value.get(section) if section and isinstance(tree.value, dict) else tree.value
    try:
        return root.model_validate_json(json.dumps(value, allow_nan=False), context=where)
    except ValidationError as error:
        lines = explain(error, root, tree.origins, under)
        count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
        fix = advice or _advice(len(lines), keys_in(error, root))
        raise ConfigError("\n    ".join([f"{source}: {count}:", *lines]), fix=fix) from None


def _advice(problems: int, sections: Sequence[str]) -> str:
    correct = "Correct that" if problems == 1 else "Correct them all"
    if not sections or len(sections) > _MOST_SECTIONS:
        return f"{correct}. `geo-ray config schema` lists every key."
    shown = " and ".join(f"`geo-ray config schema {name}`" for name in sections)
    return f"{correct}. {shown} show{'s' if len(sections) == 1 else ''} what belongs there."


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
