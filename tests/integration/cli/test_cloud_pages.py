"""Pages that use a cloud or a served queue: their commands run against servers on this machine."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from geo_ray.cloud.cluster.state import ClusterState
from geo_ray.cloud.secrets import open_secrets
from geo_ray.prices.price_book import load_book
from geo_ray.prices.tencent import Tencent
from tests.support.cloud_servers import (
    AwsAnswers,
    LoopbackCloud,
    TencentAnswers,
    as_caller,
    instance_product,
    quota,
)
from tests.support.cluster_support import (
    STACK_TOKEN,
    CloudWorld,
    aws_world,
    near_store,
    on_a_stack,
    played_head,
    tencent_world,
)
from tests.support.pages import ROOT, Reader, commands
from tests.support.queue_support import TOKENS, SimQueue, sim_queue
from tests.support.terraform_support import INFRA, aws_plugins, terraform_program

pytestmark = pytest.mark.timeout(900)
CLUSTERS, QUEUE = "docs/operations/clusters.md", "docs/operations/queue.md"
TERRAFORM, PRICES = "docs/operations/terraform.md", "docs/guides/prices.md"
EXAMPLE = Path("infra/terraform/examples/two_regions_aws")


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    """A reader with credentials of the clouds, in a project."""
    as_caller(monkeypatch, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("geo_ray.cloud.cluster.state._REMOTE_POLL_S", 0.3)
    shutil.copytree(ROOT / "configs", "configs")
    return Reader(monkeypatch)


def test_prices_are_shown_and_refreshed(reader: Reader) -> None:
    """`docs/guides/prices.md`"""
    aws = AwsAnswers([instance_product("us-east-1", "g5.xlarge", "1.1")])
    zones = ("ap-shanghai-2", "ap-tokyo-1")
    traffic = {"UnitPrice": 0.8, "ChargeUnit": "GB"}
    tencent = TencentAnswers(
        [quota(zone, "GN7.2XLARGE32") for zone in zones],
        dict.fromkeys(("ap-shanghai", "ap-tokyo"), traffic),
    )
    with LoopbackCloud(aws) as aws_cloud, LoopbackCloud(tencent) as tencent_cloud:
        for service in ("EC2", "PRICING"):
            reader.monkeypatch.setenv(f"AWS_ENDPOINT_URL_{service}", aws_cloud.url)
        on_tencent = Tencent.__init__  # whose SDK has no variable for an endpoint

        def on_loopback(self: Tencent, endpoint: str | None = None, **more: Any) -> None:
            on_tencent(self, endpoint or tencent_cloud.url, **more)

        reader.monkeypatch.setattr(Tencent, "__init__", on_loopback)
        printed = [reader.run(command) for command in commands(PRICES)]
    assert "p4d.24xlarge" in printed[0]
    read = {(each.cloud, each.region, each.type) for each in load_book(Path("prices.json")).records}
    assert {("aws", "us-east-1", "g5.xlarge"), ("tencent", "ap-tokyo", "GN7.2XLARGE32")} <= read


def saved_job(world: CloudWorld) -> None:
    Path("configs/my_job.yaml").write_text(json.dumps(world.config))


def test_a_cluster_in_a_cloud(reader: Reader, tmp_path: Path) -> None:
    with aws_world(tmp_path) as world:
        reader.monkeypatch.setattr(ClusterState, "_store", near_store(tmp_path / "state"))
        saved_job(world)
        dry, up = commands(CLUSTERS, "Create a cluster in a cloud")
        assert "nothing was started" in reader.run(dry)
        assert world.server.launches == []
        with played_head(world.state):
            assert "Rent these machines?" in reader.run(up, answer="y\n")
            assert len(world.living()) == 3
            reader.run(f"geo-ray down '{world.state.uri}'")
        assert world.living() == []


@pytest.fixture
def infra(reader: Reader, tmp_path: Path) -> Path:
    """The stacks of the repository, and a program that prints what `terraform apply` has made."""
    shutil.copytree(INFRA, EXAMPLE.parents[1])
    return tmp_path / EXAMPLE


def applied(reader: Reader, stack: Path) -> None:
    """Have `terraform output` print the outputs of a stack that was applied."""
    program = Path("applied_terraform").resolve()
    program.write_text(f"#!/bin/sh\nexec cat {stack}\n")
    program.chmod(0o755)
    reader.monkeypatch.setenv("GEO_RAY_TERRAFORM", str(program))


def test_a_stack(reader: Reader, infra: Path, tmp_path: Path) -> None:
    """Section "Create a stack"; `tests/integration/cloud/test_terraform_aws.py` applies it."""
    ran = []
    with tencent_world(tmp_path) as world:
        on_a_stack(world, tmp_path)
        assert world.stack is not None
        for command in commands(TERRAFORM, "Create a stack"):
            if command == "terraform init":
                program = Path(terraform_program()).parent
                reader.monkeypatch.setenv("PATH", str(program), prepend=":")
                reader.monkeypatch.setenv("TF_CLI_ARGS_init", f"-plugin-dir={aws_plugins()}")
            if command.startswith(("terraform apply", "aws ")):
                applied(reader, world.stack)
                continue
            ran.append(reader.run(command))
    assert Path.cwd() == infra
    assert Path("terraform.tfvars").exists()
    assert "successfully initialized" in ran[2]
    assert "at: ap-tokyo" in ran[3]


def test_a_cluster_on_a_stack(reader: Reader, infra: Path, tmp_path: Path) -> None:
    """Section "The autoscaler controls the machines", without its run: Ray is played here."""
    section = commands(TERRAFORM, "The autoscaler controls the machines")
    up, submit, down = section
    assert submit.startswith("ray job submit ")
    with aws_world(tmp_path) as world:
        bucket = world.config["provider"]["state"]
        reader.monkeypatch.setenv("AWS_ENDPOINT_URL_S3", world.server.moto)
        reader.values["BUCKET"] = bucket.partition("//")[2].partition("/")[0]
        world.config["name"] = "demo"
        world.config["provider"]["state"] = (
            f"s3://{reader.values['BUCKET']}/clusters?region=us-east-1"
        )
        on_a_stack(world, tmp_path)
        assert world.stack is not None
        saved_job(world)
        applied(reader, world.stack)
        endpoint = world.config["provider"]["aws"]["endpoints"]["secretsmanager"]
        open_secrets("aws-secretsmanager", "us-east-1", endpoint).put(STACK_TOKEN, "a" * 64)
        with played_head(world.state):
            reader.run(up, answer="y\n")
            assert len(world.living()) == 2
            assert "2 machines terminated" in reader.run(down)
        assert world.living() == []


@contextmanager
def served(queue: SimQueue) -> Iterator[None]:
    """Serve a queue over a simulated cluster on the wall clock."""
    ended = threading.Event()

    def tick() -> None:
        queue.world.now_s = time.time()
        queue.tick()

    def serve() -> None:
        while not ended.wait(0.05):
            tick()

    tick()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_jobs_of_a_queue(reader: Reader) -> None:
    place = Path("queues/shared")
    place.mkdir(parents=True)
    queue = sim_queue(place.resolve(), policy="pd_ors")
    reader.monkeypatch.setenv("GEO_RAY_QUEUE_TENANT", "red")
    reader.monkeypatch.setenv("GEO_RAY_QUEUE_TOKEN", TOKENS["red"])
    job = yaml.safe_load(Path("configs/cluster.yaml").read_text())
    regions = [{"name": "us"}, {"name": "eu"}]
    job |= {
        "name": "job",
        "regions": regions,
        "averager": {"region": "us"},
        "emulate": {"step_s": 0.1},
    }
    Path("job.yaml").write_text(yaml.safe_dump(job))
    section = commands(QUEUE, "Submit and change jobs")
    with served(queue):
        said = [reader.run(command) for command in section]
    assert [each.split(";")[0].splitlines()[-1] for each in said[::3]] == ["accepted", "cancelled"]
    assert "job      job of tenant red" in said[1]
    assert "moved" in said[2] and "value    40" in said[2]
    assert json.loads(reader.run("geo-ray queue list queues/shared --json").partition("\n")[2])
