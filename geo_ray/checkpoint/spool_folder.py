"""Parts that are only passed on: in files without a name, gone with their process."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterable
from typing import IO

from geo_ray.errors import CheckpointCorruptError, RunDirectoryError
from geo_ray.util.atomic_file import Failpoint, no_failpoint


class SpoolFolder:
    """See `PartTarget`; what was written is read by pieces, from any thread."""

    def __init__(self) -> None:
        self._files: dict[str, IO[bytes]] = {}
        self._lock = threading.Lock()

    def name_of(self, file: str) -> str:
        """See `PartSource.name_of`."""
        return f"{file} (in {tempfile.gettempdir()})"

    def has(self, file: str) -> bool:
        """See `PartTarget.has`."""
        return file in self._files

    def write(
        self,
        file: str,
        chunks: Iterable[memoryview | bytes],
        num_bytes: int,
        failpoint: Failpoint = no_failpoint,
    ) -> None:
        """See `PartTarget.write`."""
        spool = tempfile.TemporaryFile()  # noqa: SIM115 - open until the folder is cleared
        try:
            for chunk in chunks:
                spool.write(chunk)
            spool.flush()
        except OSError as error:
            spool.close()
            raise RunDirectoryError(
                f"{self.name_of(file)}: cannot be written: {error.strerror}"
            ) from error
        with self._lock:
            self._files[file] = spool

    def piece(self, file: str, offset: int, num_bytes: int) -> bytes:
        """Bytes of a file from ``offset`` on; fewer than asked for only at its end.

        Raises:
            CheckpointCorruptError: the file is not there any more, or cannot be read.
        """
        with self._lock:
            spool = self._files.get(file)
            if spool is None:
                raise CheckpointCorruptError(f"{self.name_of(file)}: it is not there any more")
            try:
                spool.seek(offset)
                return spool.read(num_bytes)
            except OSError as error:
                raise CheckpointCorruptError(
                    f"{self.name_of(file)}: cannot be read: {error.strerror}"
                ) from error

    def clear(self) -> None:
        """Remove all."""
        with self._lock:
            for spool in self._files.values():
                spool.close()
            self._files.clear()
