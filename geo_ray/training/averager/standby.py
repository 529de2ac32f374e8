"""One bridge's part in an averager that may move: its home, its standby, or neither. Pure.

    region --Request--> home --Append--> standby    the standby carries out the same log
           <--Answer--       <--Ack-----
    region --Lost-----> standby                     a majority has lost the home:
           <--New------                             the standby is the home of a higher epoch

Every answer carries the epoch of the averager's home, and a region that follows a higher epoch
takes no answers of a lower one: that fences off a home that was only cut off. When the old home
hears of the new epoch, its bridge becomes that of an ordinary region, and asks the new home what it
had asked itself.

    home --LogTwin, Append ...--> next standby      after a takeover, or when the standby is gone:
         <--Ack-------------                        a copy of the averager, then every entry
         --Append(Appoint)----->                    from here on it may take over
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from geo_ray.errors import GeoRayError
from geo_ray.strategies.base import Reply, Update
from geo_ray.training.averager.averager import Averager
from geo_ray.training.averager.caller import Caller
from geo_ray.training.averager.home import AveragerHome
from geo_ray.training.averager.log import (
    Appoint,
    BeginCheckpoint,
    Leave,
    LogOutcome,
    Op,
    Skip,
    TakeIn,
)
from geo_ray.training.averager.replication import (
    EntryCommitted,
    ReplicatedAverager,
    ReplicationStep,
    ShadowAverager,
    ShipEntry,
)
from geo_ray.training.averager.standby_messages import (
    AveragerAnswer,
    AveragerLost,
    AveragerRefusal,
    AveragerRequest,
    LogAck,
    LogAppend,
    LogTwin,
    NewAverager,
    StandbyMessage,
)
from geo_ray.training.averager.succession import next_standby
from geo_ray.training.averager.takeover import (
    GiveUpRegion,
    LivenessWatch,
    ReportLost,
    TakeOver,
    WatchEffect,
)
from geo_ray.training.averager.twin import become_twin

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
    """Worth an event.

    This region took over or follows a new home; as the home, it goes on without a region, or has a
    standby again.
    """

    what: Literal["took_over", "follows", "left", "appointed"]
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
        make: builds an averager that has done nothing yet.
        preferred: who is to stand by, the best first; after them any region may.
        bound: how far an averager here may be ahead of its standby.
        primary: the averager, if this is its home.
        shadow: its copy, if this is the standby, or is to become it.
        standby: at the averager's home: who is sent the log.
    """

    region: str
    caller: Caller
    watch: LivenessWatch
    make: Callable[[], Averager]
    preferred: tuple[str, ...] = ()
    bound: float = 0.0
    primary: ReplicatedAverager | None = None
    shadow: ShadowAverager | None = None
    standby: str | None = None
    _now_s: float = 0.0
    _repeated: set[tuple[str, int]] = field(default_factory=set)  # regions, numbers of updates
    _greeted: set[str] = field(default_factory=set)  # newcomers who know where the averager is

    @property
    def home(self) -> AveragerHome:
        """Where the averager lives that this region follows."""
        return self.watch.home

    @property
    def averager(self) -> Averager | None:
        """The averager, if this is its home."""
        return None if self.primary is None else self.primary.averager

    @property
    def stands_by(self) -> bool:
        """Whether this region may take over: nothing counts that it lacks."""
        shadow = self.shadow
        return shadow is not None and shadow.is_appointed and self.region in self.members

    @property
    def wakes_s(self) -> float | None:
        """When the averager here wants a `Wake`, by the host's clock; None: not at all."""
        primary = self.primary
        return None if primary is None or primary.is_waking else primary.averager.wakes_s

    @property
    def members(self) -> tuple[str, ...]:
        """Who takes part; known at the home and at the standby, empty elsewhere."""
        known = self.shadow if self.primary is None else self.primary
        return () if known is None else known.averager.view.members

    # ------------------------------------------------------------------ events

    def submit(self, update: Update) -> list[StandbyEffect]:
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
            case LogAppend() | LogTwin():
                return self._logged(peer, message)
            case LogAck():
                return self._acknowledged(peer, message)
            case AveragerLost(epoch, lost):
                self.watch.on_vote(peer, epoch, lost=lost)
                return []
            case NewAverager(epoch, last):
                return self._follow(AveragerHome(peer, epoch), last)

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
        found = self.watch.tick(now_s, connected, self.members, stands_by=self.stands_by)
        return self._watched(found) + self._seek_standby(now_s, connected, rtts_s or {})

    def on_report_dead(self, region: str, *, comes_back: bool = False) -> list[StandbyEffect]:
        """Somebody has seen that ``region`` is dead; see `LivenessWatch.on_report_dead`."""
        if comes_back and region == self.standby:  # its copy of the averager is gone
            return self._release()
        found = self.watch.on_report_dead(
            region, self.members, stands_by=self.stands_by, comes_back=comes_back
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
        return [SendMessage(self.home.region, request) for request in asked]

    def _follow(self, home: AveragerHome, last: tuple[int, int]) -> list[StandbyEffect]:
        if not self.watch.follow(home):
            return []
        # A home that was cut off is none any more.
        self.primary = self.shadow = self.standby = None
        news = StandbyEvent("follows", home.region, home.epoch)
        return [news, *self._ask(self.caller.on_moved(last))]

    # ------------------------------------------------------------------ as the standby

    def _logged(self, peer: str, message: LogAppend | LogTwin) -> list[StandbyEffect]:
        epoch, shadow = message.epoch, self.shadow
        if epoch < self.home.epoch or self.primary is not None:
            return []
        is_home = AveragerHome(peer, epoch) == self.home
        if isinstance(message, LogTwin) and is_home:
            averager = self.make()
            become_twin(averager, message.twin)
            shadow = self.shadow = ShadowAverager(averager, message.number, is_appointed=False)
            return [SendMessage(peer, LogAck(epoch, shadow.number))]
        if shadow is None or not is_home or isinstance(message, LogTwin):
            return [SendMessage(peer, LogAck(epoch, 0, follows=False))]
        return [SendMessage(peer, LogAck(epoch, shadow.on_entry(message.entry)))]

    def _take_over(self) -> list[StandbyEffect]:
        shadow = self.shadow
        if shadow is None:
            return []
        averager, epoch = shadow.averager, self.home.epoch
        averager.took_over(self.region)
        self.primary = ReplicatedAverager(
            averager, self.bound, has_standby=False, number=shadow.number
        )
        self.shadow = self.standby = None
        self._repeated.clear()
        self._greeted = set(averager.view.members)
        effects: list[StandbyEffect] = [StandbyEvent("took_over", self.region, epoch)]
        view = averager.view  # who has left may not have heard that it has
        others = [name for name in (*view.members, *view.left) if name != self.region]
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

    def _acknowledged(self, peer: str, ack: LogAck) -> list[StandbyEffect]:
        primary = self.primary
        if primary is None or ack.epoch != self.home.epoch or peer != self.standby:
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
                self.standby, now_s, self.watch.takeover_s
            )
            if not given_up:
                return []
            effects = self._release()
        view = primary.averager.view
        able = {n for n in view.members if n in connected and n not in view.joining}
        self.standby = next_standby(self.preferred, able - {self.region}, rtts_s)
        if self.standby is None:
            return effects
        copy = LogTwin(self.home.epoch, primary.number, primary.begin_twin())
        return [*effects, SendMessage(self.standby, copy)]

    def _release(self) -> list[StandbyEffect]:
        """Nobody stands by any more; what waited for that is committed."""
        self.standby = None
        return [] if self.primary is None else self._carry(self.primary.release())

    def _settle(self, reply: Reply) -> None:
        """Whose open request is answered has repeated all that the averager did not know."""
        if self.primary is not None and (reply.to, reply.seq) not in self._repeated:
            self.primary.averager.settle(reply.to)

    def _carry(self, steps: list[ReplicationStep]) -> list[StandbyEffect]:
        effects: list[StandbyEffect] = []
        epoch, standby = self.home.epoch, self.standby
        for step in steps:
            if isinstance(step, ShipEntry):
                effects += self._ship(step)
                continue
            effects.append(EntryDone(step))
            effects += self._refuse(step)
            for reply in step.outcome.replies:
                self._settle(reply)
                effects += self._answer(
                    reply.to, AveragerAnswer(epoch, reply, step.number, step.stable)
                )
        effects += self._greet()
        if standby is not None and standby == self.standby and standby not in self.members:
            effects += self._release()  # it was asked to leave
        return effects

    def _ship(self, step: ShipEntry) -> list[StandbyEffect]:
        if self.standby is None:
            return []
        epoch = self.home.epoch
        shipped = SendMessage(self.standby, LogAppend(epoch, step.entry, step.counts))
        if not isinstance(step.entry.op, Appoint):
            return [shipped]
        return [shipped, StandbyEvent("appointed", self.standby, epoch)]

    def _greet(self) -> list[StandbyEffect]:
        """Tell newcomers where the averager is, if that is not where the configuration says."""
        if self.primary is None or self.home.epoch == 1:
            return []
        averager, epoch = self.primary.averager, self.home.epoch
        joining = set(averager.view.joining)
        new = sorted(joining - self._greeted)
        self._greeted = (self._greeted & set(averager.view.members)) | joining
        return [SendMessage(name, NewAverager(epoch, averager.last(name))) for name in new]

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
                    effects.append(StandbyEvent("left", region, self.home.epoch))
                    effects += self._release() if region == self.standby else []
                    effects += self.offer(Leave(region))
        return effects


def _sender(op: TakeIn | Skip) -> str:
    return op.update.region if isinstance(op, TakeIn) else op.region


def _name(op: TakeIn | Skip) -> tuple[str, int]:
    return _sender(op), op.update.seq if isinstance(op, TakeIn) else op.seq
