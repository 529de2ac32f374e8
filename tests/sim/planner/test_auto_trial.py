"""`strategy: auto` tries its choice, and excludes strategies that do not train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from geo_ray.api import auto
from geo_ray.api.auto import ChoiceTrial, load_experiment
from geo_ray.base.load import load_text
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.advisor import Choice
from geo_ray.transport.links import LinkRecord, LinkTable

TEXT = """
name: uneven
task: {use: digits, options: {width: 4}}
data: {generate: {rows_per_shard: 256}, batch_size: 16}
regions: [{name: us}, {name: eu}, {name: asia}]
strategy: {kind: auto}
optimizer: {kind: momentum, lr: 0.05}
train: {steps: 160}
emulate:
  link: {rate_mbps: 5, delay_s: 0.05}
  step_s_by_region: {us: 0.08, eu: 0.08, asia: 0.32}
"""


def test_momentum_in_regions_and_averager_is_not_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both together ended at chance level, with a predicted loss of 1.9 %."""
    (tmp_path / "auto.yaml").write_text(TEXT)
    experiment, advice = load_experiment(tmp_path / "auto.yaml", [])
    assert advice is not None and experiment.strategy.kind == advice.choice.family
    assert experiment.strategy.traits.exchange.interval == advice.choice.interval > 1
    assert experiment.strategy.traits.averager.plain_outer is None
    assert "simulated steps of it bring the training loss from 2.3" in advice.reason
    steps = 4 * advice.choice.interval  # changes are applied as they are: a short trial tells
    assert f" {steps} simulated steps of it" in advice.reason
    monkeypatch.delattr(auto, "World")  # the same configuration is not simulated again
    _, again = load_experiment(tmp_path / "auto.yaml", ["name=other"])
    assert again == advice


def test_a_choice_that_does_not_train_is_vetoed(tmp_path: Path) -> None:
    plain = load_text(TEXT, ["strategy={kind: bsp}"], Experiment, "test")
    trial, choice = (
        ChoiceTrial(plain, tmp_path),
        Choice("async_local_sgd", 16, None, 0.9, 0.1, 0.019),
    )
    for outer, is_good in (({}, False), ({"lr": 1.0, "momentum": 0.0}, True)):
        strategy = json.dumps({"kind": "async_local_sgd", "interval": 16, "outer": outer})
        tried = load_text(TEXT, [f"strategy={strategy}"], Experiment, "test")
        found, note = trial.run(tried, choice)
        assert found == is_good
        assert ("was tried and rejected" in note) == (not is_good)


def test_what_is_not_tried_says_why(tmp_path: Path) -> None:
    long = "train.steps=1000000"
    wide = "task.options={width: 128}"
    choice = Choice("diloco", 512, None, 0.9, 0.1, 0.05)
    plain = load_text(TEXT, ["strategy={kind: bsp}", long, wide], Experiment, "test")
    assert ChoiceTrial(plain, tmp_path).run(plain, choice) == (
        True, "It was not tried in a simulation, because that would take long for this model.",
    )  # fmt: skip


def test_a_task_that_was_edited_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("from geo_ray.data.tasks.digits import Digits\n")
    text = TEXT.replace("use: digits", "use: 'task.py:Digits'")
    experiment = load_text(text, ["strategy={kind: bsp}"], Experiment, "test")
    before = auto._digest(experiment, tmp_path)
    assert auto._digest(experiment, tmp_path) == before
    (tmp_path / "task.py").write_text("from geo_ray.data.tasks.digits import Digits  # edited\n")
    assert auto._digest(experiment, tmp_path) != before


def test_groups_with_a_fast_link_average_after_each_step(tmp_path: Path) -> None:
    """They exchange no gradients, so that `bsp` would be refused."""
    link = LinkRecord(
        src="us", dst="eu", goodput_mbps=1e5, rtt_s=1e-4, samples=1, measured_at_unix_s=0
    )
    back = link.model_copy(update={"src": "eu", "dst": "us"})
    (tmp_path / "links.json").write_text(LinkTable(links=(link, back)).model_dump_json())
    (tmp_path / "auto.yaml").write_text(TEXT[: TEXT.index("emulate")])
    groups = "regions=[{name: us, group: {nodes: 1}}, {name: eu, group: {nodes: 1}}]"
    wanted = "strategy={kind: auto, step_s: 1, links: links.json}"
    experiment, advice = load_experiment(tmp_path / "auto.yaml", [groups, wanted])
    assert advice is not None and "sma with 1 steps per exchange" in advice.reason
    assert experiment.strategy.kind == "sma"
    assert experiment.strategy.traits.exchange.interval == 1
