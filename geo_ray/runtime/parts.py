"""Parts of checkpoints: what each process saves, under which name, and how it is found again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from geo_ray.checkpoint.manifest import PartInfo
from geo_ray.checkpoint.parts import write_part
from geo_ray.checkpoint.store import directory_of
from geo_ray.training.averager import HubSnapshot

AVERAGER_PART = "averager"


def shard_part_name(region: str, index: int) -> str:
    """Name of the part of one shard."""
    return f"{region}-ps{index}"


def write_shard_part(
    parts_dir: str,
    checkpoint: int,
    region: str,
    index: int,
    snapshot: tuple[Mapping[str, Tensor], Mapping[str, int]],
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


def write_hub_part(parts_dir: str, snapshot: HubSnapshot) -> PartInfo:
    """Write the averager's state.

    Raises:
        RunDirectoryError: if it cannot be written.
    """
    directory = directory_of(Path(parts_dir), snapshot.id)
    control: dict[str, Any] = {"control": snapshot.control}
    return write_part(directory, AVERAGER_PART, snapshot.tensors, control)
