"""The worker actor: loads the task, opens the rows, connects to the shards, runs the loop."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import ray
from torch import nn

from geo_ray.base.memory import give_back_memory
from geo_ray.base.types import Span
from geo_ray.data.manifest import Manifest, load_manifest
from geo_ray.data.reader import RegionReader
from geo_ray.data.tasks.base import Task
from geo_ray.data.tasks.checked_calls import checked_model
from geo_ray.data.tasks.load import load_task
from geo_ray.ray_cluster.keys import LAN_KEY, Introduction
from geo_ray.runs.build import build_worker, use_cpus
from geo_ray.runs.data import open_readers
from geo_ray.runs.evaluation import Candidates, EvalSetting
from geo_ray.runs.start_checks import metrics_there
from geo_ray.runtime.actor import ActorState, RunActor
from geo_ray.runtime.device import DeviceReport
from geo_ray.runtime.remote_shard import dial_shards, links_over
from geo_ray.runtime.spec import RunSpec, region_here
from geo_ray.runtime.worker_loop import WorkerLoop
from geo_ray.training.config import wait_limit_s
from geo_ray.training.state_guard import check_constants
from geo_ray.transport.lan import LanClient
from geo_ray.transport.security.process_keys import SecretReceiver
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.sockets import Address

_POLL_EVERY_S: Final = 0.1


@dataclass(slots=True)
class _Loaded:
    """The loaded contents of a worker.

    Attributes:
        task: its task.
        module: its model; None while it trains, when the parameters are in the buffers.
    """

    task: Task
    module: nn.Module | None = None


class WorkerActor(RunActor[_Loaded, WorkerLoop]):
    """One worker.

    It is `SERVING` while its loop runs and `HALTED` afterwards. A parameter server that replaces a
    lost one makes it load again.

    Args:
        spec: the run.
        region: this region.
        rank: its number in the region.
        attempt: its attempt.
    """

    def __init__(self, spec: RunSpec, region: str, rank: int, attempt: int) -> None:
        super().__init__(spec, region)
        self._rank = rank
        self._attempt = attempt
        self._receiver = SecretReceiver()
        self._outcome: Future[int] = Future()

    def introduce(self) -> Introduction:
        """Return the public half of this process's key."""
        return Introduction(self._receiver.public)

    def ready(self) -> set[str] | None:
        """Load the task and build its model; the first worker of a region also tries it on rows.

        Returns:
            Names of the metrics of these rows; None from other workers, and for rows that the run
            actor generated and tried.
        """
        experiment, task = self._spec.experiment, self._load_task()
        # Servers build their models at the same time.
        self._load(_Loaded(task, checked_model(task, experiment.seed)))
        if self._rank > 0 or self._attempt > 1 or experiment.data.generate is not None:
            return None
        manifest = load_manifest(self._spec.manifest_address)
        _, heldout = open_readers(experiment, manifest, self._region, self._here(manifest))
        return metrics_there(experiment, task, heldout)

    def process_id(self) -> int:
        """Return the id of this actor's process, for operators and tests."""
        return os.getpid()

    def doing(self) -> str:
        """Return the current activity, for a waiting run actor."""
        return "starting" if self._is_starting else self._serving.doing

    def node_id(self) -> str:
        """Return the node that this process runs on."""
        return str(ray.get_runtime_context().get_node_id())

    def run(self, shards: list[Address], lan_key: bytes) -> int:
        """Work until the parameter server releases this worker.

        Args:
            shards: addresses of the region's shards, the primary one first.
            lan_key: key of the region's sockets, sealed for this process.

        Returns:
            Steps computed.
        """
        self._outcome = outcome = Future[int]()
        try:
            if self._state is ActorState.CREATED:  # it replaces a lost worker
                self._load(_Loaded(self._load_task()))
            steps = self._run(shards, lan_key)
        except Exception as error:  # of any class: a later run actor must receive it, too
            outcome.set_exception(error)
            raise
        finally:
            self._halt()
        outcome.set_result(steps)
        return steps

    def outcome(self, token: int) -> int:
        """Wait for the outcome of `run`, for a run actor that did not call it.

        Raises:
            LeaseLostError: a later run actor has attached.
        """
        self._fence.check(token)
        while not self._outcome.done():
            self._fence.wait(token, _POLL_EVERY_S)
        return self._outcome.result()

    def _run(self, shards: list[Address], lan_key: bytes) -> int:
        train, heldout = self._open_rows()
        clients = self._dial(shards, lan_key)
        try:
            loop = self._loop(clients, train, heldout)
            self._serve(loop)
            return loop.run()
        finally:
            for client in clients:
                client.close()

    def _open_rows(self) -> tuple[RegionReader, RegionReader]:
        """Open the region's training stream, and its held-out rows."""
        experiment, manifest = self._spec.experiment, load_manifest(self._spec.manifest_address)
        readers = open_readers(experiment, manifest, self._region, self._here(manifest))
        for reader in readers:
            reader.retry_for(experiment.checkpoint.retry_s)
        return readers

    def _dial(self, shards: list[Address], lan_key: bytes) -> list[LanClient]:
        spec, key = self._spec, self._receiver.open(lan_key, LAN_KEY)
        about: Meta = {"role": "worker", "worker": self._rank, "attempt": self._attempt}
        hello: Meta = {"peer": f"{self._region}/{self._rank}", **about}
        config, buffer_floats = spec.experiment.lan, spec.layout.size_floats
        return dial_shards(
            shards, key, hello, spec.num_params, config=config, buffer_floats=buffer_floats
        )

    def _loop(
        self, clients: Sequence[LanClient], train: RegionReader, heldout: RegionReader
    ) -> WorkerLoop:
        """Build the worker over the buffers that it shares with the shards."""
        spec, experiment, loaded = self._spec, self._spec.experiment, self._loaded
        params_P, grad_P, links = links_over(
            clients, spec.num_params, wait_limit_s(experiment.train), spec.layout.size_floats
        )
        module, loaded.module = loaded.module, None
        worker = build_worker(
            experiment, self._region, loaded.task, params_P, grad_P, module, self._rank
        )
        del module
        give_back_memory()  # the parameters are in the buffers now
        name = f"worker {self._rank} of region '{self._region}'"
        check_constants(worker.constants, spec.constants, name)
        candidates = Candidates.of(experiment, Path(spec.run_dir))
        evals = EvalSetting(
            experiment.train.eval_batch_size,
            None if candidates is None else partial(candidates.note, self._region),
            experiment.statistics_spans,
        )
        step_s = None if experiment.step_s(self._region) is None else self._push_s
        gpus = spec.region(self._region).gpus_per_worker
        return WorkerLoop(
            worker,
            links,
            train,
            heldout,
            rank=self._rank,
            evals=evals,
            step_s=step_s,
            device=DeviceReport(experiment.device, min(gpus, 1.0) or 1.0),
        )

    def _push_s(self, span: Span) -> float:
        experiment = self._spec.experiment
        return experiment.push_s(self._region, self._rank, span.start, span.count) or 0.0

    def _load_task(self) -> Task:
        if self._state is not ActorState.CREATED:
            return self._loaded.task
        spec = self._spec
        use_cpus(spec.experiment, spec.region(self._region).cpus_per_worker)
        return load_task(spec.experiment.task, spec.here)

    def _here(self, manifest: Manifest) -> str:
        """Return the region that this process runs in, from its node's label.

        Raises:
            ResidencyDeniedError: the node has no such label.
        """
        region, who = self._spec.region(self._region), f"worker {self._rank} of '{self._region}'"
        return region_here(region, manifest, who)
