"""Builds a planning request from configuration, prices, links and measurements.

The request covers model size, memory, the machines of each region, and the job.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from geo_ray.base.errors import (
    ConfigError,
    ModelTooLargeError,
    PlanInfeasibleError,
    PriceBookError,
    ProfileError,
)
from geo_ray.base.random_state import generators_restored
from geo_ray.base.text import age_text
from geo_ray.codecs.registry import sections_of
from geo_ray.data.tasks.base import Task
from geo_ray.data.tasks.checked_calls import checked_model, outlined_model
from geo_ray.experiment.experiment import Experiment
from geo_ray.experiment.regions import GroupConfig
from geo_ray.planner.config import (
    MachineConfig,
    PlanConfig,
    RegionOffer,
    allowed_averagers,
    no_plan_section,
)
from geo_ray.planner.exchange import Limits
from geo_ray.planner.fleet import ANY_ROWS
from geo_ray.planner.loss import BITS_PER_PARAM, AssumedLoss, LossProfile, MeasuredLoss
from geo_ray.planner.memory import (
    Activations,
    ExchangeMemory,
    GroupLayout,
    MemoryModel,
    ModelSizes,
    OptimizerSize,
    ParameterSize,
    Sharding,
)
from geo_ray.planner.plan import Plan, RankMemory
from geo_ray.planner.policies import Counts
from geo_ray.planner.profile import Profile, StartModel, StepModel, fit_start, fit_steps
from geo_ray.planner.request import OwnSteps, Rental, RentalPrice, Request, Site
from geo_ray.planner.timing import HOUR_S, JobWork, Pattern
from geo_ray.prices.price import INTERNET, Market, PriceRecord
from geo_ray.prices.price_book import Instance, PriceBook, instance_of
from geo_ray.runs.build import last_errors
from geo_ray.strategies.config import CodecConfig
from geo_ray.training.parameters import check_module, count_parameters, units_of
from geo_ray.transport.links import LinkTable

_MOST_PARAMS: Final = 50_000_000  # limit for measuring a few rows
# Largest model that is built on the CPU to measure rows. A forward pass on the meta device would
# take longer: for it, PyTorch imports its compiler, which takes 2 to 4 s.
_MOST_PARAMS_MADE: Final = 10_000_000
_SCHEMA: Final = re.compile(r"(\w+?)(?:\[(\d+)\])?")
_FEW, _MORE = 2, 4  # rows
_NO_SIZES: Final = ModelSizes(())


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The size of a model.

    Attributes:
        num_params: trainable parameters.
        row_bytes: bytes per row that the backward pass needs from the forward pass; None if they
            could not be measured cheaply.
        sizes: sizes of its parameters.
    """

    num_params: int
    row_bytes: float | None
    sizes: ModelSizes = _NO_SIZES


def model_size(task: Task, seed: int) -> ModelSize:
    """Return the size; see `outlined_model` for how the model is built.

    Raises:
        TaskOutputError: if the model cannot be trained as one flat fp32 vector.
    """
    module = outlined_model(task, seed)
    check_module(module)
    num_params, sizes = count_parameters(module), sizes_of(module)
    is_real = not any(parameter.is_meta for parameter in module.parameters())
    if is_real and num_params > _MOST_PARAMS:
        return ModelSize(num_params, None, sizes)
    try:
        is_made = not is_real and num_params <= _MOST_PARAMS_MADE
        device = torch.device("cpu" if is_real or is_made else "meta")
        with generators_restored(), _PlainAttention() if is_made else nullcontext():
            if is_made:
                module = checked_model(task, seed)
            few, more = (_activation_bytes(task, module, rows, device) for rows in (_FEW, _MORE))
    except Exception:  # a loss may refuse rows of zeros
        return ModelSize(num_params, None, sizes)
    return ModelSize(num_params, max(0.0, (more - few) / (_MORE - _FEW)), sizes)


def sizes_of(module: nn.Module, units: Sequence[nn.Module] | None = None) -> ModelSizes:
    """Return the sizes of a model.

    Args:
        module: the model, on any device, also the meta device; sharded or not.
        units: modules that FSDP gathers one at a time, without the model itself; None: those of
            `units_of`, or of a sharded model.
    """
    if units is None:
        units = [each for each in module.modules() if _is_sharded(each) and each is not module]
        units = units or [module.get_submodule(name) for name in units_of(module)]
    seen: set[int] = set()

    def sizes(of: nn.Module) -> tuple[ParameterSize, ...]:
        found = []
        for param in of.parameters():
            if id(param) not in seen:
                seen.add(id(param))
                item_bytes = param.element_size()
                found.append(ParameterSize(tuple(param.shape), item_bytes, param.requires_grad))
        return tuple(found)

    inner_first = sorted(units, key=lambda each: sum(1 for _ in each.modules()))
    found = [sizes(each) for each in inner_first]
    buffers = {id(each): each.numel() * each.element_size() for each in module.buffers()}
    return ModelSizes(sizes(module), tuple(each for each in found if each), sum(buffers.values()))


