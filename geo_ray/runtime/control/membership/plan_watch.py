"""Has a run that follows a plan planned anew when others take part in it.

What can be changed as it goes is: the interval. The rest is told. `ReplanPolicy` decides when; a
thread plans, which may take seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from geo_ray.errors import GeoRayError
from geo_ray.job.plans.members import MembersPlan
from geo_ray.runtime.control.membership.replan_policy import ReplanPolicy

log = logging.getLogger(__name__)
PlanFor = Callable[[Collection[str], str, int | None], MembersPlan]
"""``plan_for(members, averager's region, interval)``; see `plan_of_members`."""


@dataclass(slots=True)
class PlanWatch:
    """See the module's docstring.

    Attributes:
        policy: decides when.
        plan_for: plans; None: the run follows no plan.
        emit: takes events of now: a kind, and its fields by name.
        tell: shows a line to the user.
        pace: has all regions exchange with another interval, in the plan's steps.
    """

    policy: ReplanPolicy
    plan_for: PlanFor | None
    emit: Callable[..., None]
    tell: Callable[[str], None]
    pace: Callable[[int], None]
    _interval: int | None = None
    _has_planned: bool = False
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "plan"))
    _open: tuple[tuple[str, ...], Future[MembersPlan]] | None = None

    def tick(
        self, members: Collection[str], home: str, now_s: float, interval: int | None = None
    ) -> None:
        """Plan if it is time, and tell what has come of it.

        Args:
            members: who takes part.
            home: where the averager lives.
            now_s: of a clock that does not stand still.
            interval: that the averager asks for, in the plan's steps; None: it asks for none, or
                has not said.
        """
        if self.plan_for is None:
            return
        if interval is not None and self._interval is None and not self._has_planned:
            self.policy.doubt()  # resumed, with what was best for those who were there then
        self._interval = interval or self._interval
        if self._open is None and self.policy.due(members, now_s):
            asked = tuple(sorted(members))
            self._has_planned = True
            self._open = asked, self._pool.submit(self.plan_for, asked, home, self._interval)
        if self._open is None or not self._open[1].done():
            return
        asked, found = self._open
        self._open = None
        if asked != tuple(sorted(members)):
            self.policy.doubt()  # others are there by now
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
        if planned.pace is None or not planned.pace.changed:
            return
        self._interval = planned.pace.plan.interval
        self.pace(self._interval)
        before, why = planned.present.interval, planned.pace.reason
        self.emit(
            "interval_changed",
            regions=list(members),
            before=before,
            interval=self._interval,
            cause=why,
            gain=planned.pace.gain,
        )
        self.tell(f"the interval is {self._interval} instead of {before} from now on: {why}")

    def close(self) -> None:
        """The run is over."""
        self._pool.shutdown(wait=False, cancel_futures=True)

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
        found = [f"{r.region}: {r.workers} workers" for r in best.regions]
        if best.interval != present.interval:
            found.append(f"interval {best.interval} instead of {present.interval}")
        if best.averager != present.averager:
            found.append(f"the averager in {best.averager}")
        self.tell(f"planned anew for {names}: {decision.reason}: {'; '.join(found)}")
