"""Builds the state machines of a run from its configuration, for runtime and simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from geo_ray.base.errors import ConfigError, TaskStateError
from geo_ray.base.memory import ReusedMemory
from geo_ray.base.threads import in_turn
from geo_ray.data.tasks.base import Task
from geo_ray.data.tasks.checked_calls import checked_model, outlined_model
from geo_ray.data.tasks.groups import GroupRun, group_runs, parameter_runs
from geo_ray.data.tasks.model_buffers import state_of
from geo_ray.experiment.experiment import Experiment
from geo_ray.experiment.regions import RegionConfig
from geo_ray.runs.evaluation import EvalCollector
from geo_ray.strategies.state import AveragerState
from geo_ray.training.assignment import ServerPlan
from geo_ray.training.averager import Averager
from geo_ray.training.config import why_fixed, why_no_joins
from geo_ray.training.messages import no_buffers
from geo_ray.training.model_buffers import AveragerBuffers, RegionBuffers
from geo_ray.training.optimizers import OneOptimizer, lasting
from geo_ray.training.parameters import (
    BufferLayout,
    check_module,
    count_parameters,
    parameter_shapes,
    read_parameters,
    split_sizes,
)
from geo_ray.training.payload_encoding import AveragerWire, WirePlan
from geo_ray.training.server import Server
from geo_ray.training.shard import Concurrently, Shard, ShardPort
from geo_ray.training.state_guard import constants_of
from geo_ray.training.stragglers import GradientCoding
from geo_ray.training.worker import LocalStepsWorker, OwnSteps, Worker

_INNER_RATE: Final = "optimizer.lr"
_LEAST_REGIONS: Final = 2  # default minimum at the start of a run


@dataclass(frozen=True, slots=True)
class ModelStart:
    """The initial state of every region.

    Attributes:
        params_P: parameters, fp32 (P,).
        layout: layout of the model buffers.
        buffers_B: model buffers, uint8 (B,).
        constants: digests of everything that is not trained.
        groups: parameter groups with separate rates or decays; empty if there are none.
        parameters: all parameters with their shapes.
    """

    params_P: Tensor
    layout: BufferLayout = field(default_factory=partial(BufferLayout, ()))
    buffers_B: Tensor = field(default_factory=no_buffers)
    constants: Mapping[str, str] = field(default_factory=dict)
    groups: tuple[GroupRun, ...] = ()
    parameters: tuple[GroupRun, ...] = ()

    def is_flat(self, optimizer: OneOptimizer) -> bool:
        """Tell whether an optimizer may step all parameters as one vector."""
        return not (self.groups or optimizer.needs_whole_parameters)

    def without_parameters(self) -> Self:
        """Return the outline, without the parameters."""
        return replace(self, params_P=torch.empty(0))

    def buffer(self) -> Tensor:
        """Return a worker's buffer: a copy of the model buffers, then of the parameters, fp32."""
        return torch.cat([self.buffers_B.view(torch.float32), self.params_P])


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """The initial state of every region without its values.

    Attributes:
        num_params: P.
        layout: layout of the model buffers.
        constants: digests of everything that is not trained.
        groups: parameter groups.
        num_frozen: values of frozen parameters.
    """

    num_params: int
    layout: BufferLayout
    constants: Mapping[str, str]
    groups: tuple[GroupRun, ...]
    num_frozen: int

    @classmethod
    def of(cls, task: Task, module: nn.Module) -> Self:
        """Return the outline of a task's module."""
        check_module(module)
        layout, groups = BufferLayout.of(task, module), group_runs(task, module)
        frozen = sum(each.numel() for each in module.parameters() if not each.requires_grad)
        return cls(count_parameters(module), layout, constants_of(module), groups, frozen)


def model_outline(task: Task, seed: int) -> ModelOutline:
    """Return the initial state of every region, without its parameters.

    A built-in task builds its model only if the model has frozen parameters or buffers, for their
    digests.

    Raises:
        TaskOutputError: if the model cannot be trained as one flat fp32 vector.
        TaskStateError: if the task's `model_buffers` or `groups` do not fit its model.
    """
    module = outlined_model(task, seed)
    if any(tensor.is_meta for tensor in state_of(module).values()):
        module = checked_model(task, seed)
    return ModelOutline.of(task, module)


