"""One part of a checkpoint: the tensors of one process and its JSON, in one safetensors file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from geo_ray.checkpoint.header import Described, check_header, encode_header
from geo_ray.checkpoint.manifest import MANIFEST_FILE, PART_SUFFIX, PartInfo
from geo_ray.config.canonical import JSONObject, canonical_json
from geo_ray.errors import CheckpointCorruptError, CheckpointError
from geo_ray.util.atomic_file import Failpoint, no_failpoint, save_chunks

_FORMAT = "geo_ray part 1"
_BLOCK_BYTES = 1 << 22


class InPieces(Described, Protocol):
    """A tensor that is not there as a whole."""

    def pieces(self) -> Iterator[Tensor]:
        """Its content in order, flat, on the CPU; a piece is valid until the next is asked for."""


def write_part(
    directory: Path,
    name: str,
    tensors: Mapping[str, Tensor | InPieces],
    meta: JSONObject,
    failpoint: Failpoint = no_failpoint,
) -> PartInfo:
    """Write one process's share of a checkpoint; it counts once a manifest names it.

    The bytes depend on the arguments alone. Tensors are written from where they lie, so no second
    copy is made of those on the CPU; each piece is checked, hashed and written at once.

    Args:
        directory: what `CheckpointStore.begin` returned.
        name: letters, digits, ``_ . -``; unique in the checkpoint, such as ``server-eu-0``.
        tensors: by name; any shape, on any device; the types of `header.DTYPES`.
        meta: plain JSON, such as the books.
        failpoint: for tests.

    Raises:
        CheckpointError: if a name, type or size is not allowed, or the checkpoint is committed.
        RunDirectoryError: if the disk is full or the directory cannot be written.
    """
    file = name + PART_SUFFIX
    if (directory / MANIFEST_FILE).exists():
        raise CheckpointError(f"{directory}: committed already; part {name!r} comes too late")
    try:
        PartInfo(name=name, file=file, bytes=0, sha256="0" * 64)
        metadata = {"format": _FORMAT, "meta": canonical_json(meta).decode(), "part": name}
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"part {name!r} cannot be saved: {error}") from error
    # Largest element first keeps every tensor aligned.
    order = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    ordered = {key: tensors[key] for key in order}
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

    save_chunks(directory / file, chunks(), lambda step: failpoint(f"part.{step}"))
    return PartInfo(name=name, file=file, bytes=num_bytes, sha256=digest.hexdigest(), finite=finite)


def read_part(directory: Path, info: PartInfo) -> tuple[dict[str, Tensor], JSONObject]:
    """Read a part that a manifest names: size, SHA-256 and header first, tensors only then.

    Returns:
        Tensors on the CPU, by name, and the JSON.

    Raises:
        CheckpointCorruptError: if the file is missing or not what ``info`` says.
    """
    path = directory / info.file
    _check_size(path, info)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _corrupt(path, f"cannot be read: {error.strerror}") from error
    if hashlib.sha256(data).hexdigest() != info.sha256:
        raise _corrupt(path, "its SHA-256 is not that of the manifest")
    try:
        metadata = check_header(memoryview(data), len(data))
        if (metadata.get("format"), metadata.get("part")) != (_FORMAT, info.name):
            raise _corrupt(path, f"it is not part {info.name!r} of this format")
        meta = json.loads(metadata["meta"])
        tensors = safetensors.torch.load(data)
    except CheckpointCorruptError as error:
        raise _corrupt(path, error.message) from error
    except (SafetensorError, ValueError, KeyError, RecursionError) as error:
        raise _corrupt(path, f"not decodable: {error}") from error
    if not isinstance(meta, dict):
        raise _corrupt(path, "its JSON is no object")
    return tensors, meta


def verify_part(directory: Path, info: PartInfo) -> None:
    """Check size and SHA-256 of a part's file without keeping it in memory.

    Raises:
        CheckpointCorruptError: if the file is missing or not what ``info`` says.
    """
    path = directory / info.file
    _check_size(path, info)
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        raise _corrupt(path, f"cannot be read: {error.strerror}") from error
    if digest.hexdigest() != info.sha256:
        raise _corrupt(path, "its SHA-256 is not that of the manifest")


def _pieces(tensor: Tensor | InPieces) -> Iterator[Tensor]:
    """Yield the elements of a tensor, flat; views of it where it is contiguous on the CPU."""
    if not isinstance(tensor, Tensor):
        yield from tensor.pieces()
        return
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    yield from torch.split(flat, max(1, _BLOCK_BYTES // flat.element_size()))


def _check_size(path: Path, info: PartInfo) -> None:
    try:
        status = path.lstat()
    except OSError as error:
        raise _corrupt(path, f"cannot be read: {error.strerror}") from error
    if not path.is_file() or path.is_symlink():
        raise _corrupt(path, "it is no plain file")
    if status.st_size != info.bytes:
        raise _corrupt(path, f"{status.st_size} bytes long; the manifest says {info.bytes}")


def _corrupt(path: Path, what: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(f"{path}: {what}")


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))
