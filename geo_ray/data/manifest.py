"""The manifest of a data set: its shards, their regions, sizes and content hashes.

`check_residency` enforces data residency: it rejects a process that requests the shards of
another region, before any store is accessed.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from geo_ray.base.errors import (
    ManifestError,
    ResidencyDeniedError,
    SchemaMismatchError,
    ShardMissingError,
    StoreError,
)
from geo_ray.base.load import complaints
from geo_ray.base.model import StrictModel
from geo_ray.base.text import listed, missing_path, nearest_word
from geo_ray.data.columns import parse_types
from geo_ray.storage.store import open_store
from geo_ray.storage.uri import is_s3, local_path, parse_s3, problem_of_path, split

VERSION = 1
"""The only manifest version that this release writes and reads."""

MANIFEST_NAME = "manifest.json"

SplitName = Literal["train", "heldout"]

_REGION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


class DataShard(StrictModel):
    """One Parquet file and its required fingerprint."""

    path: str = Field(description="relative path in the store of its region")
    region: str = Field(description="home region; other regions may not read the shard")
    split: SplitName = Field(description="use of its rows: training or evaluation")
    rows: int = Field(ge=0, description="number of rows")
    bytes: int = Field(ge=1, description="size of the file")
    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="SHA-256 of the whole file")
    labels: dict[str, int] = Field(
        default_factory=dict, description="rows per label; empty if the task has no labels"
    )

    @model_validator(mode="after")
    def _no_contradiction(self) -> DataShard:
        problem = problem_of_path(self.path)
        if problem:
            raise ManifestError(f"shard path {self.path!r} {problem}")
        if self.labels and (
            min(self.labels.values()) < 0 or sum(self.labels.values()) != self.rows
        ):
            raise ManifestError(
                f"shard {self.path}: its label counts do not add up to {self.rows} rows"
            )
        return self


class PreparationRef(StrictModel):
    """The file next to the manifest that records how the rows were made from the user's files."""

    path: str = Field(description="file name in the manifest's folder")
    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="SHA-256 of that file")

    @model_validator(mode="after")
    def _is_beside(self) -> PreparationRef:
        if "/" in self.path or problem_of_path(self.path):
            raise ManifestError(f"preparation {self.path!r} is not a file name")
        return self


class Manifest(StrictModel):
    """All shards of one data set, in a fixed order.

    The constructor checks that it is consistent (ManifestError).
    """

    version: int = Field(default=VERSION, description="version of this format")
    task: str = Field(description="the task that the data was written for")
    columns: dict[str, str] = Field(description="column -> type, e.g. float32[64]")
    seed: int = Field(ge=0, description="seed of the split and of the row order in the shards")
    stores: dict[str, str] = Field(description="region -> address of its store")
    shards: tuple[DataShard, ...] = Field(description="all shards; their order is part of the data")
    preparation: PreparationRef | None = Field(
        default=None, description="how the rows were prepared; null if they were used unchanged"
    )

    @model_validator(mode="after")
    def _no_contradiction(self) -> Manifest:
        _check_version(self.version)
        try:
            parse_types(self.columns)
        except SchemaMismatchError as error:
            raise ManifestError(error.message, fix=error.fix) from None
        for region, uri in self.stores.items():
            if not is_region_name(region):
                raise ManifestError(f"region name {region!r} is not letters, digits, '.', '_', '-'")
            try:
                parse_s3(uri) if is_s3(uri) else local_path(uri)
            except StoreError as error:
                raise ManifestError(f"store of {region}: {error.message}", fix=error.fix) from None
        twice = [path for path, n in Counter(s.path for s in self.shards).items() if n > 1]
        if twice:
            raise ManifestError(f"shard {twice[0]!r} is listed more than once")
        for shard in self.shards:
            if shard.region not in self.stores:
                raise ManifestError(
                    f"shard {shard.path!r} belongs to region {shard.region!r}, which has no store; "
                    f"known regions: {listed(sorted(self.stores))}"
                )
        return self

    @property
    def preparation_sha256(self) -> str | None:
        """The fingerprint of the preparation, if any."""
        return None if self.preparation is None else self.preparation.sha256

    def regions(self) -> tuple[str, ...]:
        """Return the regions in the order of `stores`."""
        return tuple(self.stores)

    def of(self, region: str, split: SplitName) -> tuple[DataShard, ...]:
        """Return the shards of a region's split, in the order of the manifest; may be empty."""
        return tuple(s for s in self.shards if s.region == region and s.split == split)

    def rows(self, region: str, split: SplitName) -> int:
        """Return the number of rows of a region's split."""
        return sum(shard.rows for shard in self.of(region, split))


def is_region_name(name: str) -> bool:
    """Whether ``name`` is valid as a node label and a directory name."""
    return len(name) <= 63 and _REGION.fullmatch(name) is not None


def _check_version(version: object) -> None:
    if version != VERSION or isinstance(version, bool):
        raise ManifestError(
            f"manifest version {version!r} is unknown; this release reads version {VERSION}",
            fix="Use the release that wrote it, or write it again with `geo-ray data shard`.",
        )


def manifest_file(path_or_uri: str) -> str:
    """Return the manifest's own address, also if given the directory that contains it."""
    if not is_s3(path_or_uri) and local_path(path_or_uri).is_dir():
        return str(local_path(path_or_uri) / MANIFEST_NAME)
    return path_or_uri


