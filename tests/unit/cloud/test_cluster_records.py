"""Cluster records, cluster locks, and cluster status."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray._private.runtime_env.packaging import get_uri_for_directory

import geo_ray
from geo_ray.api.clusters import cluster_at, cluster_status
from geo_ray.base.errors import (
    ClusterBusyError,
    ClusterStateError,
    ConfigError,
    RegionsUnreachableError,
)
from geo_ray.base.load import load_tree, override_items
from geo_ray.cloud.autoscaler.actions import ActionReport, AutoscalerStatus
from geo_ray.cloud.autoscaler.journal import JOURNAL_KEY
from geo_ray.cloud.autoscaler.state import (
    AutoscalerState,
    InstanceState,
    ManagedInstance,
    PendingTermination,
    PoolRecord,
    decode_memory,
    encode_memory,
    pool_key,
)
from geo_ray.cloud.autoscaler.target import REGION_LABEL, ROLE_LABEL
from geo_ray.cloud.cluster.head import find_head, head_address, head_request, listed_for_head
from geo_ray.cloud.cluster.providers import key_of_own_role
from geo_ray.cloud.cluster.spec import ClusterSpec, cluster_spec
from geo_ray.cloud.cluster.state import (
    ClusterRecord,
    ClusterState,
    cluster_lock,
    decode_cluster,
    encode_cluster,
    names_cluster,
)
from geo_ray.cloud.cluster.status import (
    ClusterReport,
    HeadStatus,
    read_status,
    report_of,
    write_status,
)
from geo_ray.cloud.cluster.up import _forget
from geo_ray.cloud.provider import Availability, LaunchRequest, Machine, MachineState, Market, Pool
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.plan import Plan
from geo_ray.prices.price_book import bundled_book
from geo_ray.runs.lease import LEASE_KEY
from geo_ray.runs.planning import Sources, make_plan
from geo_ray.storage.conditional_store import MAX_RECORD_BYTES

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "configs" / "cluster_local.yaml"
NOW_S = 1_800_000_000.0
READY, DRAINING = InstanceState.READY, InstanceState.DRAINING
ID = "0123456789"


def test_neither_commits_nor_uploads_have_a_clusters_folder(tmp_path: Path) -> None:
    """Its files change continually, and the token is one of them."""
    (tmp_path / "train.yaml").write_text("name: a\n")
    state = ClusterState.below(str(tmp_path / "clusters"), "mine")
    state.make()
    uploads = []
    for text in ("one", "two"):
        (state.path / "status.json").write_text(text)
        uploads.append(get_uri_for_directory(str(tmp_path), include_gitignore=True))
    assert uploads[0] == uploads[1]
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    status = ["git", "status", "--porcelain", "--untracked-files=all"]
    told = subprocess.run(status, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert told == "?? train.yaml\n"


def nobody(_: str) -> None:
    pass


def experiment(**changes: Any) -> Experiment:
    return load_tree(CONFIG, override_items(changes), Experiment)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(experiment(), CONFIG.parent, "optimal", Sources()).plan


def asked(plan: Plan, where: Path, cloud: str | None = "local", **changes: Any) -> ClusterSpec:
    changes = {"provider.state": str(where)} | changes
    found = cluster_spec(experiment(**changes), plan, bundled_book(), cloud, NOW_S)
    return replace(found, record=found.record.model_copy(update={"id": ID}))


class Listed:
    """A cloud with a given list of machines."""

    name = "listed"

    def __init__(self, *machines: Machine, usd_per_hour: float | None = 2.0) -> None:
        self.machines, self.usd_per_hour = machines, usd_per_hour
        self.unreachable: dict[str, str] = {}

    def list_machines(self, cluster: str) -> list[Machine]:
        if not self.unreachable:
            return list(self.machines)
        error = RegionsUnreachableError("some do not answer")
        error.found = tuple(m for m in self.machines if m.pool.region not in self.unreachable)
        error.unreachable = self.unreachable
        raise error

    def launch(self, request: LaunchRequest) -> list[Any]:
        raise AssertionError("nothing is launched by looking")

    def terminate(self, machine_ids: object) -> None:
        raise AssertionError("nothing is ended by looking")

    def poll_failures(self, cluster: str) -> list[Any]:
        return []

    def availability(self, pools: list[Pool]) -> list[Availability]:
        return [Availability(pool, self.usd_per_hour) for pool in pools]


# ------------------------------------------------------------------ what is asked for


def test_a_record_is_read_as_it_was_written_and_the_same_head_is_asked_for(
    plan: Plan, tmp_path: Path
) -> None:
    record = asked(plan, tmp_path).record
    read = decode_cluster(encode_cluster(record), "here")
    assert read == record
    assert head_request(read) == head_request(record)
    assert len(head_request(record).request_id) <= 64
    other = record.model_copy(update={"head": record.head.model_copy(update={"number": 2})})
    assert head_request(other).request_id != head_request(record).request_id
    with pytest.raises(ClusterStateError, match="here"):
        decode_cluster(b'{"version": 1}', "here")


def test_the_local_cloud_sells_what_the_plan_may_rent_at_the_books_prices(
    plan: Plan, tmp_path: Path
) -> None:
    found = asked(plan, tmp_path)
    assert found.catalog is not None
    book = bundled_book()
    for pool in found.record.target.pools():
        (offer,) = [each for each in found.catalog.offers if each.pool == pool]
        price = book.instance("aws", pool.region, pool.type, pool.market.value)
        assert offer.usd_per_hour == price.amount
    resources = found.record.autoscale.machine_resources
    assert all(has == {"CPU": 4.0} for has in resources.values())
    head, counted = found.record.head, found.record.target.head
    assert head.ends_unix_s == NOW_S + found.catalog.longest_life_s
    assert counted is not None
    assert (counted.pool, counted.kind.list_usd_per_hour) == (head.pool, 0.384)


def test_with_demand_nothing_is_planned_and_the_target_names_no_speed(
    plan: Plan, tmp_path: Path
) -> None:
    record = asked(plan, tmp_path, **{"provider.rent": "demand"}).record
    assert {region.rows_per_s for region in record.target.regions} == {0.0}
    assert record.autoscale.machine_resources


def test_no_machine_is_taken_to_outlive_what_the_local_cloud_gives_it(
    plan: Plan, tmp_path: Path
) -> None:
    assert asked(plan, tmp_path).record.autoscale.life_h == 12.0
    hour = asked(plan, tmp_path, **{"provider.local": {"longest_life_s": 3600}}).record
    assert hour.autoscale.life_h == 1.0
    short = {"provider.local": {"longest_life_s": 300}}
    with pytest.raises(ConfigError, match=r"longest_life_s is 300: .*`life_h`"):
        asked(plan, tmp_path, **short)


def test_with_demand_each_region_must_have_a_type_of_which_the_resources_are_known(
    plan: Plan, tmp_path: Path
) -> None:
    known = {"autoscale.machine_resources": {"m5.2xlarge": {"CPU": 8}}}
    with pytest.raises(ConfigError, match=r"region 'eu'") as caught:
        asked(plan, tmp_path, **{"provider.rent": "demand"}, **known)
    assert "g4dn.xlarge" in caught.value.fix


def test_substitutes_are_refused_where_the_regions_name_types(plan: Plan, tmp_path: Path) -> None:
    types = {"autoscale.substitutes": True}
    assert asked(plan, tmp_path, **types)
    regions = [
        {"name": "us", "workers": 1, "nodes": [{"type": "m5.2xlarge"}]},
        {"name": "eu", "workers": 1, "server_node": "m5.2xlarge"},
        {"name": "asia", "workers": 1},
    ]
    with pytest.raises(ConfigError, match="of us, eu name types"):
        asked(plan, tmp_path, **types, regions=regions)


@pytest.mark.parametrize(
    ("cloud", "changes", "says"),
    [
        ("tencent", {}, "machines of aws"),
        (None, {}, "account is configured there"),
        (None, {"provider.aws": {"places": {"us-east-1": {"image_id": "ami-1"}}}}, "eu-central-1"),
        ("aws", {"plan.regions.us.cloud": "attic"}, "attic"),
    ],
)
def test_what_cannot_be_is_refused_with_the_key(
    plan: Plan, tmp_path: Path, cloud: str | None, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        asked(plan, tmp_path, cloud, **changes)


def test_a_cloud_needs_a_state_that_its_machines_see(plan: Plan, tmp_path: Path) -> None:
    places = {at: {"image_id": "ami-1"} for at in ("us-east-1", "eu-central-1", "ap-northeast-1")}
    with pytest.raises(ConfigError, match=r"provider\.state"):
        asked(plan, tmp_path, None, **{"provider.aws": {"places": places}})
    bucket = "s3://bucket/clusters?region=us-east-1"
    found = asked(
        plan, tmp_path, None, **{"provider.aws": {"places": places}, "provider.state": bucket}
    )
    assert found.state.uri == "s3://bucket/clusters/cluster_local?region=us-east-1"
    assert found.state.name == "cluster_local"
    assert found.catalog is None
    assert (found.record.head.port, found.record.head.pool.type) == (6379, "m5.2xlarge")
    rent = {"provider.rent": "demand", "provider.aws": {"places": places}}
    with pytest.raises(ConfigError, match="machine_resources"):
        asked(plan, tmp_path, None, **{**rent, "provider.state": bucket})


@pytest.mark.parametrize(
    ("places", "is_shared"),
    [
        ({}, False),
        ({"instance_profile": "n"}, True),
        ({"instance_profile": "n", "head_profile": "n"}, True),
        ({"instance_profile": "n", "head_profile": "h"}, False),
        ({"head_profile": "h"}, False),
    ],
)
def test_nodes_with_the_role_of_the_head_are_reported(
    plan: Plan, tmp_path: Path, places: dict[str, str], is_shared: bool
) -> None:
    regions = ("us-east-1", "eu-central-1", "ap-northeast-1")
    every = {at: {"image_id": "ami-1", **places} for at in regions}
    bucket = "s3://bucket/clusters?region=us-east-1"
    record = asked(
        plan, tmp_path, None, **{"provider.aws": {"places": every}, "provider.state": bucket}
    ).record
    key = f"provider.aws.places.{record.head.pool.region}.head_profile"
    assert key_of_own_role(record) == (key if is_shared else None)


def test_a_configuration_that_starts_a_cluster_of_its_own_is_refused(tmp_path: Path) -> None:
    tree = yaml.safe_load(CONFIG.read_text())
    del tree["cluster"]
    with pytest.raises(ConfigError, match=r"cluster\.kind"):
        geo_ray.up(tree, provider="local", base_dir=tmp_path)


# ------------------------------------------------------------------ where it lies


def test_a_cluster_is_named_by_its_folder_or_its_configuration(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state = cluster_at(CONFIG)
    assert state == ClusterState.at("clusters/cluster_local")
    assert not names_cluster("clusters/cluster_local")
    with pytest.raises(ClusterStateError, match="no cluster exists in clusters/cluster_local"):
        cluster_status(CONFIG)
    assert not (tmp_path / "clusters").exists()
    state.make()
    state.write(asked(plan, tmp_path).record, None)
    assert names_cluster("clusters/cluster_local")
    with pytest.raises(ClusterStateError, match="another command"):
        state.write(asked(plan, tmp_path).record, None)


def test_a_damaged_cluster_lock_is_reported(tmp_path: Path) -> None:
    state = ClusterState.at(str(tmp_path / "c"))
    state.make()
    with cluster_lock(state, "up", nobody):
        pass
    (tmp_path / "c" / "lock" / LEASE_KEY).write_text("{")
    with (
        pytest.raises(ClusterStateError, match="the lock of c cannot") as caught,
        cluster_lock(state, "up", nobody),
    ):
        pass
    assert str(tmp_path) in caught.value.message and "lock/lease.json" in str(caught.value.fix)


def test_who_works_on_a_cluster_does_it_alone(tmp_path: Path) -> None:
    state = ClusterState.at(str(tmp_path / "c"))
    state.make()
    order: list[str] = []
    told: list[str] = []
    inside, refused = threading.Event(), threading.Event()

    def first() -> None:
        with cluster_lock(state, "up", nobody):
            inside.set()
            refused.wait(60.0)
            order.append("first")

    def next_one() -> None:
        with cluster_lock(state, "down", told.append):
            order.append("second")

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait()
    with pytest.raises(ClusterBusyError, match="process"), cluster_lock(state, "down", nobody, 0.0):
        pass
    second = threading.Thread(target=next_one)
    second.start()
    while not told:
        time.sleep(0.05)
    refused.set()
    second.join()
    thread.join()
    assert order == ["first", "second"]
    assert told
    assert "another command" in told[0]


def test_who_was_killed_in_the_middle_is_not_waited_for(tmp_path: Path) -> None:
    state = ClusterState.at(str(tmp_path / "c"))
    state.make()
    code = (
        "import os, sys; from geo_ray.cloud.cluster.state import cluster_lock;"
        "from geo_ray.cloud.cluster.state import ClusterState;"
        "cluster_lock(ClusterState.at(sys.argv[1]), 'up', print).__enter__();"
        "os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, state.uri], check=False)
    assert killed.returncode == -9
    with cluster_lock(state, "up", nobody, 5.0):
        pass


# ------------------------------------------------------------------ how it stands


def machine(id_: str, region: str, request: str = "as-1", **changes: Any) -> Machine:
    pool = Pool("eu-central-1", None, "g4dn.xlarge", Market.SPOT)
    labels = {REGION_LABEL: region, ROLE_LABEL: "worker"}
    began_s = time.time() - 3600.0
    made = Machine(id_, request, pool, MachineState.RUNNING, began_s, "10.0.0.9", labels)
    return replace(made, **changes)


def head_of(record: ClusterRecord, state: MachineState = MachineState.RUNNING) -> Machine:
    request = head_request(record)
    began_s = time.time() - 1800.0
    return Machine("i-head", request.request_id, request.pool, state, began_s, "10.0.0.2")


NOTES = ("machines came, and their nodes did not",)


def has_reported(
    plan: Plan, tmp_path: Path, cloud: Listed, memory: AutoscalerState
) -> ClusterReport:
    found = asked(plan, tmp_path)
    found.state.make()
    store = found.state.store()
    store.write(JOURNAL_KEY, encode_memory(memory), None)
    action = ActionReport(time.time(), "launch 1 x g4dn.xlarge spot", "eu", "the plan")
    status = AutoscalerStatus(True, time.time(), left_s=7200.0, actions=(action,), notes=NOTES)
    write_status(store, HeadStatus(unix_s=time.time(), status=status), None)
    return report_of(found.record, found.state, cloud)


def test_a_report_counts_machines_and_money(plan: Plan, tmp_path: Path) -> None:
    record = asked(plan, tmp_path).record
    chosen = Pool("eu-central-1", "eu-central-1b", "g5.xlarge", Market.SPOT)  # by the cloud
    good, leaving, coming = machine("i-1", "eu"), machine("i-2", "us"), machine("i-3", "asia")
    good = replace(good, pool=chosen)
    now_s = time.time()
    termination = PendingTermination("the cloud reclaims it", now_s + 60)
    asked_pool = replace(chosen, zone=None)
    counted = replace(good, pool=asked_pool)
    memory = AutoscalerState(
        pools={pool_key(asked_pool): PoolRecord(asked_pool, 0.75)},
        instances={
            "i-1": ManagedInstance(counted, "the plan", 0.5, now_s, now_s, now_s, READY, READY),
            "i-2": ManagedInstance(
                leaving, "x", 0.25, now_s, now_s, now_s, DRAINING, READY, termination
            ),
            "i-3": ManagedInstance(coming, "the plan", 0.5, now_s, now_s, now_s),
        },
    )
    memory.ledger.add("eu", "the plan", 2.0, 1.0, 1.5)
    ended = machine("i-4", "eu", state=MachineState.ENDED)
    cloud = Listed(head_of(record), good, leaving, coming, ended)
    report = has_reported(plan, tmp_path, cloud, memory)
    assert {row.id: row.is_ready for row in report.machines} == {
        "i-1": True,
        "i-2": False,
        "i-3": False,
    }
    counts = {p.region: (p.planned, p.ready, p.coming, p.leaving) for p in report.node_groups}
    assert counts == {"eu": (1, 1, 0, 0), "us": (1, 0, 0, 1), "asia": (1, 0, 1, 0)}
    assert report.wanted == 3
    assert report.usd_per_hour == pytest.approx(0.75 + 0.25 + 0.5 + 2.0)
    assert report.spent_usd == pytest.approx(1.5 + 0.5 * 2.0, rel=1e-3)
    assert report.left_s == 7200.0
    assert report.to_finish_usd == pytest.approx(2 * report.usd_per_hour)
    assert (report.address or "").startswith("10.0.0.2:")
    assert report.acts
    assert report.notes == NOTES


def test_costs_during_a_dead_head_are_in_the_bill(plan: Plan, tmp_path: Path) -> None:
    there, now_s = machine("i-1", "eu"), time.time()
    memory = AutoscalerState(
        instances={"i-1": ManagedInstance(there, "the plan", 10.0, now_s - 36000.0, now_s, now_s)}
    )
    memory.ledger.add("eu", "the plan", 2.0, 20.0, 20.0)
    report = has_reported(plan, tmp_path, Listed(there), memory)
    assert report.spent_usd == pytest.approx(20.0 + 100.0, rel=1e-3)


def test_what_the_books_have_of_the_head_is_not_counted_twice(plan: Plan, tmp_path: Path) -> None:
    record = asked(plan, tmp_path).record
    head, now_s = head_of(record), time.time()  # half an hour old
    paid = ManagedInstance(head, "the head", 2.0, now_s - 600.0, now_s - 600.0, now_s, READY, READY)
    memory = AutoscalerState(heads={head.id: paid})
    memory.ledger.add("", "the head", 1200 / 3600, 1200 / 3600 * 2.0, 1200 / 3600 * 2.0)
    report = has_reported(plan, tmp_path, Listed(head), memory)
    assert report.spent_usd == pytest.approx(0.5 * 2.0, rel=1e-3)
    assert report.usd_per_hour == 2.0


def test_a_region_that_does_not_answer_is_named_and_its_machines_are_as_they_were(
    plan: Plan, tmp_path: Path
) -> None:
    record = asked(plan, tmp_path).record
    there = machine("i-2", "us", pool=Pool("mars", None, "g4dn.xlarge", Market.SPOT))
    now_s = time.time()
    memory = AutoscalerState(
        instances={
            "i-2": ManagedInstance(there, "the plan", 0.25, now_s, now_s, now_s, READY, READY)
        }
    )
    cloud = Listed(head_of(record), machine("i-1", "eu"), there)
    cloud.unreachable = {"mars": "no answer within 30 s"}
    report = has_reported(plan, tmp_path, cloud, memory)
    assert {row.id: row.is_ready for row in report.machines} == {"i-1": False, "i-2": True}
    assert report.notes[0] == "mars does not answer: no answer within 30 s"
    assert report.head is not None
    cloud.unreachable = {record.head.pool.region: "a hole"}
    hidden = report_of(record, asked(plan, tmp_path).state, cloud)
    assert hidden.head is None
    assert not any("geo-ray up" in note for note in hidden.notes)
    with pytest.raises(RegionsUnreachableError):
        listed_for_head(cloud, record)


def test_a_dead_head_and_an_unknown_price_are_reported(plan: Plan, tmp_path: Path) -> None:
    record = asked(plan, tmp_path).record
    cloud = Listed(head_of(record, MachineState.ENDED), usd_per_hour=None)
    report = has_reported(plan, tmp_path, cloud, AutoscalerState())
    assert report.address is None
    assert any("geo-ray up" in note for note in report.notes)
    assert find_head(cloud.machines, record) == cloud.machines[0]
    assert head_address(cloud.machines[0], record) is None
    assert report.usd_per_hour == 0.0


def test_a_status_report_has_a_limited_size(tmp_path: Path) -> None:
    state = ClusterState.at(str(tmp_path / "c"))
    state.make()
    actions = tuple(ActionReport(float(n), "x" * 9000, "eu", "y" * 9000) for n in range(50))
    status = AutoscalerStatus(True, 1.0, actions=actions)
    store = state.store()
    tag = write_status(store, HeadStatus(unix_s=1.0, status=status), None)
    assert tag is not None
    found, read_tag = read_status(store, 1)
    assert read_tag == tag
    assert found is not None
    assert found.status.actions[-1].unix_s == 49.0, "the newest stay"
    assert len((tmp_path / "c" / "status.json").read_bytes()) <= MAX_RECORD_BYTES
    assert read_status(store, 2) == (None, tag), "a cluster that was made anew has told nothing"
    again = HeadStatus(unix_s=2.0, status=status)
    assert write_status(store, again, None) is None, "another head has told something"
    (tmp_path / "c" / "status.json").write_text("{}")
    assert read_status(store, 1)[0] is None


def test_a_recreated_cluster_keeps_pool_statistics_but_not_costs(
    tmp_path: Path,
) -> None:
    state = ClusterState.at(str(tmp_path / "c"))
    state.make()
    memory = AutoscalerState(token=3, launches=7)
    memory.ledger.add("eu", "the plan", 2.0, 1.0, 1.5)
    memory.pool(Pool("eu-central-1", None, "small", Market.SPOT)).preemptions = 2.0
    memory.required.stopped_at_usd = 1.0
    state.store().write(JOURNAL_KEY, encode_memory(memory), None)
    for _ in range(2):
        _forget(state, nobody)
        found = state.store().read(JOURNAL_KEY)
        assert found is not None
        left = decode_memory(found.data)
        assert (left.launches, left.ledger.paid_usd, left.required.stopped_at_usd) == (7, 0.0, None)
        assert [each.preemptions for each in left.pools.values()] == [2.0]
