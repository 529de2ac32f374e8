"""Copy of a tensor at one moment, made only for the parts that change before they are read.

A checkpoint takes its state at one moment and writes it over a long time. A complete copy would
double the memory, and training would wait for it. Instead, the writer reads the live tensor piece
by piece from the beginning, and the thread that is about to change the tensor copies the unread
pieces from the end. Both work at the same time until they meet.

A `StoredTensor` is the other case: a copy that is read seldom, and is in a temporary file.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

from geo_ray.base.errors import InvariantError, RunDirectoryError

_PIECE: Final = 1 << 20  # elements that are read or copied at a time, with the tensor held


class LazyCopy:
    """See the module's docstring. It is read once, by one thread; any thread may `secure` it.

    A copy or pickle of it has the content, which never changes.

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

    def __reduce__(self) -> tuple[object, ...]:
        if self._read:
            raise InvariantError("a part of a lazy copy was read already, and may be gone")
        return _unchanging, (self.whole(),)


def _unchanging(content: Tensor) -> LazyCopy:
    return LazyCopy(content, changes=False)


class StoredTensor:
    """A copy of a tensor in a temporary file, which several threads may read at a time.

    Args:
        value: tensor on the CPU.

    Raises:
        RunDirectoryError: it cannot be written.
    """

    def __init__(self, value: Tensor) -> None:
        self.shape, self.dtype = value.shape, value.dtype
        # Open as long as this object lives.
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        rest = memoryview(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        try:
            while rest.nbytes:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.close()
            raise RunDirectoryError(
                f"a state of an optimizer cannot be written to {tempfile.gettempdir()}: "
                f"{error.strerror}",
                fix="Make room there, or set TMPDIR to another directory on the nodes.",
            ) from error

    def numel(self) -> int:
        """Elements of the tensor."""
        return self.shape.numel()

    def element_size(self) -> int:
        """Bytes per element."""
        return self.dtype.itemsize

    def pieces(self) -> Iterator[Tensor]:
        """Yield the flat content in order; a piece is valid until the next is requested."""
        buffer = torch.empty(min(_PIECE, self.numel()), dtype=self.dtype)
        for start in range(0, self.numel(), _PIECE):
            piece = buffer[: min(_PIECE, self.numel() - start)]
            self._read(start, piece)
            yield piece

    def whole(self) -> Tensor:
        """Return the content at once."""
        found = torch.empty(self.numel(), dtype=self.dtype)
        for start in range(0, self.numel(), _PIECE):
            self._read(start, found[start : start + _PIECE])
        return found.reshape(self.shape)

    def _read(self, start: int, into: Tensor) -> None:
        rest, at = memoryview(into.view(torch.uint8).numpy().data), start * self.element_size()
        while rest.nbytes:
            count = os.preadv(self._file.fileno(), [rest], at)
            if not count:
                raise RunDirectoryError(f"{tempfile.gettempdir()}: a temporary file was cut off")
            rest, at = rest[count:], at + count


Copied = LazyCopy | StoredTensor
"""What a writer of a checkpoint reads in pieces."""


class Unread:
    """Lazy copies of one owner's tensors which may not be read yet; one thread at a time.

    A copy or pickle of it is empty: copies of a `LazyCopy` do not need their owner.
    """

    def __init__(self) -> None:
        self._copies: list[weakref.ref[LazyCopy]] = []  # in the order in which they are read

    def __reduce__(self) -> tuple[object, ...]:
        return Unread, ()

    def copy(
        self,
        changing: Mapping[str, Tensor],
        fixed: Mapping[str, Tensor | StoredTensor] | None = None,
    ) -> dict[str, Copied]:
        """Return lazy copies by the same names; a released copy costs nothing more.

        Args:
            changing: tensors that the owner changes.
            fixed: tensors that never change.
        """
        found = {name: LazyCopy(live) for name, live in changing.items()}
        self._copies += [weakref.ref(found[name]) for name in sorted(found)]
        constant = {
            name: value if isinstance(value, StoredTensor) else LazyCopy(value, changes=False)
            for name, value in (fixed or {}).items()
        }
        return {**found, **constant}

    def secure(self) -> None:
        """Prepare for a change of the owner's tensors."""
        while self._copies:  # the writer reads the last one last
            copy = self._copies.pop()()
            if copy is not None:
                copy.secure()