def model_start(task: Task, seed: int) -> ModelStart:
    """Return the initial state of every region.

    Raises:
        TaskOutputError: if the model cannot be trained as one flat fp32 vector.
        TaskStateError: if the task's `model_buffers` or `groups` do not fit its model.
    """
    module = checked_model(task, seed)
    check_module(module)
    layout = BufferLayout.of(task, module)
    constants = constants_of(module)
    return ModelStart(
        read_parameters(module),
        layout,
        layout.read(module),
        constants,
        group_runs(task, module),
        parameter_runs(task, module),
    )


def initial_parameters(task: Task, seed: int) -> Tensor:
    """Return the initial parameters of every region, fp32 (P,).

    Raises:
        TaskOutputError: if the model cannot be trained as one flat fp32 vector.
    """
    module = checked_model(task, seed)
    check_module(module)
    return read_parameters(module)


def parameter_count(task: Task, seed: int) -> int:
    """Return P, the number of trained parameters; see `outlined_model`.

    Raises:
        TaskOutputError: if the model cannot be trained as one flat fp32 vector.
    """
    module = outlined_model(task, seed)
    check_module(module)
    return count_parameters(module)


def _server_plan(experiment: Experiment, region: RegionConfig, attempt: int) -> ServerPlan:
    """Return the plan of the parameter server of ``region``."""
    train, traits = experiment.train, experiment.strategy.traits
    return ServerPlan(
        region=region.name,
        num_workers=region.workers,
        batch_size=experiment.data.batch_size,
        batch_sizes=region.batch_sizes,
        steps=None if experiment.counts_total_rows else train.steps,
        mode=train.mode,
        eval_every=train.eval_every,
        eval_rows=experiment.eval_rows,
        max_refused=train.max_refused_steps,
        attempt=attempt,
        alone=len(experiment.regions) == 1,
        worker_steps=experiment.worker_steps,
        stragglers=train.stragglers,
        elastic=experiment.elastic(region),
        # The server of a single region has no other parameters than the worker sent last.
        evaluates_outer=train.evaluate == "outer"
        and traits.region.eval_params is not None
        and not (len(experiment.regions) == 1 and experiment.state_every(region)),
        goal=_goal(experiment),
        noise_every=train.noise_every,
        last_round_is_final=traits.exchange.last != "always" and wire_plan(experiment).owes,
        has_final_update=traits.exchange.last == "always",
        never_waits=traits.exchange.blocking == "never",
        round_steps=traits.round_steps,
        clip_mean_norm=None if experiment.state_every(region) else train.clip_mean_norm,
        state_every=experiment.state_every(region),
        # Losses of codecs or clipping would be missing in the mean, and look like noise.
        reports_norms=train.mode == "sync"
        and train.clip_mean_norm is None
        and traits.averager.mean_gradient
        and (experiment.codec.up is None or not experiment.codec.up.traits.lossy),
    )


def build_shard(
    experiment: Experiment,
    region: RegionConfig,
    index: int,
    start: ModelStart,
    *,
    given: bool = False,
) -> Shard:
    """Return shard ``index`` of ``region``, over its slice of the model; see `Shard.from_slice`."""
    train, params_P = experiment.train, start.params_P
    steps = train.steps * (region.workers if train.mode == "async" else 1)
    has_own = experiment.state_every(region) or experiment.worker_steps
    return Shard.from_slice(
        params_P,
        split_sizes(params_P.numel(), region.ps_shards)[index],
        lasting(experiment.optimizer, steps),
        experiment.strategy,
        alone=len(experiment.regions) == 1,
        parameters=start.parameters,
        flat=start.is_flat(experiment.optimizer),
        given=given,
        optimizers=region.workers if has_own else 0,
        pushes_changes=experiment.worker_steps > 0,
    )


def build_server(
    experiment: Experiment,
    region: RegionConfig,
    shards: Sequence[ShardPort],
    num_params: int,
    attempt: int = 1,
    in_parallel: Concurrently = in_turn,
    start: ModelStart | None = None,
) -> Server:
    """Return the parameter server of ``region`` over its local or remote shards in order.

    Args:
        experiment: the run.
        region: name of the region.
        shards: in order.
        num_params: P.
        attempt: incarnation of this server.
        in_parallel: runs calls of several shards.
        start: parameters and model buffers at the start.
    """
    plan = _server_plan(experiment, region, attempt)
    model_buffers = None
    if start is not None and start.layout.entries:
        model_buffers = RegionBuffers(start.layout, start.buffers_B, region.workers, plan.alone)
    return Server.over(shards, num_params, plan, wire_plan(experiment), in_parallel, model_buffers)


