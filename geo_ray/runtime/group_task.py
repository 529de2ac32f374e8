"""What a rank of a process group runs: `GroupRank`, for loops of users, and the loop of the task.

The model is divided by FSDP2 (`units_of` chooses the units), copied by DDP, or distributed by the
task's method ``parallelize(model, mesh)``. Rank r of W ranks computes the rows of worker r of W
workers, so that the rows of a step do not depend on the kind of region. The optimizers are those of
the section ``optimizer``, with the same functions, on what each rank holds of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from geo_ray.base.errors import (
    ConfigError,
    InvariantError,
    TaskLoadError,
    TaskStateError,
)
from geo_ray.base.random_state import generators_restored, seed_generators, seed_of_rows
from geo_ray.base.types import Span
from geo_ray.data.manifest import load_manifest
from geo_ray.data.reader import ReadAhead, RegionReader
from geo_ray.data.tasks.base import Columns, Stats, Task, num_rows
from geo_ray.data.tasks.checked_calls import (
    blamed,
    checked_collate,
    checked_evaluate,
    checked_first_loss,
    checked_loss,
    checked_model,
)
from geo_ray.data.tasks.groups import GroupRun, parameter_runs
from geo_ray.data.tasks.load import load_task
from geo_ray.joining.credentials import JoinCredentials
from geo_ray.joining.layout import local_part, trained_parameters
from geo_ray.joining.site import JoinedRegion, JoinedTraining, join
from geo_ray.runs.data import open_readers
from geo_ray.runtime.spec import RunSpec, region_here
from geo_ray.training.optimizers import OneOptimizer, OptimizerGroup, State, lasting
from geo_ray.training.parameters import BufferLayout, GroupPiece, units_of
from geo_ray.training.worker import micro_batches
from geo_ray.transport.config import TransportConfig


class GroupRank:
    """A rank of a process group that geo_ray has started, as an argument of the user's loop.

    The process group of `torch.distributed` exists. The environment has ``RANK``, ``LOCAL_RANK``,
    ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, as under `torchrun`.

    Attributes:
        region: name of the region.
        rank: number of this process in the group.
        local_rank: its number on its machine.
        world_size: processes of the group.
        device: its GPU, or the CPU.
        checkpoints: folder for `JoinedRegion.training`, in which the ranks keep their state at
            checkpoints of the run.
    """

    def __init__(
        self,
        region: str,
        local_rank: int,
        device: torch.device,
        address: str,
        credentials: JoinCredentials,
        transport: TransportConfig,
        wait_s: float,
        checkpoints: str,
    ) -> None:
        self.region, self.device, self.checkpoints = region, device, checkpoints
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.local_rank = local_rank
        self._address, self._credentials = address, credentials
        self._transport, self._wait_s = transport, wait_s

    def join(self) -> JoinedRegion:
        """Join the run; see `geo_ray.join`. Every rank calls it."""
        return join(
            self._address,
            region=self.region,
            credentials=self._credentials,
            group=dist.group.WORLD,
            transport=self._transport,
            wait_s=self._wait_s,
        )


def train_task(rank: GroupRank, spec: RunSpec) -> None:
    """Train the task of a run to its end, as one rank of a group.

    Raises:
        TaskStateError: frozen parameters are model buffers of the task, and FSDP divides them.
        GeoRayError: the task cannot be trained.
    """
    experiment = spec.experiment
    region = spec.region(rank.region)
    group = region.group
    task = load_task(experiment.task, spec.here)
    module = checked_model(task, experiment.seed)
    sharding = "fsdp" if group is None else group.sharding
    if sharding == "fsdp":
        _check_buffers(task, module)
    runs = parameter_runs(task, module)
    module = module.to(rank.device)
    model = distributed(task, module, rank, sharding)
    masters = Masters(model)
    local_steps = max(1, experiment.worker_steps)
    optimizer = HeldOptimizer(
        lasting(experiment.optimizer, experiment.train.steps * local_steps),
        trained_parameters(masters.module),
        runs,
    )
    manifest = load_manifest(spec.manifest_address)
    here = region_here(region, manifest, f"rank {rank.rank} of '{region.name}'")
    train, heldout = open_readers(experiment, manifest, region.name, here)
    for reader in (train, heldout):
        reader.retry_for(experiment.checkpoint.retry_s)
    state = {"optimizer": optimizer}
    with (
        rank.join() as site,
        site.training(
            masters.module,
            buffers=getattr(task, "model_buffers", None),
            state=state,
            checkpoints=rank.checkpoints,
        ) as sync,
    ):
        masters.round()  # of the run's parameters
        loop = _TaskLoop(
            task,
            model,
            masters,
            optimizer,
            sync,
            rank,
            heldout,
            f"{experiment.seed}/{region.name}",
            experiment.data.batch_size,
            experiment.train.eval_batch_size,
            experiment.train.clip_mean_norm,
            experiment.train.accumulate,
        )
        ahead = ReadAhead(train.read)
        try:
            loop.run(sync.steps * local_steps, ahead)
        finally:
            ahead.close()


@dataclass(slots=True)
class _TaskLoop:
    """The loop of a rank."""

    task: Task
    model: nn.Module
    masters: Masters
    optimizer: HeldOptimizer
    sync: JoinedTraining
    rank: GroupRank
    heldout: RegionReader
    stream: str
    rows: int  # of this rank in a step
    eval_rows: int
    clip_norm: float | None
    accumulate: int  # micro-batches of a step

    def run(self, taken: int, ahead: ReadAhead) -> None:
        """Train to the end of the run.

        Args:
            taken: steps of the region so far.
            ahead: reads rows of the region's stream.
        """
        sync, is_first = self.sync, True
        while not sync.done:
            span = span_of(taken, self.rank.rank, self.rank.world_size, self.rows)
            (columns,) = ahead.take([span])
            loss = self._gradient(columns, span, is_first=is_first)
            self.masters.take_gradients()
            if self.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.optimizer.params, self.clip_norm)
            self.optimizer.step(taken)
            for param in self.optimizer.params:
                param.grad = None  # an exchange then fits into the memory of a step
            taken, is_first = taken + 1, False
            sync.step(rows=self.rows, loss=loss)
            self.masters.round()
            self._evaluate()
        self._evaluate()

    def _gradient(self, columns: Columns, span: Span, *, is_first: bool) -> Tensor:
        """Compute the mean gradient of all ranks; return the loss of this one."""
        is_read = (
            is_first or self.rank.device.type == "cpu"
        )  # to read a loss would wait for the GPU
        checked = checked_first_loss if is_first else checked_loss
        self.model.train()
        with generators_restored(self._gpus):
            seed_generators(seed_of_rows(self.stream, span.start), self._gpus)
            total = torch.zeros((), device=self.rank.device)
            for part, fraction in micro_batches(columns, self.accumulate):
                batch = checked_collate(self.task, part, self.rank.device)
                if is_read:
                    loss = checked(self.task, self.model, batch) * fraction
                else:
                    with blamed(self.task, "loss"):
                        loss = self.task.loss(self.model, batch) * fraction
                with blamed(self.task, "loss (in its backward pass)"):
                    loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        return total

    def _evaluate(self) -> None:
        """Evaluate and report, if it is time."""
        if not self.sync.evaluation_due:
            return
        self.model.eval()
        totals: Stats = {}
        rows = 0
        with torch.no_grad():
            for columns, counts in own_batches(
                self.heldout.scan(self.eval_rows), self.rank.rank, self.rank.world_size
            ):
                batch = checked_collate(self.task, columns, self.rank.device)
                stats = checked_evaluate(self.task, self.model, batch)
                if counts:
                    rows += num_rows(columns)
                    for name, value in stats.items():
                        totals[name] = totals[name] + value if name in totals else value
                else:  # all ranks must report the same names
                    totals = {name: value * 0.0 for name, value in stats.items()} | totals
        self.sync.report(totals, rows)

    @property
    def _gpus(self) -> list[int]:
        return [] if self.rank.device.type == "cpu" else [torch.cuda.current_device()]


def span_of(step: int, rank: int, world_size: int, rows: int) -> Span:
    """Return the rows of a rank in a step, as of the worker with this number.

    Args:
        step: steps of the region so far.
        rank: number of the rank.
        world_size: ranks of the region.
        rows: rows of every rank in a step.
    """
    return Span((step * world_size + rank) * rows, rows)


def own_batches(
    batches: Iterator[Columns], rank: int, world_size: int
) -> Iterator[tuple[Columns, bool]]:
    """Divide batches among ranks, so that all ranks compute equally many, as FSDP needs.

    Yields:
        Batches, each with whether it counts; others are computed only to take part.
    """
    first: Columns | None = None
    own: tuple[Columns, bool] | None = None
    count = 0
    for count, batch in enumerate(batches, 1):
        turn = (count - 1) % world_size
        if turn == 0:
            first, own = batch, None
        if turn == rank:
            own = batch, True
        if turn == world_size - 1 and own is not None:
            yield own
    if count % world_size and first is not None:
        yield own or (first, False)


# ------------------------------------------------------------------ distribution of the model


def distributed(task: Task, module: nn.Module, rank: GroupRank, sharding: str) -> nn.Module:
    """Return a model that is distributed over the ranks of the group.

    Args:
        task: its method ``parallelize`` distributes the model, if it has one.
        module: the model.
        rank: this rank.
        sharding: ``fsdp`` or ``ddp``.

    Raises:
        TaskOutputError: the task's method raised an exception.
        TaskLoadError: it returned something else than a module.
    """
    mesh = init_device_mesh(rank.device.type, (rank.world_size,))
    own = getattr(task, "parallelize", None)
    if own is not None:
        with blamed(task, "parallelize"):
            found: object = own(module, mesh)
        if not isinstance(found, nn.Module):
            raise TaskLoadError(
                f"{type(task).__name__}.parallelize returned {type(found).__name__}, not a module",
                fix="Return the model, wrapped or sharded.",
            )
        return found
    if sharding == "ddp":
        devices = None if rank.device.type == "cpu" else [rank.device.index]
        model = nn.parallel.DistributedDataParallel(module, device_ids=devices)
        model.broadcast_buffers = False  # each rank has its statistics; exchanges average them
        return model
    return _fully_sharded(module, mesh)


def _fully_sharded(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    # A local import: the module loads PyTorch's compiler, which other processes do not need.
    from torch.distributed.fsdp import fully_shard

    for name in units_of(module):
        fully_shard(module.get_submodule(name), mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def _check_buffers(task: Task, module: nn.Module) -> None:
    """Refuse model buffers that FSDP would divide.

    Raises:
        TaskStateError: names one.
    """
    frozen = {name for name, param in module.named_parameters() if not param.requires_grad}
    for entry in BufferLayout.of(task, module).entries:
        if entry.name in frozen:
            raise TaskStateError(
                f"'{entry.name}' is frozen and a model buffer of the task, and FSDP divides it",
                fix="Use `group.sharding: ddp`.",
            )


# ------------------------------------------------------------------ half precision


class Masters:
    """The fp32 masters of trained parameters in half precision, as a module.

    Optimizer and exchange use the masters; forward and backward pass use the rounded values.

    Attributes:
        module: has the masters instead of these parameters, and otherwise the model's parameters
            and buffers, under the same names; the model itself, if it has no such parameters.

    Args:
        model: the model, distributed or not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._masters: list[tuple[nn.Parameter, nn.Parameter]] = []
        halves = [p for p in model.parameters() if p.requires_grad and p.dtype != torch.float32]
        of_half: dict[nn.Parameter, nn.Parameter] = {}
        for param in halves:
            master = nn.Parameter(param.detach().float())
            self._masters.append((param, master))
            of_half[param] = master
        self.module = _copied(model, of_half, {}) if halves else model

    def take_gradients(self) -> None:
        """Give the masters the gradients of their parameters."""
        for param, master in self._masters:
            master.grad = None if param.grad is None else param.grad.float()
            param.grad = None

    def round(self) -> None:
        """Set the parameters to their masters."""
        with torch.no_grad():
            for param, master in self._masters:
                local_part(param).copy_(local_part(master))


