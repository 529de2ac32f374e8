"""A run on machines without its directory, which upload their parts to the run actor."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from geo_ray.base.errors import InterruptedRunError
from geo_ray.experiment.cluster import LocalClusterConfig
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster import local_cluster
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.ray_cluster.settings import driver_environment
from geo_ray.runs import directory
from geo_ray.runs.checkpoints import store_of
from geo_ray.runs.requests import Interruption
from geo_ray.runtime.run_context import Reporting
from geo_ray.runtime.run_order import Resumption
from geo_ray.telemetry.events import Event, RunObserver
from tests.support.train_support import (
    EventSink,
    Trained,
    events_of,
    final_digests,
    losses,
    run_here,
    simulate,
)
from tests.support.train_support import experiment_of as tiny

REGIONS = ("us-east", "eu-west")
pytestmark = [
    pytest.mark.slow,  # two starts of a cluster's processes; the parts are in the unit tests
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None,
        reason="hides a directory from processes: needs root and `unshare`",
    ),
]


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    """A cluster whose regions see another, empty directory in the place of that of the runs."""
    hidden = tmp_path / "runs"
    hidden.mkdir()
    command = local_cluster.node_command

    def hiding(flags: Sequence[str], **more: Any) -> list[str]:
        argv = list(command(flags, **more))
        if "--head" in flags:
            return argv
        hide = f'mount -t tmpfs none "{hidden}" && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", hide, "sh", *argv]

    monkeypatch.setattr(local_cluster, "node_command", hiding)
    config = LocalClusterConfig()
    with (
        LocalCluster(config, REGIONS, cpus_per_region=8) as cluster,
        driver_environment(cluster.environment),
    ):
        yield cluster


def stopped_after(
    checkpoints: int, experiment: Experiment, base_dir: Path
) -> directory.RunDirectory:
    """A run that is saved and ends once it has saved so often."""
    run, stop = directory.create(experiment, base_dir), Interruption()

    def sink(event: Event) -> None:
        if event.kind == "checkpoint" and event["id"] + 1 >= checkpoints:
            stop.set()

    reporting = Reporting(EventSink(sink), time.time(), stop)
    with pytest.raises(InterruptedRunError):
        run_here(experiment, run, reporting)
    return run


def crossed(events: list[Event]) -> list[tuple[str, str, int]]:
    """Sums so far, by link, as events tell them."""
    told = [e for e in events if e.kind == "wan" and "checkpoint" in e["bytes_by_class"]]
    return [(e["src"], e["dst"], e["bytes_by_class"]["checkpoint"]) for e in told]


def test_stopped_and_resumed_to_the_bit_without_a_shared_directory(
    apart: LocalCluster, tmp_path: Path
) -> None:
    regions = [{"name": "us-east"}, {"name": "eu-west", "ps_shards": 2}]
    steps = {"steps": 16, "eval_every": 8, "step_timeout_s": 60}
    made = tiny(tmp_path / "made", regions=regions, train=steps)
    undisturbed = simulate(made, tmp_path)
    own: dict[str, Any] = {
        "regions": regions,
        "train": steps,
        "checkpoint": {"every_s": 0.5},
        "cluster": {"kind": "existing", "address": apart.address},
    }

    manifest = str(undisturbed.run.path / "data" / "manifest.json")
    data = {"manifest": manifest, "batch_size": 16}
    experiment = tiny(tmp_path, **own, data=data, emulate={"step_s": 0.25})
    run = stopped_after(2, experiment, tmp_path)
    before = events_of(run.path)
    saved = store_of(run, experiment.checkpoint).latest().manifest
    names = {"averager", "us-east-ps0", "eu-west-ps0", "eu-west-ps1"}
    assert {part.name for part in saved.parts} == names
    assert not list(run.path.rglob("*.tmp"))
    sent = crossed(before)
    assert sent and {link[:2] for link in sent} == {("eu-west", "us-east")}
    whole = sum(part.bytes for part in saved.parts if part.name.startswith("eu-west"))
    assert sent[-1][2] >= 2 * whole, "each checkpoint counts"

    reporting = Reporting(RunObserver(), time.time())
    done = Trained(run, run_here(experiment, run, reporting, resume=Resumption()))
    assert done.summary.digest == undisturbed.summary.digest
    assert final_digests(done.events) == {undisturbed.summary.digest}
    assert losses(done.events) == losses(undisturbed.events)
    (read,) = [sum for src, _, sum in crossed(done.events[len(before) :])[:1] if src == "us-east"]
    assert read == whole, "what was fetched at the resume"
    assert run.model.is_file()
