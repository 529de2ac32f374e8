"""Real processes of a run are killed; what was committed is never lost."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from geo_ray.base.errors import RegionLostError
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.ray_cluster.process_supervisor import descendants
from geo_ray.runs import directory as rundir
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.storage.folders import directory_of
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.summary import load_summary
from tests.support.train_support import (
    Trained,
    books_of,
    count,
    events_of,
    eventually,
    experiment_of,
    final_digests,
    losses,
    simulate,
    train,
    write_config,
)

STEPS = 24
pytestmark = pytest.mark.timeout(900)  # several whole commands per test

TRAIN = {"steps": STEPS, "eval_every": 8, "step_timeout_s": 60}
SLOW = {"step_s": 0.15}  # the same bits, but time to be killed in the middle
OFTEN = {"every_s": 0.5}
CODED = {  # what is owed to others, both ways, and a codec that remembers
    "codec": {"up": {"kind": "topk", "ratio": 0.1}, "down": {"kind": "powersgd", "rank": 1}},
    "regions": [{"name": "us-east"}, {"name": "eu-west", "ps_shards": 2}],
}


def actors(below: int, kind: str) -> list[int]:
    """Process ids of the actors of one class below a process."""
    found = []
    for pid in sorted(descendants(below)):
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(f"ray::{kind}".encode()):
                found.append(pid)
    return found


def alive(pids: set[int]) -> set[int]:
    """Those that still run; one that ended and waits for its parent to notice has no command."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
    return found


def regions_node(cluster: LocalCluster, region: str) -> int:
    """Process id of the node of a region; its actors are below it."""
    cluster._processes.poll()
    return cluster._processes.pids[str(cluster.regions.index(region))]


def check_whole(resumed: Trained, undisturbed: Trained) -> None:
    """An interrupted and resumed run has the same result as an uninterrupted one."""
    assert resumed.summary.digest == undisturbed.summary.digest
    assert final_digests(resumed.events) == {undisturbed.summary.digest}
    assert losses(resumed.events) == losses(undisturbed.events)
    assert resumed.summary.samples == undisturbed.summary.samples
    assert resumed.summary.eval == undisturbed.summary.eval
    books_of(resumed.run)


