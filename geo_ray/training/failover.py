"""Failover of the averager between bridges: leader, follower and ordinary region. Pure.

The follower applies the leader's log. It takes over when it has not reached the leader for
``failover_s`` and a majority of the other regions report the same, or when the controller
reports the leader dead. Answers carry the leader's term, and lower terms are rejected, which
fences off a partitioned leader. Regions then repeat what the new leader lacks (`Caller`). The
next follower is the first configured one that is present, then the nearest by round trip time.

Shape legend: P = parameters of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

import torch
from torch import Tensor

from geo_ray.base.errors import GeoRayError
from geo_ray.training.averager import Averager, AveragerFactory
from geo_ray.training.command_log import (
    BeginCheckpoint,
    Leave,
    LogEntry,
    LogOutcome,
    Op,
    Promote,
    Skip,
    StateSnapshot,
    TakeIn,
    install_snapshot,
)
from geo_ray.training.membership import AveragerLeader
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.replication import (
    AveragerReplica,
    EntryCommitted,
    ReplicatedAverager,
    ReplicationStep,
    ShipEntry,
)


def next_standby(
    preferred: Sequence[str], able: Collection[str], rtts_s: Mapping[str, float]
) -> str | None:
    """The region that is to stand by; None if there is none.

    Args:
        preferred: named by the configuration, the best first.
        able: the members to which the averager's region has a connection.
        rtts_s: shortest round trips by region, as far as there was one.
    """
    places = {name: place for place, name in enumerate(preferred)}
    return min(
        able, key=lambda n: (places.get(n, len(places)), rtts_s.get(n, inf), n), default=None
    )


@dataclass(frozen=True, slots=True)
class AveragerRequest:
    """To the averager: do this.

    Attributes:
        op: what.
        again: an earlier home had done and answered it: it must not be given up now.
    """

    op: TakeIn | Skip
    again: bool = False


@dataclass(frozen=True, slots=True)
class AveragerAnswer:
    """From the home of ``term``: an answer, its number in the log, how far the standby is."""

    term: int
    reply: ReplyMessage
    number: int
    stable: int


@dataclass(frozen=True, slots=True)
class AveragerRefusal:
    """From the home of ``term``: update ``seq`` is refused."""

    term: int
    seq: int
    error: GeoRayError


@dataclass(frozen=True, slots=True)
class LogAppend:
    """To the standby: the next entry.

    Attributes:
        term: of the home.
        entry: the entry.
        counts: see `ShipEntry`; known at the sender only.
    """

    term: int
    entry: LogEntry
    counts: bool = True


@dataclass(frozen=True, slots=True)
class InstallSnapshot:
    """To who is to stand by: the averager as it was after entry ``number``."""

    term: int
    number: int
    snapshot: StateSnapshot


@dataclass(frozen=True, slots=True)
class LogAck:
    """To the averager: everything up to ``number`` is here.

    Attributes:
        term: of the home.
        number: of the newest entry.
        follows: whether there is an averager here that carries entries out; else nothing is here.
    """

    term: int
    number: int
    follows: bool = True


@dataclass(frozen=True, slots=True)
class AveragerLost:
    """To the standby: whether the home of ``term`` is lost."""

    term: int
    lost: bool


@dataclass(frozen=True, slots=True)
class NewAverager:
    """From the new home; with the newest update of the receiver that is known there."""

    term: int
    last: tuple[int, int]


StandbyMessage = (
    AveragerRequest
    | AveragerAnswer
    | AveragerRefusal
    | LogAppend
    | InstallSnapshot
    | LogAck
    | AveragerLost
    | NewAverager
)


Opener = Callable[[UpdateMessage | ReplyMessage], Tensor]
"""The payload of a message as a vector (P,), decoded if it is coded."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """An exchange that the standby may not know: what was sent, and what was merged."""

    update: UpdateMessage
    merged_P: Tensor
    dropped: bool
    number: int

    @property
    def op(self) -> TakeIn | Skip:
        """What makes the averager do it again; what was given up must not be taken in now."""
        update = self.update
        return Skip(update.region, update.attempt, update.seq) if self.dropped else TakeIn(update)


@dataclass(slots=True)
class Caller:
    """See the module's docstring; it is told only what comes from the averager's present home.

    Attributes:
        opener: makes vectors of payloads.
        keeps: whether missing exchanges are repeated (strategies that send changes).
    """

    opener: Opener
    keeps: bool
    _open: UpdateMessage | None = None
    _kept: dict[int, _Kept] = field(default_factory=dict)
    _repeated: dict[int, _Kept] = field(default_factory=dict)
    _owed_P: Tensor | None = None

    @property
    def open(self) -> UpdateMessage | None:
        """The request that is not answered yet."""
        return self._open

    def find(self, attempt: int, seq: int) -> UpdateMessage | None:
        """An update that is open, or was answered before the standby had it."""
        kept = [k.update for k in (*self._kept.values(), *self._repeated.values())]
        mine = kept if self._open is None else [self._open, *kept]
        return next((u for u in mine if (u.attempt, u.seq) == (attempt, seq)), None)

    def submit(self, update: UpdateMessage) -> list[TakeIn]:
        """The region has a new request; there is none open.

        Returns:
            What to ask now: nothing while exchanges are repeated.
        """
        self._open = update
        return [] if self._repeated else [TakeIn(update)]

    def on_moved(self, last: tuple[int, int]) -> list[TakeIn | Skip]:
        """The averager has a new home.

        Args:
            last: attempt and number of this region's newest update that is known there.

        Returns:
            What to ask there, in order. The open request waits for the answers to those that are
            repeated: whoever is answered it owes nothing any more.
        """
        self._repeated = {
            seq: kept
            for seq, kept in sorted((self._kept | self._repeated).items())
            if (kept.update.attempt, kept.update.seq) > last
        }
        self._kept = {}
        asked: list[TakeIn | Skip] = [kept.op for kept in self._repeated.values()]
        if asked or self._open is None:
            return asked
        return [TakeIn(self._open)]

    def on_reply(
        self, reply: ReplyMessage, number: int, stable: int
    ) -> ReplyMessage | TakeIn | None:
        """The averager answered.

        Args:
            reply: the answer.
            number: the newest entry of the averager's log that the reply may depend on.
            stable: up to which entry the standby has everything.

        Returns:
            The answer for the region; or what to ask now; None if there is neither.
        """
        self._kept = {seq: kept for seq, kept in self._kept.items() if kept.number > stable}
        missing = self._repeated.pop(reply.seq, None)
        if missing is not None:
            merged_P = self._vector(reply, missing.update)
            self._owe(merged_P - missing.merged_P)
            if number > stable:  # the next standby may not know it either
                self._kept[reply.seq] = replace(missing, merged_P=merged_P, number=number)
            return None if self._repeated or self._open is None else TakeIn(self._open)
        if self._open is None or reply.seq != self._open.seq:
            return None
        return self._finish(reply, number, stable)

    def refused(self, seq: int) -> bool:
        """The averager refused ``seq``; whether that concerns the open request."""
        if self._open is None or self._open.seq != seq:
            return False
        self._open = None
        return True

    def _finish(self, reply: ReplyMessage, number: int, stable: int) -> ReplyMessage:
        update, self._open = self._open, None
        if update is None:  # cannot be: whoever finishes has seen it
            return reply
        keep = self.keeps and number > stable
        if not (keep or reply.own or self._owed_P is not None):
            return reply
        merged_P = self._vector(reply, update)
        if self._owed_P is not None:
            merged_P, self._owed_P = merged_P + self._owed_P, None
        if keep:
            sent = replace(update, payload_P=self.opener(update).clone(), coded=None)
            self._kept[reply.seq] = _Kept(sent, merged_P, reply.dropped, number)
        return replace(reply, payload_P=merged_P, coded=None, own=False)

    def _vector(self, reply: ReplyMessage, update: UpdateMessage) -> Tensor:
        vector_P = self.opener(reply)
        return torch.sub(vector_P, self.opener(update)) if reply.own else vector_P

    def _owe(self, difference_P: Tensor) -> None:
        self._owed_P = difference_P if self._owed_P is None else self._owed_P + difference_P


@dataclass(frozen=True, slots=True)
class ReportLost:
    """Tell another region whether this one has lost the averager."""

    to: str
    lost: bool


@dataclass(frozen=True, slots=True)
class FailOver:
    """Host the averager; `LivenessWatch.leader` is this region already."""


@dataclass(frozen=True, slots=True)
class GiveUpRegion:
    """Go on without ``region``."""

    region: str


WatchEffect = ReportLost | FailOver | GiveUpRegion


@dataclass(slots=True)
class LivenessWatch:
    """One region's watch over the averager's home; see the module's docstring.

    Attributes:
        region: whose watch.
        leader: where the averager lives, as far as this region knows.
        failover_s: how long the home must be lost.
        rejoin_s: how long a new home waits for the region of one before.
    """

    region: str
    leader: AveragerLeader
    failover_s: float
    rejoin_s: float
    _known: set[str] = field(default_factory=set)
    _lost_s: dict[str, float] = field(default_factory=dict)
    _told: dict[str, bool] = field(default_factory=dict)
    _votes: set[str] = field(default_factory=set)
    _former: set[str] = field(default_factory=set)
    _dead: set[str] = field(default_factory=set)

    def tick(
        self,
        now_s: float,
        connected: Collection[str],
        members: Collection[str],
        *,
        is_standby: bool,
    ) -> list[WatchEffect]:
        """Look who is connected.

        Args:
            now_s: the present.
            connected: regions to which there is a connection.
            members: who takes part; not asked for elsewhere than at the home and the standby.
            is_standby: whether this is the standby.
        """
        self._known |= set(connected)
        self._dead -= set(connected)
        for peer in self._known:  # a region that was never there is starting, not lost
            if peer in connected:
                self._lost_s.pop(peer, None)
            else:
                self._lost_s.setdefault(peer, now_s)
        if self.region == self.leader.region:
            return self._give_up(now_s, members)
        lost = self.is_lost(self.leader.region, now_s, self.failover_s)
        self.on_vote(self.region, self.leader.term, lost=lost)
        if is_standby and lost and self._has_majority(members):
            return self._fail_over(members)
        return self._report(lost=lost)

    def on_vote(self, voter: str, term: int, *, lost: bool) -> None:
        """A region has lost the home of ``term``, or has found it again."""
        if term == self.leader.term and voter != self.leader.region:
            (self._votes.add if lost else self._votes.discard)(voter)

    def on_report_dead(
        self,
        region: str,
        members: Collection[str],
        *,
        is_standby: bool,
        comes_back: bool = False,
    ) -> list[WatchEffect]:
        """Somebody has seen that ``region`` is dead.

        Args:
            region: which.
            members: who takes part, as for `tick`.
            is_standby: whether this is the standby.
            comes_back: only its bridge is: if the averager lived there it moves, and the region is
                waited for as one that may only be cut off.
        """
        if comes_back:
            is_leader = region == self.leader.region
            return self._fail_over(members) if is_standby and is_leader else []
        self._dead.add(region)
        if self.region == self.leader.region:
            self._former.discard(region)
            return [GiveUpRegion(region)] if region in members else []
        is_leader = region == self.leader.region
        return self._fail_over(members) if is_standby and is_leader else []

    def follow(self, leader: AveragerLeader) -> bool:
        """The averager lives at ``leader``; whether that is news."""
        if leader.term <= self.leader.term:
            return False
        self._former = (self._former | {self.leader.region}) - {leader.region}
        self.leader = leader
        self._votes.clear()
        self._told.clear()
        return True

    def is_lost(self, peer: str, now_s: float, for_s: float) -> bool:
        """Whether there has been no connection to ``peer`` for so long; there was one before."""
        since_s = self._lost_s.get(peer)
        return since_s is not None and now_s - since_s >= for_s

    def _report(self, *, lost: bool) -> list[WatchEffect]:
        """Tell everybody whom that is news for; nobody who was not told takes it for lost."""
        others = [name for name in sorted(self._known) if name != self.leader.region]
        news = [name for name in others if self._told.get(name, False) != lost]
        self._told |= dict.fromkeys(news, lost)
        return [ReportLost(name, lost) for name in news]

    def _fail_over(self, members: Collection[str]) -> list[WatchEffect]:
        self.follow(AveragerLeader(self.region, self.leader.term + 1))
        return [FailOver(), *self._give_up(0.0, members)]

    def _give_up(self, now_s: float, members: Collection[str]) -> list[WatchEffect]:
        """Of the homes before this one, those that are not waited for any more."""
        self._former &= set(members)
        gone = [
            name
            for name in sorted(self._former)
            if name in self._dead or self.is_lost(name, now_s, self.rejoin_s)
        ]
        self._former -= set(gone)
        return [GiveUpRegion(name) for name in gone]

    def _has_majority(self, members: Collection[str]) -> bool:
        voters = self._votes.intersection(members)
        return len(voters) >= (len(members) - 1) // 2 + 1


# ------------------------------------------------------------------ what the shell has to do


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a message to another region."""

    to: str
    message: StandbyMessage


