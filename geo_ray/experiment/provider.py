"""The ``provider`` section of a configuration: the cloud accounts a cluster rents machines from.

`AwsProviderConfig` and `TencentProviderConfig` describe one account each: regions, machine
images, networks and roles. `NodeJoin` and `HeadBoot` say how a machine's Ray node joins its
cluster or is its head; they name secrets and never hold one. Imports nothing of
`geo_ray.cloud`.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from geo_ray.base.errors import StoreError
from geo_ray.base.model import MessageWords, PathText, StrictModel
from geo_ray.prices.price import ExchangeRate
from geo_ray.storage.uri import is_s3, parse_s3

_Folder = Annotated[
    str, Field(pattern=r"^s3://[^\s'\"]+$"), MessageWords("an address such as s3://bucket/folder")
]
_SecretName = Annotated[
    str, Field(pattern=r"^[\w/.:+=@-]+$"), MessageWords("the name of a secret, without blanks")
]
_HostPort = Annotated[
    str, Field(pattern=r"^[\w.:\[\]-]+:\d+$"), MessageWords("host:port, such as 10.0.0.5:6379")
]
ImagePython = Annotated[str, Field(pattern=r"^[\w/.-]+$"), MessageWords("a path without blanks")]
"""Where an image has its interpreter."""


class HeadBoot(StrictModel):
    """What the machine of Ray's head starts."""

    port: int = Field(6379, ge=1, le=65535, description="port of the head")
    dashboard_port: int = Field(
        8265, ge=1, le=65535, description="port of dashboard and job server"
    )
    state: _Folder = Field(description="address of the cluster's folder")
    keys_secret: _SecretName | None = Field(
        None,
        description="name of the secret with a credentials file for `state`; null: the machine's "
        "role",
    )


class NodeJoin(StrictModel):
    """How a machine's Ray node joins its cluster, or is its head."""

    address: _HostPort | None = Field(None, description="host:port of the head")
    head: HeadBoot | None = Field(None, description="only for machines with the role head")
    token_secret: _SecretName = Field(
        description="name of the secret that holds the cluster's token"
    )
    tls_certificate_secret: _SecretName | None = Field(
        None, description="name of the secret with the certificate"
    )
    tls_key_secret: _SecretName | None = Field(
        None, description="name of the secret with the certificate's key"
    )
    tls_ca_secret: _SecretName | None = Field(
        None, description="name of the secret with the CA's certificate"
    )
    secrets_region: str | None = Field(
        None, description="region of the secrets; null: each machine's own"
    )
    python: ImagePython = Field("/opt/geo_ray/bin/python", description="interpreter of the image")


class AwsPlaceConfig(StrictModel):
    """A region where machines may be launched."""

    image_id: Annotated[
        str, Field(pattern=r"^ami-\w+$"), MessageWords("the id of an image, ami-...")
    ] = Field(description="machine image that carries geo_ray")
    subnets: dict[str, str] = Field(
        default_factory=dict, description="subnet by zone; none: the region's default network"
    )
    security_group_ids: tuple[str, ...] = Field((), description="security groups of the machines")
    instance_profile: str | None = Field(None, description="instance profile of the nodes' role")
    head_profile: str | None = Field(
        None,
        description="instance profile of the head's role, which also rents machines and writes the "
        "cluster's record; null: as `instance_profile`",
    )
    volume_gb: int = Field(100, ge=8, description="size of the encrypted root volume")
    root_device: Annotated[
        str, Field(pattern=r"^/dev/\w+$"), MessageWords("a device such as /dev/sda1")
    ] = Field("/dev/sda1", description="name of the root volume in the image")
    kms_key_id: str | None = Field(
        None, description="key of the root volume; null: the account's default"
    )


class AwsProviderConfig(StrictModel):
    """Machines of AWS."""

    places: dict[str, AwsPlaceConfig] = Field(
        min_length=1, description="usable regions by AWS's name"
    )
    join: NodeJoin | None = Field(None, description="how a node joins; null: set by `geo-ray up`")
    endpoints: dict[str, str] = Field(
        default_factory=dict, description="addresses by service that replace AWS's"
    )
    attempts: int = Field(5, ge=1, description="attempts of a request")
    timeout_s: float = Field(20.0, gt=0, description="longest wait for an answer in seconds")
    secret_store: str = Field(
        "aws-secretsmanager", description="store of the secrets: aws-secretsmanager or aws-ssm"
    )


