"""What an object store is for geo_ray: whole small files, by relative path."""

from __future__ import annotations

from typing import BinaryIO, Protocol

from geo_ray.stores.local import LocalStore
from geo_ray.stores.s3 import S3Store
from geo_ray.stores.uri import is_s3, local_path


class Store(Protocol):
    """Whole files by relative POSIX path; a write is seen entirely or not at all."""

    @property
    def uri(self) -> str:
        """The address that `open_store` takes; never holds credentials."""

    def read(self, path: str) -> bytes:
        """The whole file.

        Raises:
            ShardMissingError: if it is not there.
            StoreError: if the store does not answer or refuses.
        """

    def open(self, path: str) -> BinaryIO:
        """The file for reading in pieces, at any position; the caller closes it.

        Raises:
            ShardMissingError: if it is not there.
            StoreError: if the store does not answer or refuses, or a copy of it finds no room.
        """

    def write(self, path: str, data: bytes) -> None:
        """Create or replace the file atomically.

        Raises:
            StoreError: if the store does not answer, refuses or is full.
        """

    def exists(self, path: str) -> bool:
        """Whether the file is there.

        Raises:
            StoreError: if the store does not answer or refuses.
        """

    def list(self, prefix: str = "") -> list[str]:
        """Sorted paths of all files below the folder ``prefix`` ("" for all).

        Raises:
            StoreError: if the store does not answer or refuses.
        """


def open_store(uri: str) -> Store:
    """Open the store at an address; nothing is contacted yet.

    Args:
        uri: ``file:///dir`` or a plain path, or
            ``s3://bucket/prefix?endpoint_url=...&region=...&addressing=path|virtual``.

    Raises:
        StoreError: if the address is not understood or carries credentials.
    """
    return S3Store(uri) if is_s3(uri) else LocalStore(local_path(uri))
