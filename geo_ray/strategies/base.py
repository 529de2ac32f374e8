"""Base classes of strategies: the rules that combine the training of several regions.

A strategy is a frozen configuration with pure methods. It has no clock, socket or Ray handle and
no state of its own: state is in the `RegionState` of each region's parameter server and in the
`AveragerState` of the averager, and so in checkpoints.

Every exchange is one request of a region and one reply of the averager. A region has at most one
open request, which bounds staleness and memory on any link, however slow.

A strategy derives from `Strategy`, or from a base with a common part. Region side: `LocalSteps`
(train from a common anchor and send the change) and `Overlapped` (the same, while an exchange is in
flight). Averager side: `Rounds` (answer when every region has sent its update), `GradientRounds`
(average gradients) and `OneByOne` (`global_model`: answer each region separately). `Additive`
(`additive`) has both sides of strategies whose changes add up.

Shape legend: P = parameters of the region's model (or of the slice that one shard holds).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from geo_ray.base.model import StrictModel
from geo_ray.base.types import unused_by_all
from geo_ray.strategies import local_steps
from geo_ray.strategies.state import AveragerState, Outgoing, RegionState, Reply, Update, Wait
from geo_ray.strategies.traits import Traits, Weights


class Strategy(StrictModel):
    """The methods of a strategy. All are pure in the sense of the module's docstring."""

    kind: str = Field(
        "", description="name of the strategy in configurations, messages and reports"
    )

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """Properties of the strategy for the rest of the system."""

    def on_gradient(self, region: RegionState, grad_P: Tensor | None) -> None:
        """Apply one combined gradient of the region's workers: one step of the inner optimizer.

        ``grad_P`` is None when every contribution was refused (not finite): parameters stay.
        """
        if grad_P is not None:
            region.apply_gradient(grad_P)

    @abstractmethod
    def after_step(self, region: RegionState) -> Outgoing | Wait | None:
        """Return the message after a step, or `Wait` if the open request must finish first."""

    def is_quiet(self, region: RegionState) -> bool:
        """Tell whether `after_step` would return None without a look at the parameters.

        Asked where a worker keeps the parameters (the trait ``local_optimizer``): if not, it sends
        them first. False is always right.
        """
        return False

    @abstractmethod
    def on_reply(self, region: RegionState, reply: Reply) -> None:
        """Merge an answer into ``region.params_P``, in place."""

    def on_finish(self, region: RegionState) -> Outgoing | None:
        """Return the final update after the last step; None if the regions are equal anyway."""
        return None

    @abstractmethod
    def on_update(self, averager: AveragerState, update: Update) -> list[Reply]:
        """Apply one update in the averager; answer no region, one region, or all.

        The update's payload belongs to the caller again once the update is answered: keep a copy.
        """

    def on_release(self, averager: AveragerState) -> list[Reply]:
        """Close open rounds with the updates that they have, and answer every waiting region.

        Called, with the trait ``releases``, when a region has left and, after every update, while
        the run ends or members are about to change.
        """
        return []

    def on_finished(self, averager: AveragerState) -> list[Reply]:
        """Answer the regions that waited only for a region that has finished.

        Called, with the trait ``frees``, when a region's final update has arrived: the region is in
        `AveragerState.finished` now, and its update waits for those of all others.
        """
        return []

    def on_wake(self, averager: AveragerState) -> list[Reply]:
        """Handle the time `AveragerState.wake_s`, which is cleared.

        Called with the trait ``wakes``.
        """
        return []


class LocalSteps(Strategy):
    """Region side: train locally from the common anchor, then send the change and wait.

    See `geo_ray.strategies.local_steps`. Updates are due every ``traits.exchange.every`` steps,
    and after the last step according to ``traits.exchange.last``.
    """

    def on_gradient(self, region: RegionState, grad_P: Tensor | None) -> None:
        """Take a local optimizer step."""
        local_steps.step(region, grad_P)

    def after_step(self, region: RegionState) -> Outgoing | Wait | None:
        """Send the change since the anchor when an exchange is due, and wait for the answer."""
        return local_steps.outgoing_when_due(region, int(self.traits.exchange.every))

    def is_quiet(self, region: RegionState) -> bool:
        """See `Strategy.is_quiet`."""
        return not region.is_due(int(self.traits.exchange.every))

    def on_reply(self, region: RegionState, reply: Reply) -> None:
        """Move the anchor and continue from it."""
        local_steps.adopt(region, reply)

    def on_finish(self, region: RegionState) -> Outgoing | None:
        """Send the rest, unless the region stands on its anchor and needs no last exchange."""
        if self.traits.exchange.last == "always":
            return local_steps.outgoing(region)
        return local_steps.final_update(region)


