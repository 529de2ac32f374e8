"""The preparation beside a manifest: how its rows were made, for regions to agree and inference."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import ValidationError

from geo_ray.data.columns import parse_types
from geo_ray.data.manifest import PreparationRef, load_manifest, manifest_file
from geo_ray.data.prepare.config import Preparation
from geo_ray.errors import ManifestError, ShardMissingError, StoreError
from geo_ray.stores.base import open_store
from geo_ray.stores.uri import split

_SUFFIX = ".preparation.json"


def preparation_bytes(preparation: Preparation) -> bytes:
    """The bytes of a resolved preparation: the same for the same preparation."""
    tree: Any = preparation.model_dump(mode="json", exclude_defaults=True)
    tree = {"version": preparation.version, **tree}
    return (json.dumps(tree, indent=1, ensure_ascii=False) + "\n").encode()


def save_preparation(data: bytes, manifest_uri: str) -> PreparationRef:
    """Write a preparation beside a manifest that is to be written.

    Args:
        data: of `preparation_bytes`.
        manifest_uri: address of the manifest; ``mine.json`` has ``mine.preparation.json``.

    Raises:
        StoreError: if it cannot be written.
    """
    folder, name = split(manifest_uri)
    path = name.removesuffix(".json") + _SUFFIX
    open_store(folder).write(path, data)
    return PreparationRef(path=path, sha256=hashlib.sha256(data).hexdigest())


def read_preparation_bytes(ref: PreparationRef, manifest_uri: str) -> bytes:
    """The preparation beside a manifest, checked.

    Raises:
        ManifestError: it is not there, or is not the one that the manifest names.
        StoreError: if the store does not answer.
    """
    folder, _ = split(manifest_uri)
    fix = "Restore the file, or write the data anew with `geo-ray data shard`."
    try:
        data = open_store(folder).read(ref.path)
    except ShardMissingError:
        raise ManifestError(
            f"the preparation {ref.path} is not beside {manifest_uri}", fix=fix
        ) from None
    if hashlib.sha256(data).hexdigest() != ref.sha256:
        raise ManifestError(
            f"the preparation {ref.path} beside {manifest_uri} is not the one that its rows were "
            "made with",
            fix=fix,
        )
    return data


def load_prepared(manifest_uri: str) -> Preparation:
    """The preparation that the rows of a manifest were made with, ready to be applied.

    Args:
        manifest_uri: as `geo_ray.data.manifest.load_manifest` takes it.

    Raises:
        ManifestError: the manifest has none, or the file is missing, changed or malformed.
        StoreError: if the store does not answer.
    """
    manifest_uri = manifest_file(manifest_uri)
    manifest = load_manifest(manifest_uri)
    if manifest.preparation is None:
        raise ManifestError(
            f"{manifest_uri} names no preparation: its rows were taken as they are",
            fix="Write the data with `geo-ray data shard --prepare FILE`.",
        )
    data = read_preparation_bytes(manifest.preparation, manifest_uri)
    try:
        return Preparation.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ManifestError(
            f"preparation {manifest.preparation.path}: {key}: {first['msg']}"
        ) from None


def label_words(manifest_uri: str) -> dict[str, str]:
    """The words that a manifest's labels were made of, where its preparation tells them.

    Args:
        manifest_uri: as `geo_ray.data.manifest.load_manifest` takes it.

    Returns:
        Label, as histograms have it -> word; empty if nothing tells them.
    """
    try:
        preparation = load_prepared(manifest_uri)
    except (ManifestError, StoreError):
        return {}
    kinds = parse_types(preparation.types)
    # A manifest does not say which column has the labels; with a single candidate it is known.
    whole = [n for n, kind in kinds.items() if kind.length is None and kind.dtype.kind in "iu"]
    sources = preparation.columns.get(whole[0], ()) if len(whole) == 1 else ()
    words = sources[0].vocabulary if len(sources) == 1 else None
    if words is None or words.hash is not None:
        return {}
    names = [*words.words, *(("other",) if words.other == "bucket" else ())]
    return {str(place): name for place, name in enumerate(names)}
