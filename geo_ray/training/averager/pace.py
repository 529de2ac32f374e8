"""The interval between exchanges, when it changes in the middle of a run.

Rule: the averager says it with every answer from then on (`Reply.steps`), as strategies do that
choose it by themselves; a region goes by its newest answer. In rounds all hear it with the same
one. It is kept among the strategy's numbers, so checkpoints and copies of the averager have it.
Only where regions obey, and nobody else asks: `ExchangeTraits.paced`.

Source: ours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from geo_ray.strategies.base import AveragerState, Reply

_STEPS: Final = "geo_ray/pace"


def set_pace(state: AveragerState, steps: int) -> None:
    """Ask regions, with their next answers, to exchange after so many steps from then on."""
    state.numbers[_STEPS] = float(steps)


def pace_of(state: AveragerState) -> int | None:
    """The steps that are asked for; None: those of the configuration."""
    steps = state.numbers.get(_STEPS)
    return None if steps is None else int(steps)


def paced(reply: Reply, state: AveragerState) -> Reply:
    """The answer, with the steps that are asked for."""
    steps = pace_of(state)
    if steps is None or reply.steps is not None:
        return reply
    return replace(reply, steps=steps)
