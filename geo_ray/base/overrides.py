"""``--set a.b=c``: changes single keys of a tree before it is validated.

In Python they are the argument ``overrides``, and messages use that name; the command line
switches to ``--set`` (`CALLED`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Final

from geo_ray.base.canonical import JSONValue
from geo_ray.base.errors import ConfigError
from geo_ray.base.yaml import KeyPath, YamlTree, parse_yaml

_SEGMENT = re.compile(r'(?:"([^"]*)"|([^".=]+))(\.|=|$)')
_OPTION: Final = "--set"
CALLED: ContextVar[str] = ContextVar("overrides_called", default="overrides")
"""Name of the overrides in messages: ``overrides``, or ``--set`` on the command line."""


class OptionText(str):
    """An override given by another option than ``--set``.

    Args:
        text: ``key.key=value``.
        option: the option and its value, as typed; used in messages.
    """

    option: tuple[str, str]

    def __new__(cls, text: str, option: tuple[str, str]) -> OptionText:
        """See the class."""
        made = super().__new__(cls, text)
        made.option = option
        return made

    def __reduce__(self) -> tuple[type[OptionText], tuple[str, tuple[str, str]]]:
        """Support pickle, because runs of a comparison may be separate processes."""
        return OptionText, (str(self), self.option)


def apply_overrides(tree: YamlTree, overrides: Sequence[str]) -> YamlTree:
    """Return a copy of ``tree`` with every override applied in turn.

    Args:
        tree: the tree; its root must be a mapping.
        overrides: entries ``key.key=value``; a number selects an item of a list, a key with dots is
            in double quotes, the value is YAML on one line. Missing mappings on the way are
            created.

    Raises:
        ConfigError: names the override and its error.
    """
    value, origins = tree.value, dict(tree.origins)
    for override in overrides:
        keys, text = _split(override)
        path = _with_indices(value, keys)
        made = [path[:length] for length in range(1, len(path)) if path[:length] not in origins]
        new = parse_yaml(text, _named(override), flow_only=True)
        value = _replaced(value, path, new.value, override)
        for key in [key for key in origins if key[: len(path)] == path]:
            del origins[key]
        origin = _origin(override)
        origins[path] = origin  # also for an empty value, which has no parts
        origins.update({(*path, *inner): origin for inner in new.origins})
        origins.update(dict.fromkeys(made, origin))
    return YamlTree(value, origins)


def _split(override: str) -> tuple[KeyPath, str]:
    path: list[str | int] = []
    position = 0
    while match := _SEGMENT.match(override, position):
        quoted, plain, end = match.groups()
        path.append(plain.strip() if quoted is None else quoted)
        position = match.end()
        if end == "=":
            return tuple(path), override[position:]
        if end == "":
            break
    raise ConfigError(
        f"{_named(override)}: not of the form key.key=value",
        fix=f"Write for example {_example('train.steps=100')}.",
    )


def _with_indices(node: JSONValue, keys: KeyPath) -> KeyPath:
    """Convert the keys of list items to numbers, as in origins."""
    path: list[str | int] = []
    for key in keys:
        if isinstance(node, list) and str(key).isdecimal() and len(str(key)) < 10:
            index = int(key)
            path.append(index)
            node = node[index] if index < len(node) else None
        else:
            path.append(key)
            node = node.get(str(key)) if isinstance(node, dict) else None
    return tuple(path)


def _item(head: str | int, items: list[JSONValue]) -> str:
    """Return a hint for an item given by its name."""
    names = [item.get("name") if isinstance(item, dict) else None for item in items]
    return f"; {head} is item {names.index(head)}" if head in names else ""


def _replaced(node: JSONValue, path: KeyPath, new: JSONValue, override: str) -> JSONValue:
    """Copy the containers along ``path`` and put ``new`` at its end."""
    if not path:
        return new
    head, rest = path[0], path[1:]
    if isinstance(node, list):
        if not isinstance(head, int) or head >= len(node):
            what = f"{head} is not an item of a list of {len(node)}{_item(head, node)}"
            raise ConfigError(
                f"{_named(override)}: {what}",
                fix=f"Use a number from 0 to {len(node) - 1}, or set the whole list: KEY=[...]."
                if node
                else "Set the whole list: KEY=[...].",
            )
        return [
            _replaced(item, rest, new, override) if position == head else item
            for position, item in enumerate(node)
        ]
    if node is None:
        node = {}
    if not isinstance(node, dict):
        raise ConfigError(
            f"{_named(override)}: {head!r} is inside {node!r}, which has no keys",
            fix="Set the key above it, for example "
            f"{_example('strategy={kind: diloco, interval: 16}')}.",
        )
    return {**node, str(head): _replaced(node.get(str(head)), rest, new, override)}


def applied_keys(tree: YamlTree, overrides: Sequence[str]) -> list[str]:
    """Return notes about keys that belong to another kind of a section than its current one.

    ``strategy.kind=diloco`` keeps ``interval: 4``, which was chosen for `sma`.

    Args:
        tree: the tree before the overrides.
        overrides: as for `apply_overrides`.
    """
    changed = apply_overrides(tree, overrides)
    notes = []
    for path in [path for path in changed.origins if path and path[-1] in ("kind", "use")]:
        before, after = _at(tree.value, path[:-1]), _at(changed.value, path[:-1])
        if not isinstance(before, Mapping) or not isinstance(after, Mapping):
            continue
        old, new = (each.get("use", each.get("kind")) for each in (before, after))
        was_set = tree.origins.get(path) != changed.origins[path]
        found = [
            f"{key}: {after[key]} ({changed.origins[(*path[:-1], key)]})"
            for key in after
            if key not in ("kind", "use") and changed.origins.get((*path[:-1], key)) != CALLED.get()
        ]
        if was_set and old != new and found:
            section = ".".join(str(key) for key in path[:-1])
            notes.append(f"{section} is {new} now, and keeps the keys of {old}: {', '.join(found)}")
    return notes


def _at(node: JSONValue, path: KeyPath) -> JSONValue:
    for key in path:
        if isinstance(node, dict):
            node = node.get(str(key))
        elif isinstance(node, list) and isinstance(key, int) and key < len(node):
            node = node[key]
        else:
            return None
    return node


def typed(option: str, value: str) -> str:
    """Return an option with its value as given: ``--option value``, or ``option: value``."""
    return f"--{option} {value}" if CALLED.get() == _OPTION else f"{option}: {value}"


def _origin(override: str) -> str:
    return typed(*override.option) if isinstance(override, OptionText) else CALLED.get()


def _named(override: str) -> str:
    if isinstance(override, OptionText):
        return typed(*override.option)
    called = CALLED.get()
    return f"{called} {override}" if called == _OPTION else f"{called}: {override}"


def _example(text: str) -> str:
    if CALLED.get() != _OPTION:
        return text
    return f"{_OPTION} '{text}'" if " " in text else f"{_OPTION} {text}"
