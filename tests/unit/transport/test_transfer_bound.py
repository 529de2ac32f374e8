"""Who must go first and who cannot be in time, against trying every order."""

from __future__ import annotations

from itertools import combinations, permutations
from random import Random

import pytest

from geo_ray.transport.uploads import UploadRequest, is_in_time, too_late


def ask(region: str, *, parts: int = 0, final: bool = False) -> UploadRequest:
    return UploadRequest(
        region, 1, 1, 10, 0, final=final, parts=tuple(ask(f"{region}{i}") for i in range(parts))
    )


def some_order_works(line, first: int = 0) -> bool:
    def works(order) -> bool:
        before = first
        for space, one in order:
            if before > space:
                return False
            before += one.commits
        return True

    return any(works(order) for order in permutations(line))


def lines(seed: int, *, sums: bool):
    random = Random(seed)
    for _ in range(100):
        size = random.randint(0, 5)
        yield [
            (random.randint(-1, 5), ask(f"r{i}", parts=random.choice([0, 2, 3]) if sums else 0))
            for i in range(size)
        ]


@pytest.mark.parametrize("seed", range(3))
def test_a_line_is_in_time_if_any_order_is(seed: int) -> None:
    for line in lines(seed, sums=True):
        for first in range(3):
            assert is_in_time(line, first) == some_order_works(line, first)


@pytest.mark.parametrize("seed", range(3))
def test_as_few_as_possible_are_given_up(seed: int) -> None:
    for line in lines(seed, sums=False):
        given_up = too_late(line, lambda a: a.norm)
        rest = [one for one in line if one[1] not in given_up]
        assert some_order_works(rest)
        for size in range(len(given_up)):
            for fewer in combinations(line, size):
                assert not some_order_works([one for one in line if one not in fewer])


@pytest.mark.parametrize("seed", range(3))
def test_remaining_updates_are_in_time_with_sums_too(seed: int) -> None:
    for line in lines(seed, sums=True):
        given_up = too_late(line, lambda a: 0.0)
        assert some_order_works([one for one in line if one[1] not in given_up])


def test_the_least_loss_goes() -> None:
    loss = {"a": 3.0, "b": 1.0, "c": 2.0}
    line = [(0, ask("a")), (0, ask("b")), (0, ask("c"))]
    assert {a.region for a in too_late(line, lambda a: loss[a.region])} == {"b", "c"}


def test_a_final_update_is_never_too_late_and_delays_no_region() -> None:
    final = ask("a", final=True)
    assert final.slack(100, 100, 1) == float("inf")
    line = [(final.slack(100, 0, 1), final), (0.0, ask("b"))]
    assert too_late(line, lambda a: 0.0) == []


def test_capacity_counts_earlier_and_concurrent_transfers() -> None:
    plain = UploadRequest("a", 1, 1, 10, base_version=7)
    assert plain.slack(version=9, before=2, max_staleness=5) == 1
    total = UploadRequest("a", 0, 1, 10, base_version=7, parts=(plain, plain, plain))
    assert total.commits == 3
    assert total.slack(version=9, before=0, max_staleness=5) == 1
    assert plain.slack(version=10**9, before=0, max_staleness=None) == float("inf")
