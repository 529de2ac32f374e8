"""FedGSync: rounds that wait for every kind of data, and not for every site.

Idea: sites with like data represent each other. They are grouped by similarity of their updates
(see below). A round closes when every group has reported, through its fastest sites, and every
group counts by the rows of all its sites. Slow sites are not waited for, but their data count.

Rule: a round closes when ``ceil(quorum * |g|)`` sites (at least one) of each group g have reported,
or at ``deadline_s``; then ``G <- G - outer(sum_g q_g d_g)`` with ``q_g`` the group's fraction of
all rows of data. A change that is ``lag`` rounds late weighs ``a_i = 1/(1 + lag)``; ``d_g =
max(a_i) * sum(a_i D_i) / sum(a_i)`` over the sites that have reported, so that a late site neither
dominates nor shrinks those in time. A group without reports counts with its last ``d_g``, times
``absent`` per round in a row.

However late, a change counts. With ``max_lag`` later ones do not, and a site that is always later
never contributes: set it only if others have similar data.

When: many sites, unlike data, unequal speed. If all data are alike there is one group, hence
asynchronous rounds with a quorum. A group of one slow site holds every round until the deadline:
set one.

Groups are made after the first round, which waits for all sites. Every ``regroup_every`` rounds
each site's next update is examined again, without waiting; when all have reported, groups are
made again, and keep the number of the group with which they have most sites in common. With
``codec.up: dgt`` sites that close rounds send ``closing_fraction`` of their blocks reliably, the
others ``extra_fraction``.

Grouping: the updates of one round, all from the same parameters, are projected to a few hundred
numbers each (signs and buckets drawn from a seed: a count sketch, which preserves angles), made
unit vectors, reduced to their principal components, and clustered by K-means; the number of groups
is the one with the best silhouette. With fewer than four sites there is one group. Updates reveal
labels, so grouping is as private as sending updates is, and not more.

Source: FedGSync's abstract: groups by principal components of gradients and K-means, group-weak
rounds, transmission that differs between groups; all beyond that is reconstructed or ours.

Shape legend: P = parameters of the model; N = sites; D = numbers of a sketch; Q = components.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from geo_ray.strategies import global_model, local_steps
from geo_ray.strategies.base import LocalSteps, mean_by
from geo_ray.strategies.global_model import member_rows
from geo_ray.strategies.outer import OuterConfig, OuterSgd, outer_change
from geo_ray.strategies.state import AveragerState, Reply, Update
from geo_ray.strategies.traits import AveragerTraits, ExchangeTraits, RegionTraits, Traits

_SKETCH_SIZE: Final = 512
_FEWEST: Final = 4
_MOST_COMPONENTS: Final = 8
_VARIANCE: Final = 0.9
_RESTARTS: Final = 10
_TOLERABLE: Final = 0.1  # a silhouette below that says that there are no groups


def sketch(change_P: Tensor, seed: int) -> Tensor:
    """Return a vector's count sketch: fp32 (D,), the same for the same seed and P."""
    generator = torch.Generator().manual_seed(seed)
    buckets_P = torch.randint(_SKETCH_SIZE, change_P.shape, generator=generator)
    signs_P = torch.randint(2, change_P.shape, generator=generator) * 2 - 1
    return torch.zeros(_SKETCH_SIZE).index_add_(0, buckets_P, change_P * signs_P)


