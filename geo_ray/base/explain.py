"""Converts a validation error to lines with the key, the value, and the allowed values.

Also names the key or value that was probably meant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from functools import lru_cache
from operator import methodcaller
from typing import Annotated, Any, Final

from pydantic import AwareDatetime, BaseModel, TypeAdapter, ValidationError

from geo_ray.base.canonical import JSONValue
from geo_ray.base.model import (
    Also,
    MessageWords,
    Place,
    ProblemsError,
    alternatives,
    below,
    every_field,
    is_optional,
    is_own,
    item_places,
    kinds_of,
    step,
)
from geo_ray.base.text import nearest_word
from geo_ray.base.yaml import KeyPath

_SCALARS: Final[dict[Any, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    date: "a date such as 2026-01-31",
    datetime: "a date and time such as 2026-01-31T12:00:00Z",
    AwareDatetime: "a date and time with its zone, such as 2026-01-31T12:00:00Z",
}
_MOST_KEYS: Final = 12
_HUGE: Final = 1e30
_SPOKEN: Final = {"yes": True, "on": True, "y": True, "no": False, "off": False, "n": False}


def accepts(place: Place) -> str:
    """Describe the valid values, for a sentence such as "expected a whole number of at least 1"."""
    key, words = kinds_of(place)
    if key:
        text = f"a section whose {key} is one of {', '.join(words)}"
    else:
        text = " or ".join(dict.fromkeys(_one(option) for option in alternatives(place)))
    if not is_optional(place):
        return text
    return f"{text}, or null" if "," in text or " list" in text else f"{text} or null"


def listed(words: Sequence[object]) -> str:
    """List the values of a Literal: ``one of a, b, c``."""
    shown = [word if isinstance(word, str) else json.dumps(word) for word in words]
    return f"one of {', '.join(shown)}" if len(shown) > 1 else shown[0]


def limits_of(place: Place) -> dict[str, Any]:
    """Return the limits of a value by pydantic's names, such as ``{"ge": 1}``."""
    names = ("gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length")
    found = [(name, getattr(rule, name, None)) for rule in place.rules for name in names]
    return {name: limit for name, limit in found if limit is not None}


def words_of(place: Place) -> str:
    """Describe the pattern of a text; empty without a pattern."""
    return next((rule.text for rule in place.rules if isinstance(rule, MessageWords)), "")


def meant(value: JSONValue, place: Place) -> str | None:
    """Return the nearest valid value as YAML; None if none is near.

    Args:
        value: the wrong value.
        place: its place.
    """
    if isinstance(value, (int, float)) and not abs(value) < _HUGE:
        return None  # NaN too
    words = [word for option in alternatives(place) for word in option.words]
    if isinstance(value, str) and words:
        return nearest_word(value, [word for word in words if isinstance(word, str)])
    accepted: TypeAdapter[Any] = TypeAdapter(
        Annotated[(place.type, *place.rules)] if place.rules else place.type,  # type: ignore[arg-type]
    )
    for near in _near(value):
        try:
            accepted.validate_json(json.dumps(near, allow_nan=False), strict=True)
        except ValidationError:
            continue
        return json.dumps(near, ensure_ascii=False)
    return None


def _near(value: JSONValue) -> Iterator[JSONValue]:
    if isinstance(value, float) and value.is_integer():
        yield int(value)
    if isinstance(value, str):
        if value.lower() in _SPOKEN:
            yield _SPOKEN[value.lower()]
        yield from _numbers(value)
    elif not isinstance(value, (bool, list, dict)) and value is not None:
        yield json.dumps(value)  # not the text "true", which YAML reads from on or yes, too
    if not isinstance(value, (list, dict)) and value is not None:
        yield [value]


def _numbers(text: str) -> Iterator[JSONValue]:
    for read in (int, float):
        try:
            number = read(text.strip())
        except ValueError:
            continue
        if abs(number) < _HUGE:
            yield number


def _one(place: Place) -> str:
    limits = limits_of(place)
    if place.words:
        return listed(place.words)
    if place.model is not None:
        return f"a section with {_keys(list(place.model.model_fields))}"
    kind, items = item_places(place)
    if kind == "mapping":
        return f"a section of names, each with {accepts(items[0])}"
    if kind == "items":
        return f"a list of {len(items)}: {', '.join(accepts(item) for item in items)}"
    if kind == "list":
        return f"a list{_count(limits)} in which each item is {accepts(items[0])}"
    if place.type is str:
        return words_of(place) or f"text{_length(limits)}"
    return _SCALARS.get(place.type, "another value") + _range(limits)


