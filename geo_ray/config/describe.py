"""A list of every key of a configuration tree, for people."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from geo_ray.config.annotations import (
    Place,
    alternatives,
    every_field,
    is_optional,
    item_places,
    opened,
)
from geo_ray.config.words import limits_of, words_of

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
    """The lines about one key."""
    yield f"{path}: {facts_of(info)}"
    if info.description:
        yield f"    {' '.join(info.description.split())}"


def facts_of(info: FieldInfo) -> str:
    """Type, limits and default of a key."""
    place = Place.of(info)
    return f"{type_text(place)}{_limits(place)}{_default(info)}"


def type_text(place: Place) -> str:
    """The type of a key: ``int``, ``list of float (> 0)``, ``"sum" | "mean"``, ``section``."""
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


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return ", required"
    value: Any = info.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return ", default: its own defaults"
    return f", default: {json.dumps(value, ensure_ascii=False, default=str)}"
