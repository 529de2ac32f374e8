"""Pages whose commands need a Ray cluster: they run as written, with small configurations."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

import geo_ray
from geo_ray.cloud.cluster.state import ClusterState
from geo_ray.cloud.local import read_catalog, write_catalog
from geo_ray.experiment.cluster import ExistingClusterConfig, LocalClusterConfig
from geo_ray.ray_cluster.child_processes import SupervisedProcesses
from geo_ray.ray_cluster.connect import connect
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.ray_cluster.settings import local_node_environment, node_command
from geo_ray.telemetry.event_log import EVENTS_FILE, read_events
from tests.support.pages import PAGE_ADDRESS, ROOT, Reader, commands
from tests.support.s3_support import client_of, s3_server, set_credentials
from tests.support.train_support import count, eventually

pytestmark = pytest.mark.timeout(1800)
CHECKPOINTS, MEMBERSHIP = "docs/guides/checkpoints.md", "docs/guides/membership.md"
TUNING, PLANNING = "docs/guides/tuning.md", "docs/guides/planning.md"
CLUSTERS, QUEUE = "docs/operations/clusters.md", "docs/operations/queue.md"
RUNS = "docs/operations/runs.md"
QUICKSTART = Path("configs/quickstart.yaml")
RUN = Path("runs/quickstart")
SMALL: dict[str, Any] = {
    "cluster": {"kind": "existing"},
    "task": {"use": "digits", "options": {"width": 2}},
    "regions": [{"name": "us-east"}],
    "averager": {"region": "us-east"},
    "emulate": {"step_s": 0.02},
}


def change(config: Path, **sections: Any) -> None:
    """Change sections of a configuration of the reader."""
    tree = yaml.safe_load(config.read_text())
    config.write_text(json.dumps(tree | sections))


@pytest.fixture
def reader(
    ray_cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Reader]:
    """A reader with the files of the repository, on a cluster; no run is left running."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "configs", "configs")
    yield Reader(monkeypatch)
    monkeypatch.chdir(tmp_path)
    for run in Path("runs").glob("*/run_id"):
        if geo_ray.status(run.parent).phase not in ("finished", "failed", "stopped"):
            geo_ray.stop(run.parent)


@pytest.fixture
def jobs(reader: Reader, ray_cluster: LocalCluster) -> None:
    """The job server's address, which `ray job submit` reads."""
    config = ExistingClusterConfig(address=ray_cluster.address)
    with connect(config, [], namespace="find-dashboard") as cluster:
        reader.monkeypatch.setenv("RAY_API_SERVER_ADDRESS", f"http://{cluster.dashboard}")


@pytest.mark.usefixtures("jobs")
@pytest.mark.slow  # minutes of waiting: six commands that start or resume a run
def test_checkpoints(reader: Reader, tmp_path: Path) -> None:
    """`docs/guides/checkpoints.md`; the job ends the run that was resumed before."""
    reader.values["RUN"] = str(tmp_path / RUN)
    slow = {"emulate": {"step_s": 0.06}, "checkpoint": {"every_s": 0.1, "keep": 100}}
    change(QUICKSTART, **SMALL | slow)
    train, show, *resumes, job = commands(CHECKPOINTS)
    saved = RUN / "checkpoints" / "ckpt-00000013"
    reader.interrupted(train, saved.exists, exit_code=130)
    assert "12" in reader.run(show)
    for resume in resumes:
        steps = count(RUN, "step")
        reader.interrupted(resume, lambda least=steps: count(RUN, "step") > least, exit_code=130)
    assert "succeeded" in reader.run(job)
    assert geo_ray.status(RUN).phase == "finished"
    assert geo_ray.open_run(RUN).summary.steps == 300


def test_membership(reader: Reader) -> None:
    """`docs/guides/membership.md`"""
    regions = [{"name": "us-east"}, {"name": "ap-south"}]
    members = {"min": 1, "absent": ["ap-south"]}
    train = {"steps": 1_000_000, "eval_every": 0}
    change(QUICKSTART, **SMALL | {"regions": regions}, members=members, train=train)
    reader.run("geo-ray train configs/quickstart.yaml --detach")

    def state() -> str:
        states = {row["region"]: row["state"] for row in geo_ray.members(RUN).to_pylist()}
        return str(states["ap-south"])

    show, add, drain, remove = commands(MEMBERSHIP)
    assert "absent" in reader.run(show)
    assert "add ap-south" in reader.run(add)
    failed: list[str] = []

    def joins() -> bool:
        """Add it again, as a user would, if its processes do not start in time."""
        events = read_events(RUN / EVENTS_FILE)
        causes = [event["cause"] for event in events if event.kind == "join_failed"]
        if len(causes) > len(failed):
            failed[:] = causes
            reader.run(add)
        assert len(failed) < 3, failed
        return state() == "member"

    eventually(joins, "ap-south joins")
    assert "drain ap-south" in reader.run(drain)
    eventually(lambda: state() == "left", "ap-south leaves")
    reader.run(add)
    assert "remove ap-south" in reader.run(remove)
    eventually(lambda: state() not in ("member", "joining"), "the join is cancelled")
    reader.run("geo-ray stop runs/quickstart")


