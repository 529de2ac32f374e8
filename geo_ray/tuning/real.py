"""A real trial: a whole run on the cluster, inside the placement group that Ray Tune gives it."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from ray import tune
from ray.tune import PlacementGroupFactory
from ray.util import get_current_placement_group

from geo_ray.checkpoint.local_folder import directory_of
from geo_ray.config.canonical import JSONValue
from geo_ray.config.experiment import Experiment
from geo_ray.errors import ConfigError, GeoRayError
from geo_ray.job import rundir
from geo_ray.job.rundir import RunDirectory
from geo_ray.runtime.cluster.demand import by_label
from geo_ray.runtime.cluster.placement import bundles_of, placed_in
from geo_ray.runtime.control.demands import demands_of
from geo_ray.runtime.driver.run_cluster import Reporting, with_its_driver
from geo_ray.runtime.driver.train import Resumption, train
from geo_ray.tuning.objective import Standing
from geo_ray.tuning.trial import TrialSpec, final_report, watch_of
from geo_ray.tuning.watch import TrialWatch, failed_report, report_of

_DRIVER_CPUS: Final = 0.01
_ON_CLUSTER: Final = "cluster={kind: existing}"
_STANDING: Final = "standing.json"


def real_trial(values: Mapping[str, JSONValue], spec: TrialSpec) -> None:
    """Train a candidate with every seed, and report to Ray Tune; failing is a result.

    With a checkpoint of Ray Tune's the run goes on from there, with this trial's values.
    """
    try:
        ended = [
            _trained(experiment, spec, reports=number == 0)
            for number, experiment in enumerate(_experiments(values, spec))
        ]
    except GeoRayError as error:
        tune.report(failed_report(spec.objectives, str(error)))
        return
    tune.report(final_report(ended, spec))


def real_resources(values: Mapping[str, JSONValue], spec: TrialSpec) -> PlacementGroupFactory:
    """What a trial reserves: its driver, and every process of its run, in the run's regions."""
    driver: tuple[dict[str, float], dict[str, str]] = ({"CPU": _DRIVER_CPUS}, {})
    bundles = [driver]
    with suppress(ConfigError):  # no configuration: the trial says so
        bundles += bundles_of(demands_of(_experiments(values, spec)[0]))
    return PlacementGroupFactory(
        [amounts for amounts, _ in bundles],
        strategy="PACK",
        bundle_label_selector=[labels for _, labels in bundles],
    )


def cluster_cpus(tried: Sequence[Experiment], jobs: int) -> tuple[tuple[str, ...], float]:
    """Regions of a local cluster for real trials, and the CPUs that each of them needs."""
    totals: dict[str, float] = {}
    for experiment in tried:
        for demand in by_label(demands_of(experiment)):
            most = max(totals.get(demand.region, 0.0), demand.total().get("CPU", 0.0))
            totals[demand.region] = most
    return tuple(totals), jobs * (max(totals.values()) + _DRIVER_CPUS)


def _experiments(values: Mapping[str, JSONValue], spec: TrialSpec) -> list[Experiment]:
    more: tuple[str, ...] = ("name=" + _trial_name(), _ON_CLUSTER)
    if spec.runs is not None:
        more += (f"run.dir={json.dumps(spec.runs)}",)
    seeds = spec.seeds or (None,)
    return [
        spec.base.experiment(values, more if seed is None else (*more, f"seed={seed}"))
        for seed in seeds
    ]


def _trial_name() -> str:
    try:
        return f"trial-{tune.get_context().get_trial_id()}"
    except (AttributeError, RuntimeError):  # asked for beside any trial: what it would reserve
        return "trial"


def _trained(
    experiment: Experiment, spec: TrialSpec, *, reports: bool
) -> tuple[Standing, TrialWatch]:
    run = rundir.create(experiment, Path(spec.base.parent))
    before = _restored(run) if reports else None
    sender = _Sender(run, spec, reports=reports)
    watch = watch_of(experiment, spec, sender.tell, before)
    sinks = [sender.feed, watch.feed]
    group = get_current_placement_group()
    demands = demands_of(experiment)
    summary = train(
        with_its_driver(experiment),
        run,
        Reporting(lambda _: None, sinks, time.time()),
        resume=None if before is None else Resumption(),
        placed=None if group is None else placed_in(group, demands, first=1),
    )
    shutil.rmtree(run.data, ignore_errors=True)
    return watch.ended(summary), watch


class _Sender:
    """Reports evaluations to Ray Tune, with the newest checkpoint if there is a new one."""

    def __init__(self, run: RunDirectory, spec: TrialSpec, *, reports: bool) -> None:
        self._run, self._spec, self._reports = run, spec, reports
        self._saved: int | None = None
        self._sent: int | None = None

    def feed(self, event: Any) -> None:
        """Take the next event."""
        if event.kind == "checkpoint":
            self._saved = int(event["id"])

    def tell(self, standing: Standing, watch: TrialWatch) -> None:
        """Report one evaluation."""
        if not self._reports:
            return
        told = report_of(standing, watch.goal, self._spec.objectives)
        if self._saved is None or self._saved == self._sent:
            tune.report(told)
            return
        folder = directory_of(self._run.checkpoints, self._saved)
        self._sent = self._saved
        with tempfile.TemporaryDirectory(prefix="geo-ray-checkpoint-") as scratch:
            shutil.copytree(folder, Path(scratch) / folder.name)
            known = {k: v for k, v in asdict(standing).items() if v is None or math.isfinite(v)}
            (Path(scratch) / _STANDING).write_text(json.dumps(known), "utf-8")
            tune.report(told, checkpoint=tune.Checkpoint.from_directory(scratch))


def _restored(run: RunDirectory) -> Standing | None:
    """Put a checkpoint of Ray Tune's into a new run's directory; None if there is none."""
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        for source in Path(folder).iterdir():
            if source.is_dir():
                shutil.copytree(source, run.checkpoints / source.name, dirs_exist_ok=True)
        known = json.loads((Path(folder) / _STANDING).read_text("utf-8"))
    return Standing(**({"usd": math.nan} | known))
