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
from geo_ray.sync.base import Reply, Update
from geo_ray.training.averager import Averager
from geo_ray.training.caller import Caller
from geo_ray.training.hub_log import Abandon, Entry, Leave, Op, Skip, TakeIn
from geo_ray.training.replication import Committed, Primary, Shadow, Ship
from geo_ray.training.takeover import GiveUp, TakeOver, TellLost, Watch, WatchEffect

# ------------------------------------------------------------------ what bridges tell each other


@dataclass(frozen=True, slots=True)
class Ask:
    """To the hub: do this.

    Attributes:
        op: what.
        again: an earlier hub had done and answered it: it must not be given up now.
    """

    op: TakeIn | Skip
    again: bool = False


@dataclass(frozen=True, slots=True)
class Tell:
    """From the hub of ``epoch``: an answer, its number in the log, and how far the standby is."""

    epoch: int
    reply: Reply
    number: int
    stable: int


@dataclass(frozen=True, slots=True)
class Deny:
    """From the hub of ``epoch``: update ``seq`` is refused."""

    epoch: int
    seq: int
    error: GeoRayError


@dataclass(frozen=True, slots=True)
class Log:
    """To the standby: the next entry."""

    epoch: int
    entry: Entry


@dataclass(frozen=True, slots=True)
class Ack:
    """To the hub: everything up to ``number`` is here."""

    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class Lost:
    """To the standby: whether the hub of ``epoch`` is lost."""

    epoch: int
    lost: bool


@dataclass(frozen=True, slots=True)
class NewHub:
    """From the new hub; with the newest update of the receiver that it knows."""

    epoch: int
    last: tuple[int, int]


Word = Ask | Tell | Deny | Log | Ack | Lost | NewHub

# ------------------------------------------------------------------ what the shell has to do


@dataclass(frozen=True, slots=True)
class Say:
    """Send a word to another region."""

    to: str
    word: Word


@dataclass(frozen=True, slots=True)
class Give:
    """The answer to the own region's open request."""

    reply: Reply


@dataclass(frozen=True, slots=True)
class Refuse:
    """The own region's request is refused."""

    seq: int
    error: GeoRayError


@dataclass(frozen=True, slots=True)
class Done:
    """As hub: an entry was carried out."""

    committed: Committed


@dataclass(frozen=True, slots=True)
class Happened:
    """Worth an event: this region has become the hub, follows one, or goes on without a region."""

    what: Literal["took_over", "follows", "left"]
    region: str
    epoch: int


