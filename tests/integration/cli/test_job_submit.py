"""`ray job submit ... -- geo-ray train configs/cluster.yaml`, as docs/operations/runs.md shows."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.job_submission import JobStatus, JobSubmissionClient

from geo_ray.experiment.cluster import ExistingClusterConfig
from geo_ray.ray_cluster.connect import connect
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.ray_cluster.process_supervisor import descendants
from geo_ray.runs import directory
from geo_ray.telemetry.summary import load_summary
from tests.support.train_support import books_of, count, events_of, eventually

ROOT = Path(__file__).resolve().parents[3]
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def server(ray_cluster: LocalCluster) -> str:
    """Address of the cluster's job server."""
    config = ExistingClusterConfig(address=ray_cluster.address)
    with connect(config, [], namespace="find-dashboard") as cluster:
        return f"http://{cluster.dashboard}"


@pytest.fixture
def client(server: str) -> Iterator[JobSubmissionClient]:
    """A client; jobs that a test leaves running are stopped."""
    client = JobSubmissionClient(server)
    yield client
    for job in client.list_jobs():
        if not job.status.is_terminal() and job.submission_id is not None:
            client.stop_job(job.submission_id)


@pytest.fixture
def small_copy(tmp_path: Path) -> Path:
    """A working directory with the configuration only."""
    (tmp_path / "work" / "configs").mkdir(parents=True)
    shutil.copy(ROOT / "configs" / "cluster.yaml", tmp_path / "work" / "configs")
    return tmp_path / "work"


def command(runs: Path, **changes: str) -> str:
    """The documented command, with a run that is small enough for a test."""
    settings = {
        "run.dir": str(runs),
        "task.options": "{width: 2}",
        "regions": "[{name: us-east}, {name: ap-south}]",
        "averager.region": "ap-south",
        "strategy": "{kind: ama, interval: 2}",
        "train": "{steps: 12, eval_every: 6}",
    } | changes
    given = " ".join(f"--set {shlex.quote(f'{key}={value}')}" for key, value in settings.items())
    return f"{BIN / 'geo-ray'} train configs/cluster.yaml {given}"


def test_submit_and_follow(server: str, small_copy: Path, tmp_path: Path) -> None:
    """The log is followed to its end; the model is where the configuration says."""
    submitted = subprocess.run(
        [
            *(str(BIN / "ray"), "job", "submit", "--address", server),
            *("--working-dir", str(small_copy), "--", *shlex.split(command(tmp_path / "runs"))),
        ],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=tmp_path,
        check=False,
    )
    said = submitted.stdout + submitted.stderr
    assert submitted.returncode == 0, said
    assert "succeeded" in said
    assert "12/12" in said  # progress as lines
    assert "starting servers and bridges: 0 of " in said, "the longest wait of the start is shown"
    assert "model.safetensors" in said
    run = directory.reopen(tmp_path / "runs" / "cluster")[0]
    summary = load_summary(run.path)
    assert summary is not None
    assert summary.steps == 12
    assert (run.path / "report.html").exists()
    assert events_of(run.path)[-1].kind == "run_finished"


def test_bad_configuration(client: JobSubmissionClient, small_copy: Path, tmp_path: Path) -> None:
    job = client.submit_job(
        entrypoint=command(tmp_path / "runs", **{"train.stepz": "3"}),
        runtime_env={"working_dir": str(small_copy)},
    )
    eventually(lambda: client.get_job_status(job).is_terminal(), "the job ends")
    assert client.get_job_status(job) == JobStatus.FAILED
    logs = client.get_job_logs(job)
    assert "[CONFIG_INVALID]" in logs
    assert "train.stepz" in logs
    assert "Traceback" not in logs
    info = client.get_job_info(job)
    assert "train.stepz" in (info.message or "")
    assert info.driver_exit_code == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_stop_saves_and_leaves_nothing_running(
    client: JobSubmissionClient, small_copy: Path, tmp_path: Path, ray_cluster: LocalCluster
) -> None:
    run_dir = tmp_path / "runs" / "cluster"
    job = client.submit_job(
        entrypoint=command(
            tmp_path / "runs",
            train="{steps: 100000, eval_every: 0}",
            emulate="{step_s: 0.05}",
        ),
        runtime_env={
            "working_dir": str(small_copy),
            "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"},
        },
    )
    eventually(
        lambda: count(run_dir, "step") >= 10 or client.get_job_status(job).is_terminal(),
        "the run is under way",
    )
    assert client.get_job_status(job) == JobStatus.RUNNING, client.get_job_logs(job)
    client.stop_job(job)
    eventually(lambda: client.get_job_status(job).is_terminal(), "the job ends")
    assert client.get_job_status(job) == JobStatus.STOPPED
    logs = client.get_job_logs(job)
    assert "its state is saved" in logs
    assert f"geo-ray train --resume {run_dir}" in logs
    assert set(books_of(directory.reopen(run_dir)[0])) == {"us-east", "ap-south"}
    eventually(lambda: not actors_of_runs(ray_cluster), "the actors are gone")


def actors_of_runs(cluster: LocalCluster) -> list[bytes]:
    """Command lines of all actors of geo_ray that the cluster runs."""
    found = []
    for pid in descendants(cluster._processes._supervisor.pid):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if title.startswith((b"ray::WorkerA", b"ray::LeadA", b"ray::BridgeA", b"ray::FollowerA")):
            found.append(title)
    return found
