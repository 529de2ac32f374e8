"""What a strategy says of itself, in one record that it must give: `Strategy.traits`.

Everything that depends on which strategy a run has reads it here: the runtime, the simulator, the
planner, the overlays and the checks of a configuration. So a strategy that is not part of this
library has the same rights as one that is.

Values may depend on the strategy's options. What a record says is checked against short runs of
every strategy (`geo_ray.testing`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Weights = Literal["uniform", "samples"]
"""How regions are weighted in a mean: ``uniform`` is 1/M, ``samples`` is S_i / sum S."""

Sends = Literal["change", "model"]
"""What payloads are; codecs make differences of models small, and changes as they are."""

Combine = Literal["sum", "mean"]
"""How much a change counts in every region: 1, or 1/M."""

Blocking = Literal["always", "when_late", "never"]
"""Whether a region stands still for an exchange: for every one, only if the answer is not there
when the next exchange (or the merge) is due, or never."""

LastExchange = Literal["always", "rest", "never"]
"""Whether there is an exchange after the last step: always, if steps were taken since the last one,
or never."""

_NEXT_TO_NOTHING: Final = 2.0**-40  # counts only if no region has rows: then all are alike
_EPS: Final = 1e-9  # of a whole number of exchanges
_FP32_BYTES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeTraits:
    """How often a region speaks with the averager, how much, and whether it waits.

    A *step* is one of the region's parameter server: one combined gradient of its workers, or one
    combined change where workers take local steps of their own (`RegionTraits.worker_steps`).

    Attributes:
        blocking: see `Blocking`. It is about the link and the other regions alike: whoever
            waits for an answer waits for whatever holds it up.
        every: steps from one exchange to the next where nothing is late. With a slow link, or if
            the averager asks for it, there may be more. Not whole if it is rounded from exchange
            to exchange.
        fragments: parts of the model that are sent one at a time; an exchange is of one of them.
        last: see `LastExchange`. The last exchange is of the whole model.
        hidden_steps: steps that hide an exchange where regions stand still when it is late; None:
            those until the next one.
        by_speed: whether slower regions exchange after fewer steps, in proportion to the fastest.
        adjustable_interval: whether a region exchanges after as many steps as the averager asks for
            (`RegionState.is_due`), and the strategy leaves it to others to ask: then the interval
            may change in mid-run. Not in rounds whose answers come while a region trains on: each
            would hear of it at another step, and have another number of rounds.
        interval: value of the option ``interval``, if there is one: steps in which the whole model
            is exchanged once. The planner may choose another. None: there is no such option.
    """

    blocking: Blocking
    every: float
    last: LastExchange
    fragments: int = 1
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
        """The same, and the one after the last step."""
        within = self.within(steps)
        is_rest = steps > within * self.every + _EPS
        return within + (self.last == "always" or (self.last == "rest" and is_rest))

    @property
    def meets_by_final_updates(self) -> bool:
        """Whether all regions are equal after last words only, and not after every round."""
        return self.last == "always"

    def payload_bytes(self, num_params: int) -> float:
        """Bytes of an exchange's payload each way without a codec: its mean over the fragments.

        Answers are as long as updates.

        Args:
            num_params: of the model.
        """
        return _FP32_BYTES * num_params / self.fragments


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionTraits:
    """What a strategy needs of a region.

    Attributes:
        worker_steps: local steps of each worker's own optimizer between two pushes; what a worker
            pushes then is its change, not a gradient. 0: workers push gradients.
        ends_by_total_rows: whether the run ends for all regions at once, after a total number of
            rows, because regions take unequal numbers of steps between rounds. If false, every
            region ends after the same number of steps.
        whole_model: whether a region's model must not be cut into shards.
        eval_params: the tensor of `RegionState.memory` that is evaluated (those parameters that the
            averager knows); None: the region's own parameters.
        rate_key: where the configuration has the learning rate that the strategy trains with.
        needs_codec: kind of a codec for updates without which the strategy makes no sense; None:
            it needs none.
        unsent: tensors of `RegionState.memory` that hold what a region has still to say even when
            all regions are equal; one that begins as another's copy has nothing to say there.
    """

    worker_steps: int = 0
    ends_by_total_rows: bool = False
    whole_model: bool = False
    eval_params: str | None = None
    rate_key: str = "optimizer.lr"
    needs_codec: str | None = None
    unsent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundMean:
    """A round of which nothing is wanted but a weighted mean of its updates.

    Where bridges sum updates before the averager sees them, it is handed that mean in the name of
    every region. The strategy's answer must come to the same, as the mean of equal vectors is that
    vector.

    Attributes:
        weights: of the regions.
        is_answer: whether the answer is the mean itself, so that it may go out from anywhere.
        skips_refused: whether an update without rows has no weight in a uniform mean either: a
            refused gradient is none, and not a gradient of zero.
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
    """What a strategy does in the averager.

    Attributes:
        round_mean: how its rounds can be summed on the way; None: they cannot.
        adds_up: that updates add up, and how: the averager's side is that of
            `geo_ray.strategies.additive`, which can take in a sum of updates, and one that
            was given up with the next. None: each update must come by itself.
        mean_gradient: whether every update is the gradient of one step, of the same model in all
            regions, and every answer their mean by rows.
        bound: exchanges that a region may be ahead of the slowest, although there are no rounds;
            None: as many as it likes.
        releases: whether some regions may be left without an answer while others are answered;
            `Strategy.on_release` then answers them.
        frees: whether `Strategy.on_finished` answers the regions that waited only for a region
            that has finished. False: where a region waits, the final update of another is taken in
            as an ordinary one, and asked for again.
        plain_outer: value of the option ``outer`` with which changes are applied as they are; None:
            there is no such option, or it is such a value. Momentum there and momentum in the
            inner optimizer multiply, and overshoot where rounds are short or few.
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
    """See the module's docstring.

    Attributes:
        in_rounds: whether nobody is answered before every region has spoken.
        sends: ``change`` if payloads, of updates and replies alike, are what parameters change by,
            so that a part that comes later is a part of the sum; ``model`` if they are parameters.
        exchange: how often, how much, and whether regions wait.
        region: what a region must be like.
        averager: what the averager may do.
    """

    in_rounds: bool
    sends: Sends
    exchange: ExchangeTraits
    region: RegionTraits = RegionTraits()
    averager: AveragerTraits = AveragerTraits()

    @property
    def round_steps(self) -> int | None:
        """Steps of a round that are the same in all regions; None: there are no such rounds."""
        same = self.in_rounds and not self.region.ends_by_total_rows and not self.exchange.by_speed
        return math.ceil(self.exchange.every - _EPS) if same else None
