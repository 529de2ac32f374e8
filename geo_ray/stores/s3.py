"""A bucket as a store: AWS S3, Tencent COS and every other server of the S3 protocol."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from contextlib import closing
from typing import BinaryIO, TypeVar

from geo_ray.errors import ShardMissingError, StoreError
from geo_ray.stores.bucket import Bucket, RequestLimits, broken_downloads
from geo_ray.stores.paths import checked_path
from geo_ray.stores.uri import parse_s3

_log = logging.getLogger(__name__)
_PIECE_BYTES = 1 << 20

T = TypeVar("T")


class S3Store:
    """Objects of one bucket below a prefix.

    Args:
        uri: ``s3://bucket/prefix?endpoint_url=...&region=...&addressing=...``.
        limits: of every request; a download whose body breaks off is repeated as often.
    """

    def __init__(self, uri: str, limits: RequestLimits | None = None) -> None:
        self._uri = uri
        self._address = parse_s3(uri)
        self._bucket = Bucket(self._address, limits or RequestLimits())

    @property
    def uri(self) -> str:
        """See `Store.uri`."""
        return self._uri

    def read(self, path: str) -> bytes:
        """See `Store.read`."""
        key = self._key(path)

        def get() -> bytes:
            # closing(), not the body's own `with`: that would hand out the raw stream below it,
            # whose errors are not boto3's and whose length is not checked.
            with closing(self._bucket.get(key)["Body"]) as body:
                return bytes(body.read())

        return self._again(get, path)

    def open(self, path: str) -> BinaryIO:
        """See `Store.open`: a copy on this machine's disk, without a name and gone when closed."""
        key = self._key(path)

        def get() -> BinaryIO:
            answer = self._bucket.get(key)
            copy = tempfile.TemporaryFile()  # noqa: SIM115  (the caller's to close)
            try:
                with closing(answer["Body"]) as body:
                    for piece in body.iter_chunks(_PIECE_BYTES):
                        copy.write(piece)
                copy.seek(0)
            except BaseException:
                copy.close()
                raise
            return copy

        try:
            return self._again(get, path)
        except OSError as error:
            raise StoreError(
                f"no room for a copy of {path} of bucket {self._address.bucket!r}: {error}",
                fix="Free space, or set TMPDIR to a folder on a larger disk.",
            ) from error

    def write(self, path: str, data: bytes) -> None:
        """See `Store.write`: one PUT, which S3 and COS apply atomically."""
        self._bucket.put(self._key(path), data)

    def exists(self, path: str) -> bool:
        """See `Store.exists`."""
        try:
            self._bucket.metadata(self._key(path))
        except FileNotFoundError:
            # HEAD says 404 for a missing bucket too, and that is no answer to this question.
            try:
                self._bucket.ask("look up", path, "head_bucket")
            except FileNotFoundError:
                raise StoreError(f"there is no {self._bucket.place}") from None
            return False
        return True

    def list(self, prefix: str = "") -> list[str]:
        """See `Store.list`."""
        root = f"{self._address.prefix}/" if self._address.prefix else ""
        below = f"{root}{checked_path(prefix, self._uri)}/" if prefix else root
        keys = self._bucket.sizes(below)
        return sorted(key[len(root) :] for key in keys if not key.endswith("/"))

    def _key(self, path: str) -> str:
        path = checked_path(path, self._uri)
        return f"{self._address.prefix}/{path}" if self._address.prefix else path

    def _again(self, get: Callable[[], T], path: str) -> T:
        """Repeat a download whose body broke off; boto3 itself repeats only until the headers."""
        attempts = self._bucket.limits.attempts

        def tried() -> T:
            for attempt in range(1, attempts):
                try:
                    return get()
                except broken_downloads() as error:
                    _log.warning(
                        "bucket %s: download of %s broke off (%s), attempt %d of %d",
                        self._address.bucket,
                        path,
                        type(error).__name__,
                        attempt,
                        attempts,
                    )
            return get()

        try:
            return self._bucket.call("read", path, tried)
        except FileNotFoundError:
            raise ShardMissingError(f"{path} is not in {self._bucket.place}") from None