@pytest.mark.slow  # a minute: trials with a process each
def test_tuning(reader: Reader) -> None:
    """`docs/guides/tuning.md`"""
    change(
        Path("configs/four_continents.yaml"), **SMALL, optimizer={"kind": "momentum", "lr": 1e-6}
    )
    search = yaml.safe_load(Path("configs/tune.yaml").read_text())
    target = "{metric: loss, value: 2.29, direction: at_most}"
    search["set"] = [f"train={{steps: 12, eval_every: 1, target: {target}}}"]
    search["trials"] = {"jobs": 2, "cluster": {"kind": "existing"}}
    search["search"]["trials"] = 2
    Path("configs/tune.yaml").write_text(yaml.safe_dump(search))
    for command in commands(TUNING):
        reader.run(command)
    assert (Path("runs/longer") / "tune.html").exists()
    assert geo_ray.open_run("runs/four_continents").summary.steps > 0


@contextmanager
def joined(cluster: LocalCluster, *commands: str) -> Iterator[None]:
    """Have nodes join a cluster: commands `ray start` of a page, on addresses of this machine."""
    nodes = SupervisedProcesses(Path(tempfile.gettempdir()))
    env = local_node_environment(cluster.root / "token")
    size = LocalClusterConfig().object_store_bytes
    try:
        for number, command in enumerate(commands):
            home = nodes.root / f"joined-{number}"
            home.mkdir()
            words = shlex.split(command.replace("HEAD:6379", cluster.address))
            assert words[:2] == ["ray", "start"]
            flags = [*words[2:], "--num-cpus=8"]
            argv = node_command(
                flags, ip=f"127.0.0.{100 + number}", home=home, object_store_bytes=size
            )
            nodes.start(str(number), argv, env)
        for number in range(len(commands)):
            ready = nodes.root / f"joined-{number}" / "ray_current_cluster"
            eventually(ready.is_file, f"node {number} joins")
        yield
    finally:
        nodes.close()


def save_prices(**usd: float) -> None:
    """Save the reader's prices of machines in us-east-1; others are those of the snapshot."""
    source = {"source": "test", "fetched_at": "2026-11-20T00:00:00Z", "valid_for_s": 1e9}
    common = {"cloud": "aws", "region": "us-east-1", "currency": "USD", "unit": "hour", **source}
    records = [{**common, "type": f"{name}.xlarge", "amount": each} for name, each in usd.items()]
    Path("prices.json").write_text(json.dumps({"records": records}))


