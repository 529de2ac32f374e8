"""Strict, frozen configuration models and functions to walk their types.

`StrictModel` rejects unknown keys, and `ProblemsError` reports several errors of a rule between
keys. The other functions list fields, alternatives and nested models of a type, for messages,
overrides and documentation.
"""

from __future__ import annotations

import os
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic.fields import FieldInfo

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class StrictModel(BaseModel):
    """A frozen record whose unknown keys and wrong types are errors.

    Each component's ``Config`` derives from this and is defined next to its owner; nothing else is
    inherited. Trees are read through JSON (`geo_ray.base.load`), where strict mode still accepts a
    list for a tuple and an int for a float. `geo_ray.base.explain` words the errors.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ProblemsError(ValueError):
    """Several problems that one validator has found.

    Attributes:
        texts: a message for each, such as that of a `ValueError`.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__("; ".join(texts))
        self.texts = tuple(texts)


def _value_of(variable: re.Match[str]) -> str:
    return os.environ[variable[1]]


def expanded(path: str) -> str:
    """Replace ``~`` at the start of a path and every ``${VARIABLE}``, as a shell does.

    Args:
        path: a path on this machine, or an address such as ``s3://${BUCKET}/runs``.

    Raises:
        ValueError: a variable is not set, or a user does not exist.
    """
    unset = [name for name in _VARIABLE.findall(path) if name not in os.environ]
    if unset:
        raise ValueError(f"the environment variable {unset[0]} is not set")
    path = _VARIABLE.sub(_value_of, path)
    if not path.startswith("~"):
        return path
    try:
        return str(Path(path).expanduser())
    except RuntimeError as error:
        raise ValueError(f"{path}: {error}") from None


PathText = Annotated[str, AfterValidator(expanded)]
"""A path or address on the machine that reads the configuration."""


Annotation: TypeAlias = Any  # a type as written: int, tuple[X, ...], A | B, Annotated[...]


@dataclass(frozen=True, slots=True)
class MessageWords:
    """Describes the pattern of a text in words.

    Attributes:
        text: continues after "expected".
    """

    text: str


