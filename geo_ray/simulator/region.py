"""One simulated region: parameter server, workers and real gradients.

Many gradients are computed at once where that is faster.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from geo_ray.base.errors import NonFiniteError
from geo_ray.base.random_state import generators_restored
from geo_ray.base.types import Span, StepReport
from geo_ray.data.manifest import Manifest
from geo_ray.data.tasks.base import Batch, Columns, Stats, Task
from geo_ray.experiment.experiment import Experiment
from geo_ray.experiment.regions import RegionConfig
from geo_ray.runs.build import ModelStart, build_server, build_shard, build_worker
from geo_ray.runs.data import open_readers
from geo_ray.runs.evaluation import Candidates
from geo_ray.simulator.clock import Scheduler
from geo_ray.training.effects import (
    ActiveWorkersChanged,
    Assignment,
    Effect,
    SendUpdate,
    Snapshot,
    StateTransfer,
    StepDone,
)
from geo_ray.training.membership import ShardState, region_state, shard_state
from geo_ray.training.messages import ReplyMessage, no_buffers
from geo_ray.training.parameters import split_sizes, square_norm
from geo_ray.training.state_guard import StateChange
from geo_ray.training.task_steps import in_memory
from geo_ray.training.worker import LocalStepsWorker, StepResult, Worker, coded_step
from geo_ray.training.worker_runs import Reported, WorkerRuns

MANY: Final = 16
"""Number of workers from which on gradients are computed in batches."""

_MOST_FLOATS: Final = 2**22  # parameters in one batch; beyond that nothing is gained
_LOGGER = logging.getLogger(__name__)


@dataclass(slots=True)
class PendingGradient:
    """A requested gradient.

    Attributes:
        worker: worker.
        params_P: parameters, fp32 (P,); read-only.
        columns: rows.
        span: position of the rows in the region's stream.
        grad_P: gradient, fp32 (P,), once computed.
        result: result, once computed.
    """

    worker: Worker
    params_P: Tensor
    columns: Columns
    span: Span
    grad_P: Tensor
    result: StepResult | None = None


class Gradients:
    """Computes works in batches.

    Args:
        task: model and loss.
        module: a replica of the model; its parameters' values are of no account.
        clip_norm: largest 2-norm of a gradient; None for no clipping.
    """

    def __init__(self, task: Task, module: nn.Module, clip_norm: float | None) -> None:
        self._names = [name for name, p in module.named_parameters() if p.requires_grad]
        self._shapes = [p.shape for p in module.parameters() if p.requires_grad]
        self._sizes = [shape.numel() for shape in self._shapes]
        self._clip_norm = clip_norm
        self._waiting: list[PendingGradient] = []
        self._most = _MOST_FLOATS // sum(self._sizes)
        self._run = vmap(grad_and_value(_stateless(task, module)))
        trained = (p for p in module.parameters() if p.requires_grad)
        self.works = self._most > 1 and all(p.dtype == torch.float32 for p in trained)
        self._is_checked = False

    def ask(
        self, worker: Worker, params_P: Tensor, columns: Columns, span: Span
    ) -> PendingGradient:
        """Have a gradient computed before `finish` returns it."""
        work = PendingGradient(worker, params_P, columns, span, worker.grad_P)
        self._waiting.append(work)
        return work

    def finish(
        self, work: PendingGradient, again: Callable[[], StepResult]
    ) -> tuple[StepResult, Tensor]:
        """Return the result of `work`, and its gradient, fp32 (P,).

        Args:
            work: result of `ask`.
            again: computes the gradient alone, for models that cannot be batched.
        """
        if work.result is None and self.works:
            self._compute()
        if work.result is None:
            work.worker.params_P.copy_(work.params_P)
            return again(), work.worker.grad_P
        return work.result, work.grad_P

    def _compute(self) -> None:
        if not self._is_checked:  # batched gradients are zero where torch has none
            self._is_checked, first = True, self._waiting[0]
            first.worker.params_P.copy_(first.params_P)
            if first.worker.step(first.columns, first.span).unused:
                self.works = False
                self._waiting.clear()
        while self._waiting:
            some, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
            try:
                self._batched(some)
            except Exception as error:
                # An error of the task itself is raised, by name, when the gradient is computed
                # alone.
                _LOGGER.info("gradients are computed one after another: %s", error)
                self.works = False
                self._waiting.clear()

    def _batched(self, works: Sequence[PendingGradient]) -> None:
        params_WP = torch.stack([work.params_P for work in works])
        parts = torch.split(params_WP, self._sizes, dim=1)
        params = {
            name: part.view(len(works), *shape)
            for name, part, shape in zip(self._names, parts, self._shapes, strict=True)
        }
        with generators_restored(works[0].worker.rng_devices()):
            batches = [work.worker.collate(work.columns, work.span) for work in works]
        grads, losses_W = self._run(params, _stacked(batches))
        grad_WP = torch.cat([grads[name].reshape(len(works), -1) for name in self._names], dim=1)
        norms = torch.linalg.vector_norm(grad_WP, dim=1).tolist()
        for i, (work, loss, norm) in enumerate(zip(works, losses_W.tolist(), norms, strict=True)):
            work.grad_P = grad_WP[i]
            if not math.isfinite(loss):
                work.result = StepResult(None, "loss_not_finite")
            elif not math.isfinite(norm):
                work.result = StepResult(None, "gradient_not_finite")
            else:
                if self._clip_norm is not None and norm > self._clip_norm:
                    work.grad_P.mul_(self._clip_norm / norm)
                work.result = StepResult(loss, grad_sq=square_norm(work.grad_P))


def _stateless(task: Task, module: nn.Module) -> Callable[[dict[str, Tensor], Batch], Tensor]:
    """The task's loss as a function of the parameters."""
    holder = _Loss(task, module)

    def loss(params: dict[str, Tensor], batch: Batch) -> Tensor:
        inside = {f"module.{name}": value for name, value in params.items()}
        return functional_call(holder, inside, (batch,))  # type: ignore[no-any-return]

    return loss


