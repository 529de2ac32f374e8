"""When the relay wakes, and how late its rounds begin. Pure: times are given."""

from __future__ import annotations

from typing import Final

from geo_ray.lab.acceptance import LEAST_S

LEAST_PAUSE_S: Final = 50e-6  # leaves the core to others even when the relay falls behind


class RoundPace:
    """Keeps rounds a quantum apart and adds up by how much they were not.

    A round that begins late takes packets that came while it was awaited, so lateness counts from
    when the round was due or a quantum after the last one began, whichever is later: what held one
    round up is not counted for the next again, but a round that takes long itself makes the next
    one late.

    Args:
        quantum_s: between two rounds.
        notes: counters ``late_s``, ``own_s`` and ``late_max_s`` are kept here; others may reset
            them.
        now_s: the present.
    """

    __slots__ = ("_began_s", "_due_s", "_notes", "_quantum_s", "_spent_s", "_wake_s")

    def __init__(
        self, quantum_s: float, notes: dict[str, int | float | bool], now_s: float
    ) -> None:
        self._quantum_s, self._notes = quantum_s, notes
        self._wake_s = self._began_s = self._due_s = now_s
        self._spent_s = 0.0
        notes |= {"late_s": 0.0, "own_s": 0.0, "late_max_s": 0.0}

    def pause_s(self, now_s: float) -> float:
        """Return how long to sleep until the next round, while packets flow."""
        self._due_s = max(self._wake_s, self._began_s) + self._quantum_s
        self._wake_s = max(self._wake_s + self._quantum_s, now_s + LEAST_PAUSE_S)
        return self._wake_s - now_s

    def woke(self, now_s: float, due_s: float | None) -> None:
        """Note the end of an idle wait; ``due_s``: for what; None: for a packet only."""
        self._wake_s = now_s
        self._due_s = now_s if due_s is None else max(due_s, self._began_s)

    def begin(self, now_s: float, spent_s: float) -> float:
        """Begin a round.

        Args:
            now_s: the present.
            spent_s: what the relay's thread has computed so far.

        Returns:
            By how much it is late; 0 if that is at most `LEAST_S`.
        """
        computed_s = spent_s - self._spent_s
        self._began_s, self._spent_s = now_s, spent_s
        late_s = now_s - self._due_s
        if late_s <= LEAST_S:
            return 0.0
        notes = self._notes
        notes["late_s"] += late_s
        notes["own_s"] += min(late_s, max(0.0, computed_s - self._quantum_s))
        notes["late_max_s"] = max(notes["late_max_s"], late_s)
        return late_s
