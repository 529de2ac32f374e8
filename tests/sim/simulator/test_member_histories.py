"""Random histories of members, over all strategies; `benchmarks/membership` runs many more.

A history takes 0.12 to 0.19 s of one core, by how busy the machine is: 120 take up to 20 s.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.membership.histories import ViolationError
from benchmarks.membership.seed_parts import run_part

SEEDS, PART_SEEDS = 120, 20
_seen: Counter[str] = Counter()


@pytest.fixture
def directory(data_dir: Path) -> Path:
    return data_dir / "histories"


@pytest.mark.parametrize("first", range(0, SEEDS, PART_SEEDS))
def test_whatever_happens_to_members_the_run_ends_well(directory: Path, first: int) -> None:
    part = run_part(first, PART_SEEDS, directory)
    assert not part.violations
    _seen.update(part.counts)


def test_the_histories_have_all_of_it_in_them() -> None:
    if not _seen:
        pytest.skip("the histories were not asked for")
    kinds = ("region_joined", "region_drained", "region_lost", "averager_moved")
    assert min(_seen[kind] for kind in kinds) > 10


def test_a_history_that_goes_wrong_is_told_with_its_seed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(*_: object) -> list[object]:
        return []

    monkeypatch.setattr("geo_ray.training.averager.Averager.leave", forget)
    part = run_part(0, 20, directory)
    assert part.count == 20 and 0 < len(part.violations) < 20
    seed, what = next(iter(part.violations.items()))
    assert ViolationError.__name__ in what or "progress" in what
    assert run_part(seed, 1, directory).violations == {seed: what}
