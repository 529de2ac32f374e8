"""One bridge's part in an averager that may move: its home, its standby, or neither. Pure.

    region --Request--> home --Append--> standby    the standby carries out the same log
           <--Answer--       <--Ack-----
    region --Lost-----> standby                     a majority has lost the home:
           <--New------                             the standby is the home of a higher epoch

Every answer carries the epoch of the averager's home, and a region that follows a higher epoch
takes no answers of a lower one: that fences off a home that was only cut off. When the old home
hears of the new epoch, its bridge becomes that of an ordinary region, and asks the new home what it
had asked itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from geo_ray.errors import GeoRayError
from geo_ray.strategies.base import Reply, Update
from geo_ray.training.averager.averager import Averager
from geo_ray.training.averager.caller import Caller
from geo_ray.training.averager.home import AveragerHome
from geo_ray.training.averager.log import Leave, LogEntry, Op, Skip, TakeIn
from geo_ray.training.averager.replication import (
    EntryCommitted,
    ReplicatedAverager,
    ShadowAverager,
    ShipEntry,
)
from geo_ray.training.averager.takeover import (
    GiveUpRegion,
    LivenessWatch,
    ReportLost,
    TakeOver,
    WatchEffect,
)

# ------------------------------------------------------------------ messages between bridges


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
    """From the home of ``epoch``: an answer, its number in the log, how far the standby is."""

    epoch: int
    reply: Reply
    number: int
    stable: int


@dataclass(frozen=True, slots=True)
class AveragerRefusal:
    """From the home of ``epoch``: update ``seq`` is refused."""

    epoch: int
    seq: int
    error: GeoRayError


@dataclass(frozen=True, slots=True)
class LogAppend:
    """To the standby: the next entry."""

    epoch: int
    entry: LogEntry


@dataclass(frozen=True, slots=True)
class LogAck:
    """To the averager: everything up to ``number`` is here."""

    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class AveragerLost:
    """To the standby: whether the home of ``epoch`` is lost."""

    epoch: int
    lost: bool


@dataclass(frozen=True, slots=True)
class NewAverager:
    """From the new home; with the newest update of the receiver that is known there."""

    epoch: int
    last: tuple[int, int]


StandbyMessage = (
    AveragerRequest
    | AveragerAnswer
    | AveragerRefusal
    | LogAppend
    | LogAck
    | AveragerLost
    | NewAverager
)

# ------------------------------------------------------------------ what the shell has to do


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a message to another region."""

    to: str
    message: StandbyMessage


@dataclass(frozen=True, slots=True)
class AnswerOwn:
    """The answer to the own region's open request."""

    reply: Reply


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
    """Worth an event: this region took over, follows a new home, or goes on without a region."""

    what: Literal["took_over", "follows", "left"]
    region: str
    epoch: int


StandbyEffect = SendMessage | AnswerOwn | RefuseOwn | EntryDone | StandbyEvent


