"""Checkpoints in a directory: temporary file, sync, rename, sync of the directory."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from geo_ray.checkpoint.manifest import MANIFEST_FILE
from geo_ray.errors import CheckpointCorruptError, RunDirectoryError
from geo_ray.util.atomic_file import (
    Failpoint,
    make_directory,
    no_failpoint,
    save_chunks,
    sync_directory,
    unwritable,
)
from geo_ray.util.passing import Passing

FOLDER_NAME = re.compile(r"^ckpt-([0-9]{8,18})$")


def folder_name(id: int) -> str:
    """The name of a checkpoint's folder, in directories and buckets."""
    return f"ckpt-{id:08d}"


def directory_of(root: Path, id: int) -> Path:
    """Return where the parts of checkpoint ``id`` lie below a directory of checkpoints."""
    return root / folder_name(id)


class LocalFolder:
    """See `Folder`.

    Args:
        path: the directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> None:
        """Make the directory, unless it is there.

        Raises:
            RunDirectoryError: it cannot be made.
        """
        try:
            make_directory(self.path, exist_ok=True)
        except OSError as error:
            raise unwritable(self.path, error) from error

    def name_of(self, file: str) -> str:
        """See `Folder.name_of`."""
        return str(self.path / file)

    def write(
        self,
        file: str,
        chunks: Iterable[memoryview | bytes],
        num_bytes: int,
        failpoint: Failpoint = no_failpoint,
    ) -> None:
        """See `Folder.write`."""
        save_chunks(self.path / file, chunks, failpoint)

    def open(self, file: str, num_bytes: int | None = None) -> io.RawIOBase:
        """See `Folder.open`."""
        path = self.path / file
        try:
            size = path.lstat().st_size
            if not path.is_file() or path.is_symlink():
                raise CheckpointCorruptError(f"{path}: it is no plain file")
            if num_bytes not in (None, size):
                raise CheckpointCorruptError(
                    f"{path}: {size} bytes long; the manifest says {num_bytes}"
                )
            return _Passed(path)
        except OSError as error:
            raise CheckpointCorruptError(f"{path}: cannot be read: {error.strerror}") from error

    def has(self, file: str) -> bool:
        """See `Folder.has`."""
        return (self.path / file).exists()

    def sizes(self) -> dict[str, int]:
        """See `Folder.sizes`."""
        try:
            return {file.name: file.lstat().st_size for file in self.path.iterdir()}
        except OSError as error:
            raise unwritable(self.path, error) from error

    def remove(self, files: Iterable[str]) -> None:
        """See `Folder.remove`."""
        try:
            for file in files:
                (self.path / file).unlink()
            sync_directory(self.path)
        except OSError as error:
            raise unwritable(self.path, error) from error

    def clear(self) -> None:
        """See `Folder.clear`; the directory goes, too."""
        try:
            if self.path.is_dir():
                shutil.rmtree(self.path)
        except OSError as error:
            raise unwritable(self.path, error) from error


class LocalRoot:
    """See `Root`.

    Args:
        path: the directory; made by the first claim.
    """

    far = False

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def folder(self, id: int) -> LocalFolder:
        """See `Root.folder`."""
        return LocalFolder(directory_of(self.path, id))

    def ids(self) -> dict[int, bool]:
        """See `Root.ids`."""
        try:
            names = [path.name for path in self.path.iterdir()] if self.path.is_dir() else []
        except OSError as error:
            raise RunDirectoryError(
                f"{self.path}: cannot be read: {error.strerror}",
                fix="Check the permissions of the directory.",
            ) from error
        found = [int(match[1]) for name in names if (match := FOLDER_NAME.match(name))]
        folders = {id: self.folder(id) for id in found}
        return {id: f.has(MANIFEST_FILE) for id, f in folders.items() if f.path.is_dir()}

    def claim(self, id: int) -> None:
        """See `Root.claim`."""
        path = self.folder(id).path
        try:
            make_directory(path)
        except OSError as error:
            raise unwritable(path, error) from error

    def owner(self, id: int) -> Literal["self", "other"] | None:
        """See `Root.owner`."""
        return "self" if self.folder(id).path.is_dir() else None

    def sweep(self, is_left: Callable[[int], bool]) -> None:
        """See `Root.sweep`: all that is half-written lies in a folder."""


class _Passed(io.FileIO):
    """A file whose pages are handed back to the system once they were read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "rb")
        self._passing = Passing(self.fileno())

    def readinto(self, buffer: Any) -> int:
        size = super().readinto(buffer) or 0
        self._passing.note(size)
        return size
