"""`check` and `check_run`: checks that start no run.

`check` runs the contract checks of a strategy, codec or task. `check_run` checks whether a run
could start, and lists its resources.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.box import SIMPLE_HEAD

from geo_ray.api.config import Config, FilePath, Overrides, preserving_threads, source_of
from geo_ray.api.display import RunWatch, ShowProgress, Table
from geo_ray.api.plan import FollowedPlan, plan_to_follow
from geo_ray.api.train import checked_run
from geo_ray.base.errors import ConfigError, DataError, RunDirectoryError
from geo_ray.base.load import override_items
from geo_ray.base.notebooks import html_view
from geo_ray.base.output import ticking
from geo_ray.base.tables import FittedTable
from geo_ray.base.text import bytes_text
from geo_ray.data.manifest import Manifest
from geo_ray.data.tasks.base import Task
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.prices.price_book import Instance
from geo_ray.ray_cluster.demand import RegionDemand
from geo_ray.runs.build import check_start, model_outline, use_one_thread
from geo_ray.runs.data import data_region, open_readers, prepare_manifest
from geo_ray.runs.plan_inputs import check_group_memory, model_size
from geo_ray.runs.start_checks import (
    check_evaluation,
    check_metric_names,
    metrics_there,
    warn_at_start,
)
from geo_ray.runtime.run_start import check_sharding
from geo_ray.runtime.spec import demand_of, demands_of
from geo_ray.storage.uri import is_s3
from geo_ray.telemetry.export.exporters import check_exports
from geo_ray.testing.checks import Finding
from geo_ray.testing.run import checked, load


@dataclass(frozen=True, repr=False)
class PromiseCheck:
    """Results of the contract checks of a strategy, a codec or a task.

    Attributes:
        name: name of the class.
        findings: result of each check.
    """

    name: str
    findings: tuple[Finding, ...]

    @property
    def broken(self) -> tuple[Finding, ...]:
        """Failed checks."""
        return tuple(finding for finding in self.findings if finding.why is not None)

    def table(self) -> Table:
        """Return a row per check; ``why`` is null if the check passed."""
        rows = [{"promise": finding.promise, "why": finding.why} for finding in self.findings]
        return Table(rows, {"promise": str, "why": str})

    def __repr__(self) -> str:
        passed = len(self.findings) - len(self.broken)
        return f"<PromiseCheck {self.name}: {passed} of {len(self.findings)} checks passed>"

    def _repr_html_(self) -> str:
        rows = [(finding.promise, finding.why or "kept") for finding in self.findings]
        return html_view(repr(self)[1:-1], ("promise", "state"), rows)


def check(
    name: str,
    options: Mapping[str, Any] | Sequence[str] = (),
    *,
    base_dir: FilePath | None = None,
) -> PromiseCheck:
    """Run the contract checks of the library on a strategy, a codec or a task.

    Args:
        name: ``path/to/file.py:Class`` of a custom class, ``package.module:Class``, or the name of
            a built-in class.
        options: options of the class, by name or as ``key=value``; a short interval makes the
            checks fast.
        base_dir: base of a relative path; default: the working directory.

    Raises:
        ConfigError: the class does not exist, or cannot be used.
        TaskError: the task cannot be built.
    """
    subject = load(name, override_items(options), Path(base_dir or Path.cwd()))
    return PromiseCheck(name, tuple(checked(subject)))


_FLOAT_BYTES: Final = 4


@dataclass(frozen=True, repr=False)
class RunCheck:
    """A run that could start, as far as this machine can check; the cluster was not queried.

    Attributes:
        experiment: configuration of the run.
        num_params: number of parameters of the model; None: only the loops of users know it.
        demands: requested resources by region.
        rows: training rows of the regions in which geo_ray trains the task.
        absent: requested resources of initially absent regions (`members.absent`), once they join.
    """

    experiment: Experiment
    num_params: int | None
    demands: tuple[RegionDemand, ...]
    rows: Mapping[str, int]
    absent: tuple[RegionDemand, ...] = ()

    def table(self) -> Table:
        """Return a row per region: rows, requested resources, and whether it is absent at first."""
        rows = [
            {
                "region": demand.region,
                "rows": self.rows.get(demand.region),
                "processes": sum(bundle.processes for bundle in demand.bundles),
                "cpus": demand.total().get("CPU", 0.0),
                "gpus": demand.total().get("GPU", 0.0),
                "absent": demand in self.absent,
            }
            for demand in (*self.demands, *self.absent)
        ]
        return Table(rows)

    def __repr__(self) -> str:
        processes = sum(b.processes for demand in self.demands for b in demand.bundles)
        return (
            f"<RunCheck {self.experiment.name}: {self.size}, "
            f"{len(self.demands)} regions, {processes} processes>"
        )

    @property
    def size(self) -> str:
        """The size of the model in words."""
        count = self.num_params
        return "a model that only its loops know" if count is None else f"{count:,} parameters"

    def _repr_html_(self) -> str:
        rows = [tuple(str(cell) for cell in row.values()) for row in self.table().to_pylist()]
        return html_view(
            repr(self)[1:-1],
            ("region", "rows", "processes", "CPUs", "GPUs", "absent at first"),
            rows,
        )


def check_run(
    config: Config,
    overrides: Overrides = (),
    *,
    plan: FollowedPlan | None = None,
    progress: ShowProgress = False,
    base_dir: FilePath | None = None,
) -> RunCheck:
    """Check configuration, certificates, task, data and evaluation of a run; start nothing.

    Likely mistakes are logged as warnings, as in `geo_ray.train`. Generated data are written to a
    temporary directory and removed.

    Args:
        config: as for `geo_ray.train`.
        overrides: changed values by dotted key.
        plan: a plan to use.
        progress: print decisions on standard error.
        base_dir: as for `geo_ray.train`.

    Raises:
        GeoRayError: `geo_ray.train` could not start, for a reason other than the cluster.
    """
    followed = None if plan is None else plan_to_follow(plan)
    notify = RunWatch(progress).notify
    with (
        preserving_threads(),
        tempfile.TemporaryDirectory() as scratch,
        ticking("checking the run", notify),
    ):
        source = source_of(config, base_dir)
        experiment, _ = checked_run(source, override_items(overrides), followed, notify)
        check_exports(experiment.observe.export)
        here = _this_machine()
        _check_gpus(experiment, here.accelerators or 0)
        use_one_thread()
        num_params, rows = None, {}
        if own := experiment.task_regions:
            trained = experiment.model_copy(update={"regions": own})
            task = load_task(trained.task, source.parent)
            check_sharding(trained, task)
            outline = model_outline(task, trained.seed)
            check_start(trained, outline)
            if experiment.groups:
                size = model_size(task, trained.seed)
                check_group_memory(experiment, size, here)
            manifest, _ = prepare_manifest(trained, task, source.parent, Path(scratch))
            check_evaluation(trained, task, manifest)
            _check_metrics_here(trained, task, manifest)
            warn_at_start(trained, manifest, simulated=False)
            num_params = outline.num_params
            rows = {r.name: manifest.rows(data_region(r, manifest), "train") for r in own}
        _check_place(experiment, num_params or 0)
        demands = tuple(demands_of(experiment))
        present = experiment.present_names
        later = [each for each in experiment.regions if each.name not in present]
        absent = tuple(demand_of(experiment, region) for region in later)
    return RunCheck(experiment, num_params, demands, rows, absent)


def _this_machine() -> Instance:
    """Return the resources of this machine."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    memory_gb = torch.cuda.get_device_properties(0).total_memory / 1e9 if gpus else None
    host_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    return Instance(host_gb=host_gb, accelerators=gpus, accelerator_gb=memory_gb)


