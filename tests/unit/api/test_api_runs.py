"""`geo_ray.simulate` and the run that it gives."""

from __future__ import annotations

import json
import logging
import threading
import traceback
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import geo_ray
from geo_ray.base import errors

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
SMALL = {"train.steps": 12, "train.eval_every": 6, "task.options": {"width": 2}}


@pytest.fixture(scope="module")
def seen() -> list[geo_ray.Event]:
    return []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, seen: list[geo_ray.Event]) -> geo_ray.Run:
    changes = SMALL | {"run.dir": tmp_path_factory.mktemp("runs")}
    threads = torch.get_num_threads()
    done = geo_ray.simulate(QUICKSTART, changes, on_event=seen.append)
    assert torch.get_num_threads() == threads
    return done


def test_a_run_is_a_value(run: geo_ray.Run, seen: list[geo_ray.Event]) -> None:
    assert run.summary.steps == 12 and run.finished
    assert run.events() == tuple(seen)
    assert {event.kind for event in run.events("step")} == {"step"}
    with pytest.raises(errors.ConfigError, match="'evall'; did you mean 'eval'"):
        run.events("evall")
    assert geo_ray.open_run(str(run.path)) == run
    assert repr(run).startswith("<Run quickstart: sma, 12 steps in ")
    assert "accuracy" in repr(run) and "between regions" in repr(run)
    assert run.checkpoints == ()
    assert run.report_path == run.path / "report.html" and run.report_path.exists()


def test_metrics_are_tables(run: geo_ray.Run) -> None:
    loss = run.metrics("loss")
    assert loss.column_names == ["step", "time_s", "region", "value", "wan_bytes"]
    assert loss.num_rows == 3 * 12
    assert loss["time_s"] == sorted(loss["time_s"])
    accuracy = [row for row in run.metrics("accuracy").to_pylist() if row["region"] is None]
    assert [row["step"] for row in accuracy] == [6, 12]
    assert accuracy[-1]["value"] == run.summary.eval["accuracy"]
    assert 0 < accuracy[0]["wan_bytes"] < accuracy[-1]["wan_bytes"]
    assert run.metrics("eval.loss") != loss
    assert set(run.metric_names) >= {"loss", "eval.loss", "eval.accuracy"}
    with pytest.raises(errors.ConfigError, match="no metric 'perplexity'") as caught:
        run.metrics("perplexity")
    assert "eval.accuracy" in caught.value.fix


def test_the_table_and_the_notebook_view_have_a_row_per_region(run: geo_ray.Run) -> None:
    rows = run.table().to_pylist()
    assert [row["region"] for row in rows] == ["us-east", "eu-west", "ap-south"]
    assert sum(row["wan_bytes_sent"] for row in rows) == sum(run.summary.wan_bytes.values())
    html = run._repr_html_()
    assert html.count("<tr>") == 4 and "ap-south" in html and "<script" not in html


def test_the_model_is_the_trained_one(run: geo_ray.Run, tmp_path: Path) -> None:
    module = run.model()
    state = module.state_dict()
    with safe_open(run.model_path, "pt") as file:
        about = file.metadata()
        assert set(file.keys()) == set(state)
        assert all(torch.equal(file.get_tensor(name), state[name]) for name in state)
    assert about["task"] == "digits" and json.loads(about["options"]) == {"width": 2}
    assert about["step"] == "12"
    assert json.loads(about["metrics"]) == run.summary.eval
    assert all(parameter.grad is None for parameter in module.parameters())
    exported = torch.load(run.export(tmp_path / "m.pt"), weights_only=True)
    assert all(torch.equal(exported[name], state[name]) for name in state)
    again = run.export(tmp_path / "m.safetensors")
    assert again.read_bytes() == run.model_path.read_bytes(), "the same file, metadata included"
    with pytest.raises(errors.ConfigError, match=r"\.onnx"):
        run.export(tmp_path / "m.onnx")
    with pytest.raises(errors.CheckpointMissingError) as missing:
        run.model(checkpoint=3)
    assert "saved no checkpoint" in missing.value.fix and "--resume" not in missing.value.fix
    with pytest.raises(errors.RunDirectoryError, match="no best model") as caught:
        run.model(best=True)
    assert "train.keep_best" in caught.value.fix
    with pytest.raises(errors.ConfigError):
        run.export(tmp_path / "m.pt", checkpoint=3, best=True)


