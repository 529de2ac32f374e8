"""For all tests: how hypothesis works, what is slow, and one real cluster of three regions."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
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
        "cocodc",
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

    A test of at most as many strategies as `ONE_OF_EACH` has keeps them all.
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
        if len(kinds[test]) >= len(ONE_OF_EACH) and not (kind in ONE_OF_EACH and is_first):
            item.add_marker(pytest.mark.slow)


gc.disable()  # until all tests are collected: what is made till then stays to the end


def pytest_collection_finish() -> None:
    """Leave what there is out of all later garbage collections, and make whole ones rare.

    The tables of SDKs alone, a million objects, take 0.4 s each time.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, 5 * old)


_cpu_s: Counter[str] = Counter()
_num_tests: Counter[str] = Counter()
_NUM_SLOWEST = 10
_LEAST_S = 1.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Count the CPU of a test: this process's, and that of child processes that ended in it."""
    file = item.nodeid.partition("::")[0]
    _num_tests[file] += 1
    before_s = sum(os.times()[:4])
    try:
        return (yield)
    finally:
        _cpu_s[file] += sum(os.times()[:4]) - before_s


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the slowest files; `scripts/checks.py` takes the slowest of all parts from the lists."""
    slowest = [(file, s) for file, s in _cpu_s.most_common(_NUM_SLOWEST) if s >= _LEAST_S]
    if slowest:
        terminalreporter.section("CPU of the slowest files, processes that ended included")
    for file, cpu_s in slowest:
        terminalreporter.write_line(f"CPU {cpu_s:7.1f} s {_num_tests[file]:5} tests {file}")


# Who is started in the background by a shell script ignores interrupts, and so would all children.
signal.signal(signal.SIGINT, signal.default_int_handler)

REGIONS = ("us-east", "eu-west", "ap-south")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[LocalCluster]:
    """A running cluster; the environment says how to reach it (RAY_ADDRESS and the token)."""
    from geo_ray.experiment.cluster import LocalClusterConfig  # Ray takes a second to import
    from geo_ray.ray_cluster.local_cluster import LocalCluster
    from geo_ray.ray_cluster.settings import driver_environment

    config = LocalClusterConfig(dashboard=True, start_timeout_s=300.0)  # the machine may be busy
    with (
        LocalCluster(config, REGIONS, cpus_per_region=8) as cluster,
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
