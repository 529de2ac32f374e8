"""Several clouds as one."""

from __future__ import annotations

import pytest

from geo_ray.autoscale.sim_cloud import SimTemper, SimulatedCloud, forever
from geo_ray.errors import ProviderRefusedError, ProviderUnreachableError
from geo_ray.providers.base import LaunchRequest, Market, Pool
from geo_ray.providers.by_region import RegionProviders

HERE = Pool("us-east-1", None, "small", Market.SPOT)
THERE = Pool("ap-shanghai", None, "small", Market.SPOT)


@pytest.fixture
def clouds() -> tuple[SimulatedCloud, SimulatedCloud]:
    aws = SimulatedCloud({HERE: forever(0.3)}, lambda: 1000.0)
    return aws, SimulatedCloud({THERE: forever(0.1)}, lambda: 1000.0)


def test_each_region_is_asked_of_its_cloud(
    clouds: tuple[SimulatedCloud, SimulatedCloud],
) -> None:
    aws, tencent = clouds
    both = RegionProviders({"us-east-1": aws, "us-west-2": aws, "ap-shanghai": tencent})
    both.launch(LaunchRequest("a", "c", HERE, 2))
    both.launch(LaunchRequest("b", "c", THERE, 1))
    assert (len(aws.alive()), len(tencent.alive())) == (2, 1)
    assert [stock.usd_per_hour for stock in both.stock([THERE, HERE])] == [0.1, 0.3]
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
    aws.temper = SimTemper(refusal=1.0)
    with pytest.raises(ProviderUnreachableError):
        both.list_machines("c")
    with pytest.raises(ProviderUnreachableError):
        both.terminate(names)
    assert not tencent.alive()
