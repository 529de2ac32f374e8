"""Coded shuffling: one message that gives several workers a different block each.

Before an epoch every worker is dealt new blocks of the data. It still has some from earlier epochs.
If one worker needs block a and has b, and another needs b and has a, the sender multicasts ``a xor
b`` once, and each takes out what it has. The same goes for more: in a group every member has the
blocks of all the others.

It gains by multicast only. Where the sender must send every member its own copy, as over the wide
area, it sends no fewer bytes than without coding, and workers have decoded for nothing.

Blocks are bytes of any length; a message is as long as its longest block. Data stay among who
caches them: workers of one region. `shuffle_plan.plan` says which blocks go together.

Source: "Speeding Up Distributed Machine Learning Using Codes" (Lee et al., IEEE Trans. IT 2018,
arXiv 1512.02673), of which the abstract was read; the scheme is reconstructed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from geo_ray.coding.shuffle_plan import Multicast
from geo_ray.errors import ConfigError

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
    """The message of a group: the xor of its blocks, shorter ones filled with zeros.

    Args:
        group: of the plan.
        blocks: at least the group's.

    Raises:
        ConfigError: a block is not there.
    """
    found = [_held(blocks, number) for number in group.blocks]
    return _xor(found, max(map(len, found), default=0))


def decode(
    group: Multicast, worker: int, message: bytes, cached: Mapping[int, bytes], size_bytes: int
) -> bytes:
    """The block that a worker takes from a message.

    Args:
        group: of the plan.
        worker: who decodes.
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
    """Bytes of a plan with and without coding.

    Args:
        groups: the plan.
        sizes_bytes: by block.

    Raises:
        ConfigError: a block's size is not there.
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
        raise ConfigError(f"block {number} is not there", fix="Hold every block of the plan.")
    return blocks[number]


def _xor(parts: Sequence[bytes], size_bytes: int) -> bytes:
    total = np.zeros(size_bytes, np.uint8)
    for part in parts:
        total[: len(part)] ^= np.frombuffer(part, np.uint8)
    return total.tobytes()
