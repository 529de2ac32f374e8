"""Object stores for shards: small files by relative path, in a directory or in a bucket.

`open_store` returns the store of an address: a local directory, or AWS S3, Tencent COS or any
other S3-compatible server.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

from geo_ray.base.errors import ShardMissingError, StoreError
from geo_ray.storage.bucket import Bucket, RequestLimits, broken_downloads
from geo_ray.storage.uri import checked_path, is_s3, local_path, parse_s3


class Store(Protocol):
    """Files by relative POSIX path; writes are atomic."""

    @property
    def uri(self) -> str:
        """Address for `open_store`, without credentials."""

    def read(self, path: str) -> bytes:
        """Return the content of a file.

        Raises:
            ShardMissingError: the file does not exist.
            StoreError: the store does not answer or refuses.
        """

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading at any position; the caller closes it.

        Raises:
            ShardMissingError: the file does not exist.
            StoreError: the store does not answer or refuses, or there is no space for a copy.
        """

    def write(self, path: str, data: bytes) -> None:
        """Create or replace the file atomically.

        Raises:
            StoreError: the store does not answer, refuses or is full.
        """

    def exists(self, path: str) -> bool:
        """Return whether the file exists.

        Raises:
            StoreError: the store does not answer or refuses.
        """

    def list(self, prefix: str = "") -> list[str]:
        """Return the sorted paths of all files below the folder ``prefix`` ("" for all).

        Raises:
            StoreError: the store does not answer or refuses.
        """


def open_store(uri: str) -> Store:
    """Open the store at an address; nothing is contacted yet.

    Args:
        uri: ``file:///dir`` or a plain path, or
            ``s3://bucket/prefix?endpoint_url=...&region=...&addressing=path|virtual``.

    Raises:
        StoreError: the address is invalid or contains credentials.
    """
    return S3Store(uri) if is_s3(uri) else LocalStore(local_path(uri))


_TEMPORARY = ".tmp-"


class LocalStore:
    """Files below one directory, which is created by the first write.

    Args:
        root: the directory.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    @property
    def uri(self) -> str:
        """See `Store.uri`."""
        return self._root.as_uri()

    def read(self, path: str) -> bytes:
        """See `Store.read`."""
        with self.open(path) as file:
            try:
                return file.read()
            except OSError as error:
                raise StoreError(f"cannot read {path} in store {self.uri}: {error}") from error

    def open(self, path: str) -> BinaryIO:
        """See `Store.open`."""
        try:
            return self._file(path).open("rb")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise ShardMissingError(f"{path} is not in store {self.uri}") from None
        except OSError as error:
            raise StoreError(f"cannot read {path} in store {self.uri}: {error}") from error

    def write(self, path: str, data: bytes) -> None:
        """See `Store.write`: temporary file, fsync, rename, fsync of the directory."""
        file = self._file(path)
        temporary: Path | None = None
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=file.parent)
            temporary = Path(name)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fchmod(stream.fileno(), 0o644)  # mkstemp's 0600 would lock other users out
                os.fsync(stream.fileno())
            temporary.replace(file)
            temporary = None
            _sync_directory(file.parent)
        except OSError as error:
            raise StoreError(
                f"cannot write {path} in store {self.uri}: {error}",
                fix="Check the directory's permissions and free space.",
            ) from error
        finally:
            if temporary is not None:
                temporary.unlink(missing_ok=True)

    def exists(self, path: str) -> bool:
        """See `Store.exists`."""
        return self._file(path).is_file()

    def list(self, prefix: str = "") -> list[str]:
        """See `Store.list`."""
        start = self._file(prefix) if prefix else self._root
        try:
            return sorted(
                file.relative_to(self._root).as_posix()
                for file in start.rglob("*")
                if file.is_file() and not file.name.startswith(_TEMPORARY)
            )
        except OSError as error:
            raise StoreError(f"cannot list store {self.uri}: {error}") from error

    def _file(self, path: str) -> Path:
        return self._root / checked_path(path, self.uri)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_log = logging.getLogger(__name__)
_PIECE_BYTES = 1 << 20

T = TypeVar("T")


class S3Store:
    """Objects of one bucket below a prefix.

    Args:
        uri: ``s3://bucket/prefix?endpoint_url=...&region=...&addressing=...``.
        limits: limits of every request, also for retries of interrupted downloads.
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
        """See `Store.open`: an unnamed temporary copy on this machine's disk."""
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
                f"no space for a copy of {path} of bucket {self._address.bucket!r}: {error}",
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
            # HEAD also returns 404 for a missing bucket, which is a different case.
            try:
                self._bucket.ask("look up", path, "head_bucket")
            except FileNotFoundError:
                raise StoreError(f"no {self._bucket.place}") from None
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
        """Retry an interrupted download; boto3 itself retries only until the headers."""
        attempts = self._bucket.limits.attempts

        def tried() -> T:
            for attempt in range(1, attempts):
                try:
                    return get()
                except broken_downloads() as error:
                    _log.warning(
                        "bucket %s: download of %s was interrupted (%s), attempt %d of %d",
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
