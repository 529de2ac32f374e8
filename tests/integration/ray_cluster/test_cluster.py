"""The local cluster comes up, is reachable only with its token, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from ray.job_submission import JobStatus, JobSubmissionClient

from geo_ray.base.errors import ClusterError, ClusterStartError, PortInUseError, RayUnreachableError
from geo_ray.experiment.cluster import ExistingClusterConfig, LocalClusterConfig
from geo_ray.ray_cluster import ray_internals
from geo_ray.ray_cluster.connect import RAY_MESSAGES, ConnectedCluster, connect
from geo_ray.ray_cluster.labels import REGION_LABEL, in_region, in_regions, on_node, outside_regions
from geo_ray.ray_cluster.local_cluster import LocalCluster
from tests.support.job_support import experiment

pytestmark = pytest.mark.timeout(900)  # a cluster takes long to start beside other work
WAIT_S = 240.0  # never reached

_OWNER = """
import sys, time
from geo_ray.experiment.cluster import LocalClusterConfig
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.ray_cluster.connect import RAY_MESSAGES
with LocalCluster(LocalClusterConfig(temp_dir=sys.argv[1]), ["only"]) as cluster:
    print(cluster.root, flush=True)
    if sys.argv[2] == "raise":
        raise ValueError("on purpose")
    if sys.argv[2] == "wait":
        time.sleep(300)
"""

_JOB = """
import os, ray
from geo_ray.experiment.cluster import ExistingClusterConfig
from geo_ray.ray_cluster.connect import connect
from geo_ray.ray_cluster.labels import REGION_LABEL, in_region

@ray.remote(label_selector=in_region("mars"))
def where():
    return ray.get_runtime_context().get_node_labels()[REGION_LABEL], os.environ["X"]

with connect(ExistingClusterConfig(), ["mars"], namespace="job", env_vars={"X": "ours"}):
    print("found", ", ".join(ray.get(where.remote(), timeout=60)))
"""


@ray.remote(num_cpus=0.1)
def where() -> tuple[str, str, str]:
    labels = ray.get_runtime_context().get_node_labels()
    return labels.get(REGION_LABEL, ""), ray.get_runtime_context().get_node_id(), os.environ["X"]


def _mentions(name: str) -> list[str]:
    """Processes whose command line or environment names the directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if name.encode() in text:
            found.append(text[:200].decode(errors="replace"))
    return found


def _eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@contextmanager
def _owner(base: Path, what: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(base), what],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """An empty directory with a short name; pytest's are too long for sockets."""
    path = Path(tempfile.mkdtemp(prefix="gr", dir="/tmp"))
    yield path
    assert _eventually(lambda: not any(path.iterdir()))  # a keeper may still be at work
    path.rmdir()


@pytest.mark.parametrize(
    "ending", [pytest.param("raise", marks=pytest.mark.slow), "sigint", "sigint early", "sigkill"]
)
def test_nothing_is_left_behind(ending: str, short_tmp: Path) -> None:
    what = ending if ending == "raise" else "wait"
    with _owner(short_tmp, what) as owner:
        assert _eventually(lambda: any(short_tmp.iterdir()))
        (root,) = short_tmp.iterdir()
        if ending == "sigint early":
            assert _eventually(lambda: len(_mentions(root.name)) > 2)
        else:
            assert owner.stdout is not None
            assert owner.stdout.readline().strip() == str(root)
        if ending.startswith("sigint"):
            owner.send_signal(signal.SIGINT)
            time.sleep(0.05)
            owner.send_signal(signal.SIGINT)
        elif ending == "sigkill":
            owner.kill()
        owner.wait(WAIT_S)
        if ending == "raise":
            assert _mentions(root.name) == []
            assert not root.exists()
    assert _eventually(lambda: not _mentions(root.name) and not root.exists())


def test_every_region_has_a_node_and_the_head_none(connected: ConnectedCluster) -> None:
    assert ray_internals.draining_nodes() == {}
    nodes = [node for node in ray_internals.nodes() if node["Alive"]]
    regions = {n["Labels"].get(REGION_LABEL): n["Resources"].get("CPU", 0) for n in nodes}
    assert regions == {None: 0, **dict.fromkeys(connected.regions, 8)}
    assert len({node["NodeManagerAddress"] for node in nodes}) == 4


def test_files_are_private(ray_cluster: LocalCluster) -> None:
    assert stat.S_IMODE(ray_cluster.root.stat().st_mode) == 0o700
    assert stat.S_IMODE((ray_cluster.root / "token").stat().st_mode) == 0o600


def test_selectors_select(connected: ConnectedCluster, ray_cluster: LocalCluster) -> None:
    us, eu, ap = connected.regions
    env = {"env_vars": {"X": "1"}}

    def run(selector: dict[str, str]) -> tuple[str, str, str]:
        ref = where.options(label_selector=selector, runtime_env=env).remote()
        return ray.get(ref, timeout=60)

    region, node_id, _ = run(in_region(eu))
    assert region == eu
    assert run(in_regions([us, ap]))[0] in (us, ap)
    assert run(outside_regions([us, ap]))[0] == eu
    assert run(on_node(node_id))[:2] == (eu, node_id)


