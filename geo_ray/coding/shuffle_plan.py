"""Who is sent which blocks in one message, and what workers keep from epoch to epoch.

Source: the coded shuffling of Lee et al. (IEEE Trans. IT 2018, arXiv 1512.02673), of which the
abstract was read; the scheme and the greedy choice of groups are reconstructed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from geo_ray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Multicast:
    """One multicast.

    Attributes:
        wants: by worker, ascending, the block that it takes from the message.
    """

    wants: tuple[tuple[int, int], ...]

    @property
    def workers(self) -> tuple[int, ...]:
        """Who receives it."""
        return tuple(worker for worker, _ in self.wants)

    @property
    def blocks(self) -> tuple[int, ...]:
        """What is in it, each block once, ascending."""
        return tuple(sorted({block for _, block in self.wants}))

    def block_of(self, worker: int) -> int:
        """The block that a worker takes from it.

        Raises:
            ConfigError: the worker is not in this group.
        """
        for member, block in self.wants:
            if member == worker:
                return block
        raise ConfigError(
            f"worker {worker} is not among the receivers {self.workers}",
            fix="Give a message to the workers of its group only.",
        )


def plan(caches: Sequence[Collection[int]], needs: Sequence[Collection[int]]) -> list[Multicast]:
    """Who is sent what in one message.

    A wish is a worker and a block that it needs and does not have; all wishes are met, each by one
    group. Two fit in one group if they are of different workers, and are for the same block or
    each worker has the other's. Groups grow one after another by the wish that leaves most others
    fitting; the least number of groups would be much harder to find. There are never more groups
    than blocks that somebody lacks. It takes time that grows with the square of the wishes: a
    thousand are fine, so a block is a few hundred rows, not one.

    Args:
        caches: by worker, the blocks that it has.
        needs: by worker, the blocks that it is to have.

    Returns:
        The groups; sender and receivers come to the same ones from the same arguments.

    Raises:
        ConfigError: not the same number of workers, or a block's number is negative.
    """
    if len(caches) != len(needs) or any(block < 0 for held in (*caches, *needs) for block in held):
        raise ConfigError(
            f"{len(caches)} caches and {len(needs)} needs, of blocks from 0, do not fit",
            fix="Give both for every worker; blocks are numbered from 0.",
        )
    has = [frozenset(held) for held in caches]
    wishes = [(i, b) for i, needed in enumerate(needs) for b in sorted(set(needed) - has[i])]
    fits = [sum(1 << place for place, b in enumerate(wishes) if _fit(has, a, b)) for a in wishes]
    left, groups = (1 << len(wishes)) - 1, []
    while left:
        rarest = min(_places(left), key=lambda place: (fits[place] & left).bit_count())
        members, open_ = [rarest], fits[rarest] & left
        while open_:
            # max takes the first of equals, so that the plan is the same everywhere
            best = max(_places(open_), key=lambda place: (fits[place] & open_).bit_count())
            members.append(best)
            open_ &= fits[best]
        left &= ~sum(1 << place for place in members)
        groups.append(Multicast(tuple(sorted(wishes[place] for place in members))))
    blocks = sorted({block for _, block in wishes})
    if len(blocks) < len(groups):  # many want the same, and being greedy did not pay
        return [Multicast(tuple(wish for wish in wishes if wish[1] == block)) for block in blocks]
    return groups


def keep(had: Collection[int], dealt: Collection[int], room: int, seed: int) -> frozenset[int]:
    """What a worker keeps after an epoch's blocks have come: those, and a draw of its older ones.

    Args:
        had: blocks that it has cached before.
        dealt: blocks of the epoch; always kept.
        room: blocks that it can hold.
        seed: of the draw; differs between workers and epochs.

    Raises:
        ConfigError: the epoch's blocks do not fit in, or the seed is negative.
    """
    kept = frozenset(dealt)
    if len(kept) > room or seed < 0:
        raise ConfigError(
            f"{len(kept)} blocks of an epoch, room for {room}, seed {seed}",
            fix="Give the cache room for an epoch's blocks, and a seed of at least 0.",
        )
    older = sorted(set(had) - kept)
    drawn = np.random.default_rng(seed).permutation(len(older))[: room - len(kept)]
    return kept | {older[place] for place in drawn}


def _fit(has: Sequence[frozenset[int]], one: tuple[int, int], other: tuple[int, int]) -> bool:
    (i, a), (j, b) = one, other
    return i != j and (a == b or (a in has[j] and b in has[i]))


def _places(bits: int) -> list[int]:
    """Numbers of the bits that are set, ascending."""
    found = []
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return found
