"""Checkpoint folders in a directory, a bucket or temporary files, with one interface.

Directory: temporary file, sync, rename, sync of the directory. Bucket: a bucket has no folders
to create or rename, so a save begins with a small object, the claim; claim and manifest are
written on condition that they do not exist, so that the second of two writers of one checkpoint
is rejected. Temporary files: parts that are only forwarded are in unnamed files that vanish with
their process.
"""

from __future__ import annotations

import io
import logging
import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable
from functools import lru_cache
from operator import methodcaller
from pathlib import Path
from typing import IO, Any, Final, Literal, Protocol

from geo_ray.base.errors import CheckpointConflictError, CheckpointCorruptError, RunDirectoryError
from geo_ray.base.files import (
    Failpoint,
    PageCacheTrim,
    make_directory,
    no_failpoint,
    save_chunks,
    sync_directory,
    unwritable,
)
from geo_ray.storage.bucket import Bucket, ObjectReader, RequestLimits, upload_once
from geo_ray.storage.manifest import MANIFEST_FILE
from geo_ray.storage.uri import parse_s3


class PartSource(Protocol):
    """Source of parts."""

    def name_of(self, file: str) -> str:
        """Address of a file, for messages."""

    def open(self, file: str, num_bytes: int | None = None) -> io.RawIOBase:
        """Open a file for sequential reading, unbuffered.

        Args:
            file: name of the file.
            num_bytes: required size; None: any size.

        Raises:
            CheckpointCorruptError: the file is missing, unreadable, or has another size.
        """


class PartTarget(Protocol):
    """Destination of parts."""

    def name_of(self, file: str) -> str:
        """Address of a file, for messages."""

    def has(self, file: str) -> bool:
        """Return whether a file exists."""

    def write(
        self,
        file: str,
        chunks: Iterable[memoryview | bytes],
        num_bytes: int,
        failpoint: Failpoint = no_failpoint,
    ) -> None:
        """Write a file durably.

        Args:
            file: name of the file.
            chunks: content; each chunk is valid until the next is requested.
            num_bytes: total size.
            failpoint: for tests.

        Raises:
            CheckpointConflictError: the file exists in a bucket; a directory replaces it.
        """


class Folder(PartSource, PartTarget, Protocol):
    """The files of one checkpoint. Each is complete or absent.

    Failures to write or remove raise `RunDirectoryError` in a directory, `StoreError` in a bucket.
    """

    def sizes(self) -> dict[str, int]:
        """Return the sizes of all files."""

    def remove(self, files: Iterable[str]) -> None:
        """Remove existing files."""

    def clear(self) -> None:
        """Remove all files, including incomplete ones."""


class Root(Protocol):
    """Parent of the checkpoint folders of a run.

    Attributes:
        is_remote: whether every access is a network request, which is slow and may cost money. A
            remote save is verified by sizes when it is committed: the server has checked the
            contents of each upload.
    """

    is_remote: bool

    def __str__(self) -> str:
        """Address of the root, for messages."""

    def folder(self, id: int) -> Folder:
        """Return the folder of one checkpoint, which may not exist."""

    def ids(self) -> dict[int, bool]:
        """Return all checkpoints with files, and whether they have a manifest."""

    def claim(self, id: int) -> None:
        """Begin a save, and claim it for this writer.

        Raises:
            CheckpointConflictError: another writer has begun it.
        """

    def owner(self, id: int) -> Literal["self", "other"] | None:
        """Return the owner of a save; None if it was not begun. A directory has a single owner."""

    def sweep(self, is_left: Callable[[int], bool]) -> None:
        """Remove incomplete files of unfinished checkpoints that are in no folder."""


FOLDER_NAME = re.compile(r"^ckpt-([0-9]{8,18})$")


def folder_name(id: int) -> str:
    """Return the name of a checkpoint's folder, in directories and buckets."""
    return f"ckpt-{id:08d}"


def directory_of(root: Path, id: int) -> Path:
    """Return the folder of checkpoint ``id`` below a directory of checkpoints."""
    return root / folder_name(id)


