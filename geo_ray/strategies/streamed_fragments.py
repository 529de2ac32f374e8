"""Fragments of the model that are exchanged one after another while training continues."""

from __future__ import annotations

from abc import abstractmethod
from typing import Self

from pydantic import Field, model_validator
from torch import Tensor

from geo_ray.strategies import local_steps
from geo_ray.strategies.base import LocalSteps, Rounds
from geo_ray.strategies.outer import OuterConfig, OuterNesterov, OuterSgd, outer_round
from geo_ray.strategies.state import AveragerState, Outgoing, RegionState, Reply, Update, Wait
from geo_ray.strategies.traits import AveragerTraits, ExchangeTraits, RegionTraits, Traits, Weights

NEXT = "next"
_PENDING, _SENT = "pending", "sent"


class StreamedFragments(LocalSteps, Rounds):
    """Sends a fragment of the model's change every few local steps, and merges its answer later.

    All regions merge an answer tau steps after sending, and wait if it is not there. The last
    exchange is of the whole model and takes the plain mean.
    """

    interval: int = Field(
        32, ge=1, description="local steps between two exchanges of the same fragment (H)"
    )
    fragments: int = Field(4, ge=2, le=256, description="number of parts of the model (F)")
    tau: int = Field(
        2, ge=1, description="local steps during which an exchange runs; below interval / fragments"
    )
    weights: Weights = Field(
        "samples",
        description="weight of a region: uniform is 1/M, samples is its fraction of the rows",
    )
    outer: OuterConfig = Field(
        OuterNesterov(), description="outer optimizer, applied to the mean change"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        between = self.interval / self.exchanges
        if self.tau >= between:
            raise ValueError(
                f"tau: it must be below interval / {self.exchanges} exchanges = {between:g}, since "
                "the answer about a fragment must be merged before the next is sent"
            )
        return self

    @property
    def exchanges(self) -> int:
        """Exchanges per interval (N)."""
        return self.fragments

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        return Traits(
            in_rounds=True,
            sends="change",
            exchange=ExchangeTraits(
                blocking="when_late",
                every=self.interval / self.exchanges,
                last="always",
                fragments=self.fragments,
                in_turn=self.exchanges == self.fragments,
                hidden_steps=self.tau,
                interval=self.interval,
            ),
            region=RegionTraits(local_optimizer=True, eval_params=local_steps.ANCHOR),
            averager=AveragerTraits(plain_outer=self.outer.plain),
        )

    def after_step(self, region: RegionState) -> Outgoing | Wait | None:
        """Merge tau steps after sending; send N fragments in H steps."""
        anchor_P = local_steps.anchor(region)
        if region.since_send >= self.tau:
            if region.link_busy:
                return Wait()
            self._merge(region)
        if region.since_send < self._due(region):
            return None
        number = self.take_next(region)
        start, stop = region.fragments[number]
        if self.needs_sent:
            region.memory[_SENT] = region.params_P[start:stop].clone()
        return Outgoing(anchor_P[start:stop] - region.params_P[start:stop], False, number)

    def is_quiet(self, region: RegionState) -> bool:
        """See `Strategy.is_quiet`."""
        merges = region.link_busy or _PENDING in region.memory
        return region.since_send < self._due(region) and not (
            merges and region.since_send >= self.tau
        )

    def on_reply(self, region: RegionState, reply: Reply) -> None:
        """Keep the answer until tau steps have passed; the last one is merged at once."""
        if reply.fragment == self.fragments:
            local_steps.adopt(region, reply)
        else:
            region.memory[_PENDING] = reply.payload_P.clone()
            region.numbers[_PENDING] = float(reply.fragment)

    def on_finish(self, region: RegionState) -> Outgoing | None:
        """Send the rest of all fragments."""
        self._merge(region)
        return Outgoing(local_steps.delta(region), True, self.fragments)

    def on_round(self, averager: AveragerState, updates: list[Update]) -> list[Reply]:
        """Answer all with a fragment's change once every region has reported."""
        fragment = updates[0].fragment
        if fragment == self.fragments:
            return outer_round(averager, updates, self.weights, OuterSgd())
        return outer_round(averager, updates, self.weights, self.outer, f"outer{fragment}")

    # ------------------------------------------------------------- what differs

    @property
    @abstractmethod
    def needs_sent(self) -> bool:
        """Whether the fragment as it was sent is kept until its answer is merged."""

    @abstractmethod
    def turn(self, region: RegionState) -> int:
        """Return the number of the next exchange in its interval."""

    @abstractmethod
    def take_next(self, region: RegionState) -> int:
        """Return the number of the fragment to send now, and count the exchange."""

    @abstractmethod
    def merge_fragment(self, params_S: Tensor, outer_S: Tensor, sent_S: Tensor | None) -> None:
        """Merge the new outer fragment into the region's.

        Args:
            params_S: the region's, overwritten.
            outer_S: the new outer fragment.
            sent_S: the region's when it was sent; None unless `needs_sent`.
        """

    # ------------------------------------------------------------- schedule

    def _due(self, region: RegionState) -> int:
        """Return the steps before the next exchange; those of an interval add up to H."""
        turn = self.turn(region)
        ends = [self.interval * n // self.exchanges for n in (turn, turn + 1)]
        return ends[1] - ends[0]

    def _merge(self, region: RegionState) -> None:
        change_S = region.memory.pop(_PENDING, None)
        if change_S is None:
            return
        start, stop = region.fragments[int(region.numbers.pop(_PENDING))]
        outer_S = local_steps.anchor(region)[start:stop].sub_(change_S)
        sent_S = region.memory.pop(_SENT) if self.needs_sent else None
        self.merge_fragment(region.params_P[start:stop], outer_S, sent_S)
