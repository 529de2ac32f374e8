"""Builds the state machines of a run from its configuration, the same for runtime and simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from geo_ray.config.experiment import Experiment
from geo_ray.config.region import RegionConfig
from geo_ray.errors import ConfigError
from geo_ray.job.evals import EvalBoard
from geo_ray.strategies.base import AveragerState
from geo_ray.tasks.base import Task
from geo_ray.tasks.guard import checked_model, outlined_model
from geo_ray.training.averager.averager import Averager
from geo_ray.training.compute.flat import (
    check_module,
    count_parameters,
    read_parameters,
    split_sizes,
)
from geo_ray.training.compute.local_steps import LocalSteps
from geo_ray.training.compute.optimizers import lasting
from geo_ray.training.compute.worker import Worker
from geo_ray.training.exchange.averager_wire import AveragerWire
from geo_ray.training.exchange.wire_plan import WirePlan
from geo_ray.training.server.plan import ServerPlan
from geo_ray.training.server.region_model import ShardPort
from geo_ray.training.server.server import Server
from geo_ray.training.server.shard import Shard


def initial_parameters(task: Task, seed: int) -> Tensor:
    """The parameters that every region starts from, fp32 (P,).

    Raises:
        TaskOutputError: if the model cannot be trained as one flat fp32 vector.
    """
    module = checked_model(task, seed)
    check_module(module)
    return read_parameters(module)


def model_size(task: Task, seed: int) -> int:
    """P, the number of parameters that are trained; counted without making them.

    Raises:
        TaskOutputError: if the model cannot be trained as one flat fp32 vector.
    """
    module = outlined_model(task, seed)
    check_module(module)
    return count_parameters(module)


def _server_plan(experiment: Experiment, region: RegionConfig, epoch: int) -> ServerPlan:
    """What the parameter server of ``region`` is to do."""
    train, traits = experiment.train, experiment.strategy.traits
    return ServerPlan(
        region=region.name,
        num_workers=region.workers,
        batch_size=experiment.data.batch_size,
        batch_sizes=region.batch_sizes,
        steps=None if experiment.counts_together else train.steps,
        mode=train.mode,
        eval_every=train.eval_every,
        eval_rows=experiment.eval_rows,
        max_refused=train.max_refused_steps,
        epoch=epoch,
        alone=len(experiment.regions) == 1,
        batches_per_push=max(1, experiment.worker_steps),
        stragglers=train.stragglers,
        evaluates_outer=train.evaluate == "outer" and traits.region.eval_params is not None,
        goal=_goal(experiment),
        noise_every=train.noise_every,
        # What a codec loses would be missing in the mean, and look like noise.
        tells_norms=train.mode == "sync"
        and traits.averager.mean_gradient
        and (experiment.codec.up is None or not experiment.codec.up.traits.lossy),
    )


def build_shard(
    experiment: Experiment, region: RegionConfig, index: int, params_P: Tensor
) -> Shard:
    """Shard ``index`` of ``region``, holding its own copy of its slice of ``params_P``."""
    train = experiment.train
    steps = train.steps * (region.workers if train.mode == "async" else 1)
    return Shard.cut(
        params_P,
        split_sizes(params_P.numel(), region.ps_shards)[index],
        lasting(experiment.optimizer, steps),
        experiment.strategy,
        alone=len(experiment.regions) == 1,
    )


def build_server(
    experiment: Experiment,
    region: RegionConfig,
    shards: Sequence[ShardPort],
    num_params: int,
    epoch: int = 1,
) -> Server:
    """The parameter server of ``region`` over its shards in order, wherever they live."""
    plan = _server_plan(experiment, region, epoch)
    return Server.over(shards, num_params, plan, wire_plan(experiment))


def build_worker(
    experiment: Experiment, region: str, task: Task, params_P: Tensor, grad_P: Tensor
) -> Worker | LocalSteps:
    """A worker of ``region`` over its buffers, fp32 (P,) each."""
    worker = Worker(
        task,
        params_P,
        grad_P,
        region=region,
        seed=experiment.seed,
        device=experiment.device,
        clip_norm=experiment.train.clip_norm,
    )
    steps = experiment.worker_steps
    if not steps:
        return worker
    optimizer = lasting(experiment.optimizer, experiment.train.steps * steps)
    place = next(r for r in experiment.regions if r.name == region)
    return LocalSteps(worker, optimizer, steps, place.rows_per_step(experiment.data.batch_size))


def build_averager(
    experiment: Experiment, num_params: int, data_rows: Mapping[str, float]
) -> Averager:
    """The averager over all regions, whose data sets have so many rows (`job.data.data_rows`)."""
    members = tuple(sorted(experiment.region_names))
    wire = AveragerWire(wire_plan(experiment))
    enough = experiment.rows if experiment.counts_together else None
    state, goal = AveragerState(members, data_rows=dict(data_rows)), _goal(experiment)
    return Averager(experiment.strategy, num_params, state, wire=wire, enough=enough, goal=goal)


def _goal(experiment: Experiment) -> str:
    """When the run is at its end, in words; see `ServerPlan.goal`."""
    train = experiment.train
    target = "none" if train.target is None else train.target.model_dump_json()
    return f"steps {train.steps}, target {target}"


def wire_plan(experiment: Experiment) -> WirePlan:
    """How payloads are coded, for both ends of every exchange."""
    codec, traits = experiment.codec, experiment.strategy.traits
    return WirePlan(
        codec.up,
        codec.down,
        traits.sends,
        traits.in_rounds,
        experiment.seed,
        traits.exchange.fragments,
    )


def build_evals(experiment: Experiment, task: Task) -> EvalBoard:
    """What combines the regions' evaluations; those of asynchronous regions are near, not equal."""
    train = experiment.train
    per_step = {r.name: 1 if train.mode == "sync" else r.workers for r in experiment.regions}
    intervals = {name: train.eval_every * pushes for name, pushes in per_step.items()}
    count = len(experiment.regions)
    if experiment.eval_rows is not None:
        return EvalBoard(task, count, newest=True)
    return EvalBoard(task, count, intervals if train.eval_every else {})


def use_one_thread() -> None:
    """Let torch compute on one thread, so that processes do not fight over cores.

    It also fixes the order of sums, which bit-equality between runs rests on.
    """
    torch.set_num_threads(1)


def check_device(experiment: Experiment) -> None:
    """Refuse a device that this machine does not have; for runs that compute on it.

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
        fix="Compute on the CPU: `--set device=cpu`; or start it on a machine with a GPU.",
    )
