"""Parts of checkpoints: saving and loading the averager, shards and messages.

A checkpoint is a consistent snapshot that does not block training: the averager copies its state
when it begins and marks the next answer to every region, which copies its own state before it
merges a marked answer. Messages are saved as plain values and tensors named ``PREFIX/payload``, or
``PREFIX/data`` (with ``ids`` and ``blocks``) where coded; model buffers as ``PREFIX/buffers``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from geo_ray.base.errors import CheckpointCorruptError, GeoRayError, RunDirectoryError
from geo_ray.base.threads import given_way
from geo_ray.base.user_code import error_summary
from geo_ray.codecs.base import Coded, LossyBlocks, LossyReport
from geo_ray.storage.folders import TempFileFolder
from geo_ray.storage.manifest import AVERAGER_PART, PartInfo, shard_part_name
from geo_ray.storage.parts import InPieces, write_part
from geo_ray.storage.places import PartPlaces
from geo_ray.strategies.state import Update
from geo_ray.training.effects import FIRST_TRANSFER, Snapshot
from geo_ray.training.lazy_copy import Copied, LazyCopy
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.shard import Shard

M = TypeVar("M", Update, UpdateMessage, ReplyMessage)

# Fields that are no plain values, and those that no checkpoint has: none is made while members
# change, and all regions of a resume begin it together.
_APART: Final = ("payload_P", "coded", "lossy", "buffers_E", "flush", "barrier", "view")


def save_messages(
    prefix: str, messages: Sequence[Update | UpdateMessage | ReplyMessage]
) -> tuple[dict[str, Tensor], list[dict[str, object]]]:
    """Return messages as tensors by name and plain values, in order.

    A payload that several messages share, such as the answers of a round, is saved once. Tensors
    are not copied.

    Args:
        prefix: prefix of the tensors' names.
        messages: messages of one kind.
    """
    tensors: dict[str, Tensor] = {}
    rows: list[dict[str, object]] = []
    places: dict[int, str] = {}
    for number, message in enumerate(messages):
        coded = None if isinstance(message, Update) else message.coded
        body = message.payload_P if coded is None else coded
        place = places.setdefault(id(body), f"{prefix}/{number}")
        row = {f.name: getattr(message, f.name) for f in fields(message) if f.name not in _APART}
        row["place"] = place
        if not isinstance(message, Update) and message.buffers_E.numel():
            row["buffers"] = places.setdefault(id(message.buffers_E), f"{prefix}/{number}")
            tensors[f"{row['buffers']}/buffers"] = message.buffers_E
        if message.payload_P.is_meta:  # only the header of merged messages is saved
            row["merged"] = message.payload_P.numel()
        elif coded is None:
            tensors[f"{place}/payload"] = message.payload_P
        else:
            row["coded"] = _save_coded(coded, place, tensors)
        if isinstance(message, ReplyMessage) and message.lossy is not None:
            report = message.lossy
            row["lossy"] = [report.now.hex(), report.late_seq, report.late.hex()]
        rows.append(row)
    return tensors, rows


def load_messages(kind: type[M], tensors: Mapping[str, Tensor], rows: object) -> list[M]:
    """Load the messages of `save_messages`; shared payloads are shared again.

    Args:
        kind: class of the messages.
        tensors: tensors by name; not copied.
        rows: plain values; None for a checkpoint without any.

    Raises:
        CheckpointCorruptError: tensors and values do not fit.
    """
    try:
        return [_load(kind, tensors, dict(row)) for row in rows or []]  # type: ignore[attr-defined]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(
            f"a saved {kind.__name__.lower()} cannot be read: {error!r}"
        ) from error


def save_coded(coded: Coded, place: str) -> tuple[dict[str, Tensor], dict[str, object]]:
    """A coded vector as tensors, whose names begin with ``place``, and plain values."""
    tensors: dict[str, Tensor] = {}
    return tensors, _save_coded(coded, place, tensors)


def load_coded(tensors: Mapping[str, Tensor], row: Mapping[str, Any], place: str) -> Coded:
    """The vector of `save_coded`.

    Raises:
        KeyError: a tensor or a value is missing.
    """
    lossy = None
    if row.get("bands") is not None:
        ids_L, blocks_LK = tensors[f"{place}/ids"], tensors[f"{place}/blocks"]
        lossy = LossyBlocks(ids_L, blocks_LK, int(row["bands"]))
    return Coded(str(row["kind"]), int(row["num"]), tensors[f"{place}/data"], lossy)


def _save_coded(coded: Coded, place: str, tensors: dict[str, Tensor]) -> dict[str, object]:
    tensors[f"{place}/data"] = coded.data_B
    if coded.lossy is not None:
        tensors[f"{place}/ids"] = coded.lossy.ids_L
        tensors[f"{place}/blocks"] = coded.lossy.blocks_LK
    bands = None if coded.lossy is None else coded.lossy.bands
    return {"kind": coded.kind, "num": coded.num, "bands": bands}


def _load(kind: type[M], tensors: Mapping[str, Tensor], row: dict[str, Any]) -> M:
    place, coded, lossy = str(row.pop("place")), row.pop("coded", None), row.pop("lossy", None)
    merged, buffers = row.pop("merged", None), row.pop("buffers", None)
    known = {f.name for f in fields(kind)}
    if unknown := sorted(row.keys() - known):
        raise KeyError(f"unknown values {unknown}")
    if merged is not None:
        row["payload_P"] = torch.empty(int(merged), device="meta")
    elif coded is None:
        row["payload_P"] = tensors[f"{place}/payload"]
    else:
        row |= {"payload_P": torch.empty(0), "coded": load_coded(tensors, coded, place)}
    if buffers is not None:
        row["buffers_E"] = tensors[f"{buffers}/buffers"]
    if lossy is not None:
        now, late_seq, late = lossy
        row["lossy"] = LossyReport(bytes.fromhex(now), late_seq, bytes.fromhex(late))
    return kind(**row)


@dataclass(frozen=True, slots=True)
class AveragerSnapshot:
    """The averager's part of a checkpoint, as it was when that began."""

    id: int
    copies: dict[str, Copied]
    control: dict[str, object]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the copies as tensors, for callers that do not write them."""
        return {name: copy.whole() for name, copy in self.copies.items()}


@dataclass(slots=True)
class _SnapshotMark:
    """The newest checkpoint, and which regions had an answer that is marked with it."""

    id: int
    halt: bool
    notified: set[str] = field(default_factory=set)


@dataclass(slots=True)
class SnapshotMarks:
    """Marks answers with the newest checkpoint.

    After a failover no checkpoint begins until all regions are settled: a region may hold answers
    of the lost leader that the new one does not know.
    """

    _mark: _SnapshotMark | None = None
    _unsettled: set[str] = field(default_factory=set)

    @property
    def may_begin(self) -> bool:
        """Whether every region is settled."""
        return not self._unsettled

    def begin(self, checkpoint: int, *, halt: bool) -> None:
        """Mark the next answer to every region with ``checkpoint``."""
        self._mark = _SnapshotMark(checkpoint, halt)

    def marked(self, reply: ReplyMessage) -> ReplyMessage:
        """Return the answer, marked with the newest checkpoint unless its region knows it."""
        mark = self._mark
        if mark is None or reply.to in mark.notified:
            return reply
        mark.notified.add(reply.to)
        return replace(reply, checkpoint=mark.id, halt=mark.halt)

    def export(self) -> list[object] | None:
        """Return the newest checkpoint and the notified regions as plain values."""
        mark = self._mark
        return None if mark is None else [mark.id, mark.halt, sorted(mark.notified)]

    def restore(self, mark: Sequence[Any] | None) -> None:
        """Restore the result of `export`, with all regions settled."""
        self._unsettled = set()
        self._mark = (
            None if mark is None else _SnapshotMark(int(mark[0]), bool(mark[1]), set(mark[2]))
        )

    def join(self, region: str, donor: str) -> None:
        """Exclude a joining region from earlier checkpoints."""
        if self._mark is not None:
            self._mark.notified.add(region)

    def on_failover(self, members: Iterable[str]) -> None:
        """Mark all regions unsettled and drop the lost leader's checkpoint."""
        self._mark = None
        self._unsettled = set(members)

    def leave(self, region: str) -> None:
        """Stop waiting for a removed region."""
        self.settle(region)

    def settle(self, region: str) -> None:
        """A region holds only answers that are known here, or has left."""
        self._unsettled.discard(region)


