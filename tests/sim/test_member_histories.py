"""Random histories of members, over all strategies; `benchmarks/membership` runs many more."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.membership.histories import History, ViolationError

SEEDS = range(120)
_seen: Counter[str] = Counter()


@pytest.mark.parametrize("first", SEEDS[::10])
def test_whatever_happens_to_members_the_run_ends_well(data_dir: Path, first: int) -> None:
    for seed in range(first, first + 10):
        history = History(seed, data_dir / "histories")
        history.run()
        _seen.update(history.counts)


def test_the_histories_have_all_of_it_in_them() -> None:
    if not _seen:
        pytest.skip("the histories were not asked for")
    kinds = ("region_joined", "region_drained", "region_lost", "hub_moved")
    assert min(_seen[kind] for kind in kinds) > 10


def test_a_history_that_goes_wrong_is_told_with_its_seed(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(*_: object) -> list[object]:
        return []

    monkeypatch.setattr("geo_ray.training.averager.averager.Averager.leave", forget)
    with pytest.raises(Exception) as caught:
        for seed in range(40):
            History(seed, data_dir / "histories").run()
    assert not isinstance(caught.value, AssertionError)
    assert isinstance(caught.value, ViolationError) or "progress" in str(caught.value)
