"""Who sends to the averager next. Pure: whoever drives it has the clock and the network.

A region asks before it ships an update. What may come in is granted up to what the averager's
region can receive (`Rates`), so that a transfer gets the bottleneck to itself and is short, instead
of all being long together. Next is the one that would be through first; whoever was overtaken often
enough goes before.

With a bound on staleness everything that the averager commits passes through here, also what its
own region does and what was sent without asking: nothing is granted or taken that would make
another one too stale, and what cannot be in time is dropped, if possible before it is sent.

A grant has a deadline. A sender that has died, or is very slow, is left out of the reckoning from
then on; if its update comes after all, it is treated as one that did not ask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from geo_ray.transfers.bound import is_in_time, too_late
from geo_ray.transfers.config import TransfersConfig
from geo_ray.transfers.rates import Rates
from geo_ray.transfers.requests import Decision, Drop, Grant, Take, UploadRequest

Key = tuple[str, bool]
_MOMENT_S: Final = 1e-6


@dataclass(slots=True)
class _Waiting:
    ask: UploadRequest
    number: int  # order of asking
    here: bool = False  # its bytes have arrived
    ready: bool = True  # it could be sent; a sum only when its helper has all parts
    overtaken: int = 0


@dataclass(slots=True)
class _Flying:
    ask: UploadRequest
    end_s: float  # when it should be through
    deadline_s: float  # until when it counts


@dataclass(slots=True)
class TransferScheduler:
    """See the module's docstring.

    Attributes:
        config: how to decide.
        rates: what paths and averager carry.
    """

    config: TransfersConfig
    rates: Rates = field(init=False)
    _waiting: dict[Key, _Waiting] = field(default_factory=dict)
    _flying: dict[Key, _Flying] = field(default_factory=dict)
    _numbers: count[int] = field(default_factory=count)
    _served_s: float = 0.0

    def __post_init__(self) -> None:
        self.rates = Rates(self.config.hub_mbps)

    # ------------------------------------------------------------------ events

    def ask(self, now_s: float, version: int, ask: UploadRequest) -> list[Decision]:
        """Somebody wants to send. Asking again changes nothing; a granted one is granted again."""
        flying = self._flying.get(ask.key)
        if flying is not None and flying.ask == ask:
            return [Grant(ask)]
        self._forget_older(ask)
        self._waiting.setdefault(ask.key, _Waiting(ask, next(self._numbers))).ready = True
        return self._serve(now_s, version)

    def began(self, now_s: float, ask: UploadRequest) -> None:
        """Somebody sends without having been granted anything."""
        self._forget_older(ask)
        if ask.key not in self._flying:
            self._fly(now_s, ask)

    def arrived(self, now_s: float, version: int, ask: UploadRequest) -> list[Decision]:
        """An update is here, announced or not; its `Take` or `Drop` comes now or later."""
        self._forget_older(ask)
        if self._flying.pop(ask.key, None) is not None:
            self.rates.arrived(now_s, ask.key)
        self._waiting.setdefault(ask.key, _Waiting(ask, next(self._numbers))).here = True
        return self._serve(now_s, version)

    def tick(self, now_s: float, version: int) -> list[Decision]:
        """Time has passed, or the averager has committed something."""
        for key in [k for k, f in self._flying.items() if f.deadline_s <= now_s]:
            del self._flying[key]
            self.rates.gone(now_s, key)
        return self._serve(now_s, version)

    def next_deadline_s(self) -> float | None:
        """When `tick` should be called at the latest; None if nothing is to be done by itself.

        That is when a grant lapses, or so long before a transfer's end that the next sender hears
        of its own grant when the line becomes free.
        """
        times_s = [f.deadline_s for f in self._flying.values()]
        if self._waiting and self._flying:
            lead_s = max(self.rates.latency_s.values(), default=0.0)
            soon_s = [f.end_s - lead_s for f in self._flying.values() if f.end_s < math.inf]
            times_s += [at_s for at_s in soon_s if at_s > self._served_s]
        return min(times_s, default=None)

    def forget(self, key: Key) -> None:
        """It is not waited for any more."""
        self._waiting.pop(key, None)

    def hold(self, total: UploadRequest) -> None:
        """A sum will come in the place of its parts, which wait here; asking makes it ready."""
        numbers = [self._waiting.pop(part.key).number for part in total.parts]
        self._waiting[total.key] = _Waiting(total, min(numbers), ready=False)

    def release(self, key: Key, asks: Sequence[UploadRequest]) -> None:
        """A sum will not come, or not with all its parts: ``asks`` wait by themselves again."""
        held = self._waiting.pop(key, None)
        number = next(self._numbers) if held is None else held.number
        for ask in asks:
            self._waiting.setdefault(ask.key, _Waiting(ask, number))

    # ------------------------------------------------------------------ what is known

    @property
    def is_quiet(self) -> bool:
        """Whether a sender would have the averager to itself."""
        return not self._flying and not self._waiting

    @property
    def is_receiving(self) -> bool:
        """Whether anything is on its way."""
        return bool(self._flying)

    def waiting(self) -> list[UploadRequest]:
        """What waits for a grant, in the order in which it would go."""
        return [w.ask for w in self._line() if w.ready and not w.here]

    def busy_s(self, now_s: float) -> float:
        """How long what is on its way still takes, if paths carry what they did before."""
        ends_s = [f.end_s for f in self._flying.values() if f.end_s < math.inf]
        return max(0.0, max(ends_s, default=0.0) - now_s)

    # ------------------------------------------------------------------ inside

    def _forget_older(self, ask: UploadRequest) -> None:
        """A sender has one update open; what it asked for before is gone."""
        waiting, flying = self._waiting.get(ask.key), self._flying.get(ask.key)
        if waiting is not None and waiting.ask != ask:
            del self._waiting[ask.key]
        if flying is not None and flying.ask != ask:
            del self._flying[ask.key]

    def _fly(self, now_s: float, ask: UploadRequest) -> None:
        rates = self.rates
        duration_s = rates.duration_s(ask.region, ask.size_bytes)
        end_s = now_s + rates.latency_s.get(ask.region, 0.0) + duration_s
        grant_s = now_s + max(self.config.grant_s, 2 * (end_s - now_s))
        self._flying[ask.key] = _Flying(ask, end_s if duration_s else math.inf, grant_s)
        rates.started(now_s, ask.key, ask.region, ask.size_bytes)

    def _has_room(self, now_s: float, ask: UploadRequest) -> bool:
        """Whether a grant that leaves now finds a free line, or is worth it if it does not."""
        rates = self.rates
        # What is nearly through will be so when the grant has arrived.
        arrives_s = now_s + rates.latency_s.get(ask.region, 0.0)
        flying = [f for f in self._flying.values() if f.end_s > arrives_s + _MOMENT_S]
        if rates.has_room(ask.region, [f.ask.region for f in flying]):
            return True
        if self.config.order == "fifo" or rates.limit_mbps is None:
            return False
        # A short one among long ones: it wins more than all of those lose by it together.
        duration_s = rates.duration_s(ask.region, ask.size_bytes)
        left_s = min((f.end_s for f in flying), default=math.inf) - arrives_s
        return 0 < duration_s * (1 + len(flying)) < left_s < math.inf

    def _serve(self, now_s: float, version: int) -> list[Decision]:
        self._served_s = now_s
        decisions: list[Decision] = []
        taken = 0  # commits that the caller will have made once it reads on
        while True:
            for ask in too_late(self._rooms(version + taken), self._loss):
                del self._waiting[ask.key]
                decisions.append(Drop(ask))
            chosen = self._next(now_s, version + taken)
            if chosen is None:
                return decisions
            del self._waiting[chosen.ask.key]
            if chosen.here:
                decisions.append(Take(chosen.ask))
                taken += chosen.ask.commits
                continue
            for other in self._waiting.values():
                other.overtaken += other.number < chosen.number
            decisions.append(Grant(chosen.ask))
            self._fly(now_s, chosen.ask)

    def _next(self, now_s: float, version: int) -> _Waiting | None:
        blocked = False
        for waiting in self._line():
            if not waiting.here and (blocked or not waiting.ready):
                continue
            if not self._is_fair(waiting.ask, version):
                continue
            if waiting.here or self._has_room(now_s, waiting.ask):
                return waiting
            blocked = self._is_overdue(waiting)  # then nobody else takes what it waits for
        return None

    def _line(self) -> list[_Waiting]:
        return sorted(self._waiting.values(), key=self._place)

    def _place(self, waiting: _Waiting) -> tuple[bool, bool, float, int]:
        """What comes first is next: what is here, who was overtaken too often, who is short."""
        overdue = self._is_overdue(waiting)
        ask = waiting.ask
        as_asked = overdue or waiting.here or self.config.order == "fifo"
        duration_s = 0.0 if as_asked else self.rates.duration_s(ask.region, ask.size_bytes)
        return not waiting.here, not overdue, duration_s, waiting.number

    def _is_overdue(self, waiting: _Waiting) -> bool:
        return waiting.overtaken >= self.config.max_overtaken

    def _loss(self, ask: UploadRequest) -> float:
        """What is lost if it is dropped: nearly nothing, or a transfer that was made already."""
        waiting = self._waiting[ask.key]
        return math.inf if waiting.here or ask.parts else ask.norm

    def _is_fair(self, ask: UploadRequest, version: int) -> bool:
        """Whether everybody else can still be in time if ``ask`` goes now."""
        rest = [r for r in self._rooms(version) if r[1].key != ask.key]
        if not is_in_time(rest, ask.commits):
            return False
        in_flight = sum(f.ask.commits for f in self._flying.values())
        return all(
            f.ask.room(version, in_flight - f.ask.commits + ask.commits, self.config.max_staleness)
            >= 0
            for f in self._flying.values()
        )

    def _rooms(self, version: int) -> list[tuple[float, UploadRequest]]:
        in_flight = sum(f.ask.commits for f in self._flying.values())
        bound = self.config.max_staleness
        return [(w.ask.room(version, in_flight, bound), w.ask) for w in self._waiting.values()]
