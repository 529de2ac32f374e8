"""A random fraction of the elements; the receiver draws the same ones, so only values are sent.

Idea: the vector is cut into k runs whose lengths differ by at most one, and from each one element
is drawn by a hash of seed and run. So positions ascend without duplicates, every element has the
same chance (to within one part in a run's length), and all machines draw the same.

`randomk` sends the elements unchanged; error feedback sends the others later. `randomk_unbiased`
multiplies each by the length of its run, so that the expectation is the vector itself. It must not
be combined with error feedback (the residual would grow without bound), so its traits say that it
needs none.

Layout: i64 seed, i64 k, i64 number format, i64 exponent, k values. Ratio 1 / `ratio` with fp32.

When: `randomk` if finding the largest costs too much; `randomk_unbiased` if theory requires an
unbiased estimate. `topk` preserves more of the vector at the same size.

Source: random sparsification is widely used; drawing one element per run is ours.

Shape legend: P = elements of the vector; K = drawn ones.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from geo_ray.base.model import StrictModel
from geo_ray.codecs.base import CodecTraits, Coded, wrong
from geo_ray.codecs.buffers import Reader, as_fp32, check_num, header, joined, zeros
from geo_ray.codecs.sparse import BITS, Values, count_of, read_values, write_values

_MASK = (1 << 63) - 1


class RandomK(StrictModel):
    """Configuration and rule of `randomk`."""

    kind: Literal["randomk"] = "randomk"
    ratio: float = Field(0.01, gt=0.0, le=1.0, description="fraction of the elements that is sent")
    values: Values = Field("fp32", description="number format of the sent values")

    @property
    def traits(self) -> CodecTraits:
        """See `geo_ray.codecs.base`."""
        return CodecTraits(lossy=True, bits_per_value=self.ratio * BITS[self.values])

    def encode(self, x_P: Tensor, memory: dict[str, Tensor], seed: int) -> Coded:
        """Draw the positions and write the values."""
        return _encode(self.kind, as_fp32(x_P), seed, self.ratio, self.values)

    def decode(self, coded: Coded) -> Tensor:
        """Draw the same positions and put the values there."""
        return _decode(coded, scaled=False)


class UnbiasedRandomK(StrictModel):
    """Configuration and rule of `randomk_unbiased`."""

    kind: Literal["randomk_unbiased"] = "randomk_unbiased"
    ratio: float = Field(0.01, gt=0.0, le=1.0, description="fraction of the elements that is sent")
    values: Values = Field("fp32", description="number format of the sent values")

    @property
    def traits(self) -> CodecTraits:
        """See `geo_ray.codecs.base`."""
        # Nothing is owed: the expectation is the vector.
        return CodecTraits(
            lossy=True, bits_per_value=self.ratio * BITS[self.values], feeds_back=True
        )

    def encode(self, x_P: Tensor, memory: dict[str, Tensor], seed: int) -> Coded:
        """Draw the positions and write the values."""
        return _encode(self.kind, as_fp32(x_P), seed, self.ratio, self.values)

    def decode(self, coded: Coded) -> Tensor:
        """Draw the same positions and put the values there, each times the length of its run."""
        return _decode(coded, scaled=True)


def _encode(kind: str, x_P: Tensor, seed: int, ratio: float, values: Values) -> Coded:
    count = count_of(ratio, x_P.numel())
    at_K = torch.from_numpy(_draw(seed & _MASK, x_P.numel(), count)[0]).to(x_P.device)
    sent = write_values(x_P[at_K], values)
    return Coded(kind, x_P.numel(), joined(header(seed & _MASK, count), *sent))


def _decode(coded: Coded, *, scaled: bool) -> Tensor:
    num = check_num(coded.kind, coded.num)
    reader = Reader(coded.kind, coded.data_B)
    seed, count = reader.header(2)
    if seed < 0 or not min(num, 1) <= count <= num:
        raise wrong(coded.kind, f"{count} of {num} elements by seed {seed}")
    values_K = read_values(coded.kind, reader, count)
    reader.done()
    at_K, lengths_K = _draw(seed, num, count)
    if scaled:
        values_K.mul_(torch.from_numpy(lengths_K))
    out_P = zeros(num)
    out_P.numpy()[at_K] = values_K.numpy()
    return out_P


def _draw(seed: int, num: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw one position per run of ``count`` runs of ``range(num)``; return also their lengths."""
    if not count:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    bounds = np.arange(count + 1, dtype=np.int64) * num // count
    lengths_K = np.diff(bounds)
    mixed_K = _mix(np.arange(count, dtype=np.uint64) + _mix(np.array([seed], np.uint64)))
    offsets_K = ((mixed_K >> np.uint64(32)) * lengths_K.astype(np.uint64)) >> np.uint64(32)
    return bounds[:-1] + offsets_K.astype(np.int64), lengths_K


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix bits as SplitMix64: every bit of the result depends on every bit of x."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
