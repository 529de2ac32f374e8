"""Locations of a run's checkpoints, as plain values for every process of the run.

`StoreRegions` accounts for checkpoint traffic between regions: the parts of a region's servers
go to the region's store if it has one, and everything else, including the averager's part, to the
common store, which is in one of the run's regions. A part written to or read from a store of
another region has crossed between the two. Claims and manifests are too small to count.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from geo_ray.base.files import Failpoint, no_failpoint
from geo_ray.storage.folders import (
    Folder,
    LocalFolder,
    LocalRoot,
    PartSource,
    PartTarget,
    Root,
    S3Folder,
    S3Root,
    bucket_at,
)
from geo_ray.storage.manifest import PartInfo, region_of
from geo_ray.storage.uri import is_s3, local_path, parse_s3


class PartFolder(PartSource, PartTarget, Protocol):
    """Location of one process's parts."""


class PartPlaces(Protocol):
    """Location of the parts of each process."""

    @property
    def is_remote(self) -> bool:
        """See `Root.is_remote`."""

    def __str__(self) -> str:
        """Address, for messages."""

    def folder(self, id: int) -> PartFolder:
        """Return the folder of one checkpoint."""

    def model_folder(self, run_dir: str) -> PartFolder:
        """See `CheckpointPlaces.model_folder`."""

    def prepare(self, region: str | None) -> None:
        """See `CheckpointPlaces.prepare`."""


@dataclass(frozen=True, slots=True)
class CheckpointPlaces:
    """Locations of a run's checkpoints, as plain values for every process.

    It is a `PartPlaces`.

    Attributes:
        main: a directory, or an ``s3://`` address.
        regions: separate locations for the parts of some regions' servers.
    """

    main: str
    regions: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return str(self.root())

    def root(self) -> Root:
        """Return the root of all locations; nothing is contacted yet."""
        main = _root_at(self.main)
        if not self.regions:
            return main
        return RegionRoot(main, {name: _root_at(uri) for name, uri in self.regions.items()})

    def folder(self, id: int) -> Folder:
        """Return the folder of one checkpoint."""
        return self.root().folder(id)

    @property
    def is_remote(self) -> bool:
        """See `Root.is_remote`."""
        return is_s3(self.main)

    def model_folder(self, run_dir: str) -> Folder:
        """Return the folder in which a region stores the final model.

        Args:
            run_dir: directory of the run, which is shared if there is no store.
        """
        return self.beside("model") if self.is_remote else LocalFolder(Path(run_dir))

    def beside(self, name: str) -> Folder:
        """Return a folder outside of checkpoints."""
        if self.is_remote:
            return S3Root(self.main).beside(name)
        return LocalFolder(Path(self.main) / name)

    def prepare(self, region: str | None) -> None:
        """Import the client of the store for the parts of a region, or of none.

        The import takes half a second, during which a checkpoint would block training.
        """
        address = self.regions.get(region or "", self.main)
        if is_s3(address):
            bucket_at(address)


class RegionFolder:
    """A `Folder` whose files are in the folder of their region, if it has one.

    Args:
        main: folder of all others.
        regions: folders by region.
    """

    def __init__(self, main: Folder, regions: Mapping[str, Folder]) -> None:
        self._main = main
        self._regions = regions

    def name_of(self, file: str) -> str:
        """See `Folder.name_of`."""
        return self._of(file).name_of(file)

    def write(
        self,
        file: str,
        chunks: Iterable[memoryview | bytes],
        num_bytes: int,
        failpoint: Failpoint = no_failpoint,
    ) -> None:
        """See `Folder.write`."""
        self._of(file).write(file, chunks, num_bytes, failpoint)

    def open(self, file: str, num_bytes: int | None = None) -> io.RawIOBase:
        """See `Folder.open`."""
        return self._of(file).open(file, num_bytes)

    def has(self, file: str) -> bool:
        """See `Folder.has`."""
        return self._of(file).has(file)

    def sizes(self) -> dict[str, int]:
        """See `Folder.sizes`."""
        return {
            file: size
            for folder in (self._main, *self._regions.values())
            for file, size in folder.sizes().items()
            if self._of(file) is folder
        }

    def remove(self, files: Iterable[str]) -> None:
        """See `Folder.remove`."""
        for file in files:
            self._of(file).remove([file])

    def clear(self) -> None:
        """See `Folder.clear`; the main folder last, because it marks the checkpoint as existing."""
        for folder in (*self._regions.values(), self._main):
            folder.clear()

    def _of(self, file: str) -> Folder:
        return self._regions.get(region_of(file) or "", self._main)


class RegionRoot:
    """A `Root` with separate roots for the parts of some regions' servers.

    Args:
        main: root of claims, manifests and all other parts.
        regions: roots by region.
    """

    def __init__(self, main: Root, regions: Mapping[str, Root]) -> None:
        self._main = main
        self._regions = regions
        self.is_remote = True

    def __str__(self) -> str:
        return str(self._main)

    def folder(self, id: int) -> RegionFolder:
        """See `Root.folder`."""
        folders = {region: root.folder(id) for region, root in self._regions.items()}
        return RegionFolder(self._main.folder(id), folders)

    def ids(self) -> dict[int, bool]:
        """See `Root.ids`."""
        found = {id: False for root in self._regions.values() for id in root.ids()}
        return found | self._main.ids()

    def claim(self, id: int) -> None:
        """See `Root.claim`."""
        self._main.claim(id)

    def owner(self, id: int) -> Literal["self", "other"] | None:
        """See `Root.owner`."""
        return self._main.owner(id)

    def sweep(self, is_left: Callable[[int], bool]) -> None:
        """See `Root.sweep`."""
        for root in (self._main, *self._regions.values()):
            root.sweep(is_left)


def folder_at(address: str) -> Folder:
    """Return the folder at an address: a directory, ``file:///dir``, or ``s3://bucket/prefix?...``.

    Nothing is contacted or created yet.

    Raises:
        StoreError: the address is invalid or contains credentials.
    """
    if not is_s3(address):
        return LocalFolder(local_path(address))
    prefix = parse_s3(address).prefix
    return S3Folder(address, f"{prefix}/" if prefix else "")


def _root_at(address: str) -> Root:
    return S3Root(address) if is_s3(address) else LocalRoot(Path(address))


Crossed = Mapping[tuple[str, str], int]
"""Bytes by (source, destination)."""


@dataclass(frozen=True, slots=True)
class StoreRegions:
    """Regions of a run's stores.

    Attributes:
        main: region of the common store.
        own: regions with their own store.
    """

    main: str
    own: Collection[str] = ()

    def of(self, region: str | None) -> str:
        """Return the region of the store of ``region``; None: the averager's part."""
        return region if region is not None and region in self.own else self.main

    def saved(self, parts: Iterable[PartInfo], leader: str) -> Crossed:
        """Return the traffic of a checkpoint.

        Args:
            parts: all parts.
            leader: the averager's region.
        """
        found: Counter[tuple[str, str]] = Counter()
        for part in parts:
            region = region_of(part.name)
            found[region or leader, self.of(region)] += part.bytes
        return _between(found)

    def resumed(self, parts: Iterable[PartInfo], leader: str) -> Crossed:
        """Return the traffic of a resume, in the opposite direction of a checkpoint."""
        return {(dst, src): count for (src, dst), count in self.saved(parts, leader).items()}


def _between(found: Counter[tuple[str, str]]) -> Crossed:
    return {(src, dst): count for (src, dst), count in found.items() if src != dst}
