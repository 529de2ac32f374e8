"""Serializes messages and nodes of a program as plain values, arrays and tensors.

Decoding never executes code; a node is sent as names and values.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]
import numpy as np

from geo_ray.base.errors import (
    FrameError,
    GeoRayError,
    NodeUnshippableError,
    ProgramError,
    ProgramLoadError,
    ValueUnshippableError,
)
from geo_ray.base.user_code import error_summary, import_advice, import_file
from geo_ray.program.graph import NodeHandle, NodeInstance, Program, instance_names

_TUPLE, _ARRAY, _SCALAR, _TENSOR, _HANDLE = 1, 2, 3, 4, 5
_NUMBERS: Final = "biufc"  # kinds of numeric NumPy types
_TENSOR_TYPES: Final = frozenset(
    [
        *("float64", "float32", "float16", "bfloat16", "complex128", "complex64"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    ]
)
_MOST_BYTES: Final = 2**32 - 1
_HEAD_BYTES: Final = 2  # size of the length of an array's header
_MOST_TUPLES: Final = 64
"""Maximum nesting: msgpack needs 40 kB of the thread's stack per level, and crashes otherwise."""


def pack(value: object) -> bytes:
    """Return the bytes of a value.

    Raises:
        ValueUnshippableError: it, or a part of it, has a type that cannot be sent.
    """
    return _pack(value, 0)


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """Undo `pack`. Executes nothing for any bytes.

    Raises:
        FrameError: they are malformed.
    """
    return _unpack(data, 0)


def _pack(value: object, tuples: int) -> bytes:
    """Pack a value at this depth of tuples."""
    try:
        if tuples > _MOST_TUPLES:
            raise ValueError(f"more than {_MOST_TUPLES} nested tuples")
        packed: bytes = msgpack.packb(
            value, default=partial(_packed, tuples=tuples), strict_types=True
        )
    except (TypeError, OverflowError, ValueError, RuntimeError) as error:
        raise ValueUnshippableError(f"a value cannot be sent: {error}") from error
    return packed


def _unpack(data: bytes | bytearray | memoryview, tuples: int) -> Any:
    """Unpack a value at this depth of tuples."""
    if tuples > _MOST_TUPLES:
        raise FrameError(f"a value has more than {_MOST_TUPLES} nested tuples")
    try:
        return msgpack.unpackb(
            data,
            ext_hook=partial(_unpacked, tuples=tuples),
            strict_map_key=False,
            max_bin_len=_MOST_BYTES,
            max_ext_len=_MOST_BYTES,
        )
    except FrameError:
        raise
    except Exception as error:  # msgpack documents no complete list of its errors
        raise FrameError(f"a value is malformed: {type(error).__name__}: {error}") from error


def _packed(value: object, tuples: int) -> msgpack.ExtType:
    if type(value) is tuple:
        return msgpack.ExtType(_TUPLE, _pack(list(value), tuples + 1))
    if type(value) is NodeHandle:
        return msgpack.ExtType(_HANDLE, value.node.encode())
    if isinstance(value, np.generic) and value.dtype.kind in _NUMBERS:
        return msgpack.ExtType(_SCALAR, _array_bytes(np.asarray(value)))
    if type(value) is np.ndarray and value.dtype.kind in _NUMBERS:
        return msgpack.ExtType(_ARRAY, _array_bytes(value))
    torch = sys.modules.get("torch")  # imported if the value is a tensor
    if torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter):
        return msgpack.ExtType(_TENSOR, _tensor_bytes(torch, value))
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} is not a plain value")


def _unpacked(code: int, data: bytes, tuples: int) -> Any:
    if code == _TUPLE:
        return tuple(_unpack(data, tuples + 1))
    if code == _HANDLE:
        return NodeHandle(data.decode())
    if code in (_ARRAY, _SCALAR):
        array = _array(data)
        return array if code == _ARRAY else array[()]
    if code == _TENSOR:
        return _tensor(data)
    raise FrameError(f"a value has the unknown kind {code}")


def _framed(name: str, shape: Sequence[int], raw: memoryview) -> bytes:
    """Return a header of numbers and their bytes, copied once."""
    head: bytes = msgpack.packb([name, list(shape)])
    return b"".join((len(head).to_bytes(_HEAD_BYTES, "big"), head, raw))


def _parted(data: bytes) -> tuple[str, list[int], memoryview]:
    """The inverse of `_framed`; the data is a view."""
    size = int.from_bytes(data[:_HEAD_BYTES], "big")
    name, shape = msgpack.unpackb(data[_HEAD_BYTES : _HEAD_BYTES + size])
    if not isinstance(name, str) or any(type(n) is not int or n < 0 for n in shape):
        raise FrameError(f"an array of type {name!r:.40} and shape {shape!r:.40}")
    return name, shape, memoryview(data)[_HEAD_BYTES + size :]


