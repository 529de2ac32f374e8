"""Machines of several types in a region: a plan is followed on the machines that it is about."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from click.testing import CliRunner

import geo_ray
from geo_ray.api.plan import PlanInputs, PlanResult
from geo_ray.base.errors import PlacementError, PreflightError
from geo_ray.base.load import load_tree
from geo_ray.cli.main import root
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.plan import Machines, Plan, RegionPlan
from geo_ray.ray_cluster import ray_internals
from geo_ray.ray_cluster.connect import ConnectedCluster
from geo_ray.ray_cluster.labels import REGION_LABEL, TYPE_LABEL
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.ray_cluster.placement import place, remove
from geo_ray.ray_cluster.preflight import preflight
from geo_ray.runs import directory
from geo_ray.runs.follow_plan import changes_of
from geo_ray.runtime.spec import demands_of
from geo_ray.telemetry.summary import load_cost, load_summary
from tests.support.train_support import experiment_of, write_config

NODES = {"fast": ("hill", 60.0), "slow-1": ("hill", 20.0), "slow-2": ("hill", 20.0),
         "fast-3": ("dale", 60.0)}  # fmt: skip
CONFIG = """
name: mixed
task: {use: digits, options: {width: 8}}
data: {generate: {rows_per_shard: 64}, batch_size: 25}
regions: [{name: hill, workers: 3}, {name: dale}]
strategy: {kind: diloco, interval: 4}
optimizer: {kind: sgd, lr: 0.1}
train: {steps: 8, eval_every: 0}
checkpoint: {every_s: null}
cluster: {kind: existing}
plan:
  startup_s: 0
  codecs: [null]
  regions:
    hill:
      {cloud: hall, at: hill, rows: 300, machines: [
        {type: slow, cap: 2, count: 2, rows_per_s: 20, host_gb: 8, network_gbps: 1},
        {type: fast, cap: 1, count: 1, rows_per_s: 60, host_gb: 8, network_gbps: 1}]}
    dale:
      {cloud: hall, at: dale, rows: 100, machines: [
        {type: fast, cap: 1, count: 1, rows_per_s: 60, host_gb: 8, network_gbps: 1}]}