@dataclass(frozen=True, slots=True)
class Also:
    """Another kind of a section, which is replaced before the tree is validated.

    Attributes:
        model: class of the kind.
        why_not: reason why other commands reject it.
    """

    model: type[BaseModel]
    why_not: str

    def __get_pydantic_json_schema__(
        self, schema: Any, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """In the schema for editors it is a kind like the others."""
        written: dict[str, Any] = handler(schema)
        return {"anyOf": [written, self.model.model_json_schema()]}


@dataclass(frozen=True, slots=True)
class Place:
    """A type and its rules.

    Attributes:
        type: the type as written.
        rules: limits, patterns, `MessageWords`, `Also`.
    """

    type: Annotation
    rules: tuple[Any, ...] = ()

    @classmethod
    def of(cls, info: FieldInfo) -> Place:
        """Return the place of a field."""
        return cls(info.annotation, tuple(info.metadata))

    @property
    def model(self) -> type[BaseModel] | None:
        """Class of a section, else None."""
        is_model = isinstance(self.type, type) and issubclass(self.type, BaseModel)
        return self.type if is_model else None

    @property
    def words(self) -> tuple[object, ...]:
        """Values of a Literal, else none."""
        origin: Any = get_origin(self.type)
        return get_args(self.type) if origin is Literal else ()

    @property
    def is_union(self) -> bool:
        """Whether it is a union of types, or null."""
        origin: Any = get_origin(self.type)
        return origin in (Union, types.UnionType)


def opened(place: Place) -> Place:
    """Return the place without ``Annotated`` and aliases, whose rules it gets."""
    if hasattr(place.type, "__value__"):  # a named alias, typing.TypeAliasType from Python 3.12
        return opened(replace(place, type=place.type.__value__))
    origin: Any = get_origin(place.type)
    if origin is not Annotated:
        return place
    inner, *marks = get_args(place.type)
    rules = [mark.metadata if isinstance(mark, FieldInfo) else [mark] for mark in marks]
    own = [rule for several in rules for rule in several]
    return opened(Place(inner, (*place.rules, *own)))


def alternatives(place: Place) -> list[Place]:
    """List the alternatives of a union; another type is its own only alternative.

    ``None`` is omitted; kinds of `Also` come last.
    """
    place = opened(place)
    also = [Place(rule.model) for rule in place.rules if isinstance(rule, Also)]
    rules = tuple(rule for rule in place.rules if not isinstance(rule, Also))
    if place.is_union:
        parts = [Place(part, rules) for part in get_args(place.type)]
        return [one for part in parts for one in alternatives(part)] + also
    return ([] if place.type is types.NoneType else [replace(place, rules=rules)]) + also


def is_optional(place: Place) -> bool:
    """Return whether null is valid."""
    place = opened(place)
    if place.is_union:
        return any(is_optional(Place(part)) for part in get_args(place.type))
    return place.type is types.NoneType


def item_places(place: Place) -> tuple[str, list[Place]]:
    """Return ``("mapping" | "list" | "items" | "", places of the items)`` of a container.

    A list has any number of items of one kind; "items" has one per place.
    """
    origin: Any = get_origin(place.type)
    args = get_args(place.type)
    if not isinstance(origin, type) or not args:
        return "", []
    if issubclass(origin, Mapping):
        return "mapping", [Place(args[1])]
    if issubclass(origin, (list, tuple, set, frozenset)) or origin.__name__ == "Sequence":
        is_fixed = issubclass(origin, tuple) and Ellipsis not in args
        return ("items" if is_fixed else "list"), [Place(a) for a in args if a is not Ellipsis]
    return "", []


@lru_cache(maxsize=1024)
def model_tags(model: type[BaseModel]) -> Mapping[str, str]:
    """Return the fields with a single valid word, such as ``{"kind": "diloco"}``; read only."""
    found = {name: Place.of(info).words for name, info in model.model_fields.items()}
    return {
        name: words[0]
        for name, words in found.items()
        if len(words) == 1 and isinstance(words[0], str)
    }


def is_own(place: Place) -> bool:
    """Return whether it is the section of a custom class, which defines its keys."""
    return place.model is not None and place.model.model_config.get("extra") == "allow"


def kinds_of(place: Place) -> tuple[str, list[str]]:
    """Return the key that selects the kind of a section, and its words; empty without kinds.

    The words are those of the `alternatives` that are not `is_own`, in that order.
    """
    options = [option.model for option in alternatives(place) if not is_own(option)]
    tags = [model_tags(model) for model in options if model is not None]
    shared = set.intersection(*map(set, tags)) if len(tags) == len(options) > 1 else set()
    return next(((key, [tag[key] for tag in tags]) for key in sorted(shared)), ("", []))


def every_field(
    model: type[BaseModel], prefix: str = "", above: tuple[type, ...] = ()
) -> Iterator[tuple[str, FieldInfo]]:
    """Yield each key under ``model`` with its path, sections before their keys.

    In paths ``<name>`` stands for any key of a mapping, ``<n>`` for the number of an item and
    ``(kind=x)`` for "if the key ``kind`` is x". Recursive classes are entered once.
    """
    for name, info in model.model_fields.items():
        yield f"{prefix}{name}", info
        for inner, path in models_under(Place.of(info), f"{prefix}{name}"):
            if inner not in (*above, model):
                yield from every_field(inner, f"{path}.", (*above, model))


def models_under(place: Place, path: str) -> Iterator[tuple[type[BaseModel], str]]:
    """Yield the sections that are valid at a place or in its items, with their paths."""
    options = alternatives(place)
    for option in options:
        model = option.model
        if model is not None:
            tags = ", ".join(f"{key}={tag}" for key, tag in model_tags(model).items())
            has_name = len(options) > 1 and not is_own(option)
            yield model, path + (f"({tags or model.__name__})" if has_name else "")
            continue
        kind, items = item_places(option)
        for item in items:
            yield from models_under(item, f"{path}.{'<name>' if kind == 'mapping' else '<n>'}")


def step(places: list[Place], segment: str | int) -> tuple[list[Place], bool]:
    """Follow one segment of an error's location.

    Returns:
        Valid types there, and whether the segment is a key (a union's tag is not).
    """
    options = [one for place in places for one in alternatives(place)]
    if len(options) > 1:
        chosen = [one for one in options if _has_tag(one, segment)]
        return chosen or options, False
    return below(options, segment), True


def below(options: list[Place], key: str | int) -> list[Place]:
    """Return the valid types of a key in any of the options."""
    found: list[Place] = []
    for option in options:
        if option.model is not None:
            if key in option.model.model_fields:
                found.append(Place.of(option.model.model_fields[str(key)]))
            continue
        kind, items = item_places(option)
        if kind == "items":
            found += [items[min(key, len(items) - 1)]] if isinstance(key, int) else []
        elif kind == "mapping" or isinstance(key, int):
            found += items
    return found


def _has_tag(place: Place, tag: object) -> bool:
    """Return whether a model is the alternative named ``tag`` in a union's error."""
    model = place.model
    return model is not None and (model.__name__ == tag or tag in model_tags(model).values())
