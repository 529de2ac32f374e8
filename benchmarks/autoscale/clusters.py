"""A cluster of three regions on this computer: how long it takes to come, and to be whole again.

`configs/cluster_local.yaml` with machines that are processes here (no delay of their own, the
autoscaler looks every second). In each run: the same training with the local cluster of `geo-ray
train`, from the call to the first step of all regions; then `up`, a job that is submitted as soon
as the head serves, to the same moment; then one machine is given a notice of 30 s, then one is cut
off; then `down`.

  local_first_step   the local cluster of `geo-ray train`, from the call to the first step
  up_first_step      from `geo-ray up` to the first step of the job
  up_full            from `geo-ray up` until all machines of the plan compute
  node_start         from the launch of a machine until its node computes, in that
  notice_to_drained  from a notice until nothing runs on the machine and its node has ended
  loss_to_full       from a cut to the full plan, beside a node's own start
  down               of `geo-ray down` while it trains
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

import geo_ray
from benchmarks.common import support
from geo_ray.api.clusters import UpCluster, cluster_status
from geo_ray.cloud.local import LocalProvider, read_catalog, write_catalog
from geo_ray.cloud.provider import MachineState
from geo_ray.ray_cluster.settings import driver_environment
from geo_ray.telemetry.event_log import read_events
from geo_ray.telemetry.events import Event

_LONGEST_S = 240.0
_CONFIG = support.REPOSITORY / "configs" / "cluster_local.yaml"


def main() -> None:
    """Run and report."""
    parser = support.parser(__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--notices", type=int, help="only notice_to_drained, so many on one cluster that trains"
    )
    arguments = parser.parse_args()
    machine = support.hardware()
    if arguments.notices:
        with tempfile.TemporaryDirectory(prefix="gb", dir="/tmp") as scratch:
            values = some_notices(Path(scratch), arguments.notices)
        figure = support.median("notice_to_drained", values, "s", "<= 10")
        support.finish("clusters", machine, [figure], arguments.out)
        return
    found: dict[str, list[float]] = {}
    for number in range(1 if arguments.quick else arguments.runs):
        with tempfile.TemporaryDirectory(prefix="gb", dir="/tmp") as scratch:
            for name, value in one_run(Path(scratch)).items():
                found.setdefault(name, []).append(value)
        support.say(f"run {number + 1}: " + ", ".join(f"{n} {v[-1]:.2f}" for n, v in found.items()))
    targets = {"notice_to_drained": "<= 10", "loss_to_full": "<= 20"}
    baseline = statistics.median(found["local_first_step"])
    figures = [
        support.Figure(
            name,
            statistics.median(values),
            "s",
            targets.get(name),
            baseline if name == "up_first_step" else None,
            values,
        )
        for name, values in found.items()
    ]
    support.finish("clusters", machine, figures, arguments.out)


def _tree(work: Path) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(_CONFIG.read_text())
    tree["run"] = {"dir": str(work / "runs")}
    tree["provider"]["state"] = str(work / "clusters")
    tree["train"] |= {"steps": 100_000, "eval_every": 0}
    return tree


def _written(tree: dict[str, Any], work: Path) -> Path:
    config = work / "job" / "job.yaml"
    config.parent.mkdir()
    config.write_text(yaml.safe_dump(tree))
    return config


def _up(config: Path) -> tuple[UpCluster, LocalProvider]:
    """Make the cluster; its machines end with this process."""
    made = geo_ray.up(config, provider="local", longest_s=0.0)
    root = Path(made.state.uri) / "cloud"
    write_catalog(root, read_catalog(root).model_copy(update={"owner_pid": os.getpid()}))
    return made, LocalProvider(root)


def _submit(made: UpCluster, config: Path) -> None:
    from ray.job_submission import JobSubmissionClient

    client = JobSubmissionClient(str(made.report.job_server))
    client.submit_job(
        entrypoint="geo-ray train job.yaml", runtime_env={"working_dir": str(config.parent)}
    )


def _notice_to_drained(made: UpCluster, cloud: LocalProvider, region: str) -> float:
    taken = _machine_in(made, region)
    began_s = time.monotonic()
    cloud.preempt(taken, 30.0)
    until(lambda: _has_ended(cloud, made, taken))
    return time.monotonic() - began_s


def some_notices(work: Path, count: int) -> list[float]:
    """Give a machine a notice again and again, each time once the region trains again."""
    tree = _tree(work)
    names = {region["name"] for region in tree["regions"]}
    run, found = work / "runs" / tree["name"], []
    config = _written(tree, work)
    made, cloud = _up(config)
    try:
        with driver_environment(made.environment):
            _submit(made, config)
            until(lambda: _have_stepped(run, names))
            for _ in range(count):
                until(lambda: _is_full(made) and _trains(run, "eu"))
                found.append(_notice_to_drained(made, cloud, "eu"))
                support.say(f"drained after {found[-1]:.2f} s")
    finally:
        geo_ray.down(made.state.uri)
    return found


def one_run(work: Path) -> dict[str, float]:
    """Measure everything once."""
    tree = _tree(work)
    names = {region["name"] for region in tree["regions"]}
    found = {"local_first_step": _local_first_step(tree, work, names)}
    config = _written(tree, work)

    began_s = time.monotonic()
    made, cloud = _up(config)
    try:
        with driver_environment(made.environment):
            _submit(made, config)
            full_s: list[float] = []

            def trains() -> bool:
                if not full_s and _is_full(made):
                    full_s.append(time.monotonic() - began_s)
                return _have_stepped(work / "runs" / tree["name"], names)

            until(trains)
            found["up_first_step"] = time.monotonic() - began_s
            until(lambda: bool(full_s) or _is_full(made))
            found["up_full"] = full_s[0] if full_s else time.monotonic() - began_s
            start_s = _node_start(made)
            found["node_start"] = start_s

            found["notice_to_drained"] = _notice_to_drained(made, cloud, "eu")
            until(lambda: _is_full(made))

            taken = _machine_in(made, "asia")
            began_s = time.monotonic()
            cloud.preempt(taken, 0.0)
            until(lambda: _has_ended(cloud, made, taken))
            until(lambda: _is_full(made, without=taken))
            found["loss_to_full"] = time.monotonic() - began_s - start_s
    finally:
        began_s = time.monotonic()
        geo_ray.down(made.state.uri)
        found["down"] = time.monotonic() - began_s
    return found


def until(what: Callable[[], bool]) -> None:
    """Wait for something.

    Raises:
        SystemExit: it does not come.
    """
    deadline_s = time.monotonic() + _LONGEST_S
    while not what():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"waited {_LONGEST_S:.0f} s in vain")
        time.sleep(0.1)


class _FirstStepError(Exception):
    """All regions have made a step: that is enough."""


def _local_first_step(tree: dict[str, Any], work: Path, names: set[str]) -> float:
    """From the call to the first step of all regions on the local cluster of `train`."""
    local = tree | {"cluster": {"kind": "local"}, "run": {"dir": str(work / "local")}}
    observed: set[str] = set()

    def on_event(event: Event) -> None:
        if event.kind == "step":
            observed.add(str(event["region"]))
        if observed == names:
            raise _FirstStepError

    began_s = time.monotonic()
    try:
        geo_ray.train(local, on_event=on_event, base_dir=work)
    except _FirstStepError:
        return time.monotonic() - began_s
    raise SystemExit("the run ended before its first step")


def _have_stepped(run: Path, names: set[str]) -> bool:
    if not (run / "events.jsonl").exists():
        return False
    return names <= {
        str(e["region"]) for e in read_events(run / "events.jsonl") if e.kind == "step"
    }


def _trains(run: Path, region: str) -> bool:
    """Whether a region has made a step since it came, for the first time or again."""
    mine = [
        event.kind
        for event in read_events(run / "events.jsonl")
        if event.kind in ("step", "region_drained", "region_lost", "region_joined")
        and event.fields.get("region") == region
    ]
    return bool(mine) and mine[-1] == "step"


def _is_full(made: UpCluster, without: str = "") -> bool:
    report = cluster_status(made.state.uri)
    is_gone = without not in {row.id for row in report.machines}
    return is_gone and all(
        node_group.ready == node_group.planned for node_group in report.node_groups
    )


def _machine_in(made: UpCluster, region: str) -> str:
    report = cluster_status(made.state.uri)
    return next(row.id for row in report.machines if row.region == region and row.is_ready)


def _has_ended(cloud: LocalProvider, made: UpCluster, machine: str) -> bool:
    listed = cloud.list_machines(made.record.name)
    return all(m.state is MachineState.ENDED for m in listed if m.id == machine)


def _node_start(made: UpCluster) -> float:
    """From the first launch of a machine until all computed, as the nodes' logs have it."""
    found = []
    for folder in sorted((Path(made.state.uri) / "cloud" / "machines").iterdir()):
        scratch = yaml.safe_load((folder / "machine.json").read_text())
        marker = Path(scratch["scratch"]) / "r" / "ray_current_cluster"
        if "worker" in scratch["labels"].values() and marker.is_file():
            found.append(marker.stat().st_mtime - scratch["launched_unix_s"])
    return statistics.median(found)


if __name__ == "__main__":
    sys.exit(main())
