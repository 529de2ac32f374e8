"""The whole configuration of one run, composed from every owner's part."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from geo_ray.codecs.config import CodecConfig
from geo_ray.config.annotations import MessageWords
from geo_ray.config.auto import OR_AUTO
from geo_ray.config.base import StrictModel
from geo_ray.config.cluster import ClusterConfig, LocalClusterConfig
from geo_ray.config.emulate import EmulateConfig
from geo_ray.config.region import Name, RegionConfig, no_such_region, with_copies
from geo_ray.data.split import IidSplit, SplitConfig
from geo_ray.observe.metrics.summary import Target
from geo_ray.overlay.config import AnyOverlay, StarOverlay, regions_fit
from geo_ray.planning.config import PlanConfig
from geo_ray.strategies.common.collective import answers_with_mean, can_be_summed
from geo_ray.strategies.registry import AnyStrategy
from geo_ray.strategies.traits import (
    has_bound,
    has_equal_steps,
    keeps_time,
    needs_whole_model,
    worker_steps,
)
from geo_ray.tasks.load import TaskConfig
from geo_ray.training.compute.optimizers import OptimizerConfig
from geo_ray.training.server.stragglers import StragglersConfig, check_stragglers
from geo_ray.transfers.config import TransfersConfig
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.emulation.link_model import LinkSpec


class GenerateConfig(StrictModel):
    """Write the data of a self-contained task into the run directory at the start (for trials)."""

    split: SplitConfig = Field(IidSplit(), description="how rows are dealt to the regions")
    rows_per_shard: int = Field(1024, ge=1, description="rows per Parquet file")


class DataConfig(StrictModel):
    """Where the rows come from; exactly one of `manifest` and `generate`."""

    manifest: str | None = Field(None, description="path or s3:// address of a manifest")
    generate: GenerateConfig | None = Field(None, description="generate the task's own data")
    batch_size: int = Field(32, ge=1, description="rows per worker and step")
    cache_shards: int = Field(8, ge=1, description="decoded shards that a worker keeps in memory")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.manifest is None) == (self.generate is None):
            raise ValueError("give exactly one of `manifest` and `generate`")
        return self


class TrainConfig(StrictModel):
    """How long and how carefully to train."""

    steps: int = Field(ge=1, description="steps of every region (async: pushes per worker)")
    count: Literal["each", "together"] | None = Field(
        None,
        description="whether each region takes `steps`, or all together as many rows as that were; "
        "default: each, but together where regions take unequal numbers of steps between rounds",
    )
    mode: Literal["sync", "async"] = Field(
        "sync", description="inside a region: combine one gradient per worker, or apply each alone"
    )
    eval_every: int = Field(50, ge=0, description="steps between evaluations; 0: only at the end")
    eval_batch_size: int = Field(256, ge=1, description="rows per evaluation batch")
    evaluate: Literal["outer", "live"] = Field(
        "outer", description="the model that all regions agree on, or each region's own, mid-round"
    )
    clip_norm: float | None = Field(None, gt=0, description="largest norm of a worker's gradient")
    target: Target | None = Field(None, description="stop early when this is reached")
    stragglers: StragglersConfig | None = Field(
        None, description="do not wait for late workers of a region: spares, or coded gradients"
    )
    max_refused_steps: int = Field(3, ge=1, description="refused steps in a row that end the run")
    max_worker_restarts: int = Field(10, ge=0, description="replacements of workers in all")
    noise_every: int | None = Field(
        None, ge=1, description="steps between measurements of gradient noise; null: 16"
    )
    step_timeout_s: float | None = Field(
        None,
        gt=0,
        description="longest wait for one answer; null: 300 s, and the model both ways at 4 Mbit/s",
    )


class AveragerConfig(StrictModel):
    """Where the updates of the regions are combined."""

    region: str | None = Field(None, description="region whose bridge hosts it; default: the first")
    standby: str | None = Field(None, description="region that takes over when that one is lost")
    max_divergence: float = Field(
        0.0, ge=0, description="norm of updates that the standby may lack; 0: it has all that count"
    )
    takeover_s: float = Field(5.0, gt=0, description="how long it must be lost until then")
    rejoin_s: float = Field(30.0, gt=0, description="how long the lost region is waited for")


class CheckpointConfig(StrictModel):
    """When to save and how much to keep."""

    every_s: float | None = Field(60.0, gt=0, description="seconds between checkpoints; null: none")
    keep: int = Field(2, ge=2, description="how many to keep; the newest may be the broken one")


class RunConfig(StrictModel):
    """Where a run leaves its files."""

    dir: str = Field("runs", description="directory that holds one directory per run")


class Experiment(StrictModel):
    """Everything that decides what a run does. The same file trains, simulates and resumes."""

    name: Name = Field(description="name of the run and of its directory")
    seed: int = Field(0, ge=0, description="seed of model, data order and emulation")
    device: Annotated[
        str,
        Field(pattern=r"^(cpu|cuda(:\d+)?)$"),
        MessageWords("cpu, cuda, or cuda:N for the GPU N"),
    ] = Field("cpu", description="where workers compute")
    task: TaskConfig
    data: DataConfig
    regions: Annotated[tuple[RegionConfig, ...], AfterValidator(with_copies)] = Field(min_length=1)
    strategy: Annotated[AnyStrategy, OR_AUTO]
    codec: CodecConfig = CodecConfig()
    optimizer: OptimizerConfig
    train: TrainConfig
    averager: AveragerConfig = AveragerConfig()
    plan: PlanConfig | None = None
    transport: TransportConfig = TransportConfig()
    overlay: AnyOverlay = StarOverlay()
    transfers: TransfersConfig | None = None

    emulate: EmulateConfig | None = None
    cluster: ClusterConfig = LocalClusterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [region.name for region in self.regions]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"regions: {', '.join(twice)} is there more than once")
        for where, name in self._mentions():
            if name not in names:
                raise ValueError(no_such_region(where, name, names))
        if self.emulate is not None:
            self.emulate.check({region.name: region.workers for region in self.regions})
        self._check_overlay()
        self._check_standby()
        if self.transfers is not None:
            self._check_transfers(self.transfers)
        self.codec.check(self.strategy, f"strategy '{self.strategy.kind}'")
        if self.strategy.kind == "sparseloco" and self.codec.up is None and len(names) > 1:
            raise ValueError(
                "codec.up: strategy 'sparseloco' is `diloco` without its codec: give one, say "
                "{kind: chunked_topk}"
            )
        cut = [region.name for region in self.regions if region.ps_shards > 1]
        if needs_whole_model(self.strategy) and cut:
            raise ValueError(
                f"regions: strategy '{self.strategy.kind}' needs a model in one piece: set "
                f"ps_shards: 1 in {', '.join(cut)}"
            )
        if self.train.stragglers is not None:
            workers = {region.name: region.workers for region in self.regions}
            check_stragglers(self.train.stragglers, workers, self.train.mode)
            if any(region.batch_sizes for region in self.regions):
                raise ValueError("train.stragglers: spares and codes need batches of equal size")
        if self.train.count == "each" and not has_equal_steps(self.strategy) and len(names) > 1:
            raise ValueError(
                f"train.count: each region ends at its own time, but '{self.strategy.kind}' gives "
                "them unequal numbers of steps and needs all of them: use together"
            )
        unequal = len({region.workers for region in self.regions}) > 1
        if self.train.mode == "async" and self.strategy.in_rounds and unequal:
            raise ValueError(
                "train.mode: async gives regions with unequal workers unequal numbers of steps, "
                f"but strategy '{self.strategy.kind}' works in rounds of all regions; use equal "
                "workers, mode sync, or asgd, asgd_ga or ama"
            )
        if self.device != "cpu" and any(r.gpus_per_worker == 0 for r in self.regions):
            raise ValueError("device: cuda needs gpus_per_worker above 0 in every region")
        return self

    def _check_overlay(self) -> None:
        """Only plain sums pass through other regions."""
        kind, strategy = self.overlay.kind, self.strategy
        if kind == "star":
            return
        if not can_be_summed(strategy):
            raise ValueError(
                f"overlay.kind: {kind} sums the updates of a round on the way; strategy "
                f"'{strategy.kind}' is not made of such rounds: use bsp or sma, or overlay star"
            )
        if kind in ("ring", "netstorm") and not answers_with_mean(strategy):
            raise ValueError(
                f"overlay.kind: {kind} hands the mean itself out; strategy '{strategy.kind}' "
                "answers with something else: use tsengine"
            )
        coded = {"up": self.codec.up, "down": self.codec.down}
        for direction, codec in coded.items():
            if codec is not None:
                raise ValueError(
                    f"overlay.kind: {kind} adds updates up on the way, which what "
                    f"codec.{direction}: {codec.kind} makes of them does not allow: leave the "
                    "codec out, or use overlay star"
                )
        regions_fit(self.overlay, self.region_names)

    def _check_standby(self) -> None:
        """A standby repeats what the averager is told, in the same order, and nothing else."""
        averager = self.averager
        if averager.standby is None:
            if averager.max_divergence:
                raise ValueError(
                    "averager.max_divergence: it says how far a standby may be behind, and there "
                    "is none: give averager.standby, or leave it at 0"
                )
            return
        if averager.standby == self.averager_region:
            raise ValueError(
                f"averager.standby: {averager.standby} hosts the averager itself: name another "
                "region"
            )
        if self.overlay.kind != "star":
            raise ValueError(f"averager.standby: it needs overlay star, not {self.overlay.kind}")
        if self.codec.up is not None and self.codec.up.kind == "dgt":
            raise ValueError(
                "averager.standby: what dgt loses on the way would differ there: use another codec"
            )
        if keeps_time(self.strategy):
            raise ValueError(
                f"averager.standby: '{self.strategy.kind}' goes by the averager's clock, which a "
                "standby does not share"
            )
        if averager.max_divergence and has_bound(self.strategy):
            raise ValueError(
                "averager.max_divergence: with strategy.staleness.bound regions wait for each "
                "other, so the standby has every update first: leave it at 0"
            )
        if averager.max_divergence and self.strategy.in_rounds:
            raise ValueError(
                f"averager.max_divergence: a round of '{self.strategy.kind}' counts in every "
                "region or in none, so the standby has it first: leave it at 0"
            )

    def _check_transfers(self, transfers: TransfersConfig) -> None:
        """Turns are for updates that do not wait for each other."""
        strategy = self.strategy
        coded = self.codec.up is not None or self.codec.down is not None
        if strategy.in_rounds:
            raise ValueError(
                f"transfers: '{strategy.kind}' works in rounds, which end with their slowest "
                "update whatever the order: use an overlay"
            )
        if self.codec.up is not None and self.codec.up.kind == "dgt":
            raise ValueError(
                "transfers: codec dgt has its own order of sending: leave one of the two out"
            )
        if has_bound(strategy):
            raise ValueError(
                "strategy.staleness.bound: leave it out, transfers.max_staleness bounds the age of "
                "updates"
            )
        adds_up = hasattr(strategy, "combine")
        if transfers.max_staleness is not None and not adds_up:
            raise ValueError(
                f"transfers.max_staleness: what '{strategy.kind}' sends counts from the last "
                "answer, so that one that is dropped must not be added to the next: leave it out"
            )
        if not transfers.aggregate:
            return
        if not adds_up:
            raise ValueError(
                f"transfers.aggregate: updates of '{strategy.kind}' do not add up: leave it out"
            )
        if coded:
            raise ValueError("transfers.aggregate: coded updates do not add up; leave codecs out")
        if self.averager.standby is not None:
            raise ValueError("transfers.aggregate: sums are not replicated; leave out the standby")

    def _mentions(self) -> list[tuple[str, str]]:
        found = []
        if self.averager.region is not None:
            found.append(("averager.region", self.averager.region))
        if self.averager.standby is not None:
            found.append(("averager.standby", self.averager.standby))
        return found

    @property
    def counts_together(self) -> bool:
        """Whether the run ends when all regions together have seen `rows` rows."""
        if len(self.regions) == 1:
            return False
        uneven = not has_equal_steps(self.strategy)
        return self.train.count == "together" or (self.train.count is None and uneven)

    @property
    def worker_steps(self) -> int:
        """Local steps of a worker between two pushes; 0 if it pushes gradients."""
        return worker_steps(self.strategy) if len(self.regions) > 1 else 0

    @property
    def labels(self) -> tuple[str, ...]:
        """Regions of nodes, each once, in the order of the file."""
        return tuple(dict.fromkeys(region.label for region in self.regions))

    @property
    def rows(self) -> int:
        """Rows that `train.steps` steps of every region are."""
        per_step = sum(r.rows_per_step(self.data.batch_size) for r in self.regions)
        return self.train.steps * per_step * max(1, self.worker_steps)

    @property
    def eval_rows(self) -> int | None:
        """Rows of all regions between evaluations; None if regions count their own steps."""
        every = self.train.eval_every
        return self.rows * every // self.train.steps if self.counts_together and every else None

    @property
    def region_names(self) -> tuple[str, ...]:
        """Names in the order of the file."""
        return tuple(region.name for region in self.regions)

    @property
    def averager_region(self) -> str:
        """The region whose bridge hosts the averager."""
        return self.averager.region or self.regions[0].name

    def link(self, src: str, dst: str) -> LinkSpec | None:
        """The emulated link from ``src`` to ``dst``; None if it is not emulated."""
        if self.emulate is None or src == dst:
            return None
        for link in self.emulate.links:
            if (link.src, link.dst) == (src, dst):
                return LinkSpec(**link.model_dump(exclude={"src", "dst"}))
        label = self._label_of
        return None if label[src] == label[dst] else self.emulate.link

    @cached_property
    def _label_of(self) -> dict[str, str]:
        return {region.name: region.label for region in self.regions}

    def links(self) -> dict[tuple[str, str], LinkSpec]:
        """All emulated links by (source, destination)."""
        pairs = [(s, d) for s in self.region_names for d in self.region_names if s != d]
        specs = {(src, dst): self.link(src, dst) for src, dst in pairs}
        return {pair: spec for pair, spec in specs.items() if spec is not None}

    def step_s(self, region: str) -> float | None:
        """How long a step of the slowest worker of ``region`` is padded to; None: not at all."""
        if self.emulate is None or not self.emulate.paces(region):
            return None
        config = next(each for each in self.regions if each.name == region)
        rows = config.batch_sizes or (self.data.batch_size,) * config.workers
        return max(self.emulate.step_of(region, rank, each) for rank, each in enumerate(rows))

    def push_s(self, region: str, worker: int, start: int, rows: int) -> float | None:
        """How long what a worker does for one push is padded to; None for no padding.

        Args:
            region: where.
            worker: its rank.
            start: first row of the push; says whether it stalls.
            rows: of the push.
        """
        if self.emulate is None or not self.emulate.paces(region):
            return None
        steps = max(1, self.worker_steps)
        step_s = self.emulate.step_of(region, worker, rows / steps)
        return steps * step_s * self.emulate.stall(f"{self.seed}/{region}/{start}")
