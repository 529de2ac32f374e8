"""Atomic and durable file writes.

A file written here is complete or absent, and has its mode from the first byte on. `PageCacheTrim`
drops the pages of large files, such as checkpoints, from the page cache as they are written or
read: they are not read again soon, they would displace the pages of other processes, and early
writeback keeps the final sync short.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from geo_ray.base.errors import RunDirectoryError

_WINDOW_BYTES: Final = 1 << 25


class PageCacheTrim:
    """Page cache control of a file that is written or read sequentially.

    Args:
        descriptor: descriptor of the file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._left_bytes = _WINDOW_BYTES

    def note(self, num_bytes: int) -> None:
        """Note processed bytes; drops pages after a threshold, so never for small files."""
        self._left_bytes -= num_bytes
        if self._left_bytes <= 0:
            self._left_bytes = _WINDOW_BYTES
            with suppress(OSError, AttributeError):  # not supported by the system or file system
                # Drop all pages, because pages that were dirty the last time may be clean now.
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


PRIVATE: Final = 0o600
PUBLIC: Final = 0o644
TEMPORARY_SUFFIX: Final = ".tmp"

Failpoint = Callable[[str], None]
"""Called with the name of each durable step; tests pass one that kills the process."""


def no_failpoint(name: str) -> None:
    """Do nothing, as in production."""


def write_atomic(path: Path, data: bytes, mode: int = PUBLIC) -> None:
    """Write a small file atomically; see `write_chunks`."""
    write_chunks(path, [data], mode)


def save_text(path: Path, text: str) -> Path:
    """Write a text file of a run atomically; return its path.

    Raises:
        RunDirectoryError: the file cannot be written.
    """
    return save_chunks(path, [text.encode()])


def save_chunks(
    path: Path, chunks: Iterable[memoryview | bytes], failpoint: Failpoint = no_failpoint
) -> Path:
    """Write a file of a run atomically, like `write_chunks`; return its path.

    Raises:
        RunDirectoryError: the file cannot be written.
    """
    try:
        write_chunks(path, chunks, failpoint=failpoint)
    except OSError as error:
        raise unwritable(path, error) from error
    return path


def unwritable(path: Path, error: OSError) -> RunDirectoryError:
    """Return the error for a file of a run that cannot be written."""
    message = f"{path}: cannot be written: {error.strerror or error}"
    if isinstance(error, FileNotFoundError) and not path.parent.exists():
        fix = f"Create the directory {path.parent}, or choose another file."
        return RunDirectoryError(message, fix=fix)
    return RunDirectoryError(message)


def is_full(error: OSError) -> bool:
    """Return whether the disk was full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def overwrite(path: Path, data: bytes) -> bytes:
    """Overwrite a small file in place, for a disk without space for another one.

    The data must fit into the existing space. A crash in between may leave a mixture.

    Args:
        path: an existing file.
        data: text in which trailing white space has no meaning.

    Returns:
        The new content: the data, padded with spaces to the old length.

    Raises:
        OSError: of the system; the file has its old content.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        about = os.fstat(descriptor)
        padded = data.ljust(about.st_size)
        if len(padded) > about.st_blocks * 512:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if os.pwrite(descriptor, padded, 0) != len(padded):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        os.fsync(descriptor)
        return padded
    finally:
        os.close(descriptor)


def write_chunks(
    path: Path,
    chunks: Iterable[memoryview | bytes],
    mode: int = PUBLIC,
    failpoint: Failpoint = no_failpoint,
) -> None:
    """Write a file so that after any crash ``path`` has its old content or all of the new.

    A temporary file next to it is written, synced and renamed, then the directory is synced.

    Args:
        path: the file; its directory exists.
        chunks: the content, single bytes; may be produced while it is written.
        mode: permissions, from the creation on.
        failpoint: called after each step.

    Raises:
        OSError: of the system; the temporary file is removed.
    """
    file = AtomicFile(path, mode, failpoint)
    try:
        for chunk in chunks:
            file.write(chunk)
        file.commit()
    finally:
        file.discard()


class AtomicFile:
    """A file that is written in pieces, and appears only when it is committed.

    Args:
        path: the file; its directory exists.
        mode: permissions, from the creation on.
        failpoint: called after each step.

    Raises:
        OSError: of the system, here and in every method.
    """

    def __init__(self, path: Path, mode: int = PUBLIC, failpoint: Failpoint = no_failpoint) -> None:
        self._path, self._failpoint = path, failpoint
        name = f".{path.name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
        self._temporary: Path | None = path.with_name(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._descriptor = os.open(self._temporary, flags, mode)
        try:
            failpoint("opened")
        except BaseException:
            self.discard()
            raise
        self._page_cache = PageCacheTrim(self._descriptor)

    def write(self, chunk: memoryview | bytes) -> None:
        """Append single bytes."""
        rest = memoryview(chunk)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self._page_cache.note(memoryview(chunk).nbytes)
        self._failpoint("chunk_written")

    def commit(self) -> None:
        """Commit the file durably."""
        if self._temporary is None:
            raise ValueError(f"{self._path}: already committed or discarded")
        os.fsync(self._descriptor)
        self._failpoint("synced")
        self._close()
        self._temporary.replace(self._path)
        self._temporary = None
        self._failpoint("renamed")
        sync_directory(self._path.parent)
        self._failpoint("directory_synced")

    def discard(self) -> None:
        """Remove the temporary file, unless it is committed."""
        self._close()
        temporary, self._temporary = self._temporary, None
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def make_directory(path: Path, *, exist_ok: bool = False) -> None:
    """Create a directory and its parents durably.

    Args:
        path: the directory.
        exist_ok: return if it exists already.

    Raises:
        OSError: of the system; FileExistsError if it exists without ``exist_ok``.
    """
    parent = path.parent
    if parent != path and not parent.is_dir():
        make_directory(parent, exist_ok=True)
    try:
        path.mkdir()
    except FileExistsError:
        if not exist_ok or not path.is_dir():
            raise
    sync_directory(parent)


def sync_directory(directory: Path) -> None:
    """Make renames and removals in ``directory`` durable.

    Raises:
        OSError: of the system.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
