"""The worker actor: pulls parameters and rows, pushes gradients, until it is released.

On one host all buffers are shared memory: parameters and gradients *are* the buffer, and a push
or pull only signals. Across hosts the same requests carry the bytes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import ray
import torch
from torch import Tensor, nn

from geo_ray.base.errors import ResidencyDeniedError
from geo_ray.base.memory import give_back_memory
from geo_ray.base.threads import Together
from geo_ray.base.types import Span, StepReport
from geo_ray.data.manifest import Manifest, load_manifest
from geo_ray.data.reader import ReadAhead, RegionReader
from geo_ray.data.tasks.base import Task
from geo_ray.data.tasks.checked_calls import checked_model
from geo_ray.data.tasks.load import load_task
from geo_ray.ray_cluster.keys import LAN_KEY, Introduction
from geo_ray.ray_cluster.labels import REGION_LABEL
from geo_ray.runs.build import build_worker, use_cpus
from geo_ray.runs.data import data_region, open_readers
from geo_ray.runs.evaluation import Candidates, Note
from geo_ray.runs.start_checks import metrics_there
from geo_ray.runtime.actor import ActorState, RunActor
from geo_ray.runtime.exchange.messages import (
    as_bytes,
    as_tensor,
    pull_meta,
    read_answer,
    read_pull,
    report_meta,
    stats_message,
)
from geo_ray.runtime.remote_shard import shared_bytes, shared_gradient, shared_parameters
from geo_ray.runtime.spec import RunSpec
from geo_ray.training.config import answer_s, wait_limit_s
from geo_ray.training.effects import Assignment
from geo_ray.training.parameters import split_sizes
from geo_ray.training.shard import Concurrently, Pull
from geo_ray.training.state_guard import check_constants
from geo_ray.training.stragglers import READING
from geo_ray.training.worker import LocalStepsWorker, StepResult, Worker, coded_step
from geo_ray.transport.config import LanConfig
from geo_ray.transport.lan import LanClient
from geo_ray.transport.security.process_keys import SecretReceiver
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.sockets import Address


class ShardLink:
    """One worker's connection to one shard, with its slices of the buffers.

    Args:
        client: the connection.
        params_S: the worker's parameters of this slice, fp32 (S,).
        grad_S: the worker's gradient of this slice, fp32 (S,).
        timeout_s: longest wait for others; the shard gives up earlier, see `deadlines`.
    """

    def __init__(
        self, client: LanClient, params_S: Tensor, grad_S: Tensor, timeout_s: float
    ) -> None:
        self.client = client
        self._params_S = params_S
        self._grad_S = grad_S
        self._timeout_s = answer_s(timeout_s)
        shared = client.shared
        count = params_S.numel()
        self._shared_grad_S = None if shared is None else shared_gradient(shared, count)
        self._shared_params_S = None if shared is None else shared_parameters(shared, count)

    def exchange(self, meta: Meta, *, push: bool) -> Meta:
        """One request that may push the gradient, and always brings the parameters."""
        answer, payload = self.request(meta, push=push)
        self._take(payload)
        return answer

    def put(self, share: int | None) -> None:
        """Push the gradient slice, of a share of the step, and wait for the receipt only."""
        self.request({"op": "put"} if share is None else {"op": "put", "share": share}, push=True)

    def fetch(self, pull: Pull) -> None:
        """Fetch the slice of the version that the primary shard told."""
        self.exchange({"op": "fetch", **pull_meta(pull)}, push=False)

    def share_statistics(self, carried_B: Tensor) -> None:
        """Put statistics over all regions to the region's own, once all have told theirs."""
        asked: Meta = {"op": "precise"}
        _, payload = self.client.request(asked, as_bytes(carried_B), timeout_s=self._timeout_s)
        carried_B.copy_(torch.frombuffer(bytearray(payload or b""), dtype=torch.uint8))

    def request(self, meta: Meta, *, push: bool) -> tuple[Meta, memoryview | None]:
        """One request, which may push the gradient; the answer and what it brings."""
        outgoing = None
        if push and self._shared_grad_S is not None:
            if self._shared_grad_S.data_ptr() != self._grad_S.data_ptr():
                self._shared_grad_S.copy_(self._grad_S)
        elif push:
            outgoing = as_bytes(self._grad_S)
        into = as_bytes(self._params_S) if self._shared_params_S is None else None
        return self.client.request(meta, outgoing, into=into, timeout_s=self._timeout_s)

    def _take(self, payload: memoryview | None) -> None:
        if self._shared_params_S is None:  # received in place
            as_tensor(payload, self._params_S.numel())
        elif self._shared_params_S.data_ptr() != self._params_S.data_ptr():
            self._params_S.copy_(self._shared_params_S)


