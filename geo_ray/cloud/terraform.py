"""Terraform stacks: the output ``geo_ray`` of infra/terraform and the configuration it implies.

`read_stack` reads the output from Terraform or from a file with its output. `aws_config` and
`tencent_config` turn a stack into the configuration of the providers that launch machines next to
it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, StringConstraints, ValidationError, model_validator

from geo_ray.base.errors import TerraformOutputsError
from geo_ray.base.load import complaints
from geo_ray.base.model import StrictModel
from geo_ray.experiment.provider import (
    AwsPlaceConfig,
    AwsProviderConfig,
    NodeJoin,
    TencentPlaceConfig,
    TencentProviderConfig,
)

ListedMarket = Literal["on_demand", "spot"]
_Name = Annotated[str, StringConstraints(min_length=1)]
_SecretName = Annotated[str, StringConstraints(pattern=r"^[\w/.:+=@-]+$")]
_Folder = Annotated[str, StringConstraints(pattern=r"^s3://[^\s'\"]+$")]


class TerraformHead(StrictModel):
    """Machine of the Ray head."""

    region: _Name = Field(description="region of the run")
    address: str = Field(
        pattern=r"^[\w.-]+:\d+$", description="address that nodes and drivers connect to"
    )
    machine: _Name = Field(description="id in the cloud")
    type: _Name | None = Field(None, description="instance type")


class TerraformSecrets(StrictModel):
    """Secrets that the machines of one cloud need to join."""

    store: Literal["aws-secretsmanager", "aws-ssm", "tencent-ssm"]
    region: _Name = Field(description="cloud region of the secrets")
    token: _SecretName = Field(description="name of the secret with the token")
    tls_certificate: _SecretName | None = None
    tls_key: _SecretName | None = None
    tls_ca: _SecretName | None = None


class TerraformMachines(StrictModel):
    """A machine type that may be launched in a region."""

    type: _Name
    cap: int = Field(ge=0, description="most of them")
    markets: tuple[ListedMarket, ...] = Field(("on_demand",), min_length=1)


class TerraformPool(StrictModel):
    """Machines whose number Terraform manages."""

    type: _Name
    market: ListedMarket
    role: Literal["worker", "server"]
    count: int = Field(ge=0)


class TerraformPlace(StrictModel):
    """A region of the run in a cloud."""

    cloud: Literal["aws", "tencent"]
    at: _Name = Field(description="cloud region")
    machines: tuple[TerraformMachines, ...] = Field(description="types that may be launched")
    server: str | None = Field(None, description="instance type for parameter server and bridge")
    data: str | None = Field(None, description="URL of its data bucket")
    pools: Mapping[str, TerraformPool] = Field({}, description="pools managed by Terraform")
    groups: Mapping[str, str] = Field({}, description="cloud group of each pool")
    aws: AwsPlaceConfig | None = None
    tencent: TencentPlaceConfig | None = None

    @model_validator(mode="after")
    def _has_its_cloud(self) -> Self:
        if (self.aws is None) == (self.cloud == "aws"):
            raise ValueError(f"`aws` requires cloud: aws, not {self.cloud}")
        if (self.tencent is None) == (self.cloud == "tencent"):
            raise ValueError(f"`tencent` requires cloud: tencent, not {self.cloud}")
        return self


class CloudSecrets(StrictModel):
    """Secrets by cloud; null where the stack is not in that cloud."""

    aws: TerraformSecrets | None = None
    tencent: TerraformSecrets | None = None


class TerraformStack(StrictModel):
    """Output of a Terraform stack."""

    version: Literal[1]
    stack: _Name = Field(description="name, the tag geo-ray:stack")
    cluster: str = Field(
        pattern=r"^[\w.-]+$", description="tag geo-ray:cluster of the machines launched next to it"
    )
    head: TerraformHead
    secrets: CloudSecrets
    runs: str = Field(description="URL of the runs")
    clusters: _Folder | None = Field(
        None,
        description="URL with the state of the cluster that the autoscaler serves, in a folder "
        "named after the cluster; null: no autoscaler runs on the head",
    )
    state_keys: _SecretName | None = Field(
        None,
        description="secret with credentials for that URL; null: the role of the head has access",
    )
    places: dict[str, TerraformPlace] = Field(min_length=1, description="by region of the run")

    @model_validator(mode="after")
    def _check_compatible(self) -> Self:
        if self.head.region not in self.places:
            raise ValueError(
                f"the head is in {self.head.region}, which is not a region of the stack"
            )
        if self.clusters is not None and self.head.type is None:
            raise ValueError("the head runs an autoscaler, but has no `type`")
        for name, place in self.places.items():
            if getattr(self.secrets, place.cloud) is None:
                raise ValueError(f"{name} is in {place.cloud}, which has no secrets")
        at = [(place.cloud, place.at) for place in self.places.values()]
        if len(set(at)) < len(at):
            raise ValueError("two regions are in the same cloud region")
        return self


def aws_config(stack: TerraformStack) -> AwsProviderConfig | None:
    """Return the AWS provider configuration of a stack; None if the stack has no region there."""
    places = {one.at: one.aws for one in stack.places.values() if one.aws is not None}
    secrets = stack.secrets.aws
    if not places or secrets is None:
        return None
    join = _join(stack, secrets)
    return AwsProviderConfig(places=places, join=join, secret_store=secrets.store)


def tencent_config(stack: TerraformStack) -> TencentProviderConfig | None:
    """Return the Tencent provider configuration of a stack.

    None if the stack has no region there.
    """
    places = {one.at: one.tencent for one in stack.places.values() if one.tencent is not None}
    secrets = stack.secrets.tencent
    if not places or secrets is None:
        return None
    return TencentProviderConfig(places=places, join=_join(stack, secrets))


def _join(stack: TerraformStack, secrets: TerraformSecrets) -> NodeJoin:
    return NodeJoin(
        address=stack.head.address,
        token_secret=secrets.token,
        tls_certificate_secret=secrets.tls_certificate,
        tls_key_secret=secrets.tls_key,
        tls_ca_secret=secrets.tls_ca,
        secrets_region=secrets.region,
    )


PROGRAM_VARIABLE: Final = "GEO_RAY_TERRAFORM"
"""Environment variable with the Terraform program to use, for another version or OpenTofu."""

_OUTPUT: Final = "geo_ray"
_MOST_BYTES: Final = 16 * 1024 * 1024
_LONGEST_S: Final = 120.0


def read_stack(source: Path) -> TerraformStack:
    """Read the output of a stack.

    Args:
        source: the directory in which `terraform apply` ran, a file with the output of `terraform
            output -json` (or `terraform output -json geo_ray`), or a Terraform state file.

    Raises:
        TerraformOutputsError: the output is missing, or of another release.
    """
    text = _printed(source) if source.is_dir() else _text_of(source)
    try:
        outputs = json.loads(text)
    except (ValueError, RecursionError):
        raise TerraformOutputsError(
            f"{source} contains no JSON",
            fix="Write the file with `terraform output -json > FILE`.",
        ) from None
    found = json.dumps(_value(outputs, source))
    try:
        return TerraformStack.model_validate_json(found)
    except ValidationError as error:
        raise TerraformOutputsError(
            f"the output {_OUTPUT} of {source} is not valid: "
            f"{complaints(error, TerraformStack, found)}"
        ) from None


def _value(outputs: Any, source: Path) -> Any:
    if isinstance(outputs, dict) and "places" in outputs:
        return outputs
    if isinstance(outputs, dict) and "terraform_version" in outputs:
        outputs = outputs.get("outputs")
    if not outputs:
        raise TerraformOutputsError(
            f"{source} has no outputs: nothing was applied there",
            fix="Run `terraform apply` in that directory first.",
        )
    held = outputs.get(_OUTPUT) if isinstance(outputs, dict) else None
    if not isinstance(held, dict) or "value" not in held:
        raise TerraformOutputsError(f"{source} has no output {_OUTPUT}")
    return held["value"]


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise TerraformOutputsError(
            f"{path} cannot be read: {error.strerror or error}",
            fix="Name a Terraform directory, or a file with the output of "
            "`terraform output -json`.",
        ) from None
    if len(data) > _MOST_BYTES:
        raise TerraformOutputsError(f"{path} is larger than {_MOST_BYTES} bytes")
    return data.decode("utf-8", "replace")


def _printed(directory: Path) -> str:
    program = os.environ.get(PROGRAM_VARIABLE) or shutil.which("terraform")
    if program is None:
        raise TerraformOutputsError(
            "terraform is not installed",
            fix=f"Install it, name it in {PROGRAM_VARIABLE}, or pass a file with "
            "`terraform output -json`.",
        )
    command = [program, f"-chdir={directory}", "output", "-json", "-no-color"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LONGEST_S, check=False
        )
    except OSError as error:
        raise TerraformOutputsError(
            f"{program} cannot be run: {error.strerror or error}",
            fix=f"Correct {PROGRAM_VARIABLE}.",
        ) from None
    except subprocess.TimeoutExpired:
        raise TerraformOutputsError(
            f"{program} did not answer in {_LONGEST_S:.0f} s",
            fix="Check whether its state is locked or unreachable.",
        ) from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        words = next((line.strip(" │╷") for line in said if "rror" in line), "no reason given")
        raise TerraformOutputsError(
            f"terraform cannot read the outputs of {directory}: {words}",
            fix="Run `terraform init` and `terraform apply` there.",
        )
    return done.stdout[: _MOST_BYTES + 1].decode("utf-8", "replace")