_WIRE = "wire/"  # tensors of the exchange, in the primary shard's part


def wire_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the exchange among those of a primary shard's part."""
    found = {k: v for k, v in tensors.items() if k.startswith(_WIRE)}
    return {name.removeprefix(_WIRE): value for name, value in found.items()}


@dataclass(frozen=True, slots=True)
class HeldShard:
    """A shard in the process that holds it.

    Attributes:
        shard: shard.
        region: region.
        index: number in the region; 0 is the primary shard.
        places: storage of checkpoint parts.
        transferred: storage of the newest state transfer, until the joining region has it.
    """

    shard: Shard
    region: str
    index: int
    places: PartPlaces
    transferred: TempFileFolder = field(default_factory=TempFileFolder)

    def write_part(self, checkpoint: int) -> PartInfo:
        """Write the copy that the shard took for ``checkpoint``.

        Raises:
            RunDirectoryError, StoreError: if it cannot be written.
        """
        return self._write(checkpoint, None)

    def write_primary_part(self, snapshot: Snapshot) -> PartInfo:
        """Write the primary shard's part, which includes the region's control state."""
        return self._write(snapshot.id, snapshot)

    def _write(self, checkpoint: int, snapshot: Snapshot | None) -> PartInfo:
        copies, counters = self.shard.release_snapshot(checkpoint)
        meta: dict[str, Any] = {"counters": dict(counters)}
        tensors: dict[str, Tensor | InPieces] = {**copies}
        if snapshot is not None:
            on_wire: dict[str, Tensor | InPieces] = {**snapshot.tensors, **snapshot.lazy}
            tensors |= {_WIRE + name: value for name, value in on_wire.items()}
            meta["control"] = dict(snapshot.control)
        name = shard_part_name(self.region, self.index)
        if checkpoint < FIRST_TRANSFER:
            folder = self.places.folder(checkpoint)
            if not self.places.is_remote:
                return write_part(folder, name, tensors, meta)
            keep([*copies.values(), *([] if snapshot is None else snapshot.lazy.values())])
            return given_way(partial(write_part, folder, name, tensors, meta))
        self.transferred.clear()
        return write_part(self.transferred, name, tensors, meta)


