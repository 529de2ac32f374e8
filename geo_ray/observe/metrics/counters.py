"""Running totals that several readers of events keep: WAN bytes, steps, a rate over a window."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

Link = tuple[str, str]  # (source region, destination region)


class LinkTotals:
    """WAN bytes per link and class, from the cumulative numbers of `wan` events.

    The numbers begin at zero again when a run is resumed (`restart`). Within one stretch a number
    counts only as far as it is above the highest seen, so a link may be reported by both ends.
    Bytes of a region to itself never left it and are not counted.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[Link, str], int] = defaultdict(int)
        self._now: dict[tuple[Link, str], int] = defaultdict(int)

    def restart(self) -> None:
        """Begin a new stretch: the next numbers count from zero and add to what there is."""
        for key, count in self._now.items():
            self._before[key] += count
        self._now.clear()

    def feed(self, src: str, dst: str, bytes_by_class: Mapping[str, int]) -> dict[str, int]:
        """Take one `wan` event; give the bytes that are new, per class."""
        if src == dst:
            return {}
        new: dict[str, int] = {}
        for name, count in bytes_by_class.items():
            key = ((src, dst), name)
            new[name] = max(0, count - self._now[key])
            self._now[key] += new[name]
        return new

    def links(self) -> dict[tuple[Link, str], int]:
        """Give all bytes so far by (link, class)."""
        return {
            key: self._before.get(key, 0) + self._now.get(key, 0)
            for key in sorted(self._before.keys() | self._now.keys())
        }

    def by_class(self) -> dict[str, int]:
        """Give all bytes so far by class."""
        total: dict[str, int] = defaultdict(int)
        for (_, name), count in self.links().items():
            total[name] += count
        return dict(total)

    def by_link(self) -> dict[Link, int]:
        """Give all bytes so far by (source, destination)."""
        total: dict[Link, int] = defaultdict(int)
        for (link, _), count in self.links().items():
            total[link] += count
        return dict(total)

    def out_bytes(self, region: str) -> int:
        """Give what ``region`` sent to other regions, in bytes."""
        return sum(count for ((src, _), _), count in self.links().items() if src == region)

    def in_bytes(self, region: str) -> int:
        """Give what ``region`` received from other regions, in bytes."""
        return sum(count for ((_, dst), _), count in self.links().items() if dst == region)


class Rate:
    """Amount per second over the last ``window_s`` seconds of event time.

    Args:
        window_s: how far back the rate looks, seconds.
    """

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, float]] = deque()  # (t_s, amount)
        self._sum = 0.0
        self._first_s: float | None = None

    def start(self, t_s: float) -> None:
        """Count time from ``t_s`` on if nothing came before."""
        if self._first_s is None:
            self._first_s = t_s

    def add(self, t_s: float, amount: float) -> None:
        """Count ``amount`` at ``t_s`` seconds."""
        self.start(t_s)
        self._points.append((t_s, amount))
        self._sum += amount

    def per_s(self, now_s: float) -> float:
        """Give the amount per second at ``now_s``; 0 before any time has passed."""
        while self._points and self._points[0][0] <= now_s - self._window_s:
            self._sum -= self._points.popleft()[1]
        if self._first_s is None or not self._points:
            self._sum = 0.0
            return 0.0
        elapsed_s = min(self._window_s, now_s - self._first_s)
        return self._sum / elapsed_s if elapsed_s > 0 else 0.0


@dataclass(slots=True)
class StepTotals:
    """The applied steps of one region; steps that a resumed run does again replace the old ones."""

    rows: list[tuple[int, int, float]] = field(default_factory=list)  # (step, samples, loss)
    samples: int = 0

    def add(self, step: int, samples: int, loss: float) -> None:
        """Count one step; whatever was counted at this step or after it is taken back."""
        while self.rows and self.rows[-1][0] >= step:
            self.samples -= self.rows.pop()[1]
        self.rows.append((step, samples, loss))
        self.samples += samples

    def forget(self, keep: int) -> None:
        """Drop all rows but the newest: what a resumption does again before them counts twice."""
        del self.rows[: max(0, len(self.rows) - keep)]

    @property
    def step(self) -> int:
        """The newest step, 0 if there is none."""
        return self.rows[-1][0] if self.rows else 0

    def end_loss(self, last: int = 20) -> float:
        """Give the sample-weighted mean loss of the ``last`` steps; NaN if none is finite."""
        tail = [row for row in self.rows[-last:] if math.isfinite(row[2])]
        weight = sum(max(1, samples) for _, samples, _ in tail)
        if not tail:
            return math.nan
        return sum(max(1, samples) * loss for _, samples, loss in tail) / weight
