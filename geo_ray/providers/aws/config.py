"""What a user says about an account of AWS, so that machines can be launched there."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from geo_ray.config.annotations import MessageWords
from geo_ray.config.base import StrictModel
from geo_ray.providers.user_data import NodeJoin


class AwsPlaceConfig(StrictModel):
    """A region where machines may be launched."""

    image_id: Annotated[
        str, Field(pattern=r"^ami-\w+$"), MessageWords("the id of an image, ami-...")
    ] = Field(description="machine image that carries geo_ray")
    subnets: dict[str, str] = Field(
        default_factory=dict, description="subnet by zone; none: the region's default network"
    )
    security_group_ids: tuple[str, ...] = Field((), description="of the machines")
    instance_profile: str | None = Field(
        None, description="name of the profile of the nodes' role, which reads their secrets"
    )
    head_profile: str | None = Field(
        None,
        description="name of the profile of the head's role, which may do more: rent, and write "
        "what is written down of the cluster; null: as `instance_profile`",
    )
    volume_gb: int = Field(100, ge=8, description="size of the encrypted root volume")
    root_device: Annotated[
        str, Field(pattern=r"^/dev/\w+$"), MessageWords("a device such as /dev/sda1")
    ] = Field("/dev/sda1", description="the image's own name of its root volume")
    kms_key_id: str | None = Field(None, description="its key; null: the account's own")


class AwsProviderConfig(StrictModel):
    """Machines of AWS."""

    places: dict[str, AwsPlaceConfig] = Field(
        min_length=1, description="regions by AWS's name; only these are listed and used"
    )
    join: NodeJoin | None = Field(
        None, description="how a node joins; null: as `geo-ray up` has it"
    )
    endpoints: dict[str, str] = Field(
        default_factory=dict, description="addresses by service, in place of those of AWS"
    )
    attempts: int = Field(5, ge=1, description="tries of a request")
    timeout_s: float = Field(20.0, gt=0, description="longest wait for an answer")
    secret_store: str = Field(
        "aws-secretsmanager", description="aws-secretsmanager or aws-ssm: where `join` is kept"
    )
