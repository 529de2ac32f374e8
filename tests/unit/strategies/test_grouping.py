"""Sites with like data are found by their updates."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from geo_ray.strategies.fedgsync import group, sketch


def changes(kinds: list[int], noise: float, seed: int = 0, size: int = 4000) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(max(kinds) + 1, size, generator=generator)
    lengths = torch.rand(len(kinds), generator=generator) * 9 + 1
    return [
        lengths[i] * (directions[kind] + noise * torch.randn(size, generator=generator))
        for i, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_groups_are_recovered_whatever_the_length_of_updates(seed):
    kinds = [i % 4 for i in range(16)]
    found = group([sketch(c, 7) for c in changes(kinds, 0.5, seed)], most=10, seed=seed)
    assert adjusted_rand_score(kinds, found) > 0.9
    assert found[0] == 0 and max(found) == 3


def test_sites_that_are_all_alike_are_one_group():
    found = group([sketch(c, 7) for c in changes([0] * 12, 3.0)], most=6, seed=0)
    assert found == [0] * 12


def test_few_sites_are_one_group():
    assert group([sketch(c, 7) for c in changes([0, 1, 2], 0.0)], most=3, seed=0) == [0, 0, 0]


def test_equal_and_zero_updates_make_no_trouble():
    assert group([torch.zeros(512)] * 6, most=3, seed=0) == [0] * 6
    same = [sketch(torch.ones(100), 1)] * 5
    assert group(same, most=2, seed=0) == [0] * 5


def test_a_sketch_keeps_angles_and_depends_on_its_seed():
    a_P, b_P = changes([0, 1], 0.0)
    for x_P, y_P in ((a_P, b_P), (a_P, a_P + b_P)):
        real = torch.cosine_similarity(x_P, y_P, dim=0)
        kept = torch.cosine_similarity(sketch(x_P, 3), sketch(y_P, 3), dim=0)
        assert abs(float(real - kept)) < 0.15
    assert torch.equal(sketch(a_P, 3), sketch(a_P, 3))
    assert not torch.equal(sketch(a_P, 3), sketch(a_P, 4))