def _keys(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_KEYS]) + (", ..." if len(names) > _MOST_KEYS else "")
    return f"the key{'s' if len(names) > 1 else ''} {shown}"


def _range(limits: dict[str, Any]) -> str:
    shown = {name: _plain(limit) for name, limit in limits.items()}
    parts = []
    if {"ge", "le"} <= set(shown):
        parts.append(f"from {shown['ge']} to {shown['le']}")
    else:
        parts += [f"greater than {shown['gt']}"] if "gt" in shown else []
        parts += [f"of at least {shown['ge']}"] if "ge" in shown else []
        upper = [f"less than {shown['lt']}"] if "lt" in shown else []
        upper += [f"at most {shown['le']}"] if "le" in shown else []
        parts = [" and ".join([*parts, *upper])] if parts or upper else []
    parts += [f"that is a multiple of {shown['multiple_of']}"] if "multiple_of" in shown else []
    return "".join(f" {part}" for part in parts)


def _plain(limit: float) -> str:
    return str(int(limit)) if limit == int(limit) else str(limit)


def _length(limits: dict[str, Any]) -> str:
    return f" of {_counted(limits, 'character')}" if _counted(limits, "character") else ""


def _count(limits: dict[str, Any]) -> str:
    return f" of {_counted(limits, 'item')}" if _counted(limits, "item") else ""


def _counted(limits: dict[str, Any], what: str) -> str:
    low, high = limits.get("min_length"), limits.get("max_length")
    if low is not None and high is not None:
        return f"{low} to {high} {what}s"
    if low is not None:
        return f"at least {low} {what}{'' if low == 1 else 's'}"
    return "" if high is None else f"at most {high} {what}{'' if high == 1 else 's'}"


_SECRET: Final = re.compile(
    r"secret|passw|passphrase|token|credential|access_key|private_key", re.I
)
_NAMED_KEY: Final = re.compile(r"([\w\-.\"]+): (.+)", re.S)
_SEGMENT: Final = re.compile(r'"([^"]*)"|([^".]+)')
_MAX_SHOWN: Final = 60
_MAX_KEYS: Final = 20
_MAX_KINDS: Final = 8


@dataclass(frozen=True, slots=True)
class _Found:
    """Location of an error.

    Attributes:
        path: path of the key.
        holders: types that contain the key.
        places: valid types of the key.
    """

    path: KeyPath
    holders: list[Place]
    places: list[Place]


def explain(
    error: ValidationError,
    root: type[BaseModel],
    origins: Mapping[KeyPath, str],
    under: KeyPath = (),
) -> list[str]:
    """Return one line per wrong key, in the order of the keys.

    Args:
        error: the error that ``root`` raised.
        root: class of the tree, for valid keys.
        origins: origins of the values ("line 7", "--set").
        under: path of the tree in the tree of the origins.
    """
    problems: dict[KeyPath, list[str]] = {}
    items = [(item, _locate(item["loc"], root)) for item in _each_problem(error)]
    misspelt = {
        (*found.path[:-1], _near_key(str(item["loc"][-1]), _valid_keys(found.holders), root))
        for item, found in items
        if item["type"] == "extra_forbidden"
    }
    for item, found in items:
        if item["type"] == "missing" and found.path in misspelt:
            continue  # reported by another line under its name
        path, text = _problem(item, found, root)
        if text not in problems.setdefault(path, []):
            problems[path].append(text)
    return [
        problem_line((*under, *path), "; ".join(texts), origins) for path, texts in problems.items()
    ]


def problem_line(path: KeyPath, text: str, origins: Mapping[KeyPath, str]) -> str:
    """Return a line with a key, its origin and its problem."""
    return f"{dotted(path)}{_origin(path, origins)}: {text}"


def _each_problem(error: ValidationError) -> Iterator[Any]:
    """Yield the errors of pydantic, those of a rule that has found several one by one."""
    for item in error.errors(include_url=False):
        if item["type"] == "too_short" and len(item["input"]) >= item["ctx"]["min_length"]:
            continue  # pydantic does not count invalid items, whose errors are there, too
        rule = item.get("ctx", {}).get("error")
        if not isinstance(rule, ProblemsError):
            yield item
            continue
        for text in rule.texts:
            yield {**item, "ctx": {"error": text}}


def dotted(path: Sequence[str | int]) -> str:
    """Format a path as for `--set`: ``links.0.mbps``, keys with dots in double quotes."""
    if not path:
        return "(the whole file)"
    return ".".join(f'"{key}"' if re.search(r'[.="]', str(key)) else str(key) for key in path)


