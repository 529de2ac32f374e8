"""Measuring a loss goes on with what an earlier measurement of the very same has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from geo_ray.base.errors import ProfileError
from geo_ray.base.load import load_text
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.loss import LossProfile, load_loss_profile
from geo_ray.planner.plan import ModelId
from geo_ray.runs.planning import subject_of
from geo_ray.sweep.loss import (
    LossCases,
    LossTask,
    LossWanted,
    codecs_held_at,
    gathered,
    label_of,
    loss_cases,
    opened,
    still_to_do,
)
from geo_ray.sweep.trial import Outcome, failed_outcome

TEXT = """
name: trial
task: {use: digits}
data: {generate: {}, batch_size: 16}
regions: [{name: eu}, {name: us}]
strategy: {kind: sma, interval: 4}
optimizer: {kind: sgd}
train: {steps: 100}
"""
HERE = Path()


def task(steps: int = 40, seeds: tuple[int, ...] = (0, 1), *overrides: str) -> LossTask:
    experiment = load_text(TEXT, list(overrides), Experiment, "trial.yaml")
    cases = loss_cases(experiment, HERE, LossWanted(steps, (1, 4), (None, "int8")))
    model = ModelId(task="digits", num_params=1)
    return LossTask(cases, subject_of(experiment, HERE, model), HERE, steps, seeds, 2)


def cases(intervals: tuple[int, ...], codecs_at: int | None = None) -> LossCases:
    experiment = load_text(TEXT, [], Experiment, "trial.yaml")
    return loss_cases(experiment, HERE, LossWanted(40, intervals, (None, "int8"), codecs_at))


def outcomes(wanted: LossTask, known: LossProfile | None = None) -> list[Outcome]:
    """Of what is to do, last case first: each ends with a loss of its own."""
    found: list[Outcome] = []
    for case in reversed(still_to_do(wanted, known)):
        failed = failed_outcome(label_of(case.key), 1.0, case.experiment, "")
        for seed in wanted.seeds:
            loss = 2.0 + len(found) / 100
            changes = {"seed": seed, "failed": None, "eval": {"loss": loss}}
            found.append(failed.model_copy(update=changes))
    return found


def whole(wanted: LossTask, known: LossProfile | None = None) -> list[LossProfile]:
    return list(gathered(wanted, known, outcomes(wanted, known)))


def test_nothing_is_told_before_there_is_something_to_compare_with() -> None:
    assert [outcome.label for outcome in outcomes(task())][-2:] == ["plain training"] * 2
    (found,) = whole(task())
    assert [point.key for point in found.points] == [(1, None), (4, None), (4, "int8")]
    assert found.plain == (2.06, 2.07)


def test_what_is_known_is_not_run_again() -> None:
    (known,) = whole(task())
    less = known.model_copy(update={"points": known.points[:1]})
    labels = {outcome.label for outcome in outcomes(task(), less)}
    assert labels == {"every 4 steps, no codec", "every 4 steps, int8"}
    (last,) = whole(task(), less)  # a codec is of no use before what it is compared with
    assert [point.key for point in last.points] == [(1, None), (4, None), (4, "int8")]
    assert last.plain == known.plain and last.points[0] == known.points[0]
    assert still_to_do(task(), known) == [] and whole(task(), known) == []


@pytest.mark.parametrize(
    "other",
    [task(steps=60), task(40, (0, 1, 2)), task(40, (0, 1), "optimizer.lr=0.5")],
    ids=["steps", "seeds", "settings"],
)
def test_a_measurement_of_something_else_is_not_gone_on_with(other: LossTask) -> None:
    (known,) = whole(task())
    assert len(still_to_do(other, known)) == 4


def test_a_run_that_failed_has_diverged_and_a_task_without_a_loss_is_refused() -> None:
    ended = outcomes(task())
    failed = [ended[0].model_copy(update={"failed": "nan"}), *ended[1:]]
    (found,) = gathered(task(), None, failed)
    assert found.points[2].losses[0] is None
    (found,) = gathered(
        task(), None, [ended[0].model_copy(update={"eval": {"loss": None}}), *ended[1:]]
    )
    assert found.points[2].losses[0] is None
    (found,) = gathered(
        task(), None, [ended[0].model_copy(update={"eval": {"loss": 1e60}}), *ended[1:]]
    )
    assert found.points[2].losses[0] is None
    with pytest.raises(ProfileError, match="no metric 'loss'; it has accuracy"):
        list(gathered(task(), None, [ended[0].model_copy(update={"eval": {"accuracy": 0.5}})]))


def test_other_intervals_go_on_with_the_codecs_that_are_measured() -> None:
    wanted = task()
    (known,) = whole(wanted)
    shorter = replace(wanted, cases=cases((1,)))
    assert shorter.cases.codecs_at == 1 and known.codecs_at == 4
    assert codecs_held_at(shorter, known) == 4
    there = replace(wanted, cases=cases((1,), 4))
    assert still_to_do(there, known) == [], "int8 every 4 steps is known"
    # Without codecs nothing keeps them from being measured elsewhere.
    bare = known.model_copy(update={"points": known.points[:2]})
    assert codecs_held_at(shorter, bare) is None
    (grown,) = whole(shorter, bare)
    assert [point.key for point in grown.points] == [(1, None), (4, None), (1, "int8")]
    assert grown.codecs_at == 1 and codecs_held_at(task(steps=60), known) is None


def test_a_way_to_exchange_must_end_with_a_positive_loss() -> None:
    (known,) = whole(task())
    less = known.model_copy(update={"points": known.points[:2]})
    ended = [o.model_copy(update={"eval": {"loss": -0.1}}) for o in outcomes(task(), less)]
    with pytest.raises(ProfileError, match="'every 4 steps, int8' ended with a loss of 0 or less"):
        list(gathered(task(), less, ended))


def test_a_measurement_of_something_else_is_replaced_when_it_is_complete(tmp_path: Path) -> None:
    path, longer = tmp_path / "loss.json", task(steps=60)
    (known,) = whole(task())
    first = opened(path, task(), fresh=False)
    first.keep(known)
    first.finish()
    assert opened(path, task(), fresh=False).known == known
    (other,) = whole(longer)
    half = other.model_copy(update={"points": other.points[:1]})
    second = opened(path, longer, fresh=False)
    assert second.known is None
    second.keep(half)
    assert load_loss_profile(path) == known, "what was there is there until there is more"
    third = opened(path, longer, fresh=False)
    assert third.known == half
    assert opened(path, longer, fresh=False).known == half, "looking changes nothing"
    third.keep(other)
    third.finish()
    assert load_loss_profile(path) == other and list(tmp_path.iterdir()) == [path]


def test_a_fresh_measurement_too_and_a_broken_file_is_left_for_it(tmp_path: Path) -> None:
    path = tmp_path / "loss.json"
    path.write_text("{}")
    with pytest.raises(ProfileError, match="not valid") as told:
        opened(path, task(), fresh=False)
    assert "geo-ray profile CONFIG --loss --fresh" in told.value.fix
    (known,) = whole(task())
    file = opened(path, task(), fresh=True)
    file.keep(known)
    assert file.known is None and path.read_text() == "{}"
    file.finish()
    assert load_loss_profile(path) == known
    path.with_name("loss.json.partial").write_text("{}")
    assert opened(path, task(steps=60), fresh=False).known is None


def test_plain_training_must_end_with_a_loss() -> None:
    ended = [o.model_copy(update={"eval": {"loss": 0.0}}) for o in outcomes(task())]
    with pytest.raises(ProfileError, match="there is no baseline"):
        list(gathered(task(), None, ended))
