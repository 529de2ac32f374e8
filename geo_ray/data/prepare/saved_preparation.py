"""The preparation stored with a manifest, used to compare regions and for inference."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from geo_ray.base.errors import ManifestError, ShardMissingError, StoreError
from geo_ray.base.text import listed
from geo_ray.data.columns import parse_types
from geo_ray.data.manifest import Manifest, PreparationRef, load_manifest, manifest_file
from geo_ray.data.prepare.config import Preparation, flow
from geo_ray.storage.store import open_store
from geo_ray.storage.uri import split

_SUFFIX = ".preparation.json"
_MOST_LINES = 20


def preparation_bytes(preparation: Preparation) -> bytes:
    """Return the bytes of a resolved preparation; equal preparations give equal bytes."""
    tree: Any = preparation.model_dump(mode="json", exclude_defaults=True)
    tree = {"version": preparation.version, **tree}
    return (json.dumps(tree, indent=1, ensure_ascii=False) + "\n").encode()


def save_preparation(data: bytes, manifest_uri: str) -> PreparationRef:
    """Write a preparation to the folder of a manifest that will be written.

    Args:
        data: the result of `preparation_bytes`.
        manifest_uri: address of the manifest; ``mine.json`` gives ``mine.preparation.json``.

    Raises:
        StoreError: if it cannot be written.
    """
    folder, name = split(manifest_uri)
    path = name.removesuffix(".json") + _SUFFIX
    open_store(folder).write(path, data)
    return PreparationRef(path=path, sha256=hashlib.sha256(data).hexdigest())


def read_preparation_bytes(ref: PreparationRef, manifest_uri: str) -> bytes:
    """Read and check the preparation of a manifest.

    Raises:
        ManifestError: it is missing, or its hash differs from the manifest's.
        StoreError: if the store does not answer.
    """
    folder, _ = split(manifest_uri)
    fix = "Restore the file, or write the data again with `geo-ray data shard`."
    try:
        data = open_store(folder).read(ref.path)
    except ShardMissingError:
        raise ManifestError(
            f"the preparation {ref.path} is missing from the folder of {manifest_uri}", fix=fix
        ) from None
    if hashlib.sha256(data).hexdigest() != ref.sha256:
        raise ManifestError(
            f"the preparation {ref.path} in the folder of {manifest_uri} is not the one that its "
            "rows were "
            "made with",
            fix=fix,
        )
    return data


def load_prepared(manifest_uri: str) -> Preparation:
    """Load the preparation that made the rows of a manifest, ready to be applied.

    Args:
        manifest_uri: an address as for `geo_ray.data.manifest.load_manifest`.

    Raises:
        ManifestError: the manifest has no preparation, or the file is missing, changed or
            malformed.
        StoreError: if the store does not answer.
    """
    manifest_uri = manifest_file(manifest_uri)
    manifest = load_manifest(manifest_uri)
    if manifest.preparation is None:
        raise ManifestError(
            f"{manifest_uri} has no preparation: its rows were used unchanged",
            fix="Write the data with `geo-ray data shard --prepare FILE`.",
        )
    return _parsed(manifest.preparation, manifest_uri)


def _parsed(ref: PreparationRef, manifest_uri: str) -> Preparation:
    data = read_preparation_bytes(ref, manifest_uri)
    try:
        return Preparation.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ManifestError(f"preparation {ref.path}: {key}: {first['msg']}") from None


def refuse_different_preparations(manifests: Sequence[Manifest], uris: Sequence[str]) -> None:
    """Reject manifests whose rows were prepared differently, listing the differences.

    Args:
        manifests: the manifests to merge.
        uris: the addresses of the manifests.

    Raises:
        ManifestError: two differ, or a preparation is missing, changed or malformed.
        StoreError: if a store does not answer.
    """
    first, first_uri = manifests[0], manifest_file(uris[0])
    for manifest, uri in zip(manifests, uris, strict=True):
        if manifest.preparation_sha256 == first.preparation_sha256:
            continue
        here, there = ", ".join(first.stores), ", ".join(manifest.stores)
        if first.preparation is None or manifest.preparation is None:
            bare, other = (here, there) if first.preparation is None else (there, here)
            raise ManifestError(
                f"the rows of {other} were prepared, but those of {bare} were used unchanged",
                fix="Shard both with the same preparation file (--prepare).",
            )
        one = _parsed(first.preparation, first_uri)
        two = _parsed(manifest.preparation, manifest_file(uri))
        lines = _differences(one, two, here, there)
        numbers = all(": scale." in line or ": missing.fill" in line for line in lines)
        raise ManifestError(
            "\n    ".join([f"the rows of {here} and {there} were prepared differently:", *lines]),
            fix="Use the same merged statistics in both: run `geo-ray data shard` again with the "
            "file of `geo-ray data merge-stats`."
            if numbers
            else "Run `geo-ray data shard` again in each region, with the same preparation file "
            "and the same merged statistics. Put differences of a single site into its site file "
            "(--site).",
        )


def _differences(one: Preparation, two: Preparation, here: str, there: str) -> list[str]:
    """Return a line per key in which two preparations differ, at most `_MOST_LINES`."""
    lines = []
    for name in dict.fromkeys((*one.columns, *two.columns)):
        mine, theirs = one.columns.get(name, ()), two.columns.get(name, ())
        made = [[source.column for source in sources] for sources in (mine, theirs)]
        if made[0] != made[1]:
            lines.append(
                f"{name}: made of {listed(made[0]) or 'nothing'} in {here}, of "
                f"{listed(made[1]) or 'nothing'} in {there}"
            )
            continue
        for left, right in zip(mine, theirs, strict=True):
            where = f"{name}, column {left.column!r}"
            a, b = _flat(left.model_dump(mode="json")), _flat(right.model_dump(mode="json"))
            for key in dict.fromkeys((*a, *b)):
                if a.get(key) != b.get(key):
                    lines.append(
                        f"{where}: {key}: {_compared(a.get(key), b.get(key), here, there)}"
                    )
    more = len(lines) - _MOST_LINES
    return lines[:_MOST_LINES] + ([f"and {more} more differences"] if more > 0 else [])


def _flat(tree: Mapping[str, Any], under: str = "") -> dict[str, Any]:
    """Return the leaves of a tree by dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{under}{key}.")
        elif value is not None:
            flat[f"{under}{key}"] = value
    return flat


