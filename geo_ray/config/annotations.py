"""Walk the types of a configuration tree: what may stand at a key, and what lies under it."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Annotation: TypeAlias = Any  # a type as written: int, tuple[X, ...], A | B, Annotated[...]


def alternatives(annotation: Annotation) -> list[Annotation]:
    """List what a union may be; a type that is no union is its own only alternative.

    ``Annotated`` and named aliases are opened, ``None`` is left out.
    """
    if hasattr(annotation, "__value__"):  # a named alias, typing.TypeAliasType from Python 3.12
        return alternatives(annotation.__value__)
    origin: Any = get_origin(annotation)
    if origin is Annotated:
        return alternatives(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [one for part in get_args(annotation) for one in alternatives(part)]
    return [] if annotation is types.NoneType else [annotation]


def as_model(annotation: Annotation) -> type[BaseModel] | None:
    """Return ``annotation`` if it is a model class."""
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_model else None


def item_types(annotation: Annotation) -> tuple[str, list[Annotation]]:
    """Return ``("mapping" | "list" | "", types of the items)`` of a container type."""
    origin: Any = get_origin(annotation)
    args = get_args(annotation)
    if not isinstance(origin, type) or not args:
        return "", []
    if issubclass(origin, Mapping):
        return "mapping", [args[1]]
    if issubclass(origin, (list, tuple, set, frozenset)) or origin.__name__ == "Sequence":
        return "list", [arg for arg in args if arg is not Ellipsis]
    return "", []


def has_tag(annotation: Annotation, tag: object) -> bool:
    """Say whether a model is the alternative that a union's error calls ``tag``."""
    model = as_model(annotation)
    if model is None:
        return False
    return model.__name__ == tag or tag in model_tags(model).values()


def model_tags(model: type[BaseModel]) -> dict[str, str]:
    """Return the fields that may hold one word only, such as ``{"kind": "diloco"}``."""
    tags = {}
    for name, info in model.model_fields.items():
        origin: Any = get_origin(info.annotation)
        words = get_args(info.annotation) if origin is Literal else ()
        if len(words) == 1 and isinstance(words[0], str):
            tags[name] = words[0]
    return tags


def every_field(
    model: type[BaseModel], prefix: str = "", above: tuple[type, ...] = ()
) -> Iterator[tuple[str, FieldInfo]]:
    """Yield each key under ``model`` with its path, sections before their keys.

    In paths ``<name>`` stands for any key of a mapping, ``<n>`` for the number of an item and
    ``(kind=x)`` for "if the key ``kind`` is x". A class inside itself is not entered again.
    """
    for name, info in model.model_fields.items():
        yield f"{prefix}{name}", info
        for inner, path in _models_under(info.annotation, f"{prefix}{name}"):
            if inner not in (*above, model):
                yield from every_field(inner, f"{path}.", (*above, model))


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


def step(places: list[Annotation], segment: str | int) -> tuple[list[Annotation], bool]:
    """Go one segment of an error's location further.

    Returns:
        What may stand there, and whether the segment is a key (a union's tag is none).
    """
    options = [one for place in places for one in alternatives(place)]
    if len(options) > 1:
        chosen = [one for one in options if has_tag(one, segment)]
        return chosen or options, False
    found: list[Annotation] = []
    for option in options:
        model = as_model(option)
        if model is not None:
            if segment in model.model_fields:
                found.append(model.model_fields[str(segment)].annotation)
            continue
        kind, items = item_types(option)
        if kind == "list" and isinstance(segment, int) and len(items) > 1:
            found.append(items[min(segment, len(items) - 1)])
        else:
            found.extend(items)
    return found, True
