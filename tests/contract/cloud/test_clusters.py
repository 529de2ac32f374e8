"""Contract of clusters in every cloud: the offer, the machines, and a clean end."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import geo_ray
from geo_ray.api.clusters import UpCluster, cluster_status, up_offer
from geo_ray.base.errors import (
    ClusterNameTakenError,
    ClusterStartError,
    ClusterStateError,
    ConfigError,
    MachinesLeftError,
    ProviderRefusedError,
)
from geo_ray.cli.main import root
from geo_ray.cloud.autoscaler.journal import JOURNAL_KEY
from geo_ray.cloud.autoscaler.state import AutoscalerState, encode_memory
from geo_ray.cloud.cluster.down import EndedCluster
from geo_ray.cloud.cluster.head import head_request
from geo_ray.cloud.cluster.providers import open_clouds, secrets_of
from geo_ray.cloud.cluster.state import ClusterState
from tests.support.cloud_servers import as_caller, shows_no_secret
from tests.support.cluster_support import WORLDS, CloudWorld, boots, near_store, played_head

pytestmark = pytest.mark.timeout(900)


# What the answers of a cloud do not change is tried with the quicker server; `--all` tries both.
ONE_CLOUD = pytest.mark.parametrize(
    "world", [pytest.param("aws", marks=pytest.mark.slow), "tencent"], indirect=True
)


@pytest.fixture(params=["aws", "tencent"])
def world(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CloudWorld]:
    as_caller(monkeypatch, tmp_path)
    monkeypatch.setattr("geo_ray.cloud.cluster.state._REMOTE_POLL_S", 0.3)
    monkeypatch.chdir(tmp_path)
    with WORLDS[request.param](tmp_path) as made:
        yield made


@pytest.fixture
def near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state lies in a directory in place of the bucket, which is as good and much quicker."""

    monkeypatch.setattr(ClusterState, "_store", near_store(tmp_path / "state"))


def up(world: CloudWorld) -> UpCluster:
    return geo_ray.up(world.config, inputs=world.inputs, longest_s=150.0, notify=world.told.append)


def down(world: CloudWorld) -> EndedCluster:
    return geo_ray.down(world.state.uri, notify=world.told.append)


def token_of(world: CloudWorld) -> str:
    record = world.state.known()
    (store,) = secrets_of(record, world.state)
    return store.get(record.token_secret)


@ONE_CLOUD
def test_a_dry_run_shows_prices_and_alternatives_and_rents_nothing(world: CloudWorld) -> None:
    offer = up_offer(world.config, inputs=world.inputs)
    assert world.server.launches == []
    assert world.state.read() == (None, None)
    head, *machines = offer.machines
    assert (head.role, head.count) == ("head", 1)
    assert head.usd_per_hour is not None
    taken = [each for each in machines if each.count]
    assert {each.region for each in taken} == {"east", "west"}
    spot = [each for each in machines if each.market == "spot"]
    on_demand = [each for each in machines if each.market == "on_demand"]
    assert min(e.usd_per_hour or 9 for e in on_demand) > max(e.usd_per_hour or 0 for e in spot)
    total = sum(each.count * (each.usd_per_hour or 0) for each in offer.machines)
    assert offer.usd_per_hour == pytest.approx(total)


@pytest.mark.slow
def test_the_state_may_lie_in_a_bucket(world: CloudWorld) -> None:
    with played_head(world.state):
        up(world)
        assert len(world.living()) == 3
        assert down(world).in_order
    assert world.living() == []
    assert world.state.known().phase == "down"


@ONE_CLOUD
@pytest.mark.usefixtures("near")
def test_from_an_empty_account_to_the_bill_and_back_to_nothing(world: CloudWorld) -> None:
    with played_head(world.state):
        made = up(world)
        record = world.state.known()
        token = token_of(world)
        assert made.report.head is not None
        assert made.report.acts
        assert all(
            node_group.ready == node_group.planned == 1 for node_group in made.report.node_groups
        )
        roles = sorted(m.labels["geo-ray/role"] for m in world.living())
        assert roles == ["head", "worker", "worker"]

        head, *nodes = boots(world)
        assert "--head --port=6379" in head
        assert "RAY_gcs_storage=rocksdb" in head
        assert f"geo_ray.cloud.cluster.serve '{world.state.uri}'" in head
        assert ("AWS_SHARED_CREDENTIALS_FILE" in head) == (world.cloud == "tencent")
        assert len(nodes) == 2
        for script in nodes:
            assert f"--address={made.report.address}" in script
            assert record.token_secret in script
            assert "AWS_SHARED_CREDENTIALS_FILE" not in script
        assert not any(token in script for script in (head, *nodes))
        assert shows_no_secret("".join((head, *nodes, record.model_dump_json())))

        launches = len(world.server.launches)
        again = up(world)  # it is there: nothing is rented, nothing changes
        assert len(world.server.launches) == launches
        assert again.report.head is not None
        assert again.report.head.id == made.report.head.id
        assert token_of(world) == token

        report = cluster_status(world.state.uri)
        assert report.usd_per_hour == pytest.approx(made.report.usd_per_hour)
        assert report.spent_usd > 0
        assert report.to_finish_usd == pytest.approx(report.usd_per_hour * 5000 / 3600)
        assert any(each.alternatives for each in report.decisions)

        ended = down(world)
        assert ended.in_order
        assert ended.machines >= 3
    assert world.living() == []
    with pytest.raises(ProviderRefusedError, match="has no secret"):
        token_of(world)
    assert world.state.known().phase == "down"
    again = down(world)
    assert (again.was_down, again.machines) == (True, 0)
    assert again.spent_usd == ended.spent_usd == cluster_status(world.state.uri).spent_usd
    said = CliRunner().invoke(root, ["down", world.state.uri]).stdout
    assert "was already deleted" in said


