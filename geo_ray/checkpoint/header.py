"""The safetensors header: written canonically, read with limits before anything is decoded.

A file is: header length (8 bytes, little endian), header (JSON), raw little-endian tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from geo_ray.config.canonical import JSONObject, canonical_json
from geo_ray.errors import CheckpointCorruptError, CheckpointError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 16_000_000
MAX_TENSORS = 10_000
MAX_AXES = 8
MAX_NAME_LENGTH = 256
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_ALIGNMENT = 8


class Described(Protocol):
    """What a header says of a tensor."""

    @property
    def shape(self) -> torch.Size:
        """Its axes."""

    @property
    def dtype(self) -> torch.dtype:
        """Its type."""

    def numel(self) -> int:
        """Its elements."""

    def element_size(self) -> int:
        """Bytes of one."""


def encode_header(tensors: Mapping[str, Described], metadata: Mapping[str, str]) -> bytes:
    """Return the header, length included, of tensors that follow in the mapping's order.

    Raises:
        CheckpointError: for tensors or metadata beyond the limits of `check_header`.
    """
    tree: JSONObject = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _CODES:
            raise CheckpointError(f"tensor {name!r} has type {tensor.dtype}, which is not saved")
        start, end = end, end + tensor.numel() * tensor.element_size()
        tree[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = canonical_json(tree)
    text += b" " * (-len(text) % _ALIGNMENT)
    data = len(text).to_bytes(8, "little") + text
    try:
        check_header(memoryview(data), len(data) + end)
    except CheckpointCorruptError as error:
        raise CheckpointError(f"cannot be saved: {error.message}") from error
    return data


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file.

    Attributes:
        name: its name.
        dtype: its type.
        shape: its axes.
        start: where it begins, in bytes after the header.
        stop: where it ends.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def header_bytes(start: bytes) -> int:
    """Size of a header with the length before it, from a file's first 8 bytes.

    Raises:
        CheckpointCorruptError: it cannot be.
    """
    size = int.from_bytes(start, "little")
    if len(start) < LENGTH_BYTES or size > MAX_HEADER_BYTES:
        raise CheckpointCorruptError("the header's length is wrong")
    return LENGTH_BYTES + size


def check_header(data: memoryview, file_bytes: int) -> tuple[dict[str, str], list[Entry]]:
    """Check the start of a file against every limit.

    Args:
        data: the file, or at least its header.
        file_bytes: size of the whole file.

    Returns:
        Its metadata, and its tensors in the order in which they lie there.

    Raises:
        CheckpointCorruptError: saying which rule is broken. No tensor was decoded.
    """
    end = header_bytes(bytes(data[:LENGTH_BYTES]))
    if end > len(data):
        raise CheckpointCorruptError("the header's length is wrong")
    try:
        tree = json.loads(bytes(data[LENGTH_BYTES:end]))
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError("the header is no JSON") from error
    if not isinstance(tree, dict) or len(tree) > MAX_TENSORS + 1:
        raise CheckpointCorruptError(f"the header is no table of at most {MAX_TENSORS} tensors")
    metadata = tree.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointCorruptError("the header has no metadata")
    found = [_entry(name, entry) for name, entry in tree.items()]
    found.sort(key=lambda each: (each.start, each.stop))
    position = 0
    for each in found:
        if each.start != position:
            raise CheckpointCorruptError("tensors overlap or leave a gap")
        position = each.stop
    if end + position != file_bytes:
        raise CheckpointCorruptError("the tensors do not end where the file does")
    return metadata, found


def _entry(name: str, entry: Any) -> Entry:
    """Return what is said of a tensor, if that is sound."""
    broken = CheckpointCorruptError(f"the entry of tensor {name[:60]!r} is not valid")
    if len(name) > MAX_NAME_LENGTH or not isinstance(entry, dict) or len(entry) != 3:
        raise broken
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry.get("dtype"), str) else None
    if dtype is None or not _sizes(shape, MAX_AXES) or not _sizes(offsets, 2) or len(offsets) != 2:
        raise broken
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise broken
    return Entry(name, dtype, tuple(shape), offsets[0], offsets[1])


def _sizes(value: Any, max_length: int) -> bool:
    """Say whether ``value`` is a short list of sizes, none of them negative or absurd."""
    return (
        isinstance(value, list)
        and len(value) <= max_length
        and all(type(item) is int and 0 <= item < 2**62 for item in value)
    )