class ShardLinks:
    """One worker's connections to all shards, which it uses at the same time.

    Attributes:
        primary: the one that decides.

    Args:
        links: primary first.
        rank: of the worker.
        together: uses them all; the owner of its threads ends them.
    """

    def __init__(self, links: Sequence[ShardLink], rank: int, together: Concurrently) -> None:
        self.primary = links[0]
        self._links = links
        self._rank = rank
        self._together = together

    def ask(self, meta: Meta, *, push: bool, share: int | None = None) -> Meta:
        """One request that may push the gradient, and always brings the parameters.

        Args:
            meta: what is asked.
            push: whether it pushes.
            share: whose part of the step; None: the worker's own.
        """
        if len(self._links) == 1:
            return self.primary.exchange(meta, push=push)
        if push:  # the primary shard may apply it at once, so all have it before
            self._together([partial(link.put, share) for link in self._links])
        told, _ = self.primary.request(meta, push=False)
        pull = read_pull(self._rank, told)
        self._together([partial(link.fetch, pull) for link in self._links])
        return told

    def pull(self, *, judged: bool) -> None:
        """Fetch the live parameters, or those that an evaluation is about."""
        self.ask({"op": "pull", "judged": judged}, push=False)


def dial_shards(
    addresses: Sequence[Address],
    key: bytes,
    hello: Meta,
    num_params: int,
    *,
    shared: bool = True,
    carried: int = 0,
    config: LanConfig | None = None,
) -> list[LanClient]:
    """Connect one worker to all shards, primary first.

    Args:
        addresses: of the shards.
        key: of the run.
        hello: who the worker is.
        num_params: P.
        shared: offers memory of both ends.
        carried: what goes to and from the primary shard before its slice, as so many fp32.
        config: of the connections; None for the defaults.
    """
    pieces = _pieces(num_params, len(addresses), carried)
    sizes = [shared_bytes(stop - start) if shared else 0 for start, stop in pieces]
    return [
        LanClient(address, key, hello, shared_bytes=size, config=config)
        for address, size in zip(addresses, sizes, strict=True)
    ]


def _pieces(num_params: int, shards: int, carried: int) -> list[tuple[int, int]]:
    """Where the shards' parts lie in a worker's buffers."""
    slices = [(start + carried, stop + carried) for start, stop in split_sizes(num_params, shards)]
    return [(0, slices[0][1]), *slices[1:]]


def links_over(
    clients: Sequence[LanClient], num_params: int, timeout_s: float, carried: int = 0
) -> tuple[Tensor, Tensor, list[ShardLink]]:
    """One worker's parameters and gradient, fp32 (P,) each, and its links to all shards.

    The vectors are the shared memory itself if there is one shard. What is carried, as so many
    fp32, stands before both.
    """
    shared, length = clients[0].shared if len(clients) == 1 else None, carried + num_params
    if shared is None:
        params_P, grad_P = torch.zeros(length), torch.zeros(length)
    else:
        params_P = shared_parameters(shared, length)
        grad_P = shared_gradient(shared, length)
    pieces = _pieces(num_params, len(clients), carried)
    links = [
        ShardLink(client, params_P[start:stop], grad_P[start:stop], timeout_s)
        for client, (start, stop) in zip(clients, pieces, strict=True)
    ]
    return params_P, grad_P, links


