"""Whatever a user can get wrong ends in one clear error with its exit code, and leaves nothing."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group_table

from geo_ray.base.errors import NonFiniteError, WorkerLostError
from geo_ray.cli.main import main
from geo_ray.data.manifest import save_manifest
from geo_ray.data.shards import write_shards
from geo_ray.data.split import IidSplit
from geo_ray.data.tasks.digits import Digits
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.connect import ConnectedCluster
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.ray_cluster.process_supervisor import descendants
from geo_ray.runs import directory as rundir
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.telemetry.events import Event
from geo_ray.training.parameters import digest
from tests.support.train_support import (
    books_of,
    events_of,
    experiment_of,
    simulate,
    train,
    write_config,
)

ALONE = [{"name": "us-east"}]

# Digits whose loss calls a hook; `Where` tells what the process is.
HOOKED = """
import os, resource, threading, time
from pathlib import Path
from geo_ray.data.tasks.digits import Digits
from geo_ray.training.parameters import digest

HERE = Path(__file__).parent
TITLE = Path("/proc/self/cmdline").read_bytes()

class Hooked(Digits):
    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        return hook(self.calls, super().loss(model, batch))

"""


def run_command(*arguments: str) -> int:
    """`geo-ray ...` in this process; its exit code."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert not ray.is_initialized()
    return int(str(caught.value.code))


Fails = Callable[..., str]


@pytest.fixture
def fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Fails:
    """`geo-ray train` with an experiment ends with the code; what it says, without progress."""

    def run(experiment: Experiment, exit_code: int, *more: str) -> str:
        config = write_config(tmp_path, experiment)
        assert run_command("train", str(config), "--plain", *more) == exit_code
        said = capsys.readouterr()
        assert said.out == ""
        assert "Traceback" not in said.err
        assert said.err.count("\n  fix: ") == 1
        return said.err

    return run


def hooked(directory: Path, hook: str, **changes: Any) -> Experiment:
    """One region alone, whose worker trains with a hook in the loss."""
    (directory / "task.py").write_text(HOOKED + hook)
    task = {"use": "task.py:Hooked", "options": {"width": 2}}
    emulate = {"step_s": 0.1}
    return experiment_of(directory, task=task, **{"regions": ALONE, "emulate": emulate} | changes)


# ------------------------------------------------------------------ before anything is started


def test_unknown_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, experiment_of(tmp_path))
    assert run_command("train", str(config), "--set", "train.stepz=3") == 2
    said = capsys.readouterr().err
    assert "[CONFIG_INVALID]" in said
    assert "train.stepz" in said and "steps" in said
    assert not (tmp_path / "runs").exists()


def test_neither_config_nor_run() -> None:
    assert run_command("train") == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import nothing_like_this\n", "line 1|task.py:1"),
        ("class Hooked:\n    pass\n", "Options"),
        ("x = = 1\n", "task.py:1"),
    ],
)
def test_task_file_that_is_no_task(tmp_path: Path, fails: Fails, text: str, told: str) -> None:
    (tmp_path / "task.py").write_text(text)
    said = fails(experiment_of(tmp_path, task={"use": "task.py:Hooked"}), 4)
    assert "[TASK_LOAD]" in said
    assert any(part in said for part in told.split("|"))
    assert not any((tmp_path / "runs").iterdir())  # nothing happened, so the name is free


def test_no_ray_at_the_address(tmp_path: Path, fails: Fails) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    cluster = {"kind": "existing", "address": address, "connect_timeout_s": 0.5}
    said = fails(experiment_of(tmp_path, cluster=cluster), 5)
    assert "[RAY_UNREACHABLE]" in said
    assert address in said


def test_port_in_use(tmp_path: Path, fails: Fails) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = fails(experiment_of(tmp_path, cluster={"kind": "local", "port": port}), 5)
    assert "[PORT_IN_USE]" in said
    assert str(port) in said


@pytest.mark.parametrize("where", ["file/runs", "/proc/geo_ray_runs"])
def test_run_directory_that_cannot_be_made(tmp_path: Path, fails: Fails, where: str) -> None:
    (tmp_path / "file").touch()
    said = fails(experiment_of(tmp_path, run={"dir": str(tmp_path / where)}), 8)
    assert "[RUN_DIRECTORY]" in said
    assert where in said


