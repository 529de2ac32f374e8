"""Asynchronous model averaging between parameter servers, every ``interval`` local steps.

Idea: every f steps a region sends a snapshot of its model and continues to train. The averager
stores the newest snapshot of every region and answers with their mean. The region moves towards the
mean by ``alpha`` and keeps the progress that it made during the exchange.

Rule: ``m = sum_j w_j(newest) / M``; on the answer ``w_i <- w_i + alpha * (m - snapshot_i)``.
For a pair with ``alpha`` 1 that is ``(w_i + w_j) / 2`` plus the progress since. If all snapshots
are of the same moment and there was no progress since, it is `sma` with weights 1/M.

When: regions of unequal speed that need similar models without a barrier.

Source: the asynchronous form of inter-PS model averaging of Cloudless-Training (arXiv 2303.05330);
reconstructed. Push-only averaging does not preserve the mean of the models, so exchanges go through
the averager and merge differences instead of overwriting.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from geo_ray.strategies.base import answer_all, weighted_mean
from geo_ray.strategies.global_model import OneByOne
from geo_ray.strategies.state import AveragerState, Outgoing, RegionState, Reply, Update, Wait
from geo_ray.strategies.traits import AveragerTraits, ExchangeTraits, RegionTraits, Traits


class Ama(OneByOne):
    """Configuration and rule of `ama`."""

    kind: Literal["ama"] = "ama"
    interval: int = Field(8, ge=1, description="local steps between two snapshots")
    alpha: float = Field(
        1.0,
        gt=0,
        le=1,
        description="step towards the mean of all newest snapshots; 1 is the whole way",
    )

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        return Traits(
            in_rounds=False,
            sends="model",
            exchange=ExchangeTraits(
                blocking="never",
                every=self.interval,
                last="always",
                interval=self.interval,
                adjustable_interval=True,
            ),
            region=RegionTraits(local_optimizer=True),
            averager=AveragerTraits(
                bound=self.staleness.bound,
                releases=True,
                frees=True,
            ),
        )

    def after_step(self, region: RegionState) -> Outgoing | Wait | None:
        """Send a snapshot when due and the link is free; never wait."""
        if not region.is_due(self.interval) or region.link_busy:
            return None
        region.memory["snapshot"] = region.params_P.clone()
        return Outgoing(region.memory["snapshot"].clone(), wait=False)

    def is_quiet(self, region: RegionState) -> bool:
        """See `Strategy.is_quiet`."""
        return not region.is_due(self.interval) or region.link_busy

    def on_reply(self, region: RegionState, reply: Reply) -> None:
        """Move by ``alpha * (mean - snapshot)``."""
        snapshot_P = region.memory.pop("snapshot")
        if reply.final:  # nothing happened since: take it to the bit, so that all regions agree
            region.params_P.copy_(reply.payload_P)
        else:
            region.params_P.add_(reply.payload_P - snapshot_P, alpha=self.alpha)

    def on_finish(self, region: RegionState) -> Outgoing | None:
        """Send a last snapshot; the answer is the mean over all last snapshots."""
        region.memory["snapshot"] = region.params_P.clone()
        return Outgoing(region.memory["snapshot"].clone(), wait=True)

    def on_update(self, averager: AveragerState, update: Update) -> list[Reply]:
        """Answer the sender with the mean of the newest snapshots."""
        if update.final:
            finals = averager.gather(update)
            return (
                []
                if finals is None
                else answer_all(averager, finals, weighted_mean(finals, "uniform"))
            )
        averager.version += 1
        # A copy: what carried the update may use its buffer again.
        averager.memory[f"model/{update.region}"] = update.payload_P.clone()
        averager.numbers[f"at/{update.region}"] = float(averager.version)
        return self.answers(averager, update)

    def answer(self, averager: AveragerState, update: Update) -> Reply:
        """Return the mean of the newest snapshots, old ones with less weight if so configured."""
        known = [name for name in averager.members if f"model/{name}" in averager.memory]
        lags = [averager.version - int(averager.numbers[f"at/{name}"]) for name in known]
        factors = [self.staleness.factor(lag) for lag in lags]
        first_P = averager.memory[f"model/{known[0]}"]
        mean_P = first_P.clone()  # by differences, so that the mean of equal models is that model
        for name, factor in zip(known[1:], factors[1:], strict=True):
            mean_P.add_(averager.memory[f"model/{name}"] - first_P, alpha=factor / sum(factors))
        return Reply.answering(update, mean_P)
