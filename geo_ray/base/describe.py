"""Human-readable descriptions of a configuration tree: every key, or one key and its subtree."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, TypeAlias

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from geo_ray.base.errors import ConfigError
from geo_ray.base.explain import limits_of, words_of
from geo_ray.base.model import (
    Place,
    alternatives,
    every_field,
    is_optional,
    is_own,
    item_places,
    kinds_of,
    opened,
)
from geo_ray.base.text import nearest_word

_SIGNS = {
    "gt": ">",
    "ge": ">=",
    "lt": "<",
    "le": "<=",
    "multiple_of": "a multiple of",
    "min_length": "length >=",
    "max_length": "length <=",
}


def describe(root: type[BaseModel]) -> str:
    """Return a paragraph per key: path (see `every_field`), type, limits, default, description."""
    return "\n".join(line for path, info in every_field(root) for line in paragraph(path, info))


def paragraph(path: str, info: FieldInfo) -> Iterator[str]:
    """Return the lines about one key."""
    yield f"{path}: {facts_of(info)}"
    if info.description:
        yield f"    {' '.join(info.description.split())}"


def facts_of(info: FieldInfo) -> str:
    """Return type, limits and default of a key."""
    default = "required" if info.is_required() else f"default: {default_text(info)}"
    return f"{type_and_limits(info)}, {default}"


def type_and_limits(info: FieldInfo) -> str:
    """Return type and limits of a key: ``int (>= 1)``."""
    place = Place.of(info)
    return f"{type_text(place)}{_limits(place)}"


def type_text(place: Place) -> str:
    """Return a key's type: ``int``, ``list of float (> 0)``, ``"sum" | "mean"``, ``section``."""
    options = alternatives(place)
    texts = [_one_type(option) for option in options] + (["null"] if is_optional(place) else [])
    return " | ".join(dict.fromkeys(texts))


def _one_type(place: Place) -> str:
    if place.words:
        return " | ".join(json.dumps(word) for word in place.words)
    if place.model is not None:
        return "section"
    kind, items = item_places(place)
    if kind:
        inner = [type_text(item) + _limits(opened(item)) for item in items]
        shown = ", ".join(inner) if kind == "items" else " | ".join(dict.fromkeys(inner))
        return f"{'mapping' if kind == 'mapping' else 'list'} of {shown}"
    return getattr(place.type, "__name__", str(place.type))


def _limits(place: Place) -> str:
    limits = [f"{_SIGNS[name]} {limit}" for name, limit in limits_of(place).items()]
    words = words_of(place)
    return f" ({', '.join([*limits, *([words] if words else [])])})" if limits or words else ""


def default_text(info: FieldInfo) -> str:
    """Return the default as JSON; "its own defaults" for a section, "required" without one."""
    if info.is_required():
        return "required"
    value: Any = info.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return "its own defaults"
    return json.dumps(value, ensure_ascii=False, default=str)


_WORD: Final = re.compile(r'"([^"]*)"|([^".]+)')
_ANY_NAME: Final = "<name>"
_ANY_NUMBER: Final = "<n>"


@dataclass(frozen=True, slots=True)
class _Part:
    """One step of a path: a key, ``<n>`` or ``<name>``, and the kind of the section there."""

    name: str
    kind: str = ""