class TencentPlaceConfig(StrictModel):
    """A region where machines may be launched."""

    image_id: Annotated[
        str, Field(pattern=r"^img-\w+$"), MessageWords("the id of an image, img-...")
    ] = Field(description="machine image that carries geo_ray")
    vpc_id: Annotated[
        str, Field(pattern=r"^vpc-\w+$"), MessageWords("the id of a network, vpc-...")
    ] = Field(description="network of the machines")
    subnets: dict[str, str] = Field(min_length=1, description="subnet by zone")
    security_group_ids: tuple[str, ...] = Field((), description="security groups of the machines")
    role: str | None = Field(None, description="CAM role of the nodes")
    head_role: str | None = Field(
        None,
        description="CAM role of the head, which also rents machines and reads the keys of "
        "`provider.state`; null: as `role`",
    )
    disk_gb: int = Field(100, ge=20, description="size of the system disk")


class TencentProviderConfig(StrictModel):
    """Machines of Tencent Cloud."""

    places: dict[str, TencentPlaceConfig] = Field(
        min_length=1, description="usable regions by Tencent's name"
    )
    join: NodeJoin | None = Field(None, description="how a node joins; null: set by `geo-ray up`")
    endpoint: str | None = Field(None, description="address that replaces Tencent's")
    attempts: int = Field(5, ge=1, description="attempts of a request")
    timeout_s: float = Field(20.0, gt=0, description="longest wait for an answer in seconds")
    currency: str = Field("CNY", description="currency of the account's bill")
    rates: tuple[ExchangeRate, ...] = Field((), description="exchange rates to US dollars")


Rent = Literal["plan", "demand"]


class HeadConfig(StrictModel):
    """The machine that Ray's head runs on; nothing of a run is placed there but its run actor."""

    region: str | None = Field(None, description="region of the run; null: the averager's region")
    type: str | None = Field(
        None, description="instance type; null: that of the region's server, else of its workers"
    )
    zone: str | None = Field(None, description="zone of the cloud; null: the cloud chooses")
    life_h: float = Field(168.0, gt=0, description="hours after which the head terminates itself")


class LocalCloudConfig(StrictModel):
    """Machines that are processes of this computer, for trials and demos."""

    cpus: dict[str, int] = Field(
        default_factory=dict, description="logical CPUs by type of machine; a count only"
    )
    other_cpus: int = Field(4, ge=1, description="logical CPUs of types that `cpus` does not name")
    start_delay_s: float = Field(
        0.0, ge=0, description="seconds from a launch to a running machine"
    )
    usd_per_hour: float = Field(
        0.1, gt=0, description="price of types that the price book does not have"
    )
    longest_life_s: float = Field(
        43200.0, gt=0, description="longest life of a machine in seconds; limits `autoscale.life_h`"
    )


class TlsSecrets(StrictModel):
    """Names of your secrets for Ray's own TLS."""

    certificate: str = Field(description="certificate of all nodes, with their addresses")
    key: str = Field(description="key of the certificate")
    ca: str = Field(description="certificate of the CA")


class ProviderConfig(StrictModel):
    """How `geo-ray up` makes a cluster. What machines it has is in the section ``plan``."""

    state: PathText = Field(
        "clusters",
        description="directory or s3:// address with a folder per cluster: its record, the "
        "autoscaler's journal, its lease. Contains keys: never commit it",
    )
    rent: Rent = Field(
        "plan",
        description="plan: rent the planned machines at once; demand: rent when processes wait for "
        "resources",
    )
    head: HeadConfig = HeadConfig()
    local: LocalCloudConfig = LocalCloudConfig()
    aws: AwsProviderConfig | None = None
    tencent: TencentProviderConfig | None = None
    state_keys_secret: str | None = Field(
        None,
        description="name of the secret with a credentials file in AWS's format for `state`; "
        "needed where the head's role cannot open a bucket (Tencent); null: the role is used",
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
