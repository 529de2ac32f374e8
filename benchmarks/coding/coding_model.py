"""What coding gains in a model: steps with stragglers, and shuffles with caches.

Steps: a worker's time is shifted exponential. Its share of the plain step's work takes 1; then

  delay  a wait of mean `tail`, however much work there is (a network, a pause): w + Exp(tail)
  rate   a slowness of mean `tail`, for all of the work (a busy core): w * (1 + Exp(tail))

with w the work in shares: 1, for gradient coding tolerate + 1, for an MDS product n / k. Every
worker and step is drawn anew. Encoding, decoding and transfers take no time in the model.

Shuffles: each epoch deals every worker an equal number of blocks at random; it has those of the
last epoch and, as far as its cache has room, a draw of older ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from geo_ray.strategies.coded_shuffle import ShuffleTraffic, keep, plan, traffic

Floats = NDArray[np.float64]

BLOCKS_PER_WORKER = 16
BLOCK_BYTES = 65_536


def step_times(
    model: str, tail: float, num_workers: int, steps: int, seed: int
) -> dict[str, float]:
    """Mean time of a step by what is waited for; all see the same draws."""
    slow_TN = np.random.default_rng(seed).exponential(tail, (steps, num_workers))
    quarter = num_workers // 4

    def times_TN(work: float) -> Floats:
        return work + slow_TN if model == "delay" else work * (1.0 + slow_TN)

    def fastest(count: int, work: float) -> Floats:
        """When ``count`` workers are ready (T,)."""
        return np.asarray(np.partition(times_TN(work), count - 1, axis=1)[:, count - 1])

    # One of each pair is enough.
    pairs_TG = times_TN(2.0).reshape(steps, num_workers // 2, 2).min(axis=2)
    found = {
        "wait_all": fastest(num_workers, 1.0),
        "drop_1": fastest(num_workers - 1, 1.0),
        "repetition_1": pairs_TG.max(axis=1),
        "cyclic_1": fastest(num_workers - 1, 2.0),
        f"mds_{num_workers - quarter}": fastest(
            num_workers - quarter, num_workers / (num_workers - quarter)
        ),
    }
    if quarter > 1:
        found[f"drop_{quarter}"] = fastest(num_workers - quarter, 1.0)
        found[f"cyclic_{quarter}"] = fastest(num_workers - quarter, quarter + 1.0)
    return {name: float(times_T.mean()) for name, times_T in found.items()}


def shuffles(num_workers: int, cached: float, epochs: int, seed: int) -> list[ShuffleTraffic]:
    """What each epoch's shuffle sends.

    Args:
        num_workers: who are dealt blocks.
        cached: share of all blocks that a worker has room for, at least 1 / num_workers.
        epochs: shuffles.
        seed: of everything.
    """
    num_blocks = BLOCKS_PER_WORKER * num_workers
    room = round(cached * num_blocks)
    generator = np.random.default_rng(seed)
    sizes_bytes = dict.fromkeys(range(num_blocks), BLOCK_BYTES)

    def deal() -> list[list[int]]:
        return [part.tolist() for part in np.split(generator.permutation(num_blocks), num_workers)]

    def kept(had: Sequence[Collection[int]], dealt: list[list[int]]) -> list[frozenset[int]]:
        seeds = generator.integers(2**32, size=num_workers).tolist()
        return [
            keep(*old_and_new, room, s) for *old_and_new, s in zip(had, dealt, seeds, strict=True)
        ]

    caches = kept([range(num_blocks)] * num_workers, deal())
    found = []
    for _ in range(epochs):
        dealt = deal()
        found.append(traffic(plan(caches, dealt), sizes_bytes))
        caches = kept(caches, dealt)
    return found
