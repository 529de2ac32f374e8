"""The list of who takes part: what every change of it keeps."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_ray.base.errors import CheckpointCorruptError, InvariantError, RegionLostError
from geo_ray.training.membership import View

NAMES = ("a", "b", "c", "d", "e")


@given(st.lists(st.sampled_from(NAMES)))
def test_every_change_counts_once_and_nobody_is_forgotten(losses: list[str]) -> None:
    view = View(NAMES)
    for region in losses:
        before, view = view, view.without(region)
        assert (view is before) == (region in before.lost)
        assert view.generation == before.generation + (region not in before.lost)
    assert list(view.lost) == list(dict.fromkeys(losses))
    assert sorted((*view.members, *view.lost)) == list(NAMES)
    assert list(view.members) == sorted(view.members)
    # A resumed run begins with those that were left, or with all.
    saved = json.loads(json.dumps(view.export()))
    assert View(view.members).restored(saved) == view
    again = View(NAMES).restored(saved)
    assert (again.members, again.lost, again.generation) == (NAMES, (), view.generation)


def test_who_takes_part_no_more_and_who_never_did_are_told_apart() -> None:
    view = View(NAMES).without("c")
    view.check("a")
    with pytest.raises(RegionLostError, match=r"'c' is no longer a member.*view 2"):
        view.check("c")
    with pytest.raises(InvariantError, match="'x' is no member"):
        view.check("x")
    with pytest.raises(InvariantError, match="'x' is no member"):
        view.without("x")


def test_a_run_in_which_nothing_changed_saved_nothing() -> None:
    assert View(NAMES).restored(None) == View(NAMES)


@pytest.mark.parametrize(
    "saved", [3, [], {}, {"generation": "2", "lost": []}, {"generation": 2, "lost": 1}]
)
def test_what_makes_no_sense_is_refused(saved: object) -> None:
    with pytest.raises(CheckpointCorruptError, match="view"):
        View(NAMES).restored(saved)
