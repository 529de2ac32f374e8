"""Failover of the averager between bridges: leader, standby and ordinary region. Pure.

The standby applies the leader's log. It takes over when it has not reached the leader for
``failover_s`` and a majority of the other regions report the same, or when the controller reports
the leader dead. Answers carry the leader's term, and lower terms are rejected, which fences off a
partitioned leader. Regions then repeat what the new leader lacks (`Caller`). The next standby is
the first configured one that is present, or else the nearest region by round trip time.

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
    """Return the region to make the standby; None if there is none.

    Args:
        preferred: configured standbys, best first.
        able: members connected to the leader.
        rtts_s: shortest measured round trips by region.
    """
    places = {name: place for place, name in enumerate(preferred)}
    return min(
        able, key=lambda n: (places.get(n, len(places)), rtts_s.get(n, inf), n), default=None
    )


@dataclass(frozen=True, slots=True)
class AveragerRequest:
    """Request to the averager.

    Attributes:
        op: command.
        again: a previous leader had executed and answered it, so it must not be discarded.
    """

    op: TakeIn | Skip
    again: bool = False


@dataclass(frozen=True, slots=True)
class AveragerAnswer:
    """Answer from the leader of ``term``, with its index in the log and the standby's progress."""

    term: int
    reply: ReplyMessage
    number: int
    stable: int


@dataclass(frozen=True, slots=True)
class AveragerRefusal:
    """Refusal of update ``seq`` by the leader of ``term``."""

    term: int
    seq: int
    error: GeoRayError


@dataclass(frozen=True, slots=True)
class LogAppend:
    """Next entry for the standby.

    Attributes:
        term: leader's term.
        entry: entry.
        counts: see `ShipEntry`; not transmitted.
    """

    term: int
    entry: LogEntry
    counts: bool = True


@dataclass(frozen=True, slots=True)
class InstallSnapshot:
    """Snapshot for a new standby: the averager's state after entry ``number``."""

    term: int
    number: int
    snapshot: StateSnapshot


@dataclass(frozen=True, slots=True)
class LogAck:
    """Acknowledgement of all entries up to ``number``.

    Attributes:
        term: leader's term.
        number: newest entry.
        follows: False if the sender has no replica.
    """

    term: int
    number: int
    follows: bool = True


@dataclass(frozen=True, slots=True)
class AveragerLost:
    """Report to the standby whether the sender has lost the leader of ``term``."""

    term: int
    lost: bool


@dataclass(frozen=True, slots=True)
class NewAverager:
    """Announcement of a new leader, with the receiver's newest update that this leader knows."""

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
class _Retained:
    """An exchange that the standby may not know: the update and the merged answer."""

    update: UpdateMessage
    merged_P: Tensor
    dropped: bool
    number: int

    @property
    def op(self) -> TakeIn | Skip:
        """Command that repeats the exchange; a discarded update is skipped again."""
        update = self.update
        return Skip(update.region, update.attempt, update.seq) if self.dropped else TakeIn(update)


