"""Configuration sections `train`, `averager` and `members`, and the timeouts they imply.

Elastic batches: with ``batch: fixed`` a step keeps its rows and present workers compute the
missing partitions, bit for bit the same result; with ``batch: follows`` a step has the rows of
the present workers and ``rate`` scales the learning rate. Source: EasyScale (Li et al., SC
2023); linear rule of Goyal et al. (2017).

Timeouts: without ``train.step_timeout_s`` waits are unbounded and end on a failure or a
detected stall. With it, the bridge gives up first, then the primary shard, then the worker, so
the error names the region and the phase.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Final, Literal

from pydantic import Field

from geo_ray.base.model import MessageWords, StrictModel
from geo_ray.strategies.base import Strategy
from geo_ray.strategies.config import CodecConfig
from geo_ray.strategies.traits import Traits
from geo_ray.telemetry.summary import KeepBest, Target
from geo_ray.training.stragglers import StragglersConfig, stragglers_problems

_INNER_RATE: Final = "optimizer.lr"


class ElasticConfig(StrictModel):
    """Continue without lost or terminated workers until they are replaced."""

    min_workers: int = Field(
        1,
        ge=1,
        description="workers below which a region pauses; a region with fewer configured "
        "workers needs all",
    )
    batch: Literal["fixed", "follows"] = Field(
        "fixed",
        description="fixed: the remaining workers compute all rows; follows: only their own "
        "partitions",
    )
    rate: Literal["same", "linear"] = Field(
        "same",
        description="learning rate in steps of fewer rows: unchanged, or in proportion to the rows",
    )

    def least(self, ranks: int) -> int:
        """Workers that a region of ``ranks`` needs."""
        return min(self.min_workers, ranks)

    def problems(
        self, kind: str, traits: Traits, workers: Mapping[str, int], *, mode: str, stragglers: bool
    ) -> Iterator[str]:
        """Yield what is wrong with the section in this run.

        Args:
            kind: strategy's kind.
            traits: strategy's traits.
            workers: workers by region.
            mode: `train.mode`.
            stragglers: whether steps may exclude late workers.
        """
        where = "train.elastic"
        if stragglers:
            yield (
                f"{where}: train.stragglers also lets steps exclude late workers: "
                "set only one of the two"
            )
        if self.min_workers > max(workers.values()):
            yield f"{where}.min_workers: no region has more than {max(workers.values())} workers"
        if self.batch == "follows" and mode == "async":
            yield (
                f"{where}.batch: with train.mode async each push is a separate step: remove the key"
            )
        if self.rate == "same":
            return
        if self.batch == "fixed":
            yield f"{where}.rate: with batch fixed a step always has the same rows: remove the key"
            return
        inside = traits.region.rate_key == _INNER_RATE and not traits.region.worker_steps
        if len(workers) > 1 and not inside:
            yield (
                f"{where}.rate: '{kind}' does not train with {_INNER_RATE} at the parameter "
                "server: use same"
            )


class TrainConfig(StrictModel):
    """Length of the training and its rules."""

    steps: int = Field(
        ge=1, le=10**12, description="steps of every region; with mode async, pushes per worker"
    )
    count: Literal["each", "total"] | None = Field(
        None,
        description="each: every region takes `steps` steps; total: the run ends once the rows of "
        "all regions reach the number that `steps` steps of every region take; null: total where "
        "regions take unequal numbers of steps between rounds, else each",
    )
    mode: Literal["sync", "async"] = Field(
        "sync",
        description="sync: combine one gradient per worker into a step; async: apply each push "
        "as a step",
    )
    eval_every: int = Field(
        50, ge=0, le=10**12, description="steps between evaluations; 0: only at the end"
    )
    eval_batch_size: int = Field(256, ge=1, description="rows per evaluation batch")
    evaluate: Literal["outer", "live"] = Field(
        "outer",
        description="outer: the model that all regions agree on; live: each region's own, also "
        "within a round",
    )
    statistics_batches: int = Field(
        16,
        ge=0,
        description="batches per region from which running statistics are computed for the "
        "final model and its evaluation; 0: keep those of the training steps",
    )
    accumulate: int = Field(
        1,
        ge=1,
        le=2**16,
        description="micro-batches into which a worker splits the rows of a step; their gradients "
        "are accumulated to the mean over all rows",
    )
    clip_norm: float | None = Field(None, gt=0, description="largest norm of a worker's gradient")
    clip_mean_norm: float | None = Field(
        None, gt=0, description="largest norm of the mean of a region's gradients in a step"
    )
    target: Target | None = Field(None, description="stop early when this is reached")
    patience: int | None = Field(
        None,
        ge=1,
        description="stop early after this many evaluations of all regions in a row without an "
        "improvement of the metric of `keep_best`, else of `target`, else of `loss`; null: never. "
        "Where regions join, of `target` or `loss`",
    )
    keep_best: KeepBest | None = Field(
        None, description="store the best evaluated model in addition to the last one"
    )
    stragglers: StragglersConfig | None = Field(
        None,
        description="do not wait for late workers of a region: spare workers or coded gradients",
    )
    optimizer_on: Literal["auto", "server", "worker"] = Field(
        "auto",
        description="worker: workers keep parameters and optimizer on their devices and send them "
        "when an exchange is due; several workers of a region are then averaged; server: every "
        "step moves gradients and parameters; auto: worker in regions with one worker if the "
        "results surely are the same and not every step ends with an exchange, else server",
    )
    state_every: int = Field(
        100,
        ge=1,
        description="with optimizer_on worker, steps after which a worker sends its state to its "
        "server at the latest: its replacement repeats the steps since then",
    )
    max_refused_steps: int = Field(3, ge=1, description="refused steps in a row that end the run")
    elastic: ElasticConfig | None = Field(
        None, description="continue while workers are missing; null: a step waits for each of them"
    )
    max_worker_restarts: int = Field(
        10, ge=0, description="largest number of worker replacements within `restart_window_s`"
    )
    restart_window_s: float | None = Field(
        3600.0,
        gt=0,
        description="window in which `max_worker_restarts` counts; null: the whole run",
    )
    noise_every: int | None = Field(
        None, ge=1, description="steps between measurements of gradient noise; null: 16"
    )
    step_timeout_s: float | None = Field(
        None,
        gt=0,
        description="longest wait for the training of others; null: no limit while their "
        "processes and links live, but a worker that takes more than 20 times as long as usual, "
        "and more than a minute, is replaced",
    )

    @property
    def watched(self) -> KeepBest:
        """The metric whose improvements `patience` watches."""
        if self.keep_best is not None:
            return self.keep_best
        if self.target is None:
            return KeepBest(metric="loss", mode="min")
        mode: Literal["min", "max"] = "max" if self.target.direction == "at_least" else "min"
        return KeepBest(metric=self.target.metric, mode=mode)

    def workers_own_steps(self, strategy: Strategy, regions: int, workers: int) -> bool:
        """Tell whether the workers of a region make the optimizer's steps instead of its server.

        Args:
            strategy: strategy.
            regions: number of regions.
            workers: workers of this one.
        """
        traits = strategy.traits
        if self.optimizer_on == "server" or (regions > 1 and traits.region.worker_steps):
            return False
        if self.optimizer_on == "worker":
            return workers == 1 or regions > 1
        if workers > 1 or self.elastic or self.stragglers or self.mode == "async":
            return False
        exchange = traits.exchange
        waits = traits.in_rounds and exchange.blocking == "always" and exchange.every > 1
        return regions == 1 or (traits.region.local_optimizer and waits)

    def problems(
        self, strategy: Strategy, workers: Mapping[str, int], *, even: bool
    ) -> Iterator[str]:
        """Yield what does not fit the regions and their strategy, naming the key.

        Args:
            strategy: strategy.
            workers: workers by region.
            even: whether all workers of a region have equal batch sizes.
        """
        if self.stragglers is not None:
            yield from stragglers_problems(self.stragglers, workers, self.mode)
            if not even:
                yield "train.stragglers: spares and codes need batches of equal size"
        if self.elastic is not None:
            yield from self.elastic.problems(
                strategy.kind,
                strategy.traits,
                workers,
                mode=self.mode,
                stragglers=self.stragglers is not None,
            )
        if self.keep_best is not None and self.eval_every == 0:
            yield (
                "train.keep_best: with train.eval_every 0 nothing is evaluated before the end, and "
                "the last model would be the best; set train.eval_every to some steps"
            )
        if self.patience is not None and self.eval_every == 0:
            yield (
                "train.patience: with train.eval_every 0 nothing is evaluated before the end; set "
                "train.eval_every to some steps"
            )
        if self.optimizer_on == "worker":
            yield from self._worker_optimizer_problems(strategy, workers)
        traits = strategy.traits
        if len(workers) == 1:
            return
        if self.clip_mean_norm is not None and traits.region.worker_steps:
            yield (
                f"train.clip_mean_norm: workers of '{strategy.kind}' push changes of several steps "
                "and no gradients; use clip_norm, which clips each of these steps"
            )
        if self.count == "each" and traits.region.ends_by_total_rows:
            yield (
                "train.count: with each, regions end at different times, but "
                f"'{strategy.kind}' needs all regions until the end: use total"
            )
        if self.mode == "async" and traits.in_rounds and len(set(workers.values())) > 1:
            yield (
                "train.mode: async gives regions with unequal workers unequal numbers of steps, "
                f"but strategy '{strategy.kind}' works in rounds of all regions; use equal "
                "workers, mode sync, or a strategy without rounds such as asgd_ga"
            )

    def _worker_optimizer_problems(
        self, strategy: Strategy, workers: Mapping[str, int]
    ) -> Iterator[str]:
        where = "train.optimizer_on"
        if len(workers) > 1 and strategy.traits.region.worker_steps:
            return  # its workers make local steps in any case
        reasons = [
            f"with train.{key} a step needs the gradients of several workers"
            for key in ("stragglers", "elastic")
            if getattr(self, key) is not None
        ]
        if self.mode == "async":
            reasons.append("train.mode async sends every gradient")
        if len(workers) > 1 and not strategy.traits.region.local_optimizer:
            reasons.append(
                f"'{strategy.kind}' does more with a gradient than a step of the optimizer"
            )
        if len(workers) == 1 and max(workers.values()) > 1:
            reasons.append("the workers of one region exchange gradients in each step")
        if reasons:
            yield f"{where}: {', and '.join(reasons)}: use server"
        if len(workers) == 1 or max(workers.values()) == 1:
            return
        if self.clip_mean_norm is not None:
            yield (
                "train.clip_mean_norm: workers of a region that make the optimizer's steps have no "
                f"mean gradient: use clip_norm, or {where} server"
            )


AUTO: Final = "auto"
"""Placeholder for a region's name: any region may be the standby."""


