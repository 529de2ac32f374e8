"""Parts of checkpoints: what each process saves, under which name, and how it is found again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from geo_ray.checkpoint.manifest import PartInfo
from geo_ray.checkpoint.parts import write_part
from geo_ray.checkpoint.store import directory_of
from geo_ray.training.averager.averager import AveragerSnapshot

AVERAGER_PART = "averager"
_WIRE = "wire/"  # tensors of the exchange, in the part of the lead's shard


def on_wire(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The exchange's tensors under their names within the lead's part."""
    return {_WIRE + name: value for name, value in tensors.items()}


def off_wire(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `on_wire`; other tensors are left out."""
    found = {k: v for k, v in tensors.items() if k.startswith(_WIRE)}
    return {name.removeprefix(_WIRE): value for name, value in found.items()}


def shard_part_name(region: str, index: int) -> str:
    """Name of the part of one shard."""
    return f"{region}-ps{index}"


def write_shard_part(
    parts_dir: str,
    checkpoint: int,
    region: str,
    index: int,
    snapshot: tuple[Mapping[str, Tensor], Mapping[str, float]],
    control: Mapping[str, Any] | None = None,
) -> PartInfo:
    """Write a shard's state; the lead's part also holds the region's control state.

    Raises:
        RunDirectoryError: if it cannot be written.
    """
    tensors, counters = snapshot
    meta: dict[str, Any] = {"counters": dict(counters)}
    if control is not None:
        meta["control"] = dict(control)
    directory = directory_of(Path(parts_dir), checkpoint)
    return write_part(directory, shard_part_name(region, index), tensors, meta)


def write_hub_part(parts_dir: str, snapshot: AveragerSnapshot) -> PartInfo:
    """Write the averager's state.

    Raises:
        RunDirectoryError: if it cannot be written.
    """
    directory = directory_of(Path(parts_dir), snapshot.id)
    control: dict[str, Any] = {"control": snapshot.control}
    return write_part(directory, AVERAGER_PART, snapshot.tensors, control)
