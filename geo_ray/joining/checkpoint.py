"""Checkpoints of a group of ranks: safetensors files and one JSON manifest, never pickle.

With `torch.distributed.checkpoint`, whose collectives wait for every rank::

    dcp.save(state, storage_writer=SafetensorsWriter("run/5"))
    dcp.load(state, storage_reader=SafetensorsReader("run/5"), planner=CheckedLoadPlanner())

Without any collective, so that a coordinator can commit or abandon a checkpoint at a deadline::

    record = write_part(state, "run/5", rank, world_size)  # on every rank
    commit("run/5", records)                               # on the coordinator
    load(state, "run/5")                                   # in any world size and sharding

Both write the same files (docs/design/checkpoint-format.md). Each rank writes a part: files with
its tensors. The manifest is written last and describes all tensors and their chunks, and contains
all other values. Without a manifest a checkpoint does not exist.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from geo_ray.base.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    GeoRayError,
    InvariantError,
)
from geo_ray.joining.checkpoint_manifest import (
    DAMAGED_FIX,
    MAX_MANIFEST_BYTES,
    PartRecord,
    Place,
    RankManifest,
    TensorChunk,
    TensorRecord,
    ValueRecord,
    combine,
    decode_value,
    encode_value,
    folder_of,
    read_manifest,
    tensors_in,
)
from geo_ray.storage import parts
from geo_ray.storage.checkpoint import verify_part
from geo_ray.storage.folders import Folder, LocalFolder
from geo_ray.storage.manifest import MANIFEST_FILE, PART_SUFFIX, PartInfo, seal

FILE_BYTES: Final = 1 << 30
"""Size at which a rank begins another file; a reader holds what it needs of one file at a time."""
_MOST_SHOWN: Final = 3
_CODES: Final = {dtype: code for code, dtype in parts.DTYPES.items()}

StateDict: TypeAlias = dict[str, Any]


# ------------------------------------------------------------------ writing


def write_part(
    state_dict: Mapping[str, Any],
    folder: Place,
    rank: int,
    world_size: int,
    *,
    only_here: Collection[str] = (),
    file_bytes: int = FILE_BYTES,
) -> PartRecord:
    """Write this rank's part of a checkpoint, without communication.

    Of several ranks with the same elements only one writes them: the lowest rank of those in the
    mesh of a `DTensor`, rank 0 for other tensors and values. Tensors that share their memory, as
    tied ones do, are written once.

    The tensors are read when this is called; they must not change before it returns.

    Args:
        state_dict: nested state, as for `torch.distributed.checkpoint.save`; values with a
            ``state_dict`` method are asked for it.
        folder: a new folder, the same for all ranks.
        rank: rank of this process in the group.
        world_size: ranks of the group.
        only_here: keys that no other rank has, each with all keys below it. Such keys should
            contain the rank, as in ``loader.rank-3``.
        file_bytes: size at which another file begins.

    Returns:
        The record for `commit`. The part is durable.

    Raises:
        CheckpointError: a value or tensor cannot be saved, or the checkpoint is committed already.
        CheckpointConflictError: a store has such a file of another writer.
        RunDirectoryError, StoreError: a file cannot be written.
    """
    planner = DefaultSavePlanner()
    state = {key: _state_of(value) for key, value in state_dict.items()}
    try:
        planner.set_up_planner(state, None, rank == 0)
    except ValueError as error:
        raise CheckpointError(
            f"two values of the state have the same key: {error}", fix="Rename one of them."
        ) from error
    flat: dict[str, Any] = planner.state_dict
    for key, value in flat.items():
        if isinstance(value, DTensor) and any(p.is_partial() for p in value.placements):
            raise CheckpointError(
                f"'{key}': a DTensor with the placements {value.placements} has no values yet",
                fix="Redistribute it to Shard or Replicate before it is saved.",
            )

    def is_own(key: str) -> bool:
        return any(key == each or key.startswith(f"{each}.") for each in only_here)

    def writes(item: WriteItem) -> bool:
        key = item.index.fqn
        return is_own(key) or _is_first_holder(flat[key], item, rank)

    work = _PartWriter(folder_of(folder), planner, file_bytes)
    return work.write(planner.create_local_plan(), rank, world_size, writes, is_own)


def _state_of(value: Any) -> Any:
    return value.state_dict() if isinstance(value, Stateful) else value


def _is_first_holder(value: object, item: WriteItem, rank: int) -> bool:
    """Return whether this process is the one that writes an item that several ranks may have."""
    if not isinstance(value, DTensor):
        return rank == 0 or item.type is WriteItemType.SHARD
    mesh = value.device_mesh
    here = mesh.get_coordinate() or [0] * mesh.ndim
    index = tuple(
        slice(None) if placement.is_replicate() else at
        for placement, at in zip(value.placements, here, strict=True)
    )
    return mesh.get_rank() == int(mesh.mesh[index].min())


class _PartWriter:
    """Writes the items of a plan.

    Args:
        folder: the checkpoint.
        planner: resolves the items.
        file_bytes: size at which another file begins.
    """

    def __init__(self, folder: Folder, planner: SavePlanner, file_bytes: int) -> None:
        self._folder = folder
        self._planner = planner
        self._file_bytes = file_bytes
        self._seen: dict[object, tuple[TensorChunk, str]] = {}  # chunks and types by memory

    def write(
        self,
        plan: SavePlan,
        rank: int,
        world_size: int,
        writes: Callable[[WriteItem], bool],
        is_own: Callable[[str], bool],
    ) -> PartRecord:
        """Write one part; arguments as in `write_part`, by item and key."""
        if isinstance(self._folder, LocalFolder):
            self._folder.make()
        paths = getattr(self._planner, "mappings", {})
        tensors: dict[str, TensorRecord] = {}
        values: dict[str, ValueRecord] = {}
        chunks: dict[str, list[TensorChunk]] = defaultdict(list)
        waiting: dict[bool, list[WriteItem]] = {True: [], False: []}  # by whether it is replicated
        inside: dict[str, Tensor] = {}  # tensors in values that this rank writes
        for item in plan.items:
            key = item.index.fqn
            path = tuple(paths.get(key, (key,)))
            only = rank if is_own(key) else None
            if item.type is WriteItemType.BYTE_IO:
                found: dict[str, Tensor] = {}
                value = encode_value(key, self._found(item), found)
                values[key] = ValueRecord(path=path, value=value, only_rank=only)
                for name, tensor in found.items():
                    tensors[name] = TensorRecord(
                        path=path,
                        dtype=_type_code(tensor, key),
                        shape=tuple(tensor.shape),
                        chunks=(),
                        only_rank=only,
                        in_value=True,
                    )
                    if writes(item) and tensor.numel():
                        inside[name] = tensor
                continue
            about = _about(item)
            tensors[key] = TensorRecord(
                path=path,
                dtype=self._dtype(item),
                shape=tuple(about.size),
                chunks=(),
                only_rank=only,
            )
            if writes(item) and about.chunk.sizes.numel():
                waiting[item.type is WriteItemType.TENSOR].append(item)
        files: list[PartInfo] = []
        for is_replicated, items in waiting.items():
            # Every rank of a later group reads replicated tensors, but not all shards.
            stem = f"rank-{rank:05d}-{'whole' if is_replicated else 'shards'}"
            for file_items in self._files(items):
                info, placed = self._write_file(f"{stem}-{len(files):03d}", file_items)
                files += [] if info is None else [info]
                for key, chunk, dtype in placed:
                    chunks[key].append(chunk)
                    update = {"chunks": tuple(chunks[key]), "dtype": dtype}
                    tensors[key] = tensors[key].model_copy(update=update)
        for batch in self._batches(inside):
            stem = f"rank-{rank:05d}-values-{len(files):03d}"
            info = parts.write_part(self._folder, stem, batch, {})
            files.append(info)
            for name, tensor in batch.items():
                whole = tuple(tensor.shape)
                chunk = TensorChunk(
                    file=info.file, key=name, offsets=(0,) * len(whole), sizes=whole
                )
                tensors[name] = tensors[name].model_copy(update={"chunks": (chunk,)})
        return PartRecord(
            rank=rank, world_size=world_size, files=tuple(files), tensors=tensors, values=values
        )

    def _found(self, item: WriteItem) -> Any:
        """Return the object itself; `SavePlanner.resolve_data` would pickle a value."""
        if not isinstance(self._planner, DefaultSavePlanner):
            raise CheckpointError(
                f"the planner {type(self._planner).__name__} cannot be used",
                fix="Derive the planner from DefaultSavePlanner.",
            )
        return self._planner.lookup_object(item.index)

    def _dtype(self, item: WriteItem) -> str:
        """Return the type code of a tensor that can be saved."""
        found, key = self._found(item), item.index.fqn
        local = found.to_local() if isinstance(found, DTensor) else found
        return _type_code(local, key)

    def _batches(self, tensors: Mapping[str, Tensor]) -> Iterable[dict[str, Tensor]]:
        """Divide whole tensors into files."""
        batch: dict[str, Tensor] = {}
        size = 0
        for name, tensor in tensors.items():
            more = tensor.numel() * tensor.element_size()
            if batch and (size + more > self._file_bytes or len(batch) == parts.MAX_TENSORS):
                yield batch
                batch, size = {}, 0
            batch[name] = tensor
            size += more
        if batch:
            yield batch

    def _files(self, items: Sequence[WriteItem]) -> Iterable[list[WriteItem]]:
        """Divide items into files."""
        batch: list[WriteItem] = []
        size = 0
        for item in items:
            more = _item_bytes(item)
            if batch and (size + more > self._file_bytes or len(batch) == parts.MAX_TENSORS):
                yield batch
                batch, size = [], 0
            batch.append(item)
            size += more
        if batch:
            yield batch

    def _write_file(
        self, name: str, items: Sequence[WriteItem]
    ) -> tuple[PartInfo | None, list[tuple[str, TensorChunk, str]]]:
        """Write a file; None if all of its tensors are tied to others.

        Returns:
            The file; key, chunk and type code of each item.
        """
        tensors: dict[str, Tensor] = {}
        placed: list[tuple[str, TensorChunk, str]] = []
        for item in items:
            where, memory = _about(item).chunk, self._memory(item)
            if memory not in self._seen:
                tensor: Any = self._planner.resolve_data(item)
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                if local.shape != where.sizes or local.dtype not in _CODES:
                    raise CheckpointError(
                        f"'{item.index.fqn}': the planner has returned {local.dtype} "
                        f"{list(local.shape)} for a chunk of shape {list(where.sizes)}"
                    )
                key = _file_key(item, tensors)
                tensors[key] = local
                chunk = TensorChunk(
                    file=name + PART_SUFFIX,
                    key=key,
                    offsets=tuple(where.offsets),
                    sizes=tuple(where.sizes),
                )
                self._seen[memory] = chunk, _CODES[local.dtype]
            placed.append((item.index.fqn, *self._seen[memory]))
        if not tensors:
            return None, placed
        return parts.write_part(self._folder, name, tensors, {}), placed

    def _memory(self, item: WriteItem) -> tuple[object, ...]:
        """Return what two tied tensors have in common."""
        found = self._found(item)
        local = found.to_local() if isinstance(found, DTensor) else found
        about = _about(item)
        return (
            *(local.device, local.data_ptr(), local.dtype, local.shape, local.stride()),
            *(about.size, about.chunk.offsets, about.chunk.sizes),
        )


def _type_code(tensor: Any, key: str) -> str:
    """Return the type code of a tensor.

    Raises:
        CheckpointError: it cannot be saved.
    """
    if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided:
        kind = type(tensor).__name__ if tensor.layout is torch.strided else tensor.layout
        raise CheckpointError(
            f"'{key}': a tensor of the kind {kind} cannot be saved",
            fix="Save the plain tensors of which it consists.",
        )
    if tensor.is_meta:
        raise CheckpointError(
            f"'{key}': a tensor on the meta device has no values",
            fix="Materialise the model before it is saved.",
        )
    if tensor.dtype not in _CODES:
        raise CheckpointError(
            f"'{key}': a tensor of {tensor.dtype} cannot be saved",
            fix=f"Save a view of another type; possible are {', '.join(map(str, _CODES))}.",
        )
    return _CODES[tensor.dtype]


def _about(item: WriteItem) -> TensorWriteData:
    if item.tensor_data is None:
        raise CheckpointError(f"'{item.index.fqn}': the plan does not describe the tensor")
    return item.tensor_data


def _item_bytes(item: WriteItem) -> int:
    about = _about(item)
    return about.chunk.sizes.numel() * about.properties.dtype.itemsize


def _file_key(item: WriteItem, used: Collection[str]) -> str:
    """Return the name of a chunk in its file: the key, and the offsets if it is not the whole."""
    about, key = _about(item), item.index.fqn
    if about.chunk.sizes != about.size:
        key += "@" + ",".join(map(str, about.chunk.offsets))
    if key in used or key == "__metadata__" or len(key) > parts.MAX_NAME_LENGTH:
        return f"@{len(used)}"
    return key


# ------------------------------------------------------------------ committing


def commit(folder: Place, records: Iterable[PartRecord], *, verify: bool = False) -> RankManifest:
    """Commit a checkpoint: check its parts, and write the manifest atomically.

    To abandon a checkpoint, do not commit it; `Folder.clear` removes its files. A part that arrives
    later changes nothing: it is refused, or its folder has no manifest.

    Args:
        folder: that of all parts.
        records: results of `write_part`, in any order.
        verify: whether to read all files and compare their SHA-256 too, which finds files that an
            earlier attempt of a rank has replaced since. Loading always does.

    Raises:
        CheckpointError: the parts do not cover every tensor or contradict each other, or the
            checkpoint is committed already.
        CheckpointCorruptError: a file is missing, or differs from its record.
        CheckpointConflictError: another writer has committed it in a store.
        RunDirectoryError, StoreError: the manifest cannot be written.
    """
    place = folder_of(folder)
    manifest = combine(records)
    _refuse_committed(place)
    if isinstance(place, LocalFolder):
        place.make()
    _check_sizes(place, manifest)
    for info in manifest.files if verify else ():
        verify_part(place, info)
    try:
        data = seal(manifest.model_dump(mode="json"))
    except ValueError as error:
        raise CheckpointError(f"the manifest cannot be written: {error}") from error
    if len(data) > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"the manifest has {len(data)} bytes, more than {MAX_MANIFEST_BYTES}",
            fix="Save large values as tensors.",
        )
    place.write(MANIFEST_FILE, [data], len(data))
    return manifest


def _refuse_committed(folder: Folder) -> None:
    if folder.has(MANIFEST_FILE):
        raise CheckpointError(
            f"{folder.name_of(MANIFEST_FILE)}: a checkpoint exists already",
            fix="Save each checkpoint to a new folder.",
        )


def _check_sizes(folder: Folder, manifest: RankManifest) -> None:
    sizes = folder.sizes()
    for info in manifest.files:
        if sizes.get(info.file) != info.bytes:
            found = f"{sizes[info.file]} bytes long" if info.file in sizes else "missing"
            raise CheckpointCorruptError(
                f"{folder.name_of(info.file)}: {found}; {info.bytes} bytes were written",
                fix=DAMAGED_FIX,
            )


# ------------------------------------------------------------------ reading


def load(state_dict: StateDict, folder: Place, *, partial: bool = False) -> RankManifest:
    """Load a checkpoint in place, in any world size and sharding, without communication.

    Each rank reads the files that have elements of its shards. Values without memory of their own
    (numbers, text) are replaced in ``state_dict``; values with a ``load_state_dict`` method get
    their state by it.

    Args:
        state_dict: nested state of the form that was saved, as for
            `torch.distributed.checkpoint.load`.
        folder: the checkpoint.
        partial: whether the checkpoint may have more keys than ``state_dict``.

    Returns:
        The manifest.

    Raises:
        CheckpointMismatchError: keys, shapes or types differ; nothing was loaded.
        CheckpointMissingError: there is no checkpoint.
        CheckpointCorruptError: a file is damaged; names it. Parts of the state may be loaded.
        CheckpointError: it is a checkpoint of another kind, such as one with pickled files.
        StoreError: a store does not answer or refuses.
    """
    reader = SafetensorsReader(folder)
    manifest = read_manifest(reader.folder)
    metadata = metadata_of(manifest)
    reader.use(manifest, metadata)
    state = {key: _state_of(value) for key, value in state_dict.items()}
    planner = CheckedLoadPlanner(partial=partial)
    planner.set_up_planner(state, metadata, False)
    reader.read_data(planner.create_local_plan(), planner)
    for key, value in state_dict.items():
        if isinstance(value, Stateful):
            value.load_state_dict(state[key])
        else:
            state_dict[key] = state[key]
    return manifest


@dataclass
class _RankMetadata(Metadata):
    """Metadata, and the keys that only one rank had, which need not be loaded."""

    optional: frozenset[str] = frozenset()


def metadata_of(manifest: RankManifest) -> Metadata:
    """Return the description of a checkpoint that the planners of torch use."""
    state: dict[str, Any] = {key: BytesStorageMetadata() for key in manifest.values}
    where: dict[MetadataIndex, TensorChunk] = {}
    for key, each in manifest.tensors.items():
        if each.in_value:
            continue  # planners see the value
        chunks = []
        for chunk in each.chunks:
            offsets = torch.Size(chunk.offsets)
            chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk.sizes)))
            where[MetadataIndex(key, offsets)] = chunk
        properties = TensorProperties(dtype=parts.DTYPES[each.dtype])
        state[key] = TensorStorageMetadata(properties, torch.Size(each.shape), chunks)
    outside = {key: each for key, each in manifest.tensors.items() if not each.in_value}
    entries: dict[str, TensorRecord | ValueRecord] = {**outside, **manifest.values}
    return _RankMetadata(
        state_dict_metadata=state,
        planner_data={key: each.path for key, each in entries.items()},
        storage_data=where,
        optional=frozenset(k for k, each in entries.items() if each.only_rank is not None),
    )


class CheckedLoadPlanner(DefaultLoadPlanner):
    """Load planner that refuses a state that does not fit the checkpoint, before it changes it.

    The default planner of torch ignores keys that only the checkpoint has, and converts types.

    Args:
        partial: whether the checkpoint may have more keys than the state.
    """

    def __init__(self, *, partial: bool = False) -> None:
        super().__init__()
        self._partial = partial

    def create_local_plan(self) -> LoadPlan:
        """Plan the reads of this rank.

        Raises:
            CheckpointMismatchError: keys, shapes or types differ.
        """
        if self.metadata is None:
            raise InvariantError("the planner has no metadata")
        self._check(self.metadata)
        # Not the method of torch: for a key that only the checkpoint has, it changes for a moment
        # how all threads of the process name keys, also those that save.
        return create_default_local_load_plan(self.state_dict, self.metadata)

    def _check(self, metadata: Metadata) -> None:
        saved = metadata.state_dict_metadata
        optional: frozenset[str] = getattr(metadata, "optional", frozenset())
        wrong = []
        for key, value in self.state_dict.items():
            expected = _described(value)
            found = _described(saved[key]) if key in saved else "no such key"
            if expected != found:
                wrong.append(_difference(key, expected, found))
        if not self._partial:
            wrong += [
                _difference(key, "no such key", _described(each))
                for key, each in saved.items()
                if key not in self.state_dict and key not in optional
            ]
        if wrong:
            more = f"; and {len(wrong) - _MOST_SHOWN} more" if len(wrong) > _MOST_SHOWN else ""
            raise CheckpointMismatchError("; ".join(wrong[:_MOST_SHOWN]) + more)


def _difference(key: str, expected: str, found: str) -> str:
    return f"'{key}': expected {expected}, as in the state; found {found} in the checkpoint"


def _described(value: object) -> str:
    """Return what must be equal in a state and a checkpoint."""
    if isinstance(value, TensorStorageMetadata):
        return f"{_type_name(value.properties.dtype)} {list(value.size)}"
    if isinstance(value, Tensor):
        return f"{_type_name(value.dtype)} {list(value.shape)}"
    return "a value"


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _set_value(planner: LoadPlanner, key: str, value: object) -> None:
    """Set a value in the state of a planner, whose own method would unpickle it.

    Raises:
        CheckpointError: the planner has its own way to set values.
    """
    if (
        not isinstance(planner, DefaultLoadPlanner)
        or type(planner).load_bytes is not DefaultLoadPlanner.load_bytes
    ):
        raise CheckpointError(
            f"the planner {type(planner).__name__} cannot be used",
            fix="Derive the planner from DefaultLoadPlanner, without a `load_bytes` of its own.",
        )
    *parents, last = planner.mappings[key] if planner.flatten_state_dict else (key,)
    at: Any = planner.original_state_dict
    for step in parents:
        at = at[_real_key(at, step)]
    at[_real_key(at, last)] = value


def _real_key(container: Any, step: str | int) -> Any:
    """Return the key of a dict that the planner has converted to text."""
    if isinstance(container, MutableMapping) and step not in container:
        return next((key for key in container if str(key) == step), step)
    return step


# ------------------------------------------------------------------ torch.distributed.checkpoint


class SafetensorsWriter(StorageWriter):
    """Storage of `torch.distributed.checkpoint.save` that writes safetensors files and JSON.

    Tied tensors are written once if the same rank writes both: always if they are sharded, and
    with ``DefaultSavePlanner(dedup_save_to_lowest_rank=True)`` if they are replicated.

    Args:
        folder: a new folder, the same for all ranks.
        file_bytes: size at which a rank begins another file.
    """

    def __init__(self, folder: Place, *, file_bytes: int = FILE_BYTES) -> None:
        self.folder = folder_of(folder)
        self._file_bytes = file_bytes

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another checkpoint, in another folder if one is given."""
        if checkpoint_id is not None:
            self.folder = folder_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin.

        Raises:
            CheckpointError: the folder has a checkpoint, or the ranks save without the group.
        """
        if not kwargs.get("use_collectives", True):
            raise CheckpointError(
                "use_collectives=False is not supported",
                fix="Use `write_part` on each rank and `commit`, which need no collective.",
            )
        if is_coordinator:
            _refuse_committed(self.folder)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tell each rank its number."""
        return [replace(plan, storage_data=(rank, len(plans))) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part; the first result has its record.

        Raises:
            CheckpointError: a value or tensor cannot be saved.
            RunDirectoryError, StoreError: a file cannot be written.
        """
        rank, world_size = plan.storage_data
        work = _PartWriter(self.folder, planner, self._file_bytes)
        record = work.write(plan, rank, world_size, lambda item: True, lambda key: False)
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [
                WriteResult(
                    index=item.index,
                    size_in_bytes=0 if item.tensor_data is None else _item_bytes(item),
                    storage_data=None if number else record,
                )
                for number, item in enumerate(plan.items)
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint.

        Raises:
            CheckpointError, CheckpointCorruptError, RunDirectoryError, StoreError: see `commit`.
        """
        manifest = commit(self.folder, [rank[0].storage_data for rank in results if rank])
        metadata.storage_data = metadata_of(manifest).storage_data

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is the address of a folder."""
        return _is_address(checkpoint_id)


class SafetensorsReader(StorageReader):
    """Storage of `torch.distributed.checkpoint.load` for what `SafetensorsWriter` has written.

    Every file that is read is verified as a whole. Types are always checked; `CheckedLoadPlanner`
    also checks keys and shapes, and changes nothing if they differ.

    Args:
        folder: the checkpoint.
    """

    def __init__(self, folder: Place) -> None:
        self.folder = folder_of(folder)
        self._manifest: RankManifest | None = None
        self._where: Mapping[MetadataIndex, TensorChunk] = {}
        self._error: GeoRayError | None = None

    def use(self, manifest: RankManifest, metadata: Metadata) -> None:
        """Read with a manifest that is read already."""
        self._manifest, self._where = manifest, metadata.storage_data

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin again, with another folder if one is given."""
        if checkpoint_id is not None:
            self.folder = folder_of(checkpoint_id)
        self._manifest, self._error = None, None

    def read_metadata(self, *args: Any) -> Metadata:
        """Read the manifest.

        Torch replaces errors of this method by another one. So an error is raised by
        `set_up_storage_reader`, which torch calls next, and this returns no keys. `read_manifest`
        raises directly.
        """
        try:
            self._manifest = read_manifest(self.folder)
        except GeoRayError as error:
            self._error = error
            return Metadata({}, planner_data={})
        return metadata_of(self._manifest)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Begin.

        Raises:
            CheckpointError, CheckpointMissingError, CheckpointCorruptError, StoreError: of
                `read_metadata`.
        """
        if self._error is not None:
            raise self._error
        self._where = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan, file by file.

        Raises:
            CheckpointCorruptError: a file differs from the manifest.
            CheckpointMismatchError: a tensor of the state has another type than the saved one.
            StoreError: a store does not answer or refuses.
        """
        if self._manifest is None:
            raise CheckpointError("the metadata was not read")
        manifest = self._manifest
        by_file: dict[str, list[tuple[TensorChunk, ReadItem]]] = defaultdict(list)
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                coded = manifest.values[item.storage_index.fqn].value
                value = decode_value(coded, self._inside(manifest, tensors_in(coded)))
                _set_value(planner, item.dest_index.fqn, value)
            else:
                chunk = self._where[item.storage_index]
                by_file[chunk.file].append((chunk, item))
        infos = {info.file: info for info in manifest.files}
        for file, items in sorted(by_file.items()):
            self._read_file(infos[file], items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _inside(self, manifest: RankManifest, keys: Collection[str]) -> dict[str, Tensor]:
        """Return the tensors in a value, by key."""
        found: dict[str, Tensor] = {}
        for key in sorted(keys):
            record = manifest.tensors[key]
            found[key] = torch.empty(record.shape, dtype=parts.DTYPES[record.dtype])
        for info in manifest.files:
            chunks = {
                chunk.key: key
                for key in found
                for chunk in manifest.tensors[key].chunks
                if chunk.file == info.file
            }
            if not chunks:
                continue
            shapes = {name: tuple(found[key].shape) for name, key in chunks.items()}
            for name, tensor in self._tensors(info, shapes).items():
                found[chunks[name]] = tensor
        return found

    def _read_file(
        self,
        info: PartInfo,
        items: Sequence[tuple[TensorChunk, ReadItem]],
        planner: LoadPlanner,
    ) -> None:
        tensors = self._tensors(info, {chunk.key: chunk.sizes for chunk, _ in items})
        for chunk, item in items:
            source = tensors[chunk.key]
            for dim, (start, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                source = source.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            if target.dtype != source.dtype:
                types = _type_name(target.dtype), _type_name(source.dtype)
                raise CheckpointMismatchError(_difference(item.dest_index.fqn, *types))
            target.copy_(source)
            planner.commit_tensor(item, target)

    def _tensors(self, info: PartInfo, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Return the tensors of a file with some names.

        Raises:
            CheckpointCorruptError: the file differs from the manifest, or lacks one of them.
        """
        try:
            tensors, _ = parts.read_part(self.folder, info, shapes.keys())
        except CheckpointCorruptError as error:
            raise CheckpointCorruptError(error.message, fix=DAMAGED_FIX) from error
        for name, shape in shapes.items():
            if name not in tensors or tuple(tensors[name].shape) != shape:
                raise CheckpointCorruptError(
                    f"{self.folder.name_of(info.file)}: it has no tensor '{name}' of shape "
                    f"{list(shape)}",
                    fix=DAMAGED_FIX,
                )
        return tensors

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is the address of a folder."""
        return _is_address(checkpoint_id)


def _is_address(address: str | os.PathLike[str]) -> bool:
    try:
        folder_of(address)
    except GeoRayError:
        return False
    return True
