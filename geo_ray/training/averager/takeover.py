"""When the standby takes the averager over, and when a lost region is not waited for any more.

The standby takes over when it has not been connected to the averager's home for ``takeover_s``, and
a majority of the other regions (the standby among them) say the same. That keeps a home whose link
to the standby alone is cut. The standby also takes over when the controller, which sees processes,
reports the home dead. Who the standby is, and who takes part, is known at the home and there; other
regions tell everybody what they see.

Two homes at a time do no harm, they only cost time: the old one cannot commit beyond its bound
without the standby, and whoever hears of a home with a higher epoch follows that one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from geo_ray.training.averager.home import AveragerHome


@dataclass(frozen=True, slots=True)
class ReportLost:
    """Tell another region whether this one has lost the averager."""

    to: str
    lost: bool


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Host the averager; `LivenessWatch.home` is this region already."""


@dataclass(frozen=True, slots=True)
class GiveUpRegion:
    """Go on without ``region``."""

    region: str


WatchEffect = ReportLost | TakeOver | GiveUpRegion


@dataclass(slots=True)
class LivenessWatch:
    """One region's watch over the averager's home; see the module's docstring.

    Attributes:
        region: whose watch.
        home: where the averager lives, as far as this region knows.
        takeover_s: how long the home must be lost.
        rejoin_s: how long a new home waits for the region of one before.
    """

    region: str
    home: AveragerHome
    takeover_s: float
    rejoin_s: float
    _known: set[str] = field(default_factory=set)
    _lost_s: dict[str, float] = field(default_factory=dict)
    _told: dict[str, bool] = field(default_factory=dict)
    _votes: set[str] = field(default_factory=set)
    _former: set[str] = field(default_factory=set)
    _dead: set[str] = field(default_factory=set)

    def tick(
        self, now_s: float, connected: Collection[str], members: Collection[str], *, stands_by: bool
    ) -> list[WatchEffect]:
        """Look who is connected.

        Args:
            now_s: the present.
            connected: regions to which there is a connection.
            members: who takes part; not asked for elsewhere than at the home and the standby.
            stands_by: whether this is the standby.
        """
        self._known |= set(connected)
        self._dead -= set(connected)
        for peer in self._known:  # a region that was never there is starting, not lost
            if peer in connected:
                self._lost_s.pop(peer, None)
            else:
                self._lost_s.setdefault(peer, now_s)
        if self.region == self.home.region:
            return self._give_up(now_s, members)
        lost = self.is_lost(self.home.region, now_s, self.takeover_s)
        self.on_vote(self.region, self.home.epoch, lost=lost)
        if stands_by and lost and self._has_majority(members):
            return self._take_over(members)
        return self._report(lost=lost)

    def on_vote(self, voter: str, epoch: int, *, lost: bool) -> None:
        """A region has lost the home of ``epoch``, or has found it again."""
        if epoch == self.home.epoch and voter != self.home.region:
            (self._votes.add if lost else self._votes.discard)(voter)

    def on_report_dead(
        self,
        region: str,
        members: Collection[str],
        *,
        stands_by: bool,
        comes_back: bool = False,
    ) -> list[WatchEffect]:
        """Somebody has seen that ``region`` is dead.

        Args:
            region: which.
            members: who takes part, as for `tick`.
            stands_by: whether this is the standby.
            comes_back: only its bridge is: if the averager lived there it moves, and the region is
                waited for as one that may only be cut off.
        """
        if comes_back:
            is_home = region == self.home.region
            return self._take_over(members) if stands_by and is_home else []
        self._dead.add(region)
        if self.region == self.home.region:
            self._former.discard(region)
            return [GiveUpRegion(region)] if region in members else []
        is_home = region == self.home.region
        return self._take_over(members) if stands_by and is_home else []

    def follow(self, home: AveragerHome) -> bool:
        """The averager lives at ``home``; whether that is news."""
        if home.epoch <= self.home.epoch:
            return False
        self._former = (self._former | {self.home.region}) - {home.region}
        self.home = home
        self._votes.clear()
        self._told.clear()
        return True

    def is_lost(self, peer: str, now_s: float, for_s: float) -> bool:
        """Whether there has been no connection to ``peer`` for so long; there was one before."""
        since_s = self._lost_s.get(peer)
        return since_s is not None and now_s - since_s >= for_s

    def _report(self, *, lost: bool) -> list[WatchEffect]:
        """Tell everybody whom that is news for; nobody who was not told takes it for lost."""
        others = [name for name in sorted(self._known) if name != self.home.region]
        news = [name for name in others if self._told.get(name, False) != lost]
        self._told |= dict.fromkeys(news, lost)
        return [ReportLost(name, lost) for name in news]

    def _take_over(self, members: Collection[str]) -> list[WatchEffect]:
        self.follow(AveragerHome(self.region, self.home.epoch + 1))
        return [TakeOver(), *self._give_up(0.0, members)]

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
