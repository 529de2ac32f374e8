"""The trials that none other beats in all objectives."""

from __future__ import annotations

from collections.abc import Sequence


def front(scores: Sequence[Sequence[float]]) -> list[int]:
    """Places of those that none beats, in order of the first objective.

    One beats another if it is nowhere worse and somewhere better. Of equal ones the first stays.

    Args:
        scores: per trial one number per objective; less is better.
    """
    order = sorted(range(len(scores)), key=lambda place: (tuple(scores[place]), place))
    kept: list[int] = []
    for place in order:  # none that comes later beats one that came before
        mine = scores[place]
        if not any(all(a <= b for a, b in zip(scores[k], mine, strict=True)) for k in kept):
            kept.append(place)
    return kept