class AveragerConfig(StrictModel):
    """Averager's region and standbys."""

    region: str | None = Field(
        None, description="region whose bridge hosts the averager; default: the first"
    )
    standby: Annotated[str, MessageWords("auto, the name of a region")] | None = Field(
        None,
        description="region that takes over if `region` is lost; auto: any region, or where "
        "regions join or are groups, a process of the run's own cluster",
    )
    next_standbys: tuple[str, ...] = Field(
        (),
        description="regions that become the next standby after a failover, in order of "
        "preference; then the nearest",
    )
    max_divergence: float = Field(
        0.0,
        ge=0,
        description="largest total norm of the updates that the standby may lack; 0: an update is "
        "answered only when the standby has it; must be 0 for strategies with rounds",
    )
    failover_s: float = Field(
        5.0,
        gt=0,
        description="time without a connection to the averager after which the standby takes over",
    )
    rejoin_s: float = Field(
        30.0,
        gt=0,
        description="time that a lost averager's region may take to return; then the run "
        "continues without its data",
    )

    @property
    def named_standbys(self) -> tuple[str, ...]:
        """Configured standbys, best first."""
        first = () if self.standby in {None, AUTO} else (str(self.standby),)
        return (*first, *self.next_standbys)

    def first_standby(self, host: str, present: Sequence[str]) -> str | None:
        """Return the standby at the start; None without one.

        Args:
            host: averager's region.
            present: present regions.
        """
        if self.standby is None:
            return None
        able = [name for name in (*self.named_standbys, *present) if name in present]
        return next((name for name in able if name != host), None)

    def problems(
        self, host: str, overlay: str, strategy: Strategy, codec: CodecConfig
    ) -> Iterator[str]:
        """Yield why the standby cannot repeat the averager's inputs in the same order.

        Args:
            host: averager's region.
            overlay: kind of overlay.
            strategy: strategy.
            codec: codecs.
        """
        if self.standby is None:
            if self.next_standbys:
                yield (
                    "averager.next_standbys: requires a first standby: set averager.standby, or "
                    "remove the key"
                )
            if self.max_divergence:
                yield (
                    "averager.max_divergence: requires a standby: set averager.standby, or leave "
                    "it at 0"
                )
            return
        traits = strategy.traits
        if host in self.named_standbys:
            key = "standby" if host == self.standby else "next_standbys"
            yield f"averager.{key}: {host} hosts the averager itself: name another region"
        if len(set(self.named_standbys)) < len(self.named_standbys):
            yield "averager.next_standbys: name each region once"
        if overlay != "star":
            yield f"averager.standby: requires overlay star, not {overlay}"
        if codec.up is not None and codec.up.traits.differential is not None:
            yield (
                f"averager.standby: not supported with codec {codec.up.kind}, whose lost blocks "
                "would differ at the standby: use another codec"
            )
        if self.max_divergence and traits.averager.bound is not None:
            yield (
                "averager.max_divergence: with strategy.staleness.bound regions wait for each "
                "other, so the standby has every update first: leave it at 0"
            )
        elif self.max_divergence and traits.in_rounds:
            yield (
                f"averager.max_divergence: not used by '{strategy.kind}', whose standby receives "
                "each round before it counts: leave it at 0"
            )