@dataclass(frozen=True, slots=True)
class EvalSetting:
    """How a worker evaluates.

    Attributes:
        rows: of a batch.
        note: takes evaluated parameters; None if nobody wants them.
        statistics: rows over which running statistics are made anew before the last evaluation.
    """

    rows: int = 256
    note: Note | None = None
    statistics: tuple[Span, ...] = ()


class StepTime(Protocol):
    """How long steps are padded to."""

    def __call__(self, span: Span, /) -> float:
        """Return the seconds that the step over some rows takes at least."""
        ...


class WorkerLoop:
    """A worker over sockets: pulls parameters and rows, pushes gradients, until it is sent home.

    On one host all buffers are shared memory: the model's parameters and gradients *are* the
    buffer, a push or pull only signals. Across hosts the same requests carry the bytes.

    Args:
        worker: computes.
        links: to the shards, primary first.
        train: the region's training stream.
        heldout: its held-out rows.
        rank: this worker's rank.
        evals: how it evaluates.
        step_s: how long the step over some rows is padded to; None for no padding.

    Attributes:
        doing: what it is doing, for whoever waits for it; any thread may read it.
    """

    def __init__(
        self,
        worker: Worker | LocalStepsWorker,
        links: Sequence[ShardLink],
        train: RegionReader,
        heldout: RegionReader,
        *,
        rank: int,
        evals: EvalSetting,
        step_s: StepTime | None,
    ) -> None:
        self._worker = worker
        self._together = Together(len(links), "shard-links")
        self._links = ShardLinks(links, rank, self._together)
        self._ahead = ReadAhead(train.read)
        self._heldout = heldout
        self._rank = rank
        self._evals = evals
        self._step_s = step_s
        self.doing = "starting"

    def run(self) -> int:
        """Work until sent home.

        Returns:
            The number of steps computed.

        Raises:
            TaskOutputError, DataError, TransportError: whatever stops this worker.
        """
        try:
            return self._run()
        finally:
            self._together.close()
            self._ahead.close()

    def _run(self) -> int:
        steps = 0
        answer = self._ask({"op": "join"}, push=False)
        while True:
            began_s = time.monotonic()
            self._worker.on_work(answer.version)
            if answer.evaluate:
                self._evaluate(answer)
                self._tell_changed(answer)
            if answer.span is None:
                return steps
            result = self._step(answer, answer.span)
            self._tell_changed(answer)
            if self._step_s is not None:
                least_s = self._step_s(answer.span) * max(1, len(answer.parts))
                time.sleep(max(0.0, began_s + least_s - time.monotonic()))
            elapsed_s = time.monotonic() - began_s
            found = (result.refused, result.grad_sq)
            report = StepReport(answer.span, result.loss, elapsed_s, *found)
            steps += 1
            answer = self._ask(report_meta(report), push=True, share=answer.share)

    def _step(self, answer: Assignment, span: Span) -> StepResult:
        self.doing = READING
        if not answer.parts:
            (columns,) = self._ahead.take([span])
            self.doing = "computing"
            return self._worker.step(columns, span)
        spans = [part.span for part in answer.parts]
        rows = dict(zip(spans, self._ahead.take(spans), strict=True))
        self.doing = "computing"
        return coded_step(self._worker, answer.parts, span, rows.__getitem__)

    def _tell_changed(self, answer: Assignment) -> None:
        """Tell of state that changes although nobody declared it; what one finds, all do."""
        for change in self._worker.take_changed():
            if self._rank == 0:
                about = {"version": answer.version, "how": change.how, "names": change.names}
                meta: Meta = {"op": "state_changed", **about}
                self._links.primary.client.request(meta, None, timeout_s=60.0)

    def _ask(self, meta: Meta, *, push: bool, share: int | None = None) -> Assignment:
        return read_answer(self._rank, self._links.ask(meta, push=push, share=share))

    def _evaluate(self, answer: Assignment) -> None:
        if answer.eval_params:
            self._links.pull(judged=True)
        worker, evals, model = self._worker, self._evals, None
        is_precise = answer.done and bool(evals.statistics) and worker.has_statistics
        before_B = worker.carried_B.clone()
        if is_precise:
            worker.make_precise([self._ahead.take([span])[0] for span in evals.statistics])
            self._links.primary.share_statistics(worker.carried_B)
        stats, rows = worker.evaluate_all(self._heldout.scan(evals.rows))
        if evals.note is not None:
            model = evals.note(answer.version, worker.params_P, worker.carried_B, answer.done)
        worker.carried_B.copy_(before_B)
        if answer.eval_params:
            self._links.pull(judged=False)
        meta, payload = stats_message(answer.version, stats, rows, final=answer.done, model=model)
        self._links.primary.client.request(meta, payload, timeout_s=60.0)


