"""The advisor's assumptions: the cost of rounds and codecs in loss, and the sizes of codecs.

The loss of long rounds is interpolated between a few points over the logarithm of H. Points and
codec losses are rough, because they depend on the task; `geo-ray compare` measures them.

Source of the points for H: the bounds that this project tests its `diloco` against (docs/results);
losses of codecs with error feedback after published ablations (4 bits nearly free, sparse 2 bits a
little less so), reconstructed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Final

from geo_ray.codecs.common.feedback import bits_of_last
from geo_ray.codecs.registry import CODECS
from geo_ray.codecs.traits import FP32_BITS
from geo_ray.strategies.traits import Traits

LOSS_BY_INTERVAL: Final = ((1, 0.0), (25, 0.01), (100, 0.025), (500, 0.05))
"""(H, relative loss against H = 1), ascending."""

_PROPOSED: Final = {
    kind: traits
    for kind, traits in ((kind, each().traits) for kind, each in CODECS.items())
    if traits.expected_loss is not None
}

BITS_PER_PARAM: Final[dict[str | None, tuple[float, float]]] = {None: (FP32_BITS, FP32_BITS)} | {
    kind: (
        traits.bits_per_value,
        traits.bits_per_value if traits.suits_answers else FP32_BITS,
    )
    for kind, traits in _PROPOSED.items()
}
"""Codec -> bits per parameter up and down; one that is for updates only sends answers whole."""


@cache  # a vector is coded to tell
def last_bits(codec: str | None, errors: tuple[float, float]) -> tuple[float, float]:
    """Return the bits per parameter, up and down, of the exchange after the last step.

    Args:
        codec: one of `BITS_PER_PARAM`.
        errors: relative, that it may have up and down; 0 for full precision.
    """
    if codec is None:
        return FP32_BITS, FP32_BITS
    up, down = (bits_of_last(CODECS[codec](), error) for error in errors)
    return up, down if _PROPOSED[codec].suits_answers else FP32_BITS


def owes(codec: str | None) -> bool:
    """Return whether the sender keeps what the codec has lost, to pay it with the last exchange."""
    if codec is None:
        return False
    traits = _PROPOSED[codec]
    return traits.lossy and not traits.feeds_back


LOSS_BY_CODEC: Final[dict[str | None, float]] = {None: 0.0} | {
    kind: traits.expected_loss or 0.0 for kind, traits in _PROPOSED.items()
}
"""Codec -> relative loss, with error feedback."""

LOSS_OF_DELAY: Final = 0.005
"""Relative loss of merging a round's answer one round late."""

LOSS_OF_ASYNCHRONY: Final = 0.01
"""Relative loss of updates that are merged one by one."""


_SMALL_INTERVAL: Final = 16
_SMALL_WITH_MOMENTUM: Final = 128


def outer_of(
    traits: Traits, interval: int, *, inner_momentum: bool = False
) -> Mapping[str, float | str] | None:
    """Return the option ``outer`` of a strategy whose outer momentum would overshoot; else None.

    An outer momentum of 0.9 goes seven times as far as the regions' mean, and momentum in the inner
    optimizer ten times as far as a gradient. Together, over rounds of 16 to 64 steps, they take a
    model to chance that either alone trains (docs/strategies.md has the measurements).

    Args:
        traits: of the strategy.
        interval: local steps of a round.
        inner_momentum: whether the regions' optimizer has momentum, and nobody has chosen that of
            the averager to go with it.
    """
    small = _SMALL_WITH_MOMENTUM if inner_momentum else _SMALL_INTERVAL
    return traits.averager.plain_outer if interval < small else None


def loss_of_interval(steps: int) -> float:
    """Return the relative loss of rounds that are ``steps`` local steps long."""
    last = LOSS_BY_INTERVAL[-1]
    for (low, loss), (high, more) in pairwise(LOSS_BY_INTERVAL):
        if steps <= high:
            share = math.log(max(steps, low) / low) / math.log(high / low)
            return loss + share * (more - loss)
    return last[1] * math.log(steps) / math.log(last[0])