class MembersConfig(StrictModel):
    """Which losses of regions a run survives, and which regions are not there from the start."""

    min: int | None = Field(
        None,
        ge=1,
        description="smallest number of regions, the averager's included, with which a run "
        "continues after losing others; null: it waits for every lost region, and where regions "
        "join, for none",
    )
    rejoin: bool = Field(
        True,
        description="restore lost regions automatically, as copies of others; if false, or "
        "if that is impossible, a run with fewer than `min` regions ends",
    )
    wait_s: float = Field(
        600.0,
        ge=0,
        description="longest pause with fewer regions than are needed; then the run is saved and "
        "ends",
    )
    follow_plan: bool = Field(
        True,
        description="let a run that follows a plan adapt its interval when the regions change "
        "and the change saves more than it costs; false: only report it",
    )
    absent: tuple[str, ...] = Field(
        (), description="regions that do not take part from the start and may join later"
    )

    def problems(
        self,
        shards: dict[str, int],
        hosts: tuple[str, str | None],
        overlay: str,
        codec: CodecConfig,
        *,
        has_transfers: bool,
    ) -> Iterator[str]:
        """Yield unknown regions, and why the run cannot continue without a region.

        Args:
            shards: shards by region.
            hosts: regions of the averager and of its standby.
            overlay: kind of overlay.
            codec: codecs.
            has_transfers: whether uploads are scheduled.
        """
        for name in self.absent:
            if name not in shards:
                known = ", ".join(shards)
                yield f"members.absent: unknown region '{name}'; the regions are {known}"
            elif name in hosts:
                yield (
                    f"members.absent: '{name}' hosts the averager or its standby and must be "
                    "present"
                )
        if self.min is not None and self.min > len(shards):
            yield f"members.min: the run has {len(shards)} regions: set at most that, or null"
        elif self.min not in {None, len(shards)}:
            fixed = why_fixed(overlay, codec, has_transfers=has_transfers)
            if fixed is not None:
                yield f"members.min: {fixed}, or leave it out"