class _Loss(nn.Module):
    """So that `functional_call` reaches through `task.loss` to the model."""

    def __init__(self, task: Task, module: nn.Module) -> None:
        super().__init__()
        self.module = module.train()
        self._task = task

    def forward(self, batch: Batch) -> Tensor:
        return self._task.loss(self.module, batch)


def _stacked(batches: Sequence[Batch]) -> Any:
    """Return one batch with a leading dimension W; all are alike in structure and shapes."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.stack(list(batches))
    if isinstance(first, dict):
        return {key: _stacked([batch[key] for batch in batches]) for key in first}
    if isinstance(first, tuple):
        columns = [_stacked(column) for column in zip(*batches, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    raise TypeError(f"a batch of {type(first).__name__} cannot be stacked")


_Values = tuple[Tensor, Tensor]  # parameters, fp32 (P,), and model buffers, uint8 (B,)
_Found = Callable[[], tuple[StepResult, Tensor]]  # gives a step's result and gradient, fp32 (P,)


@dataclass(frozen=True, slots=True)
class _Sent:
    """Values that go to a worker with its assignment.

    Attributes:
        live: present values.
        judged: values to evaluate.
        moments: state of the optimizer, for a new worker that has one.
        is_old: whether the worker has newer values than ``live``.
    """

    live: _Values
    judged: _Values
    moments: Mapping[str, Tensor] | None = None
    is_old: bool = False


class RegionHost(Protocol):
    """The simulated run, as its regions report to it."""

    def send(self, name: str, send: SendUpdate) -> None:
        """Send a region's update to the averager."""

    def stepped(self, name: str, done: StepDone, began_s: float, ago_s: float) -> None:
        """A step was applied, whose computation began at ``began_s``, and ended so long ago."""

    def evaluated(
        self, name: str, step: int, totals: Stats, rows: int, last: bool, model: str | None
    ) -> None:
        """Record a worker's evaluation.

        Args:
            name: region.
            step: step of the evaluated parameters.
            totals: sums of its statistics.
            rows: evaluated rows.
            last: whether it is the last evaluation.
            model: digest of the evaluated parameters, if known.
        """

    def saved(self, name: str, primary: Snapshot, shards: list[ShardState]) -> None:
        """Add a region's parts to a checkpoint: the server's and each shard's."""

    def on_state_transfer(
        self, donor: str, on_state_transfer: Snapshot, shards: list[ShardState]
    ) -> None:
        """Send the copy of a donor's state to the joining regions."""

    def precise(self, name: str, buffers_B: Tensor, go_on: Callable[[Tensor], None]) -> None:
        """Collect model buffers with statistics of the final parameters over a region's rows.

        ``go_on`` is called with the statistics over all regions' rows, once they are complete.
        """

    def changed(self, name: str, step: int, change: StateChange) -> None:
        """Record an undeclared state change found by a worker."""

    def active_workers(self, name: str, changed: ActiveWorkersChanged) -> None:
        """Other workers than before take part."""