@dataclass(slots=True)
class StandbyNode:
    """See the module's docstring.

    Attributes:
        region: this one.
        caller: its requests.
        watch: over the averager's home; knows where that is.
        primary: the averager, if this is its home.
        shadow: its copy, if this is the standby.
    """

    region: str
    caller: Caller
    watch: LivenessWatch
    primary: ReplicatedAverager | None = None
    shadow: ShadowAverager | None = None
    _repeated: set[tuple[str, int]] = field(default_factory=set)  # regions, numbers of updates

    @property
    def home(self) -> AveragerHome:
        """Where the averager lives that this region follows."""
        return self.watch.home

    @property
    def averager(self) -> Averager | None:
        """The averager, if this is its home."""
        return None if self.primary is None else self.primary.averager

    # ------------------------------------------------------------------ events

    def submit(self, update: Update) -> list[StandbyEffect]:
        """The own region has a request."""
        return self._ask([*self.caller.submit(update)])

    def offer(self, op: Op) -> list[StandbyEffect]:
        """As the averager's home: carry ``op`` out, once the standby is near enough."""
        return [] if self.primary is None else self._carry(self.primary.offer(op))

    def on_message(self, peer: str, message: StandbyMessage) -> list[StandbyEffect]:
        """Another region has sent ``message``; what does not fit its role is passed over."""
        match message:
            case AveragerRequest() as request:
                return self._requested(request) if _sender(request.op) == peer else []
            case AveragerAnswer(epoch, reply, number, stable):
                if AveragerHome(peer, epoch) != self.home:
                    return []
                match self.caller.on_reply(reply, number, stable):
                    case TakeIn() as op:
                        return self._ask([op])
                    case Reply() as given:
                        return [AnswerOwn(given)]
                return []
            case AveragerRefusal(epoch, seq, error):
                from_home = AveragerHome(peer, epoch) == self.home
                return [RefuseOwn(seq, error)] if from_home and self.caller.refused(seq) else []
            case LogAppend(epoch, entry):
                if self.shadow is None or AveragerHome(peer, epoch) != self.home:
                    return []
                if isinstance(entry.op, Leave):
                    self.watch.on_left(entry.op.region)
                return [SendMessage(peer, LogAck(epoch, self.shadow.on_entry(entry)))]
            case LogAck(epoch, number):
                if self.primary is None or epoch != self.home.epoch:
                    return []
                return self._carry(self.primary.on_ack(number))
            case AveragerLost(epoch, lost):
                self.watch.on_vote(peer, epoch, lost=lost)
                return []
            case NewAverager(epoch, last):
                return self._follow(AveragerHome(peer, epoch), last)

    def tick(self, now_s: float, connected: Collection[str]) -> list[StandbyEffect]:
        """Time has passed; ``connected`` are the regions to which there is a connection."""
        return self._watched(self.watch.tick(now_s, connected))

    def on_report_dead(self, region: str, *, comes_back: bool = False) -> list[StandbyEffect]:
        """Somebody has seen that ``region`` is dead; see `LivenessWatch.on_report_dead`."""
        return self._watched(self.watch.on_report_dead(region, comes_back=comes_back))

    # ------------------------------------------------------------------ as a region

    def _ask(self, ops: list[TakeIn | Skip]) -> list[StandbyEffect]:
        open_update = self.caller.open
        asked = [
            AveragerRequest(op, not (isinstance(op, TakeIn) and op.update is open_update))
            for op in ops
        ]
        if self.primary is not None:
            return [effect for request in asked for effect in self._requested(request)]
        return [SendMessage(self.home.region, request) for request in asked]

    def _follow(self, home: AveragerHome, last: tuple[int, int]) -> list[StandbyEffect]:
        if not self.watch.follow(home):
            return []
        self.primary = self.shadow = None  # a home that was cut off is none any more
        news = StandbyEvent("follows", home.region, home.epoch)
        return [news, *self._ask(self.caller.on_moved(last))]

    # ------------------------------------------------------------------ as the standby

    def _take_over(self) -> list[StandbyEffect]:
        if self.shadow is None:
            return []
        averager, epoch = self.shadow.averager, self.home.epoch
        averager.took_over()
        self.primary, self.shadow = ReplicatedAverager(averager, has_standby=False), None
        effects: list[StandbyEffect] = [StandbyEvent("took_over", self.region, epoch)]
        others = [member for member in self.watch.members if member != self.region]
        effects += [
            SendMessage(other, NewAverager(epoch, averager.last(other))) for other in others
        ]
        asked = self.caller.on_moved(averager.last(self.region))
        return effects + self._ask(asked)

    # ------------------------------------------------------------------ as the averager's home

    def _requested(self, request: AveragerRequest) -> list[StandbyEffect]:
        if request.again:
            self._repeated.add(_name(request.op))
        return self.offer(request.op)

    def _settle(self, reply: Reply) -> None:
        """Whose open request is answered has repeated all that the averager did not know."""
        if self.primary is not None and (reply.to, reply.seq) not in self._repeated:
            self.primary.averager.settle(reply.to)

    def _carry(self, steps: list[ShipEntry | EntryCommitted]) -> list[StandbyEffect]:
        effects: list[StandbyEffect] = []
        epoch, standby = self.home.epoch, self.watch.standby
        for step in steps:
            if isinstance(step, ShipEntry):
                effects += (
                    [] if standby is None else [SendMessage(standby, LogAppend(epoch, step.entry))]
                )
                continue
            effects.append(EntryDone(step))
            effects += self._refuse(step)
            for reply in step.outcome.replies:
                self._settle(reply)
                effects += self._answer(
                    reply.to, AveragerAnswer(epoch, reply, step.number, step.stable)
                )
        return effects

    def _refuse(self, step: EntryCommitted) -> list[StandbyEffect]:
        error = step.outcome.error
        if error is None or not isinstance(step.op, TakeIn):
            return []
        update = step.op.update
        return self._answer(update.region, AveragerRefusal(self.home.epoch, update.seq, error))

    def _answer(self, to: str, answer: AveragerAnswer | AveragerRefusal) -> list[StandbyEffect]:
        own = to == self.region
        return self.on_message(to, answer) if own else [SendMessage(to, answer)]

    # ------------------------------------------------------------------ over time

    def _watched(self, found: list[WatchEffect]) -> list[StandbyEffect]:
        effects: list[StandbyEffect] = []
        for effect in found:
            match effect:
                case ReportLost(to, lost):
                    effects.append(SendMessage(to, AveragerLost(self.home.epoch, lost)))
                case TakeOver():
                    effects += self._take_over()
                case GiveUpRegion(region):
                    self.watch.on_left(region)
                    effects.append(StandbyEvent("left", region, self.home.epoch))
                    effects += self.offer(Leave(region))
        return effects


def _sender(op: TakeIn | Skip) -> str:
    return op.update.region if isinstance(op, TakeIn) else op.region


def _name(op: TakeIn | Skip) -> tuple[str, int]:
    return _sender(op), op.update.seq if isinstance(op, TakeIn) else op.seq