def test_a_mapping_an_experiment_and_a_file_are_the_same_run(
    run: geo_ray.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    experiment = geo_ray.load_config(QUICKSTART, SMALL)
    for config in (experiment, experiment.model_dump(mode="json")):
        done = geo_ray.simulate(config, ["name=other"])
        assert done.path.parent == tmp_path / "runs"
        assert done.summary.digest == run.summary.digest


def test_relative_paths_in_a_mapping_start_where_they_are_said_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    source = "from geo_ray.data.tasks.digits import Digits\n\n\nclass Mine(Digits):\n    pass\n"
    (tmp_path / "there" / "mine.py").write_text(source)
    experiment = geo_ray.load_config(QUICKSTART, {**SMALL, "task": {"use": "mine.py:Mine"}})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.TaskLoadError, match=r"mine\.py"):
        geo_ray.simulate(experiment)
    changes = {"train.steps": 2}
    geo_ray.simulate(experiment, changes, base_dir=tmp_path / "there")
    monkeypatch.chdir(tmp_path / "there")
    assert geo_ray.simulate(experiment, changes).model() is not None


def test_a_simulation_that_fails_before_its_first_event_leaves_no_directory(
    tmp_path: Path,
) -> None:
    (tmp_path / "broken.py").write_text(
        "from geo_ray.data.tasks.digits import Digits\n\n\nclass Broken(Digits):\n"
        "    def model(self, seed):\n        raise ValueError('no model')\n"
    )
    changes = SMALL | {"run.dir": str(tmp_path / "runs"), "task": {"use": "broken.py:Broken"}}
    with pytest.raises(errors.TaskError, match="no model"):
        geo_ray.simulate(QUICKSTART, changes, base_dir=tmp_path)
    assert not any((tmp_path / "runs").iterdir()), "its name is free"