@dataclass(slots=True)
class Caller:
    """Requests of one region to the averager; see the module's docstring.

    It receives only messages of the present leader.

    Attributes:
        opener: decodes payloads.
        keeps: whether exchanges that the new leader lacks are repeated; only for strategies whose
            updates are changes.
    """

    opener: Opener
    keeps: bool
    _open: UpdateMessage | None = None
    _retained: dict[int, _Retained] = field(default_factory=dict)
    _repeated: dict[int, _Retained] = field(default_factory=dict)
    _owed_P: Tensor | None = None

    @property
    def open(self) -> UpdateMessage | None:
        """The request that is not answered yet."""
        return self._open

    def find(self, attempt: int, seq: int) -> UpdateMessage | None:
        """An update that is open, or was answered before the standby had it."""
        retained = [k.update for k in (*self._retained.values(), *self._repeated.values())]
        mine = retained if self._open is None else [self._open, *retained]
        return next((u for u in mine if (u.attempt, u.seq) == (attempt, seq)), None)

    def submit(self, update: UpdateMessage) -> list[TakeIn]:
        """Submit a new request; none may be open.

        Returns:
            Requests to send now: none while exchanges are repeated.
        """
        self._open = update
        return [] if self._repeated else [TakeIn(update)]

    def on_moved(self, last: tuple[int, int]) -> list[TakeIn | Skip]:
        """Follow a new leader.

        Args:
            last: attempt and number of this region's newest update known to the leader.

        Returns:
            Requests to send, in order. The open request waits for the answers to the repeated ones.
        """
        self._repeated = {
            seq: retained
            for seq, retained in sorted((self._retained | self._repeated).items())
            if (retained.update.attempt, retained.update.seq) > last
        }
        self._retained = {}
        asked: list[TakeIn | Skip] = [retained.op for retained in self._repeated.values()]
        if asked or self._open is None:
            return asked
        return [TakeIn(self._open)]

    def on_reply(
        self, reply: ReplyMessage, number: int, stable: int
    ) -> ReplyMessage | TakeIn | None:
        """Handle an answer.

        Args:
            reply: answer.
            number: newest entry of the log that the answer may depend on.
            stable: newest entry up to which the standby has everything.

        Returns:
            The answer for the region, the next request, or None.
        """
        self._retained = {
            seq: retained for seq, retained in self._retained.items() if retained.number > stable
        }
        missing = self._repeated.pop(reply.seq, None)
        if missing is not None:
            merged_P = self._vector(reply, missing.update)
            self._owe(merged_P - missing.merged_P)
            if number > stable:  # keep it: the next standby may lack it, too
                self._retained[reply.seq] = replace(missing, merged_P=merged_P, number=number)
            return None if self._repeated or self._open is None else TakeIn(self._open)
        if self._open is None or reply.seq != self._open.seq:
            return None
        return self._finish(reply, number, stable)

    def refused(self, seq: int) -> bool:
        """Handle a refusal of update ``seq``; return whether it was the open request."""
        if self._open is None or self._open.seq != seq:
            return False
        self._open = None
        return True

    def _finish(self, reply: ReplyMessage, number: int, stable: int) -> ReplyMessage:
        update, self._open = self._open, None
        if update is None:  # unreachable: the caller has an open request
            return reply
        keep = self.keeps and number > stable
        if not (keep or reply.own or self._owed_P is not None):
            return reply
        merged_P = self._vector(reply, update)
        if self._owed_P is not None:
            merged_P, self._owed_P = merged_P + self._owed_P, None
        if keep:
            sent = replace(update, payload_P=self.opener(update).clone(), coded=None)
            self._retained[reply.seq] = _Retained(sent, merged_P, reply.dropped, number)
        return replace(reply, payload_P=merged_P, coded=None, own=False)

    def _vector(self, reply: ReplyMessage, update: UpdateMessage) -> Tensor:
        vector_P = self.opener(reply)
        return torch.sub(vector_P, self.opener(update)) if reply.own else vector_P

    def _owe(self, difference_P: Tensor) -> None:
        self._owed_P = difference_P if self._owed_P is None else self._owed_P + difference_P


@dataclass(frozen=True, slots=True)
class ReportLost:
    """Report to another region whether this one has lost the averager."""

    to: str
    lost: bool


@dataclass(frozen=True, slots=True)
class FailOver:
    """Host the averager; `LivenessWatch.leader` is this region already."""


@dataclass(frozen=True, slots=True)
class GiveUpRegion:
    """Continue without ``region``."""

    region: str


WatchEffect = ReportLost | FailOver | GiveUpRegion


