"""The regions of a run: a state for each, and the pure function that decides what happens next.

`Regions.next` takes one event and returns the actions that follow from it; `Members` carries them
out. It has no clock and no actors: `RunSituation` has the time and the state of the cluster.

Rules. A request that cannot succeed is refused at once with its reason. A region whose servers get
a termination notice drains at once, and is dropped `AT_ONCE_S` before the machine goes. A lost
region is brought back at once, then with exponential backoff (`Backoff`). Source: ours.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from geo_ray.base.states import StateTable
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.requests import MemberRequest
from geo_ray.training.config import why_fixed, why_no_joins
from geo_ray.training.membership import View, donor_of

AT_ONCE_S: Final = 2.0
"""Seconds before a machine is reclaimed at which the run continues without the region on it."""

QUIET_S: Final = 120.0
FIRST_S: Final = 10.0
LONGEST_S: Final = 320.0
_MOVE_S: Final = 5.0  # until the request to move the averager is repeated


class MembershipState(StrEnum):
    """See `REGION`."""

    ABSENT = "absent"
    JOINING = "joining"
    MEMBER = "member"
    DRAINING = "draining"
    LOST = "lost"


RegionEvent = Literal[
    "start", "join", "call_off", "fail_return", "drain", "stay", "leave", "leave_on_notice",
    "lose", "give_up",
]  # fmt: skip

REGION: Final[StateTable[MembershipState, RegionEvent]] = StateTable(
    name="Region of a run",
    states={
        MembershipState.ABSENT: "It does not take part, and joins only on request.",
        MembershipState.JOINING: "Its processes start, or it copies the state of a member.",
        MembershipState.MEMBER: "It trains.",
        MembershipState.DRAINING: "It trains until the next barrier and leaves there; "
        "if it hosts the averager, the averager moves first.",
        MembershipState.LOST: "It ended without a request, and can be brought back.",
    },
    moves={
        (MembershipState.ABSENT, "start"): MembershipState.JOINING,
        (MembershipState.LOST, "start"): MembershipState.JOINING,
        (MembershipState.LOST, "give_up"): MembershipState.ABSENT,
        (MembershipState.JOINING, "join"): MembershipState.MEMBER,
        (MembershipState.JOINING, "call_off"): MembershipState.ABSENT,
        (MembershipState.JOINING, "fail_return"): MembershipState.LOST,
        (MembershipState.MEMBER, "drain"): MembershipState.DRAINING,
        (MembershipState.MEMBER, "lose"): MembershipState.LOST,
        (MembershipState.MEMBER, "give_up"): MembershipState.ABSENT,
        (MembershipState.MEMBER, "leave"): MembershipState.ABSENT,
        (MembershipState.DRAINING, "stay"): MembershipState.MEMBER,
        (MembershipState.DRAINING, "leave"): MembershipState.ABSENT,
        (MembershipState.DRAINING, "leave_on_notice"): MembershipState.LOST,
        (MembershipState.DRAINING, "lose"): MembershipState.LOST,
        (MembershipState.DRAINING, "give_up"): MembershipState.ABSENT,
    },
)


@dataclass(slots=True)
class Backoff:
    """Decides when a lost region is brought back.

    Most losses are of one process, and the region is back within seconds. A machine that fails
    again and again must not cost the others a reconfiguration each time. So a region is brought
    back at once; if this fails, or if it is lost again within `QUIET_S` of its return, the next
    attempt follows after `FIRST_S`, and each later one after twice the previous time, at most
    `LONGEST_S`. Times are seconds of one clock.

    Attributes:
        attempts: attempts to bring it back since it last stayed for `QUIET_S`.
        joined_s: when it was last back; None: not since it was lost.
        due_s: time of the next attempt; None: it is present, starting, or not brought back.
    """

    attempts: int = 0
    joined_s: float | None = None
    due_s: float | None = None

    def lost(self, now_s: float) -> float:
        """Record a loss or a failed attempt; return the seconds until the next attempt."""
        if self.joined_s is not None and now_s - self.joined_s >= QUIET_S:
            self.attempts = 0
        wait_s = 0.0
        if self.attempts:
            wait_s = min(LONGEST_S, FIRST_S * 2 ** (self.attempts - 1))
        self.joined_s, self.due_s = None, now_s + wait_s
        return wait_s

    def joined(self, now_s: float) -> None:
        """Record that the region is back."""
        self.joined_s, self.due_s = now_s, None

    def take(self, now_s: float) -> bool:
        """Return whether to bring it back now; if so, it counts as starting."""
        if self.due_s is None or now_s < self.due_s:
            return False
        self.due_s = None
        self.attempts += 1
        return True


@dataclass(slots=True)
class Region:
    """One region of a run.

    Attributes:
        name: name of the region.
        state: see `REGION`.
        stays_away: it was asked to leave or removed, and is not brought back automatically.
        is_on_notice: it drains because its machine is reclaimed, and comes back afterwards.
        is_dead: it ended without a barrier and is not back; every new averager must be notified.
        is_awaited: the run may pause for it while it is lost.
        is_starting: it is joining, and its processes were requested.
        move_asked_s: when the averager was asked to move out of it; None: not needed.
        backoff: when it is brought back.
        rows: its sample ledger, as last reported by its server.
        step: its step, as last reported by its server.
    """

    name: str
    state: MembershipState = REGION.initial
    stays_away: bool = False
    is_on_notice: bool = False
    is_dead: bool = False
    is_awaited: bool = True
    is_starting: bool = False
    move_asked_s: float | None = None
    backoff: Backoff = field(default_factory=Backoff)
    rows: Mapping[str, object] | None = None
    step: int = 0

    @property
    def is_here(self) -> bool:
        """Whether it trains."""
        return self.state in (MembershipState.MEMBER, MembershipState.DRAINING)

    @property
    def is_lost(self) -> bool:
        """Whether it was lost without a request; also while it is being brought back."""
        return self.is_dead and not self.stays_away

    @property
    def is_leaving(self) -> bool:
        """Whether it leaves at the next barrier."""
        return self.state is MembershipState.DRAINING and self.move_asked_s is None

    def move(self, event: RegionEvent) -> None:
        """Change the state.

        Raises:
            InvariantError: the event is not possible in this state.
        """
        self.state = REGION.after(self.state, event)
        if self.state is not MembershipState.JOINING:
            self.is_starting = False
        if self.state is not MembershipState.DRAINING:
            self.is_on_notice = False


# -------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class RunSituation:
    """The current situation, as far as decisions depend on it.

    Attributes:
        now_s: the current time.
        leader: the region that hosts the averager.
        standby: the region that may take over.
        is_standby_up: whether the bridge of that region is up.
        needed: regions that the run cannot continue without.
        is_ending: whether the run was told to finish or halt.
        is_entering: whether joining regions enter at the next barrier.
    """

    now_s: float
    leader: str
    standby: str | None = None
    is_standby_up: bool = False
    needed: frozenset[str] = frozenset()
    is_ending: bool = False
    is_entering: bool = False


@dataclass(frozen=True, slots=True)
class Requested:
    """A user's request; ``view``: the membership view, None until the averager has reported it."""

    request: MemberRequest
    view: View | None = None