@dataclass(frozen=True, slots=True)
class SimContext:
    """Objects shared by all regions of a simulation.

    Attributes:
        scheduler: virtual time.
        lan_s: seconds of one message between a worker and its parameter server.
        gradients: computes batched gradients; None for one at a time.
        candidates: receives evaluated parameters; None if they are not needed.
    """

    scheduler: Scheduler
    lan_s: float
    gradients: Gradients | None = None
    candidates: Candidates | None = None


class SimRegion:
    """Server and workers of one region on the virtual clock.

    Attributes:
        is_dead: whether all its processes have ended.

    Args:
        experiment: experiment.
        region: region.
        task: task.
        manifest: data.
        start: parameters and model buffers at the start.
        around: objects shared by all regions.
        host: receives the effects that leave the region.
    """

    def __init__(
        self,
        experiment: Experiment,
        region: RegionConfig,
        task: Task,
        manifest: Manifest,
        start: ModelStart,
        around: SimContext,
        host: RegionHost,
    ) -> None:
        self.name = region.name
        params_P = start.params_P
        self._shards = [build_shard(experiment, region, i, start) for i in range(region.ps_shards)]
        self._slices = split_sizes(params_P.numel(), region.ps_shards)
        self.server = build_server(experiment, region, self._shards, params_P.numel(), start=start)
        self._train, self._heldout = open_readers(experiment, manifest, region.name)
        self._build = partial(build_worker, experiment, region.name, task)
        self._start = start
        self._workers = [self._new_worker(rank) for rank in range(region.workers)]
        self._lives = [1] * region.workers  # attempt of each present rank
        # Where workers have optimizers: those that have yet to get their state, those in a step,
        # and what is done once the server has their states.
        self._new = set(range(region.workers))
        self._stepping: set[int] = set()
        self._deferred: list[Callable[[], list[Effect]]] = []
        self._is_saving = False  # a checkpoint is deferred
        self._asked: set[int] = set()  # workers that are sending their parameters for a mean
        self._late_s: dict[int, float] = {}  # by which answers wait for the state of an optimizer
        self._runs = WorkerRuns(self.server)
        self._eval_rows = experiment.train.eval_batch_size
        self._scheduler = around.scheduler
        self._host = host
        self._lan_s = around.lan_s
        self._gradients = around.gradients
        self._candidates = around.candidates
        self._began_s = 0.0
        self.is_dead = False
        self._experiment = experiment
        self._measured_s = 0.0
        if experiment.step_s(region.name) is None:
            rows = experiment.data.batch_size * max(1, experiment.worker_steps)
            self._measured_s = self._measure_step_s(rows)

    @property
    def params_P(self) -> Tensor:
        """A copy of the region's model, fp32 (P,)."""
        return torch.cat([shard.params_S for shard in self._shards])

    @property
    def buffers_B(self) -> Tensor | None:
        """Final model buffers, uint8 (B,); None without any."""
        model_buffers = self.server.model_buffers
        return None if model_buffers is None else model_buffers.final_B.clone()

    def start(self) -> None:
        """Let all workers join now; a restored region repeats its open request."""
        self._execute(self.server.resume())
        for rank in range(len(self._workers)):
            self._execute(self.server.join(rank))

    def restore(self, saved: Snapshot, shards: list[ShardState]) -> None:
        """Restore saved state, before the start."""
        self.server.restore(saved.control, saved.tensors)
        for shard, state in zip(self._shards, shards, strict=True):
            shard.restore(*state)

    def begin_as(
        self, on_state_transfer: Snapshot, shards: list[ShardState], rows: dict[str, object] | None
    ) -> None:
        """Restore a donor's state, before the start (see `membership.region_state`)."""
        self.server.restore(
            *region_state(on_state_transfer.control, on_state_transfer.tensors, rows)
        )
        for shard, state in zip(self._shards, shards, strict=True):
            shard.restore(*shard_state(state, self._experiment.strategy.traits))

    def lose_worker(self, rank: int) -> None:
        """End a worker's process; its present work is lost."""
        self._end_life(rank)
        if not self.is_dead:
            self._end_run(self._runs.lose(rank, partial(self.server.leave, rank)))

    def _end_life(self, rank: int) -> None:
        self._lives[rank] += 1
        self._stepping.discard(rank)
        self._asked.discard(rank)
        self._late_s.pop(rank, None)

    def drain_worker(self, rank: int) -> None:
        """Give a worker a termination notice: it leaves between two steps."""
        if not self.is_dead:
            self._request(partial(self.server.drain, rank))

    def replace_worker(self, rank: int) -> int:
        """A new worker of this rank is here, the one before gone, known or not; its incarnation."""
        self._end_life(rank)
        self._workers[rank] = self._new_worker(rank)
        self._new.add(rank)
        if not self.is_dead:
            self._end_run(self._runs.lose(rank, partial(self.server.join, rank)))
        return self._lives[rank]

    def stop(self) -> None:
        """Finish after the step in progress, or after the steps that are reported with it."""
        self._request(self._stop)

    def _stop(self) -> list[Effect]:
        self.server.stop()
        return []

    def _request(self, event: Callable[[], list[Effect]]) -> None:
        self._execute_with_states(self._runs.handle(event))

    @property
    def lacks_workers(self) -> bool:
        """Whether the region needs a worker to continue, or for the evaluation after the end."""
        work = self.server.work
        if self.server.phase == "done":
            return work.evals.last == "owed"
        return not work.workers.may_work

    def _new_worker(self, rank: int) -> Worker | LocalStepsWorker:
        buffer = self._start.buffer()
        return self._build(buffer, torch.zeros_like(buffer), rank=rank)

    def die(self) -> None:
        """End all processes of the region at once."""
        self.is_dead = True

    def check_progress(self) -> None:
        """Refuse to continue without usable gradients.

        Raises:
            NonFiniteError: too many consecutive steps were refused.
        """
        if self.server.exhausted:
            raise self._exhausted()

    def _exhausted(self) -> NonFiniteError:
        most = self._experiment.train.max_refused_steps
        return NonFiniteError(
            f"region '{self.name}' refused {most} steps in a row: no finite loss and gradient",
            fix="Simulate with a lower `optimizer.lr`, or clip gradients: "
            "`--set train.clip_norm=1.0`. If the first steps are refused, look for NaN in the "
            "rows.",
        )

    def on_reply(self, reply: ReplyMessage, took_s: float) -> None:
        """An answer of the averager has arrived, ``took_s`` after the request."""
        if self.is_dead:
            return
        if reply.checkpoint is not None:
            self.snapshot(reply.checkpoint, halt=reply.halt)
        merge = partial(self.server.on_reply, self.server.wire.decode(reply), took_s)
        is_computing = self._keeps_state and self.server.work.is_computing
        if self._deferred or self._is_behind or is_computing:
            self._deferred.append(merge)
            self.server.average_soon = self.server.plan.averages
        else:
            self._execute(merge())

    def snapshot(self, checkpoint: int, *, halt: bool = False) -> None:
        """A checkpoint has begun."""
        if self.is_dead or self.server.has_copied(checkpoint):
            return
        server, averages = self.server, self.server.plan.averages
        waits = bool(self._deferred) or self._is_behind or (averages and server.work.is_computing)
        self._deferred.append(partial(server.snapshot, checkpoint, halt=halt))
        self._is_saving = True
        server.begin_saving()
        if waits:
            server.average_soon |= averages and (halt or server.link_busy)
        else:
            self._execute_with_states([])

    @property
    def _keeps_state(self) -> bool:
        """Whether the workers keep parameters and optimizer."""
        return self.server.plan.state_every > 0

    @property
    def _has_optimizers(self) -> bool:
        """Whether the workers have optimizers."""
        return self._keeps_state or self.server.plan.worker_steps > 0

    @property
    def _is_behind(self) -> bool:
        """Whether the workers have newer parameters than the server."""
        server = self.server
        pushed = server.plan.averages and server.work.pushes
        return bool(server.ahead or pushed or self._runs.in_progress)

    def _execute(self, effects: Sequence[Effect], ago_s: float = 0.0) -> None:
        for effect in effects:
            if isinstance(effect, Assignment):
                self._assign(effect)
            elif isinstance(effect, SendUpdate):
                self._host.send(self.name, effect)
            elif isinstance(effect, StepDone):
                self._host.stepped(self.name, effect, self._began_s, ago_s)
            elif isinstance(effect, StateTransfer):
                parts = [shard.take_snapshot(effect.snapshot.id) for shard in self._shards]
                self._host.on_state_transfer(self.name, effect.snapshot, parts)
            elif isinstance(effect, ActiveWorkersChanged):
                self._host.active_workers(self.name, effect)
            else:
                parts = [shard.take_snapshot(effect.id) for shard in self._shards]
                self._host.saved(self.name, effect, parts)

    def _assign(self, answer: Assignment) -> None:
        is_last = answer.span is None and self.server.phase != "halted"
        if is_last and answer.worker in self.server.unsaved:
            self._save_optimizer(answer.worker)
        model_buffers = self.server.model_buffers
        buffers_B = no_buffers() if model_buffers is None else model_buffers.present_B.clone()
        # Present values, since the region may change before the message arrives.
        live = (self.params_P, buffers_B)
        judged = live
        if answer.eval_params:
            agreed_B = buffers_B if model_buffers is None else model_buffers.agreed_B.clone()
            judged = torch.cat([shard.eval_params_S for shard in self._shards]), agreed_B
        sent = _Sent(live, judged, is_old=bool(self.server.ahead))
        has_joined = self._has_optimizers and answer.worker in self._new
        if has_joined:
            self._new.discard(answer.worker)
            parts = [shard.moments(answer.worker) for shard in self._shards]
            moments = {}
            for name in parts[0]:
                values = [in_memory(part[name]) for part in parts]
                moments[name] = torch.cat(values) if values[0].dim() else values[0].clone()
            sent = _Sent(live, judged, moments)
        if self._keeps_state:
            answer = self._runs.begin(answer)
        lan_s = self._lan_s + self._late_s.pop(answer.worker, 0.0)
        life = self._lives[answer.worker]
        self._scheduler.after(lan_s, partial(self._work, answer, life, sent))

    def _is_gone(self, rank: int, life: int) -> bool:
        return self.is_dead or self._lives[rank] != life

    def _work(self, answer: Assignment, life: int, sent: _Sent) -> None:
        if self._is_gone(answer.worker, life):
            return
        worker = self._workers[answer.worker]
        worker.on_work(answer.version)
        live, judged = sent.live, sent.judged
        if self._keeps_state and isinstance(worker, Worker):
            live = self._begun_from(worker, answer, sent)
            judged = judged if answer.eval_params else live
        elif sent.moments is not None and worker.optimizer is not None:
            worker.optimizer.restore(dict(sent.moments))
        if answer.evaluate:
            _give(worker, judged)
            self._evaluate(worker, answer)
        span = answer.span
        if span is None:
            return
        if answer.partition is None and answer.worker == min(self.server.work.workers.joined):
            self._began_s = self._scheduler.now_s
        self._stepping.add(answer.worker)
        if self._keeps_state:
            self._make_run(answer, life, live)
            return
        push_s = self._push_s(answer.worker, span)
        push_s *= max(1, len(answer.parts))
        result = self._begun(answer, span, live)
        self._scheduler.after(
            push_s + self._lan_s, partial(self._push, answer.worker, life, span, push_s, result)
        )

    def _make_run(self, answer: Assignment, life: int, live: _Values) -> None:
        """Make the steps of a run now; the worker reports them when they are over."""
        rank, reports, took_s = answer.worker, [], 0.0
        _give(self._workers[rank], live)
        for _, span in answer.run():
            push_s = self._push_s(rank, span)
            result = self._workers[rank].step(self._read(span), span)
            reports.append(result.report(span, push_s))
            took_s += push_s
            if answer.ends_run(span, result.refused, took_s):
                break
        took_s += sum(self._push_s(rank, each) for each in answer.repeats)
        self._scheduler.after(took_s + self._lan_s, partial(self._report, rank, life, reports))

    def _begun_from(self, worker: Worker, answer: Assignment, sent: _Sent) -> _Values:
        """Bring a worker that keeps its state to the state before its step; return a copy."""
        if not sent.is_old:
            _give(worker, sent.live)
        if sent.moments is not None and worker.optimizer is not None:
            worker.optimizer.restore(dict(sent.moments))
        for span in answer.repeats:
            worker.step(self._read(span), span)
        return worker.kept(), worker.buffers_B.clone()

    def _push_s(self, worker: int, span: Span) -> float:
        padded_s = self._experiment.push_s(self.name, worker, span.start, span.count)
        return self._measured_s if padded_s is None else padded_s

    def _begun(self, answer: Assignment, span: Span, live: _Values) -> _Found:
        """Begin a step; returns a function that gives its result and gradient when they are due."""
        worker, gradients = self._workers[answer.worker], self._gradients
        rows = self._read(span)
        is_plain = isinstance(worker, Worker) and worker.optimizer is None
        if gradients is not None and gradients.works and isinstance(worker, Worker) and is_plain:
            work = gradients.ask(worker, live[0], rows, span)
            return partial(gradients.finish, work, partial(worker.step, rows, span))
        _give(worker, live)
        if answer.parts:
            result = coded_step(worker, answer.parts, span, self._read)
        else:
            result = worker.step(rows, span)
        return lambda: (result, worker.grad_P)

    def _read(self, span: Span) -> Columns:
        return self._train.read(span.start, span.count)

    def _report_changed(self, worker: Worker | LocalStepsWorker) -> None:
        for change in worker.take_changed():
            if worker is self._workers[0]:
                self._host.changed(self.name, self.server.version, change)

    def _push(self, rank: int, life: int, span: Span, push_s: float, found: _Found) -> None:
        if self._is_gone(rank, life):
            return
        self._stepping.discard(rank)
        result, grad_P = found()
        partition = self.server.partition_of(rank)
        self._report_changed(self._workers[rank])
        if self.server.model_buffers is not None:
            self.server.model_buffers.put(partition, self._workers[rank].left_B)
        for shard, (start, stop) in zip(self._shards, self._slices, strict=True):
            shard.put(partition, grad_P[start:stop])
        self._execute_with_states(self.server.push(rank, result.report(span, push_s)))

    def _report(self, rank: int, life: int, reports: Sequence[StepReport]) -> None:
        """Handle the steps of a worker that keeps its state."""
        if self._is_gone(rank, life):
            return
        self._stepping.discard(rank)
        self._report_changed(self._workers[rank])
        self._end_run(self._runs.report(rank, reports))

    def _end_run(self, found: Reported) -> None:
        for earlier in found.earlier:
            self._execute(earlier.effects, earlier.ago_s)
            if earlier.exhausted:
                raise self._exhausted()
            self._began_s = self._scheduler.now_s - earlier.ago_s
        self._execute_with_states([*found.effects])
        for rank, report in found.last.items():
            keeps_state = self._keeps_state and not self.server.plan.averages
            if keeps_state and (self._deferred or self.server.needs_state(rank, report)):
                push = partial(self._push_with_state, rank, self._lives[rank], report)
                self._scheduler.after(2 * self._lan_s, push)
            else:
                self._execute_with_states(self.server.push(rank, report))

    def _push_with_state(self, rank: int, life: int, report: StepReport) -> None:
        if self._is_gone(rank, life):
            return
        self._put(rank)
        self._put_optimizer(rank)
        effects = self.server.push(rank, report, has_state=True)
        self._execute(effects + self._made_up())

    def _put(self, rank: int) -> None:
        """Give the parameters of a worker that keeps its state to the shards."""
        worker = self._workers[rank]
        if isinstance(worker, Worker):
            worker.store()
        if self.server.model_buffers is not None:
            self.server.model_buffers.put(rank, worker.left_B)
        for shard, (start, stop) in zip(self._shards, self._slices, strict=True):
            shard.put(rank, worker.grad_P[start:stop])

    def _put_optimizer(self, rank: int) -> None:
        optimizer = self._workers[rank].optimizer
        for name, value in {} if optimizer is None else optimizer.export().items():
            is_cut = value.dim() and len(self._shards) > 1
            for shard, (start, stop) in zip(self._shards, self._slices, strict=True):
                shard.put_moment(rank, name, value[start:stop] if is_cut else value)

    def _execute_with_states(self, effects: list[Effect]) -> None:
        """Ask workers for what the server lacks; then execute all effects."""
        for rank in range(len(self._workers)):
            if rank not in self._asked and self.server.lacks_state(rank):
                self._asked.add(rank)
                bring = partial(self._bring_state, rank, self._lives[rank])
                self._scheduler.after(2 * self._lan_s, bring)
        if self._deferred and not self._is_behind:
            for rank in range(len(self._workers)) if self._is_saving else ():
                if rank not in self._stepping and self.server.ask_optimizer(rank):
                    self._save_optimizer(rank)
            if not (self._is_saving and self.server.lacking):
                self.server.average_soon = False
                effects = effects + self._made_up()
        self._execute(effects)

    def _bring_state(self, rank: int, life: int) -> None:
        """The parameters of a worker have arrived that waits for a mean."""
        if self._is_gone(rank, life):
            return
        self._asked.discard(rank)
        if self.server.lacks_state(rank):
            self._put(rank)
            self._execute_with_states(self.server.on_state(rank))

    def _save_optimizer(self, rank: int) -> None:
        if self._workers[rank].optimizer is not None:
            self._put_optimizer(rank)
            self._late_s[rank] = self._late_s.get(rank, 0.0) + 2 * self._lan_s
            self.server.on_optimizer(rank)

    def _made_up(self) -> list[Effect]:
        """Do what was deferred."""
        deferred, self._deferred = self._deferred, []
        self._is_saving = False
        return [effect for event in deferred for effect in event()]

    def _evaluate(self, worker: Worker | LocalStepsWorker, answer: Assignment) -> None:
        spans = self._experiment.statistics_spans if worker.has_statistics else ()
        if not (spans and answer.done):
            self._judge(worker, answer)
            return
        worker.make_precise([self._read(span) for span in spans])

        def go_on(buffers_B: Tensor) -> None:
            worker.buffers_B.copy_(buffers_B)
            if self.server.model_buffers is not None:
                self.server.model_buffers.precise_B = buffers_B
            self._judge(worker, answer)

        self._host.precise(self.name, worker.buffers_B.clone(), go_on)

    def _judge(self, worker: Worker | LocalStepsWorker, answer: Assignment) -> None:
        totals, rows = worker.evaluate_all(self._heldout.scan(self._eval_rows))
        self._report_changed(worker)
        step, last, model = answer.version, answer.done, None
        if self._candidates is not None:
            buffers_B = worker.buffers_B
            model = self._candidates.note(self.name, step, worker.params_P, buffers_B, last)
        self.server.work.evals.reported(final=last)
        self._host.evaluated(self.name, step, totals, rows, last, model)

    def _measure_step_s(self, batch_size: int) -> float:
        """Measure a step on this machine (median of five), unless its duration is emulated."""
        times_s = []
        for _ in range(5):
            began_s = time.perf_counter()
            self._workers[0].step(self._train.read(0, batch_size), Span(0, batch_size))
            times_s.append(time.perf_counter() - began_s)
        return sorted(times_s)[2]


def _give(worker: Worker | LocalStepsWorker, values: _Values) -> None:
    worker.params_P.copy_(values[0])
    worker.buffers_B.copy_(values[1])
    if isinstance(worker, Worker) and worker.optimizer is not None:
        worker.load()