@contextmanager
def command(arguments: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`geo-ray ...` as a user starts it, its output in a file; dead afterwards."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "geo_ray.cli.main", *arguments],
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """An empty directory with a short name; pytest's are too long for sockets."""
    path = Path(f"/tmp/gf{os.getpid()}")
    path.mkdir()
    yield path
    path.rmdir()  # fails if anything is left


# ------------------------------------------------------------------ single processes


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_nothing_changes(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    experiment = experiment_of(
        tmp_path,
        strategy={"kind": "bsp"},
        regions=[{"name": "us-east", "workers": 2}, {"name": "eu-west"}],
        train=TRAIN,
        emulate=SLOW,
        checkpoint=OFTEN,
    )
    killed: list[int] = []

    def kill_at_step_3(event: Event) -> None:
        if event.kind == "step" and event["step"] == 3 and not killed:
            killed.append(actors(regions_node(ray_cluster, "us-east"), "WorkerActor")[0])
            os.kill(killed[0], signal.SIGKILL)

    done = train(experiment, tmp_path, sink=kill_at_step_3)
    check_whole(done, simulate(experiment, tmp_path))
    (lost,) = done.of("worker_lost")
    (replaced,) = done.of("worker_replaced")
    assert lost["region"] == replaced["region"] == "us-east"
    assert lost["worker"] == replaced["worker"]
    assert replaced["attempt"] == 2
    assert {k: n for k, n in done.summary.faults.items() if n} == {
        "worker_lost": 1,
        "worker_replaced": 1,
    }
    last = done.of("checkpoint")[-1]["step"]
    applied = {region: book.applied for region, book in books_of(done.run).items()}
    assert applied == {"us-east": 32 * last, "eu-west": 16 * last}


@pytest.mark.slow  # four starts of a cluster's processes; checkpoints: test_checkpoint.py
@pytest.mark.parametrize("sections", [{}, CODED], ids=["vectors", "coded"])
def test_a_lost_server_ends_the_run_and_a_damaged_checkpoint_is_passed_over(
    ray_cluster: LocalCluster, tmp_path: Path, sections: dict[str, Any]
) -> None:
    ends = {"checkpoint": OFTEN | {"restarts": 0}, "members": {"rejoin": False}}
    experiment = experiment_of(tmp_path, train=TRAIN, emulate=SLOW, **ends, **sections)
    run = rundir.create(experiment, tmp_path)
    saved: list[int] = []

    def kill_after_two_checkpoints(event: Event) -> None:
        if event.kind == "checkpoint":
            saved.append(event["id"])
            if len(saved) == 2:
                for pid in actors(regions_node(ray_cluster, "eu-west"), "PrimaryActor"):
                    os.kill(pid, signal.SIGKILL)

    with pytest.raises(RegionLostError) as caught:
        train(experiment, tmp_path, begun=run, sink=kill_after_two_checkpoints)
    assert "the parameter server of region 'eu-west' is lost: " in caught.value.message
    assert not caught.value.message.endswith(".")
    assert caught.value.exit_code == 8
    assert "--resume" in caught.value.fix

    newest = CheckpointStore(run.checkpoints).latest()
    assert newest.manifest.id == saved[1]
    part = directory_of(run.checkpoints, saved[1]) / newest.manifest.parts[0].file
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    resumed = train(experiment, tmp_path, begun=run, resume=True)
    check_whole(resumed, simulate(experiment, tmp_path))
    restarted = [i for i, e in enumerate(resumed.events) if e.kind == "run_started"][1]
    steps_after = [e["step"] for e in resumed.events[restarted:] if e.kind == "step"]
    step_of = {e["id"]: e["step"] for e in resumed.of("checkpoint")}
    # Regions copy their state when they hear of a checkpoint: one may be a step behind the other.
    assert min(steps_after) in (step_of[saved[0]], step_of[saved[0]] + 1)


@pytest.mark.slow  # tests/property/training/test_standby_faults.py
def test_a_run_without_its_averager_restarts_from_its_newest_checkpoint(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    """By itself, in the same command, and with the result of an undisturbed run."""
    experiment = experiment_of(tmp_path, train=TRAIN, emulate=SLOW, checkpoint=OFTEN)
    saved: list[int] = []

    def kill_after_a_checkpoint(event: Event) -> None:
        if event.kind == "checkpoint":
            saved.append(event["id"])
            if len(saved) == 1:
                for pid in actors(regions_node(ray_cluster, "us-east"), "BridgeActor"):
                    os.kill(pid, signal.SIGKILL)

    done = train(experiment, tmp_path, sink=kill_after_a_checkpoint)
    check_whole(done, simulate(experiment, tmp_path))
    assert len(done.of("run_started")) == 2 and not done.of("run_failed")


# ------------------------------------------------------------------ the whole command


def interrupt(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGINT)
    return process.wait(60)


def start(
    experiment: Experiment, directory: Path, *more: str
) -> tuple[Path, list[str], Callable[[], str]]:
    """Where the run will be, the command that begins it, and what it has said so far."""
    config = write_config(directory, experiment)
    log = directory / "said.log"
    run_dir = Path(experiment.run.dir) / experiment.name
    return run_dir, ["train", str(config), "--plain", *more], lambda: log.read_text()


@pytest.mark.slow
def test_bsp_interrupted_then_killed_then_resumed(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    """On an existing cluster: Ctrl-C, the command that the message names, SIGKILL, resume."""
    experiment = experiment_of(
        tmp_path,
        strategy={"kind": "bsp"},
        train=TRAIN,
        emulate=SLOW,
        checkpoint=OFTEN,
        cluster={"kind": "existing", "address": ray_cluster.address},
    )
    run_dir, arguments, said = start(experiment, tmp_path)
    log = tmp_path / "said.log"
    with command(arguments, log) as process:
        eventually(lambda: count(run_dir, "step") >= 8 or process.poll() is not None, "8 steps")
        assert interrupt(process) == 130, said()
    assert "its state is saved" in said()
    named = re.search(r"`geo-ray (train --resume [^`]+)`", said())
    assert named, said()
    at_stop = max(e["step"] for e in events_of(run_dir) if e.kind == "step")
    saved = CheckpointStore(run_dir / "checkpoints").latest().manifest
    assert saved.step == at_stop  # nothing of what was done is lost

    before = count(run_dir, "checkpoint")
    with command([*shlex.split(named[1]), "--plain"], log) as process:
        eventually(
            lambda: count(run_dir, "checkpoint") > before or process.poll() is not None,
            "a checkpoint of the resumed run",
        )
        assert process.poll() is None, said()
        process.kill()
        process.wait(60)
    supervisor = ray_cluster._processes._supervisor.pid
    for pid in actors(supervisor, "Supervisor"):  # the run would go on without the command
        os.kill(pid, signal.SIGKILL)
    kinds = ("WorkerActor", "PrimaryActor", "BridgeActor", "ShardServerActor")
    eventually(lambda: not any(actors(supervisor, kind) for kind in kinds), "the actors are gone")

    run, reread = rundir.reopen(run_dir)
    assert reread == experiment
    resumed = train(experiment, tmp_path, begun=run, resume=True)
    check_whole(resumed, simulate(experiment, tmp_path))
    causes = [event.fields.get("cause") for event in resumed.of("run_started")]
    assert causes == [None, None, "they have ended with their supervisor"]
    assert min(e["step"] for e in resumed.events[-30:] if e.kind == "step") > 1


@pytest.mark.slow
def test_sma_killed_then_stopped_at_once_then_resumed(short_tmp: Path, tmp_path: Path) -> None:
    """With its own cluster: SIGKILL leaves nothing, nor does Ctrl-C twice; resume completes."""
    experiment = experiment_of(
        tmp_path,
        train=TRAIN,
        emulate=SLOW,
        checkpoint=OFTEN,
        cluster={"kind": "local", "temp_dir": str(short_tmp)},
    )
    run_dir, arguments, said = start(experiment, tmp_path)
    log = tmp_path / "said.log"
    with command(arguments, log) as process:
        eventually(
            lambda: count(run_dir, "checkpoint") >= 2 or process.poll() is not None,
            "two checkpoints",
        )
        assert process.poll() is None, said()
        started = descendants(process.pid)
        assert len(started) > 10
        process.kill()
        process.wait(60)
    eventually(lambda: not any(short_tmp.iterdir()), "the temporary files are gone")
    eventually(lambda: not alive(started), "all processes are gone")

    before = count(run_dir, "step")
    with command(["train", "--resume", str(run_dir), "--plain"], log) as process:
        eventually(lambda: count(run_dir, "step") > before or process.poll() is not None, "resumed")
        assert process.poll() is None, said()
        assert (
            "cannot continue with the run's processes: they have ended with their supervisor"
            in said()
        )
        started = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        eventually(lambda: count(run_dir, "stop_requested") or process.poll() is not None, "heard")
        assert interrupt(process) == 130, said()
    assert not any(short_tmp.iterdir())
    assert not alive(started)
    assert "Traceback" not in said()

    with command(["train", "--resume", str(run_dir), "--plain"], log) as process:
        assert process.wait(200) == 0, said()
    summary = load_summary(run_dir)
    assert summary is not None
    assert (run_dir / "report.html").exists()
    run, _ = rundir.reopen(run_dir)
    check_whole(Trained(run, summary), simulate(experiment, tmp_path))
