"""Federated averaging: K local steps in a sample of the sites, then the weighted mean of models.

Idea: in every round a fraction of the sites trains K steps from the same model, while the others
wait. The outer model moves by the mean of their changes. With ``fraction`` 1, the default outer
optimizer and ``weights: samples`` it is `sma`; with few sites per round it scales to a thousand
sites.

Rule: ``w <- w - outer(sum_i q_i (w - w_i))`` over the sampled sites, ``q_i`` by the sizes of their
data sets (or by the rows of the round, or uniform), so that every row of data counts the same.
The first round takes every site, because all begin with the same model; then ``ceil(fraction * M)``
of them, drawn for every round from ``seed`` and the round's number.

When: many sites, most of which may rest. For few regions use `diloco` or `sma`.

Failures: a round waits for every chosen site. A site whose link is down holds it until the link is
back, or until a deadline ends the run. When a site is lost and the run continues (`members.min`, or
a standby for the averager's region), the round closes without it, and all waiting sites are
answered. Sites that were not chosen then train a round, which counts with the round that is open
when it arrives.

Source: FedAvg (McMahan et al., 2017; arXiv 1602.05629), reconstructed. Local epochs are steps
here, as everywhere.
"""

from __future__ import annotations

import math
import random
from typing import Literal

from pydantic import Field

from geo_ray.strategies import global_model, local_steps
from geo_ray.strategies.base import LocalSteps, mean_by
from geo_ray.strategies.global_model import SiteWeights, site_fractions
from geo_ray.strategies.outer import OuterConfig, OuterSgd, outer_change
from geo_ray.strategies.state import AveragerState, Reply, Update
from geo_ray.strategies.traits import AveragerTraits, ExchangeTraits, RegionTraits, Traits

_CHOSEN = "chosen/"


class FedAvg(LocalSteps):
    """Configuration and rule of `fedavg`."""

    kind: Literal["fedavg"] = "fedavg"
    interval: int = Field(8, ge=1, description="local steps per round")
    by_speed: bool = Field(
        False, description="slower sites take fewer local steps, in proportion to their speed"
    )
    fraction: float = Field(
        1.0,
        gt=0,
        le=1,
        description="fraction of the sites that train in a round; the first round takes all",
    )
    weights: SiteWeights = Field(
        "data",
        description="weight of a site: by the rows of its data set, by the rows of the round, "
        "or uniform",
    )
    outer: OuterConfig = Field(
        OuterSgd(), description="outer optimizer, applied to the mean change"
    )
    seed: int = Field(0, ge=0, description="seed of the choice of sites")

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
                by_speed=self.by_speed,
                interval=self.interval,
                adjustable_interval=not self.by_speed,
            ),
            region=RegionTraits(
                local_optimizer=True, ends_by_total_rows=True, eval_params=local_steps.ANCHOR
            ),
            averager=AveragerTraits(plain_outer=self.outer.plain, releases=True),
        )

    def on_update(self, averager: AveragerState, update: Update) -> list[Reply]:
        """Close the round when every chosen site has reported; answer those of the next."""
        global_model.note_speed(averager, update)
        averager.waiting[update.region] = update
        if any(name not in averager.waiting for name in self._chosen(averager)):
            return []
        return self._close(averager)

    def on_release(self, averager: AveragerState) -> list[Reply]:
        """Close the round with the sites that have reported, and let all continue."""
        return self._close(averager, all_sites=True) if averager.waiting else []

    def _chosen(self, averager: AveragerState) -> list[str]:
        chosen = [name for name in averager.members if averager.numbers.get(_CHOSEN + name)]
        return chosen or list(averager.members)

    def _close(self, averager: AveragerState, *, all_sites: bool = False) -> list[Reply]:
        held = [averager.waiting[name] for name in averager.members if name in averager.waiting]
        fresh = [
            update
            for update in held
            if update.num_samples > 0 and not averager.numbers.get(f"rests/{update.region}")
        ]
        if fresh:
            fractions = site_fractions(averager, fresh, self.weights)
            mean_P = mean_by([update.payload_P for update in fresh], fractions)
            global_model.publish(averager, outer_change(self.outer, averager, mean_P))
        all_sites = all_sites or averager.stopping or any(update.final for update in held)
        count = (
            len(averager.members) if all_sites else math.ceil(self.fraction * len(averager.members))
        )
        draw = random.Random(f"{self.seed}/{averager.version}").sample(averager.members, count)
        replies = []
        for name in averager.members:
            averager.numbers[_CHOSEN + name] = float(name in draw)
            if name not in averager.waiting:
                continue
            averager.numbers[f"rests/{name}"] = float(name not in draw)
            if name in draw:
                replies.append(self._answer(averager, averager.waiting.pop(name)))
        return replies

    def _answer(self, averager: AveragerState, update: Update) -> Reply:
        return global_model.answer(averager, update, self.interval if self.by_speed else None)
