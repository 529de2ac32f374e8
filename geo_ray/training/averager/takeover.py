"""When the standby takes the averager over, and when a lost region is not waited for any more.

The standby takes over when it has not been connected to the averager's home for ``takeover_s``, and
a majority of the other regions (the standby among them) say the same. That keeps a home whose link
to the standby alone is cut. The standby also takes over when the controller, which sees processes,
reports the home dead.

Two homes at a time do no harm, they only cost time: the old one cannot commit beyond its bound
without the standby, and whoever hears of a home with a higher epoch follows that one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from geo_ray.training.averager.home import AveragerHome


@dataclass(frozen=True, slots=True)
class ReportLost:
    """Tell the standby whether this region has lost the averager."""

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
        members: the regions that take part.
        home: where the averager lives, as far as this region knows.
        standby: the region that would take over; None if there is none (any more).
        takeover_s: how long the home must be lost.
        rejoin_s: how long the new home waits for the region of the old one.
    """

    region: str
    members: tuple[str, ...]
    home: AveragerHome
    standby: str | None
    takeover_s: float
    rejoin_s: float
    _known: set[str] = field(default_factory=set)
    _lost_s: dict[str, float] = field(default_factory=dict)
    _told: bool = False
    _votes: set[str] = field(default_factory=set)
    _former: str | None = None
    _dead: set[str] = field(default_factory=set)

    def tick(self, now_s: float, connected: Collection[str]) -> list[WatchEffect]:
        """Look who is connected.

        Args:
            now_s: the present.
            connected: regions to which there is a connection.
        """
        self._known |= set(connected)
        for peer in self._known:  # a region that was never there is starting, not lost
            if peer in connected:
                self._lost_s.pop(peer, None)
            else:
                self._lost_s.setdefault(peer, now_s)
        if self.region == self.home.region:
            return self._give_up(now_s)
        if self.standby is None:
            return []
        lost = self._is_lost(self.home.region, now_s, self.takeover_s)
        if self.region != self.standby:
            if lost == self._told:
                return []
            self._told = lost
            return [ReportLost(self.standby, lost)]
        self.on_vote(self.region, self.home.epoch, lost=lost)
        return self._take_over() if lost and self._has_majority() else []

    def on_vote(self, voter: str, epoch: int, *, lost: bool) -> None:
        """A region has lost the home of ``epoch``, or has found it again."""
        if epoch == self.home.epoch and voter in self.members and voter != self.home.region:
            (self._votes.add if lost else self._votes.discard)(voter)

    def on_report_dead(self, region: str, *, comes_back: bool = False) -> list[WatchEffect]:
        """Somebody has seen that ``region`` is dead.

        Args:
            region: which.
            comes_back: only its bridge is: if the averager lived there it moves, and the region is
                waited for as one that may only be cut off.
        """
        if comes_back:
            is_home = region == self.home.region
            return self._take_over() if self.region == self.standby and is_home else []
        self._dead.add(region)
        if self.region == self.home.region:
            if region == self._former:
                return self._give_up(0.0)
            return [GiveUpRegion(region)] if region in self.members else []
        is_home = region == self.home.region
        return self._take_over() if self.region == self.standby and is_home else []

    def on_left(self, region: str) -> None:
        """The run goes on without ``region``: it has no vote any more."""
        self.members = tuple(member for member in self.members if member != region)
        self._votes.discard(region)

    def follow(self, home: AveragerHome) -> bool:
        """The averager lives at ``home``; whether that is news."""
        if home.epoch <= self.home.epoch:
            return False
        self._former, self.home, self.standby = self.home.region, home, None
        self._votes.clear()
        return True

    def _take_over(self) -> list[WatchEffect]:
        self.follow(AveragerHome(self.region, self.home.epoch + 1))
        return [TakeOver(), *self._give_up(0.0)]

    def _give_up(self, now_s: float) -> list[WatchEffect]:
        former = self._former
        if former is None or former == self.region:
            return []
        if former in self._dead or self._is_lost(former, now_s, self.rejoin_s):
            self._former = None
            return [GiveUpRegion(former)]
        return []

    def _has_majority(self) -> bool:
        return len(self._votes) >= (len(self.members) - 1) // 2 + 1

    def _is_lost(self, peer: str, now_s: float, for_s: float) -> bool:
        since_s = self._lost_s.get(peer)
        return since_s is not None and now_s - since_s >= for_s
