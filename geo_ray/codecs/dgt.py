"""Differential gradient transmission: important blocks reliably and first, the others best-effort.

Idea: training tolerates that a part of a change arrives late. The vector is split into blocks,
which are ranked by their contribution. The first ones travel reliably, and the receiver continues
when it has them. The rest follows, most important first, in datagrams that may be lost.

Rule: ``c = alpha * c + (1 - alpha) * mean |g|`` per block. The ``reliable_fraction`` of all blocks
with the largest c is reliable; the others are lossy, in ``bands`` equal ranges of rank. Blocks of
zeros are not sent. With ``adaptive`` the fraction follows the loss: ``reliable_fraction * loss /
first loss``, but not below ``reliable_fraction_min``.

Lossy blocks: they leave in order of c after all reliable data of the update are acknowledged; the
bands differ in their marking only (``dscp``). The next update stops them. The reliable part states
how many blocks of each kind there are and which are reliable. An update is complete when that part
has arrived; with ``grace_s`` it then waits for its lossy blocks at most that long. Missing blocks
count as zero. A later block is added to the region's next update, once: blocks are identified by
attempt, update and rank; second copies are counted and dropped. ``late: put_back`` accepts blocks
until the next update is complete, ``late: merge`` for ``late_max`` updates; ``late_scaled`` weighs
a block that is d updates late by 1/(d+1). With ``put_back``, blocks not reported as applied return
to the sender's residual: every block is applied or owed, exactly once, and the final update carries
all of it reliably. With ``merge`` they are lost. Memory c is kept at the sender and in checkpoints.

Layout: i64 format of values, format of lossy blocks, elements of a block E, reliable blocks R,
lossy blocks L, exponent of the values' scale; a bit per block, whether it is reliable; R x E
values in the order of the blocks. A lossy block is decoded separately:

    fp32   E values
    fp16   fp32 scale, E halves; the largest magnitude is 1 before it is multiplied by the scale
    int4   fp32 scale, E codes of 4 bit, two per byte, low half first; value = (code - 8) * scale

When: slow links and models with many more bytes than seconds of computing, whose changes add up
(`asgd`, `asgd_ga`, `bsp`). Options in detail: docs/reference/codecs.md.

Source: DGT (Zhou et al., FGCS 121, 2021), reconstructed from its abstract and its released code.
Blocks of the whole vector instead of single tensors, the return of blocks that did not arrive, and
half precision are ours.

Shape legend: P = elements of the vector; N = blocks; E = elements of a block; R, L = reliable and
lossy blocks; K = bytes of a lossy block; B = bytes.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from geo_ray.base.model import StrictModel
from geo_ray.codecs.base import BlockFormat, CodecTraits, Coded, LossyBlocks, wrong
from geo_ray.codecs.buffers import (
    Reader,
    as_fp32,
    check_num,
    empty_cpu,
    halve,
    header,
    joined,
    widen,
    zeros,
)

FORMATS: Final[tuple[BlockFormat, ...]] = ("fp32", "fp16", "int4")

LARGEST_LOSSY_BYTES: Final = 1300
"""Largest size of a lossy block, so that a datagram of 1400 bytes holds it."""

_LEVELS = 7  # int4: -7 to 7 around code 8


def cut(x_P: Tensor, elements: int) -> Tensor:
    """Return the vector as blocks (N, E), the last one padded with zeros; a view if it is full."""
    missing = -x_P.numel() % elements
    if missing:
        x_P = torch.cat([x_P, x_P.new_zeros(missing)])
    return x_P.view(-1, elements)


def strength(grid_NE: Tensor, num: int) -> Tensor:
    """Return the mean magnitude per block, fp32 (N,); padding beyond P = ``num`` does not count."""
    mean_N: Tensor = torch.linalg.vector_norm(grid_NE, ord=1, dim=1) / grid_NE.shape[1]
    if num:
        mean_N[-1] *= grid_NE.shape[1] / (grid_NE.shape[1] - (grid_NE.numel() - num))
    return mean_N


def lossy_bytes(form: BlockFormat, elements: int) -> int:
    """Return K, the bytes of a block of ``elements`` elements."""
    if form == "fp32":
        return 4 * elements
    return 4 + (2 * elements if form == "fp16" else -(-elements // 2))


def pack_lossy(form: BlockFormat, grid_LE: Tensor) -> Tensor:
    """Return blocks as bytes, uint8 (L, K), on their device."""
    if form == "fp32":
        return grid_LE.contiguous().view(torch.uint8)
    top_L1 = grid_LE.abs().amax(dim=1, keepdim=True)
    if form == "fp16":
        scale_L1 = top_L1
        body_LB = _quotient(grid_LE, scale_L1).to(torch.float16).view(torch.uint8)
    else:
        scale_L1 = top_L1 / _LEVELS
        codes_LE = (_quotient(grid_LE, scale_L1).round() + 8).to(torch.uint8)
        if codes_LE.shape[1] % 2:
            codes_LE = torch.cat([codes_LE, codes_LE.new_zeros(len(codes_LE), 1)], dim=1)
        body_LB = codes_LE[:, 0::2] | codes_LE[:, 1::2] << 4
    return torch.cat([scale_L1.contiguous().view(torch.uint8), body_LB], dim=1)


def unpack_lossy(form: BlockFormat, blocks_LK: Tensor, elements: int) -> Tensor:
    """Undo `pack_lossy`: fp32 (L, E). The caller has checked K."""
    if form == "fp32":
        return _seen_as(blocks_LK, torch.float32)
    scale_L1 = _seen_as(blocks_LK[:, :4], torch.float32)
    body_LB = blocks_LK[:, 4:]
    if form == "fp16":
        return _seen_as(body_LB, torch.float16).float() * scale_L1
    codes_LE = torch.stack([body_LB & 15, body_LB >> 4], dim=2).flatten(1)[:, :elements]
    return (codes_LE.float() - 8) * scale_L1


def pack_bits(ids_R: Tensor, num: int) -> Tensor:
    """Return a bit per block, set for ``ids_R``: uint8 (ceil(num / 8),)."""
    marks = np.zeros(num, dtype=bool)
    marks[ids_R.to(torch.int64).cpu().numpy()] = True
    return torch.from_numpy(np.packbits(marks))


def unpack_bits(bits_B: Tensor, num: int) -> Tensor:
    """Undo `pack_bits`: int64, ascending; bits beyond ``num`` do not count."""
    marks = np.unpackbits(bits_B.numpy(), count=num)
    return torch.from_numpy(np.flatnonzero(marks))


def _seen_as(rows_LB: Tensor, dtype: torch.dtype) -> Tensor:
    """View rows of bytes as numbers; a copy if they are misaligned."""
    flat_B = rows_LB.flatten()
    if flat_B.storage_offset() % dtype.itemsize or flat_B.data_ptr() % dtype.itemsize:
        flat_B = flat_B.clone()
    return flat_B.view(dtype).view(len(rows_LB), rows_LB.shape[1] // dtype.itemsize)


def _quotient(grid_LE: Tensor, scale_L1: Tensor) -> Tensor:
    """Divide by the scale: zeros if the scale is zero; a tiny scale must not make infinities."""
    return torch.where(scale_L1 > 0, grid_LE / scale_L1, 0.0)


_HEADER = 6
_CONTRIBUTION = "contribution_N"
_TOLD = "told"  # a fraction chosen by the averager
_LOSSES = "losses"  # the first, and the present one, smoothed
_SMOOTH = 0.8  # weight of the loss so far; a batch's loss jumps


class Dgt(StrictModel):
    """Configuration and rule of `dgt`."""

    kind: Literal["dgt"] = "dgt"
    block_bytes: int = Field(
        1152,
        ge=4,
        multiple_of=4,
        description="block size in bytes of fp32 elements; a block must fit into a datagram (up "
        "to 1300 bytes), the default also fits into tunnels; smaller blocks suit small "
        "models",
    )
    reliable_fraction: float = Field(
        0.5, gt=0, le=1, description="fraction of blocks that travel reliably"
    )
    adaptive: bool = Field(False, description="let that fraction fall with the training loss")
    reliable_fraction_min: float = Field(0.2, gt=0, le=1, description="adaptive: smallest fraction")
    alpha: float = Field(0.3, ge=0, lt=1, description="weight of a block's earlier contribution")
    bands: int = Field(
        4,
        ge=1,
        le=7,
        description="ranges of rank among lossy blocks; they differ in their datagrams' marking",
    )
    order: Literal["ranked", "random"] = Field(
        "ranked",
        description="ranked: most important blocks first; random: shuffled, for comparison",
    )
    loose: Literal["udp", "drop", "reliable"] = Field(
        "udp",
        description="udp: lossy blocks in datagrams; for comparison, drop discards them at the "
        "sender, and reliable sends all blocks reliably",
    )
    late: Literal["put_back", "merge"] = Field(
        "put_back",
        description="put_back: blocks that were not applied by the next update are sent again; "
        "merge: they may be applied for late_max updates and are then lost (bsp only)",
    )
    late_max: int = Field(
        2, ge=1, le=16, description="merge: updates by which a lossy block may be late"
    )
    late_scaled: bool = Field(
        False, description="merge: a block that is d updates late counts 1/(d+1)"
    )
    grace_s: float = Field(
        0.0,
        ge=0,
        le=60,
        description="longest time that a complete update waits for its lossy blocks",
    )
    values: Literal["fp32", "fp16"] = Field("fp32", description="number format of reliable blocks")
    loose_values: BlockFormat = Field(
        "fp32", description="number format of lossy blocks; int4 has a scale per block"
    )
    rate_mbps: float | None = Field(
        None, gt=0, description="upper limit of the rate of datagrams; null: learned"
    )
    dscp: bool = Field(False, description="mark datagrams by band, for networks that honour it")

    @model_validator(mode="after")
    def _fits(self) -> Dgt:
        size_bytes = lossy_bytes(self.loose_values, self.elements)
        if size_bytes > LARGEST_LOSSY_BYTES:
            raise ValueError(
                f"block_bytes: it makes lossy blocks of {size_bytes} bytes; a "
                f"datagram holds {LARGEST_LOSSY_BYTES}: use smaller blocks or a shorter format"
            )
        if self.late_scaled and self.late == "put_back":
            raise ValueError("late_scaled: it goes with `late: merge`; nothing may be lost in part")
        return self

    @property
    def elements(self) -> int:
        """E, the elements of a block."""
        return self.block_bytes // 4

    @property
    def traits(self) -> CodecTraits:
        """See `geo_ray.codecs.base`."""
        reliable = 32 if self.values == "fp32" else 16
        lossy = 8 * lossy_bytes(self.loose_values, self.elements) / self.elements
        reliable_fraction = 1.0 if self.loose == "reliable" else self.reliable_fraction
        bits = reliable_fraction * reliable + (1 - reliable_fraction) * lossy * (
            self.loose != "drop"
        )
        return CodecTraits(
            lossy=True,
            bits_per_value=bits,
            sends=("change",),
            forgets=self.late == "merge",
            up_only=True,
            suits_answers=False,
            differential=self,
        )

    def observe(self, memory: dict[str, Tensor], loss: float) -> None:
        """Record the training loss for ``adaptive``, before the next `encode`."""
        if not self.adaptive:
            return
        first, now = memory[_LOSSES].tolist() if _LOSSES in memory else (loss, loss)
        smooth = _SMOOTH * now + (1.0 - _SMOOTH) * loss
        memory[_LOSSES] = torch.tensor([first, smooth], dtype=torch.float64)

    def set_reliable_fraction(self, memory: dict[str, Tensor], reliable_fraction: float) -> None:
        """Use the averager's fraction of reliable blocks from the next vector on."""
        memory[_TOLD] = torch.tensor([reliable_fraction], dtype=torch.float64)

    def present_fraction(self, memory: dict[str, Tensor]) -> float:
        """Return the fraction of reliable blocks of the next vector, in (0, 1]."""
        if self.loose == "reliable":
            return 1.0
        if _TOLD in memory:
            return float(memory[_TOLD])
        first, now = memory[_LOSSES].tolist() if _LOSSES in memory else (1.0, 1.0)
        if not self.adaptive or first <= 0.0:
            return self.reliable_fraction
        return min(1.0, max(self.reliable_fraction_min, self.reliable_fraction * now / first))

    def encode(self, x_P: Tensor, memory: dict[str, Tensor], seed: int) -> Coded:
        """Rank the blocks; the best are reliable, the others lossy."""
        x_P = as_fp32(x_P)
        grid_NE = cut(x_P, self.elements)
        now_N = strength(grid_NE, x_P.numel())
        ids = self._in_order(now_N, memory, seed)
        reliable = reliable_count(self.present_fraction(memory), ids.numel())
        chosen_R, rest_L = ids[:reliable].sort().values, ids[reliable:]
        data_B = self._data(grid_NE, chosen_R, rest_L.numel())
        if not rest_L.numel():
            return Coded(self.kind, x_P.numel(), data_B)
        blocks_LK = pack_lossy(self.loose_values, grid_NE[rest_L]).cpu()
        lossy = LossyBlocks(
            rest_L.to(torch.int32).cpu(), blocks_LK, min(self.bands, rest_L.numel())
        )
        return Coded(self.kind, x_P.numel(), data_B, lossy)

    def decode(self, coded: Coded) -> Tensor:
        """Decode the reliable blocks and the lossy ones that arrived; zeros elsewhere."""
        num = check_num(self.kind, coded.num)
        head = DgtHeader(coded)
        x_P = zeros(head.blocks * head.elements)
        grid_NE = x_P.view(head.blocks, head.elements)
        grid_NE[head.ids_R] = head.values_RE
        if coded.lossy is not None:
            ids_L = check_ids(coded.lossy, head)
            grid_NE[ids_L] = unpack_lossy(head.lossy_format, coded.lossy.blocks_LK, head.elements)
        return x_P[:num]

    def subset(self, coded: Coded, places: Tensor) -> Coded:
        """Return an encoding with some of the lossy blocks of ``coded`` only.

        Args:
            coded: the result of `encode`.
            places: ranks of the blocks, int64.
        """
        lossy = coded.lossy
        if lossy is None:
            raise wrong(self.kind, "it has no lossy blocks")
        elements = self.elements
        blocks = -(-coded.num // elements)
        codes = [0, FORMATS.index(self.loose_values)]
        data_B = joined(
            header(*codes, elements, 0, places.numel(), 0), pack_bits(torch.empty(0), blocks)
        )
        part = LossyBlocks(lossy.ids_L[places], lossy.blocks_LK[places], lossy.bands)
        return Coded(self.kind, coded.num, data_B, part)

    def _in_order(self, now_N: Tensor, memory: dict[str, Tensor], seed: int) -> Tensor:
        """Return the ids of all blocks to send, most important first."""
        before_N = memory.get(_CONTRIBUTION)
        if before_N is None or before_N.shape != now_N.shape:
            before_N = torch.zeros_like(now_N)
        contribution_N = torch.lerp(now_N, before_N.to(now_N.device), self.alpha)
        memory[_CONTRIBUTION] = contribution_N
        if self.order == "ranked":
            ids = torch.argsort(contribution_N, descending=True, stable=True)
        else:
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randperm(now_N.numel(), generator=generator).to(now_N.device)
        return ids[now_N[ids] > 0]

    def _data(self, grid_NE: Tensor, ids_R: Tensor, lossy: int) -> Tensor:
        values_RE = grid_NE[ids_R].cpu().reshape(-1)
        exponent = 0
        if self.values == "fp16":
            halves = empty_cpu(values_RE.numel(), torch.float16)
            exponent = halve(values_RE, halves)
            values_RE = halves
        formats = FORMATS.index(self.values), FORMATS.index(self.loose_values)
        counts = self.elements, ids_R.numel(), lossy, exponent
        return joined(header(*formats, *counts), pack_bits(ids_R, len(grid_NE)), values_RE)


class DgtHeader:
    """The decoded reliable part of a vector.

    Args:
        coded: the received encoding.

    Attributes:
        lossy_format: of lossy blocks.
        elements: E.
        blocks: N.
        lossy: L, how many lossy blocks were made.
        ids_R: int64, the reliable blocks, ascending.
        values_RE: fp32, their values.

    Raises:
        FrameError: the bytes are invalid.
    """

    def __init__(self, coded: Coded) -> None:
        reader = Reader(coded.kind, coded.data_B)
        values, lossy, elements, reliable, count, exponent = reader.header(_HEADER)
        if values not in (0, 1) or not 0 <= lossy < len(FORMATS):
            raise wrong(coded.kind, f"formats {values} and {lossy}")
        if not 1 <= elements <= 1 << 20:
            raise wrong(coded.kind, f"blocks of {elements} elements")
        self.lossy_format: BlockFormat = FORMATS[lossy]
        self.elements = elements
        self.blocks = -(-coded.num // elements)
        self.lossy = count
        if reliable < 0 or count < 0 or reliable + count > self.blocks:
            raise wrong(coded.kind, f"{reliable} and {count} of {self.blocks} blocks")
        self.ids_R = unpack_bits(reader.take(-(-self.blocks // 8), torch.uint8), self.blocks)
        if self.ids_R.numel() != reliable:
            raise wrong(coded.kind, f"{self.ids_R.numel()} blocks are marked, {reliable} announced")
        num = reliable * elements
        if values == 0:
            values_P = reader.take(num, torch.float32)
        else:
            halves = reader.take(num, torch.float16)
            values_P = widen(coded.kind, halves, exponent, empty_cpu(num, torch.float32))
        self.values_RE = values_P.view(reliable, elements)
        reader.done()


def check_ids(lossy: LossyBlocks, head: DgtHeader) -> Tensor:
    """Return the positions of lossy blocks as int64 (L,), if they are valid.

    Raises:
        FrameError: an id is out of range, repeated, or of a reliable block; or a size is wrong.
    """
    ids_L = lossy.ids_L.to(torch.int64)
    size_bytes = lossy_bytes(head.lossy_format, head.elements)
    if ids_L.dim() != 1 or lossy.blocks_LK.shape != (ids_L.numel(), size_bytes):
        raise wrong("dgt", f"lossy blocks of shape {tuple(lossy.blocks_LK.shape)}")
    if not ids_L.numel():
        return ids_L
    if int(ids_L.min()) < 0 or int(ids_L.max()) >= head.blocks:
        raise wrong("dgt", f"a lossy block's number is not below {head.blocks}")
    taken_N = torch.zeros(head.blocks, dtype=torch.int32)
    taken_N[head.ids_R] = 1
    taken_N.index_add_(0, ids_L, torch.ones_like(ids_L, dtype=torch.int32))
    if int(taken_N.max()) > 1:
        raise wrong("dgt", "duplicate block")
    return ids_L


def reliable_count(reliable_fraction: float, blocks: int) -> int:
    """Return how many of ``blocks`` blocks are reliable: the nearest number, at least one."""
    return min(blocks, max(1, int(reliable_fraction * blocks + 0.5))) if blocks else 0


def band_of(rank: int, lossy: int, bands: int) -> int:
    """Return the band, from 0, of the block at ``rank`` of ``lossy``; bands have equal length."""
    return rank * bands // lossy