def _compared(left: Any, right: Any, here: str, there: str) -> str:
    if isinstance(left, list) and isinstance(right, list):
        only = [(here, [x for x in left if x not in right]),
                (there, [x for x in right if x not in left])]  # fmt: skip
        parts = [f"only {region} has {listed(map(str, words))}" for region, words in only if words]
        return "; ".join(parts) or "the same words in another order"
    return f"{_leaf(left)} in {here}, {_leaf(right)} in {there}"


def _leaf(value: Any) -> str:
    return "none" if value is None else flow(value)


def label_words(manifest_uri: str) -> dict[str, str]:
    """Return the words of a manifest's labels, if its preparation determines them.

    Args:
        manifest_uri: an address as for `geo_ray.data.manifest.load_manifest`.

    Returns:
        Label as in histograms -> word; empty if the words are unknown.
    """
    try:
        preparation = load_prepared(manifest_uri)
    except (ManifestError, StoreError):
        return {}
    kinds = parse_types(preparation.types)
    # A manifest does not say which column has the labels; it is known if there is a single
    # candidate.
    whole = [n for n, kind in kinds.items() if kind.is_integer]
    sources = preparation.columns.get(whole[0], ()) if len(whole) == 1 else ()
    words = sources[0].vocabulary if len(sources) == 1 else None
    if words is None or words.hash is not None:
        return {}
    names = [*words.words, *(("other",) if words.other == "bucket" else ())]
    return {str(place): name for place, name in enumerate(names)}
