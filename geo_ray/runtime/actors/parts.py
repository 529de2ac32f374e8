"""Parts of checkpoints: what each process saves, under which name, and how it is found again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from geo_ray.checkpoint.manifest import PartInfo
from geo_ray.checkpoint.names import AVERAGER_PART, shard_part_name
from geo_ray.checkpoint.parts import InPieces, write_part
from geo_ray.checkpoint.places import PartPlaces
from geo_ray.checkpoint.spool_folder import SpoolFolder
from geo_ray.errors import GeoRayError, RunDirectoryError
from geo_ray.training.averager.averager_snapshot import AveragerSnapshot
from geo_ray.training.lazy_copy import LazyCopy
from geo_ray.training.server.effects import HANDED, Snapshot
from geo_ray.training.server.shard import Shard
from geo_ray.util.blame import summary
from geo_ray.util.threads import given_way

_WIRE = "wire/"  # tensors of the exchange, in the primary shard's part


def wire_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the exchange among those of a primary shard's part."""
    found = {k: v for k, v in tensors.items() if k.startswith(_WIRE)}
    return {name.removeprefix(_WIRE): value for name, value in found.items()}


@dataclass(frozen=True, slots=True)
class HeldShard:
    """A shard in the process that holds it.

    Attributes:
        shard: the shard.
        region: its region.
        index: its number in the region; 0 is the primary one.
        places: where parts of checkpoints go.
        handed: where the newest part of a copy for a newcomer is, until that has it.
    """

    shard: Shard
    region: str
    index: int
    places: PartPlaces
    handed: SpoolFolder = field(default_factory=SpoolFolder)

    def write_part(self, checkpoint: int) -> PartInfo:
        """Write the copy that the shard took for ``checkpoint``.

        Raises:
            RunDirectoryError, StoreError: if it cannot be written.
        """
        return self._write(checkpoint, None)

    def write_primary_part(self, snapshot: Snapshot) -> PartInfo:
        """The same with the region's control state, which is in the primary shard's part."""
        return self._write(snapshot.id, snapshot)

    def _write(self, checkpoint: int, snapshot: Snapshot | None) -> PartInfo:
        copies, counters = self.shard.release_snapshot(checkpoint)
        meta: dict[str, Any] = {"counters": dict(counters)}
        tensors: dict[str, Tensor | InPieces] = {**copies}
        if snapshot is not None:
            on_wire: dict[str, Tensor | InPieces] = {**snapshot.tensors, **snapshot.lent}
            tensors |= {_WIRE + name: value for name, value in on_wire.items()}
            meta["control"] = dict(snapshot.control)
        name = shard_part_name(self.region, self.index)
        if checkpoint < HANDED:
            folder = self.places.folder(checkpoint)
            if not self.places.far:
                return write_part(folder, name, tensors, meta)
            keep([*copies.values(), *([] if snapshot is None else snapshot.lent.values())])
            return given_way(partial(write_part, folder, name, tensors, meta))
        self.handed.clear()
        return write_part(self.handed, name, tensors, meta)


@dataclass(frozen=True, slots=True)
class Handed:
    """A region's state at a border, which newcomers begin with.

    Attributes:
        giver: the region.
        parts: their fingerprints, in the order of its shards.
        rows: the newcomer's own books of rows, if it was there before.
    """

    giver: str
    parts: tuple[PartInfo, ...]
    rows: Mapping[str, object] | None = None


def typed(error: Exception) -> GeoRayError:
    """Why a part could not be written, as an error of geo_ray's tree."""
    if isinstance(error, GeoRayError):
        return error
    return RunDirectoryError(f"a part of a checkpoint was not written: {summary(error)}")


def keep(copies: Iterable[object]) -> None:
    """Copy what changes at once, in the order in which it will, for who sends it elsewhere.

    That takes so much longer than a step that next to nothing would be sent before it changes: the
    step would have to copy it all, while everybody waits. Here it is copied beside the gradients,
    and who sends it then holds nothing that a step wants, so it may give way to all that compute.
    """
    for copy in [each for each in copies if isinstance(each, LazyCopy)][::-1]:
        copy.secure()


def write_hub_part(places: PartPlaces, snapshot: AveragerSnapshot) -> PartInfo:
    """Write the averager's state.

    Raises:
        RunDirectoryError, StoreError: if it cannot be written.
    """
    control: dict[str, Any] = {"control": snapshot.control}
    folder = places.folder(snapshot.id)
    write = partial(write_part, folder, AVERAGER_PART, snapshot.copies, control)
    if not places.far:
        return write()
    keep(snapshot.copies.values())
    return given_way(write)
