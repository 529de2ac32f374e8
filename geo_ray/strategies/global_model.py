"""The averager's side of strategies that reply to regions one by one.

Versions: the averager keeps the sum of all its changes (``moved``), and per region how much of
it that region has received (``seen/region``). A reply is the difference. It costs two vectors
per reply, however many regions there are, and a region that was away gets one message. Models
sent in fragments are tracked per fragment.

Staleness: an update whose base is ``lag`` versions old counts ``factor(lag)`` times:
``inverse`` ``1/(1+lag)``, ``sqrt`` ``1/sqrt(1+lag)`` (FedBuff), ``poly`` ``(1+lag)**-a``
(FedAsync), ``hinge`` 1 up to ``b`` and ``1/(a*(lag-b)+1)`` beyond (FedAsync). No region may be
more than ``bound`` exchanges ahead of the slowest unfinished one: its reply waits (stale
synchronous parallel). Updates are applied at once and never dropped. The bound is lifted for a
reply that carries a checkpoint, and at the end.

Weights: by the sizes of data sets (`AveragerState.data_rows`), or by speed, from the step times
in the updates (`AveragerState.numbers`).

Source: FedAsync (arXiv 1903.03934) and FedBuff (arXiv 2106.06639) for the weights, "More
Effective Distributed ML via a Stale Synchronous Parallel Parameter Server" (Ho et al., 2013)
for the bound; reconstructed.

Shape legend: P = parameters of the model, or of the fragment that is exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal

import torch
from pydantic import Field
from torch import Tensor

from geo_ray.base.model import StrictModel
from geo_ray.strategies.base import Strategy, fractions_of
from geo_ray.strategies.state import AveragerState, Reply, Update


def publish(averager: AveragerState, change_P: Tensor, fragment: int = 0) -> None:
    """Subtract ``change_P`` from the outer parameters: a new version."""
    moved = _moved(fragment)
    if moved in averager.memory:
        averager.memory[moved].add_(change_P)
    else:
        averager.memory[moved] = change_P.clone()
    averager.version += 1


def move_to(averager: AveragerState, distance_P: Tensor) -> None:
    """Set the sum of all changes to ``distance_P``: a new version."""
    averager.memory[_moved(0)] = distance_P
    averager.version += 1


def known_model(averager: AveragerState, update: Update) -> Tensor:
    """The sum of changes that the sender knew when it was last answered, a copy (P,)."""
    seen_P = averager.memory.get(_seen(update))
    return torch.zeros(update.payload_P.shape) if seen_P is None else seen_P.clone()


def unheard(averager: AveragerState, update: Update) -> Tensor:
    """Return the changes published since the last answer to the sender, a new (P,)."""
    moved_P = averager.memory.get(_moved(update.fragment))
    known_P = known_model(averager, update)
    return known_P.neg_() if moved_P is None else known_P.neg_().add_(moved_P)


def answer(averager: AveragerState, update: Update, fastest_steps: int | None = None) -> Reply:
    """Answer an update with the changes that its sender has not received.

    Args:
        averager: the averager's state.
        update: the request; of its payload only the size counts.
        fastest_steps: local steps of the fastest region, of which slower ones take fewer, in
            proportion (`steps_by_speed`); None: all take as many as configured.
    """
    steps = None
    if fastest_steps is not None:
        steps = steps_by_speed(averager, update.region, fastest_steps)
    payload_P = unheard(averager, update)
    moved_P = averager.memory.get(_moved(update.fragment))
    if moved_P is not None:
        averager.memory[_seen(update)] = moved_P.clone()
    return replace(Reply.answering(update, payload_P), steps=steps)


def _moved(fragment: int) -> str:
    return f"moved{fragment}"


def _seen(update: Update) -> str:
    return f"seen{update.fragment}/{update.region}"


class Staleness(StrictModel):
    """The ``staleness`` section of an asynchronous strategy."""

    bound: int | None = Field(
        None,
        ge=1,
        description="exchanges by which a region may be ahead of the slowest; null: no bound",
    )
    weight: Literal["none", "inverse", "sqrt", "poly", "hinge"] = Field(
        "none", description="function of the lag that lowers the weight of a late update"
    )
    a: float = Field(0.5, gt=0, description="exponent of poly, slope of hinge")
    b: float = Field(4.0, ge=0, description="hinge: lag without a lower weight")

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


class OneByOne(Strategy):
    """The averager's side of strategies that apply and answer each update separately."""

    staleness: Staleness = Staleness()

    def answer(self, averager: AveragerState, update: Update) -> Reply:
        """Answer one update that was applied; of its payload only the size counts."""
        return answer(averager, update)

    def answers(self, averager: AveragerState, update: Update) -> list[Reply]:
        """Answer all regions that may continue after ``update`` was applied.

        Final updates are answered together, after all were applied, so that all regions end equal.
        """
        if update.final:
            finals = averager.gather(update)
            return [] if finals is None else [self.answer(averager, final) for final in finals]
        clock = f"clock/{update.region}"
        averager.numbers[clock] = averager.numbers.get(clock, 0.0) + 1.0
        # The payload belongs to the caller again; only its size is needed later.
        header = replace(update, payload_P=torch.empty_like(update.payload_P, device="meta"))
        averager.waiting[update.region] = header
        return self.on_finished(averager)

    def on_finished(self, averager: AveragerState) -> list[Reply]:
        """Answer waiting regions that are within the bound of the slowest unfinished one."""
        active = averager.active or averager.members
        slowest = min(averager.numbers.get(f"clock/{region}", 0.0) for region in active)
        bound = float("inf") if self.staleness.bound is None else self.staleness.bound
        free = [
            header
            for region, header in averager.waiting.items()
            if averager.numbers.get(f"clock/{region}", 0.0) - slowest <= bound
        ]
        return self._answered(averager, free)

    def on_release(self, averager: AveragerState) -> list[Reply]:
        """Answer every waiting region."""
        return self._answered(averager, list(averager.waiting.values()))

    def _answered(self, averager: AveragerState, headers: list[Update]) -> list[Reply]:
        for header in headers:
            del averager.waiting[header.region]
        return [self.answer(averager, header) for header in headers]


