"""Which strategies' rounds can be summed on the way, and the weight of each contribution.

Where bridges sum updates before the averager sees them, it is handed the weighted mean in the name
of every region. A strategy that answers a round with a weighted mean of its updates comes to the
same, since the mean of equal vectors is that vector.
"""

from __future__ import annotations

from typing import Any, Final

from geo_ray.strategies.bsp import Bsp
from geo_ray.strategies.diloco import DiLoCo
from geo_ray.strategies.hfa import Hfa
from geo_ray.strategies.sma import Sma

_NEXT_TO_NOTHING: Final = 2.0**-40  # counts only if no region has rows: then all are alike


def can_be_summed(strategy: Any) -> bool:
    """Whether a strategy wants nothing of a round's updates but a weighted mean."""
    if isinstance(strategy, DiLoCo):
        return strategy.compute_share is None  # which goes by every update's own measurements
    return isinstance(strategy, Bsp | Sma | Hfa)


def answers_with_mean(strategy: Any) -> bool:
    """Whether a strategy's answer is that mean itself, so that it may go out from anywhere."""
    return isinstance(strategy, Bsp | Sma)


def weight_of(strategy: Any, num_samples: int) -> float:
    """The weight of one region's update in a round's mean.

    Args:
        strategy: one that `can_be_summed`.
        num_samples: rows behind the update.
    """
    # A refused gradient is none, and not a gradient of zero; a model is one, trained on or not.
    skipped = num_samples == 0 and (isinstance(strategy, Bsp) or strategy.weights == "samples")
    if skipped:
        return _NEXT_TO_NOTHING
    return float(num_samples) if strategy.weights == "samples" else 1.0
