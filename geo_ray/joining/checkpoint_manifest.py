"""The manifest of a checkpoint of ranks: what it contains, and where.

Every rank reports its part as a `PartRecord`. `combine` checks that the parts are one state, and
returns the `RankManifest`, which is written last. Tensors are in the files of the ranks; all other
values are in the manifest (`encode_value`).
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final, Literal, Self, TypeAlias

import torch
from pydantic import Field, JsonValue, ValidationError
from torch import Tensor

from geo_ray.base.canonical import JSONObject, JSONValue, canonical_json
from geo_ray.base.errors import CheckpointCorruptError, CheckpointError, CheckpointMissingError
from geo_ray.base.load import complaints
from geo_ray.base.model import StrictModel
from geo_ray.storage import parts
from geo_ray.storage.folders import Folder
from geo_ray.storage.manifest import MANIFEST_FILE, PartInfo, unseal
from geo_ray.storage.places import folder_at

FORMAT: Final = "geo_ray ranks 1"
MAX_MANIFEST_BYTES: Final = 1 << 28
DAMAGED_FIX: Final = "Load an older checkpoint, or restore the file from a backup."
_TORCH_FILE: Final = ".metadata"
_BLOCK_BYTES: Final = 1 << 20
_NOT_COMMITTED: Final = "The checkpoint is not committed; the one before it is unchanged."
_UNKNOWN_TYPE: Final = (
    "Save what it consists of (numbers, text, lists, dicts, tensors), for example by a "
    "`state_dict` method, or leave it out."
)

KeyPath: TypeAlias = tuple[str | int, ...]
Place: TypeAlias = str | os.PathLike[str] | Folder
"""A directory, an address such as ``s3://bucket/prefix``, or a folder."""


def folder_of(place: Place) -> Folder:
    """Return the folder at a place.

    Raises:
        StoreError: the address is invalid.
    """
    return folder_at(os.fspath(place)) if isinstance(place, str | os.PathLike) else place


# ------------------------------------------------------------------ records


class TensorChunk(StrictModel):
    """A rectangular part of a tensor, in one file."""

    file: str = Field(description="name of the file")
    key: str = Field(description="name of the tensor in the file")
    offsets: tuple[int, ...] = Field(description="first index in each dimension")
    sizes: tuple[int, ...] = Field(description="extent in each dimension")


class TensorRecord(StrictModel):
    """A tensor of a state, and where its elements are."""

    path: KeyPath = Field(description="keys that lead to it in the nested state")
    dtype: str = Field(description="type code of safetensors, such as BF16")
    shape: tuple[int, ...] = Field(description="shape of the whole tensor")
    chunks: tuple[TensorChunk, ...] = Field(description="disjoint; of a manifest: all of it")
    only_rank: int | None = Field(default=None, description="the rank that alone has this key")
    in_value: bool = Field(default=False, description="whether it is in a tuple of a value")


class ValueRecord(StrictModel):
    """A value of a state that is not a tensor."""

    path: KeyPath = Field(description="keys that lead to it in the nested state")
    value: JsonValue = Field(description="as written by `encode_value`")
    only_rank: int | None = Field(default=None, description="the rank that alone has this key")


class PartRecord(StrictModel):
    """What one rank reports of its part."""

    rank: int = Field(ge=0, description="rank in the group")
    world_size: int = Field(ge=1, description="ranks of the group")
    files: tuple[PartInfo, ...] = Field(description="the files that the rank has written")
    tensors: dict[str, TensorRecord] = Field(
        description="all tensors of the rank's state by key, with the chunks that it has written"
    )
    values: dict[str, ValueRecord] = Field(description="all other values of its state by key")

    def to_json(self) -> JSONObject:
        """Return the record as plain JSON, for a message to the coordinator."""
        tree: JSONObject = self.model_dump(mode="json")
        return tree

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read a record that was sent as JSON text.

        Raises:
            CheckpointError: the text is not a record.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise CheckpointError(f"not the record of a part: {error.errors()[0]['msg']}") from None


class RankManifest(StrictModel):
    """Manifest of a checkpoint of ranks."""

    format: Literal["geo_ray ranks 1"] = Field(default=FORMAT, description="name of the format")
    world_size: int = Field(ge=1, description="ranks of the group that saved it, informative")
    files: tuple[PartInfo, ...] = Field(description="every file")
    tensors: dict[str, TensorRecord] = Field(description="by key: the path, joined by dots")
    values: dict[str, ValueRecord] = Field(description="other values by key")


