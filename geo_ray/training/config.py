"""The ``train`` section of a configuration: how long and how carefully to train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from geo_ray.config.base import StrictModel
from geo_ray.observe.metrics.best import KeepBest
from geo_ray.observe.metrics.summary import Target
from geo_ray.strategies.base import Strategy
from geo_ray.training.server.elastic import ElasticConfig
from geo_ray.training.server.stragglers import StragglersConfig, check_stragglers


class TrainConfig(StrictModel):
    """How long and how carefully to train."""

    steps: int = Field(
        ge=1, le=10**12, description="steps of every region (async: pushes per worker)"
    )
    count: Literal["each", "together"] | None = Field(
        None,
        description="whether each region takes `steps`, or all together as many rows as that were; "
        "default: each, but together where regions take unequal numbers of steps between rounds",
    )
    mode: Literal["sync", "async"] = Field(
        "sync", description="inside a region: combine one gradient per worker, or apply each alone"
    )
    eval_every: int = Field(
        50, ge=0, le=10**12, description="steps between evaluations; 0: only at the end"
    )
    eval_batch_size: int = Field(256, ge=1, description="rows per evaluation batch")
    evaluate: Literal["outer", "live"] = Field(
        "outer", description="the model that all regions agree on, or each region's own, mid-round"
    )
    statistics_batches: int = Field(
        16,
        ge=0,
        description="batches of each region over which running statistics are made anew for the "
        "final model and its evaluation; 0: those of the training steps are used",
    )
    clip_norm: float | None = Field(None, gt=0, description="largest norm of a worker's gradient")
    clip_mean_norm: float | None = Field(
        None, gt=0, description="largest norm of the mean of a region's gradients in a step"
    )
    target: Target | None = Field(None, description="stop early when this is reached")
    keep_best: KeepBest | None = Field(
        None, description="keep the best evaluated model beside the last one"
    )
    stragglers: StragglersConfig | None = Field(
        None, description="do not wait for late workers of a region: spares, or coded gradients"
    )
    max_refused_steps: int = Field(3, ge=1, description="refused steps in a row that end the run")
    elastic: ElasticConfig | None = Field(
        None, description="go on while workers are missing; null: a step waits for each of them"
    )
    max_worker_restarts: int = Field(
        10, ge=0, description="replacements of workers in `restart_window_s`"
    )
    restart_window_s: float | None = Field(
        3600.0,
        gt=0,
        description="seconds of which replacements are counted; null: those of the whole run",
    )
    noise_every: int | None = Field(
        None, ge=1, description="steps between measurements of gradient noise; null: 16"
    )
    step_timeout_s: float | None = Field(
        None,
        gt=0,
        description="longest wait for others' training; null: as long as their processes and links "
        "live, where a worker that takes 20 times as long as usual, and a minute, is replaced",
    )

    def check(self, strategy: Strategy, workers: Mapping[str, int], *, even: bool) -> None:
        """Refuse what does not go with the regions and their strategy.

        Args:
            strategy: the run's.
            workers: by region.
            even: whether all workers of a region have batches of one size.

        Raises:
            ValueError: naming the key.
        """
        if self.stragglers is not None:
            check_stragglers(self.stragglers, workers, self.mode)
            if not even:
                raise ValueError("train.stragglers: spares and codes need batches of equal size")
        if self.elastic is not None:
            self.elastic.check(
                strategy.kind,
                strategy.traits,
                workers,
                mode=self.mode,
                stragglers=self.stragglers is not None,
            )
        if self.keep_best is not None and self.eval_every == 0:
            raise ValueError(
                "train.keep_best: with train.eval_every 0 nothing is evaluated before the end, and "
                "the last model would be the best; set train.eval_every to some steps"
            )
        traits = strategy.traits
        if len(workers) == 1:
            return
        if self.clip_mean_norm is not None and traits.region.worker_steps:
            raise ValueError(
                f"train.clip_mean_norm: workers of '{strategy.kind}' push changes of several steps "
                "and no gradients; use clip_norm, which clips each of these steps"
            )
        if self.count == "each" and traits.region.ends_together:
            raise ValueError(
                f"train.count: each region ends at its own time, but '{strategy.kind}' gives "
                "them unequal numbers of steps and needs all of them: use together"
            )
        if self.mode == "async" and traits.in_rounds and len(set(workers.values())) > 1:
            raise ValueError(
                "train.mode: async gives regions with unequal workers unequal numbers of steps, "
                f"but strategy '{strategy.kind}' works in rounds of all regions; use equal "
                "workers, mode sync, or a strategy without rounds such as asgd_ga"
            )
