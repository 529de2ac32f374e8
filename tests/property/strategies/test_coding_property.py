from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geo_ray.strategies.coded_shuffle import decode, encode, keep, plan, traffic
from geo_ray.strategies.gradient_code import GradientCode, cyclic, fractional_repetition
from geo_ray.strategies.mds_code import MdsCode

SEEDS = st.integers(0, 2**32)


@st.composite
def codes(draw: st.DrawFn) -> GradientCode:
    tolerate = draw(st.integers(0, 4))
    if draw(st.booleans()):
        return fractional_repetition(draw(st.integers(1, 4)) * (tolerate + 1), tolerate)
    return cyclic(draw(st.integers(tolerate + 1, 12)), tolerate)


@given(codes(), SEEDS, st.data())
def test_enough_alive_give_the_exact_sum(
    code: GradientCode, seed: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(code.num_workers)))
    fewest = code.num_workers - code.tolerate
    alive = order[: data.draw(st.integers(fewest, code.num_workers))]
    grads_NP = torch.randn(
        code.num_workers, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    coded = {
        worker: code.encode(worker, [grads_NP[part] for part in code.partitions_of(worker)])
        for worker in alive
    }
    total_P, error = code.combine(coded)
    assert error < 1e-9
    assert code.can_decode(alive)
    torch.testing.assert_close(total_P, grads_NP.sum(0), rtol=0, atol=1e-8)


@given(codes(), st.data())
def test_more_alive_are_never_worse(code: GradientCode, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(code.num_workers)))
    errors = [code.decode(order[:count])[1] for count in range(code.num_workers + 1)]
    assert errors[0] == 1.0
    assert all(after <= before + 1e-9 for before, after in itertools.pairwise(errors))
    assert errors[-1] == pytest.approx(0.0, abs=1e-9)


@given(
    st.integers(1, 6),
    st.integers(0, 3),
    st.integers(1, 30),
    st.integers(0, 3),
    st.integers(0, 50),
    st.data(),
)
def test_any_k_blocks_give_the_product(
    k: int, coded: int, rows: int, columns: int, seed: int, data: st.DataObject
) -> None:
    draw = np.random.default_rng(seed)
    matrix_MN = torch.from_numpy(draw.standard_normal((rows, 5)))
    shape = (5, columns) if columns else (5,)
    other = torch.from_numpy(draw.standard_normal(shape))
    code = MdsCode(k, k + coded, seed % 4)
    chosen = data.draw(st.permutations(range(k + coded)))[:k]
    blocks = code.encode(matrix_MN)
    product = code.decode({worker: blocks[worker] @ other for worker in chosen}, rows)
    torch.testing.assert_close(product, matrix_MN @ other, rtol=1e-8, atol=1e-8)


@st.composite
def shuffles(draw: st.DrawFn) -> tuple[list[bytes], list[set[int]], list[set[int]]]:
    """Blocks, and by worker what it has and what it is to have; sparse, dense, with overlaps."""
    generator = np.random.default_rng(draw(SEEDS))
    num_blocks, workers = draw(st.integers(1, 12)), draw(st.integers(1, 7))
    blocks = [generator.bytes(int(generator.integers(7))) for _ in range(num_blocks)]

    def some(share: float) -> list[set[int]]:
        return [
            set(np.flatnonzero(generator.random(num_blocks) < share).tolist())
            for _ in range(workers)
        ]

    shares = st.floats(0.0, 1.0)
    return blocks, some(draw(shares)), some(draw(shares))


@given(shuffles())
def test_every_worker_gets_exactly_its_blocks(
    shuffle: tuple[list[bytes], list[set[int]], list[set[int]]],
) -> None:
    blocks, caches, needs = shuffle
    groups = plan(caches, needs)
    got: list[dict[int, bytes]] = [{} for _ in caches]
    for group in groups:
        message = encode(group, dict(enumerate(blocks)))
        for worker in group.workers:
            wanted = group.block_of(worker)
            assert wanted not in got[worker]
            held = {block: blocks[block] for block in caches[worker]}  # nothing else to use
            got[worker][wanted] = decode(group, worker, message, held, len(blocks[wanted]))
    for worker, had in enumerate(caches):
        assert got[worker] == {block: blocks[block] for block in needs[worker] - had}


@given(shuffles())
def test_coding_never_costs_a_sender_who_can_multicast(
    shuffle: tuple[list[bytes], list[set[int]], list[set[int]]],
) -> None:
    _, caches, needs = shuffle
    size_bytes = 100
    groups = plan(caches, needs)
    counts = traffic(groups, dict.fromkeys(range(12), size_bytes))
    missing = sum(len(needed - had) for had, needed in zip(caches, needs, strict=True))
    assert counts.unicast_bytes == counts.coded_unicast_bytes == missing * size_bytes
    assert counts.coded_bytes == len(groups) * size_bytes
    assert counts.coded_bytes <= counts.multicast_bytes <= counts.unicast_bytes


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)), st.integers(0, 50), SEEDS)
def test_a_full_cache_is_full_of_what_was_there(
    had: set[int], dealt: set[int], more: int, seed: int
) -> None:
    room = len(dealt) + more
    kept = keep(had, dealt, room, seed)
    assert dealt <= kept <= had | dealt
    assert len(kept) == min(room, len(had | dealt))
