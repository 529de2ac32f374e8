"""Conditional writes: values replaced only if unchanged since they were read.

Implemented for a directory (under a file lock) and for a bucket (each write is a new numbered
object). Leases, journals and requests use such a store.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from geo_ray.base.errors import RunDirectoryError, StoreError
from geo_ray.base.files import is_full, overwrite, unwritable, write_atomic
from geo_ray.storage.bucket import Bucket, RequestLimits, upload_once
from geo_ray.storage.uri import is_s3, parse_s3

MAX_RECORD_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A stored value.

    Attributes:
        data: its bytes.
        tag: changes with every write, like the ETag of an object store.
        age_s: time since it was written, if known; informative.
    """

    data: bytes
    tag: str
    age_s: float | None = field(default=None, compare=False)


class ConditionalStore(Protocol):
    """A few small values by key.

    A directory uses a lock. In an object store each write of a value is an object with the next
    number, written with ``If-None-Match: *``.
    """

    def read(self, key: str) -> StoredValue | None:
        """Return a value, or None.

        Raises:
            RunDirectoryError: it cannot be read.
        """

    def write(self, key: str, data: bytes, expected: str | None) -> str | None:
        """Write a value if it has not changed since it was read.

        Args:
            key: key of the value.
            data: its bytes, different from those of every earlier write.
            expected: tag of the read value; None: there was none.

        Returns:
            Its new tag; None if it was not written, because it had changed.

        Raises:
            RunDirectoryError: it cannot be written; or it was, but the answer was lost.
        """

    def remove(self, key: str) -> None:
        """Remove an unused value; does nothing if it does not exist.

        A late writer may write it again: readers must not rely on its absence.

        Raises:
            RunDirectoryError: it cannot be removed.
        """

    def unchanged(self, key: str, tag: str) -> AbstractContextManager[bool]:
        """Check whether a value still has a tag, and block other writers while the block runs.

        A store that cannot block writers, such as an object store, only checks. Late writes of the
        block must then be rejected by themselves: a single value with the valid state and its
        writer is replaced by conditional writes, and every new holder replaces it first.

        Raises:
            RunDirectoryError: the value cannot be read or locked.
        """


LOCK_SUFFIX: Final = ".lock"
_LOCK_WAIT_S: Final = 20.0
_LOCK_POLL_S: Final = 0.02
_log = logging.getLogger(__name__)


