"""Upload scheduling: decides which region sends its update to the averager next. Pure.

A region sends an `UploadRequest` first. `TransferScheduler` grants uploads up to the rate at which
the averager's region can receive (`Rates`, learned from transfers), so that each transfer has the
bottleneck to itself. The next grant goes to the update that would arrive first, unless another
was overtaken too often. With a staleness bound, all commits pass through the scheduler: no grant
may make another update too stale (earliest deadline first decides), and updates that cannot be in
time are dropped, if possible before they are sent. A grant has a deadline, after which a late
update is treated like one sent without asking.

`HelperScheduler` also uses helper regions, which sum waiting updates on their way.
The first updates of the queue go straight to the averager, which would be idle otherwise. The
next ones are summed at one of their senders, the helper, so k updates cost one transfer on the
bottleneck. Every number of direct uploads is tried, and the plan that finishes first is taken. A
group has a deadline: if its sum was not requested by then, the group is dissolved, its parts
queue again, and a late sum is refused, so no update is counted twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Final, Literal

from pydantic import Field

from geo_ray.base.model import StrictModel
from geo_ray.strategies.base import Strategy
from geo_ray.strategies.config import CodecConfig


class TransfersConfig(StrictModel):
    """Whether and how updates take turns on the way to the averager (asynchronous strategies)."""

    order: Literal["fifo", "shortest_first"] = Field(
        "shortest_first",
        description="which waiting update is sent next: the oldest, or the one that arrives first",
    )
    max_staleness: int | None = Field(
        None,
        ge=1,
        description="commits of others that an update may be behind; null: no bound; not with ama",
    )
    averager_mbps: float | None = Field(
        None, gt=0, description="rate at which the averager's region can receive; null: learned"
    )
    small_bytes: int = Field(
        64 * 1024, ge=0, description="updates up to this size are sent without a request"
    )
    max_overtaken: int = Field(
        16,
        ge=1,
        description="an update that was overtaken that often is sent next whatever its size",
    )
    grant_s: float = Field(
        30.0,
        gt=0,
        description="a transfer that takes longer (and twice its expected time) no longer "
        "blocks others",
    )
    aggregate: bool = Field(
        False, description="sum waiting updates at a helper region (asgd and asgd_ga)"
    )

    def problems(
        self, strategy: Strategy, codec: CodecConfig, *, has_standby: bool
    ) -> Iterator[str]:
        """Yield what does not fit scheduled uploads, in which no update waits for another.

        Args:
            strategy: the run's.
            codec: the run's codecs.
            has_standby: whether there is a standby averager.
        """
        traits, name = strategy.traits, strategy.kind
        if traits.in_rounds:
            yield (
                f"transfers: '{name}' works in rounds, which end with their slowest update "
                "whatever the order: use an overlay"
            )
            return
        if codec.up is not None and codec.up.traits.differential is not None:
            yield (
                f"transfers: codec {codec.up.kind} has its own order of sending: leave one of the "
                "two out"
            )
        if traits.averager.bound is not None:
            yield (
                "strategy.staleness.bound: leave it out, transfers.max_staleness bounds the age of "
                "updates"
            )
        adds_up = traits.averager.adds_up is not None
        if self.max_staleness is not None and not adds_up:
            yield (
                f"transfers.max_staleness: what '{name}' sends counts from the last answer, so "
                "that one that is dropped must not be added to the next: leave it out"
            )
        if not self.aggregate:
            return
        if not adds_up:
            yield f"transfers.aggregate: updates of '{name}' do not add up: leave it out"
            return
        if codec.up is not None or codec.down is not None:
            yield "transfers.aggregate: coded updates do not add up; leave codecs out"
        if has_standby:
            yield "transfers.aggregate: sums are not replicated; leave out the standby"


@dataclass(frozen=True, slots=True)
class UploadRequest:
    """One update that wants to go to the averager.

    Attributes:
        region: its sender; the helper region if it is a sum of several.
        attempt: incarnation of the sender.
        seq: its number within the attempt; the group's number if it is a sum.
        size_bytes: of its payload.
        base_version: the averager's version that it was computed from; of a sum, the oldest.
        norm: Euclidean norm of the payload; if one must be dropped, it is the smallest.
        final: whether it is the sender's final update, which is never dropped; it is committed when
            all final updates are there.
        again: an earlier averager had taken it in already: it is never dropped.
        parts: the asks that a sum is made of; empty for a plain update.
    """

    region: str
    attempt: int
    seq: int
    size_bytes: int
    base_version: int
    norm: float = field(default=0.0, compare=False)
    final: bool = False
    again: bool = False
    parts: tuple[UploadRequest, ...] = ()

    @property
    def key(self) -> tuple[str, bool]:
        """The key among requests that are open at the same time."""
        return (f"{self.region}/{self.seq}", True) if self.parts else (self.region, False)

    @property
    def commits(self) -> int:
        """The number of commits that it will be."""
        return 0 if self.final else max(1, len(self.parts))

    def slack(self, version: int, before: int, max_staleness: int | None) -> float:
        """Return how many more commits may come before it.

        Args:
            version: the averager's present version.
            before: commits that come before it anyway.
            max_staleness: the bound; None for none.

        Returns:
            The number; negative if the update would be too stale already; infinite without a bound.
        """
        if max_staleness is None or self.final or self.again:
            return math.inf
        # The parts of a sum are committed together: the others arrive before the last one.
        beside = self.commits - 1
        return max_staleness - (version + before + beside - self.base_version)


@dataclass(frozen=True, slots=True)
class Grant:
    """An order to send an update to the averager now."""

    ask: UploadRequest


@dataclass(frozen=True, slots=True)
class Take:
    """An order to commit an update that is here, before carrying out later decisions."""

    ask: UploadRequest


@dataclass(frozen=True, slots=True)
class Drop:
    """An order not to send an update that would be too stale; the sender keeps its content."""

    ask: UploadRequest


@dataclass(frozen=True, slots=True)
class Gather:
    """An order to send updates to a helper region, which sums them and asks for the sum.

    Attributes:
        group: number of the sum, never used twice.
        helper: where they are summed; one of the senders.
        asks: what is summed, in this order.
    """

    group: int
    helper: str
    asks: tuple[UploadRequest, ...]


@dataclass(frozen=True, slots=True)
class Dissolve:
    """An order to send a group's parts by themselves; its late sum is refused from now on."""

    group: int