def why_no_joins(shards: dict[str, int]) -> str | None:
    """Return why no region can join a run with changeable members, and the fix; None if some can.

    Args:
        shards: shards by region.
    """
    if len(set(shards.values())) > 1:
        return (
            "a joining region copies the shards of another region: give all regions the same "
            "ps_shards"
        )
    return None


def why_fixed(overlay: str, codec: CodecConfig, *, has_transfers: bool) -> str | None:
    """Return why a run's members cannot change, and the fix; None if they can."""
    if overlay != "star":
        return (
            f"overlay {overlay} sums updates in other regions, which must all be present: use "
            "overlay star"
        )
    if has_transfers:
        return "transfers schedules all uploads: remove transfers"
    if codec.up is not None and codec.up.traits.differential is not None:
        return f"{codec.up.kind} tracks blocks of every region to the end: use another codec"
    return None


UNREACHABLE_S: Final = 300.0
"""Seconds for which a region may be unreachable before requests to it fail."""

REPORT_EVERY_S: Final = 1.0
"""Seconds after which a worker reports several steps, or one step that takes longer.

Requests to stop, to pause, to leave, or for a checkpoint reach it with the answer to its report.
"""

_SLACK_S: Final = 5.0
_LEAST_S: Final = 300.0
_SLOWEST_MBPS: Final = 4.0
_FOREVER_S: Final = 365 * 86400.0  # largest number of seconds that sockets and locks accept


def wait_limit_s(train: TrainConfig) -> float:
    """Return the longest wait for other regions' training, in seconds; a year if not configured."""
    return _FOREVER_S if train.step_timeout_s is None else train.step_timeout_s


def operation_s(train: TrainConfig, num_params: int) -> float:
    """Return the longest duration of one operation on a shard, in seconds, without any training."""
    if train.step_timeout_s is not None:
        return train.step_timeout_s
    return _LEAST_S + 2 * 32e-6 * num_params / _SLOWEST_MBPS


def exchange_s(limit_s: float) -> float:
    """Return how long a primary shard waits for its bridge, in seconds."""
    return limit_s + _SLACK_S


def answer_s(limit_s: float) -> float:
    """Return how long a worker waits for its primary shard, in seconds."""
    return limit_s + exchange_s(limit_s) + _SLACK_S
