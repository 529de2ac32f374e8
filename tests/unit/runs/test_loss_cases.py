"""Which runs measure a loss: intervals, codecs, plain training, and what is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from geo_ray.base.errors import ConfigError, ProfileError
from geo_ray.base.load import load_text
from geo_ray.codecs.registry import CODECS
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.loss import BITS_PER_PARAM
from geo_ray.sweep.loss import LossCases, LossWanted, loss_cases, with_seed

HERE = Path()
TEXT = """
name: trial
task: {use: digits}
data: {generate: {}, batch_size: 16}
regions: [{name: eu, workers: 2}, {name: us}]
strategy: {kind: diloco, interval: 32, compute_fraction: 0.8}
optimizer: {kind: adamw, schedule: {warmup_steps: 100, steps: 800}}
train: {steps: 1000, eval_every: 10, target: {metric: accuracy, value: 0.9, direction: at_least}}
averager: {standby: us}
"""


def trial(*overrides: str) -> Experiment:
    return load_text(TEXT, list(overrides), Experiment, "trial.yaml")


def cases(*overrides: str, steps: int = 200, intervals=None, codecs=None) -> LossCases:
    return loss_cases(trial(*overrides), HERE, LossWanted(steps, intervals, codecs))


def keys(found: LossCases) -> list[object]:
    return [case.key for case in found.all]


def test_by_default_usual_intervals_without_codec_then_codecs_at_the_configured_one():
    found = cases()
    intervals = [(h, None) for h in (1, 4, 16, 32, 64)]
    codecs = [(32, codec) for codec in BITS_PER_PARAM if codec is not None]
    assert keys(found) == [None, *intervals, *codecs]
    assert (found.codecs_at, found.left_out, found.steps) == (32, (), 200)
    for case in found.all[1:]:
        strategy = case.experiment.strategy
        assert strategy.interval == case.key[0] and strategy.compute_fraction is None
        up = case.experiment.codec.up
        assert (None if up is None else up.kind) == case.key[1]


def test_what_does_not_change_the_loss_is_left_away_and_schedules_are_shorter():
    for case in cases().all:
        train, schedule = case.experiment.train, case.experiment.optimizer.schedule
        assert (train.steps, train.eval_every, train.target) == (200, 0, None)
        assert (schedule.warmup_steps, schedule.steps) == (20, 160)
        assert case.experiment.checkpoint.every_s is None
        assert case.experiment.averager.standby is None


def test_plain_training_is_bsp_over_as_many_rows():
    plain = cases("codec={up: {kind: int8}}").all[0].experiment
    assert plain.strategy.kind == "bsp" and plain.codec.up is None and plain.train.steps == 200
    by_workers = cases("strategy={kind: halos, local_steps: 4}", "averager={}", steps=203)
    assert by_workers.all[0].experiment.train.steps == by_workers.steps == 200
    for case in by_workers.all[1:]:
        assert case.experiment.train.steps * 4 == by_workers.steps
        assert case.experiment.strategy.interval * 4 == case.key[0]
    assert {h for h, _ in keys(by_workers)[1:]} == {4, 16, 64}


def test_short_rounds_have_no_outer_momentum_as_in_runs_that_follow_plans():
    outer = {case.key[0]: case.experiment.strategy.outer.kind for case in cases().all[1:]}
    assert outer == {1: "sgd", 4: "sgd", 16: "nesterov", 32: "nesterov", 64: "nesterov"}


def test_intervals_of_which_not_two_fit_are_left_out_and_codecs_go_lower():
    found = cases(steps=40)
    assert [h for h, codec in keys(found)[1:] if codec is None] == [1, 4, 16]
    assert found.codecs_at == 16
    assert len(found.left_out) == 2 and "40 steps contain fewer than 2" in found.left_out[0]


def test_intervals_and_codecs_of_the_plan_or_of_the_user():
    offer = "{cloud: aws, at: us-east-1, machines: []}"
    plan = f"plan={{regions: {{eu: {offer}, us: {offer}}}, intervals: [8], codecs: [null, int4]}}"
    assert keys(cases(plan)) == [None, (8, None), (32, None), (32, "int4")]
    named = cases(plan, intervals=(2, 6), codecs=("fp16",))
    assert keys(named) == [None, (2, None), (6, None), (6, "fp16")]


def test_a_codec_for_updates_alone_has_its_answers_whole():
    found = {case.key: case.experiment.codec for case in cases().all}
    assert not CODECS["chunked_topk"]().traits.suits_answers
    codec = found[32, "chunked_topk"]
    assert codec.up.kind == "chunked_topk" and codec.down is None
    assert found[32, "int8"].down.kind == "int8"


def test_the_configured_codec_keeps_its_options():
    found = {
        case.key: case.experiment.codec for case in cases("codec={up: {kind: int8, block: 64}}").all
    }
    assert found[32, "int8"].up.block == 64 and found[32, "int8"].down is None
    assert found[32, None].up is None


def test_intervals_that_the_other_options_do_not_allow_are_left_out_by_name():
    found = cases("strategy={kind: diloco_streaming, interval: 16, fragments: 2, tau: 3}")
    measured = [h for h, codec in keys(found)[1:] if codec is None]
    assert 1 not in measured and 16 in measured
    assert any(text.startswith("an interval of 1 steps: ") for text in found.left_out)


def test_a_strategy_without_an_interval_has_one():
    found = cases("strategy={kind: bsp}", "averager={}", codecs=("int8",))
    assert keys(found) == [None, (1, None), (1, "int8")]


@pytest.mark.parametrize("kind", ["fedavg", "esync", "nbsync", "fedat", "fedgsync"])
def test_what_cannot_be_planned_is_refused_before_anything_runs(kind: str):
    with pytest.raises(ConfigError, match=f"strategy {kind} cannot be planned"):
        cases(f"strategy={{kind: {kind}}}", "averager={}")


def test_what_nobody_knows_the_size_of_is_refused():
    with pytest.raises(ConfigError, match="the compression of topk is unknown"):
        cases(codecs=("topk",))
    with pytest.raises(ConfigError, match="codec powersgd cannot be planned"):
        cases("codec={up: {kind: powersgd}}", "averager={}")


def test_with_one_region_there_is_nothing_to_measure():
    with pytest.raises(ConfigError, match="a single region"):
        cases("regions=[{name: eu}]", "averager={}")


def test_too_few_steps_for_any_interval_are_refused():
    with pytest.raises(ProfileError, match="no interval could be measured over 5 steps"):
        cases(steps=5, intervals=(16, 32))
    with pytest.raises(
        ProfileError, match=r"an interval of 16 steps: 20 steps contain fewer than 2"
    ):
        cases(steps=20, intervals=(16,))


def test_intervals_for_a_strategy_without_them_are_refused():
    with pytest.raises(ConfigError, match="strategy bsp has no option `interval`"):
        cases("strategy={kind: bsp}", intervals=(1, 4))


def test_runs_of_a_case_differ_in_their_seed_and_place_only():
    case = cases().all[1]
    runs = [with_seed(case.experiment, HERE, seed, HERE / "x") for seed in (3, 4)]
    assert [run.seed for run in runs] == [3, 4]
    alike = [run.model_dump(exclude={"seed"}) for run in runs]
    assert alike[0] == alike[1] and runs[0].run.dir == "x"
