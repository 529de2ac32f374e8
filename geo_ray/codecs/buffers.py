"""Conversion between tensors and payload bytes, used by all codecs.

Numbers have the byte order of the machine; every machine that runs PyTorch here is
little-endian.

Half-precision values share one power-of-two scale, so that none overflows. Plain fp16 turns
values above 65504 into infinity and values below 6e-8 into zero; gradients contain both. The
scale brings the largest magnitude to between 2^14 and 2^15, which itself loses nothing: values
down to 2^-29 of the largest keep all 11 significant bits.

Shape legend: P = elements of the vector; B = bytes; N = elements of a part; H = header numbers;
K = elements of a piece.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from geo_ray.codecs.base import wrong

PIECE = 1 << 16
"""Elements worked on at a time on a CPU: a few fp32 rows of this length fit a core's cache."""

PIECE_ELSEWHERE = 1 << 24
"""Elements of a piece on an accelerator, which bound the temporary memory."""

MAX_ELEMENTS = (1 << 31) - 1
"""The longest vector; positions are 32 bits at most."""

_HUGE_BYTES = 1 << 22
_ALIGNMENT_BYTES = 64


def as_fp32(x_P: Tensor) -> Tensor:
    """Return the vector as contiguous fp32 without autograd history, a view if possible."""
    if not x_P.numel():
        return torch.empty(0, device=x_P.device)  # an empty view may have any stride
    x_P = x_P.detach().reshape(-1).to(torch.float32).contiguous()
    if x_P.numel() > MAX_ELEMENTS:
        raise ValueError(f"a codec takes at most {MAX_ELEMENTS} elements, not {x_P.numel()}")
    return x_P


def aligned(x: Tensor) -> Tensor:
    """Return the tensor, or a copy if it does not begin at a multiple of 64 bytes.

    The order of additions in a matrix product depends on the alignment, and with it the last bits.
    Processes that must agree to the bit need the same alignment.
    """
    return x if x.data_ptr() % _ALIGNMENT_BYTES == 0 else x.clone()


def empty_cpu(num: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return an uninitialised tensor (num,) on the CPU.

    NumPy asks the kernel for huge pages, PyTorch does not; the first writes to large new memory
    are faster on them.
    """
    size = num * dtype.itemsize
    if size < _HUGE_BYTES:
        return torch.empty(num, dtype=dtype)
    return torch.from_numpy(np.empty(size, np.uint8)).view(dtype)


def zeros(num: int) -> Tensor:
    """Return a fp32 zero vector (num,) on the CPU; unwritten pages stay untouched."""
    return torch.from_numpy(np.zeros(num, np.float32))


def header(*values: int) -> Tensor:
    """Return numbers as int64 (H,), the start of most codecs' bytes."""
    return torch.tensor(values, dtype=torch.int64)


def joined(*parts: Tensor) -> Tensor:
    """Return the bytes of contiguous tensors of any device, concatenated as uint8 on the CPU."""
    return torch.cat([part.reshape(-1).view(torch.uint8).cpu() for part in parts])


def piece_of(device: torch.device) -> int:
    """Return the number of elements to process at a time on this device."""
    return PIECE if device.type == "cpu" else PIECE_ELSEWHERE


def split(x: Tensor, step: int) -> list[Tensor]:
    """Split a row into pieces of ``step`` entries, the last one shorter; views."""
    return list(torch.split(x, step)) if x.numel() else []


def check_num(kind: str, num: int) -> int:
    """Return the element count of a received vector, if it is valid.

    The caller must compare it with the model's before decoding, because a sparse codec allocates
    as much as this says.

    Raises:
        FrameError: it is invalid.
    """
    if not 0 <= num <= MAX_ELEMENTS:
        raise wrong(kind, f"{num} elements")
    return num


class Reader:
    """Reads the parts of received bytes in order; never beyond their end.

    Args:
        kind: the codec, for messages.
        data_B: uint8 on the CPU.

    Raises:
        FrameError: the tensor has another type.
    """

    def __init__(self, kind: str, data_B: Tensor) -> None:
        if data_B.dtype != torch.uint8 or data_B.dim() != 1 or data_B.device.type != "cpu":
            raise wrong(kind, "not a row of bytes")
        self._kind = kind
        self._data_B = data_B.contiguous()
        self._at = 0

    @property
    def left(self) -> int:
        """Return the number of unread bytes."""
        return self._data_B.numel() - self._at

    def take(self, num: int, dtype: torch.dtype) -> Tensor:
        """Return the next ``num`` elements of a type: a view, or a copy if they are misaligned.

        Raises:
            FrameError: there are fewer bytes than that.
        """
        size = num * dtype.itemsize
        if not 0 <= size <= self.left:
            raise wrong(self._kind, f"a part has {size} bytes, {self.left} are left")
        if not num:
            return torch.empty(0, dtype=dtype)
        part_B = self._data_B[self._at : self._at + size]
        self._at += size
        if part_B.data_ptr() % dtype.itemsize or part_B.storage_offset() % dtype.itemsize:
            part_B = part_B.clone()
        return part_B.view(dtype)

    def header(self, num: int) -> list[int]:
        """Return the next ``num`` numbers that `header` wrote.

        Raises:
            FrameError: there are fewer bytes than that.
        """
        return [int(value) for value in self.take(num, torch.int64).tolist()]

    def done(self) -> None:
        """Check that all bytes were read.

        Raises:
            FrameError: bytes are left.
        """
        if self.left:
            raise wrong(self._kind, f"{self.left} bytes too many")


_TOP = 15  # the largest magnitude becomes less than 2^_TOP; fp16 ends just below 2^16
_MAX = torch.finfo(torch.float32).max
_EXPONENTS = range(_TOP - 128, 127)  # 2^e and 2^-e are normal fp32 numbers, as is their use


def largest(x_N: Tensor) -> float:
    """Return the largest magnitude; 0 for an empty vector."""
    if not x_N.numel():
        return 0.0
    low, high = torch.aminmax(x_N)
    return max(-float(low), float(high))


def halve(x_N: Tensor, half_N: Tensor) -> int:
    """Scale and round to nearest.

    Args:
        x_N: contiguous fp32, any device.
        half_N: fp16 on the CPU; written.

    Returns:
        The exponent e of the scale 2^e.
    """
    exponent = exponent_of(largest(x_N))
    step = piece_of(x_N.device)
    for x_K, half_K in zip(split(x_N, step), split(half_N, step), strict=True):
        half_K.copy_((x_K * 2.0**exponent).to(torch.float16))
    return exponent


def widen(kind: str, half_N: Tensor, exponent: int, out_N: Tensor) -> Tensor:
    """Undo `halve`, into fp32 ``out_N`` on the CPU.

    Raises:
        FrameError: no encoder uses this exponent.
    """
    if exponent not in _EXPONENTS:
        raise wrong(kind, f"a scale of 2^{exponent}")
    for half_K, out_K in zip(split(half_N, PIECE), split(out_N, PIECE), strict=True):
        out_K.copy_(half_K).mul_(2.0**-exponent)
    if exponent == _EXPONENTS[0]:  # the largest fp32 numbers would round up to infinity
        out_N.clamp_(-_MAX, _MAX)
    return out_N


def exponent_of(magnitude: float) -> int:
    """Return the scale's exponent for this largest magnitude; 0 if nothing can be scaled."""
    if magnitude == 0.0 or not math.isfinite(magnitude):
        return 0
    return min(_TOP - math.frexp(magnitude)[1], _EXPONENTS[-1])