@ONE_CLOUD
@pytest.mark.usefixtures("near")
def test_a_head_that_was_ended_by_hand_is_replaced_and_down_needs_none(world: CloudWorld) -> None:
    with played_head(world.state):
        made = up(world)
        assert made.report.head is not None
        provider = open_clouds(world.state.known(), world.state)
        provider.terminate([made.report.head.id])
        world_until_gone(world, made.report.head.id)
        report = cluster_status(world.state.uri)
        assert any("geo-ray up" in note for note in report.notes)
        again = up(world)
        assert again.report.head is not None
        assert again.report.head.id != made.report.head.id
        assert world.state.known().head.number == 2
    provider.terminate([again.report.head.id])
    world_until_gone(world, again.report.head.id)
    ended = down(world)
    assert not ended.in_order
    assert ended.machines >= 2
    assert world.living() == []

    with played_head(world.state):  # and from the beginning
        up(world)
        assert world.state.known().made == 2
        assert len(world.living()) == 3
        assert down(world).in_order
    assert world.living() == []


@ONE_CLOUD
@pytest.mark.usefixtures("near")
def test_a_head_that_takes_anothers_place_outlives_it(world: CloudWorld) -> None:
    with played_head(world.state):
        made = up(world)
        assert made.report.head is not None
        open_clouds(world.state.known(), world.state).terminate([made.report.head.id])
        world_until_gone(world, made.report.head.id)
        record, tag = world.state.read()
        assert record is not None
        over = record.head.model_copy(update={"ends_unix_s": time.time() - 60.0})
        world.state.write(record.model_copy(update={"head": over}), tag)  # its life was over
        again = up(world)
        assert again.report.head is not None
        heads = [m for m in world.living() if m.labels["geo-ray/role"] == "head"]
        assert [m.id for m in heads] == [again.report.head.id]
        assert (heads[0].ends_unix_s or 0.0) > time.time() + 3600.0
        script = [each for each in boots(world) if "--head" in each][-1]
        (ends,) = re.findall(r"minutes=\$\(\( \((\d+) - ", script)
        assert int(ends) > time.time() + 3600.0, "its own switch, too"
        down(world)
    assert world.living() == []


@ONE_CLOUD
@pytest.mark.usefixtures("near")
def test_a_cluster_of_the_same_name_elsewhere_is_refused_and_not_touched(
    world: CloudWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with played_head(world.state):
        up(world)
    mine, launches = world.state.known(), len(world.server.launches)
    there = {machine.id for machine in world.living()}
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(ClusterState, "_store", near_store(tmp_path / "elsewhere"))
        with pytest.raises(ClusterNameTakenError, match=mine.id) as caught:
            up(world)
        assert all(id_ in caught.value.message for id_ in there)
        assert world.state.read() == (None, None), "nothing was written"
        record = mine.model_copy(update={"id": "abcdef0123"})  # as if both had begun at once
        world.state.write(record, None)
        ended = geo_ray.down(world.state.uri, at_once=True)
        assert ended.machines == 0
    assert {machine.id for machine in world.living()} == there
    assert len(world.server.launches) == launches
    assert token_of(world), "its token, too, is there"
    ended = geo_ray.down(world.state.uri, at_once=True)
    assert ended.machines == len(there)
    assert world.living() == []


@ONE_CLOUD
@pytest.mark.usefixtures("near")
@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", marks=pytest.mark.slow),
        pytest.param(b"{", marks=pytest.mark.slow),
        encode_memory(AutoscalerState())[:-4],
    ],
)
def test_a_damaged_journal_keeps_no_machine_alive(world: CloudWorld, data: bytes) -> None:
    with played_head(world.state):
        up(world)
    store = world.state.store()
    found = store.read(JOURNAL_KEY)
    assert found is not None
    store.write(JOURNAL_KEY, data, found.tag)
    report = cluster_status(world.state.uri)
    assert len(report.machines) == 2
    assert any("journal cannot be read" in note for note in report.notes)
    done = CliRunner().invoke(root, ["down", "--now", world.state.uri])
    assert done.exception is None, done.output
    assert world.living() == []
    aside = f"{JOURNAL_KEY}.unread-1"
    assert aside in done.output
    kept = store.read(aside)
    assert kept is not None and kept.data == data
    with played_head(world.state):  # and from the beginning
        up(world)
        assert down(world).unread is None
    assert world.living() == []


