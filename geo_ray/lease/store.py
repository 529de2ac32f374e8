"""Where a lease lies: values that are written only if they are still what the writer has seen."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A value as it was read.

    Attributes:
        data: its bytes.
        tag: changes with every write, as an object store's ETag does.
        age_s: how long ago it was written, as far as that can be told; for people.
    """

    data: bytes
    tag: str
    age_s: float | None = field(default=None, compare=False)


class ConditionalStore(Protocol):
    """A few small values by key.

    A directory does it with a lock, an object store with ``If-None-Match: *`` and ``If-Match``.
    """

    def read(self, key: str) -> StoredValue | None:
        """Give a value; None if there is none.

        Raises:
            RunDirectoryError: it cannot be read.
        """

    def write(self, key: str, data: bytes, expected: str | None) -> str | None:
        """Write a value if nobody has since it was read.

        Args:
            key: of the value.
            data: its bytes, different from those of every write before.
            expected: the tag that it had; None: there was none.

        Returns:
            Its tag now; None if it was not written, as it had changed.

        Raises:
            RunDirectoryError: it cannot be written; or it was, and the answer got lost.
        """

    def remove(self, key: str) -> None:
        """Remove a value that nobody needs; does nothing if there is none.

        A late writer that has seen it may write it once more: readers must not rely on its absence.

        Raises:
            RunDirectoryError: it cannot be removed.
        """

    def unchanged(self, key: str, tag: str) -> AbstractContextManager[bool]:
        """Look whether a value still has a tag, and let nobody write it while the block runs.

        A store that cannot hold writers off, such as an object store, only looks. What is written
        in the block must then be refused by itself if it is late: one value that names what counts,
        and who said so, is replaced with ``If-Match``, and every new holder first replaces it.

        Raises:
            RunDirectoryError: it cannot be read, or not be held.
        """
