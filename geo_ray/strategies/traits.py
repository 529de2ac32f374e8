"""Traits of a strategy, in one required record: `Strategy.traits`.

All code that depends on the strategy of a run reads its traits: the runtime, the simulator, the
planner, the overlays and the checks of a configuration. A custom strategy is therefore equal to
those of this library.

Values may depend on the strategy's options. They are checked against short runs of every strategy
(`geo_ray.testing`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Weights = Literal["uniform", "samples"]
"""Weights of regions in a mean: ``uniform`` is 1/M, ``samples`` is S_i / sum S."""

Sends = Literal["change", "model"]
"""Kind of payloads; codecs encode differences of models, and changes directly."""

Combine = Literal["sum", "mean"]
"""Weight of a change in every region: 1, or 1/M."""

Blocking = Literal["always", "when_late", "never"]
"""Whether training waits for an exchange: always, only if the answer is late (not there when the
next exchange or the merge is due), or never.
"""

LastExchange = Literal["always", "rest", "never"]
"""Whether there is an exchange after the last step: always, if steps were made since the last
exchange, or never.
"""

_NEXT_TO_NOTHING: Final = 2.0**-40  # counts only if no region has rows: then all are alike
_EPS: Final = 1e-9  # of a whole number of exchanges
_FP32_BYTES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeTraits:
    """Frequency, size and blocking of a region's exchanges.

    A *step* is one of the region's parameter server: one combined gradient of its workers, or one
    combined change where workers make local steps (`RegionTraits.worker_steps`).

    Attributes:
        blocking: see `Blocking`. It concerns the link and the other regions alike: waiting for an
            answer means waiting for everything that delays it.
        every: steps between exchanges when nothing is late. A slow link, or a request of the
            averager, may increase them. Not an integer if rounded from exchange to exchange.
        fragments: number of parts of the model that are sent one at a time.
        in_turn: whether the parts are sent in turn; if false, a payload is as large as its part.
        last: see `LastExchange`. The last exchange has the whole model.
        hidden_steps: steps that hide an exchange where training waits only for a late one; None:
            those until the next one.
        by_speed: whether slower regions exchange after fewer steps, in proportion to the fastest.
        adjustable_interval: whether a region exchanges after as many steps as the averager asks for
            (`RegionState.is_due`), and the strategy does not set the interval itself; the interval
            may then change during a run. Not for rounds whose answers arrive while a region trains:
            each region would receive the change at another step, and have another number of rounds.
        interval: value of the option ``interval``: steps in which the whole model is exchanged
            once. The planner may choose another value. None: no such option.
    """

    blocking: Blocking
    every: float
    last: LastExchange
    fragments: int = 1
    in_turn: bool = True
    hidden_steps: float | None = None
    by_speed: bool = False
    interval: int | None = None
    adjustable_interval: bool = False

    def within(self, steps: int) -> int:
        """Exchanges within so many steps, if nothing is late.

        It may be off by one where `every` is not whole.
        """
        return int(steps / self.every + _EPS)

    def count(self, steps: int) -> int:
        """Return the number of exchanges in so many steps, and the one after the last step."""
        within = self.within(steps)
        is_rest = steps > within * self.every + _EPS
        return within + (self.last == "always" or (self.last == "rest" and is_rest))

    @property
    def meets_by_final_updates(self) -> bool:
        """Whether all regions are equal only after final updates, not after every round."""
        return self.last == "always"

    def payload_bytes(self, num_params: int) -> float:
        """Return the bytes of a payload each way without a codec: the mean over fragments.

        Answers are as long as updates.

        Args:
            num_params: parameters of the model.
        """
        return _FP32_BYTES * num_params / self.fragments


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionTraits:
    """Requirements of a strategy on a region.

    Attributes:
        worker_steps: local steps of each worker's own optimizer between two pushes; the worker then
            pushes its change, not a gradient. 0: workers push gradients.
        ends_by_total_rows: whether the run ends for all regions at once, after a total number of
            rows, because regions make unequal numbers of steps between rounds. If false, every
            region ends after the same number of steps.
        whole_model: whether a region's model must not be split into shards.
        eval_params: tensor of `RegionState.memory` to evaluate (parameters that the averager
            knows); None: the region's own parameters.
        rate_key: configuration key of the learning rate that the strategy uses.
        needs_codec: kind of codec for updates that the strategy requires; None: any or none.
        needs_optimizer: kind of inner optimizer that the strategy requires; None: any.
        unsent: tensors of `RegionState.memory` with content that a region has yet to send, even
            when all regions are equal; a joining region clears its copies.
        local_optimizer: whether a gradient is used for a step of the inner optimizer and for
            nothing else. A worker may then make this step itself (`train.optimizer_on`), and
            `Strategy.on_gradient` gets None.
        in_pieces: whether a region only sends `RegionState.change_since` of one tensor, waits, and
            passes the answer to `RegionState.adopt` with that tensor, as `LocalSteps` does. A
            region that joins may then send and merge both piece by piece.
    """

    worker_steps: int = 0
    ends_by_total_rows: bool = False
    whole_model: bool = False
    eval_params: str | None = None
    rate_key: str = "optimizer.lr"
    needs_codec: str | None = None
    needs_optimizer: str | None = None
    unsent: tuple[str, ...] = ()
    local_optimizer: bool = False
    in_pieces: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundMean:
    """A round whose only result is a weighted mean of its updates.

    Where bridges sum updates before the averager receives them, it gets that mean in the name of
    every region. The strategy's answer must be the same, since the mean of equal vectors is that
    vector.

    Attributes:
        weights: weights of the regions.
        is_answer: whether the answer is the mean itself, so that any region may send it.
        skips_refused: whether an update without rows has weight 0 in a uniform mean, too: a refused
            gradient is not a gradient of zero.
    """

    weights: Weights
    is_answer: bool = False
    skips_refused: bool = False

    def weight_of(self, num_samples: int) -> float:
        """The weight of one region's update.

        Args:
            num_samples: rows behind it.
        """
        if num_samples == 0 and (self.skips_refused or self.weights == "samples"):
            return _NEXT_TO_NOTHING
        return float(num_samples) if self.weights == "samples" else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragerTraits:
    """Properties of a strategy's averager side.

    Attributes:
        round_mean: how its rounds can be summed in the overlay; None: not possible.
        adds_up: how updates add up: the averager side is that of `geo_ray.strategies.additive`,
            which can take in a sum of updates, and merge a dropped one with the next. None: each
            update must arrive separately.
        mean_gradient: whether every update is the gradient of one step, of the same model in all
            regions, and every answer their mean by rows.
        bound: exchanges that a region may be ahead of the slowest, although there are no rounds;
            None: unbounded.
        releases: whether some regions may be left without an answer while others are answered;
            `Strategy.on_release` then answers them.
        frees: whether `Strategy.on_finished` answers the regions that waited only for a region
            that has finished. False: where a region waits, the final update of another is taken in
            as an ordinary one and requested again.
        plain_outer: value of the option ``outer`` that applies changes unmodified; None: no such
            option, or it has such a value. Momentum there and momentum in the inner optimizer
            multiply, and overshoot where rounds are short or few.
        wakes: whether the strategy uses the averager's clock: it sets `AveragerState.wake_s`, and
            `Strategy.on_wake` is called then.
    """

    round_mean: RoundMean | None = None
    adds_up: Combine | None = None
    mean_gradient: bool = False
    bound: int | None = None
    plain_outer: Mapping[str, float | str] | None = None
    releases: bool = False
    frees: bool = False
    wakes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Traits of a strategy; see the module's docstring.

    Attributes:
        in_rounds: whether no region is answered before all have sent their update.
        sends: ``change`` if payloads, of updates and replies alike, are changes of parameters, so
            that late parts can be added; ``model`` if they are parameters.
        exchange: frequency, size and blocking of exchanges.
        region: requirements on a region.
        averager: properties of the averager side.
    """

    in_rounds: bool
    sends: Sends
    exchange: ExchangeTraits
    region: RegionTraits = RegionTraits()
    averager: AveragerTraits = AveragerTraits()

    @property
    def round_steps(self) -> int | None:
        """Steps per round, if equal in all regions; None otherwise."""
        same = self.in_rounds and not self.region.ends_by_total_rows and not self.exchange.by_speed
        return math.ceil(self.exchange.every - _EPS) if same else None