_LOOK_EVERY_S: Final = 0.1


@dataclass(slots=True)
class _Loaded:
    """What a worker has before it trains.

    Attributes:
        task: its task.
        module: its model; None once it trains, when the parameters lie in the buffers.
    """

    task: Task
    module: nn.Module | None = None


class WorkerActor(RunActor[_Loaded, WorkerLoop]):
    """One worker.

    It serves while its loop runs and is halted afterwards. A parameter server that replaces a lost
    one loads it again.

    Args:
        spec: the run.
        region: this region.
        rank: its number in the region.
        epoch: its incarnation.
    """

    def __init__(self, spec: RunSpec, region: str, rank: int, epoch: int) -> None:
        super().__init__(spec, region)
        self._rank = rank
        self._epoch = epoch
        self._receiver = SecretReceiver()
        self._outcome: Future[int] = Future()

    def introduce(self) -> Introduction:
        """Return the public half of this process's key."""
        return Introduction(self._receiver.public)

    def ready(self) -> set[str] | None:
        """Load the task and make its model; the first worker of a region also tries it on rows.

        Returns:
            Names of metrics that these rows have; None from other workers, and of rows that the
            driver wrote and tried.
        """
        experiment, task = self._spec.experiment, self._load_task()
        # Servers make theirs at the same time.
        self._load(_Loaded(task, checked_model(task, experiment.seed)))
        if self._rank > 0 or self._epoch > 1 or experiment.data.generate is not None:
            return None
        manifest = load_manifest(self._spec.manifest_address)
        _, heldout = open_readers(experiment, manifest, self._region, self._here(manifest))
        return metrics_there(experiment, task, heldout)

    def process_id(self) -> int:
        """Return the id of this actor's process, for operators and tests."""
        return os.getpid()

    def doing(self) -> str:
        """Return what the worker is doing, for a driver that waits for it."""
        return "starting" if self._is_starting else self._serving.doing

    def node_id(self) -> str:
        """Return the node that this process runs on."""
        return str(ray.get_runtime_context().get_node_id())

    def run(self, shards: list[Address], lan_key: bytes) -> int:
        """Work until the parameter server releases this worker.

        Args:
            shards: where the region's shards are, the primary one first.
            lan_key: key of the region's sockets, sealed for this process.

        Returns:
            Steps computed.
        """
        self._outcome = outcome = Future[int]()
        try:
            if self._state is ActorState.CREATED:  # it replaces a lost worker
                self._load(_Loaded(self._load_task()))
            steps = self._run(shards, lan_key)
        except Exception as error:  # of any class: a driver that comes later gets it, too
            outcome.set_exception(error)
            raise
        finally:
            self._halt()
        outcome.set_result(steps)
        return steps

    def outcome(self, driver: int) -> int:
        """Wait for what `run` returns or raises, for a driver that did not call it.

        Raises:
            LeaseLostError: a later driver has asked.
        """
        self._fence.check(driver)
        while not self._outcome.done():
            self._fence.wait(driver, _LOOK_EVERY_S)
        return self._outcome.result()

    def _run(self, shards: list[Address], lan_key: bytes) -> int:
        spec, experiment, loaded = self._spec, self._spec.experiment, self._loaded
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
            module, loaded.module = loaded.module, None
            worker = build_worker(experiment, self._region, loaded.task, params_P, grad_P, module)
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
            loop = WorkerLoop(
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
            self._serve(loop)
            return loop.run()
        finally:
            for client in clients:
                client.close()

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
