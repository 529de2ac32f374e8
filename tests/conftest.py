"""One real cluster of three regions for every test of the session that wants one."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from geo_ray.runtime.cluster import ConnectedCluster
    from geo_ray.runtime.local_cluster import LocalCluster

REGIONS = ("us-east", "eu-west", "ap-south")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[LocalCluster]:
    """A running cluster; the environment says how to reach it (RAY_ADDRESS and the token)."""
    from geo_ray.config.cluster import LocalClusterConfig  # Ray takes a second to import
    from geo_ray.runtime.local_cluster import LocalCluster
    from geo_ray.runtime.settings import driver_environment

    with (
        LocalCluster(LocalClusterConfig(dashboard=True), REGIONS, cpus_per_region=8) as cluster,
        driver_environment(cluster.environment),
    ):
        yield cluster


@pytest.fixture
def connected(ray_cluster: LocalCluster) -> Iterator[ConnectedCluster]:
    """This process, connected to the shared cluster in a namespace of its own."""
    from geo_ray.config.cluster import ExistingClusterConfig
    from geo_ray.runtime.cluster import connect

    config = ExistingClusterConfig(address=ray_cluster.address)
    with connect(config, REGIONS, namespace=f"test-{secrets.token_hex(4)}") as cluster:
        yield cluster
