"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

from geo_ray.errors import RunDirectoryError

Failpoint: TypeAlias = Callable[[str], None]
"""Called with the name of each durable step; tests pass one that kills the process."""

TEMPORARY_SUFFIX = ".tmp"


def no_failpoint(name: str) -> None:
    """Do nothing, as in production."""


def write_whole(
    path: Path, chunks: Iterable[memoryview | bytes], what: str, failpoint: Failpoint
) -> None:
    """Write a file so that after any crash ``path`` has its old content or all of the new.

    A temporary file beside it is written, synced and renamed, then the directory is synced.

    Args:
        path: the file; its directory exists.
        chunks: the content, single bytes; may be produced while it is written.
        what: the prefix of this file's failpoints, such as "part".
        failpoint: called after each step.

    Raises:
        RunDirectoryError: if the disk is full or the directory cannot be written; the temporary
            file is gone by then.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    try:
        try:
            _write_synced(temporary, chunks, what, failpoint)
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        failpoint(f"{what}.renamed")
        sync_directory(path.parent)
        failpoint(f"{what}.directory_synced")
    except OSError as error:
        raise unwritable(path, error) from error


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


def unwritable(path: Path, error: OSError) -> RunDirectoryError:
    """Return the error to raise when ``path`` could not be written."""
    return RunDirectoryError(f"{path}: cannot be written: {error.strerror or error}")


def _write_synced(
    path: Path, chunks: Iterable[memoryview | bytes], what: str, failpoint: Failpoint
) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        failpoint(f"{what}.opened")
        for chunk in chunks:
            rest = memoryview(chunk)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            failpoint(f"{what}.chunk_written")
        os.fsync(descriptor)
        failpoint(f"{what}.synced")
    finally:
        os.close(descriptor)
