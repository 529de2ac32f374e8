"""A tensor as it was at one moment, copied only where it changes before somebody has read it.

A checkpoint takes its state at one moment and writes it for long. A copy of everything would cost
as much memory again, and the time to fill it, in which the region stands still. So the writer reads
the live tensor piece by piece from its beginning, and whoever is about to change it copies what is
not read yet, piece by piece from the end: they work at the same time until they meet.
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
        # What follows `_saved_from` is in `_saved`, which begins at element `_base`: one tensor, of
        # which memory is only taken as it is filled, and which goes back to the system as a whole.
        self._saved, self._base, self._saved_from = self._nothing, 0, live.numel()

    def numel(self) -> int:
        """Elements of the whole tensor."""
        return self.shape.numel()

    def element_size(self) -> int:
        """Bytes of one."""
        return self.dtype.itemsize

    def secure(self) -> None:
        """The live tensor is about to change: keep what is not read yet."""
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
        self._copies: list[weakref.ref[LazyCopy]] = []  # as they will be read

    def copy(
        self, changing: Mapping[str, Tensor], fixed: Mapping[str, Tensor] | None = None
    ) -> dict[str, LazyCopy]:
        """Lazy copies by the same names; who lets go of one needs it no more.

        Args:
            changing: tensors of the owner.
            fixed: others, which nobody changes.
        """
        found = {name: LazyCopy(live) for name, live in changing.items()}
        self._copies += [weakref.ref(found[name]) for name in sorted(found)]
        constant = {k: LazyCopy(v, changes=False) for k, v in (fixed or {}).items()}
        return found | constant

    def secure(self) -> None:
        """The owner is about to change what its tensors hold."""
        while self._copies:  # the writer comes to the last one last
            copy = self._copies.pop()()
            if copy is not None:
                copy.secure()
