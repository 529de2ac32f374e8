"""What goes over the edges of a program."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from geo_ray.program.node import NodeEdge

FRAME_BYTES: Final = 256
"""What headers add to a message between regions, about."""


@dataclass(frozen=True, slots=True)
class EdgeTraffic:
    """What went over an edge: the bytes of arguments and results, without headers.

    Attributes:
        edge: who calls whom.
        calls: how many.
        request_bytes: towards the called.
        answer_bytes: back.
    """

    edge: NodeEdge
    calls: int
    request_bytes: int
    answer_bytes: int


class TrafficCounter:
    """Counts the calls of one instance, by the node that is called."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, tuple[int, int, int]] = {}

    def count(self, target: str, request_bytes: int, answer_bytes: int) -> None:
        """One call more."""
        with self._lock:
            calls, there, back = self._counts.get(target, (0, 0, 0))
            self._counts[target] = (calls + 1, there + request_bytes, back + answer_bytes)

    def counts(self) -> dict[str, list[int]]:
        """Calls and bytes there and back."""
        with self._lock:
            return {target: list(counts) for target, counts in self._counts.items()}


def traffic_of(
    edges: Iterable[NodeEdge], counted: Mapping[str, Iterable[Mapping[str, list[int]]]]
) -> tuple[EdgeTraffic, ...]:
    """Sum up by edge.

    Args:
        edges: of the program.
        counted: by the calling node, of each of its instances and incarnations.
    """
    found = []
    for edge in edges:
        counts = [c[edge.target] for c in counted.get(edge.source, ()) if edge.target in c]
        calls, there, back = (sum(c[i] for c in counts) for i in range(3))
        found.append(EdgeTraffic(edge, calls, there, back))
    return tuple(found)