# ------------------------------------------------------------------ values


def encode_value(key: str, value: object, tensors: dict[str, Tensor] | None = None) -> JSONValue:
    """Encode a value that is not a tensor as JSON.

    ``None``, booleans, integers, finite floats, text and lists are themselves. Others are objects
    with one key: ``{"tuple": [...]}``, ``{"dict": [[key, value], ...]}``, ``{"float": "nan"}``, and
    ``{"tensor": key}`` for a tensor in a tuple, where planners of torch find none.

    Args:
        key: key of the value, for messages.
        value: the value.
        tensors: gets the tensors in the value, by key; None: there must be none.

    Raises:
        CheckpointError: the value has, or contains, another type.
    """
    try:
        return _encode(value, key, tensors)
    except _UnsupportedError as error:
        kind = type(error.value)
        name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        raise CheckpointError(
            f"'{key}': a value of type {name} cannot be saved", fix=_remedy(error.value)
        ) from None
    except UnicodeEncodeError:
        raise CheckpointError(f"'{key}': a text is not Unicode", fix=_UNKNOWN_TYPE) from None
    except RecursionError:
        raise CheckpointError(
            f"'{key}': the value contains itself, or is nested too deeply", fix=_UNKNOWN_TYPE
        ) from None


def tensors_in(value: JSONValue) -> set[str]:
    """Return the keys of the tensors in a result of `encode_value`."""
    if isinstance(value, list):
        return {key for each in value for key in tensors_in(each)}
    if isinstance(value, dict):
        if isinstance(key := value.get("tensor"), str):
            return {key}
        return {key for each in value.values() for key in tensors_in(each)}
    return set()