_ROUNDING: Final = 1e-9  # of a whole number of steps that just fits


def note_speed(averager: AveragerState, update: Update) -> None:
    """Record an update's measurements."""
    averager.numbers[f"step_s/{update.region}"] = update.step_s
    if update.num_samples:
        averager.numbers[f"rows/{update.region}"] = float(update.num_samples)


def relative_rows(averager: AveragerState, region: str) -> float:
    """Rows behind an update of ``region`` over the mean of all regions; 1 if not known."""
    rows = [averager.numbers[k] for k in averager.numbers if k.startswith("rows/")]
    own = averager.numbers.get(f"rows/{region}")
    return 1.0 if own is None else own * len(rows) / sum(rows)


def steps_by_speed(averager: AveragerState, region: str, steps: int) -> int:
    """Local steps of ``region`` while the fastest takes ``steps``: in proportion, at least 1."""
    known_s = {k: v for k, v in averager.numbers.items() if k.startswith("step_s/") and v > 0}
    own_s = known_s.get(f"step_s/{region}")
    if own_s is None:
        return steps
    return max(1, math.floor(steps * min(known_s.values()) / own_s + _ROUNDING))


SiteWeights = Literal["data", "samples", "uniform"]
"""Weights of sites in a mean: ``data`` by the rows of their data sets, ``samples`` by the
rows behind the updates, ``uniform`` alike."""


def site_fractions(
    averager: AveragerState, updates: Sequence[Update], weights: SiteWeights
) -> list[float]:
    """Return each update's weight in a mean; their sum is 1.

    If sizes of data sets are requested and unknown, the rows behind the updates are used.
    """
    if weights != "data":
        return fractions_of(updates, weights)
    rows = [averager.data_rows.get(update.region, 0.0) for update in updates]
    if min(rows) <= 0:
        return fractions_of(updates, "samples")
    return [each / sum(rows) for each in rows]


def member_rows(averager: AveragerState) -> dict[str, float]:
    """Rows of every member's data set; where not known, those behind their last updates.

    The last are as `geo_ray.strategies.global_model.note_speed` has noted them.
    """
    known, members = averager.data_rows, averager.members
    if all(known.get(name, 0.0) > 0 for name in members):
        return {name: known[name] for name in members}
    return {name: averager.numbers.get(f"rows/{name}", 0.0) for name in members}