@dataclass(slots=True)
class LivenessWatch:
    """One region's watch over the leader; see the module's docstring.

    Attributes:
        region: own region.
        leader: leader, as far as this region knows.
        failover_s: seconds for which the leader must be unreachable.
        rejoin_s: seconds for which a new leader waits for the previous leader's region.
    """

    region: str
    leader: AveragerLeader
    failover_s: float
    rejoin_s: float
    _known: set[str] = field(default_factory=set)
    _lost_s: dict[str, float] = field(default_factory=dict)
    _reported: dict[str, bool] = field(default_factory=dict)
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
        """Check which regions are connected.

        Args:
            now_s: present time.
            connected: connected regions.
            members: members; only used at the leader and at the standby.
            is_standby: whether this region is the standby.
        """
        self._known |= set(connected)
        self._dead -= set(connected)
        for peer in self._known:  # a region that was never connected is starting, not lost
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
        """Record that a region has lost the leader of ``term``, or has found it again."""
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
        """Handle a report that ``region`` is dead.

        Args:
            region: dead region.
            members: members, as for `tick`.
            is_standby: whether this region is the standby.
            comes_back: only the bridge died: an averager there moves, and the region is waited for
                as if it were only partitioned.
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
        """Record that the averager lives at ``leader``; return whether this is new."""
        if leader.term <= self.leader.term:
            return False
        self._former = (self._former | {self.leader.region}) - {leader.region}
        self.leader = leader
        self._votes.clear()
        self._reported.clear()
        return True

    def is_lost(self, peer: str, now_s: float, for_s: float) -> bool:
        """Tell whether ``peer``, connected before, has been unreachable for ``for_s`` seconds."""
        since_s = self._lost_s.get(peer)
        return since_s is not None and now_s - since_s >= for_s

    def _report(self, *, lost: bool) -> list[WatchEffect]:
        """Report a changed state to the regions that do not know it."""
        others = [name for name in sorted(self._known) if name != self.leader.region]
        news = [name for name in others if self._reported.get(name, False) != lost]
        self._reported |= dict.fromkeys(news, lost)
        return [ReportLost(name, lost) for name in news]

    def _fail_over(self, members: Collection[str]) -> list[WatchEffect]:
        self.follow(AveragerLeader(self.region, self.leader.term + 1))
        return [FailOver(), *self._give_up(0.0, members)]

    def _give_up(self, now_s: float, members: Collection[str]) -> list[WatchEffect]:
        """Return the previous leaders that are no longer waited for."""
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
    """Report of the leader: an entry was executed."""

    committed: EntryCommitted


@dataclass(frozen=True, slots=True)
class StandbyEvent:
    """Event for the log: a failover, a new leader, a region given up, or a new standby."""

    what: Literal["failed_over", "follows", "left", "promoted"]
    region: str
    term: int


StandbyEffect = SendMessage | AnswerOwn | RefuseOwn | EntryDone | StandbyEvent


@dataclass(slots=True)
class StandbyNode:
    """One bridge's part in a replicated averager: leader, standby or ordinary region. Pure.

        region --Request--> leader --Append--> standby    the standby executes the same log
               <--Answer--         <--Ack-----
        region --Lost-----> standby                       a majority has lost the leader:
               <--New------                               the standby leads in a higher term

    Every answer has the leader's term, and a region rejects answers of lower terms, which fences
    off a leader that was only partitioned. When the old leader learns of the new term, its bridge
    becomes that of an ordinary region and repeats its own open request to the new leader.

        leader --InstallSnapshot, Append ...--> next standby    after a failover or a loss of
               <--Ack---------------------                      the standby: a snapshot, then
                                                                every entry
               --Append(Promote)--------->                      from here on it may take over

    Attributes:
        region: own region.
        caller: own requests.
        watch: liveness watch over the leader.
        make: builds a new averager.
        preferred: preferred standbys, best first; any other region may follow.
        bound: largest distance of the leader's state from its standby's.
        primary: averager, at the leader.
        replica: copy of the averager, at the standby or a candidate.
        standby: at the leader: region that receives the log.
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
    _repeated: set[tuple[str, int]] = field(default_factory=set)  # (region, update number)
    _greeted: set[str] = field(default_factory=set)  # joining regions that know the leader

    @property
    def leader(self) -> AveragerLeader:
        """Leader that this region follows."""
        return self.watch.leader

    @property
    def averager(self) -> Averager | None:
        """Averager, at the leader; None elsewhere."""
        return None if self.primary is None else self.primary.averager

    @property
    def is_standby(self) -> bool:
        """Whether this region may take over: it has every committed entry."""
        replica = self.replica
        return replica is not None and replica.is_promoted and self.region in self.members

    @property
    def wakes_s(self) -> float | None:
        """Time of the next `Wake` of the averager here, by the host's clock; None without one."""
        primary = self.primary
        return None if primary is None or primary.is_waking else primary.averager.wakes_s

    @property
    def members(self) -> tuple[str, ...]:
        """Members; known at the leader and at the standby, empty elsewhere."""
        known = self.replica if self.primary is None else self.primary
        return () if known is None else known.averager.view.members

    # ------------------------------------------------------------------ events

    def submit(self, update: UpdateMessage) -> list[StandbyEffect]:
        """The own region has a request."""
        return self._ask([*self.caller.submit(update)])

    def offer(self, op: Op, now_s: float | None = None) -> list[StandbyEffect]:
        """Offer ``op`` to the leader's log; executed once the standby lacks at most `bound`."""
        primary = self.primary
        if primary is None:
            return []
        if isinstance(op, BeginCheckpoint) and not primary.averager.may_begin_checkpoint:
            refused = LogOutcome([], done=False)  # not logged: only the leader refuses it
            return [EntryDone(EntryCommitted(op, refused, primary.number, primary.stable))]
        return self._effects_of(primary.offer(op, self._now_s if now_s is None else now_s))

    def on_message(self, peer: str, message: StandbyMessage) -> list[StandbyEffect]:
        """Handle a message of another region; ignore messages that do not fit the own role."""
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
        """Handle the passing of time.

        Args:
            now_s: present time.
            connected: connected regions.
            rtts_s: shortest round trips that were measured.
        """
        self._now_s = now_s
        found = self.watch.tick(now_s, connected, self.members, is_standby=self.is_standby)
        return self._watched(found) + self._seek_standby(now_s, connected, rtts_s or {})

    def on_report_dead(self, region: str, *, comes_back: bool = False) -> list[StandbyEffect]:
        """Handle a report that ``region`` is dead; see `LivenessWatch.on_report_dead`."""
        if comes_back and region == self.standby:  # its replica is gone
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
        # A partitioned leader no longer leads.
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
        view = averager.view  # a region that left may not know it yet
        others = [name for name in (*view.members, *view.left) if name != self.region]
        effects += [SendMessage(other, NewAverager(term, averager.last(other))) for other in others]
        asked = self.caller.on_moved(averager.last(self.region))
        return effects + self._ask(asked)

    # ------------------------------------------------------------------ as the leader

    def _requested(self, request: AveragerRequest) -> list[StandbyEffect]:
        if request.again:
            self._repeated.add(_name(request.op))
        return self.offer(request.op)

    def _acknowledged(self, peer: str, ack: LogAck) -> list[StandbyEffect]:
        primary = self.primary
        if primary is None or ack.term != self.leader.term or peer != self.standby:
            return []
        if not ack.follows:  # it restarted, or does not know this leader yet
            return self._release()
        return self._effects_of(primary.on_ack(ack.number))

    def _seek_standby(
        self, now_s: float, connected: Collection[str], rtts_s: Mapping[str, float]
    ) -> list[StandbyEffect]:
        """Choose a standby if there is none, and send it a snapshot."""
        primary, effects = self.primary, list[StandbyEffect]()
        if primary is None or primary.averager.failure is not None:
            return []
        if self.standby is not None:
            # A candidate that is unreachable is replaced. For a promoted standby, the leader waits.
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
        """Remove the standby and commit the entries that waited for it."""
        self.standby = None
        return [] if self.primary is None else self._effects_of(self.primary.release())

    def _settle(self, reply: ReplyMessage) -> None:
        """Settle a region when its open request is answered: it has repeated all that was lost."""
        if self.primary is not None and (reply.to, reply.seq) not in self._repeated:
            self.primary.averager.settle(reply.to)

    def _effects_of(self, steps: list[ReplicationStep]) -> list[StandbyEffect]:
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
        sent = SendMessage(self.standby, LogAppend(term, step.entry, step.counts))
        if not isinstance(step.entry.op, Promote):
            return [sent]
        return [sent, StandbyEvent("promoted", self.standby, term)]

    def _greet(self) -> list[StandbyEffect]:
        """Notify joining regions of the leader, unless it is the configured one."""
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
