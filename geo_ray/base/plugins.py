"""Classes by name, each in a module of its own, imported when the name is first asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TypeVar, cast

T = TypeVar("T")


class Plugins(Mapping[str, T]):
    """What a name stands for, such as a class; only what is asked for is imported.

    Names can be listed and looked for without an import. An unknown name is a `KeyError`, as in any
    mapping: whoever knows what the names are of says so.

    Args:
        places: ``package.module:Class`` by name.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = dict(places)
        self._loaded: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._loaded:
            module, _, attribute = self._places[name].partition(":")
            self._loaded[name] = cast(T, getattr(import_module(module), attribute))
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
