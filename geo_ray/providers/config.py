"""The ``provider`` section of a configuration: whose machines a cluster is made of."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from geo_ray.config.base import PathText, StrictModel
from geo_ray.errors import StoreError
from geo_ray.providers.aws.config import AwsProviderConfig
from geo_ray.providers.tencent.config import TencentProviderConfig
from geo_ray.providers.user_data import ImagePython
from geo_ray.stores.uri import is_s3, parse_s3

Rent = Literal["plan", "demand"]


class HeadConfig(StrictModel):
    """The machine that Ray's head runs on; nothing of a run is placed there but its driver."""

    region: str | None = Field(
        None, description="region of the run; null: the one where the averager is"
    )
    type: str | None = Field(
        None, description="instance type; null: that of the region's server, else of its workers"
    )
    zone: str | None = Field(None, description="of the cloud; null: the cloud chooses")
    life_h: float = Field(
        168.0, gt=0, description="it ends by itself after so long, whatever becomes of its maker"
    )


class LocalCloudConfig(StrictModel):
    """Machines that are processes of this computer, for trials and demos."""

    cpus: dict[str, int] = Field(
        default_factory=dict, description="logical CPUs by type of machine; a count only"
    )
    other_cpus: int = Field(4, ge=1, description="of the types that `cpus` does not name")
    start_delay_s: float = Field(0.0, ge=0, description="from a launch to a machine that runs")
    usd_per_hour: float = Field(
        0.1, gt=0, description="of what the book of prices does not have; play money"
    )
    longest_life_s: float = Field(
        43200.0, gt=0, description="no machine outlives this, whatever its launch says"
    )


class TlsSecrets(StrictModel):
    """Names of the secrets with which Ray encrypts what it says; they are put there by you."""

    certificate: str = Field(description="of every node: its addresses must be in it")
    key: str = Field(description="its key")
    ca: str = Field(description="the authority's certificate")


class ProviderConfig(StrictModel):
    """How `geo-ray up` makes a cluster. What machines it has is in the section ``plan``."""

    state: PathText = Field(
        "clusters",
        description="directory, or s3:// address, with a folder of each cluster's own: what it is, "
        "the autoscaler's journal, its lease",
    )
    rent: Rent = Field(
        "plan",
        description="plan: the machines of the plan as soon as the cluster is up; demand: none "
        "until something waits for a place, in all regions",
    )
    head: HeadConfig = HeadConfig()
    local: LocalCloudConfig = LocalCloudConfig()
    aws: AwsProviderConfig | None = None
    tencent: TencentProviderConfig | None = None
    state_keys_secret: str | None = Field(
        None,
        description="name of the secret with a credentials file of AWS's form for `state`, which "
        "the head needs where its role opens no bucket (Tencent); null: its role does",
    )
    tls: TlsSecrets | None = Field(None, description="Ray's own TLS; null: none")
    python: ImagePython = Field("/opt/geo_ray/bin/python", description="interpreter of the image")

    @model_validator(mode="after")
    def _address(self) -> Self:
        if is_s3(self.state):
            try:
                parse_s3(self.state)
            except StoreError as error:  # not as of the key, whose value would be repeated
                raise ValueError(f"`state`: {error.message}") from None
        return self