def _copied(
    module: nn.Module,
    of_half: Mapping[nn.Parameter, nn.Parameter],
    known: dict[nn.Module, nn.Module],
) -> nn.Module:
    """Return a copy of a tree of modules that shares all tensors but some parameters."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        module = module.module
    if module not in known:
        twin = known[module] = object.__new__(type(module))
        twin.__dict__.update(module.__dict__)
        twin.__dict__["_parameters"] = {
            name: param if param is None else of_half.get(param, param)
            for name, param in module._parameters.items()
        }
        twin.__dict__["_modules"] = {
            name: each if each is None else _copied(each, of_half, known)
            for name, each in module._modules.items()
        }
    return known[module]


# ------------------------------------------------------------------ optimizer


@dataclass(slots=True)
class _Held:
    """A parameter, and the optimizer's state for what this rank holds of it."""

    name: str
    param: nn.Parameter
    run: GroupRun
    state: State = field(default_factory=dict)

    @property
    def piece(self) -> GroupPiece:
        """What this rank holds: the parameter, or a part of it as a vector."""
        size = local_part(self.param).numel()
        if isinstance(self.param, DTensor):
            return GroupPiece(0, size, self.run.factors)
        return GroupPiece(0, size, self.run.factors, shape=self.run.shape, hidden=self.run.hidden)

    def saved(self, value: Tensor) -> Tensor:
        """Return a tensor of the state as checkpoints have it, in the same memory."""
        param = self.param
        if value.dim() != 1:
            return value
        local = value.view(local_part(param).shape)
        if not isinstance(param, DTensor):
            return local
        return DTensor.from_local(
            local,
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )


