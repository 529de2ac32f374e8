"""Carries out changes of a run's members: regions are brought up, join, leave, are removed.

The averager decides when (`geo_ray.training.membership`), `MemberPolicy` whether, and
`Newcomers` brings those up that join.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from geo_ray.base.errors import GeoRayError, RegionLostError
from geo_ray.runs.requests import MemberRequest
from geo_ray.runtime.actor_group import ActorGroup, DrainNotices
from geo_ray.runtime.joining import MemberHooks as MemberHooks
from geo_ray.runtime.joining import Newcomers, report_dead
from geo_ray.runtime.launcher import GoneRegions
from geo_ray.runtime.member_policies import MemberPolicy, Returns, leave_on_notice
from geo_ray.training.membership import View, giver_of

log = logging.getLogger(__name__)

_MOVE_S: Final = 5.0  # until it is asked for again

Statuses = Mapping[tuple[str, str], Mapping[str, Any]]
"""What servers and bridges tell of themselves, by (role, region)."""


@dataclass(slots=True)
class _Move:
    """The averager is to move: when that was asked for last, and whether its region leaves then."""

    asked_s: float
    leaves: bool


@dataclass(slots=True)
class Members:
    """See the module's docstring.

    Attributes:
        actors: of the run.
        policy: decides.
        requests: takes what users have asked for since the last call.
        hooks: see `MemberHooks`.
        origin_unix_s: when the run's clock was 0.
        notices: of machines that will be gone.
    """

    actors: ActorGroup
    policy: MemberPolicy
    requests: Callable[[], list[MemberRequest]]
    hooks: MemberHooks
    origin_unix_s: float
    notices: DrainNotices
    _newcomers: Newcomers = field(init=False)
    _waiting: list[str] = field(default_factory=list)
    _leaving: set[str] = field(default_factory=set)
    _moving: dict[str, _Move] = field(default_factory=dict)  # the averager out of a region
    _rows: dict[str, Mapping[str, object]] = field(default_factory=dict)
    _steps: dict[str, int] = field(default_factory=dict)
    _lost: list[str] = field(default_factory=list)  # regions that the run went on without
    _returns: Returns = field(default_factory=Returns)
    _away: set[str] = field(default_factory=set)  # that were asked to leave, or to be removed
    _noticed: set[str] = field(default_factory=set)  # that leave for a notice, and come back
    _unhurried: set[str] = field(default_factory=set)  # lost ones that the run does not wait for

    def __post_init__(self) -> None:
        self._newcomers = Newcomers(
            self.actors,
            self.hooks,
            self.origin_unix_s,
            lambda joins: self._ask_change(joins, ()),
            self._on_join_over,
        )

    def tick(self, statuses: Statuses) -> None:
        """Do what can be done now.

        Args:
            statuses: of who has answered.
        """
        for (role, region), status in statuses.items():
            if role == "ps" and "rows" in status:
                self._rows[region], self._steps[region] = status["rows"], status["version"]
        home = statuses.get(("bridge", self.actors.home.region), {})
        view = home.get("view")
        self._newcomers.note(view)
        for request in self.requests():
            self._take(request, view)
        if not self.hooks.is_ending():
            self._waiting += self._returns.due(time.monotonic())
            self._heed()
        self._move_averager()
        if isinstance(view, View):
            self._see_off(view)
            self._let_in(view)

    @property
    def is_leaving(self) -> bool:
        """Whether a region that was asked to leave is not gone: it would be in a checkpoint."""
        return bool(self._leaving)

    @property
    def are_changing(self) -> bool:
        """Whether a region is on its way in or out, or the averager is about to move."""
        return bool(self._newcomers.names or self._leaving or self._moving)

    @property
    def is_joining(self) -> bool:
        """Whether a region's processes are there, and it joins at the next border."""
        return self._newcomers.are_asked

    @property
    def awaited(self) -> list[str]:
        """Lost regions that will be brought back."""
        if not self.policy.brings_back:
            return []
        return self.lost

    @property
    def lost(self) -> list[str]:
        """Regions that are lost, and were not asked to leave."""
        return [name for name in self._lost if name not in self._away]

    @property
    def away(self) -> frozenset[str]:
        """Regions that were asked to leave, or to be removed, and have not come since."""
        return frozenset(self._away)

    @property
    def waited_for(self) -> list[str]:
        """Lost regions that the run pauses for, if it pauses."""
        if self.policy.least is not None:
            return self.awaited
        return [name for name in self.awaited if name not in self._unhurried]

    @property
    def gone(self) -> GoneRegions:
        """What another driver, or a resume, must know of regions that take no part."""
        rows = {n: each for n, each in self._rows.items() if n not in self.actors.primaries}
        return GoneRegions(tuple(self.awaited), tuple(sorted(self._away)), rows)

    def go_on(self, gone: GoneRegions, *, unhurried: Collection[str]) -> None:
        """Know of regions that took no part before this driver came, and bring back who was lost.

        Args:
            gone: what is known of them.
            unhurried: lost regions that the run does not pause for.
        """
        self._away |= set(gone.away)
        self._rows |= gone.rows
        for region in gone.awaited:
            self._lost.append(region)
            if region in unhurried:
                self._unhurried.add(region)
            self._bring_back(region)

    def keeps_workers(self, region: str) -> bool:
        """Whether workers of a region that is lost now will be needed where they are."""
        goes = region in self._away or region in self._leavers or region in self.notices.regions
        return self.policy.brings_back and not goes

    def leaves_on_notice(self, region: str) -> bool:
        """Whether a region leaves as a whole, since a machine of its servers will be gone."""
        return (
            region in self.notices.regions
            and not self.hooks.is_ending()
            and (region in self._noticed or not self._is_needed(region))
        )

    def on_handed(self, giver: str, event: Mapping[str, Any]) -> None:
        """The copy of a region's state that newcomers wait for is written."""
        self._newcomers.on_handed(giver, event, self._rows)

    def on_hand_over_failed(self, error: GeoRayError) -> None:
        """There is no copy of a region's state for newcomers."""
        self._newcomers.fail_all(error)

    def report_lost(self, region: str) -> None:
        """Tell the averager that the run goes on without a region."""
        self._lost.append(region)
        self._unhurried.discard(region)
        if region in self._leavers and region not in self._noticed:  # it stays away all the same
            self._away.add(region)
        self._leaving.discard(region)
        self._moving.pop(region, None)
        if region in self.notices.regions:
            self._noticed.discard(region)
            self.actors.release(region)
        self.hooks.ask_home(partial(report_dead, region))
        self._bring_back(region)
        self._newcomers.on_lost(region)

    def move_averager(self) -> None:
        """Have the averager move to the region that stands by for it."""
        home = self.actors.home.region
        self._moving.setdefault(home, _Move(-_MOVE_S, leaves=False))

    def home_moved(self) -> None:
        """Tell the averager at its new home; the old one may not have passed it on."""
        for region in self._lost:
            self.hooks.ask_home(partial(report_dead, region))
        self._newcomers.home_moved()
        home = self.actors.home.region
        if home in self._leaving:
            self._leaving.discard(home)
            if home in self._noticed:  # the notice is heeded anew
                self._noticed.discard(home)
                return
            self._refuse("drain", home, f"the averager lives in '{home}' now")

    def close(self) -> None:
        """The run is over: nobody joins any more."""
        self._newcomers.close()

    # -------------------------------------------------------------- requests

    def _take(self, request: MemberRequest, view: View | None) -> None:
        region = request.region
        on_its_way = region in {*self._newcomers.names, *self._waiting}
        if request.verb == "remove" and (on_its_way or region in self.awaited):
            self._accept(request)
            self._stay_away(region)
            return
        known = tuple(self.actors.primaries) if view is None else view.members
        leavers = self._leavers - ({region} if request.verb == "remove" else set())
        # The view may not know of a loss yet, and who is about to leave does not stay.
        members = [name for name in known if name not in {*self._lost, *leavers}]
        pending = {*self._waiting, *leavers, *self._newcomers.names}
        why = self.policy.refusal(
            request,
            members,
            pending,
            home=self.actors.home.region,
            standby=self.actors.standby,
            is_ending=self.hooks.is_ending(),
        )
        if why is not None:
            self._refuse(request.verb, region, why, request.id)
            return
        self._accept(request)
        if request.verb == "add":
            self._returns.forget(region)
            self._waiting.append(region)
        elif request.verb == "remove":
            self._away.add(region)
            self.hooks.lose(region, f"region '{region}' was asked to be removed")
        else:
            self._see_to(region)

    @property
    def _leavers(self) -> set[str]:
        """Regions that were asked to leave, and are still there."""
        moving = (name for name, move in self._moving.items() if move.leaves)
        return {*self._leaving, *moving}

    def _see_to(self, region: str) -> None:
        """Have a region leave; the averager moves first, if it lives there."""
        if region == self.actors.home.region:
            self.hooks.tell(f"the averager moves, so that region '{region}' can leave")
            self._moving[region] = _Move(-_MOVE_S, leaves=True)
        else:
            self._send_off(region)

    def _heed(self) -> None:
        """Have regions leave whose servers are on machines that will be gone."""
        here, now_unix_s = list(self.actors.primaries), time.time()
        for region in self.notices.regions:
            if region not in {*here, *self._newcomers.names}:  # Ray starts nothing there any more
                self.actors.release(region)
        left_s = {name: at_s - now_unix_s for name, at_s in self.notices.regions.items()}
        needed = [name for name in left_s if name in here and self._is_needed(name)]
        for region, answer in leave_on_notice(left_s, here, self._leavers, needed).items():
            if answer == "lose":
                self.hooks.lose(region, f"region '{region}' had a notice, and came to no border")
            else:
                self._noticed.add(region)
                self.hooks.tell(f"a machine of region '{region}' will be gone")
                self._see_to(region)

    def _is_needed(self, region: str) -> bool:
        return not (self.policy.may_change and self.actors.can_lose(region))

    def _send_off(self, region: str) -> None:
        self.hooks.tell(f"region '{region}' is asked to leave")
        self._leaving.add(region)
        self._ask_change((), (region,))

    def _move_averager(self) -> None:
        """Out of a region: its standby takes over, as if its bridge had died."""
        actors, now_s = self.actors, time.monotonic()
        for region, move in list(self._moving.items()):
            if region not in actors.primaries or self.hooks.is_ending():
                del self._moving[region]
            elif region != actors.home.region:
                del self._moving[region]
                if move.leaves:
                    self._send_off(region)
            elif actors.standby in actors.bridges and now_s - move.asked_s >= _MOVE_S:
                move.asked_s = now_s
                actors.bridges[actors.standby].report_dead.remote(region, True)

    def _accept(self, request: MemberRequest) -> None:
        about = {"verb": request.verb, "region": request.region, "request": request.id}
        self.hooks.emit("members_accepted", **about)

    def _refuse(self, verb: str, region: str, why: str, id: str = "") -> None:
        log.warning("'%s %s' is refused: %s", verb, region, why)
        self.hooks.emit("members_refused", verb=verb, region=region, cause=why, request=id)

    def _ask_change(self, joins: tuple[str, ...], leaves: tuple[str, ...]) -> None:
        home = self.actors.home.region
        steps = {name: self._steps.get(name, 0) for name in self.actors.primaries}
        giver = giver_of(steps, home)
        self.hooks.ask_home(lambda bridge: bridge.change_members.remote(joins, leaves, giver))

    # -------------------------------------------------------------- who leaves

    def _see_off(self, view: View) -> None:
        """Go on without those that have left, once their workers are home."""
        for region in [name for name in view.left if name in self.actors.primaries]:
            workers = [w for w in self.actors.workers.values() if w.region == region]
            if any(worker.is_out and worker.has_begun for worker in workers):
                continue
            self._leaving.discard(region)
            self.hooks.drop(region)
            self.hooks.tell("")
            self.hooks.emit("region_drained", region=region, cause=self._left(region))
        self._leaving -= set(view.lost)
        waiting = sorted(self._leaving.intersection(view.members))
        if waiting and not self.is_joining and not self.hooks.is_ending():
            # While another change was pending it came to nothing; asked twice, it is one.
            self._ask_change((), (waiting[0],))

    def _left(self, region: str) -> str:
        """A region has left with all it had done; why."""
        if region not in self._noticed:
            self._away.add(region)
            return "asked"
        self._noticed.discard(region)
        self.actors.release(region)
        self._lost.append(region)
        self._bring_back(region)
        return "notice"

    # -------------------------------------------------------------- who joins

    def _let_in(self, view: View) -> None:
        waiting, self._waiting = self._waiting, []
        for region in [] if self.hooks.is_ending() else waiting:
            self._newcomers.begin(region)
        self._newcomers.go_on(view, may_enter=not self._leaving)

    def _on_join_over(self, region: str, joined: bool) -> None:
        """A region is a member, or will not be."""
        if joined:
            self._lost = [name for name in self._lost if name != region]
            self._unhurried.discard(region)
            self._away.discard(region)
            self._returns.joined(region, time.monotonic())
        elif region in self._lost and not self.hooks.is_ending():
            self._bring_back(region)

    def _stay_away(self, region: str) -> None:
        """A region is not to come, or to come back, wherever it is on its way."""
        self._away.add(region)
        self._returns.forget(region)
        self._waiting = [name for name in self._waiting if name != region]
        if region in self._newcomers.names:
            error = RegionLostError(f"region '{region}' was asked to be removed")
            self._newcomers.call_off(region, error)
        does_not = "is not brought back" if region in self._lost else "does not join"
        self.hooks.tell(f"region '{region}' {does_not}")

    def _bring_back(self, region: str) -> None:
        if region not in self.awaited:
            return
        wait_s = self._returns.lost(region, time.monotonic())
        when = "now" if wait_s == 0 else f"in {wait_s:.0f} s"
        self.hooks.tell(f"region '{region}' is to be brought back {when}")
