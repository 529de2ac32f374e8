"""The rates of paths and of the averager's region, learned from transfers.

A path's rate is the rate of a transfer that runs alone; until it is known, its transfers run alone.
The rate at which the averager's region can receive in all is given or learned: as long as
concurrent transfers are about as fast as alone, there is no limit; once they are slower, their
total is the limit. From time to time one more transfer than fits is admitted, to detect that the
limit has grown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

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
    """See the module's docstring.

    Attributes:
        hub_mbps: given rate at which the averager's region can receive; None: learned.
        paths: goodput alone by region, in 10^6 bit/s; may be set from measurements made elsewhere.
        latency_s: time from a grant to the first byte of its transfer, by region.
    """

    hub_mbps: float | None = None
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
        return self._learned if self.hub_mbps is None else self.hub_mbps

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

    def has_room(self, region: str, others: list[str]) -> bool:
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
        trying = self.hub_mbps is None and self._started % _TRY_EVERY == _TRY_EVERY - 1
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
            return  # ran beside others, so that it does not show the path's rate
        elif seen >= _CONTENDED * alone:
            self._signs.clear()
            self.paths[run.region] = max(alone, seen)
            if self._learned is not None:
                self._learned = max(self._learned, seen * beside)
        else:
            self._contended(seen * beside)

    def _contended(self, together_mbps: float) -> None:
        self._signs.append(together_mbps)
        if self._learned is not None:
            self._learned = _MEMORY * self._learned + (1 - _MEMORY) * together_mbps
        elif len(self._signs) >= _SIGNS:
            self._learned = max(self._signs[-_SIGNS:])

    def _count(self, now_s: float) -> None:
        passed_s, self._counted_s = now_s - self._counted_s, now_s
        for run in self._running.values():
            run.beside_s += passed_s * len(self._running)
