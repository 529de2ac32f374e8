"""The order in which links are probed, so that probes do not disturb each other: pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Pair: TypeAlias = tuple[str, str]


def probe_rounds(regions: Sequence[str], *, disjoint: bool) -> list[list[Pair]]:
    """Every ordered pair of regions, in rounds whose pairs are probed at the same time.

    Args:
        regions: at least two, all different.
        disjoint: let pairs that share no region be probed together: n regions then need about 2n
            rounds instead of n * (n - 1). Links that share a cable measure each other all the same.

    Returns:
        Rounds in order; one pair each unless ``disjoint``.
    """
    if not disjoint:
        pairs = [(a, b) for i, a in enumerate(regions) for b in regions[i + 1 :]]
        return [[pair] for a, b in pairs for pair in ((a, b), (b, a))]
    rounds = []
    circle: list[str | None] = [*regions, *([None] if len(regions) % 2 else [])]
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        met = [(a, b) for a, b in facing if a is not None and b is not None]
        rounds += [met, [(b, a) for a, b in met]]
        circle = [circle[0], circle[-1], *circle[1:-1]]  # the first stays, the others move on
    return rounds
