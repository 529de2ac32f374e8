"""One bridge's part in an averager that may move: hub, standby, or neither. Pure.

    region --Ask--> hub --Log--> standby        the standby carries out the same log
           <--Tell--    <--Ack--
    region --Lost--> standby                    a majority has lost the hub:
           <--NewHub--                          the standby is the hub of a higher epoch

Every answer carries its hub's epoch, and who follows a higher one listens to no lower one: that
fences off a hub that was only cut off. When it hears of the new epoch it becomes an ordinary
region, and asks the new hub what it had asked itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from geo_ray.errors import GeoRayError
from geo_ray.strategies.base import Reply, Update
from geo_ray.training.averager.averager import Averager
from geo_ray.training.averager.caller import Caller
from geo_ray.training.averager.log import Abandon, Leave, LogEntry, Op, Skip, TakeIn
from geo_ray.training.averager.replication import (
    EntryCommitted,
    ReplicatedAverager,
    ShadowAverager,
    ShipEntry,
)
from geo_ray.training.averager.takeover import (
    GiveUpRegion,
    ReportLost,
    TakeOver,
    Watch,
    WatchEffect,
)

# ------------------------------------------------------------------ what bridges tell each other


@dataclass(frozen=True, slots=True)
class AveragerRequest:
    """To the hub: do this.

    Attributes:
        op: what.
        again: an earlier hub had done and answered it: it must not be given up now.
    """

    op: TakeIn | Skip
    again: bool = False


@dataclass(frozen=True, slots=True)
class AveragerAnswer:
    """From the hub of ``epoch``: an answer, its number in the log, and how far the standby is."""

    epoch: int
    reply: Reply
    number: int
    stable: int


@dataclass(frozen=True, slots=True)
class AveragerRefusal:
    """From the hub of ``epoch``: update ``seq`` is refused."""

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
    """To the hub: everything up to ``number`` is here."""

    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class AveragerLost:
    """To the standby: whether the hub of ``epoch`` is lost."""

    epoch: int
    lost: bool


@dataclass(frozen=True, slots=True)
class NewAverager:
    """From the new hub; with the newest update of the receiver that it knows."""

    epoch: int
    last: tuple[int, int]


Word = (
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
    """Send a word to another region."""

    to: str
    word: Word


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
    """As hub: an entry was carried out."""

    committed: EntryCommitted


@dataclass(frozen=True, slots=True)
class StandbyEvent:
    """Worth an event: this region has become the hub, follows one, or goes on without a region."""

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
        watch: over the hub.
        primary: the averager, if this is the hub.
        shadow: its copy, if this is the standby.
    """

    region: str
    caller: Caller
    watch: Watch
    primary: ReplicatedAverager | None = None
    shadow: ShadowAverager | None = None

    @property
    def hub(self) -> str:
        """The region whose averager this one follows."""
        return self.caller.hub

    @property
    def averager(self) -> Averager | None:
        """The averager, if this is the hub."""
        return None if self.primary is None else self.primary.averager

    # ------------------------------------------------------------------ events

    def submit(self, update: Update) -> list[StandbyEffect]:
        """The own region has a request."""
        return self._ask([self.caller.submit(update)])

    def offer(self, op: Op) -> list[StandbyEffect]:
        """As hub: carry ``op`` out, once the standby is near enough."""
        return [] if self.primary is None else self._carry(self.primary.offer(op))

    def on_word(self, peer: str, word: Word) -> list[StandbyEffect]:
        """Another region has said something; what does not fit its role is passed over."""
        match word:
            case AveragerRequest(op, _):
                return self.offer(op) if _sender(op) == peer else []
            case AveragerAnswer(epoch, reply, number, stable):
                return self._told(peer, epoch, reply, number, stable)
            case AveragerRefusal(epoch, seq, error):
                return self._denied(peer, epoch, seq, error)
            case LogAppend(epoch, entry):
                return self._logged(peer, epoch, entry)
            case LogAck(epoch, number):
                if self.primary is None or epoch != self.caller.epoch:
                    return []
                return self._carry(self.primary.on_ack(number))
            case AveragerLost(epoch, lost):
                self.watch.on_vote(peer, epoch, lost=lost)
                return []
            case NewAverager(epoch, last):
                return self._follow(peer, epoch, last)

    def tick(self, now_s: float, connected: Collection[str]) -> list[StandbyEffect]:
        """Time has passed; ``connected`` are the regions to which there is a connection."""
        return self._watched(self.watch.tick(now_s, connected))

    def on_report_dead(self, region: str) -> list[StandbyEffect]:
        """Somebody has seen that ``region`` is dead and will not come back."""
        return self._watched(self.watch.on_report_dead(region))

    def on_standby_back(self) -> list[StandbyEffect]:
        """As hub: what was sent to the standby may be lost; send it again."""
        if self.primary is None or self.watch.standby is None:
            return []
        entries = self.primary.unacknowledged()
        return [
            SendMessage(self.watch.standby, LogAppend(self.caller.epoch, entry))
            for entry in entries
        ]

    # ------------------------------------------------------------------ as a region

    def _ask(self, ops: list[TakeIn | Skip]) -> list[StandbyEffect]:
        if self.primary is not None:
            return [effect for op in ops for effect in self.offer(op)]
        open_update = self.caller.open
        return [
            SendMessage(
                self.hub,
                AveragerRequest(op, not (isinstance(op, TakeIn) and op.update is open_update)),
            )
            for op in ops
        ]

    def _told(
        self, peer: str, epoch: int, reply: Reply, number: int, stable: int
    ) -> list[StandbyEffect]:
        if peer != self.hub:
            return []
        given = self.caller.on_reply(epoch, reply, number, stable)
        return [] if given is None else [AnswerOwn(given)]

    def _denied(self, peer: str, epoch: int, seq: int, error: GeoRayError) -> list[StandbyEffect]:
        if peer != self.hub or not self.caller.refused(epoch, seq):
            return []
        return [RefuseOwn(seq, error)]

    def _follow(self, hub: str, epoch: int, last: tuple[int, int]) -> list[StandbyEffect]:
        if not self.watch.follow(hub, epoch):
            return []
        self.primary = self.shadow = None  # a hub that was cut off is none any more
        news = StandbyEvent("follows", hub, epoch)
        return [news, *self._ask(self.caller.follow(hub, epoch, last))]

    # ------------------------------------------------------------------ as the standby

    def _logged(self, peer: str, epoch: int, entry: LogEntry) -> list[StandbyEffect]:
        if self.shadow is None or peer != self.hub or epoch != self.caller.epoch:
            return []
        return [SendMessage(peer, LogAck(epoch, self.shadow.on_entry(entry)))]

    def _take_over(self, epoch: int) -> list[StandbyEffect]:
        if self.shadow is None:
            return []
        averager = self.shadow.averager
        self.primary, self.shadow = ReplicatedAverager(averager, has_standby=False), None
        effects: list[StandbyEffect] = [StandbyEvent("took_over", self.region, epoch)]
        others = [member for member in self.watch.members if member != self.region]
        effects += [
            SendMessage(other, NewAverager(epoch, averager.last(other))) for other in others
        ]
        asked = self.caller.follow(self.region, epoch, averager.last(self.region))
        return effects + self.offer(Abandon()) + self._ask(asked)

    # ------------------------------------------------------------------ as the hub

    def _carry(self, steps: list[ShipEntry | EntryCommitted]) -> list[StandbyEffect]:
        effects: list[StandbyEffect] = []
        epoch, standby = self.caller.epoch, self.watch.standby
        for step in steps:
            if isinstance(step, ShipEntry):
                effects += (
                    [] if standby is None else [SendMessage(standby, LogAppend(epoch, step.entry))]
                )
                continue
            effects.append(EntryDone(step))
            effects += self._deny(step)
            for reply in step.outcome.replies:
                effects += self._tell(
                    reply.to, AveragerAnswer(epoch, reply, step.number, step.stable)
                )
        return effects

    def _deny(self, step: EntryCommitted) -> list[StandbyEffect]:
        error = step.outcome.error
        if error is None or not isinstance(step.op, TakeIn):
            return []
        update = step.op.update
        return self._tell(update.region, AveragerRefusal(self.caller.epoch, update.seq, error))

    def _tell(self, to: str, word: AveragerAnswer | AveragerRefusal) -> list[StandbyEffect]:
        return self.on_word(self.region, word) if to == self.region else [SendMessage(to, word)]

    # ------------------------------------------------------------------ over time

    def _watched(self, found: list[WatchEffect]) -> list[StandbyEffect]:
        effects: list[StandbyEffect] = []
        for effect in found:
            match effect:
                case ReportLost(to, lost):
                    effects.append(SendMessage(to, AveragerLost(self.caller.epoch, lost)))
                case TakeOver(epoch):
                    effects += self._take_over(epoch)
                case GiveUpRegion(region):
                    effects.append(StandbyEvent("left", region, self.caller.epoch))
                    effects += self.offer(Leave(region))
        return effects


def _sender(op: TakeIn | Skip) -> str:
    return op.update.region if isinstance(op, TakeIn) else op.region
