"""Parts of a checkpoint: the tensors and JSON state of one process in one safetensors file.

A file is: header length (8 bytes, little-endian), header (JSON), raw little-endian tensors. The
header is canonical, and checked against limits before anything is decoded.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from geo_ray.base.canonical import JSONObject, canonical_json
from geo_ray.base.errors import CheckpointCorruptError, CheckpointError
from geo_ray.base.files import Failpoint, no_failpoint
from geo_ray.storage.folders import LocalFolder, PartSource, PartTarget
from geo_ray.storage.manifest import MANIFEST_FILE, PART_SUFFIX, PartInfo

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
    """Header entry of a tensor."""

    @property
    def shape(self) -> torch.Size:
        """Its axes."""

    @property
    def dtype(self) -> torch.dtype:
        """Its type."""

    def numel(self) -> int:
        """Its elements."""

    def element_size(self) -> int:
        """Bytes of one element."""


DescribedT = TypeVar("DescribedT", bound=Described)


def aligned(tensors: Mapping[str, DescribedT]) -> dict[str, DescribedT]:
    """Return the tensors with the largest elements first, which keeps all of them aligned."""
    order = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    return {key: tensors[key] for key in order}


def encode_header(tensors: Mapping[str, Described], metadata: Mapping[str, str]) -> bytes:
    """Return the header, length included, of tensors that follow in the mapping's order.

    Raises:
        CheckpointError: tensors or metadata exceed the limits of `check_header`.
    """
    tree: JSONObject = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _CODES:
            raise CheckpointError(f"tensor {name!r} has type {tensor.dtype}, which cannot be saved")
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
        start: first byte, counted after the header.
        stop: the byte after its last.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def header_bytes(start: bytes) -> int:
    """Return the size of a header including its length field, from a file's first 8 bytes.

    Raises:
        CheckpointCorruptError: the size is invalid.
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
        Its metadata, and its tensors in their order in the file.

    Raises:
        CheckpointCorruptError: names the violated rule. No tensor was decoded.
    """
    end = header_bytes(bytes(data[:LENGTH_BYTES]))
    if end > len(data):
        raise CheckpointCorruptError("the header's length is wrong")
    try:
        tree = json.loads(bytes(data[LENGTH_BYTES:end]))
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError("the header is not JSON") from error
    if not isinstance(tree, dict) or len(tree) > MAX_TENSORS + 1:
        raise CheckpointCorruptError(f"the header is not a table of at most {MAX_TENSORS} tensors")
    metadata = tree.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointCorruptError("the header has no metadata")
    found = [_entry(name, entry) for name, entry in tree.items()]
    found.sort(key=attrgetter("start", "stop"))
    position = 0
    for each in found:
        if each.start != position:
            raise CheckpointCorruptError("tensors overlap or leave a gap")
        position = each.stop
    if end + position != file_bytes:
        raise CheckpointCorruptError("the tensors do not end at the end of the file")
    return metadata, found


def _entry(name: str, entry: Any) -> Entry:
    """Return the entry of a tensor, if it is valid."""
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
    """Return whether ``value`` is a short list of valid sizes."""
    return (
        isinstance(value, list)
        and len(value) <= max_length
        and all(type(item) is int and 0 <= item < 2**62 for item in value)
    )


_FORMAT = "geo_ray part 1"
_BLOCK_BYTES = 1 << 22


class InPieces(Described, Protocol):
    """A tensor that is provided in pieces."""

    def pieces(self) -> Iterator[Tensor]:
        """Yield its flat content on the CPU; a piece is valid until the next is requested."""


def write_part(
    place: Path | PartTarget,
    name: str,
    tensors: Mapping[str, Tensor | InPieces],
    meta: JSONObject,
    failpoint: Failpoint = no_failpoint,
) -> PartInfo:
    """Write one process's part of a checkpoint; it becomes valid with a manifest that lists it.

    The bytes depend only on the arguments. Tensors on the CPU are written without a copy; each
    piece is checked, hashed and written at once.

    Args:
        place: result of `CheckpointStore.begin`, or a directory.
        name: letters, digits, ``_ . -``; unique in the checkpoint, such as ``eu-west-ps0``.
        tensors: by name; any shape, on any device; the types of `header.DTYPES`.
        meta: plain JSON, such as ledgers.
        failpoint: for tests.

    Raises:
        CheckpointError: a name, type or size is not allowed, or the checkpoint is committed.
        CheckpointConflictError: a store has such a part of another writer.
        RunDirectoryError, StoreError: the part cannot be written.
    """
    folder: PartTarget = LocalFolder(place) if isinstance(place, Path) else place
    file = name + PART_SUFFIX
    if folder.has(MANIFEST_FILE):
        late = f"committed already; part {name!r} is too late"
        raise CheckpointError(f"{folder.name_of(MANIFEST_FILE)}: {late}")
    try:
        PartInfo(name=name, file=file, bytes=0, sha256="0" * 64)
        metadata = {"format": _FORMAT, "meta": canonical_json(meta).decode(), "part": name}
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"part {name!r} cannot be saved: {error}") from error
    ordered = aligned(tensors)
    header = encode_header(ordered, metadata)
    digest, num_bytes, finite = hashlib.sha256(header), len(header), True

    def chunks() -> Iterator[memoryview]:
        nonlocal num_bytes, finite
        yield memoryview(header)
        for tensor in ordered.values():
            for piece in _pieces(tensor):
                finite = finite and _is_finite(piece)
                chunk = piece.view(torch.uint8).numpy().data
                digest.update(chunk)
                num_bytes += chunk.nbytes
                yield chunk

    whole = num_bytes + sum(each.numel() * each.element_size() for each in ordered.values())
    folder.write(file, chunks(), whole, lambda step: failpoint(f"part.{step}"))
    return PartInfo(name=name, file=file, bytes=num_bytes, sha256=digest.hexdigest(), finite=finite)


def read_part(
    place: Path | PartSource, info: PartInfo, wanted: Collection[str] | None = None
) -> tuple[dict[str, Tensor], JSONObject]:
    """Read a part listed in a manifest; returns nothing unless size and SHA-256 match.

    The header, with the positions of tensors, is parsed before the SHA-256 is known. Each tensor is
    read to its final memory and hashed on the way, so no byte is held twice.

    Args:
        place: a directory or folder.
        info: the part.
        wanted: names of the tensors to return; others are only hashed. None: all.

    Returns:
        Tensors on the CPU by name, and the JSON; owned by the caller.

    Raises:
        CheckpointCorruptError: the file is missing or differs from ``info``.
        StoreError: a store does not answer or refuses.
    """
    folder = _folder(place)
    with _naming(folder.name_of(info.file)):
        with folder.open(info.file, info.bytes) as file:
            tensors, metadata, digest = _read_all(file, info.bytes, wanted)
        if digest != info.sha256:
            raise CheckpointCorruptError("its SHA-256 differs from the manifest")
        return tensors, _meta_of(metadata, info)


def read_meta(place: Path | PartSource, info: PartInfo) -> JSONObject:
    """Read only the JSON of a verified part; its SHA-256 is not checked.

    Raises:
        CheckpointCorruptError: the file is missing, of another size, or its header is invalid.
        StoreError: a store does not answer or refuses.
    """
    folder = _folder(place)
    with _naming(folder.name_of(info.file)):
        with folder.open(info.file, info.bytes) as file:
            metadata, _ = _read_header(_Filling(file), info.bytes)
        return _meta_of(metadata, info)


def _folder(place: Path | PartSource) -> PartSource:
    return LocalFolder(place) if isinstance(place, Path) else place


def _read_all(
    file: io.RawIOBase, file_bytes: int, wanted: Collection[str] | None
) -> tuple[dict[str, Tensor], dict[str, str], str]:
    """Read tensors by name, metadata and SHA-256 of an open part, in one pass.

    Raises:
        CheckpointCorruptError: its header is invalid, or the file ends early.
    """
    source = _Filling(file)
    metadata, entries = _read_header(source, file_bytes)
    tensors: dict[str, Tensor] = {}
    for entry in entries:
        if wanted is not None and entry.name not in wanted:
            source.skip(entry.stop - entry.start)
            continue
        tensors[entry.name] = tensor = torch.empty(entry.shape, dtype=entry.dtype)
        source.fill(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return tensors, metadata, source.digest.hexdigest()


class _Filling:
    """Reads an open part in order, and hashes it on the way."""

    def __init__(self, file: io.RawIOBase) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def fill(self, rest: memoryview) -> None:
        while rest:
            size = self._file.readinto(rest[:_BLOCK_BYTES])
            if not size:
                raise CheckpointCorruptError("it ends early")
            self.digest.update(rest[:size])
            rest = rest[size:]

    def skip(self, num_bytes: int) -> None:
        scratch = memoryview(bytearray(min(num_bytes, _BLOCK_BYTES)))
        while num_bytes:
            self.fill(scratch[:num_bytes])
            num_bytes -= min(num_bytes, len(scratch))

    def take(self, num_bytes: int) -> bytes:
        buffer = bytearray(num_bytes)
        self.fill(memoryview(buffer))
        return bytes(buffer)


def _read_header(source: _Filling, file_bytes: int) -> tuple[dict[str, str], list[Entry]]:
    start = source.take(min(LENGTH_BYTES, file_bytes))
    header = start + source.take(min(header_bytes(start), file_bytes) - LENGTH_BYTES)
    return check_header(memoryview(header), file_bytes)


def _meta_of(metadata: Mapping[str, str], info: PartInfo) -> JSONObject:
    if (metadata.get("format"), metadata.get("part")) != (_FORMAT, info.name):
        raise CheckpointCorruptError(f"not part {info.name!r} of this format")
    meta = json.loads(metadata["meta"])
    if not isinstance(meta, dict):
        raise CheckpointCorruptError("its JSON is not an object")
    return meta


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Add the name of the part to errors."""
    try:
        yield
    except OSError as error:
        raise _corrupt(name, f"cannot be read: {error.strerror}") from error
    except CheckpointCorruptError as error:
        raise _corrupt(name, error.message) from error
    except (ValueError, KeyError, RecursionError) as error:
        raise _corrupt(name, f"not decodable: {error}") from error


def _pieces(tensor: Tensor | InPieces) -> Iterator[Tensor]:
    """Yield the flat elements of a tensor; views if it is contiguous on the CPU."""
    if not isinstance(tensor, Tensor):
        yield from tensor.pieces()
        return
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    yield from torch.split(flat, max(1, _BLOCK_BYTES // flat.element_size()))


def _corrupt(name: str, what: str) -> CheckpointCorruptError:
    # Errors of a folder name the file already.
    return CheckpointCorruptError(what if what.startswith(name) else f"{name}: {what}")


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))
