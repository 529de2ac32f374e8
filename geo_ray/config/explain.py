"""Turn a validation error into lines to act on: the key, what is there, what belongs there."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from geo_ray.config.annotations import Annotation, alternatives, as_model, every_field, step
from geo_ray.config.yaml_text import KeyPath

_SECRET = re.compile(r"secret|passw|passphrase|token|credential|access_key|private_key", re.I)
_MAX_SHOWN = 60


def explain(
    error: ValidationError, root: type[BaseModel], origins: Mapping[KeyPath, str]
) -> list[str]:
    """Return one line per wrong key, in the order of the keys.

    Args:
        error: what ``root`` said about the tree.
        root: the class of the tree, asked for valid keys.
        origins: where the values came from ("line 7", "--set").
    """
    problems: dict[KeyPath, list[str]] = {}
    given: dict[KeyPath, str] = {}
    for item in error.errors(include_url=False):
        path, places = _locate(item["loc"], root)
        if item["type"] == "union_tag_invalid":
            path = (*path, str(item["ctx"]["discriminator"]).strip("'"))
        given.setdefault(path, _given(item, path))
        expected = _expected(item, places, root)
        if expected not in problems.setdefault(path, []):
            problems[path].append(expected)
    return [
        f"{dotted(path)}{_origin(path, origins)}: {given[path]}{' or '.join(problems[path])}"
        for path in problems
    ]


def dotted(path: Sequence[str | int]) -> str:
    """Write a path as `--set` takes it: ``links.0.mbps``, keys with dots in double quotes."""
    if not path:
        return "(the whole file)"
    return ".".join(f'"{key}"' if re.search(r'[.="]', str(key)) else str(key) for key in path)


def _locate(loc: tuple[str | int, ...], root: type[BaseModel]) -> tuple[KeyPath, list[Annotation]]:
    """Drop from ``loc`` what are no keys; also return the types of what holds the last key."""
    path: list[str | int] = []
    places: list[Annotation] = [root]
    holders: list[Annotation] = [root]
    for segment in loc:
        following, is_key = step(places, segment)
        if segment == "[key]":
            continue
        if is_key:
            path.append(segment)
            holders = places
        places = following
    return tuple(path), holders


def _given(item: Any, path: KeyPath) -> str:
    if item["type"] in ("missing", "extra_forbidden", "union_tag_not_found"):
        return ""
    if item["type"] == "union_tag_invalid":
        return f"got {_short(item['ctx']['tag'])}, "
    if any(_SECRET.search(str(key)) for key in path):
        return "got a value that is not shown, "
    return f"got {_short(item['input'])}, "


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def _expected(item: Any, holders: list[Annotation], root: type[BaseModel]) -> str:
    kind, ctx = item["type"], item.get("ctx", {})
    if kind == "missing":
        return "missing; a value is required"
    if kind == "extra_forbidden":
        return "unknown key; " + _nearest_key(str(item["loc"][-1]), _valid_keys(holders), root)
    if kind == "union_tag_invalid":
        tags = re.findall(r"'([^']*)'", ctx["expected_tags"])
        return f"expected one of {', '.join(tags)}; {_nearest(str(ctx['tag']), tags)}"
    if kind == "union_tag_not_found":
        return f"the key {ctx['discriminator']} is missing; it says which kind this is"
    message = str(item["msg"])
    for start, better in (("Input should be ", "expected "), ("Value error, ", "")):
        message = message.replace(start, better)
    return message


def _valid_keys(holders: list[Annotation]) -> list[str]:
    options = [one for holder in holders for one in alternatives(holder)]
    models = [model for option in options if (model := as_model(option)) is not None]
    return list(dict.fromkeys(name for model in models for name in model.model_fields))


def _nearest_key(word: str, valid: Sequence[str], root: type[BaseModel]) -> str:
    if not difflib.get_close_matches(word.lower(), valid, n=1):
        others = [path for path, _ in every_field(root) if path.endswith(f".{word}")]
        if others:  # the key of another section, the nearest to the root
            return f"did you mean {min(others, key=lambda path: path.count('.'))}?"
    return _nearest(word, valid)


def _nearest(word: str, valid: Sequence[str]) -> str:
    close = difflib.get_close_matches(word.lower(), valid, n=1)
    if close:
        return f"did you mean {close[0]}?"
    shown = ", ".join(valid[:20]) + (", ..." if len(valid) > 20 else "")
    return f"valid are: {shown}" if valid else "no key is valid here"


def _origin(path: KeyPath, origins: Mapping[KeyPath, str]) -> str:
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return f" ({origins[path[:length]]})"
    return ""
