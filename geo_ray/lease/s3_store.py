"""A conditional store in a bucket: every write is an object of its own, with the next number.

    PREFIX/lease.json/00000000000000000017

Rule: the value is that of the highest number, and the number is its tag. Who writes makes the
object of the next number on condition that it is not there, and looks then whether it is the
highest one: who was so late that this number was removed already is refused all the same.

That is all that is asked of a server: creating on condition, which AWS and COS both have, and lists
that show what was written before. COS cannot replace on condition (`If-Match`). The first write of
a process makes sure that the server does refuse: see `Bucket.check_conditions`.

A server that accepts requests and does not answer blocks a call for at most twice the read timeout
of the bucket, which with `LEASE_LIMITS` is less than a lease lives. A request that fails sooner is
repeated in that time.

Source: ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, TypeVar

from geo_ray.errors import RunDirectoryError, StoreError
from geo_ray.lease.record import MAX_RECORD_BYTES
from geo_ray.lease.store import StoredValue
from geo_ray.stores.bucket import Bucket, RequestLimits
from geo_ray.stores.upload import upload_once

T = TypeVar("T")

LEASE_LIMITS: Final = RequestLimits(2.0, 4.0, attempts=1)
"""For the bucket of a conditional store, which repeats requests itself."""

_REPEATS_AFTER_S: Final = (0.2, 0.8)
_KEPT: Final = 3  # a reader may have listed an older one
_DIGITS: Final = 20
_TRIES: Final = 5


class S3ConditionalStore:
    """See `ConditionalStore`; for processes that share nothing but a bucket.

    Args:
        bucket: which.
        prefix: of all keys, with its slash at the end; "" for the bucket's root.
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
                continue  # several were written meanwhile
        raise RunDirectoryError(f"{key} in {self._bucket.place} changes faster than it can be read")

    def write(self, key: str, data: bytes, expected: str | None) -> str | None:
        """See `ConditionalStore.write`."""
        asked = _Asked(self._bucket.limits)
        mine = 1 if expected is None else int(expected) + 1
        if expected is None and self._numbers(key, asked):
            return None
        name = self._name(key, mine)
        try:
            asked.repeat(lambda: upload_once(self._bucket, name, [data], len(data)))
        except FileExistsError:
            if not self._is_own(key, mine, data, asked):
                return None
        try:
            asked.repeat(lambda: self._bucket.check_conditions(name, data))
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
        """See `ConditionalStore.unchanged`; it only looks."""
        asked = _Asked(self._bucket.limits)
        yield max(self._numbers(key, asked), default=0) == int(tag)

    def _numbers(self, key: str, asked: _Asked) -> list[int]:
        folder = self._name(key)
        sizes = asked.repeat(lambda: self._bucket.sizes(folder))
        names = [name.removeprefix(folder) for name in sizes]
        return [int(name) for name in names if len(name) == _DIGITS and name.isdigit()]

    def _value(self, key: str, number: int, asked: _Asked) -> StoredValue:
        name = self._name(key, number)

        def get() -> StoredValue:
            answer = self._bucket.get(name)
            with closing(answer["Body"]) as body:
                data = self._bucket.call("read", name, lambda: body.read(MAX_RECORD_BYTES + 1))
            return StoredValue(bytes(data), str(number), _age_s(answer))

        return asked.repeat(get)

    def _is_own(self, key: str, number: int, data: bytes, asked: _Asked) -> bool:
        """Whether an object was written by an earlier request of this process, with no answer."""
        try:
            return asked.repeats > 0 and self._value(key, number, asked).data == data
        except FileNotFoundError:
            return False

    def _delete(self, names: list[str], asked: _Asked) -> None:
        if names:
            asked.repeat(lambda: self._bucket.delete(names))

    def _name(self, key: str, number: int | None = None) -> str:
        return f"{self._prefix}{key}/" + ("" if number is None else f"{number:0{_DIGITS}d}")


class _Asked:
    """The requests of one call, which ends in time although a server hangs.

    Attributes:
        repeats: how many requests were repeated.
    """

    def __init__(self, limits: RequestLimits) -> None:
        self._longest_s = limits.read_timeout_s
        self._until_s = time.monotonic() + 2 * self._longest_s
        self._is_first = True
        self.repeats = 0

    def repeat(self, request: Callable[[], T]) -> T:
        """Send a request, again if it fails, as long as one that hangs would end in time.

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
                    raise _far(error) from error
            self.repeats += 1
            time.sleep(wait_s)
        try:
            return request()
        except StoreError as error:
            raise _far(error) from error

    def _has_time_after(self, wait_s: float) -> bool:
        return time.monotonic() + wait_s + self._longest_s <= self._until_s


def _far(error: StoreError) -> RunDirectoryError:
    return RunDirectoryError(error.message, fix=error.fix)


def _age_s(answer: Mapping[str, Any]) -> float | None:
    """How old an object is by its server's clock, which both times are of; None if not known."""
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    written = answer.get("LastModified")
    if date is None or not isinstance(written, datetime):
        return None
    try:
        return max(0.0, (parsedate_to_datetime(date) - written).total_seconds())
    except (ValueError, TypeError, OverflowError):  # no date, or one without a time zone
        return None
