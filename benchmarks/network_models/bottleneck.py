"""Regions that send updates to one averager, on the virtual clock: only their transfers are real.

For the benchmark and the tests of `geo_ray.transport`: no model, no gradients, but the very
scheduler of the runtime, links that are shared, senders that die, and books of every commit.
A sender computes, sends, waits for its answer and begins again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from benchmarks.network_models.shared_links import Flows
from geo_ray.simulator.clock import Scheduler
from geo_ray.transport.uploads import (
    Decision,
    Drop,
    Gather,
    Grant,
    HelperScheduler,
    Take,
    TransfersConfig,
    UploadRequest,
)

HUB = "hub"


@dataclass(frozen=True, slots=True)
class Site:
    """One sender.

    Attributes:
        compute_s: mean time between an answer and the next update.
        size_bytes: of an update.
        mbps: up and down.
        dies_at_s: when it falls silent; None for never.
    """

    compute_s: float
    size_bytes: int
    mbps: float
    dies_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """One update that the averager took in: when it was ready, when taken, and how stale."""

    ask: UploadRequest
    ready_s: float
    taken_s: float
    staleness: int


@dataclass(slots=True)
class Bottleneck:
    """See the module's docstring.

    Attributes:
        sites: the senders by region.
        averager_mbps: what the averager's region can receive.
        config: how transfers take turns; None lets all go at once.
        delay_s: one way between any two regions.
        measured: whether the scheduler knows all paths from the start, as from a link table.
        seed: of the time that computing takes.
        horizon_s: no update becomes ready after it.
        committed: what was taken in, in order.
        dropped: what was given up.
    """

    sites: Mapping[str, Site]
    averager_mbps: float
    config: TransfersConfig | None
    delay_s: float = 0.02
    measured: bool = False
    seed: int = 0
    horizon_s: float = 60.0
    committed: list[Committed] = field(default_factory=list)
    dropped: list[UploadRequest] = field(default_factory=list)
    flows: Flows = field(init=False)
    _time: Scheduler = field(default_factory=Scheduler)
    _line: HelperScheduler | None = field(init=False)
    _random: Random = field(init=False)
    _version: int = 0
    _ready_s: dict[UploadRequest, float] = field(default_factory=dict)
    _parts: dict[int, list[UploadRequest]] = field(default_factory=dict)
    _wakes_s: float = math.inf

    def __post_init__(self) -> None:
        ups = {name: site.mbps for name, site in self.sites.items()} | {HUB: 1e6}
        downs = {name: site.mbps for name, site in self.sites.items()} | {HUB: self.averager_mbps}
        self.flows = Flows(self._time, ups, downs, self.delay_s)
        self._line = None if self.config is None else HelperScheduler(self.config, HUB)
        if self._line is not None:
            self._line.line.rates.latency_s |= dict.fromkeys(self.sites, 2 * self.delay_s)
        if self._line is not None and self.measured:
            mbps = {name: site.mbps for name, site in self.sites.items()}
            self._line.line.rates.paths |= mbps
            self._line.into_mbps |= mbps
        self._random = Random(self.seed)

    def run(self) -> None:
        """Until nothing is left to happen."""
        for name in self.sites:
            self._compute(name, 1, 0)
        self._time.run()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is granted and nobody waits."""
        return self._line is None or self._line.is_quiet

    @property
    def learned_mbps(self) -> float | None:
        """What the scheduler thinks that the averager's region can receive; None: no limit."""
        return None if self._line is None else self._line.line.rates.limit_mbps

    @property
    def open(self) -> list[UploadRequest]:
        """Updates that were ready and have neither been taken in nor given up."""
        return list(self._ready_s)

    # ------------------------------------------------------------------ senders

    def _compute(self, name: str, seq: int, base_version: int) -> None:
        site = self.sites[name]
        took_s = site.compute_s * self._random.uniform(0.8, 1.2)
        if self._time.now_s + took_s > self.horizon_s:
            return
        ask = UploadRequest(name, 1, seq, site.size_bytes, base_version, norm=self._random.random())
        self._time.after(took_s, lambda: self._ready(ask))

    def _ready(self, ask: UploadRequest) -> None:
        if self._is_dead(ask.region):
            return
        self._ready_s[ask] = self._time.now_s
        small = self.config is None or ask.size_bytes <= self.config.small_bytes
        if not small:
            self.flows.after(lambda: self._ask(ask))
            return
        self.flows.after(lambda: self._began(ask))
        self._send(ask, HUB, lambda: self._arrived(ask))

    def _ask(self, ask: UploadRequest) -> None:
        if self._line is not None:
            self._decide(self._line.ask(self._time.now_s, self._version, ask))

    def _began(self, ask: UploadRequest) -> None:
        if self._line is not None:
            self._decide(self._line.began(self._time.now_s, ask))

    def _send(self, ask: UploadRequest, dst: str, done: Callable[[], None]) -> None:
        if self._is_dead(ask.region):
            return
        self.flows.send(
            ask.region, dst, ask.size_bytes, lambda: None if self._is_dead(ask.region) else done()
        )

    def _is_dead(self, name: str) -> bool:
        dies_at_s = self.sites[name].dies_at_s
        return dies_at_s is not None and self._time.now_s >= dies_at_s

    def _answered(self, ask: UploadRequest, base_version: int) -> None:
        self.flows.after(lambda: self._compute(ask.region, ask.seq + 1, base_version))

    # ------------------------------------------------------------------ helpers

    def _gathered(self, gather: Gather, ask: UploadRequest) -> None:
        parts = self._parts.setdefault(gather.group, [])
        parts.append(ask)
        if len(parts) < len(gather.asks) or self._is_dead(gather.helper):
            return
        oldest = min(part.base_version for part in parts)
        total = UploadRequest(
            gather.helper, 0, gather.group, ask.size_bytes, oldest, parts=tuple(parts)
        )
        self.flows.after(lambda: self._ask(total))

    # ------------------------------------------------------------------ the averager

    def _arrived(self, ask: UploadRequest) -> None:
        if self._line is None:
            self._commit(ask)
            return
        self._decide(self._line.arrived(self._time.now_s, self._version, ask))

    def _decide(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Take):
                self._commit(decision.ask)
            elif isinstance(decision, Grant):
                self._grant(decision.ask)
            elif isinstance(decision, Drop):
                self.dropped.append(decision.ask)
                del self._ready_s[decision.ask]
                self._answered(decision.ask, self._version)
            elif isinstance(decision, Gather):
                for ask in decision.asks:
                    self._to_helper(decision, ask)
        if self._line is not None:
            self._wake(self._line)

    def _wake(self, line: HelperScheduler) -> None:
        deadline_s = line.next_deadline_s()
        if deadline_s is None or deadline_s >= self._wakes_s:
            return
        self._wakes_s = deadline_s

        def tick() -> None:
            if self._wakes_s == deadline_s:
                self._wakes_s = math.inf
                self._decide(line.tick(self._time.now_s, self._version))

        self._time.at(deadline_s, tick)

    def _grant(self, ask: UploadRequest) -> None:
        self.flows.after(lambda: self._send(ask, HUB, lambda: self._arrived(ask)))

    def _to_helper(self, gather: Gather, ask: UploadRequest) -> None:
        def go() -> None:
            if ask.region == gather.helper:
                self._gathered(gather, ask)
            else:
                self._send(ask, gather.helper, lambda: self._gathered(gather, ask))

        self.flows.after(go)

    def _commit(self, ask: UploadRequest) -> None:
        parts = ask.parts or (ask,)
        before = self._version
        self._version += len(parts)
        if ask.parts and self._line is not None:
            self._line.committed(ask.seq)
        for part in parts:
            # The parts of a sum count each other, all but themselves.
            staleness = before + len(parts) - 1 - part.base_version
            now_s = self._time.now_s
            self.committed.append(Committed(part, self._ready_s.pop(part), now_s, staleness))
            self._answered(part, self._version)