def _locate(loc: tuple[str | int, ...], root: type[BaseModel]) -> _Found:
    """Drop entries of ``loc`` that are not keys: tags of unions, marks of keys."""
    path: list[str | int] = []
    holders = at = places = [Place(root)]
    for segment in loc:
        if segment == "[key]":
            continue
        following, is_key = step(places, segment)
        if is_key:
            path.append(segment)
            holders, at = places, following
        places = following
    return _Found(tuple(path), holders, at)


def _problem(item: Any, found: _Found, root: type[BaseModel]) -> tuple[KeyPath, str]:
    kind, ctx, path = item["type"], item.get("ctx", {}), found.path
    if not found.places and not kind.endswith(("_forbidden", "_error")):  # of a custom class
        return path, f"{_got(item['input'], path)}{item['msg'][0].lower()}{item['msg'][1:]}"
    if kind == "missing":
        return path, f"missing; a value is required: {_accepted(found.places)}"
    if kind == "extra_forbidden":
        key, colon, _ = str(item["loc"][-1]).partition(":")
        hint = _nearest_key(path, str(item["loc"][-1]), _valid_keys(found.holders), root)
        if colon and key in _valid_keys(found.holders):
            hint = f"write a space after the colon of {key}"
        return path, f"unknown key; {hint}"
    if kind == "union_tag_invalid":
        return _wrong_kind(str(ctx["tag"]), item["input"], found)
    if kind == "union_tag_not_found":
        key, words = kinds_of(found.places[0])
        own = any(is_own(one) for place in found.places for one in alternatives(place))
        other = "; or use a custom class with `use: path/to/file.py:Class`" if own else ""
        with_it = f"; also set it: {dotted((*path, key))}=..." if path else ""
        return path, f"the key {key} is missing; it is {listed(words)}{other}{with_it}"
    if kind in ("value_error", "assertion_error"):
        return _broken_rule(str(ctx["error"]), item["input"], found, root)
    if kind == "json_invalid":
        return path, f"not valid JSON: {ctx['error']}"
    hint = _or_meant(item["input"], found)
    if hint.startswith("; did you mean {"):  # a list of all kinds would hide the hint
        return path, f"{_got(item['input'], path)}{hint.removeprefix('; ')}"
    return path, f"{_got(item['input'], path)}expected {_accepted(found.places)}{hint}"


def _accepted(places: list[Place]) -> str:
    return " or ".join(dict.fromkeys(accepts(place) for place in places)) or "nothing here"


def _or_meant(value: JSONValue, found: _Found) -> str:
    if _is_secret(found.path):
        return ""
    near = next((near for place in found.places if (near := meant(value, place))), None)
    near = near or next((near for place in found.places if (near := _as_kind(value, place))), None)
    return f"; did you mean {near}?" if near else ""


def _as_kind(value: JSONValue, place: Place) -> str | None:
    """Suggest a section if only its kind was given, maybe one section too high."""
    key, words = kinds_of(place)
    near = (
        value if value in words else nearest_word(value, words) if isinstance(value, str) else None
    )
    if key and near:
        return f"{{{key}: {near}}}"
    for option in alternatives(place):
        for name, info in option.model.model_fields.items() if option.model is not None else ():
            key, words = kinds_of(Place.of(info))
            if key and value in words:
                return f"{{{name}: {{{key}: {value}}}}}"
    return None


