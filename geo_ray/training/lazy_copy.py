"""Copy of a tensor at one moment, made only for the parts that change before they are read.

A checkpoint takes its state at one moment and writes it over a long time. A complete copy would
double the memory, and training would wait for it. Instead, the writer reads the live tensor piece
by piece from the beginning, and the thread that is about to change the tensor copies the unread
pieces from the end. Both work at the same time until they meet.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

_PIECE: Final = 1 << 20  # elements that are read or copied at a time, with the tensor held


class LazyCopy:
    """See the module's docstring. It is read once, by one thread; any thread may `secure` it.

    Args:
        live: contiguous; `secure` is called before it changes.
        changes: whether it ever will.
    """

    def __init__(self, live: Tensor, *, changes: bool = True) -> None:
        self.shape = live.shape
        self.dtype = live.dtype
        self._lock = threading.Lock()
        self._changes = changes
        self._live = live.detach().reshape(-1)
        self._nothing = torch.empty(0, dtype=live.dtype)
        self._read = 0  # elements from the beginning
        # `_saved` has what follows `_saved_from` and begins at element `_base`: one tensor, whose
        # memory is allocated as it is filled and released as a whole.
        self._saved, self._base, self._saved_from = self._nothing, 0, live.numel()

    def numel(self) -> int:
        """Elements of the whole tensor."""
        return self.shape.numel()

    def element_size(self) -> int:
        """Bytes per element."""
        return self.dtype.itemsize

    def secure(self) -> None:
        """Copy what is unread, because the live tensor is about to change."""
        while self._changes:
            with self._lock:
                if self._read >= self._saved_from:
                    self._live = self._nothing
                    return
                if not self._saved.numel():
                    self._base = self._read
                    self._saved = torch.empty(self._saved_from - self._read, dtype=self.dtype)
                start, stop = max(self._read, self._saved_from - _PIECE), self._saved_from
                self._saved[start - self._base : stop - self._base] = self._live[start:stop]
                self._saved_from = start

    def pieces(self) -> Iterator[Tensor]:
        """The content in order, flat; a piece is valid until the next is asked for."""
        buffer = torch.empty(min(_PIECE, self.numel()), dtype=self.dtype)
        while True:
            with self._lock:
                start = self._read
                if start < self._saved_from:
                    self._read = min(start + _PIECE, self._saved_from)
                    piece = self._live[start : self._read]
                    piece = buffer[: piece.numel()].copy_(piece) if self._changes else piece
                elif start < self.numel():
                    self._read = min(start + _PIECE, self.numel())
                    piece = self._saved[start - self._base : self._read - self._base]
                else:
                    self._live = self._saved = self._nothing
                    return
            yield piece

    def whole(self) -> Tensor:
        """The content at once, of which nothing was read yet; a copy, if it ever changes."""
        self.secure()
        return (self._saved if self._changes else self._live).reshape(self.shape)


class Unread:
    """Lazy copies of one owner's tensors which may not be read yet; one thread at a time."""

    def __init__(self) -> None:
        self._copies: list[weakref.ref[LazyCopy]] = []  # in the order in which they are read

    def copy(
        self, changing: Mapping[str, Tensor], fixed: Mapping[str, Tensor] | None = None
    ) -> dict[str, LazyCopy]:
        """Return lazy copies by the same names; a released copy costs nothing more.

        Args:
            changing: tensors that the owner changes.
            fixed: tensors that never change.
        """
        found = {name: LazyCopy(live) for name, live in changing.items()}
        self._copies += [weakref.ref(found[name]) for name in sorted(found)]
        constant = {k: LazyCopy(v, changes=False) for k, v in (fixed or {}).items()}
        return found | constant

    def secure(self) -> None:
        """Prepare for a change of the owner's tensors."""
        while self._copies:  # the writer reads the last one last
            copy = self._copies.pop()()
            if copy is not None:
                copy.secure()
