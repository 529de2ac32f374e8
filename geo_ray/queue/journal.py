"""The journal of a queue in its store: pieces that are only ever added to.

    journal-000001.z, journal-000002.z, ...

A piece is written on condition that it is what was read, so who was overtaken writes nothing; a new
holder of the lease writes an entry first, and so ends what the one before could still do. Readers
need no lease: they see whole entries, some of them later than others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from geo_ray.errors import LeaseLostError, RunDirectoryError
from geo_ray.lease.store import ConditionalStore
from geo_ray.queue.entries import ENTRIES, AnyEntry
from geo_ray.queue.packed import MOST_PACKED_BYTES, pack, unpack

_FULL_BYTES: Final = 40_000  # of a piece, packed


def piece_key(number: int) -> str:
    """Return the key of a piece."""
    return f"journal-{number:06d}.z"


class QueueJournal:
    """See the module.

    Args:
        store: where it lies.
    """

    def __init__(self, store: ConditionalStore) -> None:
        self._store = store
        self._number = 1
        self._tag: str | None = None
        self._newest: list[AnyEntry] = []

    def read(self) -> list[AnyEntry]:
        """Return the entries that are new since the last call.

        Raises:
            QueueJournalError: they cannot be understood.
            RunDirectoryError: they cannot be read.
        """
        found: list[AnyEntry] = []
        while True:
            stored = self._store.read(piece_key(self._number))
            if stored is None:
                return found
            if stored.tag != self._tag:
                entries = self._unpacked(stored.data)
                found += entries[len(self._newest) :]
                self._newest, self._tag = entries, stored.tag
            if self._store.read(piece_key(self._number + 1)) is None:
                return found
            self._next()

    def add(self, entries: Sequence[AnyEntry]) -> None:
        """Write entries, all of them or none.

        Raises:
            LeaseLostError: somebody else has written since.
            RunDirectoryError: it cannot be written; the next write finds out what came of it.
        """
        if not entries:
            return
        data = pack(ENTRIES, [*self._newest, *entries])
        if len(data) > _FULL_BYTES and self._newest:
            alone = pack(ENTRIES, list(entries))
            self._write(piece_key(self._number + 1), alone, None)
            self._next()
            self._newest, self._tag = list(entries), self._written
            return
        self._write(piece_key(self._number), data, self._tag)
        self._newest, self._tag = [*self._newest, *entries], self._written

    def _write(self, key: str, data: bytes, expected: str | None) -> None:
        if len(data) > MOST_PACKED_BYTES:
            raise RunDirectoryError(
                f"what is to be written of the queue at once has {len(data)} bytes",
                fix="Submit fewer jobs at once, with smaller configurations.",
            )
        tag = self._store.write(key, data, expected)
        if tag is None:
            found = self._store.read(key)
            if found is None or found.data != data:
                raise LeaseLostError(
                    "another process has written the journal of this queue; this one decides and "
                    "does nothing any more"
                )
            tag = found.tag  # the answer to this very write got lost
        self._written = tag

    def _next(self) -> None:
        self._number += 1
        self._tag, self._newest = None, []

    def _unpacked(self, data: bytes) -> list[AnyEntry]:
        return unpack(ENTRIES, data, piece_key(self._number))
