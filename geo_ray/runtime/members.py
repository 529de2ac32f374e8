"""Carries out changes of a run's members: regions join, leave, are lost and come back.

`Regions` decides, `JoiningRegions` starts the processes of joining regions, and the averager says
when a change takes effect (`geo_ray.training.membership`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from geo_ray.base.errors import GeoRayError, RegionLostError
from geo_ray.runtime.actor_group import ActorGroup, DrainNotices
from geo_ray.runtime.joining import (
    Enter,
    HasFailed,
    HasJoined,
    HasStarted,
    HasStopped,
    JoiningRegions,
    JoinNews,
)
from geo_ray.runtime.launcher import GoneRegions
from geo_ray.runtime.regions import (
    Action,
    Answer,
    AskToLeave,
    AveragerMoved,
    AveragerSeen,
    CallOff,
    Drained,
    DropRegion,
    Event,
    JoinEnded,
    Lose,
    MemberPolicy,
    MembershipState,
    MoveAverager,
    MoveWanted,
    Noticed,
    RegionGone,
    Regions,
    Release,
    ReportDead,
    Requested,
    RunSituation,
    Say,
    Start,
    TimePassed,
    ViewSeen,
)
from geo_ray.runtime.reporting import MemberRequests, RunServices
from geo_ray.training.membership import View

log: Final = logging.getLogger(__name__)

Statuses = Mapping[tuple[str, str], Mapping[str, Any]]
"""Reports of servers and bridges, by (role, region)."""


@dataclass(slots=True)
class Members:
    """Executes the decisions of `Regions`.

    Attributes:
        actors: actors of the run.
        policy: decides which changes are made.
        requests: returns user requests.
        loop: the run loop.
        origin_unix_s: wall-clock time at which the run's clock was 0.
        notices: machines that will be reclaimed.
        regions: the state of each region.
    """

    actors: ActorGroup
    policy: MemberPolicy
    requests: MemberRequests
    loop: RunServices
    origin_unix_s: float
    notices: DrainNotices
    regions: Regions = field(init=False)
    _joining_regions: JoiningRegions = field(init=False)

    def __post_init__(self) -> None:
        self.regions = Regions(self.policy, tuple(self.actors.primaries))
        self._joining_regions = JoiningRegions(self.actors, self.origin_unix_s)

    def tick(self, statuses: Statuses) -> None:
        """Carry out what is possible now.

        Args:
            statuses: reports of the servers and bridges that have answered.
        """
        for (role, name), status in statuses.items():
            if role == "ps" and "rows" in status:
                region = self.regions[name]
                region.rows, region.step = status["rows"], status["version"]
        view = statuses.get(("bridge", self.actors.leader.region), {}).get("view")
        self._joining_regions.note(view)
        for request in self.requests():
            self._on(Requested(request, view))
        now_unix_s = time.time()
        left_s = {name: at_s - now_unix_s for name, at_s in self.notices.regions.items()}
        self._on(TimePassed())
        self._on(Noticed(left_s))
        self._on(AveragerSeen())
        if isinstance(view, View):
            self._on(ViewSeen(view, self._busy()))
            self._process_news(
                self._joining_regions.advance(
                    view, may_enter=not self.is_leaving, is_ending=self.loop.is_ending
                )
            )
            self._joining_regions.link()

    @property
    def is_leaving(self) -> bool:
        """Whether a region that must leave is still present and would be in a checkpoint."""
        return any(region.is_leaving for region in self.regions)

    @property
    def are_changing(self) -> bool:
        """Whether a region is joining or leaving, or the averager is about to move."""
        return any(
            each.is_starting or each.is_leaving or each.move_asked_s is not None
            for each in self.regions
        )

    @property
    def is_joining(self) -> bool:
        """Whether a region's processes run, and it enters at the next reconfiguration point."""
        return self._joining_regions.are_entering

    @property
    def gone(self) -> GoneRegions:
        """State of the regions that do not take part, for another run actor or a resume."""
        regions = self.regions
        rows = {r.name: r.rows for r in regions if r.rows is not None and not r.is_here}
        return GoneRegions(tuple(regions.awaited), tuple(sorted(regions.away)), rows)

    def resume(self, gone: GoneRegions, *, unhurried: Collection[str]) -> None:
        """Restore the state of regions that did not take part before this run actor started.

        Args:
            gone: the state of these regions.
            unhurried: lost regions that the run does not pause for.
        """
        now_s = time.monotonic()
        self._do(
            self.regions.restore(
                gone.awaited, gone.away, gone.rows, unawaited=unhurried, now_s=now_s
            )
        )

    def keeps_workers(self, region: str) -> bool:
        """Return whether workers of a lost region will be reused."""
        known = self.regions[region]
        goes = known.stays_away or known.state is MembershipState.DRAINING
        return self.policy.brings_back and not goes and region not in self.notices.regions

    def leaves_on_notice(self, region: str) -> bool:
        """Return whether a whole region leaves because a machine of its servers is reclaimed."""
        if region not in self.notices.regions or self.loop.is_ending:
            return False
        return self.regions[region].is_on_notice or region not in self.regions.needed(self._now())

    def on_state_transferred(self, donor: str, event: Mapping[str, Any]) -> None:
        """Let joining regions begin as the copy of a region's state, which is written now."""
        rows = {each.name: each.rows for each in self.regions if each.rows is not None}
        self._joining_regions.on_state_transferred(donor, event, rows)

    def on_hand_over_failed(self, error: GeoRayError) -> None:
        """End the joins that wait for a copy of a region's state: there is none."""
        self._process_news(self._joining_regions.fail_all(error))

    def report_lost(self, region: str) -> None:
        """Record that the run continues without a region, and notify the averager."""
        self._on(RegionGone(region, region in self.notices.regions))
        self._process_news(self._joining_regions.on_lost(region))

    def move_averager(self) -> None:
        """Have the averager move to its standby's region."""
        self._on(MoveWanted())

    def leader_moved(self) -> None:
        """Report losses again, to the averager in its new region."""
        self._joining_regions.leader_moved()
        self._on(AveragerMoved())

    def close(self) -> None:
        """End all joins: the run is over."""
        self._joining_regions.close()

    # -------------------------------------------------------------- events and actions

    def _now(self) -> RunSituation:
        actors = self.actors
        return RunSituation(
            time.monotonic(),
            actors.leader.region,
            actors.standby,
            actors.standby in actors.bridges,
            frozenset(name for name in list(actors.primaries) if not actors.can_lose(name)),
            self.loop.is_ending,
            self._joining_regions.are_entering,
        )

    def _busy(self) -> frozenset[str]:
        """Regions whose workers still compute."""
        workers = self.actors.workers.values()
        return frozenset(each.region for each in workers if each.is_out and each.has_begun)

    def _on(self, event: Event) -> None:
        self._do(self.regions.next(event, self._now()))

    def _do(self, actions: Collection[Action]) -> None:
        for action in actions:
            self._act(action)

    def _act(self, action: Action) -> None:
        loop, actors = self.loop, self.actors
        match action:
            case Answer(verb, region, request, refusal):
                about = {"verb": verb, "region": region, "request": request}
                if refusal is None:
                    loop.emit("members_accepted", **about)
                else:
                    log.warning("'%s %s' is refused: %s", verb, region, refusal)
                    loop.emit("members_refused", **about, cause=refusal)
            case Say(text):
                loop.show(text)
            case Start(region):
                loop.show(f"region '{region}' is joining: starting its processes")
                self._joining_regions.begin(region)
                loop.emit("region_joining", region=region)
            case CallOff(region, cause):
                self._process_news([self._joining_regions.call_off(region, RegionLostError(cause))])
            case AskToLeave(region):
                self._ask_change((), (region,))
            case MoveAverager(region):
                if actors.standby is not None:
                    actors.bridges[actors.standby].report_dead.remote(region, True)
            case ReportDead(region):
                loop.ask_averager("report_dead", region)
            case Lose(region, cause):
                loop.lose_region(region, cause)
            case Release(region):
                actors.release(region)
            case DropRegion(region):
                loop.drop_region(region)
            case Drained(region, cause):
                loop.emit("region_drained", region=region, cause=cause)

    def _ask_change(self, joins: tuple[str, ...], leaves: tuple[str, ...]) -> None:
        donor = self.regions.donor(self.actors.leader.region)
        self.loop.ask_averager("change_members", joins, leaves, donor)

    def _process_news(self, news: Collection[JoinNews]) -> None:
        """Process the news of joining regions."""
        loop = self.loop
        for each in news:
            match each:
                case HasStarted(region, took_s):
                    loop.emit("region_started", region=region, took_s=took_s)
                case Enter(regions):
                    self._ask_change(regions, ())
                case HasJoined(region, attempt, group, step, event):
                    self.actors.adopt(group)
                    loop.admit_region(region, step, attempt)
                    loop.ask_averager("begun", region)
                    loop.show("")  # the event reports the rest
                    loop.emit("region_joined", region=region, step=step, **event)
                    self._on(JoinEnded(region, has_joined=True))
                case HasFailed(region, cause, was_asked):
                    log.warning("region '%s' does not join: %s", region, cause)
                    if was_asked:
                        loop.ask_averager("report_dead", region)
                    loop.emit("join_failed", region=region, cause=cause)
                    self._on(JoinEnded(region, has_joined=False))
                case HasStopped(region):
                    self._on(JoinEnded(region, has_joined=False))
