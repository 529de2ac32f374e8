"""Checkpoints in a bucket: parts in pieces, each file written once, the manifest last of all.

A bucket has no folders to make or to rename, so a save begins with a small object of its own, the
claim. Claim and manifest are written on condition that they are not there yet: of two writers of
one checkpoint, the second is refused.
"""

from __future__ import annotations

import io
import logging
import secrets
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Final, Literal

from geo_ray.checkpoint.local_folder import FOLDER_NAME, folder_name
from geo_ray.checkpoint.manifest import MANIFEST_FILE
from geo_ray.errors import CheckpointConflictError, CheckpointCorruptError
from geo_ray.stores.bucket import Bucket, RequestLimits
from geo_ray.stores.object_reader import ObjectReader
from geo_ray.stores.upload import upload_once
from geo_ray.stores.uri import parse_s3
from geo_ray.util.atomic_file import Failpoint, no_failpoint

_log = logging.getLogger(__name__)
CLAIM_FILE: Final = "claim"
LIMITS = RequestLimits(attempts=6)
_WRITER: Final = "geo-ray-writer"


@lru_cache(maxsize=16)
def bucket_at(uri: str) -> Bucket:
    """The bucket at an address; one per process, its client takes a while to make."""
    return Bucket(parse_s3(uri), LIMITS)


class S3Folder:
    """See `Folder`.

    Args:
        uri: of the bucket, with its options.
        prefix: all keys of the folder begin with it.
    """

    def __init__(self, uri: str, prefix: str) -> None:
        self._uri = uri
        self._prefix = prefix

    @property
    def _bucket(self) -> Bucket:
        return bucket_at(self._uri)  # made only where it is asked

    def name_of(self, file: str) -> str:
        """See `Folder.name_of`."""
        return f"s3://{self._bucket.address.bucket}/{self._prefix}{file}"

    def write(
        self,
        file: str,
        chunks: Iterable[memoryview | bytes],
        num_bytes: int,
        failpoint: Failpoint = no_failpoint,
    ) -> None:
        """See `Folder.write`."""
        try:
            upload_once(self._bucket, self._prefix + file, chunks, num_bytes, failpoint)
        except FileExistsError:
            raise CheckpointConflictError(
                f"{self.name_of(file)}: another writer has written it, or given this save up"
            ) from None

    def open(self, file: str, num_bytes: int | None = None) -> io.RawIOBase:
        """See `Folder.open`."""
        try:
            reader = ObjectReader(self._bucket, self._prefix + file)
        except FileNotFoundError:
            raise CheckpointCorruptError(f"{self.name_of(file)}: it is not there") from None
        if num_bytes not in (None, reader.size):
            reader.close()
            raise CheckpointCorruptError(
                f"{self.name_of(file)}: {reader.size} bytes long; the manifest says {num_bytes}"
            )
        return reader

    def has(self, file: str) -> bool:
        """See `Folder.has`."""
        return self._prefix + file in self._bucket.sizes(self._prefix + file)

    def sizes(self) -> dict[str, int]:
        """See `Folder.sizes`; the claim is none of a checkpoint's files."""
        found = self._bucket.sizes(self._prefix)
        names = {key.removeprefix(self._prefix): size for key, size in found.items()}
        return {name: size for name, size in names.items() if name != CLAIM_FILE}

    def remove(self, files: Iterable[str]) -> None:
        """See `Folder.remove`."""
        self._bucket.delete(self._prefix + file for file in files)

    def clear(self) -> None:
        """See `Folder.clear`; the claim goes last."""
        _drop_uploads(self._bucket, self._prefix, lambda key: True)
        found = self._bucket.sizes(self._prefix)
        self._bucket.delete(sorted(found, key=lambda key: key.endswith(f"/{CLAIM_FILE}")))


class S3Root:
    """See `Root`.

    Args:
        uri: ``s3://bucket/prefix?endpoint_url=...&region=...&addressing=...``.
    """

    far = True

    def __init__(self, uri: str) -> None:
        address = parse_s3(uri)
        self._uri = uri
        self._prefix = f"{address.prefix}/" if address.prefix else ""
        self._name = f"s3://{address.bucket}/{address.prefix}"
        self._me = secrets.token_hex(16)

    def __str__(self) -> str:
        return self._name

    @property
    def _bucket(self) -> Bucket:
        return bucket_at(self._uri)

    def folder(self, id: int) -> S3Folder:
        """See `Root.folder`."""
        return S3Folder(self._uri, f"{self._prefix}{folder_name(id)}/")

    def beside(self, name: str) -> S3Folder:
        """A folder that is of no checkpoint."""
        return S3Folder(self._uri, f"{self._prefix}{name}/")

    def ids(self) -> dict[int, bool]:
        """See `Root.ids`."""
        found: dict[int, bool] = {}
        for key in self._bucket.sizes(f"{self._prefix}ckpt-"):
            id, file = self._id_and_file(key)
            if id is not None:
                found[id] = found.get(id, False) or file == MANIFEST_FILE
        return found

    def claim(self, id: int) -> None:
        """See `Root.claim`.

        Raises:
            CheckpointConflictError: another writer has begun it.
            StoreError: the store does not answer or refuses, or it does not keep to the condition.
        """
        key, mine = self._claim_key(id), {_WRITER: self._me}
        try:
            self._bucket.put(key, b"", once=True, metadata=mine)
        except FileExistsError:
            if self.owner(id) != "self":  # else the answer to the same request was lost
                raise CheckpointConflictError(
                    f"{self}: another writer has begun checkpoint {id}"
                ) from None
        self._bucket.check_conditions(key, b"", mine)

    def owner(self, id: int) -> Literal["self", "other"] | None:
        """See `Root.owner`."""
        try:
            found = self._bucket.metadata(self._claim_key(id))
        except FileNotFoundError:
            return None
        return "self" if found.get(_WRITER) == self._me else "other"

    def sweep(self, is_left: Callable[[int], bool]) -> None:
        """See `Root.sweep`."""

        def is_half(key: str) -> bool:
            id, _ = self._id_and_file(key)
            return id is not None and is_left(id)

        _drop_uploads(self._bucket, f"{self._prefix}ckpt-", is_half)

    def _id_and_file(self, key: str) -> tuple[int | None, str]:
        name, _, file = key.removeprefix(self._prefix).partition("/")
        match = FOLDER_NAME.match(name)
        return (None if match is None else int(match[1])), file

    def _claim_key(self, id: int) -> str:
        return f"{self._prefix}{folder_name(id)}/{CLAIM_FILE}"


def _drop_uploads(bucket: Bucket, prefix: str, is_left: Callable[[str], bool]) -> None:
    for key, upload in bucket.uploads(prefix):
        if is_left(key):
            _log.info("giving the unfinished upload of %s up", key)
            bucket.drop_upload(key, upload)
