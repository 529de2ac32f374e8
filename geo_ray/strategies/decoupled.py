"""Decoupled DiLoCo: a fragment is updated when enough regions have sent theirs.

Idea: like `diloco_streaming`, but the averager does not wait for all regions. It takes a fragment's
outer step when K regions have reported and a grace period has passed. Later reports join the
fragment's next step. Reports are weighted by the rows behind them.

Rule: weight ``rows^2 / steps``; outer Nesterov per fragment on the weighted mean, or with ``merge:
rda`` on the mean direction times the mean norm: changes of several regions are nearly orthogonal,
and their plain mean shrinks by ``1/sqrt(M)``. A region merges an answer when it arrives: ``w_p <-
alpha w_p + (1 - alpha) outer_p``, and counts from there.

When: regions that stall or differ in speed, with transfers that must overlap training. `rda` makes
steps up to ``sqrt(M)`` longer: lower the outer learning rate with it.

Failures: once K regions have reported and ``grace_s`` is over, no other region is waited for,
except in the last exchange, which needs all. A region whose link returns receives all that it
missed, fragment by fragment. A lost region is not waited for at all, from when it is declared lost,
if `members.min` lets the run continue without it.

Source: Decoupled DiLoCo, from secondary summaries; reconstructed, not checked against the paper.
Fragments are contiguous here, and `rda` is per fragment, not per tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal

import torch
from pydantic import Field
from torch import Tensor

from geo_ray.strategies import global_model, local_steps
from geo_ray.strategies.base import LocalSteps
from geo_ray.strategies.outer import OuterConfig, OuterNesterov, outer_change
from geo_ray.strategies.state import AveragerState, Outgoing, RegionState, Reply, Update
from geo_ray.strategies.traits import AveragerTraits, ExchangeTraits, RegionTraits, Traits

_CANCELLED: Final = 1e-5  # norm of the weighted sum of unit directions


def combined(changes: Sequence[Tensor], weights: Sequence[float], *, by_direction: bool) -> Tensor:
    """Return the weighted mean of changes, plain or by direction.

    Args:
        changes: at least one, fp32 (P,) each; they stay as they are.
        weights: at least one of them above 0.
        by_direction: changes that are zero then have no direction; if all are, or if they cancel
            out, it is the plain mean.

    Returns:
        A new fp32 tensor (P,).
    """
    fractions = [weight / sum(weights) for weight in weights]
    norms = [float(torch.linalg.vector_norm(change_P)) for change_P in changes]
    total_P = torch.zeros_like(changes[0])
    for change_P, fraction, norm in zip(changes, fractions, norms, strict=True):
        if not by_direction:
            total_P.add_(change_P, alpha=fraction)
        elif norm > 0:
            total_P.add_(change_P, alpha=fraction / norm)
    length = float(torch.linalg.vector_norm(total_P))
    if by_direction and length < _CANCELLED:  # no direction: rounding would be amplified
        return combined(changes, weights, by_direction=False)
    if by_direction:
        mean_norm = sum(fraction * norm for fraction, norm in zip(fractions, norms, strict=True))
        total_P.mul_(mean_norm / length)
    return total_P


class Decoupled(LocalSteps):
    """Configuration and rule of `decoupled`."""

    kind: Literal["decoupled"] = "decoupled"
    interval: int = Field(24, ge=1, description="local steps between two reports of a fragment (H)")
    fragments: int = Field(4, ge=2, le=256, description="number of parts of the model")
    quorum: int = Field(
        1, ge=1, description="reports that an outer step of a fragment requires (K)"
    )
    grace_s: float = Field(
        0.0, ge=0, description="time that an outer step waits for further reports"
    )
    merge: Literal["mean", "rda"] = Field(
        "mean", description="mean: weighted mean; rda: mean direction times mean length"
    )
    alpha: float = Field(0.0, ge=0, lt=1, description="weight of the local fragment in a merge")
    outer: OuterConfig = Field(
        OuterNesterov(), description="outer optimizer, applied to the mean change"
    )

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        return Traits(
            in_rounds=False,
            sends="change",
            exchange=ExchangeTraits(
                blocking="never",
                every=self._steps_between,
                last="always",
                fragments=self.fragments,
                interval=self.interval,
            ),
            region=RegionTraits(local_optimizer=True, eval_params=local_steps.ANCHOR),
            averager=AveragerTraits(
                plain_outer=self.outer.plain,
                releases=True,
                frees=True,
                wakes=True,
            ),
        )

    @property
    def _steps_between(self) -> int:
        return max(1, self.interval // self.fragments)

    def after_step(self, region: RegionState) -> Outgoing | None:
        """Every H/F steps report the next fragment, if the link is free; never wait."""
        if region.link_busy or region.since_send < self._steps_between:
            return None
        number = int(region.numbers.get("next", 0.0))
        region.numbers["next"] = float((number + 1) % self.fragments)
        start, stop = region.fragments[number]
        part_S = region.params_P[start:stop]
        region.memory["sent"] = part_S.clone()
        return Outgoing(local_steps.anchor(region)[start:stop] - part_S, False, number)

    def is_quiet(self, region: RegionState) -> bool:
        """See `Strategy.is_quiet`."""
        return region.link_busy or region.since_send < self._steps_between

    def on_reply(self, region: RegionState, reply: Reply) -> None:
        """Move the fragment and keep local progress since sending. The last one replaces it."""
        start, stop = region.fragments[reply.fragment]
        params_S, anchor_S = region.params_P[start:stop], local_steps.anchor(region)[start:stop]
        anchor_S.sub_(reply.payload_P)
        if reply.final or reply.fragment == self.fragments:
            params_S.copy_(anchor_S)
            return
        sent_S = region.memory.pop("sent")
        since_S = sent_S - params_S
        params_S.copy_(sent_S.lerp_(anchor_S, 1.0 - self.alpha)).sub_(since_S)

    def on_finish(self, region: RegionState) -> Outgoing | None:
        """Send the rest of all fragments."""
        return Outgoing(local_steps.delta(region), True, self.fragments)

    def on_update(self, averager: AveragerState, update: Update) -> list[Reply]:
        """Hold a report until its fragment's step is due, final updates until all have arrived."""
        averager.waiting[update.region] = update
        if update.fragment < self.fragments:
            replies = self._reported(averager, update.fragment)
            return self._unstuck(averager) if replies is None else replies
        reports = self._reports(averager, update.fragment)
        whole = len(reports) == len(averager.members)
        return self._take_rest(averager, reports) if whole else self._unstuck(averager)

    def on_finished(self, averager: AveragerState) -> list[Reply]:
        """Take the steps that waited only for a region that has finished."""
        found = [self._reported(averager, number) for number in range(self.fragments)]
        due = [replies for replies in found if replies is not None]
        return [reply for replies in due for reply in replies] if due else self._unstuck(averager)

    def on_release(self, averager: AveragerState) -> list[Reply]:
        """Take the step of every fragment that a region waits for."""
        replies = [reply for n in range(self.fragments) for reply in self._fire(averager, n)]
        return replies + self._take_rest(averager, self._reports(averager, self.fragments))

    def on_wake(self, averager: AveragerState) -> list[Reply]:
        """Take the steps whose grace period is over."""
        due_s = {n: averager.numbers.get(f"due{n}") for n in range(self.fragments)}
        now = [number for number, at_s in due_s.items() if at_s and at_s <= averager.now_s]
        averager.wake_s = min((s for n, s in due_s.items() if s and n not in now), default=None)
        return [reply for number in now for reply in self._fire(averager, number)]

    def _reported(self, averager: AveragerState, fragment: int) -> list[Reply] | None:
        """Take a fragment's step once its grace period is over; None if reports are missing."""
        reports, active = self._reports(averager, fragment), len(averager.active)
        if not reports or len(reports) < min(self.quorum, active):
            return None
        if len(reports) >= active or not self.grace_s:
            return self._fire(averager, fragment)
        due_s = averager.numbers.setdefault(f"due{fragment}", averager.now_s + self.grace_s)
        averager.wake_s = due_s if averager.wake_s is None else min(averager.wake_s, due_s)
        return []

    def _unstuck(self, averager: AveragerState) -> list[Reply]:
        """Take a step if all regions wait, for different fragments: no report can follow."""
        stuck = all(name in averager.waiting for name in averager.active)
        return self.on_release(averager) if stuck else []

    def _fire(self, averager: AveragerState, fragment: int) -> list[Reply]:
        reports = self._reports(averager, fragment)
        averager.numbers.pop(f"due{fragment}", None)
        used = [report for report in reports if report.num_samples > 0]
        if used:
            weights = [report.num_samples**2 / max(1, report.steps) for report in used]
            changes = [report.payload_P for report in used]
            merged_P = combined(changes, weights, by_direction=self.merge == "rda")
            change_P = outer_change(self.outer, averager, merged_P, f"outer{fragment}")
            global_model.publish(averager, change_P, fragment)
        for report in reports:
            del averager.waiting[report.region]
        return [global_model.answer(averager, report) for report in reports]

    def _take_rest(self, averager: AveragerState, reports: list[Update]) -> list[Reply]:
        """Apply final updates by 1/M each; answer with the changes that the sender lacks."""
        for report in reports:
            del averager.waiting[report.region]
            for number, (start, stop) in enumerate(averager.fragments[:-1]):
                part_P = report.payload_P[start:stop] / len(averager.members)
                global_model.publish(averager, part_P, number)
        replies = []
        for report in reports:
            parts = []
            for number, (start, stop) in enumerate(averager.fragments[:-1]):
                part = replace(report, fragment=number, payload_P=report.payload_P[start:stop])
                parts.append(global_model.answer(averager, part))
            payload_P = torch.cat([part.payload_P for part in parts])
            replies.append(replace(parts[0], fragment=report.fragment, payload_P=payload_P))
        return replies

    def _reports(self, averager: AveragerState, fragment: int) -> list[Update]:
        held = [averager.waiting[name] for name in averager.members if name in averager.waiting]
        return [update for update in held if update.fragment == fragment]