_Path: TypeAlias = tuple[_Part, ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    """Description of a path.

    Attributes:
        path: the path.
        facts: type, limits and default.
        lines: meaning.
        holds_values: whether it contains values without separate keys.
        is_listed: whether another entry describes it, unless it is requested itself.
    """

    path: _Path
    facts: str
    lines: tuple[str, ...] = ()
    holds_values: bool = False
    is_listed: bool = False


def describe_key(root: type[BaseModel], key: str) -> str:
    """Return a paragraph for a key and for each key below it; identical kinds share one.

    Args:
        root: the class of the whole tree.
        key: as for ``--set``, or as printed by `describe`; item numbers may be omitted.

    Raises:
        ConfigError: the key does not exist; names the nearest.
    """
    words = [quoted or plain for quoted, plain in _WORD.findall(_without_brackets(key))]
    entries = _all_entries(root)
    found = (
        [entry for entry in entries if _is_under(entry.path, words, exact=True)]
        or [entry for entry in entries if _is_under(entry.path, words, exact=False)]
        or [entry for entry in entries if entry.holds_values and _is_value(entry.path, words)]
    )
    found = [entry for entry in found if not entry.is_listed] or found
    if not words or not found:
        raise ConfigError(f"no key '{key}'", fix=_advice(words, entries))
    return "\n".join(_paragraphs(found, words))


def _without_brackets(key: str) -> str:
    return re.sub(r"\(\w+=(\w+)\)", r".\1", key)


# ------------------------------------------------------------------ entries


@cache
def _all_entries(root: type[BaseModel]) -> tuple[_Entry, ...]:
    return tuple(_entries(root, ()))


def _entries(model: type[BaseModel], above: _Path) -> Iterator[_Entry]:
    for name, info in model.model_fields.items():
        path = (*above, _Part(name))
        place = Place.of(info)
        holds_values = any(item_places(option)[0] for option in alternatives(place))
        yield _Entry(path, facts_of(info), _lines(info), holds_values)
        yield from _below(place, path)


def _below(place: Place, path: _Path) -> Iterator[_Entry]:
    key, kinds = kinds_of(place)
    options = [option for option in alternatives(place) if not is_own(option)]
    models = [option.model for option in options if option.model is not None]
    if key:
        meanings = {kind: meaning(model) for kind, model in zip(kinds, models, strict=True)}
        words = " | ".join(json.dumps(kind) for kind in kinds)
        lines = tuple(f"{kind}: {text}" for kind, text in meanings.items())
        yield _Entry((*path, _Part(key)), f"{words}, required", lines)
    for number, model in enumerate(models):
        at = (*path[:-1], _Part(path[-1].name, kinds[number])) if key else path
        if key:
            yield _Entry(at, "section", (meaning(model),))
        for entry in _entries(model, at):
            is_listed = bool(key) and entry.path == (*at, _Part(key))
            yield replace(entry, is_listed=True) if is_listed else entry
    for option in alternatives(place):
        if is_own(option) and option.model is not None:
            yield from _entries(option.model, path)
        kind, items = item_places(option)
        for item in items:
            yield from _below(item, (*path, _Part(_ANY_NAME if kind == "mapping" else _ANY_NUMBER)))


def _lines(info: FieldInfo) -> tuple[str, ...]:
    return (" ".join(info.description.split()),) if info.description else ()


def meaning(model: type[BaseModel]) -> str:
    """Return the first sentence about a kind, from its class or its module."""
    own = (inspect.getdoc(model) or "").partition("\n")[0]
    if own.startswith(("Configuration and rule", "See the module")):
        own = (inspect.getdoc(sys.modules[model.__module__]) or "").partition("\n")[0]
    return own.replace("``", "`")


# ------------------------------------------------------------------ selection


def _is_under(path: Sequence[_Part], words: Sequence[str], *, exact: bool) -> bool:
    """Return whether a path is at or below a key; with ``exact``, mapping names match no word."""
    if not words:
        return True
    if not path:
        return False
    part, word = path[0], words[0]
    is_it = word == part.name
    if part.name == _ANY_NUMBER:
        is_it |= word.isdecimal() or word == "*"
    if part.name == _ANY_NAME:
        is_it |= not exact
    ways = [words[1:]] if is_it else []
    if part.name in (_ANY_NAME, _ANY_NUMBER):
        ways.append(words)  # it may be omitted
    if part.kind:
        ways += [way[1:] for way in ways if way and way[0] == part.kind]
    return any(_is_under(path[1:], way, exact=exact) for way in ways)


def _is_value(path: Sequence[_Part], words: Sequence[str]) -> bool:
    """Return whether all but the last word match exactly, so that the last one is a value."""
    above = _is_under(path[:-1], words[:-1], exact=False)
    return len(words) > 1 and _is_under(path, words[:-1], exact=False) and not above


def _advice(words: Sequence[str], entries: Sequence[_Entry]) -> str:
    spellings = {spelling for entry in entries for spelling in _spellings(entry.path)}
    same_end = [s for s in spellings if words and s.rpartition(".")[2] == words[-1]]
    near = nearest_word(".".join(words), same_end, least=0.3) or nearest_word(
        ".".join(words), spellings
    )
    if near is None:
        return "`geo-ray config schema` lists every key."
    return f"Did you mean `geo-ray config schema {near}`?"


def _spellings(path: _Path) -> Iterator[str]:
    """Return the path with its kinds, and without."""
    named = [part for part in path if part.name not in (_ANY_NAME, _ANY_NUMBER) or part.kind]
    yield ".".join(part.name for part in named)
    yield ".".join(w for part in named for w in (part.name, part.kind) if w)


# ------------------------------------------------------------------ output


def _paragraphs(entries: Sequence[_Entry], words: Sequence[str]) -> Iterator[str]:
    shared: dict[tuple[_Path, str, tuple[str, ...]], list[_Entry]] = {}
    for entry in entries:
        if entry.path[-1].kind and entry.path[-1].kind not in words:
            continue  # the section of one kind is already listed under `kind`
        place = _first_open(entry.path, words)
        path = tuple(
            _Part(part.name, "?") if number == place else part
            for number, part in enumerate(entry.path)
        )
        shared.setdefault((path, entry.facts, entry.lines), []).append(entry)
    for (path, facts, lines), group in shared.items():
        place = _first_open(group[0].path, words)
        kinds = ", ".join(entry.path[place].kind for entry in group) if place is not None else ""
        yield f"{_written(path, kinds)}: {facts}"
        yield from (f"    {line}" for line in lines)


def _first_open(path: _Path, words: Sequence[str]) -> int | None:
    """Return the first part with several kinds of which none was requested."""
    places = (n for n, part in enumerate(path) if part.kind and part.kind not in words)
    return next(places, None)


def _written(path: _Path, kinds: str) -> str:
    return ".".join(
        part.name + (f"(kind={kinds if part.kind == '?' else part.kind})" if part.kind else "")
        for part in path
    )
