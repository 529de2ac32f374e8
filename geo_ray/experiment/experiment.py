"""`Experiment`: the complete configuration of a run, composed of all sections.

The same file trains, simulates and resumes. Also defines the `strategy: {kind: auto}` section.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from geo_ray.base.model import Also, MessageWords, PathText, ProblemsError, StrictModel
from geo_ray.base.types import Span
from geo_ray.base.user_section import only_recorded
from geo_ray.data.split import IidSplit, SplitConfig
from geo_ray.data.tasks.load import TaskConfig
from geo_ray.experiment.autoscale import AutoscaleConfig
from geo_ray.experiment.checkpoint import CheckpointConfig
from geo_ray.experiment.cluster import ClusterConfig, LocalClusterConfig
from geo_ray.experiment.emulation import EmulateConfig, emulated_links
from geo_ray.experiment.provider import ProviderConfig
from geo_ray.experiment.recorded import RunConfig
from geo_ray.experiment.regions import (
    Name,
    RegionConfig,
    device_problems,
    no_such_region,
    with_copies,
)
from geo_ray.joining.rank import strategy_problems
from geo_ray.planner.config import PlanConfig
from geo_ray.strategies.config import AnyStrategy, CodecConfig, shards_problems
from geo_ray.telemetry.export.base import ObserveConfig
from geo_ray.training.config import (
    AUTO,
    AveragerConfig,
    ElasticConfig,
    MembersConfig,
    TrainConfig,
)
from geo_ray.training.optimizers import OptimizerConfig, Sgd, optimizer_problems
from geo_ray.transport.config import LanConfig, TransportConfig
from geo_ray.transport.emulation import LinkSpec
from geo_ray.transport.overlay.config import AnyOverlay, StarOverlay, overlay_problems
from geo_ray.transport.uploads import TransfersConfig


class AutoConfig(StrictModel):
    """Chooses strategy, interval and codec from measured links and steps."""

    kind: Literal["auto"] = "auto"
    loss_budget: float = Field(
        0.02, gt=0, lt=1, description="maximum relative increase of the loss in exchange for time"
    )
    links: str = Field(
        "links.json",
        description="link table written by `geo-ray probe`; unused with emulated links",
    )
    step_s: float | None = Field(
        None,
        gt=0,
        description="seconds of a step; null: measured on this machine with the task's data",
    )


OR_AUTO: Final = Also(
    AutoConfig, "which only `geo-ray train`, `simulate` and `config show` resolve to a strategy"
)
"""Marks the section that may also be an `AutoConfig`."""


class GenerateConfig(StrictModel):
    """Write the data of a self-contained task into the run directory at the start (for trials)."""

    split: SplitConfig = Field(IidSplit(), description="how rows are divided among the regions")
    rows_per_shard: int = Field(1024, ge=1, description="rows per Parquet file")


class DataConfig(StrictModel):
    """Source of the rows; exactly one of `manifest` and `generate`."""

    manifest: PathText | None = Field(None, description="path or s3:// address of a manifest")
    generate: GenerateConfig | None = Field(
        None, description="generate the data of a self-contained task"
    )
    batch_size: int = Field(32, ge=1, description="rows per worker and step")
    leave_out: tuple[str, ...] = Field(
        (), description="regions of the manifest that are not used for training"
    )
    cache_shards: int = Field(8, ge=1, description="decoded shards that a worker caches in memory")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.manifest is None and self.generate is None:
            raise ValueError("give `manifest` or `generate`")
        if self.manifest is not None and self.generate is not None:
            raise ValueError(
                "`manifest` and `generate` are mutually exclusive: set one of them to null"
            )
        return self


class ServeConfig(StrictModel):
    """Where a run is served to regions that join it."""

    host: str = Field("0.0.0.0", description="address to listen on")  # noqa: S104  (documented)
    port: int = Field(7447, ge=0, le=65535, description="port to listen on; 0: a free one")
    advertise: str | None = Field(
        None, description="name or IP of this machine for other regions; null: its own IP"
    )
    rows: int | None = Field(
        None, ge=1, description="rows of all regions, for strategies that end by rows"
    )
    lost_after_s: float = Field(
        20.0,
        gt=0,
        description="a region is lost, and the others continue, if one of its processes has had no "
        "connection for so long, to the serving process or to a holder of averagers",
    )
    holders: int = Field(
        1,
        ge=1,
        le=64,
        description="processes that hold the averagers, each those of one part of the model; other "
        "ones than the first listen on the next ports",
    )


OWN_LOOP: Final = "own_loop"
"""`task.use` of a run whose regions join: their loops have the task."""
_OWN_SECTIONS: Final = ("task", "data", "optimizer")
"""Sections that a run has unless its regions join."""
_SERVED: Final[Mapping[str, frozenset[str]]] = {
    "device": frozenset(),
    "averager": frozenset({"standby"}),
    "members": frozenset({"min", "wait_s"}),
    "plan": frozenset(),
    "autoscale": frozenset(),
    "lan": frozenset(),
    "overlay": frozenset(),
    "transfers": frozenset(),
    "emulate": frozenset(),
    "checkpoint": frozenset(
        {"every_s", "every_rounds", "keep", "part_timeout_s", "restarts", "store"}
    ),
    "train": frozenset({"steps", "eval_every", "target", "patience"}),
}
"""Sections that have no effect on a run whose regions join, but for the named keys."""
_GROUP_TRAIN: Final = frozenset({"max_worker_restarts", "restart_window_s"})
"""Further keys of `train` where geo_ray starts groups."""
_TASK_TRAIN: Final = frozenset({"accumulate", "eval_batch_size", "clip_mean_norm"})
"""Further keys of `train` where groups train the task."""
_JOINED_PLAN: Final = (
    "plan: a region with `join: true` has machines and a loop of its own, which cannot be planned; "
    "omit it. Only `compute_fraction` of `diloco` adapts the interval there"
)
_RESERVED: Final = "geo-ray-"
_LAST_PORT: Final = 65535
_SERVED_REGION: Final = frozenset({"name", "at", "copies", "join", "group", "cpus_per_server"})
"""Keys of a region that joins, or that is a group."""


def _without_effect(section: StrictModel, allowed: frozenset[str]) -> dict[str, Any]:
    """Return the keys of a section that differ from their default, with the default."""
    defaults = {
        name: key.get_default(call_default_factory=True)
        for name, key in type(section).model_fields.items()
        if name not in allowed and not key.is_required()
    }
    return {name: each for name, each in defaults.items() if getattr(section, name) != each}


class Experiment(StrictModel):
    """The configuration of a run. The same file trains, simulates and resumes."""

    name: Name = Field(description="name of the run and of its directory")
    seed: int = Field(0, ge=0, description="random seed of model, data order and emulation")
    device: Annotated[
        str,
        Field(pattern=r"^(cpu|cuda(:\d+)?)$"),
        MessageWords("cpu, cuda, or cuda:N for the GPU N"),
    ] = Field("cpu", description="device of the workers")
    task: TaskConfig = TaskConfig(use=OWN_LOOP)
    data: DataConfig = DataConfig(manifest=None, generate=GenerateConfig())
    regions: Annotated[tuple[RegionConfig, ...], AfterValidator(with_copies)] = Field(min_length=1)
    strategy: Annotated[AnyStrategy, OR_AUTO]
    codec: CodecConfig = CodecConfig()
    optimizer: OptimizerConfig = Sgd(lr=1.0)
    train: TrainConfig
    averager: AveragerConfig = AveragerConfig()
    members: MembersConfig = MembersConfig()
    plan: PlanConfig | None = None
    autoscale: AutoscaleConfig | None = None
    provider: ProviderConfig | None = None
    transport: TransportConfig = TransportConfig()
    lan: LanConfig = LanConfig()
    overlay: AnyOverlay = StarOverlay()
    transfers: TransfersConfig | None = None

    emulate: EmulateConfig | None = None
    cluster: ClusterConfig = LocalClusterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunConfig = RunConfig()
    observe: ObserveConfig = ObserveConfig()
    serve: ServeConfig | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Report all problems; those between sections only if the names of regions are valid."""
        mixed = self._mixed()
        if mixed:
            raise ValueError(mixed)
        supported, found = self._supported() if self.is_served else (self, [])
        own, names = self._own_section_problems(), supported._name_problems()
        found += [*names, *self._region_problems(), *own.values()]
        if not names and not only_recorded(self.strategy, self.codec.up, self.codec.down):
            found += supported._section_problems(own)
        if found:
            raise ProblemsError(found)
        return self

    def _mixed(self) -> str:
        """Return the problem that some regions join and others do not, or ""."""
        rest = [region for region in self.regions if not region.is_joined]
        if len(rest) in (0, len(self.regions)):
            return ""
        names = ", ".join(region.name for region in rest)
        group = f"{{ranks_per_node: {rest[0].workers}, sharding: ddp}}"
        return (
            "regions: either all regions have `join: true` or a `group`, or none has; "
            f"{names} {'has' if len(rest) == 1 else 'have'} neither. A region that geo_ray "
            f"starts next to joining ones is a group: `group: {group}` replaces `workers` of "
            f"'{rest[0].name}'"
        )

    def _region_problems(self) -> list[str]:
        """Return the problems of keys that depend on the kind of the regions."""
        found = []
        if self.serve is not None and not self.is_served:
            found.append("serve: no region joins; set `join: true` or `group` for each")
        reserved = [name for name in self.region_names if name.startswith(_RESERVED)]
        if self.is_served and reserved:
            found.append(
                f"regions: '{reserved[0]}': names that begin with '{_RESERVED}' are those of the "
                f"run's own processes {self._served_where}"
            )
        if self.checkpoint.every_rounds is not None and not self.is_served:
            found.append(
                "checkpoint.every_rounds: only where regions join or are groups; set every_s"
            )
        return found

    def _own_section_problems(self) -> dict[str, str]:
        """Return the problems of sections that only runs without loops of users have, by name."""
        found = {}
        is_needed = any(region.trains_task for region in self.regions)
        for name in _OWN_SECTIONS:
            is_given = name in self.model_fields_set
            if not is_given and is_needed:
                found[name] = f"{name}: missing; it is required"
            is_default = getattr(self, name) == type(self).model_fields[name].default
            if is_given and not is_needed and not is_default:
                joining = "regions that join have their own, and so have groups"
                whose = "groups" if self._has_only_groups else joining
                found[name] = f"{name}: {whose} with a `loop`; omit it"
        return found

    def _name_problems(self) -> list[str]:
        """Return names of regions that are not unique, and keys that name no region."""
        names = self.region_names
        twice = sorted({name for name in names if names.count(name) > 1})
        found = [f"regions: {', '.join(twice)} is listed more than once"] if twice else []
        return found + [
            no_such_region(at, name, names) for at, name in self._mentions() if name not in names
        ]

    def _supported(self) -> tuple[Self, list[str]]:
        """Return the experiment without what a run whose regions join does not support.

        Returns:
            The experiment, and a problem for each key that it lacks.
        """
        advice = f"not supported {self._served_where}; omit it"
        found = [
            f"regions: {key} of '{region.name}': {advice}"
            for region in self.regions
            for key in _without_effect(region, _SERVED_REGION)
        ]
        changes: dict[str, Any] = {}
        for name, allowed in _SERVED.items():
            if name == "plan" and self.knows_task:
                continue
            if name == "members" and self.knows_task:
                allowed |= {"follow_plan"}
            if name == "train":
                allowed |= _GROUP_TRAIN if self.groups else frozenset()
                allowed |= _TASK_TRAIN if self.task_regions else frozenset()
            value, default = getattr(self, name), type(self).model_fields[name].default
            if isinstance(value, StrictModel) and (allowed or type(value) is type(default)):
                unused = _without_effect(value, allowed)
                found += [f"{name}.{key}: {advice}" for key in unused]
                changes[name] = value.model_copy(update=unused)
            elif value != default:
                found.append(self._plan_problem if name == "plan" else f"{name}: {advice}")
                changes[name] = default
        if self.train.keep_best is not None and self.train.patience is not None:
            watched = "`train.patience` watches the metric of `train.target`, else `loss`"
            found[found.index(f"train.keep_best: {advice}")] += f". {watched}"
        if self.codec.up is not None and self.codec.up.traits.differential is not None:
            found.append(f"codec.up: {self.codec.up.kind} is {advice}")
            changes["codec"] = self.codec.model_copy(update={"up": None})
        if self.averager.standby not in {None, AUTO}:
            found.append(
                f"averager.standby: {self._served_where}, the standby is a process of the run's "
                "own cluster, on another node if there is one: set auto"
            )
            changes["averager"] = changes["averager"].model_copy(update={"standby": AUTO})
        return self.model_copy(update=changes), found

    @property
    def _plan_problem(self) -> str:
        """Why a run with loops of users has no section `plan`."""
        if any(region.join for region in self.regions):
            return _JOINED_PLAN
        own = [region.name for region in self.groups if not region.trains_task]
        have = "has a training loop of its own" if len(own) == 1 else "have a training loop each"
        return (
            f"plan: {', '.join(own)} {have}, so the size of the model and the rows of a step are "
            "unknown before the run, and it cannot be planned; omit it"
        )

    def _section_problems(self, wrong: Collection[str]) -> Iterator[str]:
        """Yield problems of sections with those that they depend on.

        Args:
            wrong: sections that are missing, or may not be there.
        """
        strategy, codec, averager = self.strategy, self.codec, self.averager
        workers = {region.name: region.workers for region in self.regions}
        shards = {region.name: region.ps_shards for region in self.regions}
        has_standby, has_transfers = averager.standby is not None, self.transfers is not None
        hosts = (self.averager_region, averager.standby)
        is_even = not any(region.batch_sizes for region in self.regions)
        kind = self.overlay.kind
        if self.is_served:
            yield from self._loop_problems()
        if self.emulate is not None:
            yield from self.emulate.problems(workers)
        yield from overlay_problems(self.overlay, self.region_names, strategy, codec)
        yield from averager.problems(self.averager_region, kind, strategy, codec)
        if self.transfers is not None:
            yield from self.transfers.problems(strategy, codec, has_standby=has_standby)
        yield from self.members.problems(shards, hosts, kind, codec, has_transfers=has_transfers)
        yield from codec.problems(strategy, len(workers))
        yield from shards_problems(strategy, shards)
        if "optimizer" not in wrong:
            needed = strategy.traits.region.needs_optimizer if len(workers) > 1 else None
            yield from optimizer_problems(self.optimizer, shards, needed)
            if self.optimizer.kind == "task":
                yield from self._task_steps_problems(workers)
        yield from self.train.problems(strategy, workers, even=is_even)
        fewest = min(
            (min(r.batch_sizes or (self.data.batch_size,)) for r in self.task_regions),
            default=self.train.accumulate,
        )
        if self.train.accumulate > fewest and "data" not in wrong:
            yield (
                f"train.accumulate: {self.train.accumulate} micro-batches, but a worker has "
                f"{fewest} rows per step: set at most that, or raise data.batch_size"
            )
        yield from device_problems(self.device, self.regions)
        yield from self.run.problems(keeps_best=self.train.keep_best is not None)

    def _loop_problems(self) -> Iterator[str]:
        """Yield why the strategy does not fit regions that join or are groups."""
        strategy = self.strategy
        yield from strategy_problems(strategy)
        is_endless = self.served_at.rows is None and not self.knows_task
        if strategy.traits.region.ends_by_total_rows and is_endless:
            yield (
                f"serve.rows: missing; strategy {strategy.kind} ends by rows, and the loops have "
                "the data: set it to the rows that all regions train on together"
            )
        if self.served_at.rows is not None and not strategy.traits.region.ends_by_total_rows:
            yield f"serve.rows: strategy {strategy.kind} ends by steps; omit it"
        port, processes = self.served_at.port, len(self.served_ports)
        if port + processes - 1 > _LAST_PORT:
            yield (
                f"serve.port: the {processes} processes that regions connect to listen on ports "
                f"from {port} to {port + processes - 1}: set it to at most "
                f"{_LAST_PORT - processes + 1}"
            )

    def _task_steps_problems(self, workers: Mapping[str, int]) -> Iterator[str]:
        """Yield what does not fit steps that the task makes."""
        where, strategy = "optimizer.kind: task", self.strategy
        if self.groups:
            yield f"{where}: groups have a `loop` for own optimizers: set it"
            return
        for name, count in workers.items():
            if count > 1:
                yield (
                    f"{where}: the task makes its steps in one worker per region, and {name} has "
                    f"{count}: set workers: 1"
                )
        for key in ("stragglers", "elastic"):
            if getattr(self.train, key) is not None:
                yield f"{where}: train.{key} needs several workers: remove the section"
        if self.train.mode == "async":
            yield f"{where}: train.mode async sends every gradient: use sync"
        if len(workers) > 1 and not strategy.traits.region.local_optimizer:
            yield (
                f"{where}: '{strategy.kind}' does more with a gradient than a local step: use a "
                "strategy with local training, such as diloco or sma"
            )

    def _mentions(self) -> list[tuple[str, str]]:
        found = []
        if self.averager.region is not None:
            found.append(("averager.region", self.averager.region))
        if self.averager.standby not in {None, AUTO}:
            found.append(("averager.standby", str(self.averager.standby)))
        if self.autoscale is not None:
            found += [("autoscale.zones", name) for name in self.autoscale.zones]
        found += [("averager.next_standbys", name) for name in self.averager.next_standbys]
        if self.provider is not None and self.provider.head.region is not None:
            found.append(("provider.head.region", self.provider.head.region))
        if self.checkpoint.store_region is not None:
            found.append(("checkpoint.store_region", self.checkpoint.store_region))
        found += [("checkpoint.region_stores", name) for name in self.checkpoint.region_stores]
        return found

    @property
    def is_served(self) -> bool:
        """Whether the regions exchange parameters as `geo_ray.join` does; groups do so, too."""
        return self.regions[0].is_joined

    @property
    def groups(self) -> tuple[RegionConfig, ...]:
        """The regions that are process groups which geo_ray starts."""
        return tuple(region for region in self.regions if region.group is not None)

    @property
    def _has_only_groups(self) -> bool:
        return len(self.groups) == len(self.regions)

    @property
    def _served_where(self) -> str:
        """Words for messages about a run whose regions join or are groups."""
        if self._has_only_groups:
            return "where regions are groups"
        return "where regions join or are groups" if self.groups else "where regions join"

    @property
    def served_at(self) -> ServeConfig:
        """Where the run is served; groups are told the address, so that any port will do."""
        if self.serve is not None:
            return self.serve
        return ServeConfig(port=0) if self._has_only_groups else ServeConfig()

    @property
    def task_regions(self) -> tuple[RegionConfig, ...]:
        """The regions in which geo_ray trains the task."""
        return tuple(region for region in self.regions if region.trains_task)

    @property
    def knows_task(self) -> bool:
        """Whether geo_ray trains the task in all regions."""
        return len(self.task_regions) == len(self.regions)

    @property
    def first_standby(self) -> str | None:
        """The averager's standby region at the start, or None."""
        return self.averager.first_standby(self.averager_region, self.present_names)

    @property
    def counts_total_rows(self) -> bool:
        """Whether the run ends after a total of `rows` rows over all regions."""
        if len(self.regions) == 1:
            return False
        if self.train.count is not None:
            return self.train.count == "total"
        return self.strategy.traits.region.ends_by_total_rows

    @property
    def worker_steps(self) -> int:
        """Local steps of a worker between two pushes; 0 if workers push gradients."""
        return self.strategy.traits.region.worker_steps if len(self.regions) > 1 else 0

    @property
    def served_ports(self) -> dict[str, int]:
        """Ports at which regions join, by process; 0: a free one."""
        served = self.served_at
        names = [
            "averager",
            *(f"holder {number + 1}" for number in range(1, served.holders)),
            *(["standby"] if self.averager.standby is not None else []),
        ]
        return {name: served.port and served.port + number for number, name in enumerate(names)}

    @property
    def optimizer_places(self) -> dict[str, str]:
        """Whether a region's server or its workers have the optimizer, where geo_ray trains."""
        own = self.worker_steps > 0
        return {
            region.name: "worker" if own or self.owns_steps(region.workers) else "server"
            for region in self.regions
            if not region.is_joined
        }

    def state_every(self, region: RegionConfig) -> int:
        """Return after how many steps a worker sends its state; 0: its server makes the steps."""
        return self.train.state_every if self.owns_steps(region.workers) else 0

    def owns_steps(self, workers: int) -> bool:
        """Tell whether the workers of a region with so many make the optimizer's steps."""
        is_task = self.optimizer.kind == "task"
        return is_task or self.train.workers_own_steps(self.strategy, len(self.regions), workers)

    def elastic(self, region: RegionConfig) -> ElasticConfig | None:
        """Return how a region continues without some of its workers; None: it waits for them."""
        if self.state_every(region) and region.workers > 1:
            return ElasticConfig(batch="follows")
        return self.train.elastic

    @property
    def labels(self) -> tuple[str, ...]:
        """Region labels of nodes without duplicates, in the order of the file.

        Regions that join need no nodes: the averager runs on a node of the first one.
        """
        with_nodes = (*self.regions[:1], *self.groups) if self.is_served else self.regions
        return tuple(dict.fromkeys(region.label for region in with_nodes))

    @property
    def rows(self) -> int:
        """Total rows of `train.steps` steps of every region."""
        per_step = sum(r.rows_per_step(self.data.batch_size) for r in self.regions)
        return self.train.steps * per_step * max(1, self.worker_steps)

    @property
    def eval_rows(self) -> int | None:
        """Total rows between evaluations; None if each region counts its steps."""
        every = self.train.eval_every
        return self.rows * every // self.train.steps if self.counts_total_rows and every else None

    @property
    def statistics_spans(self) -> tuple[Span, ...]:
        """Row ranges of a region's stream over which running statistics are recomputed."""
        rows = self.data.batch_size
        return tuple(Span(i * rows, rows) for i in range(self.train.statistics_batches))

    @property
    def region_names(self) -> tuple[str, ...]:
        """Names of the regions, in the order of the file."""
        return tuple(region.name for region in self.regions)

    @property
    def present(self) -> tuple[RegionConfig, ...]:
        """Regions that take part from the start, in the order of the file."""
        return tuple(each for each in self.regions if each.name not in self.members.absent)

    @property
    def present_names(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(region.name for region in self.present)

    @property
    def averager_region(self) -> str:
        """The region whose bridge hosts the averager."""
        return self.averager.region or self.regions[0].name

    def links(self) -> Mapping[tuple[str, str], LinkSpec]:
        """All emulated links by (source, destination)."""
        return emulated_links(self.emulate, self.regions)

    def step_s(self, region: str) -> float | None:
        """Return the padded step time of the slowest worker of ``region``; None: no padding."""
        if self.emulate is None or not self.emulate.paces(region):
            return None
        config = next(each for each in self.regions if each.name == region)
        rows = config.batch_sizes or (self.data.batch_size,) * config.workers
        return max(self.emulate.step_of(region, rank, each) for rank, each in enumerate(rows))

    def push_s(self, region: str, worker: int, start: int, rows: int) -> float | None:
        """Return the padded duration of a worker's computation for one push; None: no padding.

        Args:
            region: region of the worker.
            worker: rank of the worker.
            start: first row of the push; selects whether the step stalls.
            rows: rows of the push.
        """
        if self.emulate is None or not self.emulate.paces(region):
            return None
        steps = max(1, self.worker_steps)
        step_s = self.emulate.step_of(region, worker, rows / steps)
        return steps * step_s * self.emulate.stall(f"{self.seed}/{region}/{start}")