def build_worker(
    experiment: Experiment,
    region: str,
    task: Task,
    params_P: Tensor,
    grad_P: Tensor,
    module: nn.Module | None = None,
    rank: int = 0,
) -> Worker | LocalStepsWorker:
    """Return a worker of ``region`` over its buffers, fp32 each: model buffers, then (P,).

    Its replica is ``module``, newly built by the task; None: built here.
    """
    task = placed(task, region, rank)
    place = next(r for r in experiment.regions if r.name == region)
    steps = experiment.worker_steps
    optimizer = lasting(experiment.optimizer, experiment.train.steps * max(1, steps))
    module = checked_model(task, experiment.seed) if module is None else module
    flat = not (optimizer.needs_whole_parameters or group_runs(task, module))
    runs = parameter_runs(task, module)
    own = None
    if experiment.state_every(place):
        own = OwnSteps(optimizer, runs, flat, experiment.train.clip_mean_norm)
    worker = Worker(
        task,
        params_P,
        grad_P,
        region=region,
        seed=experiment.seed,
        device=experiment.device,
        clip_norm=experiment.train.clip_norm,
        accumulate=experiment.train.accumulate,
        module=module,
        own=own,
    )
    if not steps:
        return worker
    is_async = experiment.train.mode == "async"
    rows = place.rows_per_step(experiment.data.batch_size) if is_async else None
    return LocalStepsWorker(worker, optimizer, steps, rows, runs, flat=flat)


def placed(task: Task, region: str, rank: int) -> Task:
    """Return a shallow copy of a task with the attributes ``region`` and ``rank``.

    In a simulation all workers are in one process, and each has its own copy.
    """
    own: Any = copy(task)
    with suppress(AttributeError):  # a class with slots has no room for them
        object.__setattr__(own, "region", region)
        object.__setattr__(own, "rank", rank)
    found: Task = own
    return found


def build_averager(
    experiment: Experiment,
    num_params: int,
    data_rows: Mapping[str, float],
    layout: BufferLayout | None = None,
) -> Averager:
    """Return the averager over the present regions.

    Args:
        experiment: the run.
        num_params: P.
        data_rows: rows by region (`job.data.data_rows`).
        layout: layout of the model buffers.
    """
    members = tuple(sorted(experiment.present_names))
    wire = AveragerWire(wire_plan(experiment))
    enough = experiment.rows if experiment.counts_total_rows else None
    reused, goal = ReusedMemory(), _goal(experiment)  # answers reuse the memory of previous ones
    state = AveragerState(members, allocate=reused.tensor, data_rows=dict(data_rows))
    model_buffers = AveragerBuffers() if layout is None else AveragerBuffers(layout)
    return Averager(
        experiment.strategy,
        num_params,
        state,
        wire=wire,
        enough=enough,
        goal=goal,
        model_buffers=model_buffers,
    )


def check_absent(experiment: Experiment) -> None:
    """Reject absent regions if none can join later, or too many of them.

    Fewer than two regions train only if `members.min` allows it, because nothing is exchanged.

    Raises:
        ConfigError: naming the key.
    """
    members, names = experiment.members, experiment.region_names
    if not members.absent:
        return
    shards = {region.name: region.ps_shards for region in experiment.regions}
    overlay, has_transfers = experiment.overlay.kind, experiment.transfers is not None
    why = why_fixed(overlay, experiment.codec, has_transfers=has_transfers)
    why = why or why_no_joins(shards)
    least, present = members.min or _LEAST_REGIONS, len(experiment.present)
    if why is None and present < least:
        why = f"{present} of {', '.join(names)} would be present: leave at least {least}"
        why += "" if members.min is not None else ", or set members.min"
    if why is not None:
        raise ConfigError(f"members.absent: {why}", fix="Change the named key.")