Decision = Grant | Take | Drop | Gather | Dissolve


WithSlack = tuple[float, UploadRequest]
"""An update with its slack, as of the moment at which the line begins to move."""


def is_in_time(line: Iterable[WithSlack], first_commits: int = 0) -> bool:
    """Return whether some order of ``line`` keeps all updates in time.

    Args:
        line: the updates, in any order.
        first_commits: commits that come before all of them.
    """
    before = first_commits
    for slack, ask in _by_deadline(line):
        if before > slack:
            return False
        before += ask.commits
    return True


def too_late(
    line: Sequence[WithSlack], loss: Callable[[UploadRequest], float]
) -> list[UploadRequest]:
    """Return the fewest updates to give up so that the rest can be in time.

    Args:
        line: the updates, in any order.
        loss: returns what is lost with an update; where there is a choice, the least is given up.
    """
    retained: list[WithSlack] = []
    given_up: list[UploadRequest] = []
    for slack, ask in _by_deadline(line):
        before = sum(other.commits for _, other in retained)
        retained.append((slack, ask))
        while before > slack and (slack, ask) in retained:
            victims = retained if slack >= 0 else retained[-1:]
            victim = min(
                (k for k in victims if k[0] < math.inf),
                key=lambda k: (loss(k[1]), k[1].key),
            )
            retained.remove(victim)
            given_up.append(victim[1])
            before -= victim[1].commits
    return given_up


def _by_deadline(line: Iterable[WithSlack]) -> list[WithSlack]:
    return sorted(line, key=_deadline)


def _deadline(update: WithSlack) -> tuple[float, tuple[str, bool]]:
    slack, request = update
    return slack + request.commits, request.key


_MEASURABLE_BYTES: Final = 128 * 1024
_CONTENDED: Final = 0.8  # share of the rate alone
_BESIDE: Final = 1.3  # transfers at a time, on average, from which on one did not run alone
_SIGNS: Final = 3  # contended transfers that make a limit
_TRY_EVERY: Final = 32
_TRY: Final = 1.6
_SLACK: Final = 1.05  # measured rates scatter
_MEMORY: Final = 0.7


@dataclass(slots=True)
class _Running:
    region: str
    size_bytes: int
    since_s: float
    latency_s: float
    beside_s: float = 0.0  # integral over time of the number of transfers that run


