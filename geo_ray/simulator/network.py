"""The simulated wide-area network: one `LinkModel` per direction, and a count of its bytes."""

from __future__ import annotations

from collections import Counter
from operator import itemgetter

from geo_ray.experiment.experiment import Experiment
from geo_ray.transport.emulation import build_links

FRAME_BYTES = 256
"""Approximate bytes of one message's header, metadata and acknowledgement."""

DATAGRAM_BYTES = 92
"""Approximate bytes of a datagram's headers and authentication."""


class Network:
    """Arrival times of messages, and traffic of each link.

    Args:
        experiment: its ``emulate`` section describes the links; without it, messages take no time.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._links = build_links(experiment.links(), experiment.seed)
        self.sent_bytes: dict[tuple[str, str], Counter[str]] = {}
        self._cuts: list[tuple[frozenset[str], float, float]] = []

    def cut(self, a: str, b: str, from_s: float, until_s: float) -> None:
        """Partition two regions for a time; messages in flight arrive afterwards."""
        self._cuts.append((frozenset((a, b)), from_s, until_s))

    def arrival_s(
        self, now_s: float, src: str, dst: str, payload_bytes: int, traffic: str
    ) -> float:
        """Return the arrival time of the last byte of a message sent now."""
        if src == dst:
            return now_s
        size_bytes = payload_bytes + FRAME_BYTES
        self.sent_bytes.setdefault((src, dst), Counter())[traffic] += size_bytes
        link = self._links.get((src, dst))
        arrival_s = now_s if link is None else link.transfer(now_s, size_bytes)
        for ends, from_s, until_s in sorted(self._cuts, key=itemgetter(1)):
            if {src, dst} == ends and arrival_s >= from_s and now_s < until_s:
                arrival_s = max(arrival_s, until_s + self.delay_s(src, dst))
        return arrival_s

    def datagram_s(self, now_s: float, src: str, dst: str, payload_bytes: int) -> float | None:
        """Return the arrival time of a datagram sent now; None if it is lost."""
        size_bytes = payload_bytes + DATAGRAM_BYTES
        self.sent_bytes.setdefault((src, dst), Counter())["loose"] += size_bytes
        link = self._links.get((src, dst))
        return now_s if link is None else link.datagram(now_s, size_bytes)

    def free_at_s(self, src: str, dst: str) -> float:
        """Return when the sender's end of a link has nothing left to send."""
        link = self._links.get((src, dst))
        return 0.0 if link is None else link.free_at_s

    def delay_s(self, src: str, dst: str) -> float:
        """Return the one-way delay of an empty link."""
        link = self._links.get((src, dst))
        return 0.0 if link is None else link.spec.delay_s
