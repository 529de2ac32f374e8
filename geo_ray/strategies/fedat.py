"""FedAT: sites of about equal speed work in rounds; the tiers mix asynchronously.

Idea: sites are sorted by speed into tiers. Inside a tier a round of federated averaging waits only
for sites of similar speed; tiers never wait for each other. The global model is a weighted mean of
the tiers' models. Tiers that report rarely get the weight of those that report often, so that the
data of slow sites keep their influence.

Rule: tier m's round gives ``w_m = mean_i w_i``; ``G = sum_m (T_(M+1-m) / T) w_m`` with ``T_m`` the
rounds of tier m so far, tiers sorted from fast to slow; the tier's sites continue from G.

When: many sites of very unequal speed, tiers of like data. If one kind of data is only in a slow
tier, use `fedgsync`, which weighs by data and not by speed.

Speeds are unknown until every site has reported a whole round, exchange included. Until then all
sites are one tier, and the global model is their mean. A site's first exchange is timed when its
second round arrives, so two rounds wait for all sites, and the second of them makes the tiers. They
are made again when some site's rounds were longer, or shorter, than when it was sorted, by more
than a fraction ``retier_at``, three times in a row: one late packet changes nothing.

Failures: a site whose link is down holds its tier, and no other, until the link is back or a
deadline ends the run; while there is one tier, it holds all. A tier continues without a site that
is lost, if the run does (`members.min`, or a standby for the averager's region).

Source: FedAT (arXiv 2010.05958), reconstructed; five tiers as there. The rule for making tiers is
ours; its lossy coding of floats is left to codecs.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
from pydantic import Field
from torch import Tensor

from geo_ray.strategies import global_model, local_steps
from geo_ray.strategies.base import LocalSteps, mean_by
from geo_ray.strategies.global_model import SiteWeights, site_fractions
from geo_ray.strategies.state import AveragerState, Reply, Update
from geo_ray.strategies.traits import AveragerTraits, ExchangeTraits, RegionTraits, Traits

_TIERED: Final = "tiered"  # whether there are tiers
_REPORTS: Final = "reports/"  # per site; from the second update on the previous exchange is timed
_ROUND_S: Final = "round_s/"  # a site's whole round, smoothed
_SORTED_S: Final = "sorted_s/"  # the same when it was sorted
_MOVED: Final = "moved/"  # rounds in a row that were longer than that, or, below 0, shorter
_PATIENCE: Final = 3


class FedAt(LocalSteps):
    """Configuration and rule of `fedat`."""

    kind: Literal["fedat"] = "fedat"
    interval: int = Field(8, ge=1, description="local steps per round")
    tiers: int = Field(5, ge=1, description="number of speed tiers; at most one per site")
    retier_at: float = Field(
        0.25,
        gt=0,
        description="relative change of a site's round time that rebuilds the tiers, if it "
        "occurs three times in a row",
    )
    weights: SiteWeights = Field(
        "data",
        description="weight within a tier: by the rows of data sets, by the rows of the round, "
        "or uniform",
    )

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        return Traits(
            in_rounds=False,
            sends="change",
            exchange=ExchangeTraits(
                blocking="always",
                every=self.interval,
                last="always",
                interval=self.interval,
                adjustable_interval=True,
            ),
            region=RegionTraits(ends_by_total_rows=True, eval_params=local_steps.ANCHOR),
            averager=AveragerTraits(releases=True),
        )

    def on_update(self, averager: AveragerState, update: Update) -> list[Reply]:
        """Close the rounds of the tiers that are complete."""
        averager.waiting[update.region] = update
        self._note(averager, update)
        all_in = all(name in averager.waiting for name in averager.members)
        if _TIERED not in averager.numbers:
            if not all_in:
                return []
            reports = [averager.numbers.get(_REPORTS + name, 0.0) for name in averager.members]
            if min(reports) >= 2:
                self._sort(averager)
        if update.final or averager.stopping:  # the last answers are one model for all
            return self._close(averager, self._by_tier(averager)) if all_in else []
        return self._close(averager, self._full(averager))

    def on_release(self, averager: AveragerState) -> list[Reply]:
        """Close open rounds with the sites that have reported."""
        return self._close(averager, self._by_tier(averager)) if averager.waiting else []

    def _close(self, averager: AveragerState, tiers: dict[int, list[str]]) -> list[Reply]:
        """Apply the updates of the given tiers, then answer their senders."""
        held = self._take_in(averager, tiers)
        if _TIERED in averager.numbers and self._have_times_moved(averager):
            self._sort(averager)
            held += self._take_in(
                averager, self._full(averager)
            )  # regions that no slow site delays now
        return [global_model.answer(averager, update) for update in held]

    def _take_in(self, averager: AveragerState, tiers: dict[int, list[str]]) -> list[Update]:
        taken: list[Update] = []
        for tier, names in tiers.items():
            held = [averager.waiting.pop(name) for name in names if name in averager.waiting]
            taken += held
            used = [update for update in held if update.num_samples > 0]
            if not used:
                continue
            # Where each site stands, as the distance from the start of the run.
            stands = [
                global_model.known_model(averager, update).add_(update.payload_P) for update in used
            ]
            fractions = site_fractions(averager, used, self.weights)
            averager.memory[f"tier{tier}"] = mean_by(stands, fractions)
            averager.numbers[f"count{tier}"] = averager.numbers.get(f"count{tier}", 0.0) + 1.0
            global_model.move_to(averager, self._mix(averager))
        return taken

    def _mix(self, averager: AveragerState) -> Tensor:
        """Return the global model, as the distance from the start of the run (P,)."""
        known = [m for m in range(self.tiers) if f"tier{m}" in averager.memory]
        counts = [averager.numbers[f"count{m}"] for m in known]
        global_P = torch.zeros_like(averager.memory[f"tier{known[0]}"])
        for tier, count in zip(known, reversed(counts), strict=True):
            global_P.add_(averager.memory[f"tier{tier}"], alpha=count / sum(counts))
        return global_P

    def _note(self, averager: AveragerState, update: Update) -> None:
        """Record how long a whole round of the sender takes."""
        numbers, name = averager.numbers, update.region
        if update.steps == 0:
            return  # a final update without a round
        numbers[_REPORTS + name] = numbers.get(_REPORTS + name, 0.0) + 1.0
        if numbers[_REPORTS + name] < 2:
            return
        took_s = self.interval * update.step_s + update.exchange_s
        numbers[_ROUND_S + name] = (numbers.get(_ROUND_S + name, took_s) + took_s) / 2
        then_s = numbers.get(_SORTED_S + name)
        if then_s is None:
            return
        factor = 1.0 + self.retier_at
        way = float(took_s > factor * then_s) - float(took_s * factor < then_s)
        moved = numbers.get(_MOVED + name, 0.0)
        numbers[_MOVED + name] = moved + way if moved * way >= 0 and way else way

    def _have_times_moved(self, averager: AveragerState) -> bool:
        moved = (averager.numbers.get(_MOVED + name, 0.0) for name in averager.members)
        return any(abs(times) >= _PATIENCE for times in moved)

    def _sort(self, averager: AveragerState) -> None:
        """Sort sites into tiers of about equal size, by the time of a round."""
        numbers, members = averager.numbers, averager.members
        if _TIERED not in numbers:  # a single tier has no counterpart among several tiers
            for tier in range(self.tiers):
                averager.memory.pop(f"tier{tier}", None)
                numbers.pop(f"count{tier}", None)
        order = sorted(members, key=lambda name: (numbers.get(_ROUND_S + name, 0.0), name))
        tiers = min(self.tiers, len(order))
        for place, name in enumerate(order):
            numbers[f"tier/{name}"] = float(place * tiers // len(order))
            numbers[_SORTED_S + name] = numbers.get(_ROUND_S + name, 0.0)
            numbers[_MOVED + name] = 0.0
        numbers[_TIERED] = 1.0

    def _full(self, averager: AveragerState) -> dict[int, list[str]]:
        """Return the tiers all of whose sites have reported."""
        tiers = self._by_tier(averager)
        return {m: names for m, names in tiers.items() if all(n in averager.waiting for n in names)}

    def _by_tier(self, averager: AveragerState) -> dict[int, list[str]]:
        """Return sites by tier, fast ones first; one tier before sites are sorted."""
        found: dict[int, list[str]] = {}
        for name in averager.members:
            found.setdefault(int(averager.numbers.get(f"tier/{name}", 0.0)), []).append(name)
        return dict(sorted(found.items()))
