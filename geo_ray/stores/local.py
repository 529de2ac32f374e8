"""A directory as a store."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import BinaryIO

from geo_ray.errors import ShardMissingError, StoreError
from geo_ray.stores.paths import checked_path

_TEMPORARY = ".tmp-"


class LocalStore:
    """Files below one directory, which is created by the first write.

    Args:
        root: the directory.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    @property
    def uri(self) -> str:
        """See `Store.uri`."""
        return self._root.as_uri()

    def read(self, path: str) -> bytes:
        """See `Store.read`."""
        with self.open(path) as file:
            try:
                return file.read()
            except OSError as error:
                raise StoreError(f"cannot read {path} in store {self.uri}: {error}") from error

    def open(self, path: str) -> BinaryIO:
        """See `Store.open`."""
        try:
            return self._file(path).open("rb")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise ShardMissingError(f"{path} is not in store {self.uri}") from None
        except OSError as error:
            raise StoreError(f"cannot read {path} in store {self.uri}: {error}") from error

    def write(self, path: str, data: bytes) -> None:
        """See `Store.write`: temporary file, fsync, rename, fsync of the directory."""
        file = self._file(path)
        temporary: Path | None = None
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=file.parent)
            temporary = Path(name)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fchmod(stream.fileno(), 0o644)  # mkstemp's 0600 would lock other users out
                os.fsync(stream.fileno())
            temporary.replace(file)
            temporary = None
            _sync_directory(file.parent)
        except OSError as error:
            raise StoreError(
                f"cannot write {path} in store {self.uri}: {error}",
                fix="Check the directory's permissions and free space.",
            ) from error
        finally:
            if temporary is not None:
                temporary.unlink(missing_ok=True)

    def exists(self, path: str) -> bool:
        """See `Store.exists`."""
        return self._file(path).is_file()

    def list(self, prefix: str = "") -> list[str]:
        """See `Store.list`."""
        start = self._file(prefix) if prefix else self._root
        try:
            return sorted(
                file.relative_to(self._root).as_posix()
                for file in start.rglob("*")
                if file.is_file() and not file.name.startswith(_TEMPORARY)
            )
        except OSError as error:
            raise StoreError(f"cannot list store {self.uri}: {error}") from error

    def _file(self, path: str) -> Path:
        return self._root / checked_path(path, self.uri)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