@pytest.mark.slow  # 100 s of CPU: four nodes, three runs, and six simulated ones
def test_planning(reader: Reader, ray_cluster: LocalCluster) -> None:
    """`docs/guides/planning.md`: `ray start` of the page adds a node per region and type."""
    monkeypatch, run = reader.monkeypatch, Path("runs/planned")
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    offer = {"cloud": "aws", "rows": 60}
    places = {"us": "us-east-1", "eu": "eu-central-1", "asia": "ap-northeast-1"}
    types = {"us": ("g5.xlarge", "g4dn.xlarge"), "eu": ("g5.xlarge",), "asia": ("g4dn.xlarge",)}
    change(
        Path("configs/planned.yaml"),
        cluster={"kind": "existing"},
        task={"use": "bytelm", "options": {"dim": 8, "layers": 1, "heads": 1, "context": 8}},
        data={"generate": {"rows_per_shard": 64}, "batch_size": 1},
        regions=[{"name": name} for name in places],
        optimizer={"kind": "sgd", "lr": 0.1},
        strategy={"kind": "sma", "interval": 4},
        train={"steps": 200, "eval_every": 0},
        emulate={"link": {"rate_mbps": 200, "delay_s": 0.01}, "step_s": 0.03},
        checkpoint={"every_s": 0.5},
        plan={
            "intervals": [4],
            "codecs": [None],
            "startup_s": 1,
            "regions": {
                name: {
                    **offer,
                    "at": at,
                    "machines": [
                        {"type": each, "cap": 1, "rows_per_s": 100} for each in types[name]
                    ],
                }
                for name, at in places.items()
            },
        },
    )
    page = commands(PLANNING)
    (start,) = (each for each in page if each.startswith("ray start "))
    save_prices(g5=0.1, g4dn=0.2)
    nodes = [
        start.replace("=us,", f"={name},").replace("g5.xlarge", each)
        for name in places
        for each in types[name]
    ]
    assert start in nodes
    with joined(ray_cluster, *nodes):
        for command in page:
            if command.endswith("--plan plan.json"):
                reader.interrupted(command, lambda: count(run, "checkpoint") > 1, exit_code=130)
                save_prices(g5=10.0, g4dn=0.2)
            elif command != start:
                reader.run(command)
    assert geo_ray.open_run(run).summary.steps == 200
    assert "g4dn.xlarge" in Path("new.json").read_text()


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory with a short path, for the sockets of Ray; no cluster is left there."""
    path = Path(tempfile.mkdtemp(prefix="gp", dir="/tmp"))
    yield path
    state = ClusterState.at(str(path / "clusters" / "cluster_local"))
    if state.read()[0] is not None:
        geo_ray.down(state.uri, at_once=True)
    shutil.rmtree(path)


@pytest.mark.slow  # minutes: a cluster of `geo-ray up`, four runs, and a queue with two jobs
def test_a_cluster_its_queue_and_its_runs(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster of `docs/operations/clusters.md` serves the pages on queue and runs, too."""
    monkeypatch.chdir(short)
    shutil.copytree(ROOT / "configs", "configs")
    reader = Reader(monkeypatch)
    set_credentials(monkeypatch)
    local = Path("configs/cluster_local.yaml")
    tree = yaml.safe_load(local.read_text())
    change(
        local,
        task={"use": "digits", "options": {"width": 2}},
        regions=[{"name": "us"}],
        train={"steps": 8, "eval_every": 0},
        emulate={"step_s": 0.05},
        run={"dir": str(short / "runs"), "again": "resume"},
        plan=tree["plan"] | {"regions": {"us": tree["plan"]["regions"]["us"]}},
        autoscale=tree["autoscale"] | {"every_s": 0.5, "calm": {"idle_s": 3600}},
    )
    shutil.copy(local, "configs/my_job.yaml")
    long = {"steps": 400, "eval_every": 0}
    change(Path("configs/my_job.yaml"), name="my_job", train=long, autoscale=None, provider=None)
    queue = Path("configs/queue_local.yaml")
    regions = yaml.safe_load(queue.read_text())["regions"]
    change(queue, regions={"us": regions["us"]}, runs=str(short / "queue_runs"), slot_s=2)
    dry, up, submit = commands(CLUSTERS, "Try it on this computer")
    with s3_server() as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        client_of(endpoint).create_bucket(Bucket="bucket")
        assert "nothing was started" in reader.run(dry)
        printed = reader.run(up)
        cloud = short / "clusters" / "cluster_local" / "cloud"
        write_catalog(cloud, read_catalog(cloud).model_copy(update={"owner_pid": os.getpid()}))
        (export,) = re.findall(r"^reach +(export .+)$", printed, flags=re.M)
        reader.run(export)
        assert "succeeded" in reader.run(submit)
        assert "us" in reader.run("geo-ray status clusters/cluster_local")
        check_runs(reader, short)
    check_queue(reader)
    reader.run("geo-ray down clusters/cluster_local")  # once more


def check_runs(reader: Reader, short: Path) -> None:
    """Sections "Submit a run" and "Store a run in a bucket"; a run is stopped in between."""
    run = short / "runs" / "my_job"
    reader.values = {
        "http://127.0.0.1:8265": os.environ["RAY_API_SERVER_ADDRESS"],
        "RAY_AUTH_TOKEN_PATH=token": f"RAY_AUTH_TOKEN_PATH={os.environ['RAY_AUTH_TOKEN_PATH']}",
        "/mnt/shared/geo_ray": str(short),
    }
    export, dry, submit, resume = commands(RUNS, "Submit a run")
    reader.run(export)
    reader.run(dry)

    def stop() -> None:
        eventually(lambda: count(run, "step") > 5, "the run trains")
        geo_ray.stop(run)

    with ThreadPoolExecutor(1) as others:
        stopped = others.submit(stop)
        assert "its state is saved" in reader.run(submit, exit_code=1)
        stopped.result()
    assert "succeeded" in reader.run(resume)
    change(Path("configs/my_job.yaml"), train={"steps": 8, "eval_every": 0})
    train, status = commands(RUNS, "Store a run in a bucket")
    reader.run(train)
    assert "finished" in reader.run(status)


def check_queue(reader: Reader) -> None:
    """Section "Try it on this computer" of the queue, on the cluster that is there already."""
    up, token, start, export, first, second, watch, down = commands(
        QUEUE, "Try it on this computer"
    )
    reader.run(up)
    secret, key = re.findall(r"^(?:token|key) +(\S+)$", reader.run(token), flags=re.M)
    reader.values = {"TOKEN": secret, "KEY": key}
    for command in (start, export, first, second):
        reader.run(command)
    browser = Path("browser")
    browser.write_text('#!/bin/sh\necho "$1" > opened.txt\n')
    browser.chmod(0o755)
    reader.monkeypatch.setenv("BROWSER", f"{browser.resolve()} %s")
    with reader.until_ctrl_c(watch, PAGE_ADDRESS) as shown:
        eventually(Path("opened.txt").exists, "the browser is opened")
        assert Path("opened.txt").read_text().strip() == shown[0]
    assert "is deleted" in reader.run(down)
    listed = reader.run("geo-ray queue list queues/local")
    assert "first" in listed and "second" in listed