class LocalFolder:
    """See `Folder`.

    Args:
        path: the directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> None:
        """Create the directory, unless it exists.

        Raises:
            RunDirectoryError: the directory cannot be created.
        """
        try:
            make_directory(self.path, exist_ok=True)
        except OSError as error:
            raise unwritable(self.path, error) from error

    def name_of(self, file: str) -> str:
        """See `Folder.name_of`."""
        return str(self.path / file)

    def write(
        self,
        file: str,
        chunks: Iterable[memoryview | bytes],
        num_bytes: int,
        failpoint: Failpoint = no_failpoint,
    ) -> None:
        """See `Folder.write`."""
        save_chunks(self.path / file, chunks, failpoint)

    def open(self, file: str, num_bytes: int | None = None) -> io.RawIOBase:
        """See `Folder.open`."""
        path = self.path / file
        try:
            size = path.lstat().st_size
            if not path.is_file() or path.is_symlink():
                raise CheckpointCorruptError(f"{path}: not a regular file")
            if num_bytes not in (None, size):
                raise CheckpointCorruptError(
                    f"{path}: {size} bytes long; the manifest states {num_bytes}"
                )
            return _Passed(path)
        except OSError as error:
            raise CheckpointCorruptError(f"{path}: cannot be read: {error.strerror}") from error

    def has(self, file: str) -> bool:
        """See `Folder.has`."""
        return (self.path / file).exists()

    def sizes(self) -> dict[str, int]:
        """See `Folder.sizes`."""
        try:
            return {file.name: file.lstat().st_size for file in self.path.iterdir()}
        except OSError as error:
            raise unwritable(self.path, error) from error

    def remove(self, files: Iterable[str]) -> None:
        """See `Folder.remove`."""
        try:
            for file in files:
                (self.path / file).unlink()
            sync_directory(self.path)
        except OSError as error:
            raise unwritable(self.path, error) from error

    def clear(self) -> None:
        """See `Folder.clear`; the directory is removed as well."""
        try:
            if self.path.is_dir():
                shutil.rmtree(self.path)
        except OSError as error:
            raise unwritable(self.path, error) from error


class LocalRoot:
    """See `Root`.

    Args:
        path: the directory; created by the first claim.
    """

    is_remote = False

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def folder(self, id: int) -> LocalFolder:
        """See `Root.folder`."""
        return LocalFolder(directory_of(self.path, id))

    def ids(self) -> dict[int, bool]:
        """See `Root.ids`."""
        try:
            names = [path.name for path in self.path.iterdir()] if self.path.is_dir() else []
        except OSError as error:
            raise RunDirectoryError(
                f"{self.path}: cannot be read: {error.strerror}",
                fix="Check the permissions of the directory.",
            ) from error
        found = [int(match[1]) for name in names if (match := FOLDER_NAME.match(name))]
        folders = {id: self.folder(id) for id in found}
        return {id: f.has(MANIFEST_FILE) for id, f in folders.items() if f.path.is_dir()}

    def claim(self, id: int) -> None:
        """See `Root.claim`."""
        path = self.folder(id).path
        try:
            make_directory(path)
        except OSError as error:
            raise unwritable(path, error) from error

    def owner(self, id: int) -> Literal["self", "other"] | None:
        """See `Root.owner`."""
        return "self" if self.folder(id).path.is_dir() else None

    def sweep(self, is_left: Callable[[int], bool]) -> None:
        """See `Root.sweep`: all incomplete files are in a folder."""


class _Passed(io.FileIO):
    """A file whose pages are dropped from the page cache after reading."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "rb")
        self._page_cache = PageCacheTrim(self.fileno())

    def readinto(self, buffer: Any) -> int:
        size = super().readinto(buffer) or 0
        self._page_cache.note(size)
        return size


_log = logging.getLogger(__name__)
CLAIM_FILE: Final = "claim"
LIMITS = RequestLimits(attempts=6)
_WRITER: Final = "geo-ray-writer"


@lru_cache(maxsize=16)
def bucket_at(uri: str) -> Bucket:
    """Return the bucket of an address; cached, because its client is slow to create."""
    return Bucket(parse_s3(uri), LIMITS)