@dataclass(frozen=True, slots=True)
class Noticed:
    """Termination notices: remaining seconds of the servers' machines, by region."""

    left_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time has passed: lost regions may come back."""


@dataclass(frozen=True, slots=True)
class AveragerSeen:
    """The averager's region was observed: it may have moved, or must be asked to move."""


@dataclass(frozen=True, slots=True)
class ViewSeen:
    """The averager's view; ``busy`` regions have workers that still compute."""

    view: View
    busy: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RegionGone:
    """The run continues without a region.

    Attributes:
        region: its name.
        has_notice: whether its machine is reclaimed; it then needs another place.
    """

    region: str
    has_notice: bool = False


@dataclass(frozen=True, slots=True)
class AveragerMoved:
    """The averager has moved to another region."""


@dataclass(frozen=True, slots=True)
class MoveWanted:
    """The plan prefers the averager in its standby's region."""


@dataclass(frozen=True, slots=True)
class JoinEnded:
    """A region has joined, or failed to join."""

    region: str
    has_joined: bool


Event = (
    Requested
    | Noticed
    | TimePassed
    | AveragerSeen
    | ViewSeen
    | RegionGone
    | AveragerMoved
    | MoveWanted
    | JoinEnded
)

# -------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer a user's request; ``refusal`` is the reason why it is refused."""

    verb: str
    region: str
    request: str = ""
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class Say:
    """Show a line to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Start:
    """Start the processes of a joining region."""

    region: str


@dataclass(frozen=True, slots=True)
class CallOff:
    """Cancel the join of a region."""

    region: str
    cause: str


@dataclass(frozen=True, slots=True)
class AskToLeave:
    """Ask the averager to let a region leave at the next barrier."""

    region: str


@dataclass(frozen=True, slots=True)
class MoveAverager:
    """Ask the standby to take over from a running region."""

    region: str


@dataclass(frozen=True, slots=True)
class ReportDead:
    """Notify the averager that the run continues without a region."""

    region: str


@dataclass(frozen=True, slots=True)
class Lose:
    """Continue without a region at once."""

    region: str
    cause: str


@dataclass(frozen=True, slots=True)
class Release:
    """Release the placement groups of a region."""

    region: str


@dataclass(frozen=True, slots=True)
class DropRegion:
    """Continue without a region that has left."""

    region: str


@dataclass(frozen=True, slots=True)
class Drained:
    """Record that a region has left; ``cause`` is ``"asked"`` or ``"notice"``."""

    region: str
    cause: str


Action = (
    Answer
    | Say
    | Start
    | CallOff
    | AskToLeave
    | MoveAverager
    | ReportDead
    | Lose
    | Release
    | DropRegion
    | Drained
)


def leave_on_notice(
    left_s: Mapping[str, float],
    members: Collection[str],
    leaving: Collection[str],
    needed: Collection[str],
) -> dict[str, Literal["leave", "lose"]]:
    """Decide what follows from termination notices.

    Args:
        left_s: remaining seconds of the servers' machines, by region.
        members: the regions that take part.
        leaving: those of them that are draining, for any reason.
        needed: those of them that the run cannot continue without.

    Returns:
        Regions that must drain, and those to lose at once.
    """
    answers: dict[str, Literal["leave", "lose"]] = {}
    stay = [name for name in members if name not in leaving]
    for region in sorted(sorted(left_s), key=left_s.__getitem__):
        if region not in members or region in needed:
            continue
        if region in leaving:
            if left_s[region] <= AT_ONCE_S:
                answers[region] = "lose"
        elif len(stay) > 1:
            answers[region] = "leave"
            stay.remove(region)
    return answers


@dataclass(frozen=True, slots=True)
class MemberPolicy:
    """Decides which changes of a run's members are made, with reasons for refusals. Pure.

    A request that cannot succeed is refused at once; otherwise the machines of a joining region
    would be paid for nothing.

    Attributes:
        experiment: the run.
    """

    experiment: Experiment

    @property
    def brings_back(self) -> bool:
        """Whether lost regions are brought back."""
        experiment = self.experiment
        shards = {each.name: each.ps_shards for each in experiment.regions}
        return (
            experiment.members.rejoin
            and self._fixed is None
            and len(shards) > 1
            and why_no_joins(shards) is None
        )

    @property
    def may_change(self) -> bool:
        """Whether regions can leave."""
        return self._fixed is None

    @property
    def least(self) -> int | None:
        """Number of required regions; None: all that have not left."""
        return self.experiment.members.min

    @property
    def _fixed(self) -> str | None:
        experiment = self.experiment
        return why_fixed(
            experiment.overlay.kind,
            experiment.codec,
            has_transfers=experiment.transfers is not None,
        )

    def refusal(
        self,
        request: MemberRequest,
        members: Collection[str],
        pending: Collection[str],
        *,
        leader: str,
        standby: str | None,
        is_ending: bool,
    ) -> str | None:
        """Return why a request is refused; None if it is accepted.

        Args:
            request: the request.
            members: the regions that take part.
            pending: regions that are about to join or leave.
            leader: the averager's region.
            standby: region that may take over; None: there is none.
            is_ending: whether the run was told to finish or halt.
        """
        region, experiment = request.region, self.experiment
        if region not in experiment.region_names:
            known = ", ".join(experiment.region_names)
            return f"there is no region '{region}'; regions of this run are {known}"
        if is_ending:
            return "the run is about to end"
        if region in pending:
            return f"region '{region}' is already joining or leaving"
        if self._fixed is not None:
            return self._fixed
        if request.verb == "add":
            return self._cannot_join(region, members)
        stays = leader if standby is None else ""
        return self._no_leaver(region, members, stays)

    def _cannot_join(self, region: str, members: Collection[str]) -> str | None:
        if region in members:
            return f"region '{region}' takes part already"
        shards = {each.name: each.ps_shards for each in self.experiment.regions}
        return why_no_joins(shards)

    def _no_leaver(self, region: str, members: Collection[str], stays: str) -> str | None:
        least = self.experiment.members.min or 1
        if region not in members:
            return f"region '{region}' does not take part"
        if region == stays:
            return f"region '{region}' hosts the averager, which has no standby"
        if len(members) - 1 < least:
            regions = "1 region" if least == 1 else f"{least} regions"
            here = "1 is" if len(members) == 1 else f"{len(members)} are"
            return f"members.min requires {regions}, and {here} present"
        return None


class Regions:
    """All regions of a run, and their transition function. Pure.

    Args:
        policy: which changes are made.
        present: regions that train at the start.
    """

    def __init__(self, policy: MemberPolicy, present: Collection[str]) -> None:
        self._policy = policy
        self._regions: dict[str, Region] = {}
        for name in (*policy.experiment.region_names, *present):
            state = MembershipState.MEMBER if name in present else MembershipState.ABSENT
            self._regions[name] = Region(name, state)

    def __getitem__(self, name: str) -> Region:
        """Return a region; one that is not in the configuration is absent."""
        return self._regions.setdefault(name, Region(name))

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions.values())

    def in_state(self, *states: MembershipState) -> list[str]:
        """Return the names of the regions in any of these states."""
        return [each.name for each in self if each.state in states]

    @property
    def lost(self) -> list[str]:
        """Regions that were lost and not asked to leave."""
        return [each.name for each in self if each.is_lost]

    @property
    def awaited(self) -> list[str]:
        """Lost regions that will be brought back."""
        return self.lost if self._policy.brings_back else []

    @property
    def waited_for(self) -> list[str]:
        """Lost regions whose absence can pause the run."""
        if self._policy.least is not None:
            return self.awaited
        return [name for name in self.awaited if self[name].is_awaited]

    @property
    def away(self) -> frozenset[str]:
        """Regions that were asked to leave or removed, and have not joined since."""
        return frozenset(each.name for each in self if each.stays_away)

    def donor(self, leader: str) -> str:
        """Return the region whose state joining regions copy."""
        return donor_of({each.name: each.step for each in self if each.is_here}, leader)

    def restore(
        self,
        lost: Collection[str],
        away: Collection[str],
        rows: Mapping[str, Mapping[str, object]],
        *,
        unawaited: Collection[str],
        now_s: float,
    ) -> list[Action]:
        """Restore the state of absent regions from another run actor or a checkpoint.

        Args:
            lost: lost regions that may be brought back.
            away: regions that were asked to leave.
            rows: sample ledgers by region.
            unawaited: lost regions that the run does not pause for.
            now_s: the current time.
        """
        for name in away:
            self[name].stays_away = True
        for name, each in rows.items():
            self[name].rows = each
        actions: list[Action] = []
        for name in lost:
            region = self[name]
            region.is_dead, region.is_awaited = True, name not in unawaited
            region.state = MembershipState.ABSENT if region.stays_away else MembershipState.LOST
            actions += self._bring_back(region, now_s)
        return actions

    def next(self, event: Event, now: RunSituation) -> list[Action]:
        """Change the states of regions after an event.

        Args:
            event: the event.
            now: the current situation.

        Returns:
            Actions in the order in which they must be executed.
        """
        match event:
            case Requested(request, view):
                return self._request(request, view, now)
            case Noticed(left_s):
                return self._heed(left_s, now)
            case TimePassed():
                self._pass_time(now)
                return []
            case AveragerSeen():
                return [each for region in self for each in self._move_averager(region, now)]
            case ViewSeen(view, busy):
                return self._see(view, busy, now)
            case RegionGone(name, has_notice):
                return self._lose(self[name], now, has_notice=has_notice)
            case AveragerMoved():
                return self._follow(now)
            case MoveWanted():
                leader = self[now.leader]
                if leader.move_asked_s is None:
                    leader.move_asked_s = -math.inf
                return []
            case JoinEnded(name, has_joined):
                return self._end_join(self[name], now, has_joined=has_joined)

    # -------------------------------------------------------------- requests and notices

    def _request(
        self, request: MemberRequest, view: View | None, now: RunSituation
    ) -> list[Action]:
        verb, name = request.verb, request.region
        accepted = Answer(verb, name, request.id)
        is_coming = name in {*self.in_state(MembershipState.JOINING), *self.awaited}
        if verb == "remove" and is_coming:
            return [accepted, *self._keep_away(self[name])]
        leaving = set(self.in_state(MembershipState.DRAINING))
        if verb == "remove":
            leaving.discard(name)
        here = self.in_state(MembershipState.MEMBER, MembershipState.DRAINING)
        # The view may not reflect a loss yet.
        members = [
            each
            for each in (here if view is None else view.members)
            if not (each in leaving or self[each].is_dead)
        ]
        why = self._policy.refusal(
            request,
            members,
            {*self.in_state(MembershipState.JOINING), *leaving},
            leader=now.leader,
            standby=now.standby,
            is_ending=now.is_ending,
        )
        if why is not None:
            return [Answer(verb, name, request.id, why)]
        region = self[name]
        if verb == "add":
            region.backoff = Backoff()
            region.move("start")
            return [accepted]
        if verb == "remove":
            region.stays_away = True
            return [accepted, Lose(name, f"region '{name}' was removed on request")]
        return [accepted, *self._drain(region, now)]

    def _keep_away(self, region: Region) -> list[Action]:
        """Prevent a region from joining or coming back, in whatever state it is."""
        region.stays_away, region.backoff = True, Backoff()
        actions: list[Action] = []
        if region.is_starting:
            actions.append(CallOff(region.name, f"region '{region.name}' was removed on request"))
        else:
            region.move("call_off" if region.state is MembershipState.JOINING else "give_up")
        does_not = "will not be brought back" if region.is_dead else "will not join"
        return [*actions, Say(f"region '{region.name}' {does_not}")]

    def _heed(self, left_s: Mapping[str, float], now: RunSituation) -> list[Action]:
        """Drain regions whose servers are on machines that will be reclaimed."""
        if now.is_ending:
            return []
        here = self.in_state(MembershipState.MEMBER, MembershipState.DRAINING)
        # Ray schedules nothing on such a machine: a region that is starting there needs another
        # place.
        actions: list[Action] = [
            Release(name) for name in left_s if name not in here and not self[name].is_starting
        ]
        leaving = self.in_state(MembershipState.DRAINING)
        answers = leave_on_notice(left_s, here, leaving, self.needed(now))
        late = [name for name, answer in answers.items() if answer == "lose"]
        if late:  # drain others later: the averager may have to move first
            cause = "received a termination notice, and reached no barrier"
            return actions + [Lose(name, f"region '{name}' {cause}") for name in late]
        for name in answers:
            actions.append(Say(f"a machine of region '{name}' will be reclaimed"))
            actions += self._drain(self[name], now)
            self[name].is_on_notice = True
        return actions

    def needed(self, now: RunSituation) -> list[str]:
        """Return the regions here that cannot leave."""
        here = self.in_state(MembershipState.MEMBER, MembershipState.DRAINING)
        return [name for name in here if not self._policy.may_change or name in now.needed]

    def _drain(self, region: Region, now: RunSituation) -> list[Action]:
        region.move("drain")
        if region.name != now.leader:
            return self._ask_to_leave(region)
        region.move_asked_s = -math.inf
        return [Say(f"moving the averager, so that region '{region.name}' can leave")]

    def _ask_to_leave(self, region: Region) -> list[Action]:
        region.move_asked_s = None
        return [Say(f"region '{region.name}' is asked to leave"), AskToLeave(region.name)]

    # -------------------------------------------------------------- time and views

    def _pass_time(self, now: RunSituation) -> None:
        if now.is_ending:
            return
        for region in self:
            if region.state is MembershipState.LOST and region.backoff.take(now.now_s):
                region.move("start")

    def _move_averager(self, region: Region, now: RunSituation) -> list[Action]:
        """Move the averager out of a region: its standby takes over as after a failure."""
        asked_s = region.move_asked_s
        if asked_s is None:
            return []
        if now.is_ending:
            region.move_asked_s = None
            if region.state is MembershipState.DRAINING:
                region.move("stay")
        elif region.name != now.leader:
            region.move_asked_s = None
            if region.state is MembershipState.DRAINING:
                return self._ask_to_leave(region)
        elif now.is_standby_up and now.now_s - asked_s >= _MOVE_S:
            region.move_asked_s = now.now_s
            return [MoveAverager(region.name)]
        return []

    def _see(self, view: View, busy: Collection[str], now: RunSituation) -> list[Action]:
        actions: list[Action] = []
        for name in view.left:
            if self[name].is_here and name not in busy:
                actions += self._leave(self[name], now)
        for region in self:
            if region.is_leaving and region.name in view.lost:
                region.move("stay")  # a loss event follows
        waiting = sorted(each.name for each in self if each.is_leaving)
        waiting = [name for name in waiting if name in view.members]
        if waiting and not now.is_entering and not now.is_ending:
            # A request made while another change was pending was lost; repeating it is harmless.
            actions.append(AskToLeave(waiting[0]))
        for region in self:
            if region.state is MembershipState.JOINING and not region.is_starting:
                if now.is_ending:
                    region.move("fail_return" if region.is_lost else "call_off")
                else:
                    region.is_starting = True
                    actions.append(Start(region.name))
        return actions

    def _leave(self, region: Region, now: RunSituation) -> list[Action]:
        """Record that a region has left with all its results."""
        actions: list[Action] = [DropRegion(region.name), Say("")]
        if not region.is_on_notice:
            region.move("leave")
            region.stays_away = True
            return [*actions, Drained(region.name, "asked")]
        region.move("leave_on_notice")
        region.is_dead = True
        back = self._bring_back(region, now.now_s)
        return [*actions, Release(region.name), *back, Drained(region.name, "notice")]

    # -------------------------------------------------------------- losses and joins

    def _lose(self, region: Region, now: RunSituation, *, has_notice: bool) -> list[Action]:
        if region.state is MembershipState.DRAINING and not region.is_on_notice:
            region.stays_away = True
        region.is_dead = region.is_awaited = True
        region.move_asked_s = None
        region.move("give_up" if region.stays_away else "lose")
        actions: list[Action] = [Release(region.name)] if has_notice else []
        return [*actions, ReportDead(region.name), *self._bring_back(region, now.now_s)]

    def _bring_back(self, region: Region, now_s: float) -> list[Action]:
        if region.name not in self.awaited:
            return []
        wait_s = region.backoff.lost(now_s)
        when = "now" if wait_s == 0 else f"in {wait_s:.0f} s"
        return [Say(f"region '{region.name}' will be brought back {when}")]

    def _follow(self, now: RunSituation) -> list[Action]:
        """Report losses to the new averager: the previous one may not have forwarded them."""
        actions: list[Action] = [ReportDead(each.name) for each in self if each.is_dead]
        leader = self[now.leader]
        if leader.is_leaving:
            is_on_notice = leader.is_on_notice
            leader.move("stay")
            if not is_on_notice:  # a region on notice is drained again by its notice
                why = f"the averager is in '{leader.name}' now"
                actions.append(Answer("drain", leader.name, refusal=why))
        return actions

    def _end_join(self, region: Region, now: RunSituation, *, has_joined: bool) -> list[Action]:
        if has_joined:
            region.move("join")
            region.is_dead = region.stays_away = False
            region.is_awaited = True
            region.backoff.joined(now.now_s)
            return []
        region.move("fail_return" if region.is_lost else "call_off")
        return [] if now.is_ending else self._bring_back(region, now.now_s)