@dataclass(frozen=True, slots=True)
class AnswerOwn:
    """The answer to the own region's open request."""

    reply: ReplyMessage


@dataclass(frozen=True, slots=True)
class RefuseOwn:
    """The own region's request is refused."""

    seq: int
    error: GeoRayError


@dataclass(frozen=True, slots=True)
class EntryDone:
    """As the averager's home: an entry was carried out."""

    committed: EntryCommitted


@dataclass(frozen=True, slots=True)
class StandbyEvent:
    """Worth an event.

    This region took over or follows a new home; as the home, it goes on without a region, or has a
    standby again.
    """

    what: Literal["failed_over", "follows", "left", "promoted"]
    region: str
    term: int


StandbyEffect = SendMessage | AnswerOwn | RefuseOwn | EntryDone | StandbyEvent


@dataclass(slots=True)
class StandbyNode:
    """One bridge's part in an averager that may move: its home, its standby, or neither. Pure.

        region --Request--> home --Append--> standby    the standby carries out the same log
               <--Answer--       <--Ack-----
        region --Lost-----> standby                     a majority has lost the home:
               <--New------                             the standby is the home of a higher epoch

    Every answer carries the epoch of the averager's home, and a region that follows a higher epoch
    takes no answers of a lower one: that fences off a home that was only cut off. When the old home
    hears of the new epoch, its bridge becomes that of an ordinary region, and asks the new home
    what it had asked itself.

        home --LogTwin, Append ...--> next standby      after a takeover, or when the standby is
        gone:
             <--Ack-------------                        a copy of the averager, then every entry
             --Append(Appoint)----->                    from here on it may take over

    Attributes:
        region: this one.
        caller: its requests.
        watch: over the averager's home; knows where that is.
        make: builds an averager that has done nothing yet.
        preferred: who is to stand by, the best first; after them any region may.
        bound: how far an averager here may be ahead of its standby.
        primary: the averager, if this is its home.
        replica: its copy, if this is the standby, or is to become it.
        standby: at the averager's home: who is sent the log.
    """

    region: str
    caller: Caller
    watch: LivenessWatch
    make: AveragerFactory
    preferred: tuple[str, ...] = ()
    bound: float = 0.0
    primary: ReplicatedAverager | None = None
    replica: AveragerReplica | None = None
    standby: str | None = None
    _now_s: float = 0.0
    _repeated: set[tuple[str, int]] = field(default_factory=set)  # regions, numbers of updates
    _greeted: set[str] = field(default_factory=set)  # newcomers who know where the averager is

    @property
    def leader(self) -> AveragerLeader:
        """Where the averager lives that this region follows."""
        return self.watch.leader

    @property
    def averager(self) -> Averager | None:
        """The averager, if this is its home."""
        return None if self.primary is None else self.primary.averager

    @property
    def is_standby(self) -> bool:
        """Whether this region may take over: nothing counts that it lacks."""
        replica = self.replica
        return replica is not None and replica.is_promoted and self.region in self.members

    @property
    def wakes_s(self) -> float | None:
        """When the averager here wants a `Wake`, by the host's clock; None: not at all."""
        primary = self.primary
        return None if primary is None or primary.is_waking else primary.averager.wakes_s

    @property
    def members(self) -> tuple[str, ...]:
        """Who takes part; known at the home and at the standby, empty elsewhere."""
        known = self.replica if self.primary is None else self.primary
        return () if known is None else known.averager.view.members

    # ------------------------------------------------------------------ events

    def submit(self, update: UpdateMessage) -> list[StandbyEffect]:
        """The own region has a request."""
        return self._ask([*self.caller.submit(update)])

    def offer(self, op: Op, now_s: float | None = None) -> list[StandbyEffect]:
        """As the averager's home: carry ``op`` out, once the standby is near enough."""
        primary = self.primary
        if primary is None:
            return []
        if isinstance(op, BeginCheckpoint) and not primary.averager.may_begin_checkpoint:
            refused = LogOutcome([], done=False)  # only here it is known that it may not
            return [EntryDone(EntryCommitted(op, refused, primary.number, primary.stable))]
        return self._carry(primary.offer(op, self._now_s if now_s is None else now_s))

    def on_message(self, peer: str, message: StandbyMessage) -> list[StandbyEffect]:
        """Another region has sent ``message``; what does not fit its role is passed over."""
        match message:
            case AveragerRequest() as request:
                return self._requested(request) if _sender(request.op) == peer else []
            case AveragerAnswer(term, reply, number, stable):
                if AveragerLeader(peer, term) != self.leader:
                    return []
                match self.caller.on_reply(reply, number, stable):
                    case TakeIn() as op:
                        return self._ask([op])
                    case ReplyMessage() as given:
                        return [AnswerOwn(given)]
                return []
            case AveragerRefusal(term, seq, error):
                from_leader = AveragerLeader(peer, term) == self.leader
                return [RefuseOwn(seq, error)] if from_leader and self.caller.refused(seq) else []
            case LogAppend() | InstallSnapshot():
                return self._logged(peer, message)
            case LogAck():
                return self._acknowledged(peer, message)
            case AveragerLost(term, lost):
                self.watch.on_vote(peer, term, lost=lost)
                return []
            case NewAverager(term, last):
                return self._follow(AveragerLeader(peer, term), last)

    def tick(
        self, now_s: float, connected: Collection[str], rtts_s: Mapping[str, float] | None = None
    ) -> list[StandbyEffect]:
        """Time has passed.

        Args:
            now_s: the present.
            connected: the regions to which there is a connection.
            rtts_s: shortest round trips, as far as there was one.
        """
        self._now_s = now_s
        found = self.watch.tick(now_s, connected, self.members, is_standby=self.is_standby)
        return self._watched(found) + self._seek_standby(now_s, connected, rtts_s or {})

    def on_report_dead(self, region: str, *, comes_back: bool = False) -> list[StandbyEffect]:
        """Somebody has seen that ``region`` is dead; see `LivenessWatch.on_report_dead`."""
        if comes_back and region == self.standby:  # its copy of the averager is gone
            return self._release()
        found = self.watch.on_report_dead(
            region, self.members, is_standby=self.is_standby, comes_back=comes_back
        )
        return self._watched(found)

    # ------------------------------------------------------------------ as a region

    def _ask(self, ops: list[TakeIn | Skip]) -> list[StandbyEffect]:
        open_update = self.caller.open
        asked = [
            AveragerRequest(op, not (isinstance(op, TakeIn) and op.update is open_update))
            for op in ops
        ]
        if self.primary is not None:
            return [effect for request in asked for effect in self._requested(request)]
        return [SendMessage(self.leader.region, request) for request in asked]

    def _follow(self, leader: AveragerLeader, last: tuple[int, int]) -> list[StandbyEffect]:
        if not self.watch.follow(leader):
            return []
        # A home that was cut off is none any more.
        self.primary = self.replica = self.standby = None
        news = StandbyEvent("follows", leader.region, leader.term)
        return [news, *self._ask(self.caller.on_moved(last))]

    # ------------------------------------------------------------------ as the standby

    def _logged(self, peer: str, message: LogAppend | InstallSnapshot) -> list[StandbyEffect]:
        term, replica = message.term, self.replica
        if term < self.leader.term or self.primary is not None:
            return []
        is_leader = AveragerLeader(peer, term) == self.leader
        if isinstance(message, InstallSnapshot) and is_leader:
            averager = self.make()
            install_snapshot(averager, message.snapshot)
            replica = self.replica = AveragerReplica(averager, message.number, is_promoted=False)
            return [SendMessage(peer, LogAck(term, replica.number))]
        if replica is None or not is_leader or isinstance(message, InstallSnapshot):
            return [SendMessage(peer, LogAck(term, 0, follows=False))]
        return [SendMessage(peer, LogAck(term, replica.on_entry(message.entry)))]

    def _fail_over(self) -> list[StandbyEffect]:
        replica = self.replica
        if replica is None:
            return []
        averager, term = replica.averager, self.leader.term
        averager.on_failover(self.region)
        self.primary = ReplicatedAverager(
            averager, self.bound, has_standby=False, number=replica.number
        )
        self.replica = self.standby = None
        self._repeated.clear()
        self._greeted = set(averager.view.members)
        effects: list[StandbyEffect] = [StandbyEvent("failed_over", self.region, term)]
        view = averager.view  # who has left may not have heard that it has
        others = [name for name in (*view.members, *view.left) if name != self.region]
        effects += [SendMessage(other, NewAverager(term, averager.last(other))) for other in others]
        asked = self.caller.on_moved(averager.last(self.region))
        return effects + self._ask(asked)

    # ------------------------------------------------------------------ as the averager's home

    def _requested(self, request: AveragerRequest) -> list[StandbyEffect]:
        if request.again:
            self._repeated.add(_name(request.op))
        return self.offer(request.op)

    def _acknowledged(self, peer: str, ack: LogAck) -> list[StandbyEffect]:
        primary = self.primary
        if primary is None or ack.term != self.leader.term or peer != self.standby:
            return []
        if not ack.follows:  # it was started anew, or does not know this home yet
            return self._release()
        return self._carry(primary.on_ack(ack.number))

    def _seek_standby(
        self, now_s: float, connected: Collection[str], rtts_s: Mapping[str, float]
    ) -> list[StandbyEffect]:
        """Nobody stands by: choose who is to, and send a copy of the averager there."""
        primary, effects = self.primary, list[StandbyEffect]()
        if primary is None or primary.averager.failure is not None:
            return []
        if self.standby is not None:
            # Who is appointed is waited for, and so may not be passed over as easily.
            given_up = not primary.has_standby and self.watch.is_lost(
                self.standby, now_s, self.watch.failover_s
            )
            if not given_up:
                return []
            effects = self._release()
        view = primary.averager.view
        able = {n for n in view.members if n in connected and n not in view.joining}
        self.standby = next_standby(self.preferred, able - {self.region}, rtts_s)
        if self.standby is None:
            return effects
        copy = InstallSnapshot(self.leader.term, primary.number, primary.begin_snapshot())
        return [*effects, SendMessage(self.standby, copy)]

    def _release(self) -> list[StandbyEffect]:
        """Nobody stands by any more; what waited for that is committed."""
        self.standby = None
        return [] if self.primary is None else self._carry(self.primary.release())

    def _settle(self, reply: ReplyMessage) -> None:
        """Whose open request is answered has repeated all that the averager did not know."""
        if self.primary is not None and (reply.to, reply.seq) not in self._repeated:
            self.primary.averager.settle(reply.to)

    def _carry(self, steps: list[ReplicationStep]) -> list[StandbyEffect]:
        effects: list[StandbyEffect] = []
        term, standby = self.leader.term, self.standby
        for step in steps:
            if isinstance(step, ShipEntry):
                effects += self._ship(step)
                continue
            effects.append(EntryDone(step))
            effects += self._refuse(step)
            for reply in step.outcome.replies:
                self._settle(reply)
                effects += self._answer(
                    reply.to, AveragerAnswer(term, reply, step.number, step.stable)
                )
        effects += self._greet()
        if standby is not None and standby == self.standby and standby not in self.members:
            effects += self._release()  # it was asked to leave
        return effects

    def _ship(self, step: ShipEntry) -> list[StandbyEffect]:
        if self.standby is None:
            return []
        term = self.leader.term
        shipped = SendMessage(self.standby, LogAppend(term, step.entry, step.counts))
        if not isinstance(step.entry.op, Promote):
            return [shipped]
        return [shipped, StandbyEvent("promoted", self.standby, term)]

    def _greet(self) -> list[StandbyEffect]:
        """Tell newcomers where the averager is, if that is not where the configuration says."""
        if self.primary is None or self.leader.term == 1:
            return []
        averager, term = self.primary.averager, self.leader.term
        joining = set(averager.view.joining)
        new = sorted(joining - self._greeted)
        self._greeted = (self._greeted & set(averager.view.members)) | joining
        return [SendMessage(name, NewAverager(term, averager.last(name))) for name in new]

    def _refuse(self, step: EntryCommitted) -> list[StandbyEffect]:
        error = step.outcome.error
        if error is None or not isinstance(step.op, TakeIn):
            return []
        update = step.op.update
        return self._answer(update.region, AveragerRefusal(self.leader.term, update.seq, error))

    def _answer(self, to: str, answer: AveragerAnswer | AveragerRefusal) -> list[StandbyEffect]:
        own = to == self.region
        return self.on_message(to, answer) if own else [SendMessage(to, answer)]

    # ------------------------------------------------------------------ over time

    def _watched(self, found: list[WatchEffect]) -> list[StandbyEffect]:
        effects: list[StandbyEffect] = []
        for effect in found:
            match effect:
                case ReportLost(to, lost):
                    effects.append(SendMessage(to, AveragerLost(self.leader.term, lost)))
                case FailOver():
                    effects += self._fail_over()
                case GiveUpRegion(region):
                    effects.append(StandbyEvent("left", region, self.leader.term))
                    effects += self._release() if region == self.standby else []
                    effects += self.offer(Leave(region))
        return effects


def _sender(op: TakeIn | Skip) -> str:
    return op.update.region if isinstance(op, TakeIn) else op.region


def _name(op: TakeIn | Skip) -> tuple[str, int]:
    return _sender(op), op.update.seq if isinstance(op, TakeIn) else op.seq
