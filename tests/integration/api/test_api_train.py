"""`geo_ray.train` in a process that is connected to Ray already, and from other threads."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path

import pytest
import ray
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import geo_ray
from geo_ray.api.config import init_project
from geo_ray.base import errors
from geo_ray.base.errors import InterruptedRunError
from geo_ray.cli.main import root
from tests.support.train_support import experiment_of


@pytest.mark.slow  # test_train.py and test_attach.py do the same by the command
@pytest.mark.usefixtures("connected")
def test_train_interrupt_and_resume_in_a_connected_process(tmp_path: Path) -> None:
    """A notebook's life: a run is interrupted, resumed, and its model taken."""
    train = {"steps": 30, "eval_every": 10, "step_timeout_s": 60}
    slow = {"link": {"rate_mbps": 100, "delay_s": 0.01}, "step_s": 0.1}
    seldom = {"every_s": 3600.0}
    experiment = experiment_of(tmp_path, train=train, emulate=slow, checkpoint=seldom)
    handler = signal.getsignal(signal.SIGINT)
    interrupted = []

    def interrupt(event: geo_ray.Event) -> None:
        if event.kind == "step" and event["step"] == 4 and not interrupted:
            interrupted.append(event)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(InterruptedRunError) as caught:
        geo_ray.train(experiment, on_event=interrupt)
    assert "--resume" in caught.value.fix and "tiny" in caught.value.fix
    assert ray.is_initialized(), "the process stays connected"
    assert signal.getsignal(signal.SIGINT) is handler

    stopped = geo_ray.open_run(tmp_path / "runs" / "tiny")
    assert not stopped.finished
    (checkpoint,) = stopped.checkpoints
    id = checkpoint.manifest.id
    saved = stopped.model(id)
    plain = ["export", str(stopped.path), "--from", str(id), "--out", str(tmp_path / "c.pt")]
    assert CliRunner().invoke(root, plain).exit_code == 0
    state = torch.load(tmp_path / "c.pt", weights_only=True)
    assert list(state) == list(saved.state_dict())
    assert all(torch.equal(state[name], value) for name, value in saved.state_dict().items())

    (row,) = geo_ray.checkpoints(stopped.path).to_pylist()
    assert (row["id"], row["state"]) == (id, "healthy") and row["regions"] == "us-east, eu-west"
    listed = CliRunner().invoke(root, ["checkpoints", str(stopped.path)])
    assert listed.exit_code == 0 and "healthy" in listed.output
    with pytest.raises(errors.CheckpointMissingError):
        geo_ray.train(resume=stopped, checkpoint=id + 5)
    with pytest.raises(errors.ConfigError, match="requires a run"):
        geo_ray.train(experiment, checkpoint=id)

    run = geo_ray.train(resume=stopped, checkpoint=id)
    last = geo_ray.checkpoints(run.path).to_pylist()[-1]
    assert last["step"] == 30, "a run saves at its end"
    assert run.path == stopped.path and run.summary.steps == 30
    assert run.metrics("loss").num_rows == 2 * 30
    assert run.report_path.exists() and ray.is_initialized()
    final = run.model()
    assert any(
        not torch.equal(a, b) for a, b in zip(saved.parameters(), final.parameters(), strict=True)
    )
    from_checkpoint = run.export(tmp_path / "c.safetensors", id)
    assert all(
        torch.equal(state[name], value) for name, value in load_file(from_checkpoint).items()
    )
    assert geo_ray.simulate(experiment).summary.digest == run.summary.digest

    with pytest.raises(errors.RunFinishedError, match="is finished after 30 steps"):
        geo_ray.train(resume=run)
    shorter = geo_ray.train(overrides={"train.steps": 29}, resume=run, checkpoint=id)
    assert shorter.summary.steps == 29 and shorter.experiment.train.steps == 29
    kept = load_file(run.path / "model-30.safetensors")
    assert all(torch.equal(final.state_dict()[name], value) for name, value in kept.items())
    written = geo_ray.open_run(run.path)
    assert written.experiment.train.steps == 29, "what was accepted is the run's configuration"


@pytest.mark.usefixtures("connected")
def test_a_connected_process_starts_no_second_cluster(tmp_path: Path) -> None:
    experiment = experiment_of(tmp_path, cluster={"kind": "local"})
    with pytest.raises(errors.ClusterError, match="already connected") as caught:
        geo_ray.train(experiment)
    assert "'existing'" in caught.value.fix
    assert not (tmp_path / "runs" / "tiny").exists(), "its name is free"


@pytest.mark.slow  # a whole run for one line of it
@pytest.mark.usefixtures("connected")
def test_training_in_a_thread_installs_no_handlers(tmp_path: Path) -> None:
    seen, found = [], []

    def watch(event: geo_ray.Event) -> None:
        seen.append(signal.getsignal(signal.SIGINT))

    def work() -> None:
        found.append(geo_ray.train(experiment_of(tmp_path), {"train.steps": 2}, on_event=watch))

    handler = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0].finished and set(seen) == {handler}


@pytest.mark.slow
@pytest.mark.usefixtures("connected")
def test_the_pages_example_of_training_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = next(f for f in init_project(".") if f.name == "quickstart.yaml")
    config.write_text(config.read_text() + "cluster: {kind: existing}\n")
    text = (Path(__file__).parents[3] / "docs" / "guides" / "python.md").read_text()
    (block,) = re.findall(r"^```python\n(run = geo_ray\.train.*?)^```", text, flags=re.M | re.S)
    names: dict[str, object] = {"geo_ray": geo_ray}
    exec(compile(block, "docs/guides/python.md", "exec"), names)
    assert names["again"] == names["run"]
    assert "Event(kind='run_finished'" in capsys.readouterr().out
