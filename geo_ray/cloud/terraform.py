"""Terraform stacks: the output ``geo_ray`` of infra/terraform and the configuration it implies.

`read_stack` reads the output from Terraform itself or from a file of what it printed.
`aws_config` and `tencent_config` turn a stack into the providers that rent machines next to it.
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
    def _check_compatible(self) -> Self:
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


def aws_config(stack: TerraformStack) -> AwsProviderConfig | None:
    """Return how machines of AWS are rented; None if the stack is not there."""
    places = {one.at: one.aws for one in stack.places.values() if one.aws is not None}
    secrets = stack.secrets.aws
    if not places or secrets is None:
        return None
    join = _join(stack, secrets)
    return AwsProviderConfig(places=places, join=join, secret_store=secrets.store)


def tencent_config(stack: TerraformStack) -> TencentProviderConfig | None:
    """Return how machines of Tencent Cloud are rented; None if the stack is not there."""
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
"""Names the program, if it is not the `terraform` of the search path: another version, OpenTofu."""

_OUTPUT: Final = "geo_ray"
_MOST_BYTES: Final = 16 * 1024 * 1024
_LONGEST_S: Final = 120.0


def read_stack(source: Path) -> TerraformStack:
    """Read what a stack says of itself.

    Args:
        source: the directory in which `terraform apply` ran, or a file with what
            `terraform output -json` printed there (or `terraform output -json geo_ray`), or
            Terraform's own file of its state.

    Raises:
        TerraformOutputsError: there is none, it was not applied, or it is not of this release.
    """
    text = _printed(source) if source.is_dir() else _text_of(source)
    try:
        outputs = json.loads(text)
    except (ValueError, RecursionError):
        raise TerraformOutputsError(
            f"{source} has no JSON",
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
            f"{source} has no outputs: nothing is applied there",
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
            fix="Name a directory of Terraform, or a file of `terraform output -json`.",
        ) from None
    if len(data) > _MOST_BYTES:
        raise TerraformOutputsError(f"{path} is larger than {_MOST_BYTES} bytes")
    return data.decode("utf-8", "replace")


def _printed(directory: Path) -> str:
    program = os.environ.get(PROGRAM_VARIABLE) or shutil.which("terraform")
    if program is None:
        raise TerraformOutputsError(
            "there is no program terraform",
            fix=f"Install it, name it in {PROGRAM_VARIABLE}, or give a file of "
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
            f"{program} says nothing for {_LONGEST_S:.0f} s",
            fix="Look whether its state is locked or out of reach.",
        ) from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        words = next((line.strip(" │╷") for line in said if "rror" in line), "no reason given")
        raise TerraformOutputsError(
            f"terraform cannot read the outputs of {directory}: {words}",
            fix="Run `terraform init` and `terraform apply` there.",
        )
    return done.stdout[: _MOST_BYTES + 1].decode("utf-8", "replace")