def check_start(experiment: Experiment, start: ModelStart | ModelOutline) -> None:
    """Reject options that a model does not support.

    Model buffers cannot be exchanged where updates are summed in transit or rows are coded.
    Strategies that train in the averager do not support parameter groups.

    Raises:
        TaskStateError: naming the key.
    """
    layout, traits = start.layout, experiment.strategy.traits
    if start.groups and len(experiment.regions) > 1 and traits.region.rate_key != _INNER_RATE:
        raise TaskStateError(
            f"strategy.kind: '{experiment.strategy.kind}' trains with {traits.region.rate_key} in "
            "the averager, which does not support parameter groups, but the task has some",
            fix="Take another strategy, or let `groups` return none.",
        )
    if not layout.entries:
        return
    coded = isinstance(experiment.train.stragglers, GradientCoding)
    many = len(experiment.regions) > 1 and layout.exchanged_bytes > 0
    keys = {
        f"overlay.kind: {experiment.overlay.kind}": many and experiment.overlay.kind != "star",
        "transfers": many and experiment.transfers is not None,
        "train.stragglers.kind: gradient_coding": coded,
    }
    for key, refused in keys.items():
        if refused:
            raise TaskStateError(
                f"{key} does not support a model with the buffer {layout.entries[0].name!r}: "
                "model buffers have no sum over workers or regions",
                fix="Remove the key, or give all of the task's `model_buffers` the rule region.",
            )


def _goal(experiment: Experiment) -> str:
    """Return the goal of the run in words; see `ServerPlan.goal`."""
    train = experiment.train
    target = "none" if train.target is None else train.target.model_dump_json()
    patience = "" if train.patience is None else f", patience {train.patience}"
    return f"steps {train.steps}, target {target}{patience}"


def wire_plan(experiment: Experiment) -> WirePlan:
    """Return how payloads are encoded, for both ends of every exchange."""
    return WirePlan.of(experiment.strategy, experiment.codec, experiment.seed)


def last_errors(experiment: Experiment) -> tuple[float, float]:
    """Return the relative errors of updates and answers of the last exchange, if a codec is lossy.

    Independent of the run's codecs, for choosing codecs.
    """
    plan = wire_plan(experiment)
    return plan.last_error, plan.last_reply_error


def build_evals(experiment: Experiment, task: Task) -> EvalCollector:
    """Return the collector of evaluations; steps of asynchronous regions match approximately."""
    train = experiment.train
    per_step = {r.name: 1 if train.mode == "sync" else r.workers for r in experiment.regions}
    intervals = {name: train.eval_every * pushes for name, pushes in per_step.items()}
    count = len(experiment.present_names)
    if experiment.eval_rows is not None:
        return EvalCollector(task, count, newest=True)
    return EvalCollector(task, count, intervals if train.eval_every else {})


def use_one_thread() -> None:
    """Limit torch to one thread, so that processes do not compete for cores.

    This also fixes the order of sums, which bit-equality between runs requires.
    """
    torch.set_num_threads(1)


def use_cpus(experiment: Experiment, cpus: float) -> None:
    """Limit torch to the number of CPUs reserved for the process.

    One thread for less than two CPUs, and in emulated runs on this machine: their reserved CPUs do
    not exist, and the simulator, which computes on one thread, must produce the same bits.

    Args:
        experiment: the run.
        cpus: `cpus_per_worker` or `cpus_per_server` of the process's region.
    """
    emulated = experiment.emulate is not None and experiment.cluster.kind == "local"
    torch.set_num_threads(1 if emulated else max(1, int(cpus)))


def check_device(experiment: Experiment) -> None:
    """Reject a device that this machine does not have; for runs that compute on it.

    Raises:
        ConfigError: naming the key.
    """
    device = experiment.device
    if device == "cpu":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = int(device.partition(":")[2] or 0)
    if number < count:
        return
    build = "" if torch.version.cuda is not None else ", and this PyTorch is built without CUDA"
    found = f"GPUs 0 to {count - 1}" if count else f"no GPU{build}"
    raise ConfigError(
        f"device: {device}, but PyTorch finds {found} on this machine",
        fix="Compute on the CPU: `--set device=cpu`; or use a machine with a GPU.",
    )


def with_shapes(experiment: Experiment, task: Task) -> Experiment:
    """Return the experiment with the model's shapes for codecs without shapes.

    Raises:
        ConfigError: a codec has shapes of another model.
    """
    both = {"up": experiment.codec.up, "down": experiment.codec.down}
    rules = {
        direction: codec.traits.with_shapes
        for direction, codec in both.items()
        if codec is not None and codec.traits.with_shapes is not None
    }
    if not rules:
        return experiment
    shapes = parameter_shapes(outlined_model(task, experiment.seed))
    filled = {}
    for direction, with_shapes_of in rules.items():
        try:
            filled[direction] = with_shapes_of(shapes)
        except ValueError as error:
            raise ConfigError(
                f"codec.{direction}.{error}",
                fix="Omit `shapes`: they are derived from the model.",
            ) from error
    return experiment.model_copy(update={"codec": experiment.codec.model_copy(update=filled)})
