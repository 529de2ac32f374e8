"""A node as what can be told to another process: names and plain values, no code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from geo_ray.errors import (
    FrameError,
    GeoRayError,
    NodeUnshippableError,
    ProgramError,
    ProgramLoadError,
    ValueUnshippableError,
)
from geo_ray.program.graph import Program
from geo_ray.program.node import NodeInstance, instance_names
from geo_ray.program.values import pack, unpack
from geo_ray.util.blame import import_advice, summary
from geo_ray.util.user_file import import_file

_IMPORTING: ContextVar[bool] = ContextVar("geo_ray program importing", default=False)
_USER_FILE: Final = "geo_ray_user_"  # modules that `import_file` has made


@dataclass(frozen=True, slots=True)
class ShippedNode:
    """An instance for another process.

    Attributes:
        name: of the instance.
        region: where it runs.
        replica: its number.
        where: the module that has its function, or the path of a file.
        what: the function's name there.
        args: packed.
        calls_at_once: see `NodeGroup`.
        names: of the instances of every node.
    """

    name: str
    region: str
    replica: int
    where: str
    what: str
    args: bytes
    calls_at_once: int
    names: Mapping[str, tuple[str, ...]]

    def plain(self) -> dict[str, Any]:
        """For `pack`."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def of_plain(cls, plain: Any) -> ShippedNode:
        """The inverse of `plain`.

        Raises:
            FrameError: it is none.
        """
        try:
            return cls(**plain)
        except TypeError as error:
            raise FrameError(f"what was to be a node is none: {error}") from error

    def made_by(self) -> Callable[..., object]:
        """The function, found in this process.

        Raises:
            NodeUnshippableError: it is not here.
        """
        try:
            found: Any = _module(self.where)
            for part in self.what.split("."):
                found = getattr(found, part)
        except AttributeError as error:
            raise NodeUnshippableError(
                f"node {self.name!r}: {self.where} has no {self.what} where the node is to run",
                fix="Run the same version of the code everywhere.",
            ) from error
        except GeoRayError as error:
            raise NodeUnshippableError(f"node {self.name!r}: {error.message}") from error
        except Exception as error:
            raise NodeUnshippableError(
                f"node {self.name!r}: importing {self.where} failed: {summary(error)}",
                fix=import_advice(error),
            ) from error
        if not callable(found):
            raise NodeUnshippableError(f"node {self.name!r}: {self.what} is no function")
        made: Callable[..., object] = found
        return made

    def given(self) -> tuple[object, ...]:
        """The arguments."""
        return tuple(unpack(self.args))


def ship(program: Program) -> dict[str, ShippedNode]:
    """All instances, for other processes.

    Raises:
        NodeUnshippableError: one cannot be sent; says which, and why.
    """
    names = {name: instance_names(*both) for name, both in program.nodes.items()}
    return {instance.name: _shipped(instance, names) for instance in program.instances}


def _shipped(instance: NodeInstance, names: Mapping[str, tuple[str, ...]]) -> ShippedNode:
    node = instance.node
    try:
        where, what = _name_of(instance.make)
    except NodeUnshippableError as error:
        raise NodeUnshippableError(f"node {node.name!r}: {error.message}") from None
    try:
        args = pack(node.args)
    except ValueUnshippableError as error:
        raise NodeUnshippableError(
            f"node {node.name!r}: an argument cannot be sent: {error.message}"
        ) from None
    group = instance.group
    return ShippedNode(
        instance.name,
        group.region,
        instance.replica,
        where,
        what,
        args,
        group.calls_at_once,
        names,
    )


def _name_of(make: Any) -> tuple[str, str]:
    what, module = getattr(make, "__qualname__", None), getattr(make, "__module__", None)
    if not isinstance(what, str) or not isinstance(module, str):
        raise NodeUnshippableError(f"{type(make).__name__} is no function or class with a name")
    if "<lambda>" in what:
        raise NodeUnshippableError("a lambda has no name by which another process could find it")
    if "<locals>" in what:
        raise NodeUnshippableError(f"{what} is defined inside a function: only that can find it")
    found: Any = sys.modules.get(module)
    for part in what.split("."):
        found = getattr(found, part, None)
    if found is not make:
        raise NodeUnshippableError(f"{what} of {module} is another one: it was replaced or wrapped")
    file = getattr(sys.modules.get(module), "__file__", None)
    if module != "__main__" and not module.startswith(_USER_FILE):
        return module, what
    if file is None or not Path(file).is_file():
        raise NodeUnshippableError(f"{what} was typed in, and lies in no file")
    return str(Path(file).absolute()), what


def check_not_importing() -> None:
    """Refuse to run a program in the middle of a node's import, which would never end.

    Raises:
        ProgramError: it is one.
    """
    if _IMPORTING.get():
        raise ProgramError(
            "a file runs its program while a node of it is imported",
            fix='Put what runs the program under `if __name__ == "__main__":`.',
        )


def _module(where: str) -> Any:
    token = _IMPORTING.set(True)
    try:
        if where.endswith(".py"):
            return import_file(Path(where), "program", ProgramLoadError)
        return importlib.import_module(where)
    finally:
        _IMPORTING.reset(token)
