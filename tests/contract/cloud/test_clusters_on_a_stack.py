"""Contract of clusters on a Terraform stack: the head is used, machines come and go."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import geo_ray
from benchmarks.autoscale.cluster_kills import random_cluster_kills
from geo_ray.api.clusters import UpCluster, cluster_status, up_offer
from geo_ray.base.errors import ClusterStartError, ClusterStateError
from geo_ray.cli.main import root
from geo_ray.cloud.cluster.state import ClusterState
from geo_ray.cloud.secrets import SecretStore, open_secrets
from tests.support.cloud_servers import as_caller
from tests.support.cluster_support import (
    STACK_HEAD,
    STACK_TOKEN,
    WORLDS,
    CloudWorld,
    boots,
    near_store,
    on_a_stack,
    played_head,
)

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(params=["aws", "tencent"])
def world(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CloudWorld]:
    as_caller(monkeypatch, tmp_path)
    monkeypatch.setattr("geo_ray.cloud.cluster.state._REMOTE_POLL_S", 0.3)
    monkeypatch.setattr(ClusterState, "_store", near_store(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    with WORLDS[request.param](tmp_path) as made:
        on_a_stack(made, tmp_path)
        yield made


def up(world: CloudWorld) -> UpCluster:
    return geo_ray.up(
        world.config,
        provider="terraform",
        from_terraform=world.stack,
        inputs=world.inputs,
        longest_s=150.0,
        notify=world.told.append,
    )


def secret_of(world: CloudWorld) -> SecretStore:
    """Secret store of the stack."""
    section = world.config["provider"][world.cloud]
    region = world.config["plan"]["regions"]["east"]["at"]
    if world.cloud == "aws":
        return open_secrets("aws-secretsmanager", region, section["endpoints"]["secretsmanager"])
    return open_secrets("tencent-ssm", region, section["endpoint"])


@pytest.mark.parametrize(
    "world", [pytest.param("aws", marks=pytest.mark.slow), "tencent"], indirect=True
)
def test_machines_come_and_go_and_what_terraform_made_stays(world: CloudWorld) -> None:
    secret_of(world).put(STACK_TOKEN, "a" * 64)
    offer = up_offer(world.config, from_terraform=world.stack, inputs=world.inputs)
    assert {each.role for each in offer.machines} == {"worker"}, "the head is not rented"
    with played_head(world.state):
        made = up(world)
        report, record = made.report, made.record
        assert (report.address, report.head) == (STACK_HEAD, None)
        assert report.job_server == "http://127.0.0.1:8265"
        assert all(node_group.ready == node_group.planned == 1 for node_group in report.node_groups)
        assert any("i-0head belongs to the Terraform stack demo" in note for note in report.notes)
        assert report.usd_per_hour == pytest.approx(offer.usd_per_hour)
        assert STACK_TOKEN in (made.token_command or "")
        images = {each["ImageId"] for each in world.server.launches}
        assert images <= {"ami-12c6146b", "img-canary01"}
        assert len(boots(world)) == 2
        for script in boots(world):
            assert f"--address={STACK_HEAD}" in script
            assert STACK_TOKEN in script
            assert "--head" not in script
            assert "AWS_SHARED_CREDENTIALS_FILE" not in script

        up(world)  # once more: nothing changes
        assert len(world.server.launches) == 2

        done = CliRunner().invoke(root, ["down", world.state.uri])
        assert done.exception is None, done.output
        assert "2 machines terminated" in done.output
        assert "the Terraform stack demo: `terraform destroy`" in done.output
        assert world.living() == []
        assert secret_of(world).get(STACK_TOKEN) == "a" * 64

        up(world)  # on the same head, once it has gone
        assert world.state.known().made == 2
        assert len(world.living()) == 2
        ended = geo_ray.down(world.state.uri)
        assert (ended.in_order, ended.stack) == (True, "demo")
    assert world.living() == []
    assert record.head.ends_unix_s is None


@pytest.mark.parametrize("world", ["tencent"], indirect=True)
def test_an_unresponsive_head_keeps_no_machines_and_launches_none_later(
    world: CloudWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("geo_ray.cloud.cluster.down._SILENT_S", 1.0)
    with played_head(world.state):
        up(world)
    told: list[str] = []
    ended = geo_ray.down(world.state.uri, notify=told.append)
    assert (ended.in_order, ended.machines) == (False, 2)
    assert any("has not reported" in line for line in told)
    launches = len(world.server.launches)
    with played_head(world.state):  # it is back
        assert geo_ray.down(world.state.uri).machines == 0
    assert (world.living(), len(world.server.launches)) == ([], launches)


@pytest.mark.parametrize("world", ["tencent"], indirect=True)
@pytest.mark.parametrize("ahead_s", [pytest.param(-7200.0, marks=pytest.mark.slow), 7200.0])
def test_different_clocks_do_not_make_a_head_unresponsive(
    world: CloudWorld, ahead_s: float
) -> None:
    with played_head(world.state, ahead_s):
        made = up(world)
        assert made.report.acts
        assert all(
            node_group.ready == node_group.planned == 1 for node_group in made.report.node_groups
        )
        (note,) = [n for n in cluster_status(world.state.uri).notes if "has not reported" in n]
        assert "as far as clocks agree" in note
        assert geo_ray.down(world.state.uri).in_order
    assert world.living() == []


@pytest.mark.parametrize("world", ["tencent"], indirect=True)
def test_a_head_without_a_service_is_reported(
    world: CloudWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("geo_ray.cloud.cluster.up._HEAD_S", 1.0)
    with pytest.raises(ClusterStartError, match="its autoscaler has not reported") as caught:
        up(world)
    assert "geo-ray-cluster" in caught.value.fix
    assert world.server.launches == []
    monkeypatch.setattr("geo_ray.cloud.cluster.down._SILENT_S", 0.0)
    assert geo_ray.down(world.state.uri).machines == 0


@pytest.mark.parametrize("world", ["tencent"], indirect=True)
def test_another_stack_does_not_change_a_cluster(world: CloudWorld) -> None:
    assert world.stack is not None
    with played_head(world.state):
        up(world)
        outputs = json.loads(world.stack.read_text())
        outputs["geo_ray"]["value"]["head"]["address"] = "10.20.128.11:6379"
        world.stack.write_text(json.dumps(outputs))
        with pytest.raises(ClusterStateError, match="another configuration"):
            up(world)
        geo_ray.down(world.state.uri, at_once=True)
    assert world.living() == []


@pytest.mark.parametrize("world", ["tencent"], indirect=True)
def test_killed_at_any_call_nothing_is_left(world: CloudWorld) -> None:
    left, kills = random_cluster_kills(world, 8, seed=11)
    assert (left, kills) == (0, 8)