class HeldOptimizer:
    """The optimizer of a run, on what this rank holds of the parameters. Others are not copied.

    A parameter without a gradient is skipped, as by optimizers of PyTorch.

    Attributes:
        params: the trained parameters.

    Args:
        config: the optimizer; its schedule has a length (`lasting`).
        params: the trained parameters by name, sharded or not, in order.
        runs: what they are, in the same order.

    Raises:
        ConfigError: the optimizer steps whole parameters, and these are sharded.
    """

    def __init__(
        self, config: OneOptimizer, params: Mapping[str, nn.Parameter], runs: Sequence[GroupRun]
    ) -> None:
        self.params = list(params.values())
        is_sharded = any(isinstance(each, DTensor) for each in self.params)
        if config.needs_whole_parameters and is_sharded:
            raise ConfigError(
                f"optimizer.kind: '{config.kind}' steps whole parameters, which FSDP divides",
                fix="Use `group.sharding: ddp`, or adamw.",
            )
        self._config = config
        held = [_Held(*each, run) for each, run in zip(params.items(), runs, strict=True)]
        for each in held:
            new = config.new_state(each.piece)
            each.state |= {key: value.to(each.param.device) for key, value in new.items()}
        self._groups: Mapping[tuple[float, float, float], list[_Held]] = {
            factors: [each for each in held if each.run.factors == factors]
            for factors in dict.fromkeys(run.factors for run in runs)
        }

    def step(self, taken: int) -> None:
        """Make a step with the gradients of the parameters, after ``taken`` steps."""
        schedule, config = self._config.schedule, self._config
        factor = 1.0 if schedule is None else schedule.factor(taken)
        with torch.no_grad():
            for (rate, decay, fraction), members in self._groups.items():
                scaled = rate * (1.0 + fraction * (factor - 1.0) if fraction != 1.0 else factor)
                used = [each for each in members if _has_gradient(each.param)]
                if not used:
                    continue
                group = OptimizerGroup(
                    [local_part(each.param).reshape(-1) for each in used],
                    [each.state for each in used],
                    config.lr * scaled,
                    config.weight_decay * decay,
                    [each.piece for each in used],
                    rate=scaled,
                    decay=decay,
                )
                config.step(group, [_gradient_of(each.param) for each in used])

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return the state by parameter, for checkpoints; the tensors are not copied."""
        return {
            each.name: {key: each.saved(value) for key, value in each.state.items()}
            for members in self._groups.values()
            for each in members
            if each.state
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore the result of `state_dict`, of a group of any size."""
        for members in self._groups.values():
            for each in members:
                for key, value in each.state.items():
                    value.copy_(local_part(state[each.name][key]).reshape(value.shape))


def _has_gradient(param: nn.Parameter) -> bool:
    return param.grad is not None and local_part(param).numel() > 0


def _gradient_of(param: nn.Parameter) -> Tensor:
    if param.grad is None:
        raise InvariantError("a parameter without a gradient is stepped")
    return local_part(param.grad).reshape(-1)
