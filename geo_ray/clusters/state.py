"""Where a cluster is written down: a folder of its own in a directory or a bucket."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from geo_ray.clusters.record import CLUSTER_KEY, ClusterRecord, decode_cluster, encode_cluster
from geo_ray.errors import ClusterStateError, RunDirectoryError, StoreError
from geo_ray.lease.place import StorePlace
from geo_ray.lease.store import ConditionalStore
from geo_ray.stores.uri import is_s3, join, local_path, parse_s3
from geo_ray.util.atomic_file import unwritable

STATUS_KEY = "status.json"
_MAKING = "making"
_NEAR_LOOK_S = 0.2
_FAR_LOOK_S = 5.0


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A cluster's folder.

    Attributes:
        uri: its directory, or its ``s3://`` address.
        name: the cluster's: the last part of it.
    """

    uri: str
    name: str

    @classmethod
    def at(cls, uri: str) -> ClusterState:
        """Return the state of a cluster by its folder; nothing is made."""
        if is_s3(uri):
            return cls(uri, parse_s3(uri).prefix.rpartition("/")[2])
        path = local_path(uri)
        return cls(str(path), path.name)

    @classmethod
    def below(cls, state: str, name: str) -> ClusterState:
        """Return the state of a cluster below what `provider.state` names."""
        return cls.at(join(state, name) if is_s3(state) else str(local_path(state) / name))

    @property
    def is_far(self) -> bool:
        """Whether it lies in a bucket."""
        return self._place.is_far

    @property
    def look_s(self) -> float:
        """How long to wait between two looks at it, and at its cloud."""
        return _FAR_LOOK_S if self.is_far else _NEAR_LOOK_S

    @property
    def path(self) -> Path:
        """Its directory.

        Raises:
            ClusterStateError: it lies in a bucket.
        """
        if self.is_far:
            raise ClusterStateError(
                f"{self.shown} is in a bucket, and machines of this computer need a directory",
                fix="Let `provider.state` name a directory.",
            )
        return Path(self.uri)

    @property
    def shown(self) -> str:
        """How people would type it."""
        return self._place.shown

    def store(self) -> ConditionalStore:
        """Return where record, journal and the autoscaler's lease lie."""
        return self._store("")

    def making(self) -> ConditionalStore:
        """Return where the lease of those lies that make or end the cluster."""
        return self._store(_MAKING)

    def make(self) -> None:
        """Make the folder, if it is a directory.

        Raises:
            RunDirectoryError: it cannot be written.
        """
        if not self.is_far:
            try:
                (self.path / _MAKING).mkdir(mode=0o700, parents=True, exist_ok=True)
                # Keys lie here, and what changes every second: neither commits nor uploads have it.
                (self.path / ".gitignore").write_text("*\n")
            except OSError as error:
                raise unwritable(self.path, error) from error

    def read(self) -> tuple[ClusterRecord | None, str | None]:
        """Return what is written, and the tag of it.

        Raises:
            ClusterStateError: it cannot be understood, or its bucket not be read.
            RunDirectoryError: its directory cannot be read.
        """
        try:
            found = self.store().read(CLUSTER_KEY)
        except RunDirectoryError as error:
            if not self.is_far:
                raise
            told = f"the cluster's folder {self.shown} (`provider.state`): {error.message}"
            raise ClusterStateError(told, fix=error.fix) from error
        return (None, None) if found is None else (decode_cluster(found.data, self.uri), found.tag)

    def known(self) -> ClusterRecord:
        """Return what is written.

        Raises:
            ClusterStateError: nothing is.
        """
        record, _ = self.read()
        if record is None:
            raise ClusterStateError(f"there is no cluster in {self.shown}")
        return record

    def write(self, record: ClusterRecord, tag: str | None) -> str:
        """Write the record if it has not changed; return its new tag.

        Raises:
            ClusterStateError: it has.
        """
        written = self.store().write(CLUSTER_KEY, encode_cluster(record), tag)
        if written is None:
            raise ClusterStateError(
                f"another command has changed what is written of {self.name} at this moment",
                fix="Look with `geo-ray status`, then try again.",
            )
        return written

    def _store(self, below: str) -> ConditionalStore:
        try:
            return self._place.store(below)
        except StoreError as error:
            raise ClusterStateError(error.message, fix=error.fix) from error

    @property
    def _place(self) -> StorePlace:
        return StorePlace(self.uri)


def names_cluster(place: Path | str) -> bool:
    """Whether a place is a cluster's folder, or a configuration, and so no run.

    Raises:
        RunDirectoryError: it lies in a bucket, which cannot be read.
    """
    name = str(place)
    if is_s3(name):
        return ClusterState.at(name).store().read(CLUSTER_KEY) is not None
    return name.endswith((".yaml", ".yml")) or (Path(name) / CLUSTER_KEY).is_file()
