"""A local cluster with a node too slow for Ray is started again; one that fails is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from geo_ray.base.errors import ClusterStartError
from geo_ray.experiment.cluster import LocalClusterConfig
from geo_ray.ray_cluster import local_cluster
from geo_ray.ray_cluster.local_cluster import LocalCluster

NODE = """
import pathlib, sys, time
home, tries = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
tries.open("a").write(home.name + "\\n")
session = home / "session_2"
session.mkdir()
(session / "gcs_server_port_1").write_text("1234")
if home.name == "0" and tries.read_text().split().count("0") == 1:
    sys.exit("The current node timed out during startup.")
(home / "ray_current_cluster").touch()
time.sleep(600)
"""


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nodes that are small programs, of which that of the region ends when started first."""
    tries = tmp_path / "tries"

    def command(_flags: object, *, home: Path, **_others: object) -> list[str]:
        return [sys.executable, "-c", NODE, str(home), str(tries)]

    monkeypatch.setattr(local_cluster, "node_command", command)
    return tries


def test_a_node_that_was_too_slow_costs_another_start(
    tries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_cluster, "_SLOW_S", 0.0)
    with LocalCluster(LocalClusterConfig(), ["a"]) as cluster:
        assert cluster.address.endswith(":1234")
        root = cluster.root
    assert tries.read_text().split().count("0") == 2
    assert not root.exists()


def test_a_node_that_fails_at_once_is_reported(tries: Path) -> None:
    with (
        pytest.raises(ClusterStartError, match="timed out during startup"),
        LocalCluster(LocalClusterConfig(), ["a"]),
    ):
        pass
    assert tries.read_text().split().count("0") == 1
