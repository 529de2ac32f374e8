"""Bounds what all peers' messages together hold in memory before their handlers are called."""

from __future__ import annotations

import os
import threading
from typing import Final

from geo_ray.errors import TransportError

_SHARE_OF_MEMORY: Final = 0.75


class HeldBytes:
    """Counts the payloads that an endpoint holds; any thread may call.

    Args:
        most_bytes: bound on them; None takes three quarters of this machine's memory.
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most_bytes = _machine_bytes() if most_bytes is None else most_bytes
        self._lock = threading.Lock()
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """How much is held now."""
        return self._held_bytes

    def take(self, size_bytes: int) -> None:
        """Count a message that begins to arrive; one always passes.

        Raises:
            TransportError: there is no room for it now.
        """
        with self._lock:
            held_bytes = self._held_bytes + size_bytes
            if self._held_bytes and held_bytes > self._most_bytes:
                raise TransportError(
                    f"messages of {held_bytes} bytes would wait for their handlers; limit "
                    f"{self._most_bytes} (max_held_bytes)",
                    fix="Raise `transport.max_held_bytes`, or let fewer regions send at a time.",
                )
            self._held_bytes = held_bytes

    def give_back(self, size_bytes: int) -> None:
        """Count a message that was delivered or dropped."""
        with self._lock:
            self._held_bytes -= size_bytes


def _machine_bytes() -> int:
    return int(_SHARE_OF_MEMORY * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