def _array_bytes(array: np.ndarray[Any, Any]) -> bytes:
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return _framed(array.dtype.str, array.shape, raw)


def _array(data: bytes) -> np.ndarray[Any, Any]:
    name, shape, raw = _parted(data)
    kind = np.dtype(name)
    if kind.kind not in _NUMBERS:
        raise FrameError(f"an array of {name!r:.40}, which is not numeric")
    # A copy: the receiving node may write to it.
    return np.frombuffer(raw, kind).reshape(shape).copy()


def _tensor_bytes(torch: Any, tensor: Any) -> bytes:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _TENSOR_TYPES or tensor.layout is not torch.strided:
        raise TypeError(f"a tensor of {tensor.dtype} and {tensor.layout}")
    # A conjugate or negative view has the data of another tensor, and a flag.
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = plain.reshape(-1).as_strided((plain.numel(),), (1,))  # a scalar may have any stride
    return _framed(name, plain.shape, flat.view(torch.uint8).numpy().data)


def _tensor(data: bytes) -> Any:
    import torch

    name, shape, raw = _parted(data)
    if name not in _TENSOR_TYPES:
        raise FrameError(f"a tensor of {name!r:.40}")
    kind = getattr(torch, name)
    if not raw:
        return torch.empty(0, dtype=kind).reshape(shape)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(kind).reshape(shape)


_IMPORTING: ContextVar[bool] = ContextVar("geo_ray program importing", default=False)
_USER_FILE: Final = "geo_ray_user_"  # prefix of modules created by `import_file`


@dataclass(frozen=True, slots=True)
class SerializedNode:
    """An instance, serialized for another process.

    Attributes:
        name: name of the instance.
        region: where it runs.
        replica: its number.
        where: module of its factory, or the path of a file.
        what: name of the factory there.
        args: packed arguments.
        calls_at_once: see `NodeGroup`.
        names: names of the instances of every node.
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
        """Return plain values for `pack`."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def of_plain(cls, plain: Any) -> SerializedNode:
        """The inverse of `plain`.

        Raises:
            FrameError: the value is invalid.
        """
        try:
            return cls(**plain)
        except TypeError as error:
            raise FrameError(f"not a serialized node: {error}") from error

    def made_by(self) -> Callable[..., object]:
        """Find the factory in this process.

        Raises:
            NodeUnshippableError: it is not in this process.
        """
        try:
            found: Any = _module(self.where)
            for part in self.what.split("."):
                found = getattr(found, part)
        except AttributeError as error:
            raise NodeUnshippableError(
                f"node {self.name!r}: {self.where} has no {self.what} in the node's process",
                fix="Run the same version of the code everywhere.",
            ) from error
        except GeoRayError as error:
            raise NodeUnshippableError(f"node {self.name!r}: {error.message}") from error
        except Exception as error:
            raise NodeUnshippableError(
                f"node {self.name!r}: importing {self.where} failed: {error_summary(error)}",
                fix=import_advice(error),
            ) from error
        if not callable(found):
            raise NodeUnshippableError(f"node {self.name!r}: {self.what} is not callable")
        made: Callable[..., object] = found
        return made

    def given(self) -> tuple[object, ...]:
        """Return the arguments."""
        return tuple(unpack(self.args))


def serialize_nodes(program: Program) -> dict[str, SerializedNode]:
    """Serialize all instances for other processes.

    Raises:
        NodeUnshippableError: one cannot be sent; the message names it and the reason.
    """
    names = {name: instance_names(*both) for name, both in program.nodes.items()}
    return {instance.name: _serialized(instance, names) for instance in program.instances}


def _serialized(instance: NodeInstance, names: Mapping[str, tuple[str, ...]]) -> SerializedNode:
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
    return SerializedNode(
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
        raise NodeUnshippableError(f"{type(make).__name__} is not a named function or class")
    if "<lambda>" in what:
        raise NodeUnshippableError("a lambda cannot be imported by name in another process")
    if "<locals>" in what:
        raise NodeUnshippableError(f"{what} is defined inside a function: it cannot be imported")
    found: Any = sys.modules.get(module)
    for part in what.split("."):
        found = getattr(found, part, None)
    if found is not make:
        raise NodeUnshippableError(
            f"{what} of {module} is not that object: it was replaced or wrapped"
        )
    file = getattr(sys.modules.get(module), "__file__", None)
    if module != "__main__" and not module.startswith(_USER_FILE):
        return module, what
    if file is None or not Path(file).is_file():
        raise NodeUnshippableError(f"{what} is not defined in a file")
    return str(Path(file).absolute()), what


def check_not_importing() -> None:
    """Refuse to run a program during a node's import, which would never end.

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
