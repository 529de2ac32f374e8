"""A list of every key of a configuration tree, for people."""

from __future__ import annotations

import json
import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from geo_ray.config.annotations import (
    Annotation,
    alternatives,
    as_model,
    every_field,
    item_types,
)

_LIMITS = {
    "gt": ">",
    "ge": ">=",
    "lt": "<",
    "le": "<=",
    "min_length": "length >=",
    "max_length": "length <=",
}


def describe(root: type[BaseModel]) -> str:
    """Return a paragraph per key: path (see `every_field`), type, limits, default, description."""
    lines = []
    for path, info in every_field(root):
        lines.append(f"{path}: {_type_text(info.annotation)}{_limits(info)}{_default(info)}")
        if info.description:
            lines.append(f"    {' '.join(info.description.split())}")
    return "\n".join(lines)


def _type_text(annotation: Annotation) -> str:
    origin: Any = get_origin(annotation)
    if origin is Literal:
        return " | ".join(json.dumps(word) for word in get_args(annotation))
    options = alternatives(annotation)
    if options != [annotation]:
        words = [_type_text(option) for option in options]
        return " | ".join(dict.fromkeys([*words, *(["null"] if _optional(annotation) else [])]))
    kind, items = item_types(annotation)
    if kind:
        inner = " | ".join(dict.fromkeys(_type_text(item) for item in items))
        return f"{kind} of {inner}"
    return "section" if as_model(annotation) else getattr(annotation, "__name__", str(annotation))


def _optional(annotation: Annotation) -> bool:
    origin: Any = get_origin(annotation)
    return origin in (Union, types.UnionType) and types.NoneType in get_args(annotation)


def _limits(info: FieldInfo) -> str:
    limits = [
        f"{sign} {getattr(rule, name)}"
        for rule in info.metadata
        for name, sign in _LIMITS.items()
        if getattr(rule, name, None) is not None
    ]
    return f" ({', '.join(limits)})" if limits else ""


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return ", required"
    value: Any = info.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return ", default: its own defaults"
    return f", default: {json.dumps(value, ensure_ascii=False, default=str)}"
