"""What is written down of a cluster, so that whoever comes next knows it: one small record."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field, TypeAdapter, ValidationError

from geo_ray.autoscale.config import AutoscaleConfig
from geo_ray.autoscale.target import ClusterTarget
from geo_ray.config.base import StrictModel
from geo_ray.errors import ClusterStateError
from geo_ray.planning.plan import Plan
from geo_ray.providers.base import Pool
from geo_ray.providers.config import ProviderConfig

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
    number: int = Field(1, ge=1, description="how manieth head this is")
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


class RunPlace(StrictModel):
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
    run: RunPlace
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
