"""Tensors and the bytes they are made of: what all codecs share.

Shape legend: P = elements of the vector; B = bytes; N = elements of a part.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from geo_ray.sync.codecs.base import wrong

PIECE = 1 << 16
"""Elements worked on at a time on a CPU: a few of such fp32 scratch rows fit a core's cache."""

MAX_ELEMENTS = (1 << 31) - 1
"""The longest vector; positions are sent as 32 bits."""


def plain(x_P: Tensor) -> Tensor:
    """The vector as contiguous fp32 without history, on its device; a view wherever possible."""
    x_P = x_P.detach().reshape(-1).to(torch.float32).contiguous()
    if x_P.numel() > MAX_ELEMENTS:
        raise ValueError(f"a codec takes at most {MAX_ELEMENTS} elements, not {x_P.numel()}")
    return x_P


def room(num: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """An uninitialised tensor (num,) on the CPU.

    NumPy asks the kernel for huge pages, PyTorch does not; first writes to large new memory are
    several times faster on them.
    """
    size = num * dtype.itemsize
    if size < 1 << 22:
        return torch.empty(num, dtype=dtype)
    return torch.from_numpy(np.empty(size, np.uint8)).view(dtype)


def zeros(num: int) -> Tensor:
    """A fp32 zero vector (num,) on the CPU; pages that are never written are never touched."""
    return torch.from_numpy(np.zeros(num, np.float32))


def as_bytes(x_N: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, as a view."""
    return x_N.reshape(-1).view(torch.uint8)


def pieces(num: int, device: torch.device, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Cut ``range(num)`` into runs that fit the cache; one run on an accelerator.

    Args:
        num: how many elements.
        device: where they are.
        multiple: every run but the last is as long as a multiple of this.
    """
    step = max(PIECE // multiple, 1) * multiple if device.type == "cpu" else max(num, 1)
    for start in range(0, num, step):
        yield start, min(start + step, num)


def check_num(kind: str, num: int) -> int:
    """The element count of a received vector.

    Raises:
        FrameError: no vector can have it.
    """
    if not 0 <= num <= MAX_ELEMENTS:
        raise wrong(kind, f"{num} elements")
    return num


class Reader:
    """Reads the parts of received bytes one after the other; never beyond their end.

    Args:
        kind: the codec, for messages.
        data_B: uint8 on the CPU.
    """

    def __init__(self, kind: str, data_B: Tensor) -> None:
        if data_B.dtype != torch.uint8 or data_B.dim() != 1 or data_B.device.type != "cpu":
            raise wrong(kind, "not a row of bytes")
        self._kind = kind
        self._data_B = data_B.contiguous()
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes that are not read yet."""
        return self._data_B.numel() - self._at

    def take(self, num: int, dtype: torch.dtype) -> Tensor:
        """The next ``num`` elements of a type: a view, or a copy if they lie badly in memory.

        Raises:
            FrameError: there are fewer bytes than that.
        """
        size = num * dtype.itemsize
        if not 0 <= size <= self.left:
            raise wrong(self._kind, f"{size} bytes are missing, {self.left} are left")
        part_B = self._data_B[self._at : self._at + size]
        self._at += size
        if part_B.data_ptr() % dtype.itemsize or part_B.storage_offset() % dtype.itemsize:
            part_B = part_B.clone()
        return part_B.view(dtype)

    def ints(self, num: int) -> list[int]:
        """The next ``num`` signed 32-bit integers.

        Raises:
            FrameError: there are fewer bytes than that.
        """
        return [int(value) for value in self.take(num, torch.int32).tolist()]

    def done(self) -> None:
        """Say that nothing more is expected.

        Raises:
            FrameError: bytes are left.
        """
        if self.left:
            raise wrong(self._kind, f"{self.left} bytes too many")
