"""Memory that was freed goes back to the system, which the C library does not do by itself.

A module's parameters of some megabytes each lie in its heap; once the first few are freed, it keeps
the heap for the next ones. A process that makes a large model once would keep its size for good.
"""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress


def give_back_memory() -> None:
    """Do it now; nothing where the C library cannot (it is glibc that can)."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
