"""Reuse of large buffers, and return of freed memory to the operating system.

The C library returns a large buffer to the system as soon as it is freed, and the kernel clears
the pages of the next one first, which takes longer than filling them. `ReusedMemory` keeps one
buffer and hands it out again once no view of it is left.

Small parameters of a module are in the heap, which does not shrink after they are freed.
`give_back_memory` trims the heap after a large model was created once, and `trim_heap` after an
exchange in pieces.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


_SMALLEST_BYTES: Final = (
    1024**2
)  # smaller buffers come from the C library's heap, whose pages are mapped already
_LINE_BYTES: Final = 64


class ReusedMemory:
    """Allocates buffers, and caches the last freed one; thread-safe.

    A buffer is free when all views of it are gone, including tensors, arrays and parts of it. Its
    content is undefined.
    """

    def __init__(self) -> None:
        self._free: deque[np.ndarray[tuple[int], np.dtype[np.uint8]]] = deque(maxlen=1)

    def buffer(self, size_bytes: int) -> memoryview:
        """Return a writable buffer of that size, aligned to a cache line if it is large."""
        if size_bytes < _SMALLEST_BYTES:
            return np.empty(size_bytes, np.uint8).data
        try:
            base = self._free.pop()
        except IndexError:
            base = np.empty(0, np.uint8)
        needed = size_bytes + _LINE_BYTES
        if not needed <= base.nbytes <= 2 * needed:
            base = np.empty(needed, np.uint8)
        start = -base.ctypes.data % _LINE_BYTES
        view = base[start : start + size_bytes]
        # Only holders of the memoryview, or of a part of it, reference `view`.
        weakref.finalize(view, self._free.append, base).atexit = False
        return view.data

    def tensor(self, count: int) -> Tensor:
        """Return a tensor, fp32 (count,)."""
        import torch  # slow to import, and not needed by processes that only forward bytes

        if 4 * count < _SMALLEST_BYTES:
            return torch.empty(count)
        return torch.frombuffer(self.buffer(4 * count), dtype=torch.float32)


def give_back_memory() -> None:
    """Free unreachable objects, and trim the heap."""
    gc.collect()
    trim_heap()


def trim_heap() -> None:
    """Return freed memory of the heaps of all threads; does nothing without glibc."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