def _is_sharded(module: nn.Module) -> bool:
    # The import of `FSDPModule` would load PyTorch's compiler, which takes 2 to 4 s.
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _activation_bytes(task: Task, module: nn.Module, rows: int, device: torch.device) -> int:
    """Return the bytes that autograd saves in a forward pass, without parameters."""
    module = copy.deepcopy(module)  # the pass may change state that training uses
    known = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    storages: dict[int, Tensor] = {}  # references, so that no storage address is reused

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in known:
            storages[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with device, torch.autograd.graph.saved_tensors_hooks(note, _unchanged):
        loss = task.loss(module, task.collate(_rows_of(task.columns, rows), device))
    size = sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
    del loss
    return size


class _PlainAttention(TorchFunctionMode):
    """Attention in plain operations, as on the meta device: CPU kernels save less."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            return torch._scaled_dot_product_attention_math(*args, **(kwargs or {}))[0]
        return func(*args, **(kwargs or {}))


def _rows_of(columns: Mapping[str, str], rows: int) -> dict[str, np.ndarray]:
    found = {}
    for name, schema in columns.items():
        match = _SCHEMA.fullmatch(schema)
        if match is None:
            raise ValueError(schema)
        length = (int(match[2]),) if match[2] else ()
        found[name] = np.zeros((rows, *length), dtype=match[1])
    return found


_GB: Final = 1e9
_FP32_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of a model on machines, and the number of rows that fit in addition.

    Counted in copies of the model, 4 bytes a parameter:

    - a worker: parameters, gradient and, if it makes the optimizer's steps, its state. They are
      on its accelerator if it has one; its host then has two more copies, which the worker shares
      with the parameter server
    - a region's parameter server and bridge: parameters, the sum of gradients, the optimizer
      state, the strategy's two copies (the state at the last exchange, and the vector being
      sent) and, with several regions, an update and an answer in transit

    and, for every row, the activations for the backward pass. This is a lower bound: the averager's
    region needs more, and the memory of other programs is not included.

    Attributes:
        num_params: number of parameters.
        states: values per parameter in the optimizer state.
        own_steps: whether workers make the optimizer's steps.
        regions: number of regions.
        row_bytes: bytes per row; None: unknown, and not counted.
    """

    num_params: int
    states: int = 0
    own_steps: OwnSteps = "never"
    regions: int = 1
    row_bytes: float | None = None

    def worker_bytes(self, workers: int) -> float:
        """Return the bytes that a worker needs on its device, if a machine has so many."""
        may_own = self.own_steps == "always" or (self.own_steps == "alone" and workers == 1)
        return self._copies(2 + (self.states if may_own else 0))

    @property
    def server_bytes(self) -> float:
        """Return the bytes that a region's parameter server and bridge need."""
        return self._copies(4 + self.states + (2 if self.regions > 1 else 0))

    def max_rows(self, machine: Instance, *, serves: bool) -> tuple[float, str]:
        """Return the rows of a step that fit into a machine's memory, and the reason if none fit.

        Args:
            machine: the machine's resources.
            serves: whether the parameter server may run on it.
        """
        accelerators = machine.accelerators or 0
        workers = max(1, accelerators)
        host_bytes = (self.server_bytes if serves else 0.0) + workers * (
            self._copies(2) if accelerators else self.worker_bytes(workers)
        )
        row_bytes = self.row_bytes or 0.0
        capacities = []
        if accelerators and machine.accelerator_gb is not None:
            capacities.append(
                ("an accelerator", machine.accelerator_gb, self.worker_bytes(workers), workers)
            )
        if machine.host_gb is not None:
            rows_there = 0 if accelerators else 1
            capacities.append(("the machine", machine.host_gb, host_bytes, rows_there))
        most = math.inf
        for what, has_gb, needs_bytes, shares in capacities:
            left = has_gb * _GB - needs_bytes
            if left < (row_bytes if shares else 0.0):
                beside = f", and {row_bytes / _GB:.2g} GB per row" if shares and row_bytes else ""
                return 0, (
                    f"{what} has {has_gb:g} GB of memory, but {needs_bytes / _GB:.3g} GB are "
                    "needed "
                    f"for model, gradients and optimizer{beside}"
                )
            if shares and row_bytes:
                most = min(most, shares * math.floor(left / row_bytes))
        return most, ""

    def _copies(self, number: float) -> float:
        return number * _FP32_BYTES * self.num_params


_MONTH_H: Final = 730.0
_STATES: Final = {
    "sgd": 0,
    "momentum": 1,
    "adamw": 2,
    "lion": 1,
    "muon": 1,
    "adafactor": 0,
    "task": 2,
}
"""Values per parameter in an optimizer's state.

`muon`: for hidden matrices, others have more; `task`: assumed, as for Adam.
"""


def check_knows_task(experiment: Experiment) -> None:
    """Refuse runs with training loops of users: their model and batches are unknown.

    Raises:
        ConfigError: names the regions.
    """
    own = [each.name for each in experiment.regions if not each.trains_task]
    if own:
        raise ConfigError(
            f"regions {', '.join(own)} have a training loop of their own, so the size of the model "
            "and the rows of a step are unknown before the run",
            fix="Choose machines yourself and run `geo-ray train`, or let the groups train a task.",
        )


def section_of(experiment: Experiment) -> PlanConfig:
    """Return the section `plan`.

    Raises:
        ConfigError: it is missing, or its regions are not those of the run, or a region has a
            training loop of the user.
    """
    check_knows_task(experiment)
    plan = experiment.plan
    if plan is None:
        raise no_plan_section(experiment.region_names)
    missing = [name for name in experiment.region_names if name not in plan.regions]
    unknown = [name for name in plan.regions if name not in experiment.region_names]
    if missing or unknown:
        raise ConfigError(
            "plan.regions: these regions are only in the plan or only in the run: "
            f"{', '.join(missing + unknown)}",
            fix=f"List the machines that can be rented in {', '.join(experiment.region_names)}.",
        )
    return plan


def site_of(
    name: str, experiment: Experiment, book: PriceBook, measured: StepModel | None, size: ModelSize
) -> Site:
    """Return a region for the planner; errors as for `request_of`."""
    plan = section_of(experiment)
    offer = plan.regions[name]
    footprint = _footprint(experiment, size)
    lacks = _server_lacks(offer, footprint)
    counts_lan = _lan_is_counted(plan, measured)
    rentals, edges_h = [], _edges_h_of_server(offer, book)
    for machine in offer.machines:
        has = _facts(offer, machine)
        capacity, why = footprint.max_rows(has, serves=offer.server is None)
        for market in machine.markets:
            record = book.instance(offer.cloud, offer.at, machine.type, market)
            edges_h |= {tier.after_h for tier in record.age_tiers}
            rentals.append(
                Rental(
                    machine.type,
                    market,
                    _hourly(book, record),
                    _speed(name, machine, measured),
                    0 if record.availability == "none" or not capacity or lacks else machine.cap,
                    _lost(experiment, market),
                    _lan_s(experiment, has, measured, footprint),
                    max(1, has.accelerators or 0),
                    int(min(capacity, ANY_ROWS)),
                    lacks or why,
                )
            )
    return Site(
        name,
        rentals,
        _standing(offer, book),
        fixed_s=_fixed_s(experiment, measured),
        one_is_free=offer.server is None and counts_lan,
        counts_lan=counts_lan,
        own_steps=_own_steps(experiment) if counts_lan else "never",
        optimizer_copies=_STATES[experiment.optimizer.kind],
        server=offer.server,
        edges_h=frozenset(edges_h),
    )


def _group_site(
    name: str,
    experiment: Experiment,
    group: GroupConfig,
    book: PriceBook,
    size: ModelSize,
    exchange: ExchangeMemory,
    profile: Profile | None,
) -> Site:
    """Return a region that is a process group: all of its machines, of one type, or none.

    Raises:
        ConfigError: the section `plan` has something that groups do not have.
        ModelTooLargeError: a rank does not fit into any of the machines.
    """
    offer = section_of(experiment).regions[name]
    if offer.server is not None:
        raise ConfigError(
            f"plan.regions.{name}.server: a group has no parameter server", fix="Omit it."
        )
    needs = memory_model(experiment, group, size, exchange)
    rentals, edges_h = [], set[float]()
    too_large: dict[float, ModelTooLargeError] = {}  # by the memory of an accelerator
    for machine in offer.machines:
        rows_per_s = machine.rows_per_s or _group_speed(name, experiment, group, machine, profile)
        has = _facts(offer, machine)
        why = _gang_lacks(group, machine, has)
        if not why:
            try:
                needs.check(f"region '{name}', {machine.type}", has.accelerator_gb, has.host_gb)
            except ModelTooLargeError as error:
                too_large[has.accelerator_gb or 0.0] = error
                why = error.message
        for market in machine.markets:
            record = book.instance(offer.cloud, offer.at, machine.type, market)
            edges_h |= {tier.after_h for tier in record.age_tiers}
            rentals.append(
                Rental(
                    machine.type,
                    market,
                    _hourly(book, record),
                    rows_per_s,
                    0 if record.availability == "none" or why else machine.cap,
                    _lost(experiment, market),
                    workers=group.ranks_of_node,
                    left_out=why,
                )
            )
    if too_large and not any(rental.cap for rental in rentals):
        raise too_large[max(too_large)]
    return Site(
        name,
        rentals,
        _standing(offer, book),
        fixed_s=_fixed_s(experiment, None),
        edges_h=frozenset(edges_h),
        gang=group.nodes,
    )


def _group_speed(
    name: str,
    experiment: Experiment,
    group: GroupConfig,
    machine: MachineConfig,
    profile: Profile | None,
) -> float:
    """Return the measured rows per second of one machine of a group.

    Raises:
        ConfigError: it was not measured with these ranks and rows.
    """
    rows = experiment.data.batch_size
    key = name, machine.type, group.world_size, rows
    for point in () if profile is None else profile.steps:
        if point.key == key:
            return group.ranks_of_node * rows / point.step_s
    raise ConfigError(
        f"plan.regions.{name}: the speed of {machine.type} is unknown",
        fix="Give its rows_per_s, as one of the group's machines trains, or measure it: geo-ray "
        f"profile --machine {name}={machine.type}.",
    )


def _gang_lacks(group: GroupConfig, machine: MachineConfig, has: Instance) -> str:
    """Return why a type cannot have the machines of a group; empty if it can."""
    if group.gpus_per_node and has.accelerators is None:
        return "its accelerators are unknown: give plan.regions.*.machines.accelerators"
    if group.gpus_per_node > (has.accelerators or 0):
        return f"it has {has.accelerators or 0} accelerators; the group uses {group.gpus_per_node}"
    if machine.cap < group.nodes:
        return f"its cap is {machine.cap}; the group has {group.nodes} machines"
    return ""


def group_exchange(experiment: Experiment, codec: str | None) -> ExchangeMemory:
    """Return what the ranks of groups and the serving process hold for exchanges with a codec."""
    # A local import: it loads a part of PyTorch that other plans do not need.
    from geo_ray.runs.memory_probe import exchange_memory

    up = experiment.codec.up
    section = experiment.codec
    if codec != (None if up is None else up.kind):
        section = CodecConfig.model_validate(sections_of(codec))
    on_cpu = all(group is None or not group.gpus_per_node for group in _groups(experiment))
    return exchange_memory(
        experiment.strategy, section, len(experiment.regions), keeps_vector=not on_cpu
    )


def _groups(experiment: Experiment) -> list[GroupConfig | None]:
    return [region.group for region in experiment.regions]


def memory_model(
    experiment: Experiment, group: GroupConfig, size: ModelSize, exchange: ExchangeMemory
) -> MemoryModel:
    """Return the memory of a group that trains the task of a run.

    Args:
        experiment: the run.
        group: the group.
        size: size of the model.
        exchange: memory of exchanges.
    """
    plan, rows = experiment.plan, -(-experiment.data.batch_size // experiment.train.accumulate)
    given_mb = None if plan is None else plan.activation_mb_per_row
    row_bytes = size.row_bytes if given_mb is None else given_mb * 1e6
    ranks = group.world_size
    sharding: Sharding = "none" if ranks == 1 else group.sharding
    return MemoryModel(
        size.sizes,
        OptimizerSize(_STATES[experiment.optimizer.kind]),
        GroupLayout(sharding, ranks, ranks_per_host=group.ranks_of_node),
        exchange,
        None if row_bytes is None else Activations(row_bytes, rows),
        on_accelerator=group.gpus_per_node > 0,
    )


def check_group_memory(
    experiment: Experiment,
    size: ModelSize,
    here: Instance,
    chosen: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Refuse groups whose task does not fit into their machines, before any is rented.

    A region may have several types of machines, of which one must fit. Without a local cluster and
    a section `plan`, the machines are unknown, and nothing is checked.

    Args:
        experiment: the run.
        size: size of its model.
        here: this machine, which a local cluster uses.
        chosen: types of machines by region; None: all types of `plan.regions`.

    Raises:
        ModelTooLargeError: names the region and what its ranks need.
    """
    up, offers = experiment.codec.up, {} if experiment.plan is None else experiment.plan.regions
    exchange = group_exchange(experiment, None if up is None else up.kind)
    for region in experiment.task_regions:
        if region.group is None:
            continue
        found: dict[str, Instance] = {}
        offer = offers.get(region.name)
        if experiment.cluster.kind == "local":
            found["this machine"] = here
        elif offer is not None:
            types = None if chosen is None else chosen.get(region.name, ())
            found = {
                machine.type: _facts(offer, machine)
                for machine in offer.machines
                if types is None or machine.type in types
            }
        needs = memory_model(experiment, region.group, size, exchange)
        errors = []
        for name, has in found.items():
            try:
                needs.check(f"region '{region.name}', {name}", has.accelerator_gb, has.host_gb)
            except ModelTooLargeError as error:
                errors.append((has.accelerator_gb or 0.0, has.host_gb or 0.0, error))
        if errors and len(errors) == len(found):
            raise max(errors, key=lambda each: each[:2])[2]


def with_memory(plan: Plan, experiment: Experiment, size: ModelSize) -> Plan:
    """Return a plan with the memory of its groups, for the plan's codec."""
    if not experiment.groups:
        return plan
    section, exchange = section_of(experiment), group_exchange(experiment, plan.codec)
    regions, serving = [], dict[str, float]()
    for region, config in zip(plan.regions, experiment.regions, strict=True):
        offer, kind = section.regions[region.region], region.machines[0].type
        has = _facts(offer, next(each for each in offer.machines if each.type == kind))
        if config.group is None:
            regions.append(region)
            continue
        found = memory_model(experiment, config.group, size, exchange).memory()
        memory = RankMemory(
            ranks=config.group.ranks_of_node,
            device=dict(found.device),
            host=dict(found.host),
            device_gb=has.accelerator_gb if config.group.gpus_per_node else None,
            host_gb=has.host_gb,
        )
        regions.append(region.model_copy(update={"memory": memory}))
        serving = dict(found.server)
    return plan.model_copy(update={"regions": tuple(regions), "serving": serving})


def machine_notes(experiment: Experiment, sites: Sequence[Site], size: ModelSize) -> list[str]:
    """Return notes about excluded machines, and about costs that are not counted."""
    plan = section_of(experiment)
    found = [
        f"{site.name}: no {rental.type}: {rental.left_out}"
        for site in sites
        for rental in site.rentals
        if rental.left_out
    ]
    has = {
        machine.type: _facts(offer, machine)
        for offer in plan.regions.values()
        for machine in offer.machines
    }
    if experiment.groups:
        found.append("traffic between the machines of a group is part of rows_per_s")
        if size.row_bytes is None and plan.activation_mb_per_row is None:
            found.append("memory for rows was not counted: give plan.activation_mb_per_row")
        return list(dict.fromkeys(found))
    nets = sorted(kind for kind, facts in has.items() if facts.network_gbps is None)
    if nets and any(site.counts_lan for site in sites):
        found.append(
            f"traffic between machines of a region is not counted for {', '.join(nets)}: "
            "give network_gbps, or plan.lan_s_per_machine"
        )
    hosts = sorted(kind for kind, facts in has.items() if facts.host_gb is None)
    if hosts:
        found.append(f"the memory of {', '.join(hosts)} is unknown: give host_gb")
    elif size.row_bytes is None and plan.activation_mb_per_row is None:
        found.append("memory for rows was not counted: give plan.activation_mb_per_row")
    if plan.step_overhead_s is None and not any(site.fixed_s for site in sites):
        found.append(
            "the work of the parameter server (sums, optimizer) is not counted: profile the job, "
            "or give plan.step_overhead_s"
        )
    if any(offer.disk is None for offer in plan.regions.values()):
        found.append("disks are not counted in regions without plan.regions.*.disk")
    return list(dict.fromkeys(found))


def _facts(offer: RegionOffer, machine: MachineConfig) -> Instance:
    """Return the resources of a machine type, from the configuration or the known types."""
    known = instance_of(offer.cloud, machine.type)
    own = {field.name: getattr(machine, field.name) for field in fields(Instance)}
    return replace(known, **{name: value for name, value in own.items() if value is not None})


def _footprint(experiment: Experiment, size: ModelSize) -> Footprint:
    given_mb = section_of(experiment).activation_mb_per_row
    return Footprint(
        size.num_params,
        _STATES[experiment.optimizer.kind],
        "always" if experiment.worker_steps > 0 else _own_steps(experiment),
        len(experiment.regions),
        size.row_bytes if given_mb is None else given_mb * 1e6,
    )


def _lost(experiment: Experiment, market: Market) -> float:
    """Return the fraction of time that preemptions of a machine cost."""
    spot = section_of(experiment).spot
    return min(0.9, spot.preemptions_per_h * spot.lost_s / HOUR_S) if market == "spot" else 0.0


def _server_lacks(offer: RegionOffer, footprint: Footprint) -> str:
    """Return the reason if a separate parameter server does not fit its machine."""
    has_gb = None if offer.server is None else instance_of(offer.cloud, offer.server).host_gb
    if has_gb is None or has_gb * 1e9 >= footprint.server_bytes:
        return ""
    return (
        f"the server {offer.server} has {has_gb:g} GB of memory, but the parameter server needs "
        f"{footprint.server_bytes / 1e9:.3g} GB"
    )


def _fixed_s(experiment: Experiment, measured: StepModel | None) -> float:
    """Return the overhead of a local step beyond computation; a profile measures it."""
    given_s = section_of(experiment).step_overhead_s
    if given_s is not None:
        return given_s / max(1, experiment.worker_steps)
    return 0.0 if measured is None else measured.fixed_s


def _own_steps(experiment: Experiment) -> OwnSteps:
    """Return in which regions workers make the optimizer's steps instead of the server."""
    if experiment.owns_steps(2):
        return "always"
    return "alone" if experiment.owns_steps(1) else "never"


def _lan_is_counted(plan: PlanConfig, measured: StepModel | None) -> bool:
    """Return whether the time of a region's internal network must be estimated.

    It must if neither the plan nor the profile gives it.
    """
    return plan.lan_s_per_machine is None and (measured is None or measured.workers[1] == 1)


def _lan_s(
    experiment: Experiment, has: Instance, measured: StepModel | None, footprint: Footprint
) -> float:
    """Return the time that a machine adds to a local step for gradients and parameters."""
    plan, workers = section_of(experiment), max(1, has.accelerators or 0)
    local = max(1, experiment.worker_steps)
    if plan.lan_s_per_machine is not None:
        return plan.lan_s_per_machine / local
    if measured is not None and not _lan_is_counted(plan, measured):
        return measured.lan_s * workers
    if has.network_gbps is None:
        return 0.0  # reported by a note
    sent_gbit = 2 * 32e-9 * footprint.num_params * workers
    return sent_gbit / has.network_gbps / local


def _speed(name: str, machine: MachineConfig, measured: StepModel | None) -> float:
    if machine.rows_per_s is not None:
        return machine.rows_per_s
    row_s = None if measured is None else measured.row_s.get(machine.type)
    if row_s is None:
        raise ConfigError(
            f"plan.regions.{name}: the speed of {machine.type} is unknown",
            fix=f"Give its rows_per_s, or measure it: geo-ray profile --machine "
            f"{name}={machine.type}.",
        )
    if row_s <= 0:
        raise ProfileError(
            f"region '{name}': in the profile, a step on {machine.type} does not take longer with "
            "more "
            "rows",
            fix="Measure batch sizes that differ more: geo-ray profile --batch-sizes.",
        )
    return 1 / row_s


def _edges_h_of_server(offer: RegionOffer, book: PriceBook) -> set[float]:
    if offer.server is None:
        return set()
    record = book.instance(offer.cloud, offer.at, offer.server)
    return {tier.after_h for tier in record.age_tiers}


def _hourly(book: PriceBook, record: PriceRecord) -> RentalPrice:
    book.usd_of_hours(record, 1.0)  # fail early for a currency without a rate
    return partial(book.usd_of_hours, record)


def _standing(offer: RegionOffer, book: PriceBook) -> RentalPrice:
    parts: list[RentalPrice] = []
    if offer.server is not None:
        parts.append(_hourly(book, book.instance(offer.cloud, offer.at, offer.server)))
    if offer.disk is not None:
        monthly = book.usd_of_volume(book.disk(offer.cloud, offer.at, offer.disk), offer.disk_gb)
        parts.append(lambda hours, age_h=0.0: monthly * hours / _MONTH_H)
    return lambda hours, age_h=0.0: sum(part(hours, age_h) for part in parts)


_INTERVALS: Final = tuple(2**n for n in range(10))


def request_of(
    experiment: Experiment,
    size: ModelSize,
    rows: Mapping[str, float],
    book: PriceBook,
    links: LinkTable,
    profile: Profile | None = None,
    loss: LossProfile | None = None,
) -> Request:
    """Return the planning request.

    Args:
        experiment: the run, with a section `plan`.
        size: size of its model.
        rows: training rows by region.
        book: prices.
        links: links of every pair of regions.
        profile: measurements; numbers in the configuration have priority.
        loss: measured loss of intervals and codecs; None: assumed.

    Raises:
        ConfigError: the section `plan` is missing, lacks a region or a machine's speed, or the
            strategy cannot be planned.
        ProfileError: the profile has no steps of a region.
        PriceUnknownError: a price is unknown.
        CurrencyError: a price's currency has no rate.
        PlanInfeasibleError: residency rules contradict each other.
        ModelTooLargeError: a group does not fit into any of its machines.
    """
    plan = section_of(experiment)
    check_strategy(experiment)
    if experiment.groups and plan.batch_sizes is not None:
        raise ConfigError(
            "plan.batch_sizes: a group has the batch of `data.batch_size` on each rank",
            fix="Omit it, and plan with another data.batch_size.",
        )
    names = list(experiment.region_names)
    start = _start(plan, profile)
    intervals = _intervals(experiment, plan)
    work = JobWork(
        steps=experiment.train.steps * max(1, experiment.worker_steps),
        rows_per_step=sum(r.rows_per_step(experiment.data.batch_size) for r in experiment.regions),
        rows=_rows_by_region(experiment, rows),
        num_params=size.num_params,
        pattern=_pattern(experiment, intervals),
        startup_s=start.fixed_s,
        worker_start_s=start.worker_s,
        evaluations_s=evaluations_s(experiment, profile),
    )
    measured = step_models(experiment, profile)
    codecs = codecs_of(experiment, plan.codecs)
    hosts = allowed_averagers(plan.residency, names)
    preferred = experiment.averager_region
    if experiment.groups:
        hosts = [name for name in hosts if name == names[0]]
        if not hosts:
            raise PlanInfeasibleError(
                f"residency: region '{names[0]}' serves the run, as the first one, but may not "
                "receive the updates of all regions",
                fix="List a region first that may.",
            )
    return Request(
        work=work,
        sites=_sites(experiment, book, measured, size, codecs, profile),
        links=links,
        usd_per_gb=_egress(plan, names, book),
        averagers=sorted(hosts, key=lambda name: name != preferred),
        intervals=intervals,
        codecs=codecs,
        loss=AssumedLoss() if loss is None else MeasuredLoss.of(loss),
        loss_budget=plan.loss_budget,
        objective=plan.objective,
        limits=Limits(
            math.inf if plan.deadline_h is None else plan.deadline_h * HOUR_S,
            math.inf if plan.budget_usd is None else plan.budget_usd,
        ),
        overhead_s={} if profile is None else {p.codec: p.overhead_s for p in profile.exchanges},
        last_errors=last_errors(experiment),
        first_in_full=experiment.strategy.traits.sends == "model",
        state_every=experiment.train.state_every,
    )


def step_models(experiment: Experiment, profile: Profile | None) -> dict[str, StepModel]:
    """Return the measured step times by region; groups have none."""
    if profile is None or experiment.groups:
        return {}
    return {name: fit_steps(name, profile.steps) for name in experiment.region_names}


def _rows_by_region(experiment: Experiment, rows: Mapping[str, float]) -> dict[str, float]:
    """Return the rows that divide a step: those of the data, or of a step of the groups."""
    offers, batch_size = section_of(experiment).regions, experiment.data.batch_size
    if experiment.groups:
        return {each.name: float(each.rows_per_step(batch_size)) for each in experiment.regions}
    return {name: offers[name].rows or rows[name] for name in experiment.region_names}


def _sites(
    experiment: Experiment,
    book: PriceBook,
    measured: Mapping[str, StepModel],
    size: ModelSize,
    codecs: Sequence[str | None],
    profile: Profile | None,
) -> list[Site]:
    # A lossy codec holds more than none. The plan shows what its codec needs.
    largest = max(codecs, key=lambda codec: codec is not None) if experiment.groups else None
    exchange = group_exchange(experiment, largest) if experiment.groups else None
    found = []
    for region in experiment.regions:
        if region.group is not None and exchange is not None:
            group = region.group
            site = _group_site(region.name, experiment, group, book, size, exchange, profile)
        else:
            site = site_of(region.name, experiment, book, measured.get(region.name), size)
        found.append(site)
    return found


def stale_notes(experiment: Experiment, book: PriceBook, now_unix_s: float) -> list[str]:
    """Return notes about outdated prices."""
    plan = section_of(experiment)
    used = {record.key: record for record in _records(plan, book)}.values()
    old = [record for record in used if record.is_stale(now_unix_s)]
    if not old:
        return []
    oldest = age_text(max(record.age_s(now_unix_s) for record in old))
    return [f"{len(old)} prices are stale, the oldest of {oldest} ago: `geo-ray prices refresh`"]


def _records(plan: PlanConfig, book: PriceBook) -> Iterator[PriceRecord]:
    """Yield every price that a plan may use: machines, servers, disks, traffic."""
    for name, region in plan.regions.items():
        for machine in region.machines:
            for market in machine.markets:
                yield book.instance(region.cloud, region.at, machine.type, market)
        if region.server is not None:
            yield book.instance(region.cloud, region.at, region.server)
        if region.disk is not None:
            yield book.disk(region.cloud, region.at, region.disk)
        for other, there in plan.regions.items():
            if other != name:
                to = there.at if region.cloud == there.cloud else INTERNET
                yield book.egress(region.cloud, region.at, to)


def check_strategy(experiment: Experiment) -> None:
    """Reject strategies that the model of `JobWork` does not describe.

    Raises:
        ConfigError: the run ends at a total number of rows, and its regions take unequal numbers of
            steps.
    """
    if len(experiment.regions) > 1 and experiment.strategy.traits.region.ends_by_total_rows:
        raise ConfigError(
            f"strategy {experiment.strategy.kind} cannot be planned: its regions take unequal "
            "numbers of steps, but plans assume equal numbers",
            fix="Predict it with `geo-ray simulate`, or plan with another strategy.",
        )


def counts_of(plan: PlanConfig) -> Counts:
    """Return the machines of policy `fixed`."""
    return {
        name: {(m.type, m.markets[0]): m.count for m in region.machines if m.count}
        for name, region in plan.regions.items()
    }


def _start(plan: PlanConfig, profile: Profile | None) -> StartModel:
    if plan.startup_s is not None:
        return StartModel(plan.startup_s)
    if profile is None or not profile.starts:
        raise ConfigError(
            "plan.startup_s: null requires a measured profile",
            fix="Give the seconds from renting to the first step, or run `geo-ray profile`.",
        )
    return fit_start(profile.starts)


def evaluations_s(experiment: Experiment, profile: Profile | None, done: int = 0) -> float:
    """Return the seconds of all remaining evaluations, including one after the last step.

    Args:
        experiment: the run.
        profile: measurements.
        done: steps that a region has taken.
    """
    every, last = experiment.train.eval_every, experiment.train.steps - 1
    if profile is None:
        return 0.0
    between = last // every - min(done, last) // every if every else 0
    return (between + 1) * profile.evaluation_s


def _egress(
    plan: PlanConfig, names: Sequence[str], book: PriceBook
) -> dict[tuple[str, str], float]:
    found = {}
    for src in names:
        for dst in names:
            here, there = plan.regions[src], plan.regions[dst]
            if src == dst:
                continue
            if (here.cloud, here.at) == (there.cloud, there.at):
                raise PriceBookError(
                    f"plan.regions: '{src}' and '{dst}' are both in {here.cloud} {here.at}, but "
                    "traffic inside a region has no price here",
                    fix="Use a different cloud region for each region of the run, or merge the "
                    "two.",
                )
            to = there.at if here.cloud == there.cloud else INTERNET
            # Use the first tier, because the account's monthly traffic is unknown.
            found[src, dst] = book.usd_of_volume(book.egress(here.cloud, here.at, to), 1.0)
    return found


def _intervals(experiment: Experiment, plan: PlanConfig) -> list[int]:
    """Return the intervals in local steps.

    The option counts region steps, and one region step may be several local steps.
    """
    exchange, local = experiment.strategy.traits.exchange, max(1, experiment.worker_steps)
    present = exchange.interval
    if present is None:
        return [max(1, round(exchange.every * local))]
    choices = [present, *_INTERVALS] if plan.intervals is None else plan.intervals
    return [each * local for each in dict.fromkeys(choices)]


def _pattern(experiment: Experiment, intervals: Sequence[int]) -> Pattern:
    """Return the exchanges of the strategy for each interval, in local steps."""
    strategy, local = experiment.strategy, max(1, experiment.worker_steps)
    present = strategy.traits
    every, hidden = {}, {}
    own = present.exchange.interval  # the run may keep it, even if a new plan may not choose it
    for interval in [*intervals, *([] if own is None else [own * local])]:
        exchange = present.exchange
        if exchange.interval is not None and isinstance(strategy, BaseModel):
            changed = {"interval": max(1, interval // local)}
            exchange = strategy.model_copy(update=changed).traits.exchange
        every[interval] = exchange.every * local
        if exchange.hidden_steps is not None:
            hidden[interval] = min(exchange.hidden_steps, exchange.every) * local
    return Pattern(
        present.exchange.blocking,
        present.exchange.last,
        present.exchange.fragments,
        present.averager.bound,
        present.exchange.by_speed,
        present.in_rounds or present.averager.bound is not None,
        local,
        every,
        hidden,
    )


def codecs_of(experiment: Experiment, named: Sequence[str | None] | None) -> list[str | None]:
    """Return the codecs that a plan chooses from.

    Args:
        experiment: the run.
        named: codecs given by the user; None: the configured one and the usual ones.

    Raises:
        ConfigError: the compression of one of them is unknown.
    """
    if named is not None:
        unknown = [codec for codec in named if codec not in BITS_PER_PARAM]
        if unknown:
            known = ", ".join(str(codec) for codec in BITS_PER_PARAM)
            raise ConfigError(
                f"plan.codecs: the compression of {unknown[0]} is unknown",
                fix=f"Choose among {known}.",
            )
        return list(named)
    up = experiment.codec.up
    present = None if up is None else up.kind
    if present not in BITS_PER_PARAM:
        known = ", ".join(str(codec or "null") for codec in BITS_PER_PARAM)
        raise ConfigError(
            f"codec {present} cannot be planned: its compression and loss are unknown",
            fix=f"Set plan.codecs, to choose among {known}; or use `geo-ray simulate`.",
        )
    return list(dict.fromkeys([present, *BITS_PER_PARAM]))
