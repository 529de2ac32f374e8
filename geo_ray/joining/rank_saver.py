"""Checkpoints of a region that trains in a loop of the user: what each rank saves and loads.

The server decides when a checkpoint is made: at a barrier, where all regions have the same model
(`geo_ray.joining.save_round`). Each rank copies its state there, and a thread writes it while
training continues. Rank 0 commits the region's files when the server asks for it, which it does
after all ranks have written theirs. The files never leave the region::

    FOLDER/RUN/REGION/ckpt-00000012/rank-00000-shards-000.safetensors ... manifest.json

Content: the state of the exchange by slice (parameters in fp32, the strategy's memory, coding
errors), the buffers of the model, and what the loop gave to `JoinedRegion.training` as ``state``
and ``rank_state``. The format is that of `geo_ray.joining.checkpoint`, so that another world size
and sharding can load it.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from geo_ray.base.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointMissingError,
    GeoRayError,
)
from geo_ray.base.files import make_directory, unwritable
from geo_ray.base.user_code import error_summary
from geo_ray.joining.checkpoint import commit, load, write_part
from geo_ray.joining.checkpoint_manifest import (
    PartRecord,
    RankManifest,
    TensorRecord,
    ValueRecord,
    decode_value,
    encode_value,
    read_manifest,
)
from geo_ray.joining.layout import Ranges, persistent_buffers
from geo_ray.joining.link import ServerLink
from geo_ray.joining.rank import RankState
from geo_ray.joining.save_round import commit_order, read_checkpoint, unsaved_message
from geo_ray.joining.vector import ModuleBuffers
from geo_ray.storage.folders import Root
from geo_ray.storage.parts import DTYPES
from geo_ray.storage.places import CheckpointPlaces
from geo_ray.storage.uri import is_s3, join
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.message import CONTROL, Message

log = logging.getLogger(__name__)

KINDS: Final = frozenset({"commit", "abandon"})
"""Messages of the server that a `RankSaver` handles."""

_EXCHANGE: Final = "exchange"
_CLOSE_S: Final = 30.0


def root_of(folder: str | Path, run_id: str, region: str) -> Root:
    """Return where a region's checkpoints of a run are.

    Args:
        folder: a directory that all ranks of the region see, or an ``s3://`` address.
        run_id: the run.
        region: the region.

    Raises:
        RunDirectoryError: the directory cannot be created.
    """
    if is_s3(str(folder)):
        return CheckpointPlaces(join(str(folder), f"{run_id}/{region}")).root()
    path = Path(folder, run_id, region).absolute()
    try:
        make_directory(path, exist_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error
    return CheckpointPlaces(str(path)).root()


@dataclass(frozen=True, slots=True)
class LoopState:
    """What a training loop saves besides the parameters.

    Attributes:
        model: the model, for its buffers and the names of parameters in optimizers.
        shared: optimizers, and other objects with ``state_dict`` and ``load_state_dict``, whose
            state is that of the group: each rank has its shards, or the same.
        own: objects whose state is that of one rank, such as data loaders.
        ruled: buffers and frozen parameters with a rule; None: there are none.
    """

    model: nn.Module
    shared: Mapping[str, Any]
    own: Mapping[str, Any]
    ruled: ModuleBuffers | None = None

    def tree(self, rank: int) -> dict[str, Any]:
        """Return the state as nested values; tensors are not copied.

        Raises:
            CheckpointError: a value cannot be saved; names it and its type.
        """
        shared = {
            name: _of_optimizer(get_optimizer_state_dict(self.model, each), (name,))
            if isinstance(each, Optimizer)
            else _packed(each.state_dict(), name)
            for name, each in self.shared.items()
        }
        own = {name: _packed(each.state_dict(), name) for name, each in self.own.items()}
        found = persistent_buffers(self.model)
        if self.ruled is not None:
            found |= self.ruled.by_name()
        buffers = {name: each.detach() for name, each in found.items()}
        return {
            "state": shared,
            "buffers": buffers,
            "rank_state": {_rank_key(rank): own},
        }

    def check(self) -> None:
        """Refuse objects whose present state cannot be saved.

        Raises:
            CheckpointError: names the value and its type.
        """
        for name, each in {**self.shared, **self.own}.items():
            # Not as in `tree`: torch makes a step to initialize the state of a new optimizer.
            state = each.state_dict()
            _ = (
                _of_optimizer(state, (name,))
                if name in self.shared and isinstance(each, Optimizer)
                else _packed(state, name)
            )

    def load(self, root: Root, checkpoint: int, rank: int) -> None:
        """Load a checkpoint into the loop's objects.

        Raises:
            CheckpointMismatchError: the objects are others than those that were saved.
            CheckpointError: the checkpoint cannot be read.
        """
        folder = root.folder(checkpoint)
        for optimizer in self.shared.values():
            if isinstance(optimizer, Optimizer):
                optimizer.zero_grad()  # torch initializes the state of optimizers without gradients
        tree = self.tree(rank)
        saved = read_manifest(folder)
        entries: list[TensorRecord | ValueRecord] = list(saved.tensors.values())
        entries += saved.values.values()
        mine = ("rank_state", _rank_key(rank))
        if not any(entry.path[:2] == mine for entry in entries):
            del tree["rank_state"]  # this rank did not exist, so that its objects begin again
        own = tree.get("rank_state", {}).get(_rank_key(rank), {})
        for name, each in self.shared.items():
            if isinstance(each, Optimizer):
                _fit_optimizer(tree["state"][name], ("state", name), saved)
            else:
                _fit_tensors(tree["state"][name], ("state", name), saved)
        for name, packed in own.items():
            _fit_tensors(packed, (*mine, name), saved)
        load(tree, folder, partial=True)
        options = StateDictOptions(strict=False)  # parameters without a gradient have no state
        for name, each in self.shared.items():
            found = tree["state"][name]
            if isinstance(each, Optimizer):
                set_optimizer_state_dict(self.model, each, found, options=options)
            else:
                each.load_state_dict(_unpacked(found, each.state_dict()))
        for name, packed in own.items():
            self.own[name].load_state_dict(_unpacked(packed, self.own[name].state_dict()))


def _packed(state: object, name: str) -> dict[str, Any]:
    """Return the state of an object as its tensors and one plain value with their places.

    So its structure may change in the course of a training. Planners do not look into tuples.
    Values of NumPy and bytes become tensors of bytes.

    Args:
        state: the state.
        name: name of the object, for messages.

    Raises:
        CheckpointError: a value cannot be saved; names it and its type.
    """
    tensors: dict[str, Tensor] = {}
    places: list[tuple[object, ...]] = []  # path, kind, type and shape of each tensor

    def plain(value: object, path: tuple[object, ...]) -> object:
        if isinstance(value, Mapping):
            return {key: plain(each, (*path, key)) for key, each in value.items()}
        if type(value) in (list, tuple):
            items = [plain(each, (*path, at)) for at, each in enumerate(cast(list[Any], value))]
            return tuple(items) if isinstance(value, tuple) else items
        if isinstance(value, Tensor) and value.dtype in DTYPES.values():
            place: tuple[object, ...] = ("tensor", None, ())
        elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "OV":
            kind = "array" if isinstance(value, np.ndarray) else "scalar"
            place = (kind, value.dtype.str, value.shape)
            value = _bytes_tensor(value.tobytes())
        elif type(value) in (bytes, bytearray):
            place = (type(value).__name__, None, ())
            value = _bytes_tensor(cast(bytes, value))
        else:
            _check_plain(value, (name, *path))
            return value
        tensors[".".join(map(str, path))] = value
        places.append((path, *place))
        return None

    return {"values": (plain(state, ()), tuple(places)), "tensors": tensors}


def _bytes_tensor(value: bytes) -> Tensor:
    """Return bytes as a tensor, uint8 (N,)."""
    return torch.from_numpy(np.frombuffer(value, np.uint8).copy())


def _check_plain(value: object, path: tuple[object, ...]) -> None:
    """Refuse a value that is no tensor and cannot be saved.

    Raises:
        CheckpointError: names it and its type.
    """
    name = ".".join(map(str, path))
    if isinstance(value, Tensor):
        raise CheckpointError(
            f"state '{name}': a tensor of {value.dtype} cannot be saved",
            fix="Leave it out of the object's `state_dict`, or convert it to another type there.",
        )
    try:
        encode_value(name, value)
    except CheckpointError as error:
        raise CheckpointError(f"state {error.message}", fix=error.fix) from None


def _of_optimizer(value: object, path: tuple[object, ...]) -> object:
    """Return the nested state of an optimizer, with numbers of NumPy as plain ones.

    Raises:
        CheckpointError: a value cannot be saved; names it and its type.
    """
    if isinstance(value, Mapping):
        return {key: _of_optimizer(each, (*path, key)) for key, each in value.items()}
    if type(value) is list:
        return [_of_optimizer(each, (*path, at)) for at, each in enumerate(value)]
    if type(value) is tuple:
        return tuple(_of_optimizer(each, (*path, at)) for at, each in enumerate(value))
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, Tensor) or value.dtype not in DTYPES.values():
        _check_plain(value, path)
    return value


def _unpacked(packed: Mapping[str, Any], example: object) -> Any:
    """Return the state that was packed; ``example``: a state of the same object."""
    values, found = packed["values"]
    places = {tuple(path): (kind, dtype, tuple(shape)) for path, kind, dtype, shape in found}

    def whole(value: object, path: tuple[object, ...], like: object) -> object:
        if path in places:
            return _restored(packed["tensors"][".".join(map(str, path))], *places[path])
        if isinstance(value, dict):
            of = like if isinstance(like, Mapping) else {}
            found = {key: whole(each, (*path, key), of.get(key)) for key, each in value.items()}
            kind = type(like)
            return kind(found) if kind in (Counter, OrderedDict) else found
        if isinstance(value, list | tuple):
            some = like if isinstance(like, list | tuple) else ()
            items = [
                whole(each, (*path, at), other)
                for at, (each, other) in enumerate(zip_longest(value, some[: len(value)]))
            ]
            return type(value)(items)
        return value

    return whole(values, (), example)


def _restored(
    saved: Tensor, kind: str, dtype: str | None, shape: tuple[int, ...]
) -> Tensor | NDArray[Any] | np.generic | bytes | bytearray:
    """Return the value that `_packed` has stored as a tensor."""
    if kind == "tensor":
        return saved
    data = saved.numpy().tobytes()
    if kind == "bytearray":
        return bytearray(data)
    if dtype is None:
        return data
    array = np.frombuffer(bytearray(data), np.dtype(dtype)).reshape(shape)
    return array if kind == "array" else cast(np.generic, array[()])


def _fit_tensors(packed: dict[str, Any], path: tuple[str, ...], saved: RankManifest) -> None:
    """Replace the tensors of a packed state by empty ones of the saved names, shapes and types.

    Sharded tensors stay, to be loaded in the sharding of this process.

    Raises:
        CheckpointMismatchError: the checkpoint has no such state.
    """
    if not any(each.path == (*path, "values") for each in saved.values.values()):
        raise CheckpointMismatchError(f"the checkpoint has no state '{path[-1]}'")
    size, have = len(path) + 1, packed["tensors"]
    packed["tensors"] = {
        str(each.path[size]): have[each.path[size]]
        if isinstance(have.get(each.path[size]), DTensor)
        else torch.empty(each.shape, dtype=DTYPES[each.dtype])
        for each in saved.tensors.values()
        if each.path[:size] == (*path, "tensors")
    }


def _fit_optimizer(state: dict[str, Any], path: tuple[str, ...], saved: RankManifest) -> None:
    """Drop the state of parameters that had no gradient before the checkpoint.

    Raises:
        CheckpointMismatchError: the checkpoint has parameters or groups that the optimizer lacks.
    """
    entries: list[TensorRecord | ValueRecord] = [*saved.tensors.values(), *saved.values.values()]
    size = len(path)
    found = {each.path[size : size + 2] for each in entries if each.path[:size] == path}
    known = {("state", name) for name in state["state"]}
    known |= {("param_groups", at) for at in range(len(state["param_groups"]))}
    if unknown := sorted(".".join(map(str, each)) for each in found - known):
        raise CheckpointMismatchError(
            f"optimizer '{path[-1]}' has no '{unknown[0]}', which is in the checkpoint",
            fix="Build the optimizer as it was when the checkpoint was saved.",
        )
    for name in list(state["state"]):
        if ("state", name) not in found:
            del state["state"][name]


def _rank_key(rank: int) -> str:
    return f"rank-{rank:05d}"


def saved_states(
    root: Root, checkpoint: int, slices: Sequence[Ranges]
) -> list[tuple[Ranges, RankState]]:
    """Load the states of all slices of a checkpoint that have elements of some ranges.

    Args:
        root: checkpoints of the region.
        checkpoint: id.
        slices: ranges of the slices that a rank has now.

    Returns:
        Ranges and state of each slice; at least one, for its plain values.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    folder = root.folder(checkpoint)
    manifest = read_manifest(folder)
    found: list[tuple[Ranges, RankState]] = []
    control: dict[str, object] | None = None
    wanted: dict[tuple[str, str], Ranges] = {}
    tree: dict[str, Any] = {_EXCHANGE: {}}
    values: dict[tuple[str, str], dict[str, Any]] = {}
    for value in manifest.values.values():
        if value.path[0] == _EXCHANGE:
            _, rank, index, key = map(str, value.path)
            values.setdefault((rank, index), {})[key] = decode_value(value.value)
    for at, each in values.items():
        ranges = tuple((int(a), int(b)) for a, b in each["ranges"])
        control = control or json.loads(each["control"])
        if any(_meet(ranges, other) for other in slices):
            wanted[at] = ranges
    for record in manifest.tensors.values():
        if record.path[0] == _EXCHANGE:
            _, rank, index, _, name = map(str, record.path)
            if (rank, index) in wanted:
                empty = torch.empty(record.shape, dtype=DTYPES[record.dtype])
                parts = tree[_EXCHANGE].setdefault(rank, {}).setdefault(index, {})
                parts.setdefault("tensors", {})[name] = empty
    if control is None:
        raise CheckpointMissingError(
            f"{root}: checkpoint {checkpoint} has no state of an exchange",
            fix="Resume from another checkpoint of the run.",
        )
    load(tree, folder, partial=True)
    for (rank, index), ranges in wanted.items():
        tensors: Any = tree[_EXCHANGE].get(rank, {}).get(index, {}).get("tensors", {})
        own = json.loads(values[rank, index]["control"])
        found.append((ranges, RankState(tensors, own)))
    return found or [((), RankState({}, control))]


