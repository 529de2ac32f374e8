"""Values on their way: all that is plain comes back as it was, and nothing is executed."""

from __future__ import annotations

import pickle
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch

from geo_ray.base.errors import FrameError, ValueUnshippableError
from geo_ray.program.graph import NodeHandle
from geo_ray.program.serialization import pack, unpack


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.arange(12.0).reshape(3, 4).T,
        np.zeros((0, 3)),
        np.array(5, dtype=">u4"),
        np.array([True, False]),
        np.array([1 + 2j]),
        np.arange(6.0)[4::4],
    ],
    ids=str,
)
def test_arrays(array: np.ndarray[Any, Any]) -> None:
    found = unpack(pack(array))
    assert type(found) is np.ndarray
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert np.array_equal(found, array)
    found[...] = 0  # it is the receiver's own


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int64", "bool", "complex64", "uint8"])
def test_tensors(kind: str) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(getattr(torch, kind)).T
    found = unpack(pack(tensor))
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)
    assert unpack(pack(tensor[:0])).shape == (0, 2)
    assert torch.equal(unpack(pack(torch.nn.Parameter(torch.ones(2)))), torch.ones(2))


def test_tensors_that_are_views_of_others_or_know_their_past() -> None:
    past = torch.ones(2, requires_grad=True) * 3
    views = [torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag, past, past[0]]
    views += [torch.arange(6.0)[4::4], torch.arange(6.0).reshape(3, 2)[1:2, 1]]
    for tensor in [*views, torch.ones(1).expand(4), torch.tensor([1j], dtype=torch.complex128)]:
        found = unpack(pack(tensor))
        assert torch.equal(found, tensor)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert not found.requires_grad
        found += 1  # it is the receiver's own


def test_scalars_handles_and_keys() -> None:
    value = {1: np.float32(0.5), "h": [NodeHandle("a")], (1, "x"): b"", None: -(2**63)}
    found = unpack(pack(value))
    assert found == value
    assert type(found[1]) is np.float32


class Own(dict[str, int]):
    """Of a user's class, which the receiver may not have."""


@pytest.mark.parametrize(
    "value",
    [
        {1},
        object(),
        [len],
        2**64,
        np.array([object()]),
        np.array(["text"]),
        Own(a=1),
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.nn.Linear(1, 1),
        "\ud800",
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_are_not_plain_are_refused(value: object) -> None:
    with pytest.raises(ValueUnshippableError, match="cannot be sent"):
        pack({"deep": [(value,)]})


def test_a_value_in_itself_is_refused() -> None:
    circle: list[Any] = []
    circle.append((circle,))
    with pytest.raises(ValueUnshippableError):
        pack(circle)


def test_tuples_lie_in_each_other_as_deep_as_a_threads_stack_allows() -> None:
    deep: tuple[Any, ...] = ()
    for _ in range(63):
        deep = (deep, {"x": 1})
    assert unpack(pack(deep)) == deep
    with pytest.raises(ValueUnshippableError, match="more than 64 nested tuples"):
        pack(((deep,),))
    data = pack(1)
    for _ in range(1000):
        data = ext(1, b"\x91" + data)
    with pytest.raises(
        FrameError, match="more than 64 nested tuples"
    ):  # else the process would crash
        unpack(data)


def framed(name: str, shape: list[int], raw: bytes) -> bytes:
    head: bytes = msgpack.packb([name, shape])
    return len(head).to_bytes(2, "big") + head + raw


def ext(code: int, inner: bytes) -> bytes:
    packed: bytes = msgpack.packb(msgpack.ExtType(code, inner))
    return packed


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        pickle.dumps({"a": 1}, protocol=4),
        pack([1, 2])[:-1],
        pack(1) + b"x",
        ext(9, b""),
        ext(1, b"\xff\xff"),
        ext(1, msgpack.packb(7)),
        ext(2, framed("O", [1], b"12345678")),
        ext(2, framed("<f8", [2], b"12345678")),
        ext(2, framed("<f8,", [1], b"12345678")),
        ext(2, framed("<M8[s]", [1], b"12345678")),
        ext(2, msgpack.packb({"a": 1})),
        ext(4, framed("load", [1], b"1234")),
        ext(4, framed("float32", [2], b"1234")),
        ext(4, framed("float32", [-1, 2**40], b"")),
        ext(4, framed("float32", [2**20], b"")),
        ext(5, b"\xff"),
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff1",
        b"\x91" * 5000,
    ],
)
def test_malformed_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        unpack(data)
