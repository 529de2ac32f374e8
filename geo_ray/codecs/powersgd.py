"""PowerSGD: matrices as the product of two thin ones, found by one step of power iteration.

Rule, for a matrix M (n, m) and Q (m, r) of the previous call:

    P <- orthonormalise(M Q);  Q <- M^T P;  the receiver has P Q^T

P and Q both go to the receiver; there is no sum over regions in between, as the original has with
its two reductions. The columns of Q, divided by their lengths, are the start of the next call: with
every call they turn towards M's strongest directions, and error feedback sends the others later.

Which matrices: by ``shapes``, those of the model's tensors in the order of the vector, tensors of
more than two dimensions as (first, product of the others). Without them the whole vector is one
nearly square matrix, in which low rank means little; set the shapes if you know them. Elements
outside matrices, and of matrices too small to gain, are sent as fp32.

Layout: i64 number of parts, i64 exponent of the scale (0 unless values are extreme); three i64 per
part: rows, columns, rank (0: fp32 unchanged); then the fp32 numbers of every part: P and Q, row by
row. Ratio n m / (r (n + m)).

When: large matrices and slow links, always with error feedback.

Source: PowerSGD (Vogels et al., 2019), reconstructed; the rule for parts that stay fp32 is
hivemind's.

Shape legend: P = elements of the vector; n, m = rows and columns of a matrix; R = rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from geo_ray.base.model import StrictModel
from geo_ray.codecs.base import FP32_BITS, CodecTraits, Coded, wrong
from geo_ray.codecs.buffers import (
    Reader,
    aligned,
    as_fp32,
    check_num,
    exponent_of,
    header,
    joined,
    largest,
)

_WORTH = 2  # a part that does not become this much smaller is sent unchanged
_WIDTHS_TRIED = 64


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """A run of a vector.

    Attributes:
        rows: n.
        columns: m; the run has n * m elements.
        rank: columns of the thin matrices; 0 if the elements are sent as fp32.
    """

    rows: int
    columns: int
    rank: int

    @property
    def num(self) -> int:
        """Elements of the run."""
        return self.rows * self.columns

    @property
    def sent(self) -> int:
        """Numbers that are sent for the part."""
        return self.rank * (self.rows + self.columns) or self.num

    def possible(self, max_rank: int) -> bool:
        """Whether the part is valid."""
        most = min(self.rows, self.columns, max_rank)
        return self.rows >= 0 and self.columns >= 0 and 0 <= self.rank <= max(most, 0)


def parts_of(num: int, shapes: Sequence[Sequence[int]], rank: int) -> list[MatrixPart]:
    """Split a vector of ``num`` elements into matrices.

    Args:
        num: elements of the vector.
        shapes: shapes of its tensors in order; none for one nearly square matrix and a short rest.
        rank: rank of every matrix.

    Raises:
        ValueError: the tensors have another number of elements.
    """
    if not shapes:
        rows = _rows(num)
        return _merged([_part(rows, num // rows, rank), MatrixPart(1, num % rows, 0)])
    parts = [
        _part(shape[0], math.prod(shape[1:]), rank)
        if len(shape) > 1
        else MatrixPart(1, math.prod(shape), 0)
        for shape in shapes
    ]
    found = sum(part.num for part in parts)
    if found != num:
        raise ValueError(f"`shapes` has {found} elements, the vector {num}")
    return _merged(parts)


def _part(rows: int, columns: int, rank: int) -> MatrixPart:
    gains = rank * (rows + columns) * _WORTH <= rows * columns and rank <= min(rows, columns)
    return MatrixPart(rows, columns, rank) if gains else MatrixPart(1, rows * columns, 0)


def _rows(num: int) -> int:
    """Return a number near the square root that leaves a short rest."""
    root = max(math.isqrt(num), 1)
    return min(range(root, max(root - _WIDTHS_TRIED, root // 2, 0), -1), key=lambda n: num % n)


def _merged(parts: list[MatrixPart]) -> list[MatrixPart]:
    """Merge neighbouring fp32 parts; drop empty ones."""
    merged: list[MatrixPart] = []
    for part in parts:
        if not part.num:
            continue
        if merged and not part.rank and not merged[-1].rank:
            part = MatrixPart(1, merged.pop().num + part.num, 0)
        merged.append(part)
    return merged


_MAX_RANK = 64
_USUAL = 10**6  # elements of a model whose size is not known
_SAFE = 2.0**40  # products of numbers up to here, and down to its inverse, stay normal in fp32


class PowerSgd(StrictModel):
    """Configuration and rule of `powersgd`."""

    kind: Literal["powersgd"] = "powersgd"
    rank: int = Field(4, ge=1, le=_MAX_RANK, description="columns of the thin matrices")
    shapes: tuple[tuple[PositiveInt, ...], ...] = Field(
        (),
        description="shapes of the model's tensors in the order of the vector; a run sets them "
        "to those of its task",
    )

    @property
    def traits(self) -> CodecTraits:
        """See `geo_ray.codecs.base`."""
        num = sum(map(math.prod, self.shapes)) or _USUAL
        sent = sum(part.sent for part in parts_of(num, self.shapes, self.rank))
        return CodecTraits(
            lossy=True, bits_per_value=FP32_BITS * sent / num, with_shapes=self._with_shapes
        )

    def encode(self, x_P: Tensor, memory: dict[str, Tensor], seed: int) -> Coded:
        """Take one step of power iteration per matrix, starting from ``memory["q0"]`` and so on.

        Raises:
            ValueError: the vector does not have as many elements as ``shapes``.
        """
        x_P = aligned(as_fp32(x_P))
        parts = parts_of(x_P.numel(), self.shapes, self.rank)
        magnitude, exponent = largest(x_P), 0
        if magnitude and not 1 / _SAFE <= magnitude <= _SAFE:
            exponent = exponent_of(magnitude)
            x_P = x_P * 2.0**exponent
        sent = [header(len(parts), exponent)]
        sent += [header(part.rows, part.columns, part.rank) for part in parts]
        for number, (part, x_N) in enumerate(zip(parts, _cut(x_P, parts), strict=True)):
            sent += _factors(x_N, part, memory, f"q{number}", seed) if part.rank else [x_N]
        return Coded(self.kind, x_P.numel(), joined(*sent))

    def _with_shapes(self, shapes: Sequence[tuple[int, ...]]) -> PowerSgd:
        given, needed = (sum(map(math.prod, each)) for each in (self.shapes, shapes))
        if self.shapes and given != needed:
            raise ValueError(f"shapes have {given} elements, the model has {needed}")
        return self.model_copy(update={"shapes": self.shapes or tuple(shapes)})

    def decode(self, coded: Coded) -> Tensor:
        """Multiply the thin matrices."""
        num = check_num(self.kind, coded.num)
        reader = Reader(self.kind, coded.data_B)
        count, exponent = reader.header(2)
        if count < 0 or abs(exponent) > 127:
            raise wrong(self.kind, f"{count} parts, scale 2^{exponent}")
        numbers = reader.header(3 * count)
        parts = [MatrixPart(*numbers[i : i + 3]) for i in range(0, len(numbers), 3)]
        if not all(part.possible(_MAX_RANK) for part in parts):
            raise wrong(self.kind, "a part's shape is impossible")
        if sum(part.num for part in parts) != num:
            raise wrong(self.kind, f"the parts do not make {num} elements")
        sizes = [part.sent for part in parts]
        sent = torch.split(aligned(reader.take(sum(sizes), torch.float32)), sizes)
        reader.done()
        out_P = torch.empty(num)
        for part, sent_N, out_N in zip(parts, sent, _cut(out_P, parts), strict=True):
            if not part.rank:
                out_N.copy_(sent_N)
                continue
            p_nR = sent_N[: part.rows * part.rank].view(part.rows, part.rank)
            q_mR = sent_N[part.rows * part.rank :].view(part.columns, part.rank)
            torch.mm(p_nR, q_mR.T, out=out_N.view(part.rows, part.columns))
        if exponent:
            limit = torch.finfo(torch.float32).max
            out_P.mul_(2.0**-exponent).clamp_(-limit, limit)
        return out_P


def _cut(x_P: Tensor, parts: Sequence[MatrixPart]) -> Sequence[Tensor]:
    return torch.split(x_P, [part.num for part in parts])


def _factors(
    x_N: Tensor, part: MatrixPart, memory: dict[str, Tensor], name: str, seed: int
) -> list[Tensor]:
    """Return P and Q of one matrix; stores Q's directions."""
    m_nm = x_N.view(part.rows, part.columns)
    shape = (part.columns, part.rank)
    start_mR = memory.get(name)
    if start_mR is None or tuple(start_mR.shape) != shape:
        start_mR = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    p_nR = torch.linalg.qr(m_nm @ aligned(start_mR.to(x_N.device))).Q
    q_mR = m_nm.T @ p_nR
    length_R = q_mR.norm(dim=0)
    if math.isfinite(float(length_R.sum())) and float(length_R.min()) > 0.0:
        memory[name] = q_mR / length_R
    else:
        memory.pop(name, None)  # a direction is lost: start again
    return [p_nR.contiguous(), q_mR.contiguous()]
