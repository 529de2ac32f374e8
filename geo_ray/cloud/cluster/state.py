"""The record of a cluster: its model, its folder, and the lock of those who change it.

A cluster has a folder of its own in a directory or a bucket. A record is written only if nobody
else changed it since it was read; `alone` makes those who create or end a cluster wait for each
other.
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


class StandingHead(StrictModel):
    """A head that was there before the cluster and stays after it: a stack of Terraform's."""

    stack: str = Field(description="its name")
    machine: str = Field(description="the cloud's name of the head's machine")
    address: str = Field(description="host:port of Ray's head")


class HeadRecord(StrictModel):
    """The machine of the head.

    Its request has its number, since a launch that has ended is not repeated under the same name.
    """

    cloud: Literal["local", "aws", "tencent"]
    pool: Pool
    number: int = Field(1, ge=1, description="number of this head; each new one gets the next")
    port: int = Field(6379, ge=1, le=65535, description="of the head")
    dashboard_port: int = Field(8265, ge=1, le=65535, description="of dashboard and job server")
    ends_unix_s: float | None = Field(
        None, description="when it ends by itself; null: not, since others made it"
    )
    is_known: bool = Field(
        False,
        description="whether it was seen, or given up: what is not listed any more has ended, and "
        "its launch is not repeated",
    )
    standing: StandingHead | None = Field(
        None, description="the head that is there; null: the cluster has one of its own"
    )


class RunLocation(StrictModel):
    """The run that a cluster is made for."""

    name: str
    dir: str | None = Field(description="its directory or address; null: not known beforehand")


class ClusterRecord(StrictModel):
    """A cluster as it was asked for. Every change of it is written only if nobody else's came."""

    version: Literal[1] = 1
    name: str
    id: str = Field(
        "",
        pattern=r"^[0-9a-f]*$",
        description="made up when it was first made: tells it from others of its name; empty: "
        "made by a release that gave none",
    )
    phase: Phase
    made: int = Field(ge=1, description="how often a cluster of this name was made")
    release: str = Field(description="of geo_ray that made it")
    digest: str = Field(description="of the configuration it was made of")
    began_unix_s: float
    ended_unix_s: float | None = Field(
        None, description="when it was taken down: its head is paid until then"
    )
    clouds: Clouds = Field(description="where its machines are")
    head: HeadRecord
    run: RunLocation
    provider: ProviderConfig
    autoscale: AutoscaleConfig
    target: ClusterTarget = Field(description="what should run")
    plan: Plan

    @property
    def token_secret(self) -> str:
        """Name of the secret with Ray's token: of a head that was there before, its own one."""
        if self.head.standing is not None:
            section = self.provider.aws if self.head.cloud == "aws" else self.provider.tencent
            if section is not None and section.join is not None:
                return section.join.token_secret
        return "-".join(filter(None, ("geo-ray", self.name, self.id, "token")))


_READER: Final = TypeAdapter(ClusterRecord)


def encode_cluster(record: ClusterRecord) -> bytes:
    """Write a record as `decode_cluster` reads it."""
    return record.model_dump_json(indent=1).encode() + b"\n"


def decode_cluster(data: bytes, where: str) -> ClusterRecord:
    """Read a record.

    Args:
        data: its bytes.
        where: it lies, for the message.

    Raises:
        ClusterStateError: the bytes are no record.
    """
    try:
        return _READER.validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ClusterStateError(
            f"what is written of the cluster in {where} cannot be read: {place}: {first['msg']}",
            fix="Use the release of geo_ray that made it.",
        ) from None


STATUS_KEY = "status.json"
_MAKING = "making"
_LOCAL_POLL_S = 0.2
_REMOTE_POLL_S = 5.0


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
    def is_remote(self) -> bool:
        """Whether it lies in a bucket."""
        return self._place.is_remote

    @property
    def look_s(self) -> float:
        """How long to wait between two looks at it, and at its cloud."""
        return _REMOTE_POLL_S if self.is_remote else _LOCAL_POLL_S

    @property
    def path(self) -> Path:
        """Its directory.

        Raises:
            ClusterStateError: it lies in a bucket.
        """
        if self.is_remote:
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
        if not self.is_remote:
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
            if not self.is_remote:
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
    def _place(self) -> StoreLocation:
        return StoreLocation(self.uri)


def names_cluster(place: Path | str) -> bool:
    """Whether a place is a cluster's folder, or a configuration, and so no run.

    Raises:
        RunDirectoryError: it lies in a bucket, which cannot be read.
    """
    name = str(place)
    if is_s3(name):
        return ClusterState.at(name).store().read(CLUSTER_KEY) is not None
    return name.endswith((".yaml", ".yml")) or (Path(name) / CLUSTER_KEY).is_file()


_AGAIN_S: Final = 0.5


@contextmanager
def alone(
    state: ClusterState, doing: str, tell: Callable[[str], None], longest_s: float = 600.0
) -> Iterator[LeaseKeeper]:
    """Be the only one that makes or ends a cluster while the block runs.

    Who is killed meanwhile is waited for as long as its lease lives, on the same machine not at
    all.

    Args:
        state: of the cluster.
        doing: what this is, for others that wait.
        tell: told that another one is at work.
        longest_s: longest wait.

    Raises:
        ClusterBusyError: another one was at work all the time.
        ClusterStateError: whether one is cannot be read.
    """
    lives_s = REMOTE_LEASE_S if state.is_remote else LEASE_S
    deadline_s = time.monotonic() + longest_s
    has_told = False

    def looking(_: str) -> None:
        tell("looking whether another command that works on it still lives")

    while True:
        try:
            keeper = LeaseSeeker(state.making(), state.name, looking, lives_s=lives_s).take()
            break
        except RunDirectoryError as error:
            raise ClusterStateError(
                f"whether another command works on {state.name} cannot be read in {state.shown}: "
                f"{error.message}",
                fix="If none does, remove making/lease.json there, and the autoscaler's "
                "lease.json beside it if that is torn, too.",
            ) from error
        except RunHeldError as error:
            if time.monotonic() > deadline_s:
                raise ClusterBusyError(
                    f"another command has made or ended {state.name} for {longest_s:.0f} s: "
                    f"{error.message.partition(': ')[2]}"
                ) from None
            if not has_told:
                has_told = True
                tell(f"waiting for another command: {error.message.partition(': ')[2]}")
            time.sleep(_AGAIN_S)
    try:
        keeper.note(doing)
        yield keeper
    finally:
        keeper.close()