def load_manifest(path_or_uri: str) -> Manifest:
    """Read a manifest.

    Args:
        path_or_uri: a file, a directory that contains ``manifest.json``, or the ``s3://`` address
            of the file. Its relative store paths start at the manifest's directory.

    Returns:
        The manifest with absolute store addresses.

    Raises:
        ManifestError: if it is missing, malformed or inconsistent.
        StoreError: if its store does not answer.
    """
    path_or_uri = manifest_file(path_or_uri)
    uri, name = split(path_or_uri)
    try:
        text = open_store(uri).read(name).decode()
        tree = json.loads(text)
    except ShardMissingError:
        raise _no_manifest(path_or_uri) from None
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"manifest {path_or_uri} is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ManifestError(f"manifest {path_or_uri} is not a JSON object")
    _check_version(tree.get("version"))
    try:
        manifest = Manifest.model_validate_json(text)
    except ManifestError as error:
        raise ManifestError(f"{path_or_uri}: {error.message}", fix=error.fix) from None
    except ValidationError as error:
        raise ManifestError(
            f"manifest {path_or_uri}: {complaints(error, Manifest, text)}"
        ) from None
    return manifest.model_copy(
        update={"stores": {r: _absolute(u, uri) for r, u in manifest.stores.items()}}
    )


def save_manifest(manifest: Manifest, path_or_uri: str) -> None:
    """Write a manifest atomically; equal manifests give equal bytes.

    Stores at or below the manifest's own local directory are written relative to it, so that the
    whole directory can be moved or packed into a job.

    Raises:
        StoreError: if it cannot be written.
    """
    uri, name = split(path_or_uri)
    portable = manifest.model_copy(
        update={"stores": {r: _relative(u, uri) for r, u in manifest.stores.items()}}
    )
    tree = portable.model_dump(mode="json")
    if manifest.preparation is None:
        del tree["preparation"]  # the format of older releases, which cannot read the key
    open_store(uri).write(name, (json.dumps(tree, indent=1) + "\n").encode())


def merge_manifests(manifests: Sequence[Manifest]) -> Manifest:
    """Merge manifests that were written separately, each for its own regions.

    Raises:
        ManifestError: if the list is empty, or they share a region, or differ in task, columns or
            preparation.
    """
    if not manifests:
        raise ManifestError("no manifests to merge")
    first = manifests[0]
    stores: dict[str, str] = {}
    for manifest in manifests:
        if (manifest.task, manifest.columns) != (first.task, first.columns):
            raise ManifestError(
                f"manifests differ: task {first.task!r} with {_typed(first.columns)}; "
                f"task {manifest.task!r} with {_typed(manifest.columns)}",
                fix="Merge only manifests that were written for the same task.",
            )
        if manifest.preparation_sha256 != first.preparation_sha256:
            raise ManifestError(
                f"the rows of {', '.join(manifest.stores)} and of {', '.join(first.stores)} "
                "were prepared differently",
                fix="Shard each region again with the same preparation file and the same merged "
                "statistics (`geo-ray data merge-stats`).",
            )
        shared = sorted(set(stores) & set(manifest.stores))
        if shared:
            raise ManifestError(
                f"region {shared[0]!r} is in two of the manifests",
                fix="Write the data of each region only once.",
            )
        stores.update(manifest.stores)
    return Manifest(
        task=first.task,
        columns=first.columns,
        seed=first.seed,
        stores=stores,
        shards=tuple(shard for manifest in manifests for shard in manifest.shards),
        preparation=first.preparation,
    )


def _typed(columns: Mapping[str, str]) -> str:
    return listed(f"{name}: {kind}" for name, kind in columns.items())


def _no_manifest(path_or_uri: str) -> ManifestError:
    """Build the error for a missing manifest; the advice depends on what exists."""
    write = "Write it with `geo-ray data shard`"
    if is_s3(path_or_uri):
        return ManifestError(
            f"there is no manifest {path_or_uri}",
            fix=f"Give the address of the file itself, s3://BUCKET/PREFIX/{MANIFEST_NAME}. {write} "
            "if need be.",
        )
    path = local_path(path_or_uri)
    if not path.parent.is_dir():
        hint = missing_path(path)
    else:
        found = [*path.parent.glob("*.json"), *path.parent.glob(f"*/{MANIFEST_NAME}")]
        near = [str(p) for p in sorted(found) if not p.name.endswith(".preparation.json")]
        best = nearest_word(str(path), near)
        if (best is not None and path.name != MANIFEST_NAME) or len(near) == 1:
            hint = f"; did you mean {best or near[0]}?"
        else:
            hint = f"; found {listed(near)}" if near else missing_path(path)
    fix = f"Correct the path. {write} if it does not exist yet." if hint else f"{write}."
    return ManifestError(f"there is no manifest {path}{hint}", fix=fix)


def _absolute(uri: str, base_uri: str) -> str:
    if is_s3(uri):
        return uri
    if uri.startswith("file:"):
        return local_path(uri).as_uri()
    if is_s3(base_uri):
        raise ManifestError(f"store {uri!r} is a relative path, but the manifest is in a bucket")
    return (local_path(base_uri) / uri).as_uri()


def _relative(uri: str, base_uri: str) -> str:
    if is_s3(uri) or is_s3(base_uri):
        return uri
    path, base = local_path(uri), local_path(base_uri)
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else path.as_uri()


_log = logging.getLogger(__name__)


def check_residency(shard: DataShard, here: str) -> None:
    """Reject a shard of another region. Called before any store is accessed.

    Args:
        shard: the requested shard.
        here: the region in which the calling process runs.

    Raises:
        ResidencyDeniedError: naming the shard and both regions; it is also logged.
    """
    if shard.region != here:
        _log.warning(
            "residency: %s of %s was requested in %s; rejected", shard.path, shard.region, here
        )
        raise ResidencyDeniedError(
            f"shard {shard.path} belongs to region {shard.region!r} and was requested in {here!r}"
        )
