"""The record of a cluster, its folder, and the lock of commands that change it.

Each cluster has a folder in a directory or a bucket. A record is written only if it has not changed
since it was read. `cluster_lock` serializes commands that create or end a cluster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, TypeAdapter, ValidationError

from geo_ray.base.errors import (
    ClusterBusyError,
    ClusterStateError,
    RunDirectoryError,
    RunHeldError,
    StoreError,
)
from geo_ray.base.files import unwritable
from geo_ray.base.model import StrictModel
from geo_ray.cloud.autoscaler.target import ClusterTarget
from geo_ray.cloud.provider import Pool
from geo_ray.experiment.autoscale import AutoscaleConfig
from geo_ray.experiment.provider import ProviderConfig
from geo_ray.planner.plan import Plan
from geo_ray.runs.lease import LEASE_S, REMOTE_LEASE_S, LeaseKeeper, LeaseSeeker
from geo_ray.storage.conditional_store import ConditionalStore, StoreLocation
from geo_ray.storage.uri import is_s3, join, local_path, parse_s3

CLUSTER_KEY: Final = "cluster.json"

Phase = Literal["up", "ending", "down"]
Clouds = tuple[Literal["local", "aws", "tencent"], ...]


class ExistingHead(StrictModel):
    """An existing head that outlives the cluster, such as that of a Terraform stack."""

    stack: str = Field(description="its name")
    machine: str = Field(description="id of the head's machine in the cloud")
    address: str = Field(description="address of the Ray head, host:port")


class HeadRecord(StrictModel):
    """Machine of the head.

    Its launch request contains the number, since an ended launch cannot be repeated with the same
    id.
    """

    cloud: Literal["local", "aws", "tencent"]
    pool: Pool
    number: int = Field(1, ge=1, description="number of this head, counted per cluster")
    port: int = Field(6379, ge=1, le=65535, description="of the head")
    dashboard_port: int = Field(
        8265, ge=1, le=65535, description="port of dashboard and job server"
    )
    ends_unix_s: float | None = Field(
        None, description="when it ends by itself; null: never, for an existing head"
    )
    is_known: bool = Field(
        False,
        description="whether it was listed or given up: an unlisted head has ended, and "
        "its launch is not repeated",
    )
    existing: ExistingHead | None = Field(
        None, description="the existing head; null: the cluster launches its own"
    )


class RunLocation(StrictModel):
    """The run that a cluster serves."""

    name: str
    dir: str | None = Field(description="directory or URL; null: not known in advance")


class ClusterRecord(StrictModel):
    """Specification of a cluster. It is written only if it has not changed since it was read."""

    version: Literal[1] = 1
    name: str
    id: str = Field(
        "",
        pattern=r"^[0-9a-f]*$",
        description="unique id, generated at creation; empty: created by a release without ids",
    )
    phase: Phase
    made: int = Field(ge=1, description="how many clusters of this name were created")
    release: str = Field(description="geo_ray release that created it")
    digest: str = Field(description="digest of its configuration")
    began_unix_s: float
    ended_unix_s: float | None = Field(
        None, description="when it was taken down, the end of the head's cost"
    )
    clouds: Clouds = Field(description="clouds of its machines")
    head: HeadRecord
    run: RunLocation
    provider: ProviderConfig
    autoscale: AutoscaleConfig
    target: ClusterTarget = Field(description="what should run")
    plan: Plan

    @property
    def token_secret(self) -> str:
        """Name of the secret with the Ray token; for an existing head, that of the head."""
        if self.head.existing is not None:
            section = self.provider.aws if self.head.cloud == "aws" else self.provider.tencent
            if section is not None and section.join is not None:
                return section.join.token_secret
        return "-".join(filter(None, ("geo-ray", self.name, self.id, "token")))


_READER: Final = TypeAdapter(ClusterRecord)


def encode_cluster(record: ClusterRecord) -> bytes:
    """Encode a record for `decode_cluster`."""
    return record.model_dump_json(indent=1).encode() + b"\n"


def decode_cluster(data: bytes, where: str) -> ClusterRecord:
    """Decode a record.

    Args:
        data: encoded record.
        where: location, for the message.

    Raises:
        ClusterStateError: the data is not a valid record.
    """
    try:
        return _READER.validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ClusterStateError(
            f"the cluster record in {where} is invalid: {place}: {first['msg']}",
            fix="Use the geo_ray release that created it.",
        ) from None


STATUS_KEY = "status.json"
_LOCK = "lock"
_LOCAL_POLL_S = 0.2
_REMOTE_POLL_S = 5.0


@dataclass(frozen=True, slots=True)
class ClusterState:
    """Folder of a cluster.

    Attributes:
        uri: directory or ``s3://`` URL.
        name: name of the cluster: the last part of the URI.
    """

    uri: str
    name: str

    @classmethod
    def at(cls, uri: str) -> ClusterState:
        """Return the state of a cluster by its folder; nothing is created."""
        if is_s3(uri):
            return cls(uri, parse_s3(uri).prefix.rpartition("/")[2])
        path = local_path(uri)
        return cls(str(path), path.name)

    @classmethod
    def below(cls, state: str, name: str) -> ClusterState:
        """Return the state of a cluster below the folder of `provider.state`."""
        return cls.at(join(state, name) if is_s3(state) else str(local_path(state) / name))

    @property
    def is_remote(self) -> bool:
        """Whether the folder is in a bucket."""
        return self._place.is_remote

    @property
    def look_s(self) -> float:
        """Polling interval for the folder and the cloud."""
        return _REMOTE_POLL_S if self.is_remote else _LOCAL_POLL_S

    @property
    def path(self) -> Path:
        """The directory.

        Raises:
            ClusterStateError: the folder is in a bucket.
        """
        if self.is_remote:
            raise ClusterStateError(
                f"{self.shown} is in a bucket, but local machines need a directory",
                fix="Set `provider.state` to a directory.",
            )
        return Path(self.uri)

    @property
    def shown(self) -> str:
        """The folder, as shown to users."""
        return self._place.shown

    def store(self) -> ConditionalStore:
        """Return the store of the record, the journal and the autoscaler's lease."""
        return self._store("")

    def lock_store(self) -> ConditionalStore:
        """Return the store of the lease of commands that create or end the cluster."""
        return self._store(_LOCK)

    def make(self) -> None:
        """Create the folder, if it is a directory.

        Raises:
            RunDirectoryError: the folder cannot be written.
        """
        if not self.is_remote:
            try:
                (self.path / _LOCK).mkdir(mode=0o700, parents=True, exist_ok=True)
                # The folder contains keys and frequently changing files: exclude it from commits
                # and uploads.
                (self.path / ".gitignore").write_text("*\n")
            except OSError as error:
                raise unwritable(self.path, error) from error

    def read(self) -> tuple[ClusterRecord | None, str | None]:
        """Return the record and its tag.

        Raises:
            ClusterStateError: the record is invalid, or its bucket cannot be read.
            RunDirectoryError: its directory cannot be read.
        """
        try:
            found = self.store().read(CLUSTER_KEY)
        except RunDirectoryError as error:
            if not self.is_remote:
                raise
            text = f"the cluster's folder {self.shown} (`provider.state`): {error.message}"
            raise ClusterStateError(text, fix=error.fix) from error
        return (None, None) if found is None else (decode_cluster(found.data, self.uri), found.tag)

    def known(self) -> ClusterRecord:
        """Return the record.

        Raises:
            ClusterStateError: there is none.
        """
        record, _ = self.read()
        if record is None:
            raise ClusterStateError(f"no cluster exists in {self.shown}")
        return record

    def write(self, record: ClusterRecord, tag: str | None) -> str:
        """Write the record if it has not changed; return its new tag.

        Raises:
            ClusterStateError: the record has changed.
        """
        written = self.store().write(CLUSTER_KEY, encode_cluster(record), tag)
        if written is None:
            raise ClusterStateError(
                f"another command has just changed the record of {self.name}",
                fix="Check with `geo-ray status`, then retry.",
            )
        return written

    def _store(self, below: str) -> ConditionalStore:
        try:
            return self._place.store(below)
        except StoreError as error:
            raise ClusterStateError(error.message, fix=error.fix) from error

    @property
    def _place(self) -> StoreLocation:
        return StoreLocation(self.uri)