def keys_in(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """Return the existing top-level keys of ``error`` without duplicates."""
    found = [_locate(item["loc"], root).path for item in error.errors(include_url=False)]
    return list(
        dict.fromkeys(str(path[0]) for path in found if path and path[0] in root.model_fields)
    )


def _wrong_kind(tag: str, section: JSONValue, found: _Found) -> tuple[KeyPath, str]:
    key, words = kinds_of(found.places[0])
    path = (*found.path, key)
    if isinstance(section, dict) and not isinstance(
        section.get(key), str
    ):  # the tag is the value's text
        return path, f"got {_short(section.get(key))}, expected {listed(words)}"
    replaced = [rule for place in found.places for rule in place.rules if isinstance(rule, Also)]
    if replaced and tag in words:  # valid in a file but not in a tree
        others = [word for word in words if word != tag]
        return path, f"got {_short(tag)}, {replaced[0].why_not}; expected {listed(others)}"
    near = nearest_word(tag, words)
    hint = f"; did you mean {near}?" if near else ""
    return path, f"got {_short(tag)}, expected {listed(words)}{hint}"


def _broken_rule(
    message: str, value: JSONValue, found: _Found, root: type[BaseModel]
) -> tuple[KeyPath, str]:
    """Locate the key named by a rule between keys, from its own section or from the root."""
    named = _NAMED_KEY.fullmatch(message)
    if named is None:
        return found.path, message
    starts = [found, _Found((), [], [Place(root)])]
    for start in starts:
        keys = _keys_of(named[1], start.places)
        if keys:
            path = (*start.path, *keys)
            there = _value_at(value, keys) if start.path == found.path else None
            is_shown = there is not None and not isinstance(there, (dict, list))
            return path, f"{_got(there, path) if is_shown else ''}{named[2]}"
    return found.path, message


def _keys_of(text: str, places: list[Place]) -> KeyPath:
    """Return the keys that ``text`` names below some places; empty if none exist."""
    keys: list[str | int] = []
    for quoted, plain in _SEGMENT.findall(text):
        word: str | int = quoted or plain
        options = [one for place in places for one in alternatives(place)]
        if plain.isdecimal() and not below(options, word):
            word = int(plain)
        places = below(options, word)
        if not places:
            return ()
        keys.append(word)
    return tuple(keys)


def _value_at(value: JSONValue, keys: KeyPath) -> JSONValue:
    for key in keys:
        if isinstance(value, dict):
            value = value.get(str(key))
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            value = value[key]
        else:
            return None
    return value


def _got(value: JSONValue, path: KeyPath) -> str:
    if _is_secret(path):
        return "got a value that is not shown, "
    return f"got {_short(value)}, "


def _is_secret(path: KeyPath) -> bool:
    return any(_SECRET.search(str(key)) for key in path)


def _short(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except ValueError:  # Python does not format integers with thousands of digits
        text = "a number of very many digits"
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def _valid_keys(holders: list[Place]) -> list[str]:
    options = [one for holder in holders for one in alternatives(holder)]
    models = [option.model for option in options if option.model is not None]
    return list(dict.fromkeys(name for model in models for name in model.model_fields))


def _nearest_key(path: KeyPath, word: str, valid: Sequence[str], root: type[BaseModel]) -> str:
    if word in root.model_fields and word not in valid:
        return f"{word} is a top-level key: write it without a prefix"
    near = _near_key(word, valid, root)
    if near is not None and near == dotted(path):
        kinds = _kinds_with(near, root)
        shown = ", ".join(kinds[:_MAX_KINDS]) + (", ..." if len(kinds) > _MAX_KINDS else "")
        only = " only" if len(kinds) == 1 else ""
        return f"this kind has no such key; it is a key of {shown or 'another kind'}{only}"
    if near is not None:
        return f"did you mean {near}{_of_kind(near, root)}?"
    shown = ", ".join(valid[:_MAX_KEYS]) + (", ..." if len(valid) > _MAX_KEYS else "")
    return f"valid are: {shown}" if valid else "no key is valid here"


def _near_key(word: str, valid: Sequence[str], root: type[BaseModel]) -> str | None:
    """Return the nearest key: of this section, or of another one with its path."""
    paths = _paths(root)
    whole = [path for path in paths if "." in path and _bare(path) == _bare(word)]
    if whole:  # a path without its dots
        return _as_set(min(whole, key=len))
    near = nearest_word(word, valid)
    if near is not None:
        return near
    others = [path for path in paths if path.endswith(f".{word}")]
    # the key of another section, preferably near the root
    nearest_other = min(others, key=methodcaller("count", "."), default=None)
    return None if nearest_other is None else _as_set(nearest_other)


@lru_cache(maxsize=32)
def _paths(root: type[BaseModel]) -> tuple[str, ...]:
    return tuple(path for path, _ in every_field(root))


def _of_kind(key: str, root: type[BaseModel]) -> str:
    """Describe the only kind of section with a key; empty if several have it."""
    kinds = _kinds_with(key, root)
    return f", a key of {kinds[0]} only" if len(kinds) == 1 else ""


def _kinds_with(key: str, root: type[BaseModel]) -> list[str]:
    """Return the kinds of a section that have a key; empty if it has no kinds."""
    paths = [path for path in _paths(root) if _as_set(path) == key]
    found = [re.findall(r"\(kind=([^),]*)\)", path) for path in paths]
    return [each[-1] for each in found if each]


def _as_set(path: str) -> str:
    """Return a path of `every_field` as written, without the kinds of sections."""
    return re.sub(r"\([^)]*\)", "", path)


def _bare(path: str) -> str:
    """Return a path without dots, underscores and kinds of sections, for comparisons."""
    return re.sub(r"[._\-]", "", _as_set(path)).lower()


def _origin(path: KeyPath, origins: Mapping[KeyPath, str]) -> str:
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return f" ({origins[path[:length]]})"
    # a section that exists only because `--set` has a key in it
    inside = (origin for key, origin in origins.items() if path and key[: len(path)] == path)
    return next((f" ({origin})" for origin in inside), "")