"""
NOW = {"source": "us", "fetched_at": "2026-11-20T00:00:00Z", "valid_for_s": 1e9,
       "cloud": "hall", "currency": "USD"}  # fmt: skip


@pytest.fixture(scope="module")
def machines(ray_cluster: LocalCluster) -> Iterator[None]:
    """Nodes of two types beside those of the shared cluster, gone afterwards."""
    for number, (name, (region, _)) in enumerate(NODES.items()):
        flags = [
            f"--address={ray_cluster.address}",
            f"--labels={REGION_LABEL}={region},{TYPE_LABEL}={name.partition('-')[0]}",
            "--num-cpus=4",
        ]
        ray_cluster._start_node(name, f"127.0.0.{40 + number}", flags)
    for name in NODES:
        ray_cluster._wait(
            (ray_cluster._directory(name) / "ray_current_cluster").is_file,
            name,
            time.monotonic() + 90,
        )
    yield
    for name in NODES:
        ray_cluster._processes.kill(name)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "mixed.yaml"
    path.write_text(CONFIG)
    records = [
        {**NOW, "region": region, "type": kind, "unit": "hour", "amount": 1.0}
        for region in ("hill", "dale")
        for kind in ("fast", "slow")
    ]
    records += [
        {**NOW, "region": r, "item": "egress", "to": "*", "unit": "GB", "amount": 0.1}
        for r in ("hill", "dale")
    ]
    (tmp_path / "prices.json").write_text(json.dumps({"records": records}))
    return path


def plan_of(config: Path) -> PlanResult:
    inputs = PlanInputs(prices=[config.parent / "prices.json"])
    sets = ["emulate.link={rate_mbps: 100, delay_s: 0.01}"]
    return geo_ray.plan(config, sets, policy="fixed", inputs=inputs)


def followed(config: Path, *sets: str) -> Experiment:
    plan = plan_of(config).plan
    experiment = load_tree(config, [], Experiment)
    return load_tree(config, [*changes_of(plan, experiment), *sets], Experiment)


@ray.remote(num_cpus=0.1)
class Here:
    def place(self) -> tuple[str, str, str]:
        context = ray.get_runtime_context()
        labels = context.get_node_labels()
        return labels[REGION_LABEL], labels[TYPE_LABEL], context.get_node_id()


def test_workers_land_on_the_machines_of_their_batches_one_on_each(
    machines: None, connected: ConnectedCluster, config: Path
) -> None:
    _await_nodes(4)
    experiment = followed(config)
    assert experiment.regions[0].batch_sizes == (15, 15, 45)
    placed = place(demands_of(experiment), timeout_s=30)
    try:
        actors = [
            Here.options(scheduling_strategy=placed["hill"].strategy("worker", rank)).remote()
            for rank in range(3)
        ]
        found = ray.get([actor.place.remote() for actor in actors], timeout=60)
        assert [kind for _, kind, _ in found] == ["slow", "slow", "fast"]
        assert {region for region, _, _ in found} == {"hill"}
        assert len({node for _, _, node in found}) == 3
    finally:
        remove(placed)


@pytest.mark.slow
def test_a_run_follows_its_plan_there(
    machines: None, connected: ConnectedCluster, config: Path, tmp_path: Path
) -> None:
    _await_nodes(4)
    run = geo_ray.train(config, [f"run.dir={tmp_path / 'runs'}"], plan=plan_of(config))
    assert run.summary.steps == 8


def test_missing_requirements_are_named_before_the_start(
    machines: None, connected: ConnectedCluster, config: Path
) -> None:
    _await_nodes(4)
    more = "regions=[{name: hill, workers: 3, nodes: [{type: slow, count: 3}]}, {name: dale}]"
    demands = demands_of(load_tree(config, [more], Experiment))
    with pytest.raises(PreflightError, match=r"3 node\(s\) of type slow .* has 2"):
        preflight(demands, ask_nodes=False)
    with pytest.raises(PlacementError, match="on a slow"):
        place(demands, timeout_s=1)


def test_several_workers_of_one_machine_stay_together(
    machines: None, connected: ConnectedCluster, config: Path
) -> None:
    _await_nodes(4)
    more = "regions=[{name: hill, workers: 5, nodes: [{type: slow, count: 2, workers: 2},"
    more += " {type: fast}]}, {name: dale}]"
    placed = place(demands_of(load_tree(config, [more], Experiment)), timeout_s=30)
    try:
        actors = [
            Here.options(scheduling_strategy=placed["hill"].strategy("worker", rank)).remote()
            for rank in range(5)
        ]
        nodes = [node for _, _, node in ray.get([a.place.remote() for a in actors], timeout=60)]
        assert nodes[0] == nodes[1] and nodes[2] == nodes[3] and len(set(nodes)) == 3
    finally:
        remove(placed)


def _await_nodes(number: int) -> None:
    """Nodes that have joined are not at once in the list of every node."""
    for _ in range(200):
        typed = [n for n in ray_internals.nodes() if n["Alive"] and TYPE_LABEL in n["Labels"]]
        if len(typed) >= number:
            return
        time.sleep(0.1)
    raise AssertionError("nodes have not joined")


@pytest.mark.slow  # the bill: tests/unit/planning
def test_a_run_that_follows_a_plan_ends_with_its_bill(machines: None, tmp_path: Path) -> None:
    each = {"market": "spot", "count": 1, "rows": 16, "rows_per_s": 16.0, "usd_per_h": 36.0}
    plan = Plan(
        policy="test",
        regions=tuple(
            RegionPlan(region=name, machines=(Machines(type=kind, **each),), step_s=1.0)
            for name, kind in (("hill", "slow"), ("dale", "fast"))
        ),
        averager="dale",
        interval=4,
        codec="int8",
        steps=8,
        base_steps=8,
        usd_per_gb={"hill": {"dale": 1e3}, "dale": {"hill": 2e3}},
        seconds={"start": 20.0, "compute": 8.0},
        usd={"machines spot": 0.56},
    )
    file = tmp_path / "p.json"
    file.write_text(plan.model_dump_json())
    config = write_config(
        tmp_path, experiment_of(tmp_path, regions=[{"name": "hill"}, {"name": "dale"}])
    )
    done = CliRunner().invoke(root, ["train", str(config), "--plain", "--plan", str(file)])
    assert done.exit_code == 0, (done.output, done.exception)
    run, followed = directory.reopen(tmp_path / "runs" / "tiny")
    assert directory.followed_plan(run) == plan
    assert (followed.averager_region, followed.strategy.interval) == ("dale", 4)
    assert followed.codec.up.kind == "int8"
    summary, cost = load_summary(run.path), load_cost(run.path)
    found = {(row.unit, row.term): row.actual for row in cost.rows}
    seconds = summary.startup_s + summary.seconds
    assert found["s", "start"] > summary.startup_s > 0
    assert found["s", "total"] == pytest.approx(seconds)
    assert found["USD", "machines"] == pytest.approx(seconds * 0.02)
    assert 0 < found["USD", "egress"] < 1e3 * 2e-9 * sum(summary.wan_bytes.values())
    assert summary.usd == found["USD", "total"]
    assert "Plan and run" in (run.path / "report.html").read_text()