class LocalConditionalStore:
    """See `ConditionalStore`; for processes that share the directory.

    The system releases a lock when its process ends, for any reason. On a file system without
    locks, values are compared and then written, which two simultaneous writers could both do.

    Args:
        root: existing directory.
        lock_wait_s: timeout for another process that is writing.
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
                        "writing to the run and does not finish",
                        fix=f"End that process (`fuser {path}` shows it), then try again.",
                    ) from None
            except OSError as error:
                self._has_locks = False
                _log.warning(
                    "the file system of %s has no locks (%s): do not start two run actors of one "
                    "run at the same moment",
                    path.parent,
                    error.strerror,
                )
                return
            time.sleep(_LOCK_POLL_S)


def _unreadable(path: Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(
        f"cannot read {path}: {error.strerror or error}", fix="Check the permissions of the file."
    )


T = TypeVar("T")

LEASE_LIMITS: Final = RequestLimits(2.0, 4.0, attempts=1)
"""Limits for the bucket of a conditional store, which retries requests itself."""

_REPEATS_AFTER_S: Final = (0.2, 0.8)
_KEPT: Final = 3  # a reader may have listed an older one
_DIGITS: Final = 20
_TRIES: Final = 5


class S3ConditionalStore:
    """See `ConditionalStore`; for processes that share only a bucket.

    Args:
        bucket: the bucket.
        prefix: prefix of all keys, with a trailing slash; "" for the bucket's root.
    """

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        self._bucket, self._prefix = bucket, prefix

    def __str__(self) -> str:
        return f"s3://{self._bucket.address.bucket}/{self._prefix.rstrip('/')}"

    def read(self, key: str) -> StoredValue | None:
        """See `ConditionalStore.read`."""
        asked = _Asked(self._bucket.limits)
        for _ in range(_TRIES):
            newest = max(self._numbers(key, asked), default=None)
            if newest is None:
                return None
            try:
                return self._value(key, newest, asked)
            except FileNotFoundError:
                continue  # several were written in the meantime
        raise RunDirectoryError(f"{key} in {self._bucket.place} changes faster than it can be read")

    def write(self, key: str, data: bytes, expected: str | None) -> str | None:
        """See `ConditionalStore.write`."""
        asked = _Asked(self._bucket.limits)
        mine = 1 if expected is None else int(expected) + 1
        if expected is None and self._numbers(key, asked):
            return None
        name = self._name(key, mine)
        try:
            asked.repeat(partial(upload_once, self._bucket, name, [data], len(data)))
        except FileExistsError:
            if not self._is_own(key, mine, data, asked):
                return None
        try:
            asked.repeat(partial(self._bucket.check_conditions, name, data))
        except RunDirectoryError:
            with suppress(RunDirectoryError):
                self._delete([name], asked)
            raise
        found = self._numbers(key, asked)
        if max(found, default=mine) > mine:
            self._delete([name], asked)
            return None
        self._delete([self._name(key, number) for number in found if number <= mine - _KEPT], asked)
        return str(mine)

    def remove(self, key: str) -> None:
        """See `ConditionalStore.remove`."""
        asked = _Asked(self._bucket.limits)
        numbers = sorted(self._numbers(key, asked))
        self._delete([self._name(key, number) for number in numbers], asked)

    @contextmanager
    def unchanged(self, key: str, tag: str) -> Iterator[bool]:
        """See `ConditionalStore.unchanged`; only checks."""
        asked = _Asked(self._bucket.limits)
        yield max(self._numbers(key, asked), default=0) == int(tag)

    def _numbers(self, key: str, asked: _Asked) -> list[int]:
        folder = self._name(key)
        sizes = asked.repeat(partial(self._bucket.sizes, folder))
        names = [name.removeprefix(folder) for name in sizes]
        return [int(name) for name in names if len(name) == _DIGITS and name.isdigit()]

    def _value(self, key: str, number: int, asked: _Asked) -> StoredValue:
        name = self._name(key, number)

        def get() -> StoredValue:
            answer = self._bucket.get(name)
            with closing(answer["Body"]) as body:
                data = self._bucket.call("read", name, partial(body.read, MAX_RECORD_BYTES + 1))
            return StoredValue(bytes(data), str(number), _age_s(answer))

        return asked.repeat(get)

    def _is_own(self, key: str, number: int, data: bytes, asked: _Asked) -> bool:
        """Return whether an unanswered earlier request of this process has written an object."""
        try:
            return asked.repeats > 0 and self._value(key, number, asked).data == data
        except FileNotFoundError:
            return False

    def _delete(self, names: list[str], asked: _Asked) -> None:
        if names:
            asked.repeat(partial(self._bucket.delete, names))

    def _name(self, key: str, number: int | None = None) -> str:
        return f"{self._prefix}{key}/" + ("" if number is None else f"{number:0{_DIGITS}d}")


class _Asked:
    """Requests of one call, which ends in time even if a server hangs.

    Attributes:
        repeats: number of retried requests.
    """

    def __init__(self, limits: RequestLimits) -> None:
        self._longest_s = limits.read_timeout_s
        self._until_s = time.monotonic() + 2 * self._longest_s
        self._is_first = True
        self.repeats = 0

    def repeat(self, request: Callable[[], T]) -> T:
        """Send a request, with retries while a hanging one would still end in time.

        Raises:
            RunDirectoryError: the store did not answer in time, or refused.
        """
        if not self._is_first and not self._has_time_after(0.0):
            raise RunDirectoryError(
                f"a bucket takes longer than {self._longest_s:g} s to answer, which is too slow "
                "for a lease",
                fix="Check the network between this machine and the bucket.",
            )
        self._is_first = False
        for wait_s in _REPEATS_AFTER_S:
            try:
                return request()
            except StoreError as error:
                if not self._has_time_after(wait_s):
                    raise _remote_error(error) from error
            self.repeats += 1
            time.sleep(wait_s)
        try:
            return request()
        except StoreError as error:
            raise _remote_error(error) from error

    def _has_time_after(self, wait_s: float) -> bool:
        return time.monotonic() + wait_s + self._longest_s <= self._until_s


def _remote_error(error: StoreError) -> RunDirectoryError:
    return RunDirectoryError(error.message, fix=error.fix)


def _age_s(answer: Mapping[str, Any]) -> float | None:
    """Return the age of an object by its server's clock; None if unknown."""
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    written = answer.get("LastModified")
    if date is None or not isinstance(written, datetime):
        return None
    try:
        return max(0.0, (parsedate_to_datetime(date) - written).total_seconds())
    except (ValueError, TypeError, OverflowError):  # not a date, or without a time zone
        return None


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """Location of a conditional store.

    Attributes:
        uri: a directory's path, or an ``s3://`` address.
    """

    uri: str

    @property
    def is_remote(self) -> bool:
        """Whether it is in a bucket."""
        return is_s3(self.uri)

    @property
    def shown(self) -> str:
        """The location as typed."""
        if self.is_remote:
            return self.uri
        path, here = Path(self.uri), Path.cwd()
        return str(path.relative_to(here) if path.is_relative_to(here) else path)

    def store(self, below: str = "") -> ConditionalStore:
        """Return the store; nothing is contacted yet.

        Args:
            below: name of a subfolder; empty: the location itself.

        Raises:
            StoreError: the address is invalid.
        """
        if not self.is_remote:
            return LocalConditionalStore(Path(self.uri) / below)
        address = parse_s3(self.uri)
        folder = "".join(f"{part}/" for part in (address.prefix, below) if part)
        return S3ConditionalStore(Bucket(address, LEASE_LIMITS), folder)
