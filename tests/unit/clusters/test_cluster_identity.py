"""Which cluster of a name it is, which of its heads, and which of its runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
from job_support import experiment as job_experiment

import geo_ray
from benchmarks.autoscale.cluster_kills import local_world
from geo_ray.api import clusters
from geo_ray.api.clusters import _asked
from geo_ray.autoscale.memory import AutoscalerMemory
from geo_ray.autoscale.observed import Observed
from geo_ray.autoscale.policy import AutoscalePolicy
from geo_ray.autoscale.status import AutoscalerStatus
from geo_ray.clusters.asked import AskedCluster
from geo_ray.clusters.clouds import open_accounts, open_clouds
from geo_ray.clusters.down import end_cluster
from geo_ray.clusters.head import find_head, head_ends_unix_s, head_request, is_alive
from geo_ray.clusters.record import ClusterRecord, StandingHead
from geo_ray.clusters.report import ClusterReport, ToldStatus, read_status, tell_status
from geo_ray.clusters.serve import ClusterServer, stop_runs
from geo_ray.clusters.state import ClusterState
from geo_ray.clusters.up import await_machines, make_cluster
from geo_ray.errors import ClusterNameTakenError, ClusterStateError, InterruptedRunError
from geo_ray.job import rundir
from geo_ray.lease.driving import driving, seeker_of
from geo_ray.observe.events.log import EVENTS_FILE, EventLog
from geo_ray.providers.base import LaunchRequest, Machine, MachineState, Stock
from geo_ray.providers.local.catalog import read_catalog, write_catalog
from geo_ray.runtime.control import stop_requests
from tests.cluster_support import CloudWorld


def nobody(_: str) -> None:
    pass


@pytest.fixture
def world(tmp_path: Path) -> Iterator[CloudWorld]:
    with ExitStack() as stack:
        yield stack.enter_context(local_world(tmp_path))


def asked_of(world: CloudWorld) -> AskedCluster:
    words: Any = (world.config, (), "local", None, "optimal", None, None, nobody)
    found: AskedCluster = _asked(*words)
    return found


def head_of(record: ClusterRecord, state: ClusterState) -> Machine | None:
    return find_head(open_clouds(record, state).list_machines(record.name), record)


def end_and_wait(record: ClusterRecord, state: ClusterState, machine: Machine) -> None:
    open_clouds(record, state).terminate([machine.id])
    until(lambda: not is_alive(head_of(record, state)))


def until(what: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60.0
    while not what():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


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
        stocks = {pool: Stock(pool, 1.0) for pool in each.target.pools()}
        seen = Observed(time.time(), (), stocks=stocks, left_s=5000.0)
        decided = policy.decide(each.target, AutoscalerMemory(epoch=1), seen)
        ids = set(decided.memory.intents)
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


def test_the_same_request_for_a_cluster_that_was_made_anew_makes_another_head(
    world: CloudWorld,
) -> None:
    asked = asked_of(world)
    make_cluster(asked, nobody)
    end_cluster(asked.state, nobody, at_once=True)
    again = make_cluster(asked, nobody)  # of the same moment
    assert (again.made, again.head.number) == (2, 1)
    assert is_alive(head_of(again, asked.state))
    end_cluster(asked.state, nobody, at_once=True)


@dataclass
class PlayedRay:
    """What a head does on Ray, as far as it is asked."""

    looks: int = 0
    saves: bool = False
    ended: list[str] = field(default_factory=list)
    allowed: list[float | None] = field(default_factory=list)

    def start(self, order: object) -> None:
        pass

    def status(self) -> AutoscalerStatus:
        self.looks += 1
        assert self.looks < 5, "it serves a cluster that is there no more"
        return AutoscalerStatus(True, saves=self.saves)

    def end(self, cluster: str) -> None:
        self.ended.append(cluster)

    def release(self) -> None:
        pass

    def allow(self, budget_usd: float | None) -> None:
        self.allowed.append(budget_usd)

    def stop_jobs(self, longest_s: float, tell: Callable[[str], None]) -> None:
        tell("geo-ray-queue-all is served no more")
        tell("stopping job one, which saves its run first")


def test_a_head_that_stays_leaves_a_cluster_in_whose_place_another_was_made(
    world: CloudWorld,
) -> None:
    asked = asked_of(world)
    state = asked.state
    state.make()
    standing = StandingHead(stack="demo", machine="i-0head", address="10.0.0.2:6379")
    head = asked.record.head.model_copy(update={"standing": standing})
    record = asked.record.model_copy(update={"head": head})
    tag = state.write(record, None)
    ray: Any = PlayedRay()
    server = ClusterServer(state, ray, record)
    state.write(record.model_copy(update={"made": 2}), tag)  # down and up between two looks
    server.run()
    assert ray.ended == [record.name]


def test_down_tells_all_that_the_head_did_however_fast_it_was(world: CloudWorld) -> None:
    asked = asked_of(world)
    record = make_cluster(asked, nobody)
    ray: Any = PlayedRay(looks=-1000)
    server = ClusterServer(asked.state, ray, record)
    thread = Thread(target=server.run)
    thread.start()
    said: list[str] = []
    assert end_cluster(asked.state, said.append).in_order
    thread.join()
    assert said[:5] == [
        "stopping runs",
        "geo-ray-queue-all is served no more",
        "stopping job one, which saves its run first",
        "runs have stopped; draining and ending machines",
        "all machines have ended",
    ]


def test_what_has_ended_of_an_earlier_cluster_is_not_counted_again(
    world: CloudWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("geo_ray.clusters.down._CLOCKS_S", 0.0)
    for _ in range(2):
        asked = asked_of(world)
        make_cluster(asked, nobody)
        assert end_cluster(asked.state, nobody, at_once=True).machines == 1


# ------------------------------------------------------------------ budget


def test_a_budget_is_changed_while_the_cluster_is_up(world: CloudWorld) -> None:
    world.config["plan"]["budget_usd"] = 500.0
    asked = asked_of(world)
    made = make_cluster(asked, nobody)
    assert made.target.budget_usd == 500.0
    ray: Any = PlayedRay(looks=-1000)
    thread = Thread(target=ClusterServer(asked.state, ray, made).run)
    thread.start()
    world.config["plan"]["budget_usd"] = 700.0
    said: list[str] = []
    again = make_cluster(asked_of(world), said.append)
    assert again.target == replace(made.target, budget_usd=700.0)
    assert again.made == made.made and "the budget of asked is changed: 700 USD" in said
    until(lambda: ray.allowed == [500.0, 700.0])
    world.config["train"] = {"steps": 7}
    with pytest.raises(ClusterStateError, match="another configuration"):
        make_cluster(asked_of(world), nobody)
    end_cluster(asked.state, nobody)
    thread.join()


def test_runs_are_saved_once_before_a_budget_ends_their_machines(
    world: CloudWorld, tmp_path: Path
) -> None:
    world.config["run"] = {"dir": str(tmp_path / "runs")}
    asked = asked_of(world)
    made = make_cluster(asked, nobody)
    path = rundir.create(
        job_experiment(f"run.dir={tmp_path / 'runs'}", "name=asked"), tmp_path
    ).path
    ray: Any = PlayedRay(looks=-1000)
    with ExitStack() as stack:
        stack.enter_context(driving(seeker_of(path, nobody)))
        stack.enter_context(EventLog(path / EVENTS_FILE))
        thread = Thread(target=ClusterServer(asked.state, ray, made).run)
        thread.start()
        until(lambda: ray.looks > -998)
        assert not stop_requests.take(path)
        ray.saves = True
        until(lambda: stop_requests.take(path))
        looks = ray.looks
        until(lambda: ray.looks > looks + 3)
        assert not stop_requests.take(path), "once"
    said: list[str] = []
    end_cluster(asked.state, said.append)
    thread.join()
    assert said[0] == "the budget is nearly used up" and f"{path}" in said[1]


def test_up_does_not_wait_for_machines_that_a_stopped_run_does_not_need(world: CloudWorld) -> None:
    asked = asked_of(world)
    made = make_cluster(asked, nobody)

    def told(left_s: float) -> ClusterReport:
        status = AutoscalerStatus(True, time.time(), left_s=left_s)
        _, tag = read_status(asked.state.store(), made.made)
        said = ToldStatus(unix_s=time.time(), made=made.made, status=status)
        tell_status(asked.state.store(), said, tag)
        return await_machines(made, asked.state, 1.0, nobody)

    idle, awaited = told(0.0), told(60.0)
    assert idle.is_idle and "submit it to go on" in " ".join(idle.notes)
    assert not awaited.is_idle and awaited.wanted == 2
    end_cluster(asked.state, nobody, at_once=True)


# ------------------------------------------------------------------ interrupted


def test_who_interrupts_up_or_down_is_told_what_goes_on(world: CloudWorld) -> None:
    def interrupts(text: str) -> None:
        if "runs at" in text or "ending" in text:
            raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError, match="half made, and goes on") as made:
        geo_ray.up(world.config, provider="local", tell=interrupts)
    assert "geo-ray down" in made.value.fix
    state = asked_of(world).state
    with pytest.raises(InterruptedRunError, match="is not down") as ended:
        geo_ray.down(state.uri, at_once=True, tell=interrupts)
    assert "geo-ray down" in ended.value.fix
    geo_ray.down(state.uri, at_once=True)
    with (
        patch.object(clusters, "make_cluster", side_effect=KeyboardInterrupt),
        pytest.raises(InterruptedRunError, match="nothing of asked was begun"),
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


# ------------------------------------------------------------------ which run


def test_the_run_that_goes_on_is_stopped_in_whichever_directory_it_is(tmp_path: Path) -> None:
    def made(name: str) -> Path:
        config = job_experiment(f"run.dir={tmp_path / 'runs'}", f"name={name}")
        return rundir.create(config, tmp_path).path

    first, second, other = made("trial"), made("trial"), made("trial-7")
    broken = made("trial")
    (broken / rundir.CONFIG_FILE).write_text("x: [")
    said: list[str] = []
    with ExitStack() as stack:
        for path in (second, other):
            stack.enter_context(driving(seeker_of(path, nobody)))
            stack.enter_context(EventLog(path / EVENTS_FILE))
        stop_runs(tmp_path / "runs" / "trial", 0.0, time.monotonic(), said.append)
    assert [path.name for path in (first, second, other)] == ["trial", "trial-2", "trial-7"]
    assert (stop_requests.take(first), stop_requests.take(other)) == (False, False)
    assert stop_requests.take(second)
    assert len(said) == 1


def test_a_record_without_an_id_finds_its_head_and_its_token(world: CloudWorld) -> None:
    record = asked_of(world).record.model_copy(update={"id": ""})
    assert record.token_secret == "geo-ray-asked-token"
    ids = [head_request(each).request_id for each in (record, replace_began(record))]
    assert ids[0] != ids[1] and ids[0].startswith("head-")


def replace_began(record: ClusterRecord) -> ClusterRecord:
    return record.model_copy(update={"began_unix_s": record.began_unix_s + 1.0})
