"""Coded shuffling: one multicast message gives several workers a different block each.

Idea: before an epoch every worker is assigned new blocks of the data, and has some from earlier
epochs in its cache. If one worker needs block a and has b, and another needs b and has a, the
sender multicasts ``a xor b`` once, and each worker removes the block that it has.

Rule: in a group of k workers every member needs one block and has those of all others; one message
serves the group. `plan` chooses the groups, `keep` the blocks that workers cache. Blocks are bytes
of any length; a message is as long as its longest block.

When: multicast is available. Where the sender must send every member its own copy, as over the wide
area, coding saves no bytes, and workers decode for nothing. Data stay among workers of one region.

Source: "Speeding Up Distributed Machine Learning Using Codes" (Lee et al., IEEE Trans. IT 2018,
arXiv 1512.02673), of which the abstract was read; the scheme and the greedy choice of groups
are reconstructed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from geo_ray.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Multicast:
    """One multicast.

    Attributes:
        wants: block that each worker decodes from the message, by worker, ascending.
    """

    wants: tuple[tuple[int, int], ...]

    @property
    def workers(self) -> tuple[int, ...]:
        """Receivers."""
        return tuple(worker for worker, _ in self.wants)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks in the message, each once, ascending."""
        return tuple(sorted({block for _, block in self.wants}))

    def block_of(self, worker: int) -> int:
        """Return the block that a worker decodes from it.

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
    """Plan which blocks are sent in one message.

    A need is a worker and a block that it lacks; each need is met by exactly one group. Two needs
    fit in one group if they are of different workers, and are for the same block or each worker has
    the other's block. A group grows by the need that leaves most other needs feasible; the minimum
    number of groups would be much harder to find. There are never more groups than missing blocks.
    Time grows with the square of the needs: a thousand are fine, so a block should have a few
    hundred rows.

    Args:
        caches: cached blocks by worker.
        needs: needed blocks by worker.

    Returns:
        The groups; sender and receivers compute the same ones from the same arguments.

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
        rarest = min(_places(left), key=partial(_feasible, fits, left))
        members, open_ = [rarest], fits[rarest] & left
        while open_:
            # max takes the first of equals, so that the plan is deterministic
            best = max(_places(open_), key=partial(_feasible, fits, open_))
            members.append(best)
            open_ &= fits[best]
        left &= ~sum(1 << place for place in members)
        groups.append(Multicast(tuple(sorted(wishes[place] for place in members))))
    blocks = sorted({block for _, block in wishes})
    # Many needs are for the same block: one message per block is shorter than the greedy choice.
    if len(blocks) < len(groups):
        return [Multicast(tuple(wish for wish in wishes if wish[1] == block)) for block in blocks]
    return groups


def keep(had: Collection[int], dealt: Collection[int], capacity: int, seed: int) -> frozenset[int]:
    """Choose a worker's cache for the next epoch: this epoch's blocks, and a draw of older ones.

    Args:
        had: blocks cached before.
        dealt: blocks of the epoch; always cached.
        capacity: blocks that the cache can hold.
        seed: seed of the draw; differs between workers and epochs.

    Raises:
        ConfigError: the epoch's blocks do not fit, or the seed is negative.
    """
    cached = frozenset(dealt)
    if len(cached) > capacity or seed < 0:
        raise ConfigError(
            f"{len(cached)} blocks of an epoch, capacity {capacity}, seed {seed}",
            fix="Let the cache hold at least one epoch's blocks, and a seed of at least 0.",
        )
    older = sorted(set(had) - cached)
    drawn = np.random.default_rng(seed).permutation(len(older))[: capacity - len(cached)]
    return cached | {older[place] for place in drawn}


def _fit(has: Sequence[frozenset[int]], one: tuple[int, int], other: tuple[int, int]) -> bool:
    (i, a), (j, b) = one, other
    return i != j and (a == b or (a in has[j] and b in has[i]))


def _feasible(fits: Sequence[int], wishes: int, place: int) -> int:
    """Return how many of the needs fit in one group with that at a place."""
    return (fits[place] & wishes).bit_count()


def _places(bits: int) -> list[int]:
    """Numbers of the bits that are set, ascending."""
    found = []
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return found


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ShuffleTraffic:
    """Bytes that the sender sends for one shuffle.

    Attributes:
        unicast_bytes: every worker's missing blocks, each sent to it.
        multicast_bytes: every missing block multicast once, without coding.
        coded_bytes: the groups' messages, each multicast once.
        coded_unicast_bytes: the groups' messages where there is no multicast.
    """

    unicast_bytes: int
    multicast_bytes: int
    coded_bytes: int
    coded_unicast_bytes: int


def encode(group: Multicast, blocks: Mapping[int, bytes]) -> bytes:
    """Return the message of a group: the xor of its blocks, shorter ones padded with zeros.

    Args:
        group: of the plan.
        blocks: at least the group's.

    Raises:
        ConfigError: a block is missing.
    """
    found = [_held(blocks, number) for number in group.blocks]
    return _xor(found, max(map(len, found), default=0))


def decode(
    group: Multicast, worker: int, message: bytes, cached: Mapping[int, bytes], size_bytes: int
) -> bytes:
    """Return the block that a worker decodes from a message.

    Args:
        group: of the plan.
        worker: the one that decodes.
        message: what `encode` made.
        cached: at least the group's other blocks.
        size_bytes: length of the wanted block, which the data's manifest tells.

    Raises:
        ConfigError: the worker is not in the group, a block is not cached, or lengths do not fit.
    """
    wanted = group.block_of(worker)
    known = [_held(cached, number) for number in group.blocks if number != wanted]
    longest = max(size_bytes, *map(len, known)) if known else size_bytes
    if size_bytes < 0 or len(message) != longest:
        raise ConfigError(
            f"a message of {len(message)} bytes for a block of {size_bytes}, expected {longest}",
            fix="Decode with the plan and the blocks' lengths that the sender had.",
        )
    return _xor([message, *known], longest)[:size_bytes]


def traffic(groups: Sequence[Multicast], sizes_bytes: Mapping[int, int]) -> ShuffleTraffic:
    """Count the bytes of a plan with and without coding.

    Args:
        groups: the plan.
        sizes_bytes: by block.

    Raises:
        ConfigError: a block's size is missing.
    """
    wishes = [block for group in groups for _, block in group.wants]
    messages = [max(_held(sizes_bytes, block) for block in group.blocks) for group in groups]
    return ShuffleTraffic(
        unicast_bytes=sum(sizes_bytes[block] for block in wishes),
        multicast_bytes=sum(sizes_bytes[block] for block in set(wishes)),
        coded_bytes=sum(messages),
        coded_unicast_bytes=sum(
            size * len(group.wants) for size, group in zip(messages, groups, strict=True)
        ),
    )


def _held(blocks: Mapping[int, T], number: int) -> T:
    if number not in blocks:
        raise ConfigError(f"block {number} is missing", fix="Hold every block of the plan.")
    return blocks[number]


def _xor(parts: Sequence[bytes], size_bytes: int) -> bytes:
    total = np.zeros(size_bytes, np.uint8)
    for part in parts:
        total[: len(part)] ^= np.frombuffer(part, np.uint8)
    return total.tobytes()
