"""The manifest of a checkpoint, and the names of its parts.

The manifest is one small file. It is written last and commits all parts; without it a checkpoint
does not exist.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Final, Self

from pydantic import Field, JsonValue, ValidationError, model_validator

from geo_ray.base.canonical import JSONObject, JSONValue, canonical_json, sha256_hex
from geo_ray.base.errors import CheckpointCorruptError, CheckpointError
from geo_ray.base.load import complaints
from geo_ray.base.model import MessageWords, StrictModel

AVERAGER_PART: Final = "averager"
_SHARD = re.compile(r"^(.+)-ps[0-9]+(\.safetensors)?$")


def shard_part_name(region: str, index: int) -> str:
    """Return the name of the part of one shard."""
    return f"{region}-ps{index}"


def region_of(part: str) -> str | None:
    """Return the region of a part, from its name or file name; None for the averager's part."""
    match = _SHARD.match(part)
    return None if match is None else match[1]


FORMAT_VERSION = 2
MAX_MANIFEST_BYTES = 16_000_000
PartName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$"),
    MessageWords(
        "up to 128 letters, digits, dots, dashes and underscores, a letter or digit first"
    ),
]
PART_SUFFIX = ".safetensors"
MANIFEST_FILE = "manifest.json"
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$"), MessageWords("64 hexadecimal digits")]


class PartInfo(StrictModel):
    """A part, as reported by its writer."""

    name: PartName = Field(description="unique in the checkpoint")
    file: str = Field(description="name of the file in the checkpoint's directory")
    bytes: int = Field(ge=0, description="size of the file")
    sha256: _Sha256 = Field(description="digest of the whole file, hex")
    finite: bool = Field(default=True, description="whether it has no NaN and no infinity")

    @model_validator(mode="after")
    def _file_is_in_the_directory(self) -> Self:
        if self.file != self.name + PART_SUFFIX:
            raise ValueError(f"the file of part {self.name} must be {self.name}{PART_SUFFIX}")
        return self


class CheckpointManifest(StrictModel):
    """Manifest of a checkpoint."""

    version: int = Field(default=FORMAT_VERSION, description="version of the format")
    id: int = Field(ge=0, lt=10**18, description="counts the saves of a run; a larger id is newer")
    step: int = Field(ge=0, description="region steps at the consistent cut")
    created: str = Field(max_length=64, description="time of the commit, ISO 8601, informative")
    config_digest: _Sha256 = Field(description="digest of the run's configuration")
    parts: tuple[PartInfo, ...] = Field(description="every part, each in its own file")
    healthy: bool = Field(
        default=True,
        description="whether the run was not diverging; a resume uses only healthy checkpoints",
    )
    extra: dict[str, JsonValue] = Field(default_factory=dict, description="further JSON of the run")

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [part.name for part in self.parts]
        if len(set(names)) != len(names):
            raise ValueError("two parts have the same name")
        return self

    def part(self, name: str) -> PartInfo:
        """Return the part of that name.

        Raises:
            CheckpointError: there is no such part.
        """
        for part in self.parts:
            if part.name == name:
                return part
        known = ", ".join(part.name for part in self.parts) or "none"
        raise CheckpointError(f"checkpoint {self.id} has no part {name!r}; it has: {known}")


def seal(body: JSONValue) -> bytes:
    """Encode a manifest canonically, including its own SHA-256, for `unseal`.

    Raises:
        ValueError: it is not JSON.
    """
    return canonical_json({"manifest": body, "sha256": sha256_hex(canonical_json(body))})


def unseal(data: bytes, max_bytes: int = MAX_MANIFEST_BYTES) -> JSONObject:
    """Decode a result of `seal`; any changed byte is detected.

    Raises:
        CheckpointCorruptError: the bytes are not a manifest.
    """
    if len(data) > max_bytes:
        raise CheckpointCorruptError(f"the manifest is larger than {max_bytes} bytes")
    try:
        tree = json.loads(data)
        body, digest = tree["manifest"], tree["sha256"]
        intact = digest == sha256_hex(canonical_json(body)) and data == canonical_json(tree)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointCorruptError("the manifest is not readable") from error
    if not intact or not isinstance(body, dict):
        raise CheckpointCorruptError("the manifest's bytes do not match its own digest")
    return body


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """Encode a manifest canonically, including its own SHA-256, for `decode_manifest`.

    Raises:
        CheckpointError: `CheckpointManifest.extra` is not JSON, or too large.
    """
    try:
        body = manifest.model_dump(mode="json", exclude={"extra"})
        body["extra"] = manifest.extra  # unchanged, because dumping would convert NaN to null
        data = seal(body)
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {manifest.id}: `extra` is not JSON: {error}") from error
    if len(data) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"checkpoint {manifest.id}: manifest over {MAX_MANIFEST_BYTES} bytes")
    return data


def decode_manifest(data: bytes) -> CheckpointManifest:
    """Decode a result of `encode_manifest`; any changed byte is detected.

    Raises:
        CheckpointCorruptError: the bytes are not a manifest.
        CheckpointError: the manifest has another version of the format.
    """
    body = unseal(data)
    version = body.get("version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"the checkpoint has format version {version!r}; this release reads {FORMAT_VERSION}",
            fix="Resume with the release of geo_ray that wrote the checkpoint.",
        )
    try:
        return CheckpointManifest.model_validate_json(canonical_json(body))
    except ValidationError as error:
        wrong = complaints(error, CheckpointManifest, canonical_json(body))
        raise CheckpointCorruptError(f"the manifest is not valid: {wrong}") from error
