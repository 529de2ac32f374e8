"""Classes by name, each in a separate module, imported on first use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TypeVar, cast

T = TypeVar("T")


class Plugins(Mapping[str, T]):
    """Mapping of names to objects such as classes; imports only requested ones.

    Names can be listed and searched without an import. An unknown name raises a `KeyError`, as in
    any mapping; the caller converts it.

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