def write_data(directory: Path, regions: tuple[str, ...]) -> Path:
    task = Digits(Digits.Options())
    data = task.dataset(0)
    stores = {region: str(directory / region) for region in regions}
    parts = {"train": data.train, "heldout": data.heldout}
    columns = task.columns
    manifest = write_shards(parts, "digits", columns, "label", IidSplit(), regions, 0, stores, 512)
    save_manifest(manifest, str(directory / "manifest.json"))
    return directory / "manifest.json"


def test_manifest_without_a_region(tmp_path: Path, fails: Fails) -> None:
    path = write_data(tmp_path / "data", ("us-east", "ap-south"))
    said = fails(experiment_of(tmp_path, data={"manifest": str(path)}), 3)
    assert "[DATA_EMPTY]" in said
    assert "region 'eu-west' has no train rows" in said
    assert "us-east" in said and "ap-south" in said


# ------------------------------------------------------------------ resuming


def test_resume_of_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("train", "--resume", str(tmp_path)) == 8
    said = capsys.readouterr().err
    assert "[RUN_DIRECTORY]" in said
    assert "plan.json" in said


def test_resume_with_another_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = experiment_of(tmp_path)
    run = rundir.create(experiment, tmp_path)
    config = write_config(tmp_path, experiment)
    again = ["train", str(config), "--resume", str(run.path), "--plain"]
    changed = tmp_path / "changed.yaml"
    changed.write_text(config.read_text().replace("lr: 0.05", "lr: 0.5"))
    on_changed = ["train", str(changed), "--resume", str(run.path), "--plain"]
    assert run_command(*on_changed) == 7
    said = capsys.readouterr().err
    assert "[CONFIG_CHANGED]" in said
    assert "optimizer.lr: 0.05 -> 0.5" in said and "--allow-change optimizer.lr" in said
    named = [*on_changed, "--allow-change", "optimizer.lr"]
    for allowed in (again, [*again, "--set", "optimizer.lr=0.5"], named):
        assert run_command(*allowed) == 7  # past the check: there is no checkpoint yet
        assert "[CHECKPOINT_MISSING]" in capsys.readouterr().err
    assert run.path.is_dir()  # a run that was resumed is never removed


# ------------------------------------------------------------------ on the cluster


@pytest.mark.usefixtures("ray_cluster")
def test_cluster_that_is_not_fit(tmp_path: Path, fails: Fails) -> None:
    """All problems at once: a region without nodes, and one with too few CPUs."""
    regions = [{"name": "eu-wst"}, {"name": "ap-south", "workers": 20}]
    said = fails(experiment_of(tmp_path, regions=regions), 5)
    assert "[PREFLIGHT]" in said
    assert "no node is in region 'eu-wst'" in said
    assert "did you mean 'eu-west'?" in said
    assert "region 'ap-south' asks for 21 CPU, its 1 node(s) have 8 CPU" in said
    assert not any((tmp_path / "runs").iterdir())


@pytest.mark.usefixtures("ray_cluster")
def test_loss_that_is_no_scalar(tmp_path: Path, fails: Fails) -> None:
    said = fails(hooked(tmp_path, "def hook(calls, loss): return loss.reshape(1)\n"), 4)
    assert "[TASK_OUTPUT]" in said
    assert "Hooked.loss returned shape (1,), not a scalar" in said


@pytest.mark.usefixtures("ray_cluster")
def test_an_evaluation_that_raises_is_reported_before_training(
    tmp_path: Path, fails: Fails
) -> None:
    """The first evaluation may be hours away."""
    source = "from geo_ray.data.tasks.digits import Digits\n\nclass Broken(Digits):\n"
    source += "    def metrics(self, stats):\n        return stats['nothing'].sum()\n"
    (tmp_path / "broken.py").write_text(source)
    said = fails(experiment_of(tmp_path, task={"use": "broken.py:Broken"}), 4)
    assert "[TASK_OUTPUT]" in said
    assert "metrics raised KeyError" in said and "broken.py:5" in said
    assert not any((tmp_path / "runs").iterdir())


