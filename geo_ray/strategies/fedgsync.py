"""FedGSync: rounds that wait for every kind of data, and not for every site.

Idea: sites with like data stand in for each other. They are grouped by what their updates look like
(`geo_ray.strategies.common.grouping`); a round closes when every group has spoken, through its
fastest, and every group counts by the rows of all. Slow sites are not waited for, nor are their
data drowned.

Rule: a round closes when ``ceil(quorum * |g|)`` sites (at least one) of each group g are in, or at
``deadline_s``; then ``G <- G - outer(sum_g q_g d_g)`` with ``q_g`` the group's share of all rows of
data. A change that is ``lag`` rounds late weighs ``a_i = 1/(1 + lag)``; ``d_g = max(a_i) * sum(a_i
D_i) / sum(a_i)`` over the sites that are in, so that one that is late neither drowns nor shrinks
those in time. A group that nobody speaks for counts with its last ``d_g``, times ``absent`` per
round in a row.

However late, a change counts. With ``max_lag`` one that is later does not, and a site that is
always later never contributes: set it only where others have data like such sites'.

When: many sites, unlike data, unequal speed. All alike: one group, hence asynchronous rounds with
a quorum. A group of one slow site holds every round until the deadline: set one.

Groups are made after the first round, which waits for everybody. Every ``regroup_every`` rounds
each site's next update is looked at again, without waiting; when all have spoken, groups are made
anew, and keep the number of the group that they share most sites with. With ``codec.up: dgt`` sites
that close rounds send ``share_closing`` of their blocks reliably, the others ``share_extra``.

Source: FedGSync's abstract: groups by principal components of gradients and K-means, group-weak
rounds, transmission that differs between groups; all beyond that is reconstructed or ours.
"""

from __future__ import annotations

import math
from dataclasses import replace
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
    mean_by,
)
from geo_ray.strategies.common import grouping, local, published, speeds
from geo_ray.strategies.common.data_sizes import member_rows
from geo_ray.strategies.common.outer import OuterConfig, OuterSgd, outer_change
from geo_ray.strategies.traits import AveragerTraits, ExchangeTraits, RegionTraits, Traits

_GROUPED: Final = "grouped"  # the version at which groups were made
_MEAN: Final = "mean"  # of a group, with its number
_SKETCH: Final = "sketch/"  # of a site's update, for the next grouping