@dataclass(frozen=True, slots=True)
class TransferredState:
    """A donor region's state at a barrier, from which joining regions start.

    Attributes:
        donor: donor region.
        parts: fingerprints of its parts, in the order of its shards.
        rows: joining region's own sample ledger, if it was a member before.
    """

    donor: str
    parts: tuple[PartInfo, ...]
    rows: Mapping[str, object] | None = None


def typed(error: Exception) -> GeoRayError:
    """Why a part could not be written, as an error of geo_ray's tree."""
    if isinstance(error, GeoRayError):
        return error
    return RunDirectoryError(f"a part of a checkpoint was not written: {error_summary(error)}")


def keep(copies: Iterable[object]) -> None:
    """Copy tensors at once, in the order in which they will change, before they are uploaded.

    An upload takes much longer than a step. Without this copy, the next step would have to copy
    everything while training waits. The upload can then run at low priority.
    """
    for copy in [each for each in copies if isinstance(each, LazyCopy)][::-1]:
        copy.secure()


def write_averager_part(places: PartPlaces, snapshot: AveragerSnapshot) -> PartInfo:
    """Write the averager's state.

    Raises:
        RunDirectoryError, StoreError: if it cannot be written.
    """
    control: dict[str, Any] = {"control": snapshot.control}
    folder = places.folder(snapshot.id)
    write = partial(write_part, folder, AVERAGER_PART, snapshot.copies, control)
    if not places.is_remote:
        return write()
    keep(snapshot.copies.values())
    return given_way(write)
