"""What an object store is for geo_ray: whole small files, by relative path."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Protocol

from geo_ray.errors import StoreError


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


def problem_of_path(path: str) -> str | None:
    """Why ``path`` is no plain relative path inside a store; None if it is one."""
    if not path:
        return "is empty"
    if path.startswith("/"):
        return "is absolute"
    if "\\" in path or any(ord(char) < 32 for char in path):
        return "has a backslash or a control character"
    if ".." in PurePosixPath(path).parts:
        return "leaves its store by '..'"
    if str(PurePosixPath(path)) != path or path == ".":
        return "is not in its shortest form"
    return None


def checked_path(path: str, uri: str) -> str:
    """Return ``path`` if it stays inside the store.

    Raises:
        StoreError: if it is absolute, has ``..`` or is otherwise not plain.
    """
    problem = problem_of_path(path)
    if problem:
        raise StoreError(
            f"path {path!r} {problem}; refused for store {uri}",
            fix="Use a relative path such as us-east/train-00000.parquet.",
        )
    return path


def open_store(uri: str) -> Store:
    """Open the store at an address; nothing is contacted yet.

    Args:
        uri: ``file:///dir`` or a plain path, or
            ``s3://bucket/prefix?endpoint_url=...&region=...&addressing=path|virtual``.

    Raises:
        StoreError: if the address is not understood or carries credentials.
    """
    from geo_ray.data.stores.uri import is_s3, local_path

    if is_s3(uri):
        from geo_ray.data.stores.s3 import S3Store

        return S3Store(uri)
    from geo_ray.data.stores.local import LocalStore

    return LocalStore(local_path(uri))
