"""What may stand at a place of a configuration, in plain words; and what was probably meant."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import date, datetime
from typing import Annotated, Any, Final

from pydantic import AwareDatetime, TypeAdapter, ValidationError

from geo_ray.config.annotations import (
    MessageWords,
    Place,
    alternatives,
    is_optional,
    item_places,
    kinds_of,
)
from geo_ray.config.canonical import JSONValue
from geo_ray.util.nearest import nearest

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
    """Say what may stand there, for a sentence such as "expected a whole number of at least 1"."""
    key, words = kinds_of(place)
    if key:
        text = f"a section whose {key} is one of {', '.join(words)}"
    else:
        text = " or ".join(dict.fromkeys(_one(option) for option in alternatives(place)))
    if not is_optional(place):
        return text
    return f"{text}, or null" if "," in text or " list" in text else f"{text} or null"


def listed(words: Sequence[object]) -> str:
    """Write the values of a Literal: ``one of a, b, c``."""
    shown = [word if isinstance(word, str) else json.dumps(word) for word in words]
    return f"one of {', '.join(shown)}" if len(shown) > 1 else shown[0]


def limits_of(place: Place) -> dict[str, Any]:
    """The limits of a value by pydantic's name for them, such as ``{"ge": 1}``."""
    names = ("gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length")
    found = [(name, getattr(rule, name, None)) for rule in place.rules for name in names]
    return {name: limit for name, limit in found if limit is not None}


def words_of(place: Place) -> str:
    """What the pattern of a text asks for; empty if it has none."""
    return next((rule.text for rule in place.rules if isinstance(rule, MessageWords)), "")


def meant(value: JSONValue, place: Place) -> str | None:
    """Write the valid value that was probably meant as YAML; None if none is near.

    Args:
        value: what stands there.
        place: where.
    """
    if isinstance(value, (int, float)) and not abs(value) < _HUGE:
        return None  # NaN too
    words = [word for option in alternatives(place) for word in option.words]
    if isinstance(value, str) and words:
        return nearest(value, [word for word in words if isinstance(word, str)])
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
    elif not isinstance(value, (list, dict)) and value is not None:
        yield json.dumps(value)
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
