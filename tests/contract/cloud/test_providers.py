"""Contract of machine providers, for every cloud."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from geo_ray.base.errors import (
    ClusterNameTakenError,
    ProviderRefusedError,
    ProviderUnreachableError,
)
from geo_ray.cloud.cluster.providers import ClusterMachines, check_name_is_free
from geo_ray.cloud.provider import LaunchFailureKind, MachineState, Market, Pool
from tests.support.autoscale_support import simulated_bench
from tests.support.cloud_servers import as_caller
from tests.support.provider_support import (
    CLUSTER,
    CloudBench,
    aws_bench,
    local_bench,
    tencent_bench,
)

BENCHES: dict[str, Callable[[Path], AbstractContextManager[CloudBench]]] = {
    "local": local_bench,
    "aws": aws_bench,
    "tencent": tencent_bench,
    "simulated": simulated_bench,
}


@pytest.fixture(params=sorted(BENCHES))
def bench(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CloudBench]:
    if request.param != "local":
        as_caller(monkeypatch, tmp_path)
    with BENCHES[request.param](tmp_path) as made:
        assert made.provider.name == request.param
        yield made


def test_machines_come_with_all_that_was_asked_for(bench: CloudBench) -> None:
    wanted = bench.request("one")
    assert list(bench.provider.launch(wanted)) == []
    for machine in bench.until("one", count=2, state=MachineState.RUNNING):
        assert machine.pool == bench.good
        assert machine.labels == wanted.labels
        assert machine.address
        assert machine.ends_unix_s == pytest.approx(wanted.ends_unix_s, abs=60)
        assert machine.launched_unix_s > 1e9
    assert len({m.id for m in bench.machines("one")}) == 2


def test_a_machine_is_paid_as_asked(bench: CloudBench) -> None:
    bench.provider.launch(bench.request("cheap", bench.spot, count=1))
    (machine,) = bench.until("cheap", count=1, state=MachineState.RUNNING)
    assert machine.pool == bench.spot and machine.pool.market is Market.SPOT


def test_a_request_twice_makes_its_machines_once(bench: CloudBench) -> None:
    wanted = bench.request("twice")
    bench.provider.launch(wanted)
    assert list(bench.provider.launch(wanted)) == []
    assert list(bench.other.launch(wanted)) == []
    bench.until("twice", count=2, state=MachineState.RUNNING)
    bench.provider.launch(bench.request("again"))
    bench.until("again", count=2, state=MachineState.RUNNING)
    assert len(bench.living()) == 4


def test_a_request_whose_machines_ended_makes_no_new_ones(bench: CloudBench) -> None:
    wanted = bench.request("over", count=1)
    bench.provider.launch(wanted)
    (machine,) = bench.until("over", count=1, state=MachineState.RUNNING)
    bench.provider.terminate([machine.id])
    bench.until_gone(machine.id)
    bench.provider.launch(wanted)
    assert bench.living() == []


def test_others_see_the_same_machines_and_may_end_them(bench: CloudBench) -> None:
    bench.provider.launch(bench.request("seen"))
    bench.until("seen", count=2, state=MachineState.RUNNING)
    seen = bench.other.list_machines(CLUSTER)
    assert {m.id for m in seen} == {m.id for m in bench.machines("seen")}
    bench.other.terminate([seen[0].id])
    bench.until_gone(seen[0].id)
    bench.until("seen", count=1, state=MachineState.RUNNING)


def test_another_clusters_machines_are_not_listed(bench: CloudBench) -> None:
    bench.provider.launch(bench.request("mine", count=1))
    bench.until("mine", count=1, state=MachineState.RUNNING)
    assert bench.provider.list_machines("stranger") == []


def test_machines_say_which_cluster_of_a_name_they_are_of(bench: CloudBench) -> None:
    """Two clusters may have the same name: they neither count nor end each other's machines."""
    ids = {"first": "0123456789", "second": "abcdef0123", "nobodys": ""}
    for name, id_ in ids.items():
        bench.provider.launch(replace(bench.request(name, count=1), cluster_id=id_))
    bench.until(*ids, count=3, state=MachineState.RUNNING)
    for name, id_ in ids.items():
        own = ClusterMachines(bench.other, id_)
        (machine,) = own.list_machines(CLUSTER)
        assert (machine.request_id, machine.cluster_id) == (name, id_)
    own = ClusterMachines(bench.other, ids["first"])
    own.launch(bench.request("more", count=1))
    bench.until("more", count=1, state=MachineState.RUNNING)
    assert {each.request_id for each in own.list_machines(CLUSTER)} == {"first", "more"}
    with pytest.raises(ClusterNameTakenError, match="abcdef0123"):
        check_name_is_free(bench.other, CLUSTER, ids["first"], "here")
    check_name_is_free(bench.other, "free", ids["first"], "here")
    mine = [each.id for each in own.list_machines(CLUSTER)]
    own.terminate(mine)
    bench.until_gone(*mine)
    assert {each.request_id for each in bench.living()} == {"second", "nobodys"}


