"""What asynchronous strategies do about old updates; the same two options for all of them.

*Weight.* An update whose base is ``lag`` versions old counts ``factor(lag)`` times: ``inverse``
``1/(1+lag)``, ``sqrt`` ``1/sqrt(1+lag)`` (FedBuff), ``poly`` ``(1+lag)**-a`` (FedAsync), ``hinge``
1 up to ``b`` and ``1/(a*(lag-b)+1)`` beyond (FedAsync).

*Bound.* No region may be more than ``bound`` exchanges ahead of the slowest: whoever is waits for
its answer until the slowest has spoken (stale synchronous parallel; the mirror clock of Gaia). What
was sent is taken in at once; nothing is thrown away, so a slow region's data count as much as
anybody's. Who has finished is nobody's slowest: there is nothing more to be missed of it. The bound
is lifted for the one answer that carries a checkpoint, and at the end.

Source: FedAsync (arXiv 1903.03934) and FedBuff (arXiv 2106.06639) for the weights, "More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server" (Ho et al., 2013) for the bound;
reconstructed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field

from geo_ray.config.base import StrictModel
from geo_ray.strategies.base import AveragerState, Reply, Update

Answer = Callable[[AveragerState, Update], Reply]


class Staleness(StrictModel):
    """The ``staleness`` section of an asynchronous strategy."""

    bound: int | None = Field(
        None, ge=1, description="exchanges by which a region may be ahead of the slowest"
    )
    weight: Literal["none", "inverse", "sqrt", "poly", "hinge"] = Field(
        "none", description="how much less an old update counts"
    )
    a: float = Field(0.5, gt=0, description="exponent of poly, slope of hinge")
    b: float = Field(4.0, ge=0, description="hinge: versions that cost nothing")

    def factor(self, lag: int) -> float:
        """Weight of an update that is ``lag`` versions old, at most 1."""
        if self.weight == "inverse":
            return 1.0 / (1.0 + lag)
        if self.weight in ("sqrt", "poly"):
            exponent: float = 0.5 if self.weight == "sqrt" else self.a
            return float((1.0 + lag) ** -exponent)
        if self.weight == "hinge" and lag > self.b:
            return 1.0 / (self.a * (lag - self.b) + 1.0)
        return 1.0

    def answers(self, averager: AveragerState, update: Update, answer: Answer) -> list[Reply]:
        """Answer whoever may go on, now that ``update`` is taken in.

        Last words are answered together, when all are taken in: then all regions end equal.
        """
        if update.final:
            finals = averager.gather(update)
            return [] if finals is None else [answer(averager, final) for final in finals]
        clock = f"clock/{update.region}"
        averager.numbers[clock] = averager.numbers.get(clock, 0.0) + 1.0
        # Its payload may be used again by whoever brought it; only the size is asked for later.
        header = replace(update, payload_P=torch.empty_like(update.payload_P, device="meta"))
        averager.waiting[update.region] = header
        return self.free(averager, answer)

    def free(self, averager: AveragerState, answer: Answer) -> list[Reply]:
        """Answer whoever waits and is not too far ahead of the slowest that has not finished."""
        active = averager.active or averager.members
        slowest = min(averager.numbers.get(f"clock/{region}", 0.0) for region in active)
        bound = float("inf") if self.bound is None else self.bound
        free = [
            header
            for region, header in averager.waiting.items()
            if averager.numbers.get(f"clock/{region}", 0.0) - slowest <= bound
        ]
        return _answered(averager, free, answer)


def release(averager: AveragerState, answer: Answer) -> list[Reply]:
    """Answer everybody who waits."""
    return _answered(averager, list(averager.waiting.values()), answer)


def _answered(averager: AveragerState, headers: list[Update], answer: Answer) -> list[Reply]:
    for header in headers:
        del averager.waiting[header.region]
    return [answer(averager, header) for header in headers]


def lag_of(averager: AveragerState, update: Update) -> int:
    """Versions since the one that the sender had merged when it spoke."""
    return max(0, averager.version - update.base_version)
