"""Atomic and durable file writes.

A file written here is complete or absent, and has its mode from the first byte on. `PageCacheTrim`
drops the pages of large files, such as checkpoints, from the page cache as they are written or
read: nobody reads them again soon, they would displace the pages of other processes, and early
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
    """One file, written or read from its beginning.

    Args:
        descriptor: of the file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._left_bytes = _WINDOW_BYTES

    def note(self, num_bytes: int) -> None:
        """So many bytes more are done with; a small file never gets to hand anything back."""
        self._left_bytes -= num_bytes
        if self._left_bytes <= 0:
            self._left_bytes = _WINDOW_BYTES
            with suppress(OSError, AttributeError):  # a system or file system without such advice
                # All of it: pages that were not on the disk yet the last time are by now.
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


PRIVATE: Final = 0o600
PUBLIC: Final = 0o644
TEMPORARY_SUFFIX: Final = ".tmp"

Failpoint = Callable[[str], None]
"""Called with the name of each durable step; tests pass one that kills the process."""


def no_failpoint(name: str) -> None:
    """Do nothing, as in production."""


def write_atomic(path: Path, data: bytes, mode: int = PUBLIC) -> None:
    """Write a small file whole; see `write_chunks`."""
    write_chunks(path, [data], mode)


def save_text(path: Path, text: str) -> Path:
    """Write a text file of a run whole; give its path.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    return save_chunks(path, [text.encode()])


def save_chunks(
    path: Path, chunks: Iterable[memoryview | bytes], failpoint: Failpoint = no_failpoint
) -> Path:
    """Write a file of a run whole, as `write_chunks` does; give its path.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    try:
        write_chunks(path, chunks, failpoint=failpoint)
    except OSError as error:
        raise unwritable(path, error) from error
    return path


def unwritable(path: Path, error: OSError) -> RunDirectoryError:
    """The error to raise when a file of a run could not be written."""
    message = f"{path}: cannot be written: {error.strerror or error}"
    if isinstance(error, FileNotFoundError) and not path.parent.exists():
        fix = f"Make the directory {path.parent}, or name another file."
        return RunDirectoryError(message, fix=fix)
    return RunDirectoryError(message)


def is_full(error: OSError) -> bool:
    """Whether a file could not be written for want of space."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def overwrite(path: Path, data: bytes) -> bytes:
    """Write a small file where it lies, for a disk that has no room for another one.

    It must fit into the space that the file has already. A crash in the middle may leave a mixture.

    Args:
        path: the file, which exists.
        data: text in which white space at the end means nothing.

    Returns:
        What the file has now: the data, padded with spaces to the length that it had.

    Raises:
        OSError: as the system says; the file has its old content.
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

    A temporary file beside it is written, synced and renamed, then the directory is synced.

    Args:
        path: the file; its directory exists.
        chunks: the content, single bytes; may be produced while it is written.
        mode: permissions, never wider than that even for a moment.
        failpoint: called after each step.

    Raises:
        OSError: as the system says; the temporary file is gone by then.
    """
    file = AtomicFile(path, mode, failpoint)
    try:
        for chunk in chunks:
            file.write(chunk)
        file.commit()
    finally:
        file.discard()


class AtomicFile:
    """A file that is written piece by piece, and is there only once it is committed.

    Args:
        path: the file; its directory exists.
        mode: permissions, never wider than that even for a moment.
        failpoint: called after each step.

    Raises:
        OSError: as the system says, here and in every method.
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
        """Let the file be there, also after a loss of power."""
        if self._temporary is None:
            raise ValueError(f"{self._path}: committed or discarded before")
        os.fsync(self._descriptor)
        self._failpoint("synced")
        self._close()
        self._temporary.replace(self._path)
        self._temporary = None
        self._failpoint("renamed")
        sync_directory(self._path.parent)
        self._failpoint("directory_synced")

    def discard(self) -> None:
        """Remove what was written, unless it is committed."""
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
    """Make a directory and its parents so that they survive a loss of power.

    Args:
        path: the directory.
        exist_ok: return if it is there already.

    Raises:
        OSError: as the system says; FileExistsError if it is there and must not be.
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
    """Make renames and removals in ``directory`` survive a loss of power.

    Raises:
        OSError: as the system says.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
