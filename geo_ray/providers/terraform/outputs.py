"""The output `geo_ray` of a stack in infra/terraform: what it made, for those who use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from geo_ray.config.base import StrictModel
from geo_ray.providers.aws.config import AwsPlaceConfig
from geo_ray.providers.tencent.config import TencentPlaceConfig

ListedMarket = Literal["on_demand", "spot"]
_Name = Annotated[str, StringConstraints(min_length=1)]
_SecretName = Annotated[str, StringConstraints(pattern=r"^[\w/.:+=@-]+$")]
_Folder = Annotated[str, StringConstraints(pattern=r"^s3://[^\s'\"]+$")]


class TerraformHead(StrictModel):
    """The machine of Ray's head."""

    region: _Name = Field(description="region of the run")
    address: str = Field(pattern=r"^[\w.-]+:\d+$", description="where nodes and drivers find it")
    machine: _Name = Field(description="the cloud's name of it")
    type: _Name | None = Field(None, description="instance type")


class TerraformSecrets(StrictModel):
    """Where one cloud's machines find what they need to join."""

    store: Literal["aws-secretsmanager", "aws-ssm", "tencent-ssm"]
    region: _Name = Field(description="the cloud's region of the secrets")
    token: _SecretName = Field(description="name of the secret with the token")
    tls_certificate: _SecretName | None = None
    tls_key: _SecretName | None = None
    tls_ca: _SecretName | None = None


class TerraformMachines(StrictModel):
    """A type of machine that may be rented in a region."""

    type: _Name
    cap: int = Field(ge=0, description="most of them")
    markets: tuple[ListedMarket, ...] = Field(("on_demand",), min_length=1)


class TerraformPool(StrictModel):
    """Machines whose number Terraform owns."""

    type: _Name
    market: ListedMarket
    role: Literal["worker", "server"]
    count: int = Field(ge=0)


class TerraformPlace(StrictModel):
    """A region of the run, in a cloud."""

    cloud: Literal["aws", "tencent"]
    at: _Name = Field(description="the cloud's region")
    machines: tuple[TerraformMachines, ...] = Field(description="what may be rented")
    server: str | None = Field(None, description="instance type for parameter server and bridge")
    data: str | None = Field(None, description="address of its bucket of data")
    pools: Mapping[str, TerraformPool] = Field({}, description="what Terraform made")
    groups: Mapping[str, str] = Field({}, description="the cloud's group of each pool")
    aws: AwsPlaceConfig | None = None
    tencent: TencentPlaceConfig | None = None

    @model_validator(mode="after")
    def _has_its_cloud(self) -> Self:
        if (self.aws is None) == (self.cloud == "aws"):
            raise ValueError(f"`aws` is for places of aws, this one is of {self.cloud}")
        if (self.tencent is None) == (self.cloud == "tencent"):
            raise ValueError(f"`tencent` is for places of tencent, this one is of {self.cloud}")
        return self


class CloudSecrets(StrictModel):
    """Secrets by cloud; null where the stack is not in that cloud."""

    aws: TerraformSecrets | None = None
    tencent: TerraformSecrets | None = None


class TerraformStack(StrictModel):
    """Everything that a stack says of itself."""

    version: Literal[1]
    stack: _Name = Field(description="its name, the tag geo-ray:stack")
    cluster: str = Field(
        pattern=r"^[\w.-]+$", description="tag geo-ray:cluster of what is rented beside it"
    )
    head: TerraformHead
    secrets: CloudSecrets
    runs: str = Field(description="address of the runs")
    clusters: _Folder | None = Field(
        None,
        description="where the head looks for the cluster that its autoscaler serves, in a folder "
        "of the cluster's name; null: no autoscaler lives there",
    )
    state_keys: _SecretName | None = Field(
        None, description="secret with a credentials file for it; null: the head's role opens it"
    )
    places: dict[str, TerraformPlace] = Field(min_length=1, description="by region of the run")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.head.region not in self.places:
            raise ValueError(f"the head is in {self.head.region}, which is no place of the stack")
        if self.clusters is not None and self.head.type is None:
            raise ValueError("the head serves an autoscaler, and its `type` is not said")
        for name, place in self.places.items():
            if getattr(self.secrets, place.cloud) is None:
                raise ValueError(f"{name} is in {place.cloud}, for which there are no secrets")
        at = [(place.cloud, place.at) for place in self.places.values()]
        if len(set(at)) < len(at):
            raise ValueError("two places are in one region of a cloud")
        return self
