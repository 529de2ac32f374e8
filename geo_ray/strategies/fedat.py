"""FedAT: sites of about equal speed in rounds of their own; the tiers mix asynchronously.

Idea: sites are sorted by speed into tiers. Inside a tier a round of federated averaging waits only
for sites of like speed; tiers never wait for each other. The global model is a weighted mean of the
tiers' models, in which tiers that seldom report weigh as much as others report often, so that the
data of slow sites are not drowned.

Rule: tier m's round gives ``w_m = mean_i w_i``; ``G = sum_m (T_(M+1-m) / T) w_m`` with ``T_m`` the
rounds of tier m so far, tiers sorted from fast to slow; the tier's sites go on from G.

When: many sites of very unequal speed, tiers of like data. If one kind of data is only in a slow
tier, `fedgsync` weighs by data and not by speed.

Tiers are made after the first round, which waits for everybody, from the measured time of a local
round and exchange, and anew every ``retier_every`` versions.

Trouble: a site that does not answer holds its tier, and no other, until it is declared dead; then
the tier's round closes without it.

Source: FedAT (arXiv 2010.05958), reconstructed; five tiers as there. Its lossy coding of floats is
a matter of codecs here.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
from pydantic import Field
from torch import Tensor

from geo_ray.config.base import StrictModel
from geo_ray.strategies.base import (
    AveragerState,
    Outgoing,
    RegionState,
    Reply,
    Update,
    Weights,
    shares_of,
)
from geo_ray.strategies.common import local, published, speeds
from geo_ray.strategies.traits import AveragerTraits, ExchangeTraits, RegionTraits, Traits

_TIERED: Final = "tiered"  # the version at which tiers were made


class FedAt(StrictModel):
    """Configuration and rule of `fedat`."""

    kind: Literal["fedat"] = "fedat"
    interval: int = Field(8, ge=1, description="local steps per round")
    tiers: int = Field(5, ge=1, description="classes of speed; at most one per site")
    retier_every: int = Field(100, ge=1, description="versions until sites are sorted anew")
    weights: Weights = Field("samples", description="weight of a site within its tier")

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        return Traits(
            in_rounds=False,
            sends="change",
            exchange=ExchangeTraits(
                stands_still="always", every=self.interval, last="always", interval=self.interval
            ),
            region=RegionTraits(ends_together=True, eval_params=local.ANCHOR),
            averager=AveragerTraits(on_release=self.on_release),
        )

    def on_gradient(self, region: RegionState, grad_P: Tensor | None) -> None:
        """A local optimizer step."""
        local.step(region, grad_P)

    def after_step(self, region: RegionState) -> Outgoing | None:
        """Every ``interval`` steps, send what was done and wait for the tier."""
        return local.outgoing_when_due(region, self.interval)

    def on_reply(self, region: RegionState, reply: Reply) -> None:
        """Go on from the global model."""
        local.adopt(region, reply)

    def on_finish(self, region: RegionState) -> Outgoing | None:
        """Always one last exchange: other tiers may have moved the model."""
        return local.outgoing(region)

    def on_update(self, averager: AveragerState, update: Update) -> list[Reply]:
        """Close the rounds of the tiers that are complete."""
        averager.waiting[update.region] = update
        speeds.note(averager, update)
        if _TIERED not in averager.numbers:
            if any(name not in averager.waiting for name in averager.members):
                return []
            self._sort(averager)
        tiers = self._by_tier(averager)
        if update.final or averager.stopping:  # the last answers are one model for all
            whole = all(name in averager.waiting for name in averager.members)
            return self._close(averager, tiers) if whole else []
        full = {m: names for m, names in tiers.items() if all(n in averager.waiting for n in names)}
        return self._close(averager, full)

    def on_release(self, averager: AveragerState) -> list[Reply]:
        """Close what is open with whoever is in."""
        if averager.waiting and _TIERED not in averager.numbers:
            self._sort(averager)
        return self._close(averager, self._by_tier(averager)) if averager.waiting else []

    def _close(self, averager: AveragerState, tiers: dict[int, list[str]]) -> list[Reply]:
        """Take in what is there of the given tiers, then answer those who are in."""
        replies: list[Update] = []
        for tier, names in tiers.items():
            held = [averager.waiting.pop(name) for name in names if name in averager.waiting]
            replies += held
            used = [update for update in held if update.num_samples > 0]
            if not used:
                continue
            # Where each site stands, as the distance from the start of the run.
            stands = [published.told(averager, update).add_(update.payload_P) for update in used]
            shares = shares_of(used, self.weights)
            mean_P = torch.mul(stands[0], shares[0])
            for stand_P, share in zip(stands[1:], shares[1:], strict=True):
                mean_P.add_(stand_P, alpha=share)
            averager.memory[f"tier{tier}"] = mean_P
            averager.numbers[f"count{tier}"] = averager.numbers.get(f"count{tier}", 0.0) + 1.0
            published.move_to(averager, self._mix(averager))
        if averager.version - averager.numbers[_TIERED] >= self.retier_every:
            self._sort(averager)
        return [published.answer(averager, update) for update in replies]

    def _mix(self, averager: AveragerState) -> Tensor:
        """The global model, as the distance from the start of the run (P,)."""
        known = [m for m in range(self.tiers) if f"tier{m}" in averager.memory]
        counts = [averager.numbers[f"count{m}"] for m in known]
        global_P = torch.zeros_like(averager.memory[f"tier{known[0]}"])
        for tier, count in zip(known, reversed(counts), strict=True):
            global_P.add_(averager.memory[f"tier{tier}"], alpha=count / sum(counts))
        return global_P

    def _sort(self, averager: AveragerState) -> None:
        """Tiers of about equal size, by the time of a round."""
        order = sorted(averager.members, key=lambda name: (speeds.round_s(averager, name), name))
        tiers = min(self.tiers, len(order))
        for place, name in enumerate(order):
            averager.numbers[f"tier/{name}"] = float(place * tiers // len(order))
        averager.numbers[_TIERED] = float(averager.version)

    def _by_tier(self, averager: AveragerState) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for name in averager.members:
            found.setdefault(int(averager.numbers.get(f"tier/{name}", 0.0)), []).append(name)
        return dict(sorted(found.items()))
