"""A conditional store in a bucket: every write is an object of its own, with the next number.

    PREFIX/lease.json/00000000000000000017

Rule: the value is that of the highest number, and the number is its tag. Who writes makes the
object of the next number on condition that it is not there, and looks then whether it is the
highest one: who was so late that this number was removed already is refused all the same.

That is all that is asked of a server: creating on condition, which AWS and COS both have, and lists
that show what was written before. COS cannot replace on condition (`If-Match`).

Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from email.utils import parsedate_to_datetime
from typing import Any, Final

from geo_ray.errors import RunDirectoryError, StoreError
from geo_ray.lease.record import MAX_RECORD_BYTES
from geo_ray.lease.store import StoredValue
from geo_ray.stores.bucket import Bucket
from geo_ray.stores.upload import upload_once

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
        for _ in range(_TRIES):
            newest = max(self._numbers(key), default=None)
            if newest is None:
                return None
            try:
                answer = self._bucket.get(self._name(key, newest))
                with closing(answer["Body"]) as body:
                    data = bytes(body.read(MAX_RECORD_BYTES + 1))
                return StoredValue(data, str(newest), _age_s(answer))
            except FileNotFoundError:
                continue  # several were written meanwhile
            except StoreError as error:
                raise _far(error) from error
        raise RunDirectoryError(f"{key} in {self._bucket.place} changes faster than it can be read")

    def write(self, key: str, data: bytes, expected: str | None) -> str | None:
        """See `ConditionalStore.write`."""
        mine = 1 if expected is None else int(expected) + 1
        if expected is None and self._numbers(key):
            return None
        name = self._name(key, mine)
        try:
            upload_once(self._bucket, name, [data], len(data))
        except FileExistsError:
            return None
        except StoreError as error:
            raise _far(error) from error
        found = self._numbers(key)
        if max(found, default=mine) > mine:
            self._delete([name])
            return None
        self._delete([self._name(key, number) for number in found if number <= mine - _KEPT])
        return str(mine)

    def remove(self, key: str) -> None:
        """See `ConditionalStore.remove`."""
        self._delete([self._name(key, number) for number in sorted(self._numbers(key))])

    @contextmanager
    def unchanged(self, key: str, tag: str) -> Iterator[bool]:
        """See `ConditionalStore.unchanged`; it only looks."""
        yield max(self._numbers(key), default=0) == int(tag)

    def _numbers(self, key: str) -> list[int]:
        folder = self._name(key)
        try:
            names = [name.removeprefix(folder) for name in self._bucket.sizes(folder)]
        except StoreError as error:
            raise _far(error) from error
        return [int(name) for name in names if len(name) == _DIGITS and name.isdigit()]

    def _delete(self, names: list[str]) -> None:
        try:
            self._bucket.delete(names)
        except StoreError as error:
            raise _far(error) from error

    def _name(self, key: str, number: int | None = None) -> str:
        return f"{self._prefix}{key}/" + ("" if number is None else f"{number:0{_DIGITS}d}")


def _far(error: StoreError) -> RunDirectoryError:
    return RunDirectoryError(error.message, fix=error.fix)


def _age_s(answer: Mapping[str, Any]) -> float | None:
    """How old an object is by its server's clock, which both times are of."""
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    written = answer.get("LastModified")
    if date is None or written is None:
        return None
    return max(0.0, float((parsedate_to_datetime(date) - written).total_seconds()))
