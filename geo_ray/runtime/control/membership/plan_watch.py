"""Has a run that follows a plan planned anew when others take part in it.

What can be changed as it goes is: the interval, and where the averager lives, if that is the region
that stands by for it. The rest is told. `ReplanPolicy` decides when; a
thread plans, which may take seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from geo_ray.errors import GeoRayError
from geo_ray.job.plans.members import MembersPlan
from geo_ray.runtime.control.membership.replan_policy import ReplanPolicy

log = logging.getLogger(__name__)
PlanFor = Callable[[Collection[str], str, int | None, str | None], MembersPlan]
"""``plan_for(members, averager's region, interval, standby)``; see `plan_of_members`."""


class HomeNow(NamedTuple):
    """Where the averager lives, and which region stands by for it, if one does."""

    region: str
    standby: str | None = None


@dataclass(slots=True)
class PlanWatch:
    """See the module's docstring.

    Attributes:
        policy: decides when.
        plan_for: plans; None: the run follows no plan.
        emit: takes events of now: a kind, and its fields by name.
        tell: shows a line to the user.
        pace: has all regions exchange with another interval, in the plan's steps.
        move: has the averager move to the region that stands by.
    """

    policy: ReplanPolicy
    plan_for: PlanFor | None
    emit: Callable[..., None]
    tell: Callable[[str], None]
    pace: Callable[[int], None]
    move: Callable[[], None]
    _interval: int | None = None
    _has_planned: bool = False
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "plan"))
    _open: tuple[tuple[str, ...], Future[MembersPlan]] | None = None
    _asked_home: str = ""
    _paced: int | None = None

    def tick(
        self, members: Collection[str], home: HomeNow, now_s: float, interval: int | None = None
    ) -> None:
        """Plan if it is time, and tell what has come of it.

        Args:
            members: who takes part.
            home: see `HomeNow`.
            now_s: of a clock that does not stand still.
            interval: that the averager asks for, in the plan's steps; None: it asks for none, or
                has not said.
        """
        if self.plan_for is None:
            return
        if interval is not None and self._interval is None and not self._has_planned:
            self.policy.doubt()  # resumed, with what was best for those who were there then
        self._interval = self._paced or interval or self._interval
        if self._open is None and self.policy.due(members, now_s):
            asked = tuple(sorted(members))
            self._has_planned, self._asked_home = True, home.region
            question = (asked, home.region, self._interval, home.standby)
            self._open = asked, self._pool.submit(self.plan_for, *question)
        if self._open is None or not self._open[1].done():
            return
        asked, found = self._open
        self._open = None
        if (asked, self._asked_home) != (tuple(sorted(members)), home.region):
            self.policy.doubt()  # others are there by now, or the averager has moved
            return
        try:
            planned = found.result()
        except GeoRayError as error:
            log.warning("no plan for %s: %s", ", ".join(asked), error.message)
            return
        except Exception:  # whatever it is: nobody's training ends for want of advice
            log.exception("no plan for %s", ", ".join(asked))
            return
        self._note(asked, planned)

    def _follow(self, members: tuple[str, ...], planned: MembersPlan) -> None:
        """Change what can be changed as it goes, if that pays by itself."""
        decision, present = planned.as_it_goes, planned.present
        if decision is None or not decision.changed:
            return
        why, plan = decision.reason, decision.plan
        about = {"regions": list(members), "cause": why, "gain": decision.gain}
        if plan.interval != present.interval:
            before, self._interval = present.interval, plan.interval
            self._paced = self._interval
            self.pace(self._interval)
            self.emit("interval_changed", before=before, interval=self._interval, **about)
            self.tell(f"the interval is {self._interval} instead of {before} from now on: {why}")
        if plan.averager != present.averager:
            self.move()
            self.emit("averager_moves", before=present.averager, averager=plan.averager, **about)
            self.tell(f"the averager moves from {present.averager} to {plan.averager}: {why}")

    def home_moved(self) -> None:
        """Ask the averager at its new home for the interval; its log may have ended before that."""
        if self._paced is not None:
            self.pace(self._paced)

    def close(self) -> None:
        """The run is over; a plan that is being made is waited for, as its thread reads the run."""
        self._pool.shutdown(cancel_futures=True)

    def _note(self, members: tuple[str, ...], planned: MembersPlan) -> None:
        present, decision = planned.present, planned.decision
        self._follow(members, planned)
        best = decision.plan
        self.emit(
            "replanned",
            regions=list(members),
            changed=decision.changed,
            cause=decision.reason,
            gain=decision.gain,
            interval=best.interval,
            averager=best.averager,
            seconds=best.total_s,
            usd=best.total_usd,
        )
        names = ", ".join(members)
        if not decision.changed:
            self.tell(f"planned anew for {names}: {decision.reason}")
            return
        found = [
            f"{r.region}: {r.workers} workers, {sum(r.batch_sizes)} rows a step"
            for r in best.regions
        ]
        if best.interval != present.interval:
            found.append(f"interval {best.interval} instead of {present.interval}")
        if best.averager != present.averager:
            found.append(f"the averager in {best.averager}")
        self.tell(f"planned anew for {names}: {decision.reason}: {'; '.join(found)}")
