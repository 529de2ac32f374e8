"""Carries out changes of a run's members: regions are brought up, join, leave, are removed.

The averager decides when (`geo_ray.training.membership.border`), `MemberPolicy` whether. One region
joins at a time; others that are asked for wait.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from geo_ray.errors import GeoRayError, RegionLostError
from geo_ray.runtime.actors.parts import Handed
from geo_ray.runtime.control.actor_group import ActorGroup
from geo_ray.runtime.control.demands import demand_of
from geo_ray.runtime.control.membership.joining import Joining, end_lending
from geo_ray.runtime.control.membership.member_policy import MemberPolicy
from geo_ray.runtime.control.membership.member_requests import MemberRequest
from geo_ray.runtime.control.membership.returns import Returns
from geo_ray.training.membership.border import giver_of
from geo_ray.training.membership.view import View

log = logging.getLogger(__name__)

_COPY_S: Final = 120.0
_MOVE_S: Final = 5.0  # until it is asked for again

Statuses = Mapping[tuple[str, str], Mapping[str, Any]]
"""What servers and bridges tell of themselves, by (role, region)."""


@dataclass(frozen=True, slots=True)
class MemberHooks:
    """What a change of members asks of the rest of the controller.

    Attributes:
        admit: a region is a member, with so many steps behind it, and such an epoch.
        drop: go on without a region that has left.
        lose: go on without a region, for a cause.
        ask_home: asks the bridge of the averager's region.
        emit: takes events of now: a kind, and its fields by name.
        tell: shows a line to the user.
        is_ending: whether the run is told to finish or to halt.
    """

    admit: Callable[[str, int, int], None]
    drop: Callable[[str], None]
    lose: Callable[[str, str], None]
    ask_home: Callable[[Callable[[Any], Any]], Any]
    emit: Callable[..., None]
    tell: Callable[[str], None]
    is_ending: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class _Copy:
    """What a newcomer begins as, since ``at_s``, and how far the others were then."""

    handed: Handed
    step: int
    round: int
    at_s: float


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
    """

    actors: ActorGroup
    policy: MemberPolicy
    requests: Callable[[], list[MemberRequest]]
    hooks: MemberHooks
    origin_unix_s: float
    _waiting: deque[str] = field(default_factory=deque)
    _joining: Joining | None = None
    _handed: _Copy | None = None
    _leaving: set[str] = field(default_factory=set)
    _moving: dict[str, _Move] = field(default_factory=dict)  # the averager out of a region
    _rows: dict[str, Mapping[str, object]] = field(default_factory=dict)
    _steps: dict[str, int] = field(default_factory=dict)
    _lost: list[str] = field(default_factory=list)  # regions that the run went on without
    _returns: Returns = field(default_factory=Returns)
    _removed: set[str] = field(default_factory=set)  # that were asked to be
    _giver: str = ""  # whose copy the newcomer is to begin as, once it is a member
    _member_s: float = 0.0  # when it was not a member yet that joins
    _asks_again: bool = False  # a new home may know nothing of it

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
        self._giver = "" if view is None else view.giver
        for request in self.requests():
            self._take(request, view)
        if not self.hooks.is_ending():
            self._waiting += self._returns.due(time.monotonic())
        self._move_averager()
        if isinstance(view, View):
            self._see_off(view)
            self._go_on(view)

    @property
    def is_leaving(self) -> bool:
        """Whether a region that was asked to leave is not gone: it would be in a checkpoint."""
        return bool(self._leaving)

    @property
    def are_changing(self) -> bool:
        """Whether a region is on its way in or out, or the averager is about to move."""
        return self._joining is not None or bool(self._leaving or self._moving)

    @property
    def is_joining(self) -> bool:
        """Whether a region's processes are there, and it joins at the next border."""
        return self._joining is not None and self._joining.is_asked

    @property
    def awaited(self) -> list[str]:
        """Lost regions that will be brought back."""
        if not self.policy.brings_back:
            return []
        return [name for name in self._lost if name not in self._removed]

    def await_back(self, awaited: Sequence[str]) -> None:
        """Bring back regions that were lost before this driver came."""
        for region in awaited:
            self._lost.append(region)
            self._bring_back(region)

    def brings_back(self, region: str) -> bool:
        """Whether a region that is lost now will be brought back."""
        stays_away = region in self._removed or region in self._leavers
        return self.policy.brings_back and not stays_away

    def on_handed(self, giver: str, event: Mapping[str, Any]) -> None:
        """The copy of a region's state that a newcomer waits for is written."""
        joining = self._joining
        if joining is None or not joining.is_asked:
            end_lending(self.actors, giver)
            return
        rows = self._rows.get(joining.region)
        handed = Handed(giver, tuple(event["parts"]), rows)
        self._handed = _Copy(handed, int(event["step"]), int(event["round"]), time.monotonic())
        joining.begin_as(handed)

    def on_hand_over_failed(self, error: GeoRayError) -> None:
        """There is no copy of a region's state for a newcomer."""
        if self._joining is not None:
            self._fail(self._joining, error)

    def report_lost(self, region: str) -> None:
        """Tell the averager that the run goes on without a region."""
        self._lost.append(region)
        if region in self._leavers:  # it stays away all the same
            self._removed.add(region)
            self._leaving.discard(region)
        self.hooks.ask_home(partial(_report_dead, region))
        self._bring_back(region)
        joining = self._joining
        if joining is not None and joining.is_asked and region == self._giver and not self._handed:
            error = RegionLostError(
                f"region '{region}' was lost before it had handed its state over"
            )
            self._fail(joining, error)

    def move_averager(self) -> None:
        """Have the averager move to the region that stands by for it."""
        home = self.actors.home.region
        self._moving.setdefault(home, _Move(-_MOVE_S, leaves=False))

    def home_moved(self) -> None:
        """Tell the averager at its new home; the old one may not have passed it on."""
        for region in self._lost:
            self.hooks.ask_home(partial(_report_dead, region))
        self._asks_again = self._joining is not None and self._joining.is_asked
        home = self.actors.home.region
        if home in self._leaving:
            self._leaving.discard(home)
            self._refuse("drain", home, f"the averager lives in '{home}' now")

    def close(self) -> None:
        """The run is over: nobody joins any more."""
        if self._joining is not None:
            self._joining.give_up()
            self._forget()

    # -------------------------------------------------------------- requests

    def _take(self, request: MemberRequest, view: View | None) -> None:
        region = request.region
        if request.verb == "remove" and region in self.awaited:
            self._stay_away(region)
            return
        known = tuple(self.actors.primaries) if view is None else view.members
        leavers = self._leavers - ({region} if request.verb == "remove" else set())
        # The view may not know of a loss yet, and who is about to leave does not stay.
        members = [name for name in known if name not in {*self._lost, *leavers}]
        pending = {*self._waiting, *leavers}
        pending |= set() if self._joining is None else {self._joining.region}
        why = self.policy.refusal(
            request,
            members,
            pending,
            home=self.actors.home.region,
            standby=self.actors.standby,
            is_ending=self.hooks.is_ending(),
        )
        if why is not None:
            self._refuse(request.verb, region, why)
        elif request.verb == "add":
            self._returns.forget(region)
            self._waiting.append(region)
        elif request.verb == "remove":
            self._removed.add(region)
            self.hooks.lose(region, f"region '{region}' was asked to be removed")
        elif region == self.actors.home.region:
            self.hooks.tell(f"the averager moves, so that region '{region}' can leave")
            self._moving[region] = _Move(-_MOVE_S, leaves=True)
        else:
            self._send_off(region)

    @property
    def _leavers(self) -> set[str]:
        """Regions that were asked to leave, and are still there."""
        moving = (name for name, move in self._moving.items() if move.leaves)
        return {*self._leaving, *moving}

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

    def _refuse(self, verb: str, region: str, why: str) -> None:
        log.warning("'%s %s' is refused: %s", verb, region, why)
        self.hooks.emit("members_refused", verb=verb, region=region, cause=why)

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
            if any(worker.is_out for worker in workers):
                continue
            self._leaving.discard(region)
            self.hooks.drop(region)
            self.hooks.tell("")
            self.hooks.emit("region_drained", region=region)
        self._leaving -= set(view.lost)
        joins = self._joining is not None and self._joining.is_asked
        waiting = sorted(self._leaving.intersection(view.members))
        if waiting and not joins and not self.hooks.is_ending():
            # While another change was pending it came to nothing; asked twice, it is one.
            self._ask_change((), (waiting[0],))

    # -------------------------------------------------------------- who joins

    def _go_on(self, view: View) -> None:
        joining = self._joining
        if joining is None:
            if self._waiting:
                self._begin(self._waiting.popleft())
            return
        try:
            self._carry_on(joining, view)
        except GeoRayError as error:
            self._fail(joining, error)

    def _begin(self, region: str) -> None:
        joining = Joining(region, self.actors.next_epoch(), self.actors, self.origin_unix_s)
        self.hooks.tell(f"region '{region}' is joining: starting its processes")
        spec = self.actors.spec
        demand = demand_of(spec.experiment, spec.region(region))
        joining.bring_up(self.actors.placed.get(region), demand)
        self._joining = joining

    def _carry_on(self, joining: Joining, view: View) -> None:
        region = joining.region
        if self.hooks.is_ending() and region not in view.members:
            joining.give_up()
            self._forget()
        elif not joining.is_asked:
            if joining.is_up and not self._leaving:
                joining.is_asked = True
                self._member_s = time.monotonic()  # the border may be there before the next look
                self._ask_change((region,), ())
        elif self._handed is None:
            self._await_copy(region, view)
        elif (size_bytes := joining.begun) is not None:
            copy = self._handed
            self.actors.adopt(joining.group)
            self.hooks.admit(region, copy.step, joining.epoch)
            self.hooks.ask_home(partial(_tell_begun, region))
            about = {"view": view.epoch, "round": copy.round, "step": copy.step}
            about |= {"bytes": size_bytes}
            took_s = time.monotonic() - copy.at_s
            self.hooks.tell("")  # no longer on its way; the event says the rest
            self.hooks.emit("region_joined", region=region, **about, took_s=took_s)
            joining.finish()
            self._lost = [name for name in self._lost if name != region]
            self._removed.discard(region)
            self._returns.joined(region, time.monotonic())
            self._forget()

    def _await_copy(self, region: str, view: View) -> None:
        """Whoever was to hand its state over may be lost: the others do not wait for ever."""
        now_s, again = time.monotonic(), self._asks_again
        self._asks_again = False
        if region not in view.members:
            self._member_s = now_s
            if again:
                self._ask_change((region,), ())
        elif region in view.joining and view.giver not in view.members:
            # As the averager moved nobody had told of it yet.
            raise RegionLostError(f"region '{view.giver}' was lost before it handed its state over")
        elif now_s - self._member_s > _COPY_S:
            raise RegionLostError(f"no region's state was there {_COPY_S:g} s after the border")

    def _fail(self, joining: Joining, error: GeoRayError) -> None:
        """Nothing comes of it; the run goes on as before."""
        region = joining.region
        log.warning("region '%s' does not join: %s", region, error)
        joining.give_up()
        self._forget()
        if joining.is_asked:
            self.hooks.ask_home(partial(_report_dead, region))
        self.hooks.emit("join_failed", region=region, cause=error.message)
        if region in self._lost:
            self._bring_back(region)

    def _stay_away(self, region: str) -> None:
        """A lost region is not to come back, wherever it is on its way."""
        self._removed.add(region)
        self._returns.forget(region)
        self._waiting = deque(name for name in self._waiting if name != region)
        joining = self._joining
        if joining is not None and joining.region == region:
            self._fail(joining, RegionLostError(f"region '{region}' was asked to be removed"))
        self.hooks.tell(f"region '{region}' is not brought back")

    def _bring_back(self, region: str) -> None:
        if region not in self.awaited:
            return
        wait_s = self._returns.lost(region, time.monotonic())
        when = "now" if wait_s == 0 else f"in {wait_s:.0f} s"
        self.hooks.tell(f"region '{region}' is to be brought back {when}")

    def _forget(self) -> None:
        if self._handed is not None:
            end_lending(self.actors, self._handed.handed.giver)
        self._joining = self._handed = None


def _report_dead(region: str, bridge: Any) -> Any:
    return bridge.report_dead.remote(region)


def _tell_begun(region: str, bridge: Any) -> Any:
    return bridge.begun.remote(region)
