"""Specification of a run's actors, their resource demand, and the fencing token check.

The values are plain, small enough for one control message, and contain no secrets;
`ray_cluster.keys` distributes keys. An actor obeys only the run actor with the newest lease
(`TokenFence`).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path

import ray

from geo_ray.base.errors import (
    CheckpointCorruptError,
    InvariantError,
    LeaseLostError,
    ResidencyDeniedError,
    RunDirectoryError,
)
from geo_ray.base.user_section import context
from geo_ray.data.manifest import Manifest
from geo_ray.experiment.experiment import Experiment
from geo_ray.experiment.regions import RegionConfig
from geo_ray.joining.protocol import SERVER
from geo_ray.ray_cluster.demand import Bundle, RegionDemand
from geo_ray.ray_cluster.labels import REGION_LABEL
from geo_ray.runs.data import data_region
from geo_ray.runs.directory import CONFIG_FILE
from geo_ray.storage.manifest import PartInfo
from geo_ray.storage.parts import read_part
from geo_ray.storage.places import CheckpointPlaces, PartPlaces
from geo_ray.storage.uri import is_s3
from geo_ray.training.membership import AveragerLeader
from geo_ray.training.parameters import BufferLayout


class TokenFence:
    """Rejects calls with an outdated fencing token; any thread may call it."""

    def __init__(self) -> None:
        self._newest = 0
        self._changed = threading.Condition()

    def check(self, token: int) -> None:
        """Record the token of a call; earlier tokens are refused from now on.

        Args:
            token: fencing token of the caller's lease.

        Raises:
            LeaseLostError: a call with a later token has arrived.
        """
        with self._changed:
            if token < self._newest:
                raise _overtaken(token, self._newest)
            if token > self._newest:
                self._newest = token
                self._changed.notify_all()

    def wait(self, token: int, longest_s: float) -> None:
        """Wait for a while, on behalf of the run actor with this token.

        Raises:
            LeaseLostError: a call with a later token has arrived.
        """
        with self._changed:
            if self._changed.wait_for(lambda: token < self._newest, longest_s):
                raise _overtaken(token, self._newest)


def _overtaken(token: int, by: int) -> LeaseLostError:
    return LeaseLostError(
        f"the run was taken over by holder {by} of its lease; this process was holder {token}"
    )


def demands_of(experiment: Experiment) -> list[RegionDemand]:
    """Return the resources that the run requests in each region present at the start.

    A run whose regions join requests a place for each process that holds averagers, one for the
    averager's standby if it has one, and one for each group.
    """
    if experiment.is_served:
        first = experiment.regions[0]
        averager = RegionDemand(SERVER, _averagers(experiment), first.label, apart=True)
        return [averager, *(_group_demand(experiment, region) for region in experiment.groups)]
    return [demand_of(experiment, region) for region in experiment.present]


def _averagers(experiment: Experiment) -> tuple[Bundle, ...]:
    """Return the places of all averagers of a served run, in its first region."""
    count = experiment.served_at.holders + (experiment.averager.standby is not None)
    return (Bundle("bridge", experiment.regions[0].cpus_per_server),) * count


def _group_demand(experiment: Experiment, region: RegionConfig) -> RegionDemand:
    """Return the places of a group: one bundle for each of its machines.

    A local cluster has one node for all machines of a region.
    """
    group = region.group
    if group is None:
        raise InvariantError(f"region '{region.name}' is no group")
    ranks = group.ranks_of_node
    gpus = group.gpus_per_node / ranks
    node = Bundle("worker", group.cpus_per_rank, gpus, processes=ranks)
    separate = group.nodes > 1 and experiment.cluster.kind != "local"
    return RegionDemand(region.name, (node,) * group.nodes, region.label, separate=separate)


def demand_of(experiment: Experiment, region: RegionConfig) -> RegionDemand:
    """Return the resources that the run requests in a region."""
    if region.join:
        is_first = region is experiment.regions[0]
        one = (Bundle("bridge", region.cpus_per_server),)
        return RegionDemand(region.name, _averagers(experiment) if is_first else one, region.label)
    if region.group is not None:
        averager = _averagers(experiment) if region is experiment.regions[0] else ()
        demand = _group_demand(experiment, region)
        return replace(demand, bundles=(*averager, *demand.bundles))
    # A local cluster provides all machines.
    own = None if experiment.cluster.kind == "local" else region.nodes
    on = (region.server_node if experiment.cluster.kind != "local" else None) or ""
    server = Bundle("ps", region.cpus_per_server, node_type=on)
    bridges = [replace(server, role="bridge")] if len(experiment.regions) > 1 else []
    worker = Bundle("worker", region.cpus_per_worker, region.gpus_per_worker)
    workers = [worker] * region.workers
    if own is not None:
        workers = [
            replace(worker, node_type=each.type, processes=each.workers)
            for each in own
            for _ in range(each.count)
        ]
    bundles = (*[server] * region.ps_shards, *bridges, *workers)
    return RegionDemand(region.name, bundles, region.label)


@dataclass(frozen=True, slots=True)
class Resume:
    """The checkpoint to start from.

    Attributes:
        places: where checkpoints are.
        id: id of the checkpoint.
        parts: fingerprints of its parts by name.
    """

    places: PartPlaces
    id: int
    parts: dict[str, PartInfo]

    def read(self, name: str) -> tuple[dict[str, object], dict[str, object]]:
        """Read one part: tensors and plain values.

        Raises:
            CheckpointCorruptError: the part is missing or incomplete.
            StoreError: a store does not answer or refuses.
        """
        part = self.parts.get(name)
        if part is None:
            raise CheckpointCorruptError(
                f"checkpoint {self.id} in {self.places} has no part '{name}'; it has "
                f"{sorted(self.parts)}"
            )
        tensors, meta = read_part(self.places.folder(self.id), part)
        return dict(tensors), dict(meta)


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Arguments of every actor of a run: plain values, small enough for one control message.

    It contains no secrets; `geo_ray.ray_cluster.keys` distributes keys.

    Attributes:
        experiment_json: the whole configuration.
        base_dir: base of relative paths in the configuration, on the run actor's machine.
        working_dir: the run actor's working directory, which a submitted job has on every node.
        manifest_address: location of the data's manifest.
        run_id: distinguishes this run's sockets from those of other runs.
        run_dir: the run's directory.
        places: where checkpoints are written.
        num_params: size of the model.
        attempt: attempt of the run; grows with every resume.
        resume: checkpoint to start from, or None.
        data_rows: rows of each region's training data.
        layout: layout of the model buffers.
        constants: digests of untrained tensors; they must be the same in every process.
        leader: the averager's leader, for processes that start during the run; None at the start.
    """

    experiment_json: str
    base_dir: str
    working_dir: str
    manifest_address: str
    run_id: str
    run_dir: str = ""
    places: PartPlaces = field(default_factory=partial(CheckpointPlaces, ""))
    num_params: int = 0
    attempt: int = 1
    resume: Resume | None = None
    data_rows: dict[str, float] = field(default_factory=dict)
    layout: BufferLayout = field(default_factory=partial(BufferLayout, ()))
    constants: dict[str, str] = field(default_factory=dict)
    leader: AveragerLeader | None = None

    @property
    def experiment(self) -> Experiment:
        """The parsed configuration, cached per process."""
        return _experiment(self.experiment_json, self.here)

    @property
    def here(self) -> Path:
        """`base_dir` on this machine: the same path, or the same place in the working directory."""
        base_dir = Path(self.base_dir)
        if base_dir.is_dir() or not base_dir.is_relative_to(self.working_dir):
            return base_dir
        return Path.cwd() / base_dir.relative_to(self.working_dir)

    def region(self, name: str) -> RegionConfig:
        """The configuration of one region."""
        return next(r for r in self.experiment.regions if r.name == name)

    def check_run_directory(self, region: str) -> None:
        """Refuse to start if output would be written to another machine's disk.

        With a store, only generated data and candidates for the best model are in the run's
        directory.

        Raises:
            RunDirectoryError: this process cannot access the run's files.
        """
        experiment = self.experiment
        generates = experiment.data.generate is not None and not is_s3(self.manifest_address)
        is_used = generates or experiment.train.keep_best is not None
        if self.places.is_remote and not is_used:
            return
        run = Path(self.run_dir)
        if not (run / CONFIG_FILE).is_file():
            raise RunDirectoryError(
                f"a node of region '{region}' cannot access {run}",
                fix="Set `run.dir` to a directory that all nodes of the run share, or remove "
                "`data.generate` and `train.keep_best`: they need one, checkpoints do not.",
            )


def region_here(region: RegionConfig, manifest: Manifest, who: str) -> str:
    """Return the region of data that this process is in, from its node's label.

    Args:
        region: region of the process.
        manifest: the data.
        who: the process, in messages.

    Raises:
        ResidencyDeniedError: the node has no such label.
    """
    label = ray.get_runtime_context().get_node_labels().get(REGION_LABEL)
    if label is None:
        raise ResidencyDeniedError(f"{who} runs on a node without {REGION_LABEL}")
    # A site of this region reads its own shards, or those of the region.
    return data_region(region, manifest) if str(label) == region.label else str(label)


@lru_cache(maxsize=1)
def _experiment(text: str, base_dir: Path) -> Experiment:
    return Experiment.model_validate_json(text, context=context(base_dir))
