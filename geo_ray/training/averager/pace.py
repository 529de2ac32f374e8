"""The interval between exchanges, when it changes in the middle of a run.

Rule: the averager says it with every answer from then on (`Reply.steps`), as strategies do that
choose it by themselves; a region goes by its newest answer. In rounds all hear it with the same
one. It is kept among the strategy's numbers, so checkpoints and copies of the averager have it.
Only where regions obey, and nobody else asks: `ExchangeTraits.paced`.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from geo_ray.strategies.base import AveragerState, Reply

_STEPS: Final = "geo_ray:pace"  # no "/": what ends in "/NAME" is a region's and goes with it
_INSTEAD: Final = "geo_ray:pace_instead"


def set_pace(state: AveragerState, steps: int, interval: int | None) -> None:
    """Ask regions, with their next answers, to exchange after so many steps from then on.

    Args:
        state: of the averager.
        steps: local steps.
        interval: that of the configuration.
    """
    state.numbers[_STEPS], state.numbers[_INSTEAD] = float(steps), float(interval or 0)


def restore_numbers(
    state: AveragerState, numbers: Mapping[str, object], interval: int | None
) -> None:
    """Take the numbers of a checkpoint.

    What was asked for counts no more if the configuration has another interval now: whoever resumes
    a run with one means it.
    """
    state.numbers.clear()
    state.numbers.update({str(name): float(str(value)) for name, value in numbers.items()})
    for before, name in (("geo_ray/pace", _STEPS), ("geo_ray/pace_instead", _INSTEAD)):
        if before in state.numbers:  # as checkpoints of earlier releases have it
            state.numbers[name] = state.numbers.pop(before)
    if state.numbers.get(_INSTEAD, 0.0) != float(interval or 0):
        state.numbers.pop(_STEPS, None)
        state.numbers.pop(_INSTEAD, None)


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
