"""The best evaluated model as a file: written whole, found again, never replaced by a worse one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from geo_ray.base.errors import ConfigError, RunDirectoryError
from geo_ray.data.tasks.ctr import Ctr
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.build import initial_parameters
from geo_ray.runs.directory import RunDirectory
from geo_ray.runs.evaluation import (
    BestKeeper,
    EvalCollector,
    EvalNotes,
    Evaluation,
    load_best,
    regions_agree,
)
from geo_ray.runs.model_file import load_trained
from geo_ray.runs.start_checks import check_evaluation
from geo_ray.telemetry.events import Event, conform
from geo_ray.training.messages import no_buffers
from geo_ray.training.parameters import read_parameters
from tests.support.job_support import digits, experiment

TASK = digits()
KEEP = "train.keep_best={metric: accuracy, mode: max}"
TOGETHER = (KEEP, "strategy={kind: bsp}", "train.eval_every=2")
APART = (KEEP, "strategy={kind: asgd_ga}", "train.eval_every=2")


def keeper_of(path: Path, *overrides: str) -> BestKeeper:
    keeper = BestKeeper.of(experiment(*overrides), TASK, RunDirectory(path, path))
    assert keeper is not None
    return keeper


def model(value: float) -> torch.Tensor:
    return torch.full_like(initial_parameters(TASK, 0), value)


def note(keeper: BestKeeper, region: str, step: int, value: float) -> str | None:
    return keeper.candidates.note(region, step, model(value), no_buffers(), False)


def evaluation(
    step: int, accuracy: float, region: str | None = None, *, one_model: bool = True
) -> Evaluation:
    names = ("eu", "us") if region is None else (region,)
    metrics = {"accuracy": accuracy, "loss": 1.0}
    return Evaluation(
        step, region, metrics, 10, one_model=one_model, steps=dict.fromkeys(names, step)
    )


def kept(path: Path) -> float:
    """The value of all parameters in the file."""
    found_P = read_parameters(load_trained(TASK, 0, path / "model-best.safetensors"))
    assert torch.equal(found_P, torch.full_like(found_P, found_P[0].item()))
    return found_P[0].item()


def left(keeper: BestKeeper) -> list[str]:
    return sorted(path.name for path in keeper.candidates.directory.iterdir())


def test_where_regions_agree_the_evaluation_of_all_counts(tmp_path: Path) -> None:
    keeper = keeper_of(tmp_path, *TOGETHER)
    model = note(keeper, "eu", 2, 0.5)
    assert model is not None and model == note(keeper, "us", 2, 0.5)
    assert left(keeper) == ["eu-2.safetensors"], "only the averager's region's are wanted"
    assert keeper.consider(evaluation(2, 0.9, "eu"), "eu") is None
    best = keeper.consider(evaluation(2, 0.7), "eu")
    assert best == keeper.best == load_best(tmp_path / "model-best.safetensors")
    assert (best.value, best.step, best.region, kept(tmp_path)) == (0.7, 2, None, 0.5)
    assert left(keeper) == []


def test_regions_that_should_agree_and_do_not_have_no_best_model(tmp_path: Path) -> None:
    keeper = keeper_of(tmp_path, *TOGETHER)
    collector = EvalCollector(TASK, 2)
    columns = {name: rows[:10] for name, rows in TASK.dataset(0).heldout.items()}
    stats = TASK.evaluate(TASK.model(0), TASK.collate(columns, torch.device("cpu")))
    for step, other, agree in ((2, 0.25, False), (4, 0.5, True)):
        done = collector.add("eu", step, stats, 10, model=note(keeper, "eu", step, 0.5))
        done += collector.add("us", step, stats, 10, model=note(keeper, "us", step, other))
        assert [d.one_model for d in done] == [True, True, agree]
        assert [keeper.consider(d, "eu") is not None for d in done] == [False, False, agree]
        assert left(keeper) == []


def test_where_regions_differ_the_averagers_own_counts(tmp_path: Path) -> None:
    keeper = keeper_of(tmp_path, *APART)
    assert note(keeper, "eu", 2, 0.25) is None and note(keeper, "us", 2, 0.5) is None
    assert keeper.consider(evaluation(2, 0.9, "us"), "eu") is None
    best = keeper.consider(evaluation(2, 0.4, "eu"), "eu")
    assert (best.value, best.region, kept(tmp_path)) == (0.4, "eu", 0.25)
    assert keeper.consider(evaluation(2, 0.99), "eu") is None, "of no single model"


def test_after_a_failover_the_standbys_own_counts(tmp_path: Path) -> None:
    keeper = keeper_of(tmp_path, *APART, "averager.standby=us")
    for region, value in (("eu", 0.25), ("us", 0.5)):
        note(keeper, region, 2, value)
    assert left(keeper) == ["eu-2.safetensors", "us-2.safetensors"]
    best = keeper.consider(evaluation(2, 0.4, "us"), "us")
    assert (best.region, kept(tmp_path)) == ("us", 0.5)


def test_worse_and_equal_ones_leave_the_file_alone(tmp_path: Path) -> None:
    keeper = keeper_of(tmp_path, *TOGETHER)
    for step, accuracy in ((2, 0.5), (4, 0.7), (6, 0.7), (8, 0.6), (10, float("nan"))):
        note(keeper, "eu", step, float(step))
        keeper.consider(evaluation(step, accuracy), "eu")
    assert (keeper.best.step, kept(tmp_path)) == (4, 4.0)
    assert left(keeper) == []


def test_a_resumed_run_keeps_the_better_model_of_before(tmp_path: Path) -> None:
    first = keeper_of(tmp_path, *TOGETHER)
    note(first, "eu", 8, 8.0)
    first.consider(evaluation(8, 0.8), "eu")
    note(first, "eu", 10, 10.0)  # and then its process was killed
    again = keeper_of(tmp_path, *TOGETHER)
    assert again.best == first.best and left(again) == []
    note(again, "eu", 6, 6.0)  # from a checkpoint that is older than the best model
    assert again.consider(evaluation(6, 0.7), "eu") is None and kept(tmp_path) == 8.0
    note(again, "eu", 12, 12.0)
    assert again.consider(evaluation(12, 0.81), "eu") is not None and kept(tmp_path) == 12.0


def test_a_resumed_run_with_another_rule_begins_anew(tmp_path: Path) -> None:
    first = keeper_of(tmp_path, *TOGETHER)
    note(first, "eu", 8, 8.0)
    first.consider(evaluation(8, 0.8), "eu")
    again = keeper_of(
        tmp_path, *TOGETHER, "train.keep_best.metric=loss", "train.keep_best.mode=min"
    )
    assert again.best is None and kept(tmp_path) == 8.0
    note(again, "eu", 10, 10.0)
    assert again.consider(evaluation(10, 0.1), "eu").metric == "loss"


@pytest.mark.parametrize("damage", ["nothing in it", "another file"])
def test_a_file_that_says_nothing_does_not_count(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model-best.safetensors"
    path.write_bytes(b"" if damage == "nothing in it" else b"\x02\0\0\0\0\0\0\0{}")
    assert load_best(path) is None and "is ignored" in caplog.text


def test_parameters_that_are_missing_are_told_and_the_run_goes_on(tmp_path: Path) -> None:
    keeper = keeper_of(tmp_path, *TOGETHER)
    note(keeper, "eu", 2, 2.0)
    events: list[Event] = []

    def emit(kind: str, t_s: float, **fields: object) -> Event:
        events.append(conform(kind, t_s, fields))
        return events[-1]

    notes = EvalNotes(EvalCollector(TASK, 2), emit, None, keeper)
    notes.take([evaluation(2, 0.5)], 1.0, "eu")
    notes.take([evaluation(4, 0.6)], 2.0, "eu")
    assert [event.kind for event in events] == ["eval", "best_kept", "eval", "best_failed"]
    assert "step 4" in events[-1]["cause"] and "run.dir" not in events[-1]["cause"]
    assert keeper.best.step == 2 and kept(tmp_path) == 2.0
    note(keeper, "eu", 6, 6.0)
    notes.take([evaluation(6, 0.55)], 3.0, "eu")
    assert kept(tmp_path) == 6.0, "better than what there is"


def test_who_watches_the_run_writes_no_model(tmp_path: Path) -> None:
    """Evaluations are taken while a model is still being written; outcomes come in their order."""
    keeper = keeper_of(tmp_path, *TOGETHER)
    for step in (2, 4):
        note(keeper, "eu", step, float(step))
    events: list[Event] = []
    may_write, writers = threading.Event(), set()

    class Slow:
        candidates, best, check = keeper.candidates, None, keeper.check

        def consider(self, done, leader):
            may_write.wait()
            writers.add(threading.current_thread().name)
            return keeper.consider(done, leader)

    def emit(kind: str, t_s: float, **fields: object) -> Event:
        events.append(conform(kind, t_s, fields))
        return events[-1]

    with ThreadPoolExecutor(1, "writer") as executor:
        notes = EvalNotes(EvalCollector(TASK, 2), emit, None, Slow(), executor)
        for step, value in ((2, 0.5), (4, 0.6), (6, 0.7)):
            notes.take([evaluation(step, value)], float(step), "eu")
        assert [event.kind for event in events] == ["eval"] * 3
        may_write.set()
        notes.end(lambda: 8.0)  # also of a run that ends by an error: nobody else settles
    assert [event.kind for event in events[3:]] == ["best_kept", "best_kept", "best_failed"]
    assert [(event["step"], event.t_s) for event in events[3:]] == [(2, 8.0), (4, 8.0), (6, 8.0)]
    assert writers == {"writer_0"} and kept(tmp_path) == 4.0


def test_a_full_disk_ends_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keeper = keeper_of(tmp_path, *TOGETHER)
    keeper.candidates.directory.rmdir()
    assert note(keeper, "eu", 2, 2.0) is not None and "cannot be written" in caplog.text
    with pytest.raises(RunDirectoryError, match="evaluated at step 2"):
        keeper.candidates.take("eu", 2, final=False)


def test_an_unknown_metric_is_refused(tmp_path: Path) -> None:
    keeper = keeper_of(tmp_path, *TOGETHER, "train.keep_best.metric=acuracy")
    with pytest.raises(ConfigError, match=r"train\.keep_best\.metric: .*'acuracy'") as caught:
        keeper.consider(evaluation(2, 0.5), "eu")
    assert "accuracy or loss" in caught.value.fix


@pytest.mark.parametrize("key", ["target", "keep_best"])
def test_an_unknown_metric_of_own_data_is_refused_at_the_start(tmp_path: Path, key: str) -> None:
    from geo_ray.runs.data import prepare_manifest

    asked = {
        "target": "train.target={metric: acuracy, value: 1.0, direction: at_least}",
        "keep_best": "train.keep_best={metric: acuracy, mode: max}",
    }
    config = experiment(asked[key])
    manifest, address = prepare_manifest(config, TASK, tmp_path, tmp_path / "data")
    before = torch.random.get_rng_state()
    with pytest.raises(ConfigError, match=rf"train\.{key}\.metric"):
        check_evaluation(config, TASK, manifest)
    assert torch.equal(before, torch.random.get_rng_state())
    check_evaluation(experiment(KEEP), TASK, manifest)
    elsewhere = experiment(asked[key], f"data={{manifest: {address}}}")
    check_evaluation(elsewhere, TASK, manifest)  # its rows are read in their region only


@pytest.mark.parametrize("metric", ["auc", "acu"])
def test_a_metric_that_few_rows_do_not_have_is_looked_for_in_more(
    tmp_path: Path, metric: str
) -> None:
    from geo_ray.runs.data import prepare_manifest

    config = experiment(
        "task={use: ctr, options: {rows: 2000, hidden: 4}}",
        f"train.target={{metric: {metric}, value: 1.0, direction: at_least}}",
    )
    task = Ctr(Ctr.Options(rows=2000, hidden=4))
    manifest, _ = prepare_manifest(config, task, tmp_path, tmp_path / "data")
    if metric == "auc":  # one row has one label, and no AUC
        check_evaluation(config, task, manifest)
    else:
        with pytest.raises(ConfigError, match="'acu'") as caught:
            check_evaluation(config, task, manifest)
        assert "auc" in caught.value.fix


def test_without_evaluations_there_is_no_best() -> None:
    with pytest.raises(ConfigError, match=r"train\.keep_best.*train\.eval_every"):
        experiment(KEEP, "train.eval_every=0")


def agree(*overrides: str) -> bool:
    config: Experiment = experiment(*overrides)
    return regions_agree(config)


def test_when_regions_agree() -> None:
    assert agree("strategy={kind: bsp}")
    assert agree("strategy={kind: sma, interval: 5}", "train.eval_every=10")
    assert not agree("strategy={kind: sma, interval: 4}", "train.eval_every=10"), "in mid-round"
    assert agree("strategy={kind: diloco, interval: 4}", "train.eval_every=10")
    assert not agree(
        "strategy={kind: diloco, interval: 4}", "train.eval_every=10", "train.evaluate=live"
    )
    assert not agree("strategy={kind: asgd_ga}")
    assert not agree("strategy={kind: bsp}", "train.count=total")
    assert agree("strategy={kind: asgd_ga}", "regions=[{name: eu, workers: 2}]"), "one is enough"
    assert not agree("strategy={kind: bsp}", "train.mode=async", "regions=[{name: eu}, {name: us}]")
