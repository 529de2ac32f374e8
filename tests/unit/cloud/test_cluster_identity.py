"""Identity of clusters of a name, of their heads and of their runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import geo_ray
from benchmarks.autoscale.cluster_kills import local_world
from geo_ray.api import clusters
from geo_ray.base.errors import ClusterNameTakenError, InterruptedRunError
from geo_ray.cloud.autoscaler.actions import AutoscalerStatus
from geo_ray.cloud.autoscaler.observation import Observed
from geo_ray.cloud.autoscaler.policy import AutoscalePolicy
from geo_ray.cloud.autoscaler.state import AutoscalerState
from geo_ray.cloud.cluster.down import end_cluster
from geo_ray.cloud.cluster.head import find_head, head_ends_unix_s, head_request, is_alive
from geo_ray.cloud.cluster.providers import open_accounts, open_clouds
from geo_ray.cloud.cluster.serve import ClusterServer
from geo_ray.cloud.cluster.state import ClusterRecord, ClusterState, ExistingHead
from geo_ray.cloud.cluster.status import ClusterReport, HeadStatus, read_status, write_status
from geo_ray.cloud.cluster.up import await_machines, make_cluster
from geo_ray.cloud.local import read_catalog, write_catalog
from geo_ray.cloud.provider import Availability, LaunchRequest, Machine, MachineState
from tests.support.cluster_support import CloudWorld, PlayedRay, asked_of, nobody, until


@pytest.fixture
def world(tmp_path: Path) -> Iterator[CloudWorld]:
    with ExitStack() as stack:
        yield stack.enter_context(local_world(tmp_path))


def head_of(record: ClusterRecord, state: ClusterState) -> Machine | None:
    return find_head(open_clouds(record, state).list_machines(record.name), record)


def end_and_wait(record: ClusterRecord, state: ClusterState, machine: Machine) -> None:
    open_clouds(record, state).terminate([machine.id])
    until(lambda: not is_alive(head_of(record, state)))


# ------------------------------------------------------------------ which cluster


def test_each_is_given_an_id_that_it_keeps(world: CloudWorld) -> None:
    asked, other = asked_of(world), asked_of(world)
    assert asked.record.id != other.record.id and len(asked.record.id) == 10
    made = make_cluster(asked, nobody)
    assert make_cluster(other, nobody).id == made.id == asked.record.id
    end_cluster(asked.state, nobody, at_once=True)
    again = make_cluster(other, nobody)
    assert (again.id, again.made) == (made.id, 2)
    assert made.token_secret == f"geo-ray-asked-{made.id}-token"
    end_cluster(asked.state, nobody, at_once=True)


def test_requests_say_which_cluster_and_how_manieth(world: CloudWorld) -> None:
    record = asked_of(world).record
    anew = record.model_copy(update={"made": 2})
    other = record.model_copy(update={"id": "0123456789"})
    heads = {head_request(each).request_id for each in (record, anew, other)}
    assert len(heads) == 3
    assert {head_request(each).cluster_id for each in (record, anew)} == {record.id}
    prefixes, requests = set(), set()
    for each in (record, anew, other):
        policy = AutoscalePolicy(each.autoscale, each.name, each.id, each.made)
        availabilities = {pool: Availability(pool, 1.0) for pool in each.target.pools()}
        seen = Observed(time.time(), (), availabilities=availabilities, left_s=5000.0)
        decided = policy.decide(each.target, AutoscalerState(token=1), seen)
        ids = set(decided.memory.pending_launches)
        assert ids and all(name.startswith(policy.prefix) and len(name) <= 64 for name in ids)
        assert not ids & requests, "a machine that has ended would come back in its place"
        prefixes.add(policy.prefix)
        requests |= ids
    assert len(prefixes) == 2, "what an earlier one of the same cluster has left is ended, too"


def test_a_cluster_of_the_same_name_is_refused_and_left_alone(world: CloudWorld) -> None:
    asked = asked_of(world)
    record = make_cluster(asked, nobody)
    pool = record.target.pools()[0]
    labels = {"geo-ray/role": "worker"}
    theirs = LaunchRequest("as-ffffffffff-1-1-1", record.name, pool, 1, labels, None, "ffffffffff")
    accounts = open_accounts(record, asked.state)
    accounts.launch(theirs)

    def strangers() -> list[Machine]:
        found = accounts.list_machines(record.name)
        alive = [each for each in found if each.state is not MachineState.ENDED]
        return [each for each in alive if each.cluster_id == "ffffffffff"]

    until(strangers)
    listed = open_clouds(record, asked.state).list_machines(record.name)
    assert {each.cluster_id for each in listed} == {record.id}
    with pytest.raises(ClusterNameTakenError, match="ffffffffff") as caught:
        make_cluster(asked, nobody)
    assert strangers()[0].id in caught.value.message and record.id in caught.value.message
    end_cluster(asked.state, nobody, at_once=True)
    (theirs_still,) = strangers()
    with pytest.raises(ClusterNameTakenError):
        make_cluster(asked_of(world), nobody)
    assert asked.state.known().phase == "down", "nothing was written"
    accounts.terminate([theirs_still.id])
    until(lambda: not strangers())
    make_cluster(asked_of(world), nobody)
    end_cluster(asked.state, nobody, at_once=True)


# ------------------------------------------------------------------ which head


def test_a_head_that_takes_anothers_place_has_a_life_of_its_own(world: CloudWorld) -> None:
    asked = asked_of(world)
    state = asked.state
    first = make_cluster(asked, nobody)
    machine = head_of(first, state)
    assert machine is not None
    end_and_wait(first, state, machine)
    _, tag = state.read()
    over = first.head.model_copy(update={"ends_unix_s": time.time() - 5.0})
    state.write(first.model_copy(update={"head": over}), tag)  # as when its time was up
    second = make_cluster(asked, nobody)
    assert second.head.number == 2
    assert second.head.ends_unix_s is not None
    assert second.head.ends_unix_s > time.time() + 3600.0
    assert is_alive(head_of(second, state))
    end_cluster(state, nobody, at_once=True)


def test_a_launch_that_was_only_written_down_long_ago_is_not_sent_any_more(
    world: CloudWorld,
) -> None:
    asked = asked_of(world)
    state = asked.state
    state.make()
    head = asked.record.head.model_copy(update={"ends_unix_s": time.time() + 60.0})
    state.write(asked.record.model_copy(update={"head": head}), None)
    made = make_cluster(asked, nobody)
    assert made.head.number == 2
    whole_s = head_ends_unix_s(made.provider, made.clouds, 0.0)
    assert (made.head.ends_unix_s or 0.0) > time.time() + whole_s / 2
    end_cluster(state, nobody, at_once=True)


def test_a_recreated_cluster_launches_another_head(
    world: CloudWorld,
) -> None:
    asked = asked_of(world)
    make_cluster(asked, nobody)
    end_cluster(asked.state, nobody, at_once=True)
    again = make_cluster(asked, nobody)  # of the same moment
    assert (again.made, again.head.number) == (2, 1)
    assert is_alive(head_of(again, asked.state))
    end_cluster(asked.state, nobody, at_once=True)


def test_a_head_that_stays_leaves_a_cluster_in_whose_place_another_was_made(
    world: CloudWorld,
) -> None:
    asked = asked_of(world)
    state = asked.state
    state.make()
    existing = ExistingHead(stack="demo", machine="i-0head", address="10.0.0.2:6379")
    head = asked.record.head.model_copy(update={"existing": existing})
    record = asked.record.model_copy(update={"head": head})
    tag = state.write(record, None)
    ray: Any = PlayedRay()
    server = ClusterServer(state, ray, record)
    state.write(record.model_copy(update={"made": 2}), tag)  # down and up between two looks
    server.run()
    assert ray.ended == [record.name]


def test_what_has_ended_of_an_earlier_cluster_is_not_counted_again(
    world: CloudWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("geo_ray.cloud.cluster.down._CLOCKS_S", 0.0)
    for _ in range(2):
        asked = asked_of(world)
        make_cluster(asked, nobody)
        assert end_cluster(asked.state, nobody, at_once=True).machines == 1


# ------------------------------------------------------------------ budget


def test_up_does_not_wait_for_machines_that_a_stopped_run_does_not_need(world: CloudWorld) -> None:
    asked = asked_of(world)
    made = make_cluster(asked, nobody)

    def told(left_s: float) -> ClusterReport:
        status = AutoscalerStatus(True, time.time(), left_s=left_s)
        _, tag = read_status(asked.state.store(), made.made)
        said = HeadStatus(unix_s=time.time(), made=made.made, status=status)
        write_status(asked.state.store(), said, tag)
        return await_machines(made, asked.state, 1.0, nobody)

    idle, awaited = told(0.0), told(60.0)
    assert idle.is_idle and "when a run waits" in " ".join(idle.notes)
    assert not awaited.is_idle and awaited.wanted == 2
    end_cluster(asked.state, nobody, at_once=True)


# ------------------------------------------------------------------ interrupted


def test_interrupting_up_or_down_reports_what_continues(world: CloudWorld) -> None:
    def interrupts(text: str) -> None:
        if "runs at" in text or "ending" in text:
            raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError, match="incomplete and continues") as made:
        geo_ray.up(world.config, provider="local", notify=interrupts)
    assert "geo-ray down" in made.value.fix
    state = asked_of(world).state
    with pytest.raises(InterruptedRunError, match="is not deleted") as ended:
        geo_ray.down(state.uri, at_once=True, notify=interrupts)
    assert "geo-ray down" in ended.value.fix
    geo_ray.down(state.uri, at_once=True)
    with (
        patch.object(clusters, "make_cluster", side_effect=KeyboardInterrupt),
        pytest.raises(InterruptedRunError, match="no part of asked was created"),
    ):
        geo_ray.up(world.config, provider="local")


# ------------------------------------------------------------------ what is for sale


def test_a_local_cloud_sells_what_the_next_cluster_may_ask_for(world: CloudWorld) -> None:
    asked = asked_of(world)
    root = asked.state.path / "cloud"
    there = read_catalog(root)
    one = next(each for each in there.offers if each.market == "spot" and "eu" in each.region)
    fewer = tuple(each for each in there.offers if each != one)
    write_catalog(root, there.model_copy(update={"offers": fewer}))
    before = read_catalog(root)
    make_cluster(asked, nobody)
    after = read_catalog(root)
    assert after.offers[: len(before.offers)] == before.offers
    assert after.offers[len(before.offers) :] == (one,)
    assert after.owner_pid == before.owner_pid
    end_cluster(asked.state, nobody, at_once=True)


def test_a_record_without_an_id_finds_its_head_and_its_token(world: CloudWorld) -> None:
    record = asked_of(world).record.model_copy(update={"id": ""})
    assert record.token_secret == "geo-ray-asked-token"
    ids = [head_request(each).request_id for each in (record, replace_began(record))]
    assert ids[0] != ids[1] and ids[0].startswith("head-")


def replace_began(record: ClusterRecord) -> ClusterRecord:
    return record.model_copy(update={"began_unix_s": record.began_unix_s + 1.0})
