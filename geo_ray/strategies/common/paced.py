"""An interval that follows the link: rounds as long as they must be, and not longer.

The averager knows from the updates how long a local step and an exchange take. The next power of
two that spends at least ``share`` of a round computing becomes the interval, but only after it
asked for the same direction ``patience`` rounds in a row, so that one late packet changes nothing.

Source: ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from geo_ray.strategies.base import AveragerState, Update

PATIENCE: Final = 3
_INTERVAL, _VOTES = "paced/interval", "paced/votes"


def paced_interval(
    averager: AveragerState, updates: Sequence[Update], share: float, first: int
) -> int:
    """The interval of the next round.

    Args:
        averager: keeps the present one.
        updates: of the round that was just closed.
        share: of a round that is to be spent computing, in (0, 1).
        first: the interval until something is known.
    """
    present = int(averager.numbers.setdefault(_INTERVAL, float(first)))
    step_s = max(update.step_s for update in updates)
    exchange_s = max(update.exchange_s for update in updates)
    if step_s <= 0 or exchange_s <= 0:
        return present
    least = share / (1.0 - share) * exchange_s / step_s
    wanted = 2 ** max(0, math.ceil(math.log2(max(1.0, least))))
    votes = averager.numbers.get(_VOTES, 0.0)
    direction = float((wanted > present) - (wanted < present))
    votes = votes + direction if votes * direction >= 0 and direction else direction
    if abs(votes) >= PATIENCE:
        present, votes = wanted, 0.0
    averager.numbers[_INTERVAL], averager.numbers[_VOTES] = float(present), votes
    return present
