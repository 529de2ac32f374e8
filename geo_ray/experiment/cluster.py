"""The ``cluster`` section: a local cluster on this machine, or an existing one."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from geo_ray.base.model import PathText, StrictModel


class LocalClusterConfig(StrictModel):
    """A head and one node per region on this machine, which exist for the duration of the run."""

    kind: Literal["local"] = "local"
    cpus_per_region: float | None = Field(
        None, gt=0, description="logical CPUs of each region; null: as many as the run requests"
    )
    object_store_bytes: int = Field(
        100_000_000, ge=80_000_000, description="shared memory of each node's object store"
    )
    start_timeout_s: float = Field(90.0, gt=0, description="timeout for the start of all nodes")
    temp_dir: PathText | None = Field(
        None,
        description="parent of a new directory for sockets and logs; null: the system's default",
    )
    dashboard: bool = Field(False, description="start Ray's dashboard")
    port: int = Field(0, ge=0, le=65535, description="port of the head; 0: any free one")


class ExistingClusterConfig(StrictModel):
    """The cluster that the job runs in, or the cluster at an address."""

    kind: Literal["existing"] = "existing"
    address: str = Field("auto", description="host:port of the head, or auto")
    connect_timeout_s: float = Field(
        30.0, gt=0, description="timeout for the connection to the head"
    )


ClusterConfig = Annotated[LocalClusterConfig | ExistingClusterConfig, Field(discriminator="kind")]
"""The ``cluster`` section of a configuration."""
