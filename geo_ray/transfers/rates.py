"""What paths and the averager's region carry, from the transfers that were seen.

A path's rate is what a transfer gets that runs alone; until it is known, its transfers do run
alone. What the averager's region can receive in all is given, or learned: as long as transfers that
run side by side are about as fast as alone, nothing limits them; once they are not, what they got
together is the limit. Now and then one transfer more than fits is let in, to see a limit that has
grown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

_MEASURABLE_BYTES: Final = 128 * 1024
_CONTENDED: Final = 0.8  # of the rate alone
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
        hub_mbps: what the averager's region can receive, if that is known; else it is learned.
        paths: goodput alone by region, in 10^6 bit/s; may be set from measurements made elsewhere.
        latency_s: by region, from a grant to the first byte of its transfer.
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
        """What may come in at the same time; None if nothing limits it, as far as was seen."""
        return self._learned if self.hub_mbps is None else self.hub_mbps

    def of(self, region: str) -> float | None:
        """What a transfer from ``region`` gets alone; None if it was not seen yet."""
        path, limit = self.paths.get(region), self.limit_mbps
        if path is None or limit is None:
            return path
        return min(path, limit)

    def duration_s(self, region: str, size_bytes: int) -> float:
        """How long a transfer takes alone; 0 if that is not known: it is worth finding out."""
        rate = self.of(region)
        return 0.0 if rate is None else size_bytes * 8e-6 / rate

    def has_room(self, region: str, others: list[str]) -> bool:
        """Whether ``region`` may send while ``others`` do, without making them slower."""
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
        """A transfer was let go."""
        self._count(now_s)
        self._started += 1
        latency_s = self.latency_s.get(region, 0.0)
        self._running[key] = _Running(region, size_bytes, now_s, latency_s)

    def gone(self, now_s: float, key: object) -> None:
        """A transfer is not reckoned with any more."""
        self._count(now_s)
        self._running.pop(key, None)

    def arrived(self, now_s: float, key: object) -> None:
        """A transfer ended well."""
        self._count(now_s)
        run = self._running.pop(key, None)
        if run is None or run.size_bytes < _MEASURABLE_BYTES:
            return
        took_s = now_s - run.since_s - run.latency_s
        if took_s <= run.latency_s:  # too short to tell
            return
        seen, alone = run.size_bytes * 8e-6 / took_s, self.paths.get(run.region)
        beside = run.beside_s / (now_s - run.since_s)
        if beside < _BESIDE:
            self.paths[run.region] = seen if alone is None else (alone + seen) / 2
        elif alone is None:
            return  # beside others: not what the path carries, and it must not pass for that
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