def _check_metrics_here(experiment: Experiment, task: Task, manifest: Manifest) -> None:
    """Check the metrics that control a run against the rows, if all rows are on this machine.

    Rows in a bucket are read only by workers in their region.

    Raises:
        GeoRayError: as for `check_evaluation`.
    """
    if experiment.data.manifest is None or any(map(is_s3, manifest.stores.values())):
        return
    try:
        heldout = [open_readers(experiment, manifest, name)[1] for name in experiment.region_names]
    except DataError:
        return  # the shards are on other machines
    found: set[str] = set()
    for each in heldout:
        found |= metrics_there(experiment, task, each)
    check_metric_names(experiment, found)


def _check_place(experiment: Experiment, num_params: int) -> None:
    """Reject a run directory that cannot be written, or is too small for the model.

    Raises:
        RunDirectoryError: names the cause.
    """
    root = Path(experiment.run.dir).absolute()
    if is_s3(experiment.run.dir):
        return
    there = next(path for path in (root, *root.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise RunDirectoryError(f"run.dir: {root} cannot be created or written")
    own_store = experiment.checkpoint.store is None and experiment.checkpoint.is_periodic
    copies = 1 + (experiment.checkpoint.keep + 1 if own_store else 0)
    needed = copies * num_params * _FLOAT_BYTES
    free = shutil.disk_usage(there).free
    if free < needed:
        raise RunDirectoryError(
            f"run.dir: {root} has {bytes_text(free)} free, but the model and its checkpoints "
            f"need at least {bytes_text(needed)}"
        )


def _check_gpus(experiment: Experiment, count: int) -> None:
    """Reject a reservation of more GPUs than this machine has, on a local cluster.

    Args:
        experiment: the run.
        count: GPUs of this machine.

    Raises:
        ConfigError: names the keys.
    """
    groups = [each.group for each in experiment.groups if each.group is not None]
    by_groups = sum(group.nodes * group.gpus_per_node for group in groups)
    by_workers = sum(
        each.workers * each.gpus_per_worker for each in experiment.present if each.group is None
    )
    if experiment.cluster.kind != "local" or by_groups + by_workers <= count:
        return
    key, who, rest = "gpus_per_worker", "workers", " in every region and device to cpu"
    if by_groups:
        key, who, rest = "gpus_per_node", "groups", " in every group"
    raise ConfigError(
        f"{key}: the {who} reserve {by_groups + by_workers:g} GPUs, and this machine has {count}",
        fix=f"Set {key} to 0{rest}, or use a cluster with GPUs: `cluster: {{kind: existing}}`.",
    )


_WHERE: Final = {"worker": "on the workers", "server": "on the parameter server"}


def check_lines(experiment: Experiment) -> list[str]:
    """Return who makes the optimizer's steps, and where regions join, in words."""
    lines, places = list[str](), experiment.optimizer_places
    if places:
        found = {where: [n for n, each in places.items() if each == where] for where in _WHERE}
        texts = [f"{_WHERE[where]} in {', '.join(each)}" for where, each in found.items() if each]
        lines.append(f"optimizer: {'; '.join(texts)}")
    joined = [region.name for region in experiment.regions if region.join]
    if joined:
        ports = experiment.served_ports.items()
        where = ", ".join(f"{name} at {port or 'a free port'}" for name, port in ports)
        lines.append(f"joined by {', '.join(joined)}, which connect to these ports: {where}")
    return lines


def needs_table(found: RunCheck) -> FittedTable:
    """Return the requested resources by region."""
    table = FittedTable("region", box=SIMPLE_HEAD)
    for heading in ("training rows", "processes", "CPUs", "GPUs"):
        table.add_column(heading, justify="right")
    for row in found.table().to_pylist():
        numbers = (row["rows"], row["processes"], row["cpus"], row["gpus"])
        name = f"{row['region']} (absent at first)" if row["absent"] else row["region"]
        table.add_row(name, *("-" if number is None else f"{number:,g}" for number in numbers))
    return table
