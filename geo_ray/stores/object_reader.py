"""An object of a bucket, read once from its beginning into memory that the reader is given."""

from __future__ import annotations

import io
import logging
from typing import Any

from geo_ray.errors import StoreError
from geo_ray.stores.bucket import Bucket, broken_downloads

_log = logging.getLogger(__name__)


class ObjectReader(io.RawIOBase):
    """Goes on where a download broke off; only one that breaks off again and again is given up.

    Args:
        bucket: where.
        key: the object.

    Raises:
        FileNotFoundError: it is not there.
        StoreError: the store does not answer or refuses; `readinto` raises that, too.
    """

    def __init__(self, bucket: Bucket, key: str) -> None:
        super().__init__()
        self._bucket = bucket
        self._key = key
        self._position = 0
        answer = bucket.get(key)
        self.size = int(answer["ContentLength"])
        self._etag = str(answer["ETag"])
        self._body: Any = answer["Body"]
        self._left = bucket.limits.attempts

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the beginning of ``buffer``; 0 at the end."""
        while True:
            if self._position >= self.size:
                return 0
            try:
                size = self._bucket.call("read", self._key, lambda: self._read(buffer))
            except FileNotFoundError as error:  # it was there a moment ago
                raise StoreError(f"{error}: it changed while it was read") from None
            if size:
                self._position += size
                self._left = self._bucket.limits.attempts
                return size
            self._body.close()
            self._body = None

    def close(self) -> None:
        """Give the connection up."""
        if self._body is not None:
            self._body.close()
        super().close()

    def _read(self, buffer: Any) -> int:
        """Some bytes; 0 if the connection broke off and may be tried again."""
        if self._body is None:
            self._body = self._bucket.get(self._key, self._position, self._etag)["Body"]
        cause = "end"
        try:
            size = int(self._body.readinto(buffer))
        except broken_downloads() as error:
            size, cause = 0, type(error).__name__
        if size == 0:
            self._left -= 1
            where = f"{self._key} at byte {self._position}"
            if self._left <= 0:
                raise StoreError(f"{self._bucket.place}: the download of {where} breaks off")
            _log.warning("download of %s broke off (%s)", where, cause)
        return size