def world_until_gone(world: CloudWorld, machine: str) -> None:
    deadline_s = time.monotonic() + 300.0
    while any(each.id == machine for each in world.living()):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


@ONE_CLOUD
@pytest.mark.usefixtures("near")
def test_two_at_once_make_one_cluster(world: CloudWorld) -> None:
    with played_head(world.state):
        errors: list[BaseException] = []

        def one() -> None:
            try:
                up(world)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=one) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert len(world.living()) == 3
        down(world)
    assert world.living() == []


@ONE_CLOUD
@pytest.mark.usefixtures("near")
def test_a_missing_right_is_named_and_nothing_is_left(world: CloudWorld) -> None:
    forbidden = world.server.denied
    forbidden.add("RunInstances")
    with pytest.raises(ProviderRefusedError, match="RunInstances"):
        up(world)
    assert world.living() == []
    forbidden.clear()
    assert down(world).machines == 0


@pytest.mark.usefixtures("near")
def test_wrong_credentials_are_reported_before_any_launch(
    world: CloudWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    monkeypatch.setenv("TENCENTCLOUD_SECRET_KEY", "wrong")
    with pytest.raises(ProviderRefusedError) as caught:
        up(world)
    assert "credentials" in str(caught.value)
    assert world.server.launches == []


def test_a_bucket_of_the_state_that_cannot_be_read_is_named(
    world: CloudWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "TENCENTCLOUD_SECRET_ID"):
        monkeypatch.setenv(name, "")
    with pytest.raises(ClusterStateError, match=r"`provider\.state`"):
        up(world)
    assert world.told == [] and world.server.launches == []


@ONE_CLOUD
@pytest.mark.usefixtures("near")
def test_machines_that_cannot_be_ended_are_reported_as_a_failure(
    world: CloudWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    with played_head(world.state):
        up(world)
    monkeypatch.setattr("geo_ray.cloud.cluster.down._GONE_S", 1.0)
    monkeypatch.setattr(
        "geo_ray.cloud.cluster.down._SILENT_S", 1.0
    )  # nobody plays the head any more
    world.server.denied.add("TerminateInstances")
    done = CliRunner().invoke(root, ["down", "--now", world.state.uri])
    assert isinstance(done.exception, (ProviderRefusedError, MachinesLeftError))
    assert "TerminateInstances" in str(done.exception)
    assert len(world.living()) == 3
    assert world.state.known().phase == "ending"
    with pytest.raises(ClusterStateError, match="taken down"):
        up(world)
    world.server.denied.clear()
    down(world)
    assert world.living() == []


@ONE_CLOUD
@pytest.mark.usefixtures("near")
def test_another_configuration_does_not_change_a_cluster(world: CloudWorld) -> None:
    with played_head(world.state):
        up(world)
        changed: dict[str, Any] = json.loads(json.dumps(world.config))
        changed["train"]["steps"] = 10
        with pytest.raises(ClusterStateError, match="another configuration"):
            geo_ray.up(changed, inputs=world.inputs)
        down(world)


@pytest.mark.usefixtures("near")
def test_a_head_that_is_sold_out_says_so(world: CloudWorld) -> None:
    type_ = world.config["plan"]["regions"]["east"]["machines"][0]["type"]
    world.server.left[type_] = 0
    with pytest.raises(ClusterStartError, match="sold_out"):
        up(world)
    assert down(world).machines == 0


@ONE_CLOUD
@pytest.mark.usefixtures("near")
def test_a_lost_answer_makes_no_second_head(world: CloudWorld) -> None:
    world.server.lose = 1
    with pytest.raises(geo_ray.GeoRayError):
        up(world)
    with played_head(world.state):
        up(world)
        heads = [m for m in world.living() if m.labels["geo-ray/role"] == "head"]
        assert len(heads) == 1
        assert heads[0].request_id == head_request(world.state.known()).request_id
        down(world)
    assert world.living() == []


@pytest.mark.usefixtures("near")
def test_places_and_state_are_asked_for(world: CloudWorld) -> None:
    config: dict[str, Any] = json.loads(json.dumps(world.config))
    config["provider"]["state"] = "clusters"
    with pytest.raises(ConfigError, match=r"provider\.state"):
        geo_ray.up(config, inputs=world.inputs, notify=world.told.append)
    assert world.told == [], "it is in the file: no plan is made before"
    config = json.loads(json.dumps(world.config))
    del config["provider"][world.cloud]
    with pytest.raises(ConfigError, match=f"account is configured there|{world.cloud}"):
        geo_ray.up(config, inputs=world.inputs)


@ONE_CLOUD
@pytest.mark.usefixtures("near")
def test_killed_at_any_call_nothing_is_left(world: CloudWorld) -> None:
    from benchmarks.autoscale.cluster_kills import random_cluster_kills

    left, kills = random_cluster_kills(world, 8, seed=7)
    assert (left, kills) == (0, 8)
