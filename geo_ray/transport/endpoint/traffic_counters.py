"""Counters of the traffic with one peer."""

from __future__ import annotations

from collections import Counter

from geo_ray.transport.endpoint.connection import Connection


class TrafficCounters:
    """Counters over all connections of a session; the session's lock guards them.

    Attributes:
        messages_out: messages sent, resends not counted.
        messages_in: messages delivered.
        dropped_out: messages whose addressee was replaced before it had them.
        connects: connections so far.
        last_error: why the last connection ended or could not be made.
    """

    def __init__(self) -> None:
        self.messages_out = 0
        self.messages_in = 0
        self.dropped_out = 0
        self.connects = 0
        self.last_error: str | None = None
        self._live: list[Connection] = []
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()

    def open(self, connection: Connection) -> None:
        """Include a new connection's bytes from now on."""
        self.connects += 1
        self._live.append(connection)

    def close(self, connection: Connection) -> None:
        """Add the final counts of a connection whose loop has ended."""
        self._live.remove(connection)
        sent, received = connection.counts()
        for counts in sent:
            self._sent.update(counts)
        for counts in received:
            self._received.update(counts)

    def bytes_out(self) -> dict[str, int]:
        """Bytes sent by class."""
        return self._sum(self._sent, 0)

    def bytes_in(self) -> dict[str, int]:
        """Bytes received by class."""
        return self._sum(self._received, 1)

    def _sum(self, done: Counter[str], direction: int) -> dict[str, int]:
        total = Counter(done)
        for connection in self._live:
            for counts in connection.counts()[direction]:
                total.update(counts)
        return dict(sorted(total.items()))
