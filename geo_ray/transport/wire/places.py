"""Places that the sources of connections share fairly: pure bookkeeping, no sockets."""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

Holder = TypeVar("Holder")


class Places(Generic[Holder]):
    """A bounded number of places, and who has had them since when.

    Nothing is refused while a place is free. After that the source with most places gives one up,
    its oldest: strangers from one address cost a peer at another address nothing.

    Args:
        most: count of places.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[Holder, tuple[str, float]] = {}  # oldest first

    def __contains__(self, holder: Holder) -> bool:
        return holder in self._held

    @property
    def is_full(self) -> bool:
        """Whether no place is free."""
        return len(self._held) >= self._most

    def holders(self) -> list[Holder]:
        """Return who has a place, the oldest first."""
        return list(self._held)

    def count(self, source: str) -> int:
        """Return how many places a source has."""
        return sum(source == held for held, _ in self._held.values())

    def take(self, holder: Holder, source: str, now_s: float) -> None:
        """Give a free place to ``holder``."""
        self._held[holder] = source, now_s

    def leave(self, holder: Holder) -> None:
        """Free a place; nothing happens if the holder has none."""
        self._held.pop(holder, None)

    def victim(self, source: str, now_s: float, tenure_s: float = 0.0) -> Holder | None:
        """Return who should lose its place for a newcomer, or None.

        Args:
            source: of the newcomer.
            now_s: the time.
            tenure_s: a holder that is younger only loses its place to a newcomer whose source
                has fewer places.
        """
        counts = Counter(held for held, _ in self._held.values())
        if not counts:
            return None
        greedy, most = counts.most_common(1)[0]
        holder, since_s = next(
            (holder, since_s) for holder, (held, since_s) in self._held.items() if held == greedy
        )
        is_fair = most > counts[source] + 1 or now_s - since_s >= tenure_s
        return holder if is_fair else None
