"""For all tests: how hypothesis works, what is slow, and one real cluster of three regions."""

from __future__ import annotations

import secrets
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from geo_ray.ray_cluster.connect import ConnectedCluster
    from geo_ray.ray_cluster.local_cluster import LocalCluster

# `benchmarks`: models of networks that tests use too, and the library does not need.
sys.path.append(str(Path(__file__).parents[1]))

# One strategy for each way in which regions, averagers and exchanges go (`Traits`).
ONE_OF_EACH = frozenset(
    (
        "asgd_ga",
        "bsp",
        "decoupled",
        "demo",
        "diloco",
        "diloco_streaming",
        "fedgsync",
        "halos",
        "sma",
    )
)
ONE_IS_ENOUGH = ("tests/sim/", "tests/integration/runtime/test_bridges_in_process.py")

# An example may take as long as it does: on a busy machine durations say nothing about the code.
settings.register_profile(
    "untimed",
    parent=settings(),  # keeps what hypothesis itself sets for CI
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave strategies that go like another, and all seeds but one, to `scripts/test --all`.

    A test that names a few strategies itself keeps them.
    """
    kinds: dict[str, set[str]] = defaultdict(set)
    given: list[tuple[pytest.Item, str, str, object]] = []
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if item.nodeid.startswith(ONE_IS_ENOUGH) and isinstance(params.get("kind"), str):
            test = item.nodeid.partition("[")[0]
            kinds[test].add(params["kind"])
            given.append((item, test, params["kind"], params.get("seed")))
    firsts: dict[str, object] = {}
    for item, test, kind, seed in given:
        is_first = firsts.setdefault(test, seed) == seed
        if kinds[test] >= ONE_OF_EACH and not (kind in ONE_OF_EACH and is_first):
            item.add_marker(pytest.mark.slow)


# Who is started in the background by a shell script ignores interrupts, and so would all children.
signal.signal(signal.SIGINT, signal.default_int_handler)

REGIONS = ("us-east", "eu-west", "ap-south")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[LocalCluster]:
    """A running cluster; the environment says how to reach it (RAY_ADDRESS and the token)."""
    from geo_ray.experiment.cluster import LocalClusterConfig  # Ray takes a second to import
    from geo_ray.ray_cluster.local_cluster import LocalCluster
    from geo_ray.ray_cluster.settings import driver_environment

    with (
        LocalCluster(LocalClusterConfig(dashboard=True), REGIONS, cpus_per_region=8) as cluster,
        driver_environment(cluster.environment),
    ):
        yield cluster


@pytest.fixture
def connected(ray_cluster: LocalCluster) -> Iterator[ConnectedCluster]:
    """This process, connected to the shared cluster in a namespace of its own."""
    from geo_ray.experiment.cluster import ExistingClusterConfig
    from geo_ray.ray_cluster.connect import connect

    config = ExistingClusterConfig(address=ray_cluster.address)
    with connect(config, REGIONS, namespace=f"test-{secrets.token_hex(4)}") as cluster:
        yield cluster
