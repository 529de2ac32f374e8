"""Large files that are written or read once: what is done with is not kept in memory by the system.

It keeps every page that was written or read, in case somebody wants it again. For a checkpoint of
some gigabytes nobody does, and new pages cost more than the file: they push out others' data, and
where memory is lent by a host, as in most clouds, each has to be fetched from there first. Handing
them back as they are done with also starts the disk at once, so the sync at the end is short.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

_WINDOW_BYTES: Final = 1 << 25


class Passing:
    """One file, written or read from its beginning.

    Args:
        descriptor: of the file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._left_bytes = _WINDOW_BYTES

    def note(self, num_bytes: int) -> None:
        """So many bytes more are done with; a small file never gets to hand anything back."""
        self._left_bytes -= num_bytes
        if self._left_bytes <= 0:
            self._left_bytes = _WINDOW_BYTES
            with suppress(OSError, AttributeError):  # a system or file system without such advice
                # All of it: pages that were not on the disk yet the last time are by now.
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