def group(sketches: Sequence[Tensor], most: int, seed: int) -> list[int]:
    """Return a group number for each site, from 0 in the order of appearance.

    Args:
        sketches: of the sites' updates, (D,) each.
        most: largest number of groups.
        seed: of K-means.
    """
    if len(sketches) < _FEWEST:
        return [0] * len(sketches)
    # Here, since it takes as long to import as torch, and every command imports every strategy.
    from sklearn.cluster import k_means
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.metrics import silhouette_score

    components_NQ = principal_components(torch.stack(list(sketches)).double())
    best, labels = _TOLERABLE, np.zeros(len(sketches), dtype=int)
    for count in range(2, min(most, len(sketches) // 2) + 1):
        with warnings.catch_warnings():  # fewer distinct sites than groups: no such grouping
            warnings.simplefilter("ignore", ConvergenceWarning)
            _, found, _ = k_means(components_NQ, count, n_init=_RESTARTS, random_state=seed)
        if len(set(found)) < count:
            continue
        score = float(silhouette_score(components_NQ, found))
        if score > best:
            best, labels = score, found
    order = list(dict.fromkeys(labels.tolist()))
    return [order.index(label) for label in labels.tolist()]


def matched(before: Sequence[int], now: Sequence[int]) -> list[int]:
    """Renumber the groups of ``now`` so that as many sites as possible keep their number.

    A group without a counterpart gets the lowest free number.

    Args:
        before: a group number for each site.
        now: the same, of another grouping of the same sites.
    """
    from scipy.optimize import linear_sum_assignment  # slow to import, as above

    shared = np.zeros((max(now) + 1, max(before) + 1))
    for new, old in zip(now, before, strict=True):
        shared[new, old] += 1
    pairs = zip(*linear_sum_assignment(shared, maximize=True), strict=True)
    numbers = {int(new): int(old) for new, old in pairs if shared[new, old] > 0}
    free = (number for number in range(len(now) + max(before) + 1) if number not in before)
    return [numbers[new] if new in numbers else numbers.setdefault(new, next(free)) for new in now]


def principal_components(rows_ND: Tensor) -> np.ndarray:
    """Project unit rows to the principal directions that hold most of their variance (N, Q)."""
    norms_N1 = torch.linalg.vector_norm(rows_ND, dim=1, keepdim=True).clamp_min(1e-30)
    unit_ND = rows_ND / norms_N1
    centred_ND = unit_ND - unit_ND.mean(dim=0)
    u_NN, s_N, _ = torch.linalg.svd(centred_ND, full_matrices=False)
    fraction_N = torch.cumsum(s_N**2, 0) / (s_N**2).sum().clamp_min(1e-30)
    count = int((fraction_N < _VARIANCE).sum()) + 1
    count = min(count, _MOST_COMPONENTS, len(rows_ND) - 1)
    return np.asarray((u_NN[:, :count] * s_N[:count]).numpy())


_GROUPED: Final = "grouped"  # the version at which groups were made
_MEAN: Final = "mean"  # of a group, with its number
_SKETCH_PREFIX: Final = "sketch/"  # of a site's update, for the next grouping


class FedGSync(LocalSteps):
    """Configuration and rule of `fedgsync`."""

    kind: Literal["fedgsync"] = "fedgsync"
    interval: int = Field(8, ge=1, description="local steps per round")
    by_speed: bool = Field(
        False, description="slower sites take fewer local steps, in proportion to their speed"
    )
    groups: int = Field(
        10, ge=1, description="largest number of groups; also at most half of the sites"
    )
    quorum: float = Field(
        0.0,
        ge=0,
        le=1,
        description="fraction of each group that a round waits for; at least one site",
    )
    deadline_s: float | None = Field(
        None,
        gt=0,
        description="longest time of a round after its first update; set it if a whole group "
        "may be slow",
    )
    max_lag: int | None = Field(
        None,
        ge=0,
        description="rounds by which a change may be late; later ones are ignored; null: any",
    )
    regroup_every: int = Field(50, ge=1, description="rounds until groups are formed again")
    absent: float = Field(
        0.5,
        ge=0,
        le=1,
        description="factor for the last mean of a group without updates, per round in a row",
    )
    closing_fraction: float = Field(
        0.8,
        gt=0,
        le=1,
        description="with codec dgt: fraction of reliable blocks of sites that close rounds",
    )
    extra_fraction: float = Field(
        0.2,
        gt=0,
        le=1,
        description="with codec dgt: fraction of reliable blocks of all other sites",
    )
    outer: OuterConfig = Field(
        OuterSgd(), description="outer optimizer, applied to the mean change"
    )
    seed: int = Field(0, ge=0, description="seed of sketches and K-means")

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
            region=RegionTraits(ends_by_total_rows=True, eval_params=local_steps.ANCHOR),
            averager=AveragerTraits(plain_outer=self.outer.plain, releases=True, wakes=True),
        )

    def on_update(self, averager: AveragerState, update: Update) -> list[Reply]:
        """Close the round when every group has reported."""
        averager.waiting[update.region] = update
        global_model.note_speed(averager, update)
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
        """Close the round with the sites that have reported."""
        return self._close(averager) if averager.waiting else []

    def on_wake(self, averager: AveragerState) -> list[Reply]:
        """Close the round at its deadline."""
        return self.on_release(averager)

    def members_of(self, averager: AveragerState) -> dict[int, list[str]]:
        """Return sites by group; a new site belongs to the first."""
        found: dict[int, list[str]] = {}
        for name in averager.members:
            found.setdefault(int(averager.numbers.get(f"group/{name}", 0.0)), []).append(name)
        return found

    def _is_in(self, averager: AveragerState, names: list[str]) -> bool:
        return sum(name in averager.waiting for name in names) >= self._needed(names)

    def _needed(self, names: list[str]) -> int:
        return max(1, math.ceil(self.quorum * len(names)))

    def _look_at(self, averager: AveragerState, update: Update) -> None:
        """Store a sketch of each site's first update since regrouping is due."""
        grouped_at, key = averager.numbers.get(_GROUPED), _SKETCH_PREFIX + update.region
        is_due = grouped_at is None or averager.version - grouped_at >= self.regroup_every
        if is_due and update.num_samples > 0 and key not in averager.memory:
            averager.memory[key] = sketch(update.payload_P, self.seed)

    def _group(self, averager: AveragerState) -> None:
        """Form groups, if there is a sketch of every site."""
        numbers, memory, members = averager.numbers, averager.memory, averager.members
        if any(_SKETCH_PREFIX + name not in memory for name in members):
            return
        sketches = [memory.pop(_SKETCH_PREFIX + name) for name in members]
        found = group(sketches, self.groups, self.seed)
        if _GROUPED in numbers:
            before = [int(numbers.get(f"group/{name}", 0.0)) for name in members]
            found = matched(before, found)
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
            fraction = sum(rows[name] for name in names) / max(1.0, sum(rows.values()))
            reporters = [update for update in held if update.region in names]
            total_P.add_(self._mean(averager, number, reporters, total_P), alpha=fraction)
            for place, update in enumerate(reporters):
                is_closing = place < self._needed(names)
                reliable[update.region] = (
                    self.closing_fraction if is_closing else self.extra_fraction
                )
        global_model.publish(averager, outer_change(self.outer, averager, total_P))
        return [replace(self._answer(averager, u), reliable=reliable[u.region]) for u in held]

    def _answer(self, averager: AveragerState, update: Update) -> Reply:
        return global_model.answer(averager, update, self.interval if self.by_speed else None)

    def _mean(
        self, averager: AveragerState, number: int, updates: list[Update], like_P: Tensor
    ) -> Tensor:
        """Return a group's mean change: of its reports, or else its last one with less weight."""
        key = _mean_of(number)
        lags = {u.region: u.lag for u in updates}
        latest = math.inf if self.max_lag is None else self.max_lag
        used = [u for u in updates if u.num_samples > 0 and lags[u.region] <= latest]
        if not used:
            return averager.memory.setdefault(key, torch.zeros_like(like_P)).mul_(self.absent)
        weights = [1.0 / (1.0 + lags[u.region]) for u in used]
        fractions = [max(weights) * weight / sum(weights) for weight in weights]
        averager.memory[key] = mean_by([u.payload_P for u in used], fractions)
        return averager.memory[key]


def _mean_of(number: int) -> str:
    """Return the name of the last mean of a group."""
    return f"{_MEAN}{number}"
