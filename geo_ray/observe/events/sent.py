"""What each pair of regions has sent until a certain time, from `wan` events."""

from __future__ import annotations

from collections import defaultdict

from geo_ray.observe.events.schema import Event
from geo_ray.observe.metrics.counters import Link, LinkTotals


class SentUntil:
    """Bytes on the wire by (source, destination) until a given time.

    Between two events of a pair, bytes are taken to have been sent evenly. The simulator writes its
    events with every evaluation, so at those times the numbers are exact.

    Args:
        until_s: seconds since the start of the run; infinity for the whole run.
    """

    def __init__(self, until_s: float) -> None:
        self._until_s = until_s
        self._books = LinkTotals()
        self._total: dict[Link, int] = defaultdict(int)
        self._before: dict[Link, tuple[float, int]] = {}
        self._after: dict[Link, tuple[float, int]] = {}

    def feed(self, event: Event) -> None:
        """Take the next event."""
        if event.kind == "run_started":
            self._books.restart()
        if event.kind != "wan":
            return
        link = (event["src"], event["dst"])
        self._total[link] += sum(self._books.feed(*link, event["bytes_by_class"]).values())
        now = (event.t_s, self._total[link])
        if event.t_s <= self._until_s:
            self._before[link] = now
        else:
            self._after.setdefault(link, now)

    def by_link(self) -> dict[Link, float]:
        """Give the bytes by (source, destination), of pairs that have sent any by then."""
        found = {link: self._at(link) for link in self._total}
        return {link: count for link, count in found.items() if count}

    def _at(self, link: Link) -> float:
        t0_s, low = self._before.get(link, (0.0, 0))
        if link not in self._after:
            return float(low)
        t1_s, high = self._after[link]
        return low + (high - low) * (self._until_s - t0_s) / (t1_s - t0_s)