@pytest.mark.usefixtures("ray_cluster")
def test_losses_that_are_not_finite(tmp_path: Path) -> None:
    """One bad batch is skipped and booked; three in a row end the run, its state saved."""
    hook = "def hook(calls, loss): return loss * (float('nan') if calls == 4 or calls > 11 else 1)"
    experiment = hooked(tmp_path, hook, train={"steps": 1000, "eval_every": 0})
    run = rundir.create(experiment, tmp_path)
    with pytest.raises(NonFiniteError) as caught:
        train(experiment, tmp_path, begun=run)
    assert caught.value.exit_code == 4
    assert "region 'us-east' refused 3 steps in a row" in caught.value.message
    assert "its state is saved" in caught.value.message
    events = events_of(run.path)
    refused = [event["step"] for event in events if event.kind == "step_refused"]
    newest = max(event["step"] for event in events if event.kind == "step")
    assert refused == [4, *range(12, newest + 1)]
    assert {e["cause"] for e in events if e.kind == "step_refused"} == {"loss_not_finite"}
    (ledger,) = books_of(run).values()
    assert ledger.discarded == {"loss_not_finite": 16 * len(refused)}
    assert ledger.applied == 16 * 10
    # What was saved is the model after the ten good steps, to the bit.
    tensors, _ = CheckpointStore(run.checkpoints).latest().read("us-east-ps0")
    ten = experiment.model_copy(update={"train": experiment.train.model_copy(update={"steps": 11})})
    assert digest(tensors["params"]) == simulate(ten, tmp_path).summary.digest


@pytest.mark.usefixtures("ray_cluster")
def test_a_worker_that_dies_again_and_again(tmp_path: Path) -> None:
    hook = "def hook(calls, loss): return loss if b'Worker' not in TITLE else os._exit(3)\n"
    experiment = hooked(tmp_path, hook, train={"steps": 5, "max_worker_restarts": 1})
    run = rundir.create(experiment, tmp_path)
    with pytest.raises(WorkerLostError, match="us-east/0 died") as caught:
        train(experiment, tmp_path, begun=run)
    assert caught.value.exit_code == 8
    kinds = [event.kind for event in events_of(run.path)]
    assert (kinds.count("worker_lost"), kinds.count("worker_requested")) == (2, 1)
    assert "step" not in kinds, "no worker finished any work"


class EnoughError(Exception):
    """The test has seen what it wanted."""


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_full_disk_pauses_checkpoints_and_ends_no_run(tmp_path: Path) -> None:
    """Saves fail until there is room again; the last good checkpoint is as it was meanwhile."""
    hook = """
def hook(calls, loss): return loss

def fill():
    for name, limit in (("full", 500), ("room", resource.RLIM_INFINITY)):
        while not (HERE / name).exists():
            time.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

if b"PrimaryActor" in TITLE:  # it writes parts: meanwhile no file of its grows beyond 500 bytes
    threading.Thread(target=fill, daemon=True).start()
"""
    train_for_long = {"steps": 100_000, "eval_every": 0}
    experiment = hooked(tmp_path, hook, train=train_for_long, checkpoint={"every_s": 0.2})
    run = rundir.create(experiment, tmp_path)
    store = CheckpointStore(run.checkpoints)
    saved: list[int] = []
    failed: list[str] = []

    def fill_the_disk(event: Event) -> None:
        if event.kind == "checkpoint":
            saved.append(event["id"])
            if failed:
                raise EnoughError
            (tmp_path / "full").touch()
        elif event.kind == "checkpoint_failed":
            failed.append(event["cause"])
            assert store.latest().manifest.id == saved[-1]
            if len(failed) == 3:
                (tmp_path / "room").touch()

    with pytest.raises(EnoughError):
        train(experiment, tmp_path, begun=run, sink=fill_the_disk)
    assert len(failed) >= 3 and "us-east-ps0.safetensors" in failed[0]
    assert "the run continues, and saves again in 1 s or later" in failed[0]
    assert store.latest().manifest.id == saved[-1]


def test_nothing_is_left_in_the_cluster(
    connected: ConnectedCluster, ray_cluster: LocalCluster
) -> None:
    """After all these failures: no reservation and no actor."""
    states: Any = placement_group_table()
    assert {group["state"] for group in states.values()} <= {"REMOVED"}
    for pid in descendants(ray_cluster._processes._supervisor.pid):
        assert b"Actor" not in Path(f"/proc/{pid}/cmdline").read_bytes()