class Rounds(Strategy):
    """The averager's side of strategies that answer when every region has sent its update."""

    def on_update(self, averager: AveragerState, update: Update) -> list[Reply]:
        """Hold the update until every region's has arrived, then close the round."""
        updates = averager.gather(update)
        return [] if updates is None else self.on_round(averager, updates)

    @abstractmethod
    def on_round(self, averager: AveragerState, updates: list[Update]) -> list[Reply]:
        """Answer all regions.

        Args:
            averager: the averager's state.
            updates: of the round, in the order of the regions' names.
        """


class GradientRounds(Rounds):
    """Rounds in which every region applies the same mean gradient, with its own optimizer."""

    weights: Weights = Field(
        "samples",
        description="weight of a region: uniform is 1/M, samples is its fraction of the rows",
    )

    def on_reply(self, region: RegionState, reply: Reply) -> None:
        """Apply the mean gradient, unless every region's was refused."""
        if reply.num_samples > 0:
            region.apply_gradient(reply.payload_P)

    def on_round(self, averager: AveragerState, updates: list[Update]) -> list[Reply]:
        """Answer all with the mean; a refused gradient has no weight, and is not one of zero."""
        used = [u for u in updates if u.num_samples > 0] or updates
        replies = answer_all(averager, updates, weighted_mean(used, self.weights))
        unused = unused_by_all(update.unused for update in used)
        return [replace(reply, unused=unused) for reply in replies] if unused else replies


class Overlapped(Rounds):
    """Rounds during which regions continue to train; see `geo_ray.strategies.local_steps`."""

    merge: local_steps.Merge = Field(
        "overwrite",
        description="overwrite: take the outer model; correct: take it plus the local progress "
        "since the last update",
    )

    def on_gradient(self, region: RegionState, grad_P: Tensor | None) -> None:
        """Take a local optimizer step."""
        local_steps.overlapped_step(region, grad_P)

    def on_reply(self, region: RegionState, reply: Reply) -> None:
        """Keep the answer until the next turn."""
        local_steps.keep_reply(region, reply)

    def on_finish(self, region: RegionState) -> Outgoing | None:
        """Send the rest; the answer is the common model."""
        return local_steps.last_turn(region, self.merge)


def fractions_of(updates: Sequence[Update], weights: Weights) -> list[float]:
    """Return the weights in a mean: by region, or by each update's rows; equal without rows."""
    total = sum(update.num_samples for update in updates)
    if weights == "uniform" or total == 0:
        return [1.0 / len(updates)] * len(updates)
    return [update.num_samples / total for update in updates]


def weighted_mean(updates: Sequence[Update], weights: Weights) -> Tensor:
    """Return the mean of payloads, summed in the given order so that the bits are reproducible.

    Args:
        updates: at least one; all payloads of one shape (P,).
        weights: see `fractions_of`.

    Returns:
        A new fp32 tensor (P,).
    """
    return mean_by([update.payload_P for update in updates], fractions_of(updates, weights))


def mean_by(
    vectors: Sequence[Tensor], fractions: Sequence[float], out_P: Tensor | None = None
) -> Tensor:
    """Return the weighted sum of vectors (P,) in the given order; in ``out_P`` or a new tensor."""
    mean_P = torch.mul(vectors[0], fractions[0], out=out_P)
    for vector_P, fraction in zip(vectors[1:], fractions[1:], strict=True):
        mean_P.add_(vector_P, alpha=fraction)
    return mean_P


def answer_all(
    averager: AveragerState,
    updates: Sequence[Update],
    payload_P: Tensor,
    weights: Weights | None = None,
) -> list[Reply]:
    """Commit a round as one new version; answer every region with the same payload.

    Args:
        averager: averager's state.
        updates: updates of the round.
        payload_P: answer.
        weights: kind of weights of the payload's mean, if regions need their own weight.
    """
    averager.version += 1
    total = sum(update.num_samples for update in updates)
    fractions = [0.0] * len(updates) if weights is None else fractions_of(updates, weights)
    return [
        Reply(u.region, payload_P, total, u.final, u.fragment, fraction)
        for u, fraction in zip(updates, fractions, strict=True)
    ]
