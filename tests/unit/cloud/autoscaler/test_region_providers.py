"""Several clouds as one provider, of which some may not answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from geo_ray.base.errors import (
    ProviderRefusedError,
    ProviderUnreachableError,
    RegionsUnreachableError,
)
from geo_ray.base.threads import BoundedCalls
from geo_ray.cloud.backtest.simulated_cloud import SimCloudBehavior, SimulatedCloud, forever
from geo_ray.cloud.cluster.providers import RegionProviders
from geo_ray.cloud.provider import Availability, LaunchFailure, LaunchRequest, Machine, Market, Pool

HERE = Pool("us-east-1", None, "small", Market.SPOT)
THERE = Pool("ap-shanghai", None, "small", Market.SPOT)
LONGEST_S = 0.2


@pytest.fixture
def clouds() -> tuple[SimulatedCloud, SimulatedCloud]:
    aws = SimulatedCloud({HERE: forever(0.3)}, lambda: 1000.0)
    return aws, SimulatedCloud({THERE: forever(0.1)}, lambda: 1000.0)


@dataclass
class HangingCloud:
    """A cloud whose calls may hang until they are released."""

    inner: SimulatedCloud
    go: threading.Event = field(default_factory=threading.Event)
    calls: int = 0
    hangs: tuple[str, ...] = ("list", "launch", "terminate", "poll", "availability")
    name: str = "hanging"

    def list_machines(self, cluster: str) -> Sequence[Machine]:
        self._hang("list")
        return self.inner.list_machines(cluster)

    def launch(self, request: LaunchRequest) -> Sequence[LaunchFailure]:
        self._hang("launch")
        return self.inner.launch(request)

    def terminate(self, machine_ids: Sequence[str]) -> None:
        self._hang("terminate")
        self.inner.terminate(machine_ids)

    def poll_failures(self, cluster: str) -> Sequence[LaunchFailure]:
        self._hang("poll")
        return self.inner.poll_failures(cluster)

    def availability(self, pools: Sequence[Pool]) -> Sequence[Availability]:
        self._hang("availability")
        return self.inner.availability(pools)

    def _hang(self, call: str) -> None:
        if call in self.hangs:
            self.calls += 1
            self.go.wait(60.0)


@pytest.fixture
def hanging(clouds: tuple[SimulatedCloud, SimulatedCloud]) -> Iterator[HangingCloud]:
    made = HangingCloud(clouds[0])
    yield made
    made.go.set()


def test_each_region_is_asked_of_its_cloud(
    clouds: tuple[SimulatedCloud, SimulatedCloud],
) -> None:
    aws, tencent = clouds
    both = RegionProviders({"us-east-1": aws, "us-west-2": aws, "ap-shanghai": tencent})
    both.launch(LaunchRequest("a", "c", HERE, 2))
    both.launch(LaunchRequest("b", "c", THERE, 1))
    assert (len(aws.alive()), len(tencent.alive())) == (2, 1)
    assert [availability.usd_per_hour for availability in both.availability([THERE, HERE])] == [
        0.1,
        0.3,
    ]
    machines = both.list_machines("c")
    assert len(machines) == 3
    both.terminate([machine.id for machine in machines])
    assert not aws.alive() and not tencent.alive()
    assert both.name == "simulated"
    with pytest.raises(ProviderRefusedError, match="mars"):
        both.launch(LaunchRequest("d", "c", Pool("mars", None, "small", Market.SPOT), 1))


def test_a_cloud_that_does_not_answer_keeps_no_other_from_ending_machines(
    clouds: tuple[SimulatedCloud, SimulatedCloud],
) -> None:
    aws, tencent = clouds
    both = RegionProviders({"us-east-1": aws, "ap-shanghai": tencent})
    both.launch(LaunchRequest("b", "c", THERE, 1))
    names = list(tencent.machines)
    aws.behavior = SimCloudBehavior(refusal=1.0)
    with pytest.raises(ProviderUnreachableError):
        both.terminate(names)
    assert not tencent.alive()


def test_the_error_about_unreachable_regions_carries_the_other_answers(
    clouds: tuple[SimulatedCloud, SimulatedCloud],
) -> None:
    aws, tencent = clouds
    both = RegionProviders({"us-east-1": aws, "us-west-2": aws, "ap-shanghai": tencent})
    both.launch(LaunchRequest("b", "c", THERE, 1))
    aws.behavior = SimCloudBehavior(refusal=1.0)
    with pytest.raises(RegionsUnreachableError, match="us-east-1: no answer to list") as listed:
        both.list_machines("c")
    assert [machine.id for machine in listed.value.found] == list(tencent.machines)
    assert listed.value.unreachable == dict.fromkeys(
        ("us-east-1", "us-west-2"), "no answer to list"
    )
    strange = Pool("mars", None, "small", Market.SPOT)
    with pytest.raises(RegionsUnreachableError, match="mars") as quoted:
        both.availability([HERE, strange, THERE])
    assert [availability.usd_per_hour for availability in quoted.value.found] == [0.1]
    assert set(quoted.value.unreachable) == {"us-east-1", "us-west-2", "mars"}


def test_an_answer_that_makes_no_sense_is_that_of_its_region_alone(
    clouds: tuple[SimulatedCloud, SimulatedCloud], hanging: HangingCloud
) -> None:
    hanging.hangs = ()
    hanging.inner = None  # type: ignore[assignment]
    both = RegionProviders({"us-east-1": hanging, "ap-shanghai": clouds[1]})
    with pytest.raises(RegionsUnreachableError, match="AttributeError") as listed:
        both.list_machines("c")
    assert set(listed.value.unreachable) == {"us-east-1"}


def test_of_one_region_the_error_is_its_own(
    clouds: tuple[SimulatedCloud, SimulatedCloud],
) -> None:
    alone = RegionProviders({"us-east-1": clouds[0]})
    clouds[0].behavior = SimCloudBehavior(refusal=1.0)
    with pytest.raises(ProviderUnreachableError) as listed:
        alone.list_machines("c")
    assert type(listed.value) is ProviderUnreachableError


def test_a_region_that_hangs_is_waited_for_once_and_the_others_are_not_held(
    clouds: tuple[SimulatedCloud, SimulatedCloud], hanging: HangingCloud
) -> None:
    tencent = clouds[1]
    tencent.launch(LaunchRequest("b", "c", THERE, 1))
    both = RegionProviders({"us-east-1": hanging, "ap-shanghai": tencent}, LONGEST_S)
    with pytest.raises(RegionsUnreachableError, match=r"did not answer within 0\.2 s") as listed:
        both.list_machines("c")
    assert len(listed.value.found) == 1
    for _ in range(5):
        with pytest.raises(RegionsUnreachableError, match="has not answered an earlier call"):
            both.list_machines("c")
        with pytest.raises(RegionsUnreachableError, match="has not answered an earlier call"):
            both.poll_failures("c")
    with pytest.raises(ProviderUnreachableError, match="has not answered an earlier call"):
        both.launch(LaunchRequest("a", "c", HERE, 1))
    with pytest.raises(ProviderUnreachableError, match="has not answered an earlier call"):
        both.terminate(["unknown"])
    assert hanging.calls == 1, "threads do not pile up"
    both.terminate(list(tencent.machines))
    assert not tencent.alive()
    hanging.go.set()
    while True:
        try:
            assert len(both.list_machines("c")) == 1
            break
        except RegionsUnreachableError:
            pass  # the answer that was owed is on its way


def test_prices_that_hang_hide_no_machines(
    clouds: tuple[SimulatedCloud, SimulatedCloud], hanging: HangingCloud
) -> None:
    clouds[0].launch(LaunchRequest("a", "c", HERE, 2))
    hanging.hangs = ("availability",)
    both = RegionProviders({"us-east-1": hanging, "ap-shanghai": clouds[1]}, LONGEST_S)
    with pytest.raises(RegionsUnreachableError) as quoted:
        both.availability([HERE, THERE])
    assert [availability.pool for availability in quoted.value.found] == [THERE]
    assert len(both.list_machines("c")) == 2


def test_a_time_limit_of_the_call_itself_is_its_error() -> None:
    def late() -> None:
        raise TimeoutError("the socket")

    with pytest.raises(TimeoutError, match="the socket"):
        BoundedCalls("here", 60.0, ProviderUnreachableError).begin(late)()