def names_cluster(place: Path | str) -> bool:
    """Whether a path is a cluster's folder or configuration, not a run.

    Raises:
        RunDirectoryError: the path is in a bucket that cannot be read.
    """
    name = str(place)
    if is_s3(name):
        return ClusterState.at(name).store().read(CLUSTER_KEY) is not None
    return name.endswith((".yaml", ".yml")) or (Path(name) / CLUSTER_KEY).is_file()


_AGAIN_S: Final = 0.5


@contextmanager
def cluster_lock(
    state: ClusterState, doing: str, notify: Callable[[str], None], longest_s: float = 600.0
) -> Iterator[LeaseKeeper]:
    """Hold the lock of commands that create or end a cluster while the block runs.

    The lock of a killed command expires with its lease; on the same machine, immediately.

    Args:
        state: folder of the cluster.
        doing: description of this command for others that wait.
        notify: called with a message while another command holds the lock.
        longest_s: timeout.

    Raises:
        ClusterBusyError: another command held the lock all the time.
        ClusterStateError: the lock cannot be read.
    """
    lives_s = REMOTE_LEASE_S if state.is_remote else LEASE_S
    deadline_s = time.monotonic() + longest_s
    has_reported = False

    def report_check(_: str) -> None:
        notify("checking whether another command still holds the cluster")

    while True:
        try:
            keeper = LeaseSeeker(
                state.lock_store(), state.name, report_check, lives_s=lives_s
            ).take()
            break
        except RunDirectoryError as error:
            raise ClusterStateError(
                f"the lock of {state.name} cannot be read in {state.shown}: {error.message}",
                fix="If no command is running, remove lock/lease.json there, and the lease.json "
                "of the autoscaler next to it if that is unreadable as well.",
            ) from error
        except RunHeldError as error:
            if time.monotonic() > deadline_s:
                raise ClusterBusyError(
                    f"another command has held {state.name} for {longest_s:.0f} s: "
                    f"{error.message.partition(': ')[2]}"
                ) from None
            if not has_reported:
                has_reported = True
                notify(f"waiting for another command: {error.message.partition(': ')[2]}")
            time.sleep(_AGAIN_S)
    try:
        keeper.note(doing)
        yield keeper
    finally:
        keeper.close()
