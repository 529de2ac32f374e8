"""Gradient noise over all regions, for strategies that average gradients of one and the same model.

Each region's gradient is one of K: the region sends its squared norm beside it, and that of the
mean is one pass over the answer. Where updates are summed on the way, the answer is their mean up
to rounding, and the norms come in the headers, so it is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from geo_ray.strategies.base import AveragerState, Reply, Strategy, Update
from geo_ray.training.compute.flat import square_norm
from geo_ray.training.compute.noise import NoiseMeter, NoiseReading


@dataclass(slots=True)
class AveragerNoise:
    """The averager's part.

    Attributes:
        meter: smooths.
    """

    meter: NoiseMeter = field(default_factory=NoiseMeter)
    _news: list[NoiseReading] = field(default_factory=list)

    def measured(self, strategy: Strategy, averager: AveragerState, update: Update) -> list[Update]:
        """The whole round that ``update`` completes, if all of it was measured; else nothing."""
        if update.grad_sq is None or not strategy.traits.averager.mean_gradient:
            return []
        there = {**averager.waiting, update.region: update}
        found = [there[name] for name in averager.members if name in there]
        usable = [u for u in found if u.grad_sq is not None and u.num_samples > 0]
        return usable if len(usable) == len(averager.members) > 1 else []

    def take(self, step: int, updates: Sequence[Update], answers: Sequence[Reply]) -> None:
        """Take in a round.

        Args:
            step: its number.
            updates: of `measured`.
            answers: what the strategy answered; all hold the mean.
        """
        norms = [(u.num_samples, u.grad_sq) for u in updates if u.grad_sq is not None]
        if answers and norms and self.meter.feed(norms, square_norm(answers[0].payload_P)):
            self._news.append(self.meter.reading(step, norms))

    def news(self) -> list[NoiseReading]:
        """What was measured since the last call, for the shell to tell."""
        news, self._news = self._news, []
        return news
