"""Specification of a run's actors, their resource demand, and the fencing token check.

Plain values, small enough for one control message, and nothing secret; keys are handed out by
`ray_cluster.keys`. An actor obeys only the run actor with the newest lease (`TokenFence`).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path

from geo_ray.base.errors import CheckpointCorruptError, LeaseLostError, RunDirectoryError
from geo_ray.base.user_section import context
from geo_ray.experiment.experiment import Experiment
from geo_ray.experiment.regions import RegionConfig
from geo_ray.ray_cluster.demand import Bundle, RegionDemand
from geo_ray.runs.directory import CONFIG_FILE
from geo_ray.storage.manifest import PartInfo
from geo_ray.storage.parts import read_part
from geo_ray.storage.places import CheckpointPlaces, PartPlaces
from geo_ray.storage.uri import is_s3
from geo_ray.training.membership import AveragerLeader
from geo_ray.training.parameters import BufferLayout


class TokenFence:
    """Any thread may ask."""

    def __init__(self) -> None:
        self._newest = 0
        self._changed = threading.Condition()

    def check(self, token: int) -> None:
        """A run actor asks; those before it are refused from now on.

        Args:
            token: epoch of its lease.

        Raises:
            LeaseLostError: a later one has asked.
        """
        with self._changed:
            if token < self._newest:
                raise _overtaken(token, self._newest)
            if token > self._newest:
                self._newest = token
                self._changed.notify_all()

    def wait(self, token: int, longest_s: float) -> None:
        """Wait for a while, on behalf of a run actor.

        Raises:
            LeaseLostError: a later one has asked, before or meanwhile.
        """
        with self._changed:
            if self._changed.wait_for(lambda: token < self._newest, longest_s):
                raise _overtaken(token, self._newest)


def _overtaken(token: int, by: int) -> LeaseLostError:
    return LeaseLostError(
        f"the run was taken over by holder {by} of its lease; this process was holder {token}"
    )


def demands_of(experiment: Experiment) -> list[RegionDemand]:
    """What the run asks of each region that is there at the start."""
    return [demand_of(experiment, region) for region in experiment.present]


def demand_of(experiment: Experiment, region: RegionConfig) -> RegionDemand:
    """What the run asks of a region."""
    # A local cluster stands for all machines.
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
        places: where checkpoints lie.
        id: of this one.
        parts: their fingerprints by name.
    """

    places: PartPlaces
    id: int
    parts: dict[str, PartInfo]

    def read(self, name: str) -> tuple[dict[str, object], dict[str, object]]:
        """One part: tensors and plain values.

        Raises:
            CheckpointCorruptError: if it is missing or not whole.
            StoreError: if a store does not answer or refuses.
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
    """What every actor of a run is given: plain values, small enough for one control message.

    Nothing of it is secret; how keys get to actors is `geo_ray.ray_cluster.keys`.

    Attributes:
        experiment_json: the whole configuration.
        base_dir: where relative paths of the configuration start, on the run actor's machine.
        working_dir: the run actor's working directory, which a submitted job has on every node.
        manifest_address: where the data's manifest is.
        run_id: tells this run's sockets from another's.
        run_dir: the run's directory.
        places: where checkpoints go.
        num_params: size of the model.
        attempt: incarnation of the run; grows with every resume.
        resume: where to start from, or None.
        data_rows: rows of each region's training data.
        layout: of what the model carries beside its parameters.
        constants: digests of what is not trained; every process must have the same.
        leader: where the averager lives, for processes that begin in mid-run; None at the start.
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
        """The configuration as a tree; read once in a process."""
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
        """Refuse to start where what is written would land on another machine's disk.

        With a store, only generated data and candidates for the best model lie in the run's
        directory.

        Raises:
            RunDirectoryError: if this process does not see the run's files.
        """
        experiment = self.experiment
        generates = experiment.data.generate is not None and not is_s3(self.manifest_address)
        is_used = generates or experiment.train.keep_best is not None
        if self.places.is_remote and not is_used:
            return
        run = Path(self.run_dir)
        if not (run / CONFIG_FILE).is_file():
            raise RunDirectoryError(
                f"a node of region '{region}' does not see {run}",
                fix="Set `run.dir` to a directory that all nodes of the run share, or leave out "
                "`data.generate` and `train.keep_best`: they need one, and checkpoints do not.",
            )


@lru_cache(maxsize=1)
def _experiment(text: str, base_dir: Path) -> Experiment:
    return Experiment.model_validate_json(text, context=context(base_dir))
