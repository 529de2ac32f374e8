"""Reading a stack's outputs: from Terraform itself, or from a file of what it printed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from geo_ray.config.json_file import complaints
from geo_ray.errors import TerraformOutputsError
from geo_ray.providers.terraform.outputs import TerraformStack

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