def decode_value(value: JSONValue, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """Decode a result of `encode_value`.

    Args:
        value: the result.
        tensors: the tensors in the value, by key; None: they are not needed.

    Raises:
        CheckpointCorruptError: it is not one.
    """
    if isinstance(value, dict) and len(value) != 1:
        raise CheckpointCorruptError(f"a value is not valid: {str(value)[:60]}")
    match value:
        case list():
            return [decode_value(each, tensors) for each in value]
        case {"tuple": list(items)}:
            return tuple(decode_value(each, tensors) for each in items)
        case {"dict": list(pairs)}:
            return {decode_value(k): decode_value(v, tensors) for k, v in pairs}  # type: ignore[misc, str-unpack]
        case {"tensor": str(key)} if tensors is None or key in tensors:
            return None if tensors is None else tensors[key]
        case {"float": ("nan" | "inf" | "-inf") as text}:
            return float(text)
        case dict():
            raise CheckpointCorruptError(f"a value is not valid: {str(value)[:60]}")
    return value


class _UnsupportedError(Exception):
    """A value that cannot be saved."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value


def _encode(value: object, key: str, tensors: dict[str, Tensor] | None) -> JSONValue:
    kind = type(value)  # subclasses have more than their value, and would come back without it
    if value is None or kind in (bool, int, str):
        _ = value.encode() if isinstance(value, str) else None  # half a surrogate is not text
        return value  # type: ignore[return-value]
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, list) and kind is list:
        return [_encode(each, key, tensors) for each in value]
    if isinstance(value, tuple) and kind is tuple:
        return {"tuple": [_encode(each, key, tensors) for each in value]}
    if isinstance(value, dict) and kind is dict:
        return {
            "dict": [[_encode(k, key, None), _encode(v, key, tensors)] for k, v in value.items()]
        }
    if isinstance(value, Tensor) and kind is Tensor and tensors is not None:
        name = f"{key}#{len(tensors)}"
        tensors[name] = value
        return {"tensor": name}
    raise _UnsupportedError(value)


def _remedy(value: object) -> str:
    """Return what to do about a value that cannot be saved."""
    if isinstance(value, Tensor):
        return "Save the plain tensors of which it consists."
    if isinstance(value, bytes | bytearray | memoryview):
        return "Save torch.frombuffer(bytearray(value), dtype=torch.uint8)."
    if hasattr(value, "__array__"):
        return "Save torch.as_tensor(value), or value.item() if it is a number."
    if isinstance(value, set | frozenset):
        return "Save sorted(value)."
    if isinstance(value, torch.dtype | torch.device):
        return "Save str(value)."
    for base in (bool, int, float, str, tuple, list, dict):
        if isinstance(value, base):
            return f"Save {base.__name__}(value)."
    if callable(value):
        return "Functions are code, not state: leave it out."
    return _UNKNOWN_TYPE


# ------------------------------------------------------------------ combining


def combine(records: Iterable[PartRecord]) -> RankManifest:
    """Return the manifest of a checkpoint that consists of the given parts. Pure.

    A missing record is no error if other ranks have written all elements, as with replicas.

    Raises:
        CheckpointError: the parts do not cover every tensor, or contradict each other.
    """
    ranks: dict[int, PartRecord] = {}
    for record in records:
        if ranks.setdefault(record.rank, record) is not record:
            raise CheckpointError(f"rank {record.rank} has reported two parts")
    if not ranks:
        raise CheckpointError("no rank has reported a part", fix=_NOT_COMMITTED)
    found = [ranks[rank] for rank in sorted(ranks)]
    sizes = sorted({record.world_size for record in found})
    if len(sizes) > 1 or found[-1].rank >= sizes[0]:
        shown = ", ".join(f"rank {r.rank} of {r.world_size}" for r in islice(found, 8))
        raise CheckpointError(f"the parts are of different groups: {shown}")
    absent = [rank for rank in range(sizes[0]) if rank not in ranks]
    tensors: dict[str, TensorRecord] = {}
    values: dict[str, ValueRecord] = {}
    chunks: dict[str, dict[object, TensorChunk]] = defaultdict(dict)
    holders: dict[str, list[int]] = defaultdict(list)
    for record in found:
        for key, value in record.values.items():
            first = values.setdefault(key, value)
            _check_agreement(key, first, value, holders[key], record.rank)
        for key, tensor in record.tensors.items():
            before = tensors.setdefault(key, tensor)
            _check_agreement(key, before, tensor, holders[key], record.rank)
            for chunk in tensor.chunks:  # of replicas the lowest rank's
                chunks[key].setdefault((chunk.offsets, chunk.sizes), chunk)
        for key in (*record.values, *record.tensors):
            holders[key].append(record.rank)
    both = sorted(values.keys() & tensors.keys())
    if both:
        raise CheckpointError(f"'{both[0]}' is a tensor in one rank and not in another")
    for key, found_chunks in chunks.items():
        update = {"chunks": tuple(found_chunks.values())}
        tensors[key] = tensors[key].model_copy(update=update)
    for key, tensor in tensors.items():
        problem = _coverage_problem(tensor)
        if problem:
            gone = f"; no record of {_ranks(absent)}" if absent else ""
            raise CheckpointError(
                f"tensor '{key}' {problem}; reported by {_ranks(holders[key])}{gone}",
                fix=_NOT_COMMITTED
                if absent
                else "If only some ranks have this key, name it in `only_here` of `write_part`.",
            )
    used = {chunk.file for tensor in tensors.values() for chunk in tensor.chunks}
    files = tuple(info for record in found for info in record.files if info.file in used)
    return RankManifest(world_size=sizes[0], files=files, tensors=tensors, values=values)


def _check_agreement(
    key: str,
    first: TensorRecord | ValueRecord,
    other: TensorRecord | ValueRecord,
    ranks: Sequence[int],
    rank: int,
) -> None:
    """Refuse ranks whose states differ where they must not.

    Raises:
        CheckpointError: they do.
    """
    if first is other:
        return
    both = f"rank {ranks[0]} and rank {rank}"
    own_key = "Give each rank a key of its own and name it in `only_here` of `write_part`."
    if first.only_rank is not None or other.only_rank is not None:
        raise CheckpointError(f"'{key}' is not a key of one rank: {both} have it", fix=own_key)
    mine, theirs = (_content(each) for each in (first, other))
    if mine != theirs:
        raise CheckpointError(
            f"'{key}' differs: rank {ranks[0]} has {mine[:80]}, rank {rank} has {theirs[:80]}",
            fix=f"Save when all ranks are at the same step. {own_key}",
        )


def _content(record: TensorRecord | ValueRecord) -> str:
    if isinstance(record, ValueRecord):
        return repr(record.value)
    return f"{record.dtype} {list(record.shape)}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _coverage_problem(tensor: TensorRecord) -> str | None:
    """Return why the chunks are not exactly the whole tensor, or None."""
    shape, count = tensor.shape, 0
    for chunk in tensor.chunks:
        if not (len(chunk.offsets) == len(chunk.sizes) == len(shape)) or any(
            at < 0 or size < 0 or at + size > extent
            for at, size, extent in zip(chunk.offsets, chunk.sizes, shape, strict=True)
        ):
            return f"has a chunk outside of its shape {list(shape)}"
        count += math.prod(chunk.sizes)
    if count < math.prod(shape):
        return f"is incomplete: {count} of {math.prod(shape)} elements"
    if not shape:
        return None if count == 1 else "is written more than once"
    # The dimension in which most chunks begin at different places has the fewest neighbours.
    dim = max(range(len(shape)), key=lambda d: len({c.offsets[d] for c in tensor.chunks}))
    active: list[TensorChunk] = []
    full = [chunk for chunk in tensor.chunks if math.prod(chunk.sizes)]
    for chunk in sorted(full, key=lambda c: c.offsets[dim]):
        active = [c for c in active if c.offsets[dim] + c.sizes[dim] > chunk.offsets[dim]]
        if any(_overlap(chunk, other) for other in active):
            return f"is written more than once at {list(chunk.offsets)}"
        active.append(chunk)
    return None


def _overlap(a: TensorChunk, b: TensorChunk) -> bool:
    return all(
        x < y + n and y < x + m
        for x, m, y, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )


# ------------------------------------------------------------------ reading


def read_manifest(folder: Place) -> RankManifest:
    """Read the manifest of a checkpoint, without its files.

    Raises:
        CheckpointMissingError: there is no checkpoint.
        CheckpointCorruptError: the manifest is damaged.
        CheckpointError: it is a checkpoint of another kind, such as one with pickled files.
        StoreError: a store does not answer or refuses.
    """
    place = folder_of(folder)
    name = place.name_of(MANIFEST_FILE)
    if not place.has(MANIFEST_FILE):
        if place.has(_TORCH_FILE):
            raise CheckpointError(
                f"{place.name_of(_TORCH_FILE)}: a pickled checkpoint, which is never read: "
                "unpickling can execute any code",
                fix="Load it with torch.distributed.checkpoint in a script of your own, and save "
                "the state with SafetensorsWriter.",
            )
        raise CheckpointMissingError(
            f"{name}: no such checkpoint", fix="Check the folder; an unfinished save is none."
        )
    data = bytearray()
    try:
        with place.open(MANIFEST_FILE) as stream:
            while len(data) <= MAX_MANIFEST_BYTES and (more := stream.read(_BLOCK_BYTES)):
                data += more
    except OSError as error:
        raise CheckpointCorruptError(
            f"{name}: cannot be read: {error.strerror}", fix=DAMAGED_FIX
        ) from error
    try:
        body = unseal(bytes(data), MAX_MANIFEST_BYTES)
        if body.get("format") != FORMAT:
            kind = repr(body["format"]) if "format" in body else "a checkpoint of a run"
            raise CheckpointError(
                f"the format is {kind}, not '{FORMAT}'",
                fix="Load it with what has written it; `geo-ray train --resume` resumes a run.",
            )
        manifest = RankManifest.model_validate_json(canonical_json(body))
        _check_manifest(manifest)
    except ValidationError as error:
        wrong = complaints(error, RankManifest, canonical_json(body))
        raise CheckpointCorruptError(f"{name}: not valid: {wrong}", fix=DAMAGED_FIX) from error
    except CheckpointCorruptError as error:
        raise CheckpointCorruptError(f"{name}: {error.message}", fix=DAMAGED_FIX) from error
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error.message}", fix=error.fix) from error
    return manifest


def _check_manifest(manifest: RankManifest) -> None:
    """Check what the types of a manifest do not say.

    Raises:
        CheckpointCorruptError: names the key.
    """
    files = {info.file for info in manifest.files}
    for key, tensor in manifest.tensors.items():
        problem = _coverage_problem(tensor)
        if tensor.dtype not in parts.DTYPES:
            problem = f"has the unknown type {tensor.dtype!r}"
        if any(chunk.file not in files for chunk in tensor.chunks):
            problem = "is in a file that is not listed"
        if problem:
            raise CheckpointCorruptError(f"tensor '{key}' {problem}")
    for each in manifest.values.values():
        decode_value(each.value)
        if missing := sorted(tensors_in(each.value) - manifest.tensors.keys()):
            raise CheckpointCorruptError(f"the tensor '{missing[0]}' of a value is missing")
