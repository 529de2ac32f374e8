"""A conditional store in a directory: whole files, changed under a lock of the system."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from geo_ray.errors import RunDirectoryError
from geo_ray.lease.record import MAX_RECORD_BYTES
from geo_ray.lease.store import StoredValue
from geo_ray.util.atomic_file import is_full, overwrite, unwritable, write_atomic

LOCK_SUFFIX: Final = ".lock"
_LOCK_WAIT_S: Final = 20.0
_LOCK_POLL_S: Final = 0.02
_log = logging.getLogger(__name__)


class LocalConditionalStore:
    """See `ConditionalStore`; for processes that share the directory.

    The system gives a lock back when its process ends, whatever ends it. Where the file system has
    no locks, values are compared and then written, which two writers at one moment could both do.

    Args:
        root: the directory, which exists.
        lock_wait_s: how long to wait for another process that is writing.
    """

    def __init__(self, root: Path, lock_wait_s: float = _LOCK_WAIT_S) -> None:
        self._root = root
        self._lock_wait_s = lock_wait_s
        self._has_locks = True

    def read(self, key: str) -> StoredValue | None:
        """See `ConditionalStore.read`."""
        path = self._root / key
        try:
            with path.open("rb") as file:
                data = file.read(MAX_RECORD_BYTES + 1)
                age_s = max(0.0, time.time() - os.fstat(file.fileno()).st_mtime)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _unreadable(path, error) from error
        return StoredValue(data, hashlib.sha256(data).hexdigest(), age_s)

    def write(self, key: str, data: bytes, expected: str | None) -> str | None:
        """See `ConditionalStore.write`."""
        with self._locked(key):
            if self._tag(key) != expected:
                return None
            path = self._root / key
            try:
                try:
                    write_atomic(path, data)
                except OSError as error:
                    if expected is None or not is_full(error):
                        raise
                    data = overwrite(path, data)  # a full disk must not cost a run its lease
            except OSError as error:
                raise unwritable(path, error) from error
        return hashlib.sha256(data).hexdigest()

    def remove(self, key: str) -> None:
        """See `ConditionalStore.remove`."""
        with self._locked(key):
            for path in (self._root / key, self._root / f"{key}{LOCK_SUFFIX}"):
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    raise unwritable(path, error) from error

    @contextmanager
    def unchanged(self, key: str, tag: str) -> Iterator[bool]:
        """See `ConditionalStore.unchanged`."""
        with self._locked(key):
            yield self._tag(key) == tag

    def _tag(self, key: str) -> str | None:
        found = self.read(key)
        return None if found is None else found.tag

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        path = self._root / f"{key}{LOCK_SUFFIX}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise unwritable(path, error) from error
        try:
            self._lock(descriptor, path)
            yield
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int, path: Path) -> None:
        deadline_s = time.monotonic() + self._lock_wait_s
        while self._has_locks:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise RunDirectoryError(
                        f"{path} has been locked for {self._lock_wait_s:g} s by a process that is "
                        "writing to the run and does not come to its end",
                        fix=f"End that process (`fuser {path}` names it), then try again.",
                    ) from None
            except OSError as error:
                self._has_locks = False
                _log.warning(
                    "the file system of %s has no locks (%s): do not start two drivers of one run "
                    "at the same moment",
                    path.parent,
                    error.strerror,
                )
                return
            time.sleep(_LOCK_POLL_S)


def _unreadable(path: Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(
        f"cannot read {path}: {error.strerror or error}", fix="Check the permissions of the file."
    )