class FedGSync(StrictModel):
    """Configuration and rule of `fedgsync`."""

    kind: Literal["fedgsync"] = "fedgsync"
    interval: int = Field(8, ge=1, description="local steps per round")
    by_speed: bool = Field(False, description="slower sites take fewer local steps")
    groups: int = Field(10, ge=1, description="groups at most; also at most half of the sites")
    quorum: float = Field(0.0, ge=0, le=1, description="share of a group that a round waits for")
    deadline_s: float | None = Field(None, gt=0, description="longest round after its first update")
    max_lag: int | None = Field(
        None, ge=0, description="rounds by which a change may be late; null: any"
    )
    regroup_every: int = Field(50, ge=1, description="rounds until sites are looked at again")
    absent: float = Field(0.5, ge=0, le=1, description="weight of an absent group's last mean")
    share_closing: float = Field(0.8, gt=0, le=1, description="dgt: reliable, closing sites")
    share_extra: float = Field(0.2, gt=0, le=1, description="dgt: reliable, other sites")
    outer: OuterConfig = Field(OuterSgd(), description="what is made of the mean change")
    seed: int = Field(0, ge=0, description="of sketches and K-means")

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        return Traits(
            in_rounds=False,
            sends="change",
            exchange=ExchangeTraits(
                stands_still="always",
                every=self.interval,
                last="always",
                by_speed=self.by_speed,
                interval=self.interval,
                paced=not self.by_speed,
            ),
            region=RegionTraits(ends_together=True, eval_params=local.ANCHOR),
            averager=AveragerTraits(
                plain_outer=self.outer.plain, on_release=self.on_release, on_wake=self.on_wake
            ),
        )

    def on_gradient(self, region: RegionState, grad_P: Tensor | None) -> None:
        """A local optimizer step."""
        local.step(region, grad_P)

    def after_step(self, region: RegionState) -> Outgoing | None:
        """Every ``interval`` steps, send what was done and wait for the round."""
        return local.outgoing_when_due(region, self.interval)

    def on_reply(self, region: RegionState, reply: Reply) -> None:
        """Go on from the outer model."""
        local.adopt(region, reply)

    def on_finish(self, region: RegionState) -> Outgoing | None:
        """Always one last exchange: rounds may have gone on without this site."""
        return local.outgoing(region)

    def on_update(self, averager: AveragerState, update: Update) -> list[Reply]:
        """Close the round when every group has spoken."""
        averager.waiting[update.region] = update
        speeds.note(averager, update)
        self._look_at(averager, update)
        is_first = _GROUPED not in averager.numbers
        if is_first or update.final or averager.stopping:
            if any(name not in averager.waiting for name in averager.members):
                return []
        elif not all(self._is_in(averager, names) for names in self.members_of(averager).values()):
            if self.deadline_s is not None and averager.wake_s is None:
                averager.wake_s = averager.now_s + self.deadline_s
            return []
        if is_first:
            self._group(averager)
        replies = self._close(averager)
        self._group(averager)
        return replies

    def on_release(self, averager: AveragerState) -> list[Reply]:
        """Close the round with whoever is in."""
        return self._close(averager) if averager.waiting else []

    def on_wake(self, averager: AveragerState) -> list[Reply]:
        """Close the round at its deadline."""
        return self.on_release(averager)

    def members_of(self, averager: AveragerState) -> dict[int, list[str]]:
        """Sites by group; one that is new belongs to the first."""
        found: dict[int, list[str]] = {}
        for name in averager.members:
            found.setdefault(int(averager.numbers.get(f"group/{name}", 0.0)), []).append(name)
        return found

    def _is_in(self, averager: AveragerState, names: list[str]) -> bool:
        return sum(name in averager.waiting for name in names) >= self._needed(names)

    def _needed(self, names: list[str]) -> int:
        return max(1, math.ceil(self.quorum * len(names)))

    def _look_at(self, averager: AveragerState, update: Update) -> None:
        """Keep a sketch of each site's first update since it was due."""
        grouped_at, key = averager.numbers.get(_GROUPED), _SKETCH + update.region
        is_due = grouped_at is None or averager.version - grouped_at >= self.regroup_every
        if is_due and update.num_samples > 0 and key not in averager.memory:
            averager.memory[key] = grouping.sketch(update.payload_P, self.seed)

    def _group(self, averager: AveragerState) -> None:
        """Make groups, if there is a sketch of every site."""
        numbers, memory, members = averager.numbers, averager.memory, averager.members
        if any(_SKETCH + name not in memory for name in members):
            return
        sketches = [memory.pop(_SKETCH + name) for name in members]
        found = grouping.group(sketches, self.groups, self.seed)
        if _GROUPED in numbers:
            before = [int(numbers.get(f"group/{name}", 0.0)) for name in members]
            found = grouping.matched(before, found)
        numbers |= {f"group/{name}": float(g) for name, g in zip(members, found, strict=True)}
        numbers[_GROUPED] = float(averager.version)
        means = {_mean_of(number) for number in found}
        for gone in [key for key in memory if key.startswith(_MEAN) and key not in means]:
            del memory[gone]

    def _close(self, averager: AveragerState) -> list[Reply]:
        averager.wake_s = None
        held = list(averager.waiting.values())  # in the order of arrival
        averager.waiting.clear()
        rows = member_rows(averager)
        total_P = torch.zeros_like(held[0].payload_P)
        reliable: dict[str, float] = {}
        for number, names in self.members_of(averager).items():
            share = sum(rows[name] for name in names) / max(1.0, sum(rows.values()))
            reporters = [update for update in held if update.region in names]
            total_P.add_(self._mean(averager, number, reporters, total_P), alpha=share)
            for place, update in enumerate(reporters):
                is_closing = place < self._needed(names)
                reliable[update.region] = self.share_closing if is_closing else self.share_extra
        published.publish(averager, outer_change(self.outer, averager, total_P))
        return [replace(self._answer(averager, u), reliable=reliable[u.region]) for u in held]

    def _answer(self, averager: AveragerState, update: Update) -> Reply:
        steps = (
            speeds.steps_by_speed(averager, update.region, self.interval) if self.by_speed else None
        )
        return published.answer(averager, update, steps)

    def _mean(
        self, averager: AveragerState, number: int, updates: list[Update], like_P: Tensor
    ) -> Tensor:
        """What a group did: as those say who are in, or else as it last was, fading."""
        key = _mean_of(number)
        lags = {u.region: averager.version - u.base_version for u in updates}
        latest = math.inf if self.max_lag is None else self.max_lag
        used = [u for u in updates if u.num_samples > 0 and lags[u.region] <= latest]
        if not used:
            return averager.memory.setdefault(key, torch.zeros_like(like_P)).mul_(self.absent)
        weights = [1.0 / (1.0 + lags[u.region]) for u in used]
        shares = [max(weights) * weight / sum(weights) for weight in weights]
        averager.memory[key] = mean_by([u.payload_P for u in used], shares)
        return averager.memory[key]


def _mean_of(number: int) -> str:
    """Where the last mean of a group is kept."""
    return f"{_MEAN}{number}"