@dataclass(slots=True)
class Rates:
    """The rates of paths and of the averager's region, learned from transfers.

    A path's rate is the rate of a transfer that runs alone; until it is known, its transfers run
    alone. The rate at which the averager's region can receive in all is given or learned: as long
    as concurrent transfers are about as fast as alone, there is no limit; once they are slower,
    their total is the limit. From time to time one more transfer than fits is admitted, to detect
    that the limit has grown.

    Attributes:
        averager_mbps: given rate at which the averager's region can receive; None: learned.
        paths: goodput alone by region, in 10^6 bit/s; may be set from measurements made elsewhere.
        latency_s: time from a grant to the first byte of its transfer, by region.
    """

    averager_mbps: float | None = None
    paths: dict[str, float] = field(default_factory=dict)
    latency_s: dict[str, float] = field(default_factory=dict)
    _learned: float | None = None
    _signs: list[float] = field(default_factory=list)
    _running: dict[object, _Running] = field(default_factory=dict)
    _counted_s: float = 0.0
    _started: int = 0

    @property
    def limit_mbps(self) -> float | None:
        """The rate at which the averager's region can receive in all; None if no limit was seen."""
        return self._learned if self.averager_mbps is None else self.averager_mbps

    def of(self, region: str) -> float | None:
        """Return the rate of a transfer from ``region`` alone; None if there was none yet."""
        path, limit = self.paths.get(region), self.limit_mbps
        if path is None or limit is None:
            return path
        return min(path, limit)

    def duration_s(self, region: str, size_bytes: int) -> float:
        """Return how long a transfer takes alone; 0 if that is not known, so that it is tried."""
        rate = self.of(region)
        return 0.0 if rate is None else size_bytes * 8e-6 / rate

    def has_capacity(self, region: str, others: list[str]) -> bool:
        """Return whether ``region`` may send while ``others`` do, without making them slower."""
        if not others:
            return True
        rates = [self.of(name) for name in (region, *others)]
        known = [rate for rate in rates if rate is not None]
        if len(known) < len(rates):
            return False
        limit = self.limit_mbps
        if limit is None:
            return True
        trying = self.averager_mbps is None and self._started % _TRY_EVERY == _TRY_EVERY - 1
        return sum(known) <= limit * (_TRY if trying else _SLACK)

    def started(self, now_s: float, key: object, region: str, size_bytes: int) -> None:
        """Count a transfer that was granted."""
        self._count(now_s)
        self._started += 1
        latency_s = self.latency_s.get(region, 0.0)
        self._running[key] = _Running(region, size_bytes, now_s, latency_s)

    def gone(self, now_s: float, key: object) -> None:
        """Stop counting a transfer."""
        self._count(now_s)
        self._running.pop(key, None)

    def arrived(self, now_s: float, key: object) -> None:
        """Learn from a transfer that has arrived."""
        self._count(now_s)
        run = self._running.pop(key, None)
        if run is None or run.size_bytes < _MEASURABLE_BYTES:
            return
        took_s = now_s - run.since_s - run.latency_s
        if took_s <= run.latency_s:  # too short to measure
            return
        seen, alone = run.size_bytes * 8e-6 / took_s, self.paths.get(run.region)
        beside = run.beside_s / (now_s - run.since_s)
        if beside < _BESIDE:
            self.paths[run.region] = seen if alone is None else (alone + seen) / 2
        elif alone is None:
            return  # other uploads ran concurrently, so it does not show the path's rate
        elif seen >= _CONTENDED * alone:
            self._signs.clear()
            self.paths[run.region] = max(alone, seen)
            if self._learned is not None:
                self._learned = max(self._learned, seen * beside)
        else:
            self._contended(seen * beside)

    def _contended(self, total_mbps: float) -> None:
        self._signs.append(total_mbps)
        if self._learned is not None:
            self._learned = _MEMORY * self._learned + (1 - _MEMORY) * total_mbps
        elif len(self._signs) >= _SIGNS:
            self._learned = max(self._signs[-_SIGNS:])

    def _count(self, now_s: float) -> None:
        passed_s, self._counted_s = now_s - self._counted_s, now_s
        for run in self._running.values():
            run.beside_s += passed_s * len(self._running)


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
    """Decides who sends to the averager next. Pure: its caller has the clock and the network.

    A region asks before it sends an update. Updates are granted up to the rate at which the
    averager's region can receive (`Rates`), so that each transfer gets the bottleneck to itself and
    is short. The next grant goes to the update that would arrive first, unless another was
    overtaken too often.

    With a bound on staleness, everything that the averager commits passes through the scheduler,
    also updates of its own region and those sent without asking. No update is granted or taken that
    would make another one too stale, and updates that cannot be in time are dropped, if possible
    before they are sent.

    A grant has a deadline. After it, a sender that has died or is very slow no longer counts; if
    its update comes after all, it is treated like one sent without asking.

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
        self.rates = Rates(self.config.averager_mbps)

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

    def _has_capacity(self, now_s: float, ask: UploadRequest) -> bool:
        """Return whether a grant sent now finds a free line, or pays although it does not."""
        rates = self.rates
        # Transfers that are nearly done will have ended when the grant arrives.
        arrives_s = now_s + rates.latency_s.get(ask.region, 0.0)
        others = [f for f in self._uploads.values() if f.end_s > arrives_s + _MOMENT_S]
        if rates.has_capacity(ask.region, [f.ask.region for f in others]):
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
            if waiting.here or self._has_capacity(now_s, waiting.ask):
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


_LONGEST_LINE: Final = 32
_LATE: Final = 0.25  # share of a transfer

Duration = Callable[[str, str, int], float]
"""``duration(src, dst, size_bytes)``: seconds that a transfer between two regions takes."""


@dataclass(frozen=True, slots=True)
class UploadGroup:
    """Updates to be summed at one of their senders.

    Attributes:
        helper: the region that sums them.
        asks: the requests, in order.
        spare_s: how long the group can wait for more updates without delaying its sum.
    """

    helper: str
    asks: tuple[UploadRequest, ...]
    spare_s: float = 0.0


@dataclass(frozen=True, slots=True)
class UploadPath:
    """The path to the averager.

    Attributes:
        leader: the averager's region.
        busy_s: how long it still receives granted updates.
        limit_mbps: what it can receive in all.
        duration_s: how long a transfer takes alone.
    """

    leader: str
    busy_s: float
    limit_mbps: float
    duration_s: Duration

    def through_s(self, region: str, size_bytes: int, ready_s: float, free_s: float) -> float:
        """Return the end of a transfer that is ready, and has a free averager, at these times."""
        bottleneck_s = size_bytes * 8e-6 / self.limit_mbps
        path_s = self.duration_s(region, self.leader, size_bytes)
        return max(max(ready_s, free_s) + bottleneck_s, ready_s + path_s)


@dataclass(frozen=True, slots=True)
class _Plan:
    end_s: float
    total_s: float  # sum over all updates of the time when each is through
    groups: tuple[UploadGroup, ...]


def plan_groups(line: Sequence[UploadRequest], path: UploadPath) -> tuple[UploadGroup, ...]:
    """Return the groups worth forming now; other updates go straight.

    Args:
        line: requests that wait for the averager, in the order in which they would go.
        path: the path to the averager.
    """
    asks = [ask for ask in line if not ask.final and not ask.parts][:_LONGEST_LINE]
    sizes = {ask.size_bytes for ask in asks}
    if len(asks) < 2 or len(sizes) > 1:
        return ()
    plans = [_with_straight(number, asks, path) for number in range(len(asks) + 1)]
    best = min(plans, key=_cost_of)
    return best.groups


def _cost_of(plan: _Plan) -> tuple[float, float, int]:
    """Equal within rounding: fewer groups are better, as single updates cannot fail as a group."""
    return round(plan.end_s, 9), round(plan.total_s, 9), len(plan.groups)


def _with_straight(number: int, asks: Sequence[UploadRequest], path: UploadPath) -> _Plan:
    free_s, end_s, total_s = path.busy_s, 0.0, 0.0
    bottleneck_s = asks[0].size_bytes * 8e-6 / path.limit_mbps
    groups: list[UploadGroup] = []
    first = 0
    while first < len(asks):
        group = UploadGroup(asks[first].region, (asks[first],))
        ready_s = 0.0
        if first >= number:
            group, ready_s = _largest(asks[first:], free_s, path)
        size = len(group.asks)
        through_s = path.through_s(group.helper, asks[0].size_bytes, ready_s, free_s)
        if size > 1:
            groups.append(replace(group, spare_s=max(0.0, free_s - ready_s)))
        free_s = max(ready_s, free_s) + bottleneck_s
        end_s, total_s = max(end_s, through_s), total_s + size * through_s
        first += size
    return _Plan(end_s, total_s, tuple(groups))


def _largest(
    asks: Sequence[UploadRequest], free_s: float, path: UploadPath
) -> tuple[UploadGroup, float]:
    """Return the longest prefix of ``asks``, at least 2, whose sum is ready in time.

    Returns:
        The group, and when its sum is ready.
    """
    # A slightly late sum is better than one more transfer.
    latest_s = free_s + _LATE * asks[0].size_bytes * 8e-6 / path.limit_mbps
    group, ready_s = UploadGroup(asks[0].region, tuple(asks[:1])), 0.0
    for size in range(2, len(asks) + 1):
        helper, gathered_s = _best_helper(asks[:size], path)
        if size > 2 and gathered_s > latest_s:
            break
        group, ready_s = UploadGroup(helper, tuple(asks[:size])), gathered_s
    return group, ready_s


def _best_helper(asks: Sequence[UploadRequest], path: UploadPath) -> tuple[str, float]:
    """Return the sender whose sum is soonest at the averager, and when its sum is ready."""

    def ready_s(helper: str) -> float:
        others = [ask for ask in asks if ask.region != helper]
        return sum(path.duration_s(ask.region, helper, ask.size_bytes) for ask in others)

    size_bytes = asks[0].size_bytes
    helper = min(
        (ask.region for ask in asks),
        key=lambda h: (ready_s(h) + path.duration_s(h, path.leader, size_bytes), h),
    )
    return helper, ready_s(helper)


_TRIPS: Final = 1.5
_GROUP_MEMORY: Final = 0.5


@dataclass(slots=True)
class _Open:
    total: UploadRequest
    since_s: float
    deadline_s: float


@dataclass(slots=True)
class HelperScheduler:
    """See the module's docstring; the events are those of `TransferScheduler`.

    Attributes:
        config: how to decide.
        leader: the averager's region.
        into_mbps: what regions receive from each other, by region that receives; learned.
        paused: form no new groups; open ones continue.
        line: the scheduler beneath.
    """

    config: TransfersConfig
    leader: str
    into_mbps: dict[str, float] = field(default_factory=dict)
    paused: bool = False
    line: TransferScheduler = field(init=False)
    _open: dict[int, _Open] = field(default_factory=dict)
    _numbers: count[int] = field(default_factory=partial(count, 1))
    _plan_s: float = math.inf  # when a group must be formed at the latest

    def __post_init__(self) -> None:
        self.line = TransferScheduler(self.config)

    def ask(self, now_s: float, version: int, ask: UploadRequest) -> list[Decision]:
        """See `TransferScheduler.ask`; a sum is asked for by its helper."""
        if not ask.parts:
            decisions = self._take_out(ask)
            return self._settle(now_s, version, decisions + self.line.ask(now_s, version, ask))
        opened = self._match(ask)
        if opened is None:
            return [Dissolve(ask.seq)]
        self._note_gathered(now_s, opened, ask)
        present = {part.key for part in ask.parts}
        missing = [part for part in opened.total.parts if part.key not in present]
        self.line.release(opened.total.key, [*missing, *ask.parts])
        opened.total = ask
        self.line.hold(ask)
        return self._settle(now_s, version, self.line.ask(now_s, version, ask))

    def began(self, now_s: float, ask: UploadRequest) -> list[Decision]:
        """See `TransferScheduler.began`."""
        decisions = self._take_out(ask)
        self.line.began(now_s, ask)
        return decisions

    def arrived(self, now_s: float, version: int, ask: UploadRequest) -> list[Decision]:
        """See `TransferScheduler.arrived`; a sum that is refused gives nothing but `Dissolve`."""
        decisions: list[Decision] = []
        if not ask.parts:
            decisions = self._take_out(ask)
        elif (opened := self._match(ask)) is None:
            return [Dissolve(ask.seq)]
        else:
            opened.deadline_s = math.inf
        arrived = self.line.arrived(now_s, version, ask)
        return self._settle(now_s, version, decisions + arrived)

    def committed(self, group: int) -> None:
        """Note that the averager has taken a sum in."""
        self._open.pop(group, None)

    def refuse(self, now_s: float, version: int, group: int) -> list[Decision]:
        """Refuse a sum for the averager; its parts are sent by themselves."""
        opened = self._open.pop(group, None)
        if opened is None:
            return []
        self.line.forget(opened.total.key)
        self.line.release(opened.total.key, opened.total.parts)
        return [Dissolve(group), *self.line.tick(now_s, version)]

    def tick(self, now_s: float, version: int) -> list[Decision]:
        """See `TransferScheduler.tick`."""
        late = [group for group, o in self._open.items() if o.deadline_s <= now_s]
        decisions = [d for group in late for d in self.refuse(now_s, version, group)]
        return self._settle(now_s, version, decisions + self.line.tick(now_s, version))

    def next_deadline_s(self) -> float | None:
        """When `tick` should be called at the latest; None if nothing is open."""
        deadlines = [o.deadline_s for o in self._open.values() if o.deadline_s < math.inf]
        line_s = self.line.next_deadline_s()
        times_s = [*deadlines, self._plan_s, math.inf if line_s is None else line_s]
        return None if min(times_s) == math.inf else min(times_s)

    @property
    def is_quiet(self) -> bool:
        """Return whether a sender would have the averager to itself."""
        return self.line.is_quiet

    # ------------------------------------------------------------------ inside

    def _match(self, ask: UploadRequest) -> _Open | None:
        """Return the open group whose sum this may be."""
        opened = self._open.get(ask.seq)
        if opened is None or opened.total.region != ask.region:
            return None
        return opened if set(ask.parts) <= set(opened.total.parts) else None

    def _take_out(self, ask: UploadRequest) -> list[Decision]:
        """Dissolve the group of a sender that sends by itself after all."""
        for group, opened in list(self._open.items()):
            keys = {part.key for part in opened.total.parts}
            if ask.key in keys:
                del self._open[group]
                self.line.forget(opened.total.key)
                others = [part for part in opened.total.parts if part.key != ask.key]
                self.line.release(opened.total.key, others)
                return [Dissolve(group)]
        return []

    def _settle(self, now_s: float, version: int, decisions: list[Decision]) -> list[Decision]:
        """Dissolve sums that would be too stale; then form groups if that is faster."""
        settled: list[Decision] = []
        while decisions:
            decision = decisions.pop(0)
            if isinstance(decision, Drop) and decision.ask.parts:
                decisions += self.refuse(now_s, version, decision.ask.seq)
            else:
                settled.append(decision)
        return self._group(now_s, settled)

    def _group(self, now_s: float, decisions: list[Decision]) -> list[Decision]:
        self._plan_s = math.inf
        line, limit_mbps = self.line.waiting(), self.line.rates.limit_mbps
        if not self.config.aggregate or self.paused or len(line) < 2 or limit_mbps is None:
            return decisions
        path = UploadPath(self.leader, self.line.busy_s(now_s), limit_mbps, self._duration_s)
        # The members must be told, the helper must ask, and its grant must come back.
        lead_s = _TRIPS * max(self.line.rates.latency_s.values(), default=0.0)
        for group in plan_groups(line, path):
            if group.spare_s <= lead_s + _MOMENT_S:
                decisions.append(self._gather(now_s, group))
            else:
                self._plan_s = min(self._plan_s, now_s + group.spare_s - lead_s)
        return decisions

    def _gather(self, now_s: float, group: UploadGroup) -> Gather:
        number = next(self._numbers)
        total = UploadRequest(
            group.helper,
            attempt=0,
            seq=number,
            size_bytes=group.asks[0].size_bytes,
            base_version=min(ask.base_version for ask in group.asks),
            parts=group.asks,
        )
        self.line.hold(total)
        self._open[number] = _Open(total, now_s, now_s + self.config.grant_s)
        return Gather(number, group.helper, group.asks)

    def _duration_s(self, src: str, dst: str, size_bytes: int) -> float:
        rates = self.line.rates
        if dst == self.leader:
            return rates.duration_s(src, size_bytes)
        # What a region can receive is learned at its first sum; until then its rate of sending
        # counts.
        mbps = self.into_mbps.get(dst) or rates.paths.get(dst)
        own_mbps = rates.paths.get(src)
        if mbps is None or own_mbps is None:
            return math.inf
        return size_bytes * 8e-6 / (mbps if dst in self.into_mbps else min(mbps, own_mbps))

    def _note_gathered(self, now_s: float, opened: _Open, ask: UploadRequest) -> None:
        """Learn a helper's rate of receiving from the time in which all parts were summed."""
        parts = opened.total.parts
        took_s = now_s - opened.since_s - max(self.line.rates.latency_s.values(), default=0.0)
        if len(ask.parts) < len(parts) or took_s <= 0 or not ask.size_bytes:
            return
        seen = (len(parts) - 1) * ask.size_bytes * 8e-6 / took_s
        known = self.into_mbps.get(ask.region, seen)
        self.into_mbps[ask.region] = _GROUP_MEMORY * known + (1 - _GROUP_MEMORY) * seen


def part_of(total: UploadRequest, present: tuple[UploadRequest, ...]) -> UploadRequest:
    """Return the request for a sum of only some of its parts."""
    oldest = min(ask.base_version for ask in present)
    return replace(total, parts=present, base_version=oldest)
