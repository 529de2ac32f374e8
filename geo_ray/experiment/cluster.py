"""The Ray cluster of a run: a local one that starts with it, or an existing one."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from geo_ray.base.model import PathText, StrictModel


class LocalClusterConfig(StrictModel):
    """A Ray head and one node per region on this machine, for the duration of the run."""

    kind: Literal["local"] = "local"
    cpus_per_region: float | None = Field(
        None, gt=0, description="logical CPUs of each region; null: as many as the run needs"
    )
    object_store_bytes: int = Field(
        100_000_000, ge=80_000_000, description="shared memory in bytes of each node's object store"
    )
    start_timeout_s: float = Field(90.0, gt=0, description="longest wait for all nodes in seconds")
    temp_dir: PathText | None = Field(
        None,
        description="parent of the directory for sockets and logs, short because of socket "
        "paths; null: the system's",
    )
    dashboard: bool = Field(False, description="whether to start Ray's dashboard, on 127.0.0.1")
    port: int = Field(0, ge=0, le=65535, description="port of the head; 0: any free one")


class ExistingClusterConfig(StrictModel):
    """The cluster of the Ray job, or the one at an address."""

    kind: Literal["existing"] = "existing"
    address: str = Field(
        "auto",
        description="host:port of the head; auto: the cluster of the Ray job, else RAY_ADDRESS, "
        "else the one started on this machine",
    )
    connect_timeout_s: float = Field(30.0, gt=0, description="longest wait for the head in seconds")


ClusterConfig = Annotated[LocalClusterConfig | ExistingClusterConfig, Field(discriminator="kind")]
"""The ``cluster`` section of a configuration."""
