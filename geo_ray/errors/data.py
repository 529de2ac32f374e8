"""Errors of training data (exit code 3)."""

from __future__ import annotations

from geo_ray.errors.base import GeoRayError


class DataError(GeoRayError):
    """Something is wrong with the training data."""

    code = "DATA"
    exit_code = 3
    chapter = "Data"
    causes = "See the codes of this chapter."
    advice = "Correct the file or the folder that the message names."


class ShardCorruptError(DataError):
    """A shard's bytes do not have the SHA-256 or the size that the manifest states.

    Not a row of it was used.
    """

    code = "DATA_CORRUPT"
    causes = (
        "A damaged or truncated file, an upload that did not finish, a shard that was overwritten "
        "after the manifest was made."
    )
    advice = "Restore the shard from its source, or write the data anew with `geo-ray data shard`."


class ShardMissingError(DataError):
    """A shard of the manifest is not in its region's store."""

    code = "DATA_MISSING"
    causes = (
        "The store's address is another bucket or directory, the shard was never uploaded or has "
        "been deleted by a life-cycle rule, or the credentials may not list it."
    )
    advice = "Check the store's address and credentials, then that the shard was uploaded."
    more = "The address is under `stores` in the manifest."


class SchemaMismatchError(DataError):
    """A shard's columns, types or lengths are not those of the manifest or of the task."""

    code = "DATA_SCHEMA"
    causes = (
        "Data written for another task or another version of it, a column with nulls, a list "
        "column whose rows differ in length, a column type that geo_ray does not read because "
        "decoding it could execute code."
    )
    advice = "Write the shard with the columns and types that the task has."


class DataLeftOutError(DataError):
    """Something at the address of the input is not read, and ``--strict`` does not allow that."""

    code = "DATA_LEFT_OUT"
    causes = (
        "A name that ends in nothing that geo_ray reads, a compression that it does not unpack, a "
        "link to a folder, a folder without permission, a file without rows."
    )
    advice = "Move what is no data elsewhere, or leave `--strict` out."


class ShardEmptyError(DataError):
    """A shard, or a region's whole share of the data, has no rows."""

    code = "DATA_EMPTY"
    causes = (
        "More regions than rows, a skewed split that leaves a region nothing, a region of the "
        "configuration that the manifest does not know."
    )
    advice = (
        "Give the region data, take it out of the configuration, or choose a less skewed split."
    )


class RegionsOmittedError(DataError):
    """The manifest has rows of regions that the configuration does not mention."""

    code = "REGIONS_OMITTED"
    causes = (
        "A region that was forgotten or is called otherwise in the configuration; a run on a part "
        "of the regions on purpose."
    )
    advice = "Add the regions to `regions`, or name them in `data.leave_out`."


class ResidencyDeniedError(DataError):
    """A process asked for a shard of a region other than its own.

    It was refused before any byte was read.
    """

    code = "RESIDENCY_DENIED"
    causes = (
        "A `region` in the manifest that does not match where the shard lies, or a node with the "
        "wrong `ray.io/availability-region` label."
    )
    advice = "Correct the node's label, or the `region` of the shard in the manifest."
    more = "There is no switch that turns this check off."


class StoreError(DataError):
    """An object store or file system does not answer, refuses, or has no room."""

    code = "STORE"
    causes = (
        "A wrong endpoint or bucket name, expired or missing credentials, throttling that "
        "outlasted the retries, a full disk."
    )
    advice = "Check the endpoint, the credentials and the bucket's name."
    more = "The provider's own tool, run on the same machine, tells which of them it is."


class ManifestError(DataError):
    """A manifest cannot be read or contradicts itself."""

    code = "MANIFEST_INVALID"
    causes = (
        "An edit by hand, a file of another kind, a manifest of a newer version of geo_ray, shard "
        "paths that leave their store."
    )
    advice = "Write the manifest anew with `geo-ray data shard`."