def test_what_ended_or_never_was_may_be_ended(bench: CloudBench) -> None:
    bench.provider.launch(bench.request("end", count=1))
    (machine,) = bench.until("end", count=1, state=MachineState.RUNNING)
    for _ in range(2):
        bench.provider.terminate([machine.id, bench.unknown_id])
    bench.until_gone(machine.id)
    bench.provider.terminate([machine.id])
    bench.provider.terminate([])


def test_a_sold_out_pool_gives_what_it_has_or_nothing(bench: CloudBench) -> None:
    missing = bench.provider.launch(bench.request("rare", bench.sold_out, count=3))
    assert [f.kind for f in missing] == [LaunchFailureKind.SOLD_OUT]
    assert missing[0].request_id == "rare" and missing[0].pool == bench.sold_out
    assert missing[0].reason
    bench.until("rare", count=bench.left, state=MachineState.RUNNING)
    assert missing[0].missing == 3 - bench.left


def test_a_quota_error_differs_from_a_sold_out_pool(bench: CloudBench) -> None:
    missing = bench.provider.launch(bench.request("much", bench.no_quota, count=2))
    assert [f.kind for f in missing] == [LaunchFailureKind.QUOTA]
    assert missing[0].missing == 2 - bench.quota_left
    bench.until("much", count=bench.quota_left, state=MachineState.RUNNING)


def test_a_failure_is_reported_repeatedly(bench: CloudBench) -> None:
    """The first reply may be lost with the process that requested the machines."""
    wanted = bench.request("rare", bench.sold_out, count=3)
    (first,) = bench.provider.launch(wanted)
    bench.until("rare", count=bench.left, state=MachineState.RUNNING)
    again = [*bench.other.launch(wanted), *bench.other.poll_failures(CLUSTER)]
    assert first.kind in {f.kind for f in again}
    assert len(bench.machines("rare")) == bench.left


def test_pools_have_prices_in_the_order_of_the_question(bench: CloudBench) -> None:
    strange = Pool(bench.good.region, bench.good.zone, "no.such", Market.ON_DEMAND)
    spot, strange_availability, good = bench.provider.availability(
        [bench.spot, strange, bench.good]
    )
    assert spot.pool == bench.spot and good.pool == bench.good
    assert spot.usd_per_hour and good.usd_per_hour
    assert spot.usd_per_hour < good.usd_per_hour
    assert strange_availability.usd_per_hour is None
    if bench.reports_availability:
        (rare,) = bench.provider.availability([bench.sold_out])
        assert rare.available is not None


def test_too_many_requests_are_an_outcome(bench: CloudBench) -> None:
    if bench.throttle is None:
        pytest.skip("this cloud refuses nobody")
    bench.throttle()
    (failure,) = bench.provider.launch(bench.request("slow", count=1))
    assert (failure.kind, failure.missing) == (LaunchFailureKind.THROTTLED, 1)
    bench.throttle()
    with pytest.raises(ProviderUnreachableError):
        bench.provider.list_machines(CLUSTER)


def test_a_launch_whose_answer_is_lost_is_asked_again(bench: CloudBench) -> None:
    if bench.lose_answer is None:
        pytest.skip("this cloud answers always")
    wanted = bench.request("lost")
    bench.lose_answer()
    with pytest.raises(ProviderUnreachableError):
        bench.provider.launch(wanted)
    assert list(bench.provider.launch(wanted)) == []
    bench.until("lost", count=2, state=MachineState.RUNNING)
    assert len(bench.living()) == 2


def test_a_missing_permission_is_named(bench: CloudBench) -> None:
    if bench.forbid is None:
        pytest.skip("this cloud has no permissions")
    permission = bench.forbid()
    with pytest.raises(ProviderRefusedError, match=permission):
        bench.provider.launch(bench.request("no", count=1))
    with pytest.raises(ProviderRefusedError):
        bench.provider.list_machines(CLUSTER)