def _meet(a: Ranges, b: Ranges) -> bool:
    return any(max(x, u) < min(y, v) for x, y in a for u, v in b)


def _copied(value: Any) -> Any:
    """Return nested values whose tensors are copied to host memory."""
    if isinstance(value, DTensor):
        local = value.to_local().detach().to("cpu", copy=True)
        return DTensor(local, value._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_copied(each) for each in value]
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_copied(each) for each in value)
    return value


@dataclass(frozen=True, slots=True)
class _Write:
    """Order to write a part."""

    checkpoint: int
    tree: dict[str, Any]


class RankSaver:
    """Writes the parts of one rank in a thread, and commits those of the region on rank 0.

    Args:
        link: connection to the server.
        root: where the region's checkpoints are; see `root_of`.
        rank: this rank.
        world_size: ranks of the region.
        attempt: incarnation of the region's process group.
    """

    def __init__(
        self,
        link: ServerLink,
        root: Root,
        rank: int,
        world_size: int,
        attempt: int,
    ) -> None:
        self._link, self._root = link, root
        self._rank, self._world_size, self._attempt = rank, world_size, attempt
        self._orders: queue.SimpleQueue[_Write | Message | None] = queue.SimpleQueue()
        self._writing: int | None = None
        self._has_saved = False
        self._thread = threading.Thread(target=self._run, name="geo-ray-save", daemon=True)
        self._thread.start()

    def save(
        self, checkpoint: int, states: Sequence[tuple[Ranges, RankState]], loop: LoopState
    ) -> None:
        """Copy the state of this rank, which the thread then writes.

        Args:
            checkpoint: id.
            states: ranges and whole state of each slice.
            loop: what else is saved.

        Raises:
            CheckpointError: the loop has a value that cannot be saved, and nothing has been saved
                yet. After that, training continues, and the region has no part of the checkpoint.
        """
        if self._writing is not None:
            cause = f"rank {self._rank} is still writing checkpoint {self._writing}"
            self._tell(unsaved_message(checkpoint, self._attempt, cause))
            return
        self._writing = checkpoint
        slices = {
            f"{number:04d}": {
                "ranges": [list(pair) for pair in ranges],
                "control": json.dumps(state.control),
                "tensors": dict(state.tensors),
            }
            for number, (ranges, state) in enumerate(states)
        }
        try:
            tree = _copied(loop.tree(self._rank) | {_EXCHANGE: {_rank_key(self._rank): slices}})
        except Exception as error:  # of the user's objects
            self._writing = None
            if isinstance(error, CheckpointError) and not self._has_saved:
                raise
            cause = error.message if isinstance(error, GeoRayError) else error_summary(error)
            log.warning("checkpoint %d is not saved: %s", checkpoint, cause)
            self._tell(unsaved_message(checkpoint, self._attempt, cause))
            return
        self._has_saved = True
        self._orders.put(_Write(checkpoint, tree))

    def on_message(self, message: Message) -> None:
        """Handle a message of the server, see `KINDS`."""
        self._orders.put(message)

    def close(self) -> None:
        """End the thread after what it is doing, unless that hangs."""
        self._orders.put(None)
        self._thread.join(_CLOSE_S)

    def _tell(self, message: Message) -> None:
        with suppress(GeoRayError):  # a server that is lost
            self._link.send(message)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            checkpoint = order.checkpoint if isinstance(order, _Write) else read_checkpoint(order)
            try:
                if isinstance(order, _Write):
                    self._write(order)
                elif order.kind == "commit":
                    self._commit(checkpoint, order)
                else:
                    self._root.folder(checkpoint).clear()
            except Exception as error:  # of any kind: training continues
                cause = error.message if isinstance(error, GeoRayError) else error_summary(error)
                log.warning("checkpoint %d is not saved: %s", checkpoint, cause)
                self._tell(unsaved_message(checkpoint, self._attempt, cause))
            finally:
                if isinstance(order, _Write):
                    self._writing = None

    def _write(self, order: _Write) -> None:
        folder = self._root.folder(order.checkpoint)
        key = _rank_key(self._rank)
        record = write_part(
            order.tree,
            folder,
            self._rank,
            self._world_size,
            only_here=[f"{_EXCHANGE}.{key}", f"rank_state.{key}"],
        )
        meta: Meta = {"checkpoint": order.checkpoint, "attempt": self._attempt}
        text = json.dumps(record.to_json()).encode()
        self._tell(Message("part", meta, text, "control", CONTROL))

    def _commit(self, checkpoint: int, order: Message) -> None:
        records, keep = commit_order(order)
        commit(self._root.folder(checkpoint), [PartRecord.from_json(each) for each in records])
        meta: Meta = {"checkpoint": checkpoint, "attempt": self._attempt}
        self._tell(Message("saved", meta, b"", "control", CONTROL))
        for each, is_whole in self._root.ids().items():
            if each < checkpoint and (each not in keep or not is_whole):
                with suppress(CheckpointError, OSError):
                    self._root.folder(each).clear()
