"""A list of every key of a configuration tree, for people."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from geo_ray.config.annotations import (
    Annotation,
    alternatives,
    as_model,
    item_types,
    model_tags,
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
    """Return one paragraph per key: dotted path, type with limits, default, description.

    ``<name>`` in a path stands for any key of a mapping, ``<n>`` for the number of an item, and
    ``(kind=x)`` for "if the key ``kind`` is x".
    """
    return "\n".join(_lines(root, "", (root,)))


def _lines(model: type[BaseModel], prefix: str, above: tuple[type, ...]) -> Iterator[str]:
    for name, info in model.model_fields.items():
        path = f"{prefix}{name}"
        yield f"{path}: {_type_text(info.annotation)}{_limits(info)}{_default(info)}"
        if info.description:
            yield f"    {' '.join(info.description.split())}"
        for inner, below in _models_under(info.annotation, path):
            if inner not in above:
                yield from _lines(inner, below + ".", (*above, inner))


def _models_under(annotation: Annotation, path: str) -> Iterator[tuple[type[BaseModel], str]]:
    options = alternatives(annotation)
    for option in options:
        model = as_model(option)
        if model is not None:
            tags = ", ".join(f"{key}={tag}" for key, tag in model_tags(model).items())
            yield model, path + (f"({tags or model.__name__})" if len(options) > 1 else "")
            continue
        kind, items = item_types(option)
        for item in items:
            yield from _models_under(item, f"{path}.{'<name>' if kind == 'mapping' else '<n>'}")


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