StandbyEffect = Say | Give | Refuse | Done | Happened


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
    primary: Primary | None = None
    shadow: Shadow | None = None

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
            case Ask(op, _):
                return self.offer(op) if _sender(op) == peer else []
            case Tell(epoch, reply, number, stable):
                return self._told(peer, epoch, reply, number, stable)
            case Deny(epoch, seq, error):
                return self._denied(peer, epoch, seq, error)
            case Log(epoch, entry):
                return self._logged(peer, epoch, entry)
            case Ack(epoch, number):
                if self.primary is None or epoch != self.caller.epoch:
                    return []
                return self._carry(self.primary.on_ack(number))
            case Lost(epoch, lost):
                self.watch.on_vote(peer, epoch, lost=lost)
                return []
            case NewHub(epoch, last):
                return self._follow(peer, epoch, last)

    def tick(self, now_s: float, connected: Collection[str]) -> list[StandbyEffect]:
        """Time has passed; ``connected`` are the regions to which there is a connection."""
        return self._watched(self.watch.tick(now_s, connected))

    def on_witness(self, region: str) -> list[StandbyEffect]:
        """Somebody has seen that ``region`` is dead and will not come back."""
        return self._watched(self.watch.on_witness(region))

    def on_standby_back(self) -> list[StandbyEffect]:
        """As hub: what was sent to the standby may be lost; send it again."""
        if self.primary is None or self.watch.standby is None:
            return []
        entries = self.primary.unacknowledged()
        return [Say(self.watch.standby, Log(self.caller.epoch, entry)) for entry in entries]

    # ------------------------------------------------------------------ as a region

    def _ask(self, ops: list[TakeIn | Skip]) -> list[StandbyEffect]:
        if self.primary is not None:
            return [effect for op in ops for effect in self.offer(op)]
        open_update = self.caller.open
        return [
            Say(self.hub, Ask(op, not (isinstance(op, TakeIn) and op.update is open_update)))
            for op in ops
        ]

    def _told(
        self, peer: str, epoch: int, reply: Reply, number: int, stable: int
    ) -> list[StandbyEffect]:
        if peer != self.hub:
            return []
        given = self.caller.on_reply(epoch, reply, number, stable)
        return [] if given is None else [Give(given)]

    def _denied(self, peer: str, epoch: int, seq: int, error: GeoRayError) -> list[StandbyEffect]:
        if peer != self.hub or not self.caller.refused(epoch, seq):
            return []
        return [Refuse(seq, error)]

    def _follow(self, hub: str, epoch: int, last: tuple[int, int]) -> list[StandbyEffect]:
        if not self.watch.follow(hub, epoch):
            return []
        self.primary = self.shadow = None  # a hub that was cut off is none any more
        news = Happened("follows", hub, epoch)
        return [news, *self._ask(self.caller.follow(hub, epoch, last))]

    # ------------------------------------------------------------------ as the standby

    def _logged(self, peer: str, epoch: int, entry: Entry) -> list[StandbyEffect]:
        if self.shadow is None or peer != self.hub or epoch != self.caller.epoch:
            return []
        return [Say(peer, Ack(epoch, self.shadow.on_entry(entry)))]

    def _take_over(self, epoch: int) -> list[StandbyEffect]:
        if self.shadow is None:
            return []
        averager = self.shadow.averager
        self.primary, self.shadow = Primary(averager, has_standby=False), None
        effects: list[StandbyEffect] = [Happened("took_over", self.region, epoch)]
        others = [member for member in self.watch.members if member != self.region]
        effects += [Say(other, NewHub(epoch, averager.last(other))) for other in others]
        asked = self.caller.follow(self.region, epoch, averager.last(self.region))
        return effects + self.offer(Abandon()) + self._ask(asked)

    # ------------------------------------------------------------------ as the hub

    def _carry(self, steps: list[Ship | Committed]) -> list[StandbyEffect]:
        effects: list[StandbyEffect] = []
        epoch, standby = self.caller.epoch, self.watch.standby
        for step in steps:
            if isinstance(step, Ship):
                effects += [] if standby is None else [Say(standby, Log(epoch, step.entry))]
                continue
            effects.append(Done(step))
            effects += self._deny(step)
            for reply in step.outcome.replies:
                effects += self._tell(reply.to, Tell(epoch, reply, step.number, step.stable))
        return effects

    def _deny(self, step: Committed) -> list[StandbyEffect]:
        error = step.outcome.error
        if error is None or not isinstance(step.op, TakeIn):
            return []
        update = step.op.update
        return self._tell(update.region, Deny(self.caller.epoch, update.seq, error))

    def _tell(self, to: str, word: Tell | Deny) -> list[StandbyEffect]:
        return self.on_word(self.region, word) if to == self.region else [Say(to, word)]

    # ------------------------------------------------------------------ over time

    def _watched(self, found: list[WatchEffect]) -> list[StandbyEffect]:
        effects: list[StandbyEffect] = []
        for effect in found:
            match effect:
                case TellLost(to, lost):
                    effects.append(Say(to, Lost(self.caller.epoch, lost)))
                case TakeOver(epoch):
                    effects += self._take_over(epoch)
                case GiveUp(region):
                    effects.append(Happened("left", region, self.caller.epoch))
                    effects += self.offer(Leave(region))
        return effects


def _sender(op: TakeIn | Skip) -> str:
    return op.update.region if isinstance(op, TakeIn) else op.region