def test_a_run_that_was_cut_off_can_be_looked_at(run: geo_ray.Run, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    cut.mkdir()
    for name in ("config.lock.yaml", "plan.json"):
        (cut / name).write_bytes((run.path / name).read_bytes())
    with pytest.raises(errors.RunDirectoryError, match="not begun"):
        geo_ray.open_run(cut)
    lines = (run.path / "events.jsonl").read_bytes().splitlines(keepends=True)
    (cut / "events.jsonl").write_bytes(b"".join(lines[:20]))
    found = geo_ray.open_run(cut)
    assert not found.finished and 0 < found.summary.steps < 12
    assert repr(found).endswith("not finished>")
    assert found.report_path.exists()
    with pytest.raises(errors.RunDirectoryError, match="no final model"):
        found.model()


def test_steps_that_were_done_again_count_once(run: geo_ray.Run, tmp_path: Path) -> None:
    twice = tmp_path / "twice"
    twice.mkdir()
    for name in ("config.lock.yaml", "plan.json", "summary.json"):
        (twice / name).write_bytes((run.path / name).read_bytes())
    lines = (run.path / "events.jsonl").read_bytes().splitlines(keepends=True)
    (twice / "events.jsonl").write_bytes(b"".join(lines[:30] + lines))
    assert geo_ray.open_run(twice).metrics("loss").num_rows == 3 * 12


def test_wrong_input_is_the_command_lines_error(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match=r"train\.stepz"):
        geo_ray.load_config(QUICKSTART, {"train.stepz": 1})
    with pytest.raises(errors.ConfigError, match="not a plain value"):
        geo_ray.load_config({"name": object()})
    with pytest.raises(errors.ConfigError, match="is a single string"):
        geo_ray.load_config(QUICKSTART, "train.steps=1")
    with pytest.raises(errors.ConfigError, match="no configuration"):
        geo_ray.train()
    with pytest.raises(errors.RunDirectoryError):
        geo_ray.train(resume=tmp_path)


def test_nothing_is_printed_unless_asked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changes = SMALL | {"run.dir": str(tmp_path), "train.steps": 2}
    geo_ray.simulate(QUICKSTART, changes)
    assert capfd.readouterr() == ("", "")
    geo_ray.simulate(QUICKSTART, changes, progress="plain")
    out, told = capfd.readouterr()
    assert out == "" and "this run is quickstart-2" in told


def test_warnings_are_of_the_logger_that_the_documents_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    late = SMALL | {"train.eval_every": 50, "run.dir": str(tmp_path)}
    geo_ray.simulate(QUICKSTART, late)
    said = [record for record in caplog.records if "beyond train.steps" in record.getMessage()]
    assert len(said) == 1 and said[0].name.startswith("geo_ray.")
    caplog.clear()
    logging.getLogger("geo_ray").setLevel("ERROR")
    try:
        geo_ray.simulate(QUICKSTART, late)
    finally:
        logging.getLogger("geo_ray").setLevel(logging.NOTSET)
    assert not caplog.records


def test_a_run_is_named_by_itself_or_by_its_directory(run: geo_ray.Run, tmp_path: Path) -> None:
    for named in (run, run.path, str(run.path)):
        assert geo_ray.checkpoints(named).num_rows == 0
        assert geo_ray.open_run(named).name == run.name
        assert geo_ray.report(named, tmp_path / "page.html").exists()


def test_an_error_says_once_what_is_wrong(tmp_path: Path) -> None:
    wrong = {"train.target": {"metric": "accurracy", "value": 0.5, "direction": "at_least"}}
    (tmp_path / "text.yaml").write_text("a: b: c")
    for config, changes in (
        (QUICKSTART, {"train.stepz": 5}),
        (QUICKSTART, wrong),  # found when the run's directory is there
        (tmp_path / "text.yaml", {}),
        (QUICKSTART, {"train.steps": object()}),
    ):
        with pytest.raises(errors.ConfigError) as caught:
            geo_ray.simulate(config, SMALL | changes | {"run.dir": str(tmp_path)})
        text = "".join(traceback.format_exception(caught.value))
        assert "above exception" not in text and "During handling" not in text
        assert text.count(caught.value.message.splitlines()[0]) == 1, text


def test_what_a_watcher_raises_ends_the_run(tmp_path: Path) -> None:
    class EnoughError(Exception):
        pass

    def stop(event: geo_ray.Event) -> None:
        if event.kind == "step":
            raise EnoughError

    with pytest.raises(EnoughError):
        geo_ray.simulate(QUICKSTART, SMALL | {"run.dir": str(tmp_path)}, on_event=stop)


def test_a_thread_can_simulate(tmp_path: Path) -> None:
    found: list[geo_ray.Run] = []
    changes = SMALL | {"run.dir": str(tmp_path), "train.steps": 2}
    thread = threading.Thread(
        target=lambda: found.append(geo_ray.simulate(QUICKSTART, changes)), name="notebook"
    )
    thread.start()
    thread.join()
    assert found[0].summary.steps == 2


def test_what_a_callback_does_to_events_is_its_own_affair(run: geo_ray.Run, tmp_path: Path) -> None:
    def spoil(event: geo_ray.Event) -> None:
        for name in event.fields.get("metrics", {}):
            event.fields["metrics"][name] = -1.0

    changes = SMALL | {"run.dir": tmp_path}
    assert geo_ray.simulate(QUICKSTART, changes, on_event=spoil).summary.eval == run.summary.eval