class S3Folder:
    """See `Folder`.

    Args:
        uri: address of the bucket, with its options.
        prefix: prefix of all keys of the folder.
    """

    def __init__(self, uri: str, prefix: str) -> None:
        self._uri = uri
        self._prefix = prefix

    @property
    def _bucket(self) -> Bucket:
        return bucket_at(self._uri)  # created on first use

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
                f"{self.name_of(file)}: another writer has written it, or abandoned this save"
            ) from None

    def open(self, file: str, num_bytes: int | None = None) -> io.RawIOBase:
        """See `Folder.open`."""
        try:
            reader = ObjectReader(self._bucket, self._prefix + file)
        except FileNotFoundError:
            raise CheckpointCorruptError(f"{self.name_of(file)}: missing") from None
        if num_bytes not in (None, reader.size):
            reader.close()
            raise CheckpointCorruptError(
                f"{self.name_of(file)}: {reader.size} bytes long; the manifest states {num_bytes}"
            )
        return reader

    def has(self, file: str) -> bool:
        """See `Folder.has`."""
        return self._prefix + file in self._bucket.sizes(self._prefix + file)

    def sizes(self) -> dict[str, int]:
        """See `Folder.sizes`; the claim is not one of a checkpoint's files."""
        found = self._bucket.sizes(self._prefix)
        names = {key.removeprefix(self._prefix): size for key, size in found.items()}
        return {name: size for name, size in names.items() if name != CLAIM_FILE}

    def remove(self, files: Iterable[str]) -> None:
        """See `Folder.remove`."""
        self._bucket.delete(self._prefix + file for file in files)

    def clear(self) -> None:
        """See `Folder.clear`; the claim is removed last."""
        _drop_uploads(self._bucket, self._prefix)
        found = self._bucket.sizes(self._prefix)
        self._bucket.delete(sorted(found, key=methodcaller("endswith", f"/{CLAIM_FILE}")))


class S3Root:
    """See `Root`.

    Args:
        uri: ``s3://bucket/prefix?endpoint_url=...&region=...&addressing=...``.
    """

    is_remote = True

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
        """Return a folder outside of checkpoints."""
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
            StoreError: the store does not answer or refuses, or ignores the condition.
        """
        key, mine = self._claim_key(id), {_WRITER: self._me}
        try:
            self._bucket.put(key, b"", once=True, metadata=mine)
        except FileExistsError:
            if self.owner(id) != "self":  # otherwise the answer to this request was lost
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


def _drop_uploads(
    bucket: Bucket, prefix: str, is_left: Callable[[str], bool] | None = None
) -> None:
    for key, upload in bucket.uploads(prefix):
        if is_left is None or is_left(key):
            _log.info("aborting the unfinished upload of %s", key)
            bucket.drop_upload(key, upload)


class TempFileFolder:
    """See `PartTarget`; its files can be read in pieces, from any thread."""

    def __init__(self) -> None:
        self._files: dict[str, IO[bytes]] = {}
        self._lock = threading.Lock()

    def name_of(self, file: str) -> str:
        """See `PartSource.name_of`."""
        return f"{file} (in {tempfile.gettempdir()})"

    def has(self, file: str) -> bool:
        """See `PartTarget.has`."""
        return file in self._files

    def write(
        self,
        file: str,
        chunks: Iterable[memoryview | bytes],
        num_bytes: int,
        failpoint: Failpoint = no_failpoint,
    ) -> None:
        """See `PartTarget.write`."""
        stream = tempfile.TemporaryFile()  # noqa: SIM115 - open until the folder is cleared
        try:
            for chunk in chunks:
                stream.write(chunk)
            stream.flush()
        except OSError as error:
            stream.close()
            raise RunDirectoryError(
                f"{self.name_of(file)}: cannot be written: {error.strerror}"
            ) from error
        with self._lock:
            self._files[file] = stream

    def piece(self, file: str, offset: int, num_bytes: int) -> bytes:
        """Return bytes of a file from ``offset`` on; fewer than requested only at its end.

        Raises:
            CheckpointCorruptError: the file no longer exists, or cannot be read.
        """
        with self._lock:
            stream = self._files.get(file)
            if stream is None:
                raise CheckpointCorruptError(f"{self.name_of(file)}: it no longer exists")
            try:
                stream.seek(offset)
                return stream.read(num_bytes)
            except OSError as error:
                raise CheckpointCorruptError(
                    f"{self.name_of(file)}: cannot be read: {error.strerror}"
                ) from error

    def clear(self) -> None:
        """Remove all."""
        with self._lock:
            for stream in self._files.values():
                stream.close()
            self._files.clear()
