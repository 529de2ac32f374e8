"""What a user says about an account of Tencent Cloud, so that machines can be launched there."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from geo_ray.clouds.currency import ExchangeRate
from geo_ray.config.annotations import MessageWords
from geo_ray.config.base import StrictModel
from geo_ray.providers.user_data import NodeJoin


class TencentPlaceConfig(StrictModel):
    """A region where machines may be launched."""

    image_id: Annotated[
        str, Field(pattern=r"^img-\w+$"), MessageWords("the id of an image, img-...")
    ] = Field(description="machine image that carries geo_ray")
    vpc_id: Annotated[
        str, Field(pattern=r"^vpc-\w+$"), MessageWords("the id of a network, vpc-...")
    ] = Field(description="network")
    subnets: dict[str, str] = Field(min_length=1, description="subnet by zone")
    security_group_ids: tuple[str, ...] = Field((), description="of the machines")
    role: str | None = Field(
        None, description="name of the nodes' CAM role, which reads their secrets"
    )
    head_role: str | None = Field(
        None,
        description="name of the head's CAM role, which may do more: rent, and read the keys of "
        "`provider.state`; null: as `role`",
    )
    disk_gb: int = Field(100, ge=20, description="size of the system disk")


class TencentProviderConfig(StrictModel):
    """Machines of Tencent Cloud."""

    places: dict[str, TencentPlaceConfig] = Field(
        min_length=1, description="regions by Tencent's name; only these are listed and used"
    )
    join: NodeJoin | None = Field(
        None, description="how a node joins; null: as `geo-ray up` has it"
    )
    endpoint: str | None = Field(None, description="address in place of Tencent's")
    attempts: int = Field(5, ge=1, description="tries of a request")
    timeout_s: float = Field(20.0, gt=0, description="longest wait for an answer")
    currency: str = Field("CNY", description="in which the account is billed")
    rates: tuple[ExchangeRate, ...] = Field((), description="what that is in US dollars")
