"""A tensor as it was at one moment, copied only where it changes before somebody has read it.

A checkpoint takes its state at one moment and writes it for long. A copy of everything would cost
as much memory again, and the time to fill it, in which the region stands still. So the writer reads
the live tensor piece by piece, and whoever is about to change it copies what is not read yet.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

_PIECE: Final = 1 << 20  # elements that are read at a time, with the tensor held


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
        self._rest = live.detach().reshape(-1)  # what is not read yet
        self._is_live = changes

    def numel(self) -> int:
        """Elements of the whole tensor."""
        return self.shape.numel()

    def element_size(self) -> int:
        """Bytes of one."""
        return self.dtype.itemsize

    def secure(self) -> None:
        """The live tensor is about to change: keep what is not read yet."""
        with self._lock:
            if self._is_live:
                self._rest, self._is_live = self._rest.clone(), False

    def pieces(self) -> Iterator[Tensor]:
        """The content in order, flat; a piece is valid until the next is asked for."""
        room = torch.empty(min(_PIECE, self._rest.numel()), dtype=self.dtype)
        while True:
            with self._lock:
                piece, self._rest = self._rest[:_PIECE], self._rest[_PIECE:]
                if self._is_live:
                    piece = room[: piece.numel()].copy_(piece)
            if not piece.numel():
                return
            yield piece

    def whole(self) -> Tensor:
        """A copy of the content, of which nothing was read yet."""
        self.secure()
        return self._rest.reshape(self.shape)


class Unread:
    """Lazy copies of one owner's tensors which may not be read yet; one thread at a time."""

    def __init__(self) -> None:
        self._copies: weakref.WeakSet[LazyCopy] = weakref.WeakSet()

    def copy(
        self, changing: Mapping[str, Tensor], fixed: Mapping[str, Tensor] | None = None
    ) -> dict[str, LazyCopy]:
        """Lazy copies by the same names; who lets go of one needs it no more.

        Args:
            changing: tensors of the owner.
            fixed: others, which nobody changes.
        """
        found = {name: LazyCopy(live) for name, live in changing.items()}
        self._copies.update(found.values())
        constant = {k: LazyCopy(v, changes=False) for k, v in (fixed or {}).items()}
        return found | constant

    def secure(self) -> None:
        """The owner is about to change what its tensors hold."""
        for copy in list(self._copies):
            copy.secure()
        self._copies.clear()
