"""Where the files of checkpoints lie: what a directory and a bucket have in common."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Literal, Protocol

from geo_ray.util.atomic_file import Failpoint, no_failpoint


class PartSource(Protocol):
    """Where parts are read."""

    def name_of(self, file: str) -> str:
        """Address of a file, for messages."""

    def open(self, file: str, num_bytes: int | None = None) -> io.RawIOBase:
        """A file for one reading from its beginning, unbuffered.

        Args:
            file: its name.
            num_bytes: that it must have; None: any number.

        Raises:
            CheckpointCorruptError: it is not there, cannot be read, or has another size.
        """


class PartTarget(Protocol):
    """Where parts are written."""

    def name_of(self, file: str) -> str:
        """Address of a file, for messages."""

    def has(self, file: str) -> bool:
        """Whether a file is there."""

    def write(
        self,
        file: str,
        chunks: Iterable[memoryview | bytes],
        num_bytes: int,
        failpoint: Failpoint = no_failpoint,
    ) -> None:
        """Write a file; when this returns, it outlives the machine.

        Args:
            file: its name.
            chunks: the content; each is valid until the next is asked for.
            num_bytes: of the whole.
            failpoint: for tests.

        Raises:
            CheckpointConflictError: a bucket has the file already; a directory replaces it.
        """


class Folder(PartSource, PartTarget, Protocol):
    """The files of one checkpoint. Each is there whole or not at all.

    What cannot be written or removed is a `RunDirectoryError` in a directory, a `StoreError` in a
    bucket.
    """

    def sizes(self) -> dict[str, int]:
        """Bytes of all files."""

    def remove(self, files: Iterable[str]) -> None:
        """Remove files that are there."""

    def clear(self) -> None:
        """Remove whatever there is, half-written files included."""


class Root(Protocol):
    """The place below which the folders of one run's checkpoints lie.

    Attributes:
        far: whether each look is a request that takes its time and may cost money. There a save is
            compared by sizes when it is committed: the server has checked what it was sent.
    """

    far: bool

    def __str__(self) -> str:
        """Its address, for messages."""

    def folder(self, id: int) -> Folder:
        """The folder of one checkpoint, which need not be there."""

    def ids(self) -> dict[int, bool]:
        """All checkpoints of which there is something, and whether their manifest is there."""

    def claim(self, id: int) -> None:
        """Begin a save, which is this one's from now on.

        Raises:
            CheckpointConflictError: another writer has begun it.
        """

    def owner(self, id: int) -> Literal["self", "other"] | None:
        """Whose save it is; None if it was not begun. A directory cannot tell one from another."""

    def sweep(self, is_left: Callable[[int], bool]) -> None:
        """Remove what is in no folder: half-written files of checkpoints that are left."""
