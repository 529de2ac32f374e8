"""A shard's slice of the parameters, cut so that groups have the bits of torch's own parameters.

Vector code computes the end of a tensor in another way than its inside, and torch's optimizers see
one tensor per parameter. So the slice is cut at the parameters' ends. Where a shard begins or ends
inside a parameter, what is left of a block of vector registers is computed in a buffer that stands
for the whole block.

Shape legend: S = parameters in the slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from geo_ray.tasks.groups import GroupRun

BLOCK: Final = 64  # floats; a multiple of what any vector loop takes at once


@dataclass(frozen=True, slots=True)
class GroupPiece:
    """Neighbouring elements of one parameter.

    Attributes:
        start: their first place in the slice.
        stop: one past their last.
        factors: of rate, decay and schedule.
        block: for a part of a block: length of the whole, and where in it the part begins.
    """

    start: int
    stop: int
    factors: tuple[float, float, float]
    block: tuple[int, int] | None = None


def pieces_of(runs: Sequence[GroupRun], piece: tuple[int, int]) -> tuple[GroupPiece, ...]:
    """The pieces of the slice of a model between two places; empty without groups."""
    first, last = piece
    found: list[GroupPiece] = []
    for run in runs:
        start, stop = max(run.start, first), min(run.stop, last)
        if start < stop:
            found += _cut(run, start, stop, first)
    return tuple(found)


def _cut(run: GroupRun, start: int, stop: int, origin: int) -> list[GroupPiece]:
    """Parts of blocks at both ends, if they are parts, and whole blocks between them."""
    edges = [start]
    begin = run.start - (run.start - start) // BLOCK * BLOCK  # of the first whole block
    end = stop if stop == run.stop else run.start + (stop - run.start) // BLOCK * BLOCK
    edges += [edge for edge in (begin, end) if start < edge < stop]
    edges = sorted({*edges, stop})
    return [
        GroupPiece(a - origin, b - origin, run.factors, _block(run, a, b))
        for a, b in pairwise(edges)
    ]


def _block(run: GroupRun, start: int, stop: int) -> tuple[int, int] | None:
    """The block that a piece is part of; None if the piece is whole blocks up to the end."""
    inside = (start - run.start) % BLOCK
    is_cut = stop < run.stop and (stop - run.start) % BLOCK > 0
    if not inside and not is_cut:
        return None
    first = start - inside
    return min(BLOCK, run.stop - first), inside
