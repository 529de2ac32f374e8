"""Folds the events of a run into how it stands."""

from __future__ import annotations

import math
from typing import Final

from geo_ray.observe.events.schema import Event
from geo_ray.observe.metrics.regions import RegionNow, RunNow
from geo_ray.observe.metrics.summary import Target
from geo_ray.observe.metrics.totals import RegionTotals, RunTotals
from geo_ray.observe.status.members import MembersFold
from geo_ray.observe.status.record import RegionStatus, TargetStatus

_NEWEST = 20  # steps that a loss is the mean of
_AWAY: Final = ("lost", "left", "absent", "joining", "did not join")


class StatusFold:
    """Everything of a status that the events tell.

    Args:
        target: the evaluation metric that training goes for, if any.
    """

    def __init__(self, target: Target | None = None) -> None:
        self._target = target
        self._now = RunNow(())
        self.totals = RunTotals()
        self._lost: dict[str, tuple[str, float]] = {}  # region -> cause, and when
        self._members = MembersFold()
        self.averager: str | None = None
        self.saved_s: dict[object, float] = {}  # checkpoint -> when
        self._reached_s: float | None = None

    def feed(self, event: Event) -> None:
        """Take the next event."""
        self._now.feed(event)
        self.totals.feed(event)
        self._members.feed(event)
        match event.kind:
            case "run_started":
                self._lost = {}
                self.averager = event.fields.get("averager")
            case "hub_moved":
                self.averager = event["region"]
            case "region_lost":
                self._lost[event["region"]] = event["cause"], event.t_s
            case "region_joining":
                self.totals.region(event["region"])
            case "region_joined":
                self.totals.region(event["region"])
                self._lost.pop(event["region"], None)
            case "step" if event.t_s > self._lost.get(event["region"], ("", event.t_s))[1]:
                del self._lost[event["region"]]  # it has come back
            case "checkpoint":
                self.saved_s[event["id"]] = event.t_s
            case "eval" if self._target is not None and self._target.reached(event):
                self._reached_s = event.t_s if self._reached_s is None else self._reached_s

    @property
    def refused(self) -> str | None:
        """The newest change of members that was asked for, if it was refused, and why."""
        return self._members.refused

    @property
    def round(self) -> int | None:
        """The newest round."""
        return self._now.round

    def regions(self, *, is_going: bool, trains_on: bool = False) -> tuple[RegionStatus, ...]:
        """Every region that has taken part, in the order of the configuration.

        Args:
            is_going: whether anybody drives the run.
            trains_on: whether it trains on although nobody does.
        """
        stands = "trains on" if trains_on else "stopped"
        return tuple(
            self._region(name, totals, None if is_going else stands)
            for name, totals in self.totals.regions.items()
        )

    def target(self) -> TargetStatus | None:
        """The target and whether it is reached."""
        if self._target is None:
            return None
        told = self._target.model_dump(include={"metric", "value", "direction"})
        return TargetStatus(**told, reached_s=self._reached_s)

    def _steps_of(self, name: str) -> int | None:
        """How many it is to take; of one that has joined since: as many as all, if they agree."""
        started = self.totals.started
        told = {} if started is None else started.fields.get("steps") or {}
        same = set(told.values())
        return told.get(name, same.pop() if len(same) == 1 else None)

    def _region(self, name: str, totals: RegionTotals, unseen: str | None) -> RegionStatus:
        """One region; ``unseen`` is what those do of a run that nobody drives."""
        steps = self._steps_of(name)
        now, now_s = self._now.regions.get(name, RegionNow()), self._now.now_s
        state = now.state(now_s, totals.steps.step + 1 if steps is None else steps)
        if state != "done" and unseen is not None:
            state = unseen
        cause, _ = self._lost.get(name, (None, 0.0))
        on_the_way = self._members.of(name).state
        if on_the_way in ("left", "absent"):
            state = on_the_way
        if unseen is None and on_the_way in ("joining", "leaving"):
            state = on_the_way
            cause = None
        elif on_the_way == "did not join" and cause is None and state != "left":
            state = on_the_way
        is_there = unseen is None and cause is None and state not in _AWAY
        loss = totals.steps.end_loss(_NEWEST)
        return RegionStatus(
            name=name,
            state=state if cause is None else "lost",
            lost_cause=cause,
            step=totals.steps.step,
            steps=steps,
            exchanges=totals.exchanges,
            loss=loss if math.isfinite(loss) else None,
            samples=totals.steps.samples,
            samples_per_s=now.rates.samples.per_s(now_s) if is_there else 0.0,
            workers_lost=totals.faults["worker_lost"],
        )


def mean_loss(regions: tuple[RegionStatus, ...]) -> float | None:
    """The mean over members, weighted by the samples of a step; None before the first."""
    known = [
        (region.loss, region.samples / max(1, region.step))
        for region in regions
        if region.loss is not None and region.state not in _AWAY
    ]
    weight = sum(samples for _, samples in known)
    return sum(loss * samples for loss, samples in known) / weight if weight > 0 else None


def left_s(regions: tuple[RegionStatus, ...]) -> float | None:
    """Seconds until the slowest member has taken its steps at its pace; None if none is known."""
    longest = 0.0
    for region in regions:
        if region.state in (*_AWAY, "done") or region.steps is None or region.step >= region.steps:
            continue
        if region.samples_per_s <= 0 or region.samples <= 0:
            return None
        samples = (region.steps - region.step) * region.samples / region.step
        longest = max(longest, samples / region.samples_per_s)
    return longest or None
