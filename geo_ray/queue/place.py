"""Where a queue is written down: a folder of its own in a directory or a bucket."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from geo_ray.errors import QueueMissingError, StoreError
from geo_ray.lease.place import StorePlace
from geo_ray.lease.store import ConditionalStore
from geo_ray.queue.config import QueueConfig
from geo_ray.queue.journal import QueueJournal, is_there
from geo_ray.queue.state import QueueState, state_of
from geo_ray.stores.uri import is_s3, join, local_path
from geo_ray.util.atomic_file import make_directory, unwritable


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """A queue's folder.

    Attributes:
        uri: its directory, or its ``s3://`` address.
    """

    uri: str

    @classmethod
    def of(cls, config: QueueConfig) -> QueuePlace:
        """Return where a queue of a configuration lies."""
        if is_s3(config.state):
            return cls(join(config.state, config.name))
        return cls(str(local_path(config.state) / config.name))

    @classmethod
    def at(cls, uri: str | os.PathLike[str]) -> QueuePlace:
        """Return the place that somebody names."""
        name = os.fspath(uri)
        return cls(name if is_s3(name) else str(local_path(name)))

    @property
    def is_far(self) -> bool:
        """Whether it lies in a bucket."""
        return StorePlace(self.uri).is_far

    @property
    def shown(self) -> str:
        """How people would type it."""
        return StorePlace(self.uri).shown

    def store(self) -> ConditionalStore:
        """Return where journal, boxes and the lease lie.

        Raises:
            QueueMissingError: the address is none.
        """
        try:
            return StorePlace(self.uri).store()
        except StoreError as error:
            raise QueueMissingError(error.message, fix=error.fix) from error

    def make(self) -> None:
        """Make the folder, if it is a directory.

        Raises:
            RunDirectoryError: it cannot be written.
        """
        if not self.is_far:
            try:
                make_directory(Path(self.uri), exist_ok=True)
            except OSError as error:
                raise unwritable(Path(self.uri), error) from error

    def is_there(self) -> bool:
        """Whether a queue was ever served here."""
        return is_there(self.store())

    def read(self) -> QueueState:
        """Return how the queue stands, as far as it is written down.

        Raises:
            QueueMissingError: there is none.
            QueueJournalError: it cannot be understood.
        """
        entries = QueueJournal(self.store()).read()
        if not entries:
            raise QueueMissingError(f"there is no queue in {self.shown}")
        return state_of(entries)
