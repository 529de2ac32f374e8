"""Measured losses: upper confidence bounds of differences, and interpolation."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from geo_ray.base.errors import OtherModelError, ProfileError
from geo_ray.planner.loss import (
    LOSS_BY_CODEC,
    AssumedLoss,
    LossPoint,
    LossProfile,
    LossSubject,
    MeasuredLoss,
    difference,
    differences,
    load_loss_profile,
    loss_of_interval,
)
from geo_ray.planner.plan import ModelId
from geo_ray.planner.profile import save_profile

MODEL = ModelId(task="digits", options={"width": 2}, num_params=100)
SUBJECT = LossSubject(
    model=MODEL, data="d", regions=("a", "b"), strategy="diloco", settings={"optimizer": "x"}
)


def point(interval: int, codec: str | None, losses: tuple[float, ...] = (1.0, 2.0)) -> LossPoint:
    """Return a point as stored in a file, without validation."""
    return LossPoint.model_construct(interval=interval, codec=codec, losses=losses)


def profile(*points: tuple[int, str | None, list[float | None]], at: int = 1) -> LossProfile:
    found = LossProfile(subject=SUBJECT, steps=200, seeds=(0, 1), plain=(1.0, 2.0), codecs_at=at)
    for interval, codec, losses in points:
        point = LossPoint(interval=interval, codec=codec, losses=tuple(losses))
        found = found.with_point(point, 1.0)
    return found


def exactly(share: float) -> list[float | None]:
    """Return losses of both seeds, without noise."""
    return [1 + share, 2 * (1 + share)]


def loss(table: MeasuredLoss, interval: int, codec: str | None = None) -> float:
    return table.loss(interval, codec, trains_on=False)


# ------------------------------------------------------------------ noise


def test_a_difference_counts_with_its_upper_end() -> None:
    found = difference([1.01, 1.03, 1.02], [1.0, 1.0, 1.0])
    assert found.mean == pytest.approx(0.02)
    assert found.upper == pytest.approx(0.02 + 2.920 * 0.01 / math.sqrt(3))


def test_runs_are_compared_by_seed_so_that_what_seeds_differ_in_is_no_noise() -> None:
    found = difference([1.01, 5.05, 0.101], [1.0, 5.0, 0.1])
    assert found.upper == pytest.approx(found.mean) == pytest.approx(0.01)


def test_noise_alone_is_a_cost_and_a_gain_is_none() -> None:
    assert difference([1.01, 0.99], [1.0, 1.0]).upper == pytest.approx(6.314 * 0.01)
    assert difference([0.9, 0.9], [1.0, 1.0]).upper == 0.0


def test_more_seeds_make_noise_cheaper() -> None:
    uppers = [difference([1.01, 0.99] * n, [1.0] * 2 * n).upper for n in (1, 2, 5, 50)]
    assert uppers == sorted(uppers, reverse=True) and uppers[-1] < 0.002


@pytest.mark.parametrize("losses, base", [([1.0, None], [1.0, 1.0]), ([1.0, 1.0], [None, 1.0])])
def test_a_run_that_diverged_is_never_good_enough(losses, base) -> None:
    assert difference(losses, base).upper == math.inf


# ------------------------------------------------------------------ intervals


def test_between_measured_intervals_is_a_line_over_the_logarithm() -> None:
    table = MeasuredLoss.of(profile((4, None, exactly(0.01)), (64, None, exactly(0.03))))
    assert loss(table, 4) == pytest.approx(0.01) and loss(table, 64) == pytest.approx(0.03)
    assert loss(table, 16) == pytest.approx(0.02)
    assert loss(table, 1) == pytest.approx(0.01), "below the shortest nothing is made up"


def test_beyond_the_longest_the_worse_of_the_rough_table_and_the_line() -> None:
    flat = MeasuredLoss.of(profile((4, None, exactly(0.01)), (64, None, exactly(0.01))))
    more = loss_of_interval(500) - loss_of_interval(64)
    assert loss(flat, 500) == pytest.approx(0.01 + more) and more > 0
    steep = MeasuredLoss.of(profile((4, None, exactly(0.0)), (64, None, exactly(0.2))))
    assert loss(steep, 1024) == pytest.approx(0.4)
    one = MeasuredLoss.of(profile((64, None, exactly(0.01)), at=64))
    assert loss(one, 500) == pytest.approx(0.01 + more)


def test_intervals_next_to_a_diverged_one_count_as_diverged() -> None:
    diverged: list[float | None] = [None, 2.0]
    points = (1, None, exactly(0.0)), (16, None, diverged), (64, None, exactly(0.05))
    table = MeasuredLoss.of(profile(*points))
    assert loss(table, 1) == 0.0 and loss(table, 64) == pytest.approx(0.05)
    assert [loss(table, h) for h in (4, 16, 32)] == [math.inf] * 3
    beyond = 0.05 + loss_of_interval(500) - loss_of_interval(64)
    assert loss(table, 500) == pytest.approx(beyond)
    last = MeasuredLoss.of(profile((1, None, exactly(0.0)), (16, None, diverged)))
    assert loss(last, 64) == math.inf and loss(last, 4) == math.inf


# ------------------------------------------------------------------ codecs


def test_codecs_add_what_they_cost_at_one_interval() -> None:
    points = (
        (1, None, exactly(0.0)),
        (16, None, exactly(0.5)),
        (16, "int8", exactly(0.53)),
        (1, "int4", exactly(0.4)),
    )
    table = MeasuredLoss.of(profile(*points, at=16))
    assert loss(table, 1, "int8") == pytest.approx(1.53 / 1.5 - 1)
    assert loss(table, 16, "int8") == pytest.approx(0.5 + 1.53 / 1.5 - 1)
    assert loss(table, 1, "int4") == LOSS_BY_CODEC["int4"], "measured elsewhere: assumed"
    assert (1, "int4") not in differences(profile(*points, at=16))


def test_that_regions_train_on_is_in_the_measurement() -> None:
    table = MeasuredLoss.of(profile((1, None, exactly(0.01))))
    assert table.loss(1, None, trains_on=True) == table.loss(1, None, trains_on=False)
    assumed = AssumedLoss()
    assert assumed.loss(1, None, trains_on=True) > assumed.loss(1, None, trains_on=False)
    assert table.is_measured and not assumed.is_measured


# ------------------------------------------------------------------ files and tasks


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = profile((1, None, exactly(0.0)), (16, None, [None, 2.0]), (1, "int8", exactly(0.1)))
    save_profile(written, tmp_path / "loss" / "x.json")
    assert load_loss_profile(tmp_path / "loss" / "x.json") == written
    assert written.spent_s == 3.0


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"version": 2}, "version"),
        ({"plain": (1.0, 2.0, 3.0)}, "2 seeds"),
        ({"points": ()}, "no interval without codec"),
        ({"seeds": (1,)}, "seeds"),
        ({"seeds": (1, 1)}, "duplicate in"),
        ({"plain": (0.0, 1.0)}, "plain"),
        ({"plain": (-1.0, 1.0)}, "plain"),
        ({"plain": (1e-308, 1.0)}, "plain"),
        ({"plain": (1e308, 1.0)}, "plain"),
        ({"points": (point(1, None, (0.0, 1.0)),)}, "losses"),
        ({"points": (point(1, None, (1e308, 1.0)),)}, "losses"),
        ({"points": (point(1, None), point(1, None))}, "interval 1, codec None is duplicated"),
        ({"points": (point(1, None), point(1, "zip"))}, "plans do not support codec zip"),
        ({"points": (point(2, None), point(1, "int8"))}, "codecs_at .*1 steps without codec"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(changed, words, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    save_profile(profile((1, None, exactly(0.0))).model_copy(update=changed), path)
    with pytest.raises(ProfileError, match=words) as told:
        load_loss_profile(path)
    assert "`geo-ray profile CONFIG --loss --fresh`" in told.value.fix


@pytest.mark.parametrize(
    "other, words",
    [
        ({"model": MODEL.model_copy(update={"task": "bytelm"})}, "the task is bytelm, not digits"),
        ({"model": MODEL.model_copy(update={"source": "s"})}, "the task's file has changed"),
        ({"strategy": "sma"}, "the strategy is sma, not diloco"),
        ({"regions": ("a", "c")}, "the regions are a, c"),
        ({"data": "e"}, "the data differ"),
    ],
)
def test_a_measurement_of_another_task_is_refused(other, words) -> None:
    with pytest.raises(OtherModelError, match=words):
        profile().check_subject(SUBJECT.model_copy(update=other))


def test_variants_of_the_task_are_reported() -> None:
    larger = SUBJECT.model_copy(
        update={"model": MODEL.model_copy(update={"num_params": 9}), "settings": {"optimizer": "y"}}
    )
    profile().check_subject(larger)
    assert SUBJECT.varies(larger) == ["task.options", "optimizer"]
    assert SUBJECT.varies(SUBJECT) == []
