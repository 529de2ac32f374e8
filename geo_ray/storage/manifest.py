"""The manifest of a checkpoint, and the names of its parts.

The manifest is one small file. It is written last and commits all parts at once; without it a
checkpoint does not exist.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Final, Self

from pydantic import Field, JsonValue, ValidationError, model_validator

from geo_ray.base.canonical import canonical_json, sha256_hex
from geo_ray.base.errors import CheckpointCorruptError, CheckpointError
from geo_ray.base.load import complaints
from geo_ray.base.model import MessageWords, StrictModel

AVERAGER_PART: Final = "averager"
_SHARD = re.compile(r"^(.+)-ps[0-9]+(\.safetensors)?$")


def shard_part_name(region: str, index: int) -> str:
    """Name of the part of one shard."""
    return f"{region}-ps{index}"


def region_of(part: str) -> str | None:
    """The region whose server wrote a part, from its name or its file's; None for the averager."""
    match = _SHARD.match(part)
    return None if match is None else match[1]


FORMAT_VERSION = 1
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
    """One part, as its writer reports it."""

    name: PartName = Field(description="unique in the checkpoint")
    file: str = Field(description="name of the file in the checkpoint's directory")
    bytes: int = Field(ge=0, description="size of the file")
    sha256: _Sha256 = Field(description="of the whole file, hex")
    finite: bool = Field(default=True, description="whether it has no NaN and no infinity")

    @model_validator(mode="after")
    def _file_is_in_the_directory(self) -> Self:
        if self.file != self.name + PART_SUFFIX:
            raise ValueError(f"the file of part {self.name} must be {self.name}{PART_SUFFIX}")
        return self


class CheckpointManifest(StrictModel):
    """A whole checkpoint."""

    version: int = Field(default=FORMAT_VERSION, description="of this format")
    id: int = Field(ge=0, lt=10**18, description="counts the saves of a run; a larger id is newer")
    step: int = Field(ge=0, description="region steps done at the cut")
    created: str = Field(max_length=64, description="time of the commit, ISO 8601, for people")
    config_digest: _Sha256 = Field(description="of the run's configuration")
    parts: tuple[PartInfo, ...] = Field(description="every part, each in its own file")
    healthy: bool = Field(
        default=True, description="whether the run was not diverging; such a one is resumed from"
    )
    extra: dict[str, JsonValue] = Field(default_factory=dict, description="JSON of the run's own")

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [part.name for part in self.parts]
        if len(set(names)) != len(names):
            raise ValueError("two parts have the same name")
        return self

    def part(self, name: str) -> PartInfo:
        """Return the part of that name.

        Raises:
            CheckpointError: if there is none.
        """
        for part in self.parts:
            if part.name == name:
                return part
        known = ", ".join(part.name for part in self.parts) or "none"
        raise CheckpointError(f"checkpoint {self.id} has no part {name!r}; it has: {known}")


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """Write a manifest, its own SHA-256 included, in the one way that `decode_manifest` takes.

    Raises:
        CheckpointError: if `CheckpointManifest.extra` holds something that is no JSON, or is huge.
    """
    try:
        body = manifest.model_dump(mode="json", exclude={"extra"})
        body["extra"] = manifest.extra  # as it is: dumping would turn NaN into null
        data = canonical_json({"manifest": body, "sha256": sha256_hex(canonical_json(body))})
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {manifest.id}: `extra` is no JSON: {error}") from error
    if len(data) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"checkpoint {manifest.id}: manifest over {MAX_MANIFEST_BYTES} bytes")
    return data


def decode_manifest(data: bytes) -> CheckpointManifest:
    """Read what `encode_manifest` wrote; any change of any byte is noticed.

    Raises:
        CheckpointCorruptError: if the bytes are not those of a manifest.
        CheckpointError: if they are, but of another version of the format.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise CheckpointCorruptError(f"the manifest is larger than {MAX_MANIFEST_BYTES} bytes")
    try:
        tree = json.loads(data)
        body, digest = tree["manifest"], tree["sha256"]
        intact = digest == sha256_hex(canonical_json(body)) and data == canonical_json(tree)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointCorruptError("the manifest is not readable") from error
    if not intact:
        raise CheckpointCorruptError("the manifest's bytes do not match its own digest")
    version = body.get("version") if isinstance(body, dict) else None
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
