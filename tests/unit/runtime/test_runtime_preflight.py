from __future__ import annotations

import dataclasses

import pytest

from geo_ray.base.errors import ConfigError
from geo_ray.ray_cluster.demand import Bundle, RegionDemand
from geo_ray.ray_cluster.labels import REGION_LABEL
from geo_ray.ray_cluster.preflight import ClusterFacts, NodeFacts, problems_of

VERSIONS = {"python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0+cpu"}


def node(address: str, region: str | None, cpus: float = 4, **more: object) -> NodeFacts:
    labels = {"ray.io/node-id": address} | ({} if region is None else {REGION_LABEL: region})
    facts = NodeFacts(address, address, labels, {"CPU": cpus, "memory": 8e9})
    return dataclasses.replace(facts, **more)  # type: ignore[arg-type]


def facts(*nodes: NodeFacts, dashboard: str | None = None, auth: str = "token") -> ClusterFacts:
    return ClusterFacts(nodes, VERSIONS, dashboard, auth)


def demand(region: str, workers: int = 1, **worker: float) -> RegionDemand:
    workers_ = (Bundle("worker", **worker),) * workers  # type: ignore[arg-type]
    return RegionDemand(region, (Bundle("ps", 0.5), Bundle("bridge", 0.5), *workers_))


def problems(demands: list[RegionDemand], cluster: ClusterFacts) -> list[str]:
    return [str(problem) for problem in problems_of(demands, cluster)]


HEAD = node("10.0.0.1", None, 0)


def test_a_fit_cluster_has_no_problem() -> None:
    cluster = facts(HEAD, node("10.0.0.2", "us"), node("10.0.0.3", "eu", versions=VERSIONS))
    assert problems([demand("us", 3), demand("eu", 3)], cluster) == []


def test_no_nodes() -> None:
    dead = node("10.0.0.2", "us", alive=False)
    for cluster in (facts(), facts(dead)):
        assert "no running node" in problems([demand("us"), demand("eu")], cluster)[0]
        assert len(problems([demand("us"), demand("eu")], cluster)) == 1


def test_unknown_region_names_the_nearest_and_all() -> None:
    cluster = facts(HEAD, node("10.0.0.2", "us-east"), node("10.0.0.3", "eu-west"))
    (found,) = problems([demand("eu-wst")], cluster)
    assert "'eu-wst'" in found
    assert "eu-west, us-east" in found
    assert "did you mean 'eu-west'" in found


def test_no_labels_at_all() -> None:
    (found,) = problems([demand("us")], facts(node("10.0.0.2", None)))
    assert f"no node has the label {REGION_LABEL}" in found


def test_label_under_another_key() -> None:
    other = node("10.0.0.2", None, labels={"region": "us"})
    (found,) = problems([demand("us")], facts(other))
    assert "10.0.0.2 has the label region=us" in found
    assert f"--labels {REGION_LABEL}=us" in found


def test_dead_nodes_do_not_count() -> None:
    cluster = facts(HEAD, node("10.0.0.2", "us", alive=False))
    assert "no node is in region 'us'" in problems([demand("us")], cluster)[0]


def test_too_few_cpus_and_gpus() -> None:
    cluster = facts(node("10.0.0.2", "us", 2), node("10.0.0.3", "us", 2))
    found = problems([demand("us", 4, cpus=1.0, gpus=1.0)], cluster)
    assert len(found) == 2
    assert "asks for 5 CPU, its 2 node(s) have 4 CPU" in found[0]
    assert "asks for 4 GPU, its 2 node(s) have 0 GPU" in found[1]


def test_too_little_memory() -> None:
    found = problems([demand("us", 2, memory_bytes=6_000_000_000)], facts(node("10.0.0.2", "us")))
    assert "12.00 GB memory" in found[0]


def test_a_process_larger_than_every_node() -> None:
    cluster = facts(node("10.0.0.2", "us", 2), node("10.0.0.3", "us", 2))
    (found,) = problems([demand("us", 1, cpus=3.0)], cluster)
    assert "no single node of region 'us' has room for one worker (3 CPU)" in found


def test_versions_must_agree() -> None:
    other = {"python": "3.12.1", "ray": "2.59.0", "torch": "2.12.0"}
    found = problems([demand("us")], facts(node("10.0.0.2", "us", versions=other)))
    assert [line.split(" has ")[1].split()[0] for line in found] == ["python", "ray", "torch"]
    alike = {"python": "3.11.9", "ray": "2.60.0", "torch": "2.13.0+cu128"}
    assert problems([demand("us")], facts(node("10.0.0.2", "us", versions=alike))) == []


def test_a_node_that_cannot_run_us() -> None:
    sick = node("10.0.0.2", "us", fault="No module named 'geo_ray'")
    (found,) = problems([demand("us")], facts(sick))
    assert "No module named 'geo_ray'" in found


@pytest.mark.parametrize("dashboard", ["10.0.0.1:8265", "127.0.0.1:8265", "localhost:8265", None])
@pytest.mark.parametrize(
    ("auth", "hosts", "refused"),
    [
        ("disabled", ["10.0.0.1", "10.0.0.2"], True),
        ("disabled", ["2001:db8::1", "2001:db8::2"], True),
        ("disabled", ["127.0.0.1", "10.0.0.2"], True),
        ("token", ["10.0.0.1", "10.0.0.2"], False),
        ("disabled", ["10.0.0.1", "10.0.0.1"], False),
        ("disabled", ["127.0.0.1", "127.0.0.2"], False),
    ],
)
def test_several_hosts_need_a_token_wherever_the_dashboard_listens(
    dashboard: str | None, auth: str, hosts: list[str], refused: bool
) -> None:
    nodes = [node(address, "us") for address in hosts]
    found = problems([demand("us")], facts(*nodes, dashboard=dashboard, auth=auth))
    assert ["no token" in line for line in found] == ([True] if refused else [])


def test_all_problems_at_once() -> None:
    cluster = facts(node("10.0.0.2", "us", 1), HEAD, auth="disabled")
    assert len(problems([demand("us", 2), demand("mars"), demand("venus")], cluster)) == 4


def test_demand_describes_itself() -> None:
    wanted = demand("us", 2, cpus=1.5)
    assert wanted.indices() == {"ps": (0,), "bridge": (1,), "worker": (2, 3)}
    assert wanted.total() == {"CPU": 4.0}
    assert "2 x worker (1.5 CPU)" in str(wanted)


def test_a_bundle_of_nothing_still_reserves_something() -> None:
    assert Bundle("bridge", cpus=0).resources() == {"CPU": 0.001}
    assert Bundle("worker", 0, 1).resources() == {"GPU": 1}


def test_bad_demands() -> None:
    with pytest.raises(ConfigError, match="negative"):
        Bundle("worker", cpus=-1)
    with pytest.raises(ConfigError, match="requests nothing"):
        RegionDemand("us", ())
    with pytest.raises(ConfigError, match="region's name"):
        RegionDemand("us east", (Bundle("ps"),))


def test_where_machines_are_rented_nodes_may_be_missing_but_not_of_another_release() -> None:
    other = VERSIONS | {"ray": "2.59.0"}
    cluster = facts(HEAD, node("10.0.0.2", "us", cpus=1, versions=other))
    demands = [demand("us", 3), demand("eu", 3)]
    assert len(problems(demands, cluster)) == 3
    served = [str(problem) for problem in problems_of(demands, cluster, {"us", "eu"})]
    assert len(served) == 1
    assert "ray 2.59.0" in served[0]
    assert len(problems_of(demands, cluster, {"us"})) == 2, "eu is served by nobody"
