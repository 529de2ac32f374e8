"""The Ray actor of a worker: a thin shell that builds the worker and keeps it running."""

from __future__ import annotations

import os
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Final

import ray
from torch import nn

from geo_ray.data.manifest import Manifest, load_manifest
from geo_ray.errors import ResidencyDeniedError
from geo_ray.job.build import build_worker, use_cpus
from geo_ray.job.candidates import Candidates
from geo_ray.job.data import data_region, open_readers
from geo_ray.job.start.evaluation import metrics_there
from geo_ray.runtime.actors.deadlines import wait_limit_s
from geo_ray.runtime.actors.driver_fence import DriverFence
from geo_ray.runtime.actors.introduction import LAN_KEY, Introduction
from geo_ray.runtime.actors.spec import RunSpec
from geo_ray.runtime.actors.worker_loop import EvalSetting, WorkerLoop, dial_shards, links_over
from geo_ray.runtime.cluster.labels import REGION_LABEL
from geo_ray.tasks.base import Task
from geo_ray.tasks.guard import checked_model
from geo_ray.tasks.load import load_task
from geo_ray.training.compute.state_guard import check_constants
from geo_ray.transport.security.secret_sealer import SecretReceiver
from geo_ray.transport.wire.meta import Meta
from geo_ray.transport.wire.sockets import Address
from geo_ray.types import Span
from geo_ray.util.freed_memory import give_back_memory

_LOOK_EVERY_S: Final = 0.1


class WorkerActor:
    """One worker.

    Args:
        spec: the run.
        region: this region.
        rank: its number in the region.
        epoch: its incarnation.
    """

    def __init__(self, spec: RunSpec, region: str, rank: int, epoch: int) -> None:
        self._spec = spec
        self._region = region
        self._rank = rank
        self._epoch = epoch
        self._task: Task | None = None
        self._module: nn.Module | None = None
        self._receiver = SecretReceiver()
        self._fence = DriverFence()
        self._outcome: Future[int] = Future()
        self._loop: WorkerLoop | None = None

    def introduce(self) -> Introduction:
        """Tell the public half of this process's key."""
        return Introduction(self._receiver.public)

    def ready(self) -> set[str] | None:
        """Load the task and make its model; the first worker of a region also tries it on rows.

        Returns:
            Names of metrics that these rows have; None from other workers, and of rows that the
            driver wrote and tried.
        """
        experiment, task = self._spec.experiment, self._load_task()
        self._module = checked_model(task, experiment.seed)  # while servers make theirs
        if self._rank > 0 or self._epoch > 1 or experiment.data.generate is not None:
            return None
        manifest = load_manifest(self._spec.manifest_address)
        _, heldout = open_readers(experiment, manifest, self._region, self._here(manifest))
        return metrics_there(experiment, task, heldout)

    def process_id(self) -> int:
        """Of this actor's process, for operators and tests."""
        return os.getpid()

    def doing(self) -> str:
        """What it is doing, for a driver that waits for it."""
        return "starting" if self._loop is None else self._loop.doing

    def node_id(self) -> str:
        """The node that it runs on."""
        return str(ray.get_runtime_context().get_node_id())

    def run(self, shards: list[Address], lan_key: bytes) -> int:
        """Work until the parameter server says that it is enough.

        Args:
            shards: where the region's shards are, the primary one first.
            lan_key: key of the region's sockets, sealed for this process.

        Returns:
            Steps computed.
        """
        self._outcome = outcome = Future[int]()
        try:
            steps = self._run(shards, lan_key)
        except Exception as error:  # whatever it is: a driver that comes later gets it, too
            outcome.set_exception(error)
            raise
        outcome.set_result(steps)
        return steps

    def outcome(self, driver: int) -> int:
        """What `run` returns or raises, for a driver that did not call it; blocks.

        Raises:
            LeaseLostError: a later driver has asked.
        """
        self._fence.check(driver)
        while not self._outcome.done():
            self._fence.wait(driver, _LOOK_EVERY_S)
        return self._outcome.result()

    def _run(self, shards: list[Address], lan_key: bytes) -> int:
        spec, experiment, task = self._spec, self._spec.experiment, self._load_task()
        manifest = load_manifest(spec.manifest_address)
        train, heldout = open_readers(experiment, manifest, self._region, self._here(manifest))
        hello: Meta = {
            "peer": f"{self._region}/{self._rank}",
            "role": "worker",
            "worker": self._rank,
            "epoch": self._epoch,
        }
        carried = spec.layout.size_floats
        key = self._receiver.open(lan_key, LAN_KEY)
        clients = dial_shards(
            shards, key, hello, spec.num_params, config=experiment.lan, carried=carried
        )
        try:
            timeout_s = wait_limit_s(experiment.train)
            params_P, grad_P, links = links_over(clients, spec.num_params, timeout_s, carried)
            module, self._module = self._module, None
            worker = build_worker(experiment, self._region, task, params_P, grad_P, module)
            del module
            give_back_memory()  # its parameters lie in the buffers now
            check_constants(
                worker.constants,
                spec.constants,
                f"worker {self._rank} of region '{self._region}'",
            )
            candidates = Candidates.of(experiment, Path(spec.run_dir))
            for reader in (train, heldout):
                reader.retry_for(experiment.checkpoint.retry_s)
            self._loop = WorkerLoop(
                worker,
                links,
                train,
                heldout,
                rank=self._rank,
                evals=EvalSetting(
                    experiment.train.eval_batch_size,
                    None if candidates is None else partial(candidates.note, self._region),
                    experiment.statistics_spans,
                ),
                step_s=None if experiment.step_s(self._region) is None else self._push_s,
            )
            return self._loop.run()
        finally:
            for client in clients:
                client.close()

    def _push_s(self, span: Span) -> float:
        experiment = self._spec.experiment
        return experiment.push_s(self._region, self._rank, span.start, span.count) or 0.0

    def _load_task(self) -> Task:
        if self._task is None:
            spec = self._spec
            use_cpus(spec.experiment, spec.region(self._region).cpus_per_worker)
            self._task = load_task(self._spec.experiment.task, self._spec.here)
        return self._task

    def _here(self, manifest: Manifest) -> str:
        """The region that this process really runs in, by its node's label.

        Raises:
            ResidencyDeniedError: if the node has no such label.
        """
        labels = ray.get_runtime_context().get_node_labels()
        here = labels.get(REGION_LABEL)
        if here is None:
            raise ResidencyDeniedError(
                f"worker {self._rank} of '{self._region}' runs on a node without {REGION_LABEL}"
            )
        region, label = self._spec.region(self._region), str(here)
        # A site of this region reads its own shards, or those of the region.
        return data_region(region, manifest) if label == region.label else label