def test_actors_get_the_environment(ray_cluster: LocalCluster) -> None:
    config = ExistingClusterConfig(address="auto")  # RAY_ADDRESS, as in a submitted job
    with connect(config, ray_cluster.regions, namespace="env", env_vars={"X": "mine"}) as cluster:
        assert cluster.address == ray_cluster.address
        assert ray.get(where.remote(), timeout=60)[2] == "mine"
        with connect(config, ["us-east"], namespace="again") as same:
            assert (same.address, same.regions) == (cluster.address, ("us-east",))
        assert ray.is_initialized(), "who was connected before stays so"
        for other in (LocalClusterConfig(), ExistingClusterConfig(address="127.0.0.1:1")):
            with (
                pytest.raises(ClusterError, match="already connected"),
                connect(other, [], namespace="other"),
            ):
                pass
    assert not ray.is_initialized()


@pytest.mark.slow
def test_second_cluster_takes_a_job_and_loses_a_region(
    ray_cluster: LocalCluster,
    short_tmp: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It has a token of its own, and the first cluster is as before afterwards."""
    before = os.environ["RAY_AUTH_TOKEN_PATH"]
    config = LocalClusterConfig(temp_dir=str(short_tmp), dashboard=True)
    with connect(config, ["mars"], namespace="second", cpus_per_region=1.5) as cluster:
        assert cluster.local is not None
        assert cluster.dashboard is not None
        assert cluster.address != ray_cluster.address
        assert ray.cluster_resources()["CPU"] == 2
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://{cluster.dashboard}/api/version", timeout=30)
        _submit_job(cluster.dashboard, tmp_path)
        cluster.local.kill_region("mars")
        assert _eventually(lambda: len([n for n in ray_internals.nodes() if n["Alive"]]) == 1)
        told = cluster.local.root / RAY_MESSAGES
        assert _eventually(lambda: told.exists() and "Raylet" in told.read_text())
    assert "Raylet is terminated" not in "".join(capfd.readouterr())
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == before
    with connect(ExistingClusterConfig(), [], namespace="first"):
        assert ray.cluster_resources()["CPU"] == 24


def _submit_job(dashboard: str, directory: Path) -> None:
    (directory / "job.py").write_text(_JOB)
    client = JobSubmissionClient(f"http://{dashboard}")
    job = client.submit_job(
        entrypoint=f"{sys.executable} job.py",
        runtime_env={"working_dir": str(directory), "env_vars": {"X": "the job's"}},
    )
    assert _eventually(lambda: client.get_job_status(job).is_terminal())
    assert client.get_job_status(job) == JobStatus.SUCCEEDED, client.get_job_logs(job)
    assert "found mars, the job's" in client.get_job_logs(job)


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(PortInUseError, match=str(port)),
            LocalCluster(LocalClusterConfig(port=port), ["a"]),
        ):
            pass


def test_start_failure_shows_the_log(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("geo_ray.ray_cluster.local_cluster._free_port", lambda: 1)  # Ray refuses it
    with (
        pytest.raises(ClusterStartError, match="ray_client_server_port must be an integer"),
        LocalCluster(LocalClusterConfig(temp_dir=str(short_tmp)), ["a"]),
    ):
        pass


def test_start_timeout(short_tmp: Path) -> None:
    config = LocalClusterConfig(temp_dir=str(short_tmp), start_timeout_s=0.2)
    with (
        pytest.raises(ClusterStartError, match="start_timeout_s") as caught,
        LocalCluster(config, ["a"]),
    ):
        pass
    advised = re.findall(r"--set (\S+=[^`\s]+)", caught.value.fix)
    cluster = experiment(*advised).cluster
    assert isinstance(cluster, LocalClusterConfig) and cluster.start_timeout_s > 90


def test_a_long_temp_dir_is_refused(tmp_path: Path) -> None:
    config = LocalClusterConfig(temp_dir=str(tmp_path / ("x" * 100)))
    with (
        pytest.raises(ClusterStartError, match="too long"),
        LocalCluster(config, ["a"]),
    ):
        pass


def test_dead_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    config = ExistingClusterConfig(address=f"127.0.0.1:{port}", connect_timeout_s=1.0)
    with (
        pytest.raises(RayUnreachableError, match="refused"),
        connect(config, ["a"], namespace="x"),
    ):
        pass


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH_9.2\r\n", None])
def test_something_else_at_the_address(answer: bytes | None) -> None:
    """Hangs up, speaks another protocol, or never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = threading.Event()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                if answer is None:
                    done.wait(60)
                else:
                    connection.recv(1024)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            address = f"127.0.0.1:{server.getsockname()[1]}"
            config = ExistingClusterConfig(address=address, connect_timeout_s=0.4)
            with (
                pytest.raises(RayUnreachableError),
                connect(config, ["a"], namespace="x"),
            ):
                pass
        finally:
            done.set()
            thread.join()


def test_no_token(
    ray_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    monkeypatch.setenv("HOME", str(tmp_path))
    with (
        pytest.raises(RayUnreachableError, match="token is missing or wrong"),
        connect(ExistingClusterConfig(), [], namespace="x"),
    ):
        pass
