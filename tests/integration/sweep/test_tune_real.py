"""Searches whose trials are whole runs on real actors, each in a placement group of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
from ray.util import placement_group_table
from test_tune import QUICKSTART, search_of

import geo_ray
from geo_ray.base.errors import PlacementError
from geo_ray.base.load import load_tree
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.connect import ConnectedCluster
from geo_ray.ray_cluster.placement import bundles_of, placed_in
from geo_ray.runtime.spec import demands_of
from geo_ray.sweep.ray_tune import cluster_cpus

pytestmark = pytest.mark.timeout(900)


def test_one_group_has_the_bundles_of_all_regions_in_order(connected: ConnectedCluster) -> None:
    demands = demands_of(load_tree(QUICKSTART, ["cluster={kind: existing}"], Experiment))
    bundles = bundles_of(demands)
    group = ray.util.placement_group(
        [{"CPU": 0.01}, *(amounts for amounts, _ in bundles)],
        bundle_label_selector=[{}, *(labels for _, labels in bundles)],
    )
    try:
        assert group.wait(30)
        nodes = {node["NodeID"]: node["Labels"] for node in ray.nodes()}
        at = placement_group_table(group)["bundles_to_node_id"]
        placed = placed_in(group, demands, first=1)
        indices = [
            i for region in placed.values() for own in region.bundle_index.values() for i in own
        ]
        assert sorted(indices) == list(range(1, 1 + len(bundles)))
        for name, region in placed.items():
            for own in region.bundle_index.values():
                for index in own:
                    assert nodes[at[index]]["ray.io/availability-region"] == name
    finally:
        ray.util.remove_placement_group(group)


def test_regions_that_name_machines_have_no_place_in_one_group() -> None:
    nodes = "regions.0.nodes=[{type: big, count: 1, workers: 2}]"
    experiment = load_tree(QUICKSTART, ["cluster={kind: existing}", nodes], Experiment)
    with pytest.raises(PlacementError, match="names machines"):
        bundles_of(demands_of(experiment))


def test_a_local_cluster_has_room_for_the_largest_trial() -> None:
    small = load_tree(QUICKSTART, [], Experiment)
    large = load_tree(QUICKSTART, ["regions.2.workers=5"], Experiment)
    regions, cpus = cluster_cpus([small, large], jobs=2)
    assert regions == ("us-east", "eu-west", "ap-south")
    most = max(demand.total()["CPU"] for demand in demands_of(large))
    assert cpus >= 2 * most


@pytest.mark.slow
def test_real_trials_train_in_their_regions_and_give_everything_back(
    connected: ConnectedCluster, tmp_path: Path
) -> None:
    search = search_of(
        {"strategy.interval": {"choice": [1, 2]}, "regions.us-east.workers": {"choice": [1, 2]}},
        2,
        trials={"kind": "real", "jobs": 1},
    )
    result = geo_ray.tune(search, out=tmp_path / "out")
    rows = result.tuning.rows
    assert len(rows) == 2 and all(row.status in ("reached", "ended") for row in rows), rows
    runs = sorted((tmp_path / "out" / "runs").iterdir())
    assert len(runs) == 2 and all((run / "summary.json").exists() for run in runs)
    summary = geo_ray.open_run(runs[0]).summary
    assert summary.startup_s is not None, "it was no simulation"
    _given_back()


@pytest.mark.slow
def test_a_population_goes_on_from_copies_of_better_trials(
    connected: ConnectedCluster, tmp_path: Path
) -> None:
    search = search_of(
        {"optimizer.lr": {"choice": [0.05, 1e-6, 1e-5]}},  # the base's, and far worse ones
        2,
        objectives=["loss"],
        schedule={"kind": "pbt", "every": 2, "quantile": 0.5},
        search={"seed": 0, "base_first": True},
        trials={"kind": "real", "jobs": 2},
    )
    search["set"] = [
        "train={steps: 120, eval_every: 6}",  # so long that the two are compared
        "emulate.step_s=0.1",
        "checkpoint.every_s=0.4",
    ]
    result = geo_ray.tune(search, out=tmp_path / "out")
    assert all(row.status == "ended" for row in result.tuning.rows), result.tuning.rows
    log = tmp_path / "out" / "tune" / "pbt_global.txt"
    assert log.exists() and log.read_text(), "nobody was copied"
    _given_back()


def _given_back() -> None:
    states = {each["state"] for each in placement_group_table().values()}
    assert states <= {"REMOVED"}, states
