"""Decides who sends to the averager next. Pure: its caller has the clock and the network.

A region asks before it sends an update. Updates are granted up to the rate at which the averager's
region can receive (`Rates`), so that each transfer gets the bottleneck to itself and is short. The
next grant goes to the update that would arrive first, unless another was overtaken too often.

With a bound on staleness, everything that the averager commits passes through the scheduler, also
updates of its own region and those sent without asking. No update is granted or taken that would
make another one too stale, and updates that cannot be in time are dropped, if possible before they
are sent.

A grant has a deadline. After it, a sender that has died or is very slow no longer counts; if its
update comes after all, it is treated like one sent without asking.
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
    number: int  # number of the request
    here: bool = False  # its bytes have arrived
    ready: bool = True  # whether it can be sent; a sum only when its helper has all parts
    overtaken: int = 0


@dataclass(slots=True)
class _Upload:
    ask: UploadRequest
    end_s: float  # when its transfer should end
    deadline_s: float  # time after which it no longer counts


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
    _uploads: dict[Key, _Upload] = field(default_factory=dict)
    _numbers: count[int] = field(default_factory=count)
    _served_s: float = 0.0

    def __post_init__(self) -> None:
        self.rates = Rates(self.config.hub_mbps)

    # ------------------------------------------------------------------ events

    def ask(self, now_s: float, version: int, ask: UploadRequest) -> list[Decision]:
        """Take in a request. Asking again changes nothing; a granted request is granted again."""
        upload = self._uploads.get(ask.key)
        if upload is not None and upload.ask == ask:
            return [Grant(ask)]
        self._forget_older(ask)
        self._waiting.setdefault(ask.key, _Waiting(ask, next(self._numbers))).ready = True
        return self._serve(now_s, version)

    def began(self, now_s: float, ask: UploadRequest) -> None:
        """Note an update that is sent without a grant."""
        self._forget_older(ask)
        if ask.key not in self._uploads:
            self._start_upload(now_s, ask)

    def arrived(self, now_s: float, version: int, ask: UploadRequest) -> list[Decision]:
        """Note an update's arrival, announced or not; its `Take` or `Drop` comes now or later."""
        self._forget_older(ask)
        if self._uploads.pop(ask.key, None) is not None:
            self.rates.arrived(now_s, ask.key)
        self._waiting.setdefault(ask.key, _Waiting(ask, next(self._numbers))).here = True
        return self._serve(now_s, version)

    def tick(self, now_s: float, version: int) -> list[Decision]:
        """Decide again, because time has passed or the averager has committed something."""
        for key in [k for k, f in self._uploads.items() if f.deadline_s <= now_s]:
            del self._uploads[key]
            self.rates.gone(now_s, key)
        return self._serve(now_s, version)

    def next_deadline_s(self) -> float | None:
        """Return when `tick` should be called at the latest; None if there is no need.

        That is when a grant lapses, or so long before a transfer's end that the next sender
        receives its grant when the line becomes free.
        """
        times_s = [f.deadline_s for f in self._uploads.values()]
        if self._waiting and self._uploads:
            lead_s = max(self.rates.latency_s.values(), default=0.0)
            soon_s = [f.end_s - lead_s for f in self._uploads.values() if f.end_s < math.inf]
            times_s += [at_s for at_s in soon_s if at_s > self._served_s]
        return min(times_s, default=None)

    def forget(self, key: Key) -> None:
        """Stop waiting for an update."""
        self._waiting.pop(key, None)

    def hold(self, total: UploadRequest) -> None:
        """Let a sum take the place of its waiting parts; its request makes it ready."""
        numbers = [self._waiting.pop(part.key).number for part in total.parts]
        self._waiting[total.key] = _Waiting(total, min(numbers), ready=False)

    def release(self, key: Key, asks: Sequence[UploadRequest]) -> None:
        """Let ``asks``, parts of a sum that will not come with them, wait by themselves again."""
        held = self._waiting.pop(key, None)
        number = next(self._numbers) if held is None else held.number
        for ask in asks:
            self._waiting.setdefault(ask.key, _Waiting(ask, number))

    # ------------------------------------------------------------------ state

    @property
    def is_quiet(self) -> bool:
        """Whether a sender would have the averager to itself."""
        return not self._uploads and not self._waiting

    @property
    def is_receiving(self) -> bool:
        """Return whether any update is on its way."""
        return bool(self._uploads)

    def waiting(self) -> list[UploadRequest]:
        """Return the requests that wait for a grant, in the order in which they would go."""
        return [w.ask for w in self._line() if w.ready and not w.here]

    def busy_s(self, now_s: float) -> float:
        """Return how long the updates on their way still take, at the known rates."""
        ends_s = [f.end_s for f in self._uploads.values() if f.end_s < math.inf]
        return max(0.0, max(ends_s, default=0.0) - now_s)

    # ------------------------------------------------------------------ inside

    def _forget_older(self, ask: UploadRequest) -> None:
        """Forget earlier requests of a sender, which has one update open at a time."""
        waiting, upload = self._waiting.get(ask.key), self._uploads.get(ask.key)
        if waiting is not None and waiting.ask != ask:
            del self._waiting[ask.key]
        if upload is not None and upload.ask != ask:
            del self._uploads[ask.key]

    def _start_upload(self, now_s: float, ask: UploadRequest) -> None:
        rates = self.rates
        duration_s = rates.duration_s(ask.region, ask.size_bytes)
        end_s = now_s + rates.latency_s.get(ask.region, 0.0) + duration_s
        grant_s = now_s + max(self.config.grant_s, 2 * (end_s - now_s))
        self._uploads[ask.key] = _Upload(ask, end_s if duration_s else math.inf, grant_s)
        rates.started(now_s, ask.key, ask.region, ask.size_bytes)

    def _has_room(self, now_s: float, ask: UploadRequest) -> bool:
        """Return whether a grant sent now finds a free line, or pays although it does not."""
        rates = self.rates
        # Transfers that are nearly done will have ended when the grant arrives.
        arrives_s = now_s + rates.latency_s.get(ask.region, 0.0)
        others = [f for f in self._uploads.values() if f.end_s > arrives_s + _MOMENT_S]
        if rates.has_room(ask.region, [f.ask.region for f in others]):
            return True
        if self.config.order == "fifo" or rates.limit_mbps is None:
            return False
        # A short update among long ones gains more time than all of those lose together.
        duration_s = rates.duration_s(ask.region, ask.size_bytes)
        left_s = min((f.end_s for f in others), default=math.inf) - arrives_s
        return 0 < duration_s * (1 + len(others)) < left_s < math.inf

    def _serve(self, now_s: float, version: int) -> list[Decision]:
        self._served_s = now_s
        decisions: list[Decision] = []
        taken = 0  # commits that the caller makes while carrying out these decisions
        while True:
            for ask in too_late(self._slacks(version + taken), self._loss):
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
            self._start_upload(now_s, chosen.ask)

    def _next(self, now_s: float, version: int) -> _Waiting | None:
        blocked = False
        for waiting in self._line():
            if not waiting.here and (blocked or not waiting.ready):
                continue
            if not self._is_fair(waiting.ask, version):
                continue
            if waiting.here or self._has_room(now_s, waiting.ask):
                return waiting
            blocked = self._is_overdue(waiting)  # so that no other takes the capacity it waits for
        return None

    def _line(self) -> list[_Waiting]:
        return sorted(self._waiting.values(), key=self._place)

    def _place(self, waiting: _Waiting) -> tuple[bool, bool, float, int]:
        """Return the sort key: arrived updates, then those overtaken too often, then short ones."""
        overdue = self._is_overdue(waiting)
        ask = waiting.ask
        as_asked = overdue or waiting.here or self.config.order == "fifo"
        duration_s = 0.0 if as_asked else self.rates.duration_s(ask.region, ask.size_bytes)
        return not waiting.here, not overdue, duration_s, waiting.number

    def _is_overdue(self, waiting: _Waiting) -> bool:
        return waiting.overtaken >= self.config.max_overtaken

    def _loss(self, ask: UploadRequest) -> float:
        """Return the cost of dropping an update: infinite after its transfer, else its norm."""
        waiting = self._waiting[ask.key]
        return math.inf if waiting.here or ask.parts else ask.norm

    def _is_fair(self, ask: UploadRequest, version: int) -> bool:
        """Return whether all others can still be in time if ``ask`` goes now."""
        rest = [r for r in self._slacks(version) if r[1].key != ask.key]
        if not is_in_time(rest, ask.commits):
            return False
        in_flight = sum(f.ask.commits for f in self._uploads.values())
        return all(
            f.ask.slack(version, in_flight - f.ask.commits + ask.commits, self.config.max_staleness)
            >= 0
            for f in self._uploads.values()
        )

    def _slacks(self, version: int) -> list[tuple[float, UploadRequest]]:
        in_flight = sum(f.ask.commits for f in self._uploads.values())
        bound = self.config.max_staleness
        return [(w.ask.slack(version, in_flight, bound), w.ask) for w in self._waiting.values()]
