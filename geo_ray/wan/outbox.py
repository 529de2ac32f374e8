"""Numbered messages that wait to be sent or acknowledged: pure bookkeeping, no threads."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from geo_ray.errors import FrameError
from geo_ray.wan.message import Message


@dataclass(slots=True)
class Entry:
    """A message in the outbox.

    Attributes:
        number: counts up from 1 per direction and pair of incarnations.
        message: the message.
        size_bytes: its payload.
        times_sent: how often it was handed to a connection.
    """

    number: int
    message: Message
    size_bytes: int
    times_sent: int = 0


class Outbox:
    """What one peer has not acknowledged yet, in order.

    Args:
        max_messages: bound on the number of messages.
        max_bytes: bound on their payloads; a single larger one fits into an empty outbox.
    """

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._entries: deque[Entry] = deque()
        self._sent = 0  # how many of the entries were handed to the present connection
        self._last_number = 0
        self._last_sent = 0  # over all connections
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def has_room(self, size_bytes: int) -> bool:
        """Whether a message with that payload fits."""
        fits = self.size_bytes + size_bytes <= self._max_bytes
        return not self._entries or (len(self._entries) < self._max_messages and fits)

    def add(self, message: Message, size_bytes: int) -> int:
        """Append a message; returns its number."""
        self._last_number += 1
        self._entries.append(Entry(self._last_number, message, size_bytes))
        self.size_bytes += size_bytes
        return self._last_number

    def next_to_send(self) -> Entry | None:
        """The oldest message that the present connection has not got yet, counted as sent."""
        if self._sent == len(self._entries):
            return None
        entry = self._entries[self._sent]
        self._sent += 1
        entry.times_sent += 1
        self._last_sent = max(self._last_sent, entry.number)
        return entry

    def acknowledge(self, number: int) -> None:
        """The peer has every message up to ``number``.

        Raises:
            FrameError: it was never sent that many.
        """
        if number > self._last_sent:
            raise FrameError(
                f"the peer acknowledges message {number}, but only {self._last_sent} were sent"
            )
        # It may have got one through an earlier connection that this one has not sent again yet.
        while self._entries and self._entries[0].number <= number:
            self.size_bytes -= self._entries.popleft().size_bytes
            self._sent = max(0, self._sent - 1)

    def rewind(self, received: int) -> None:
        """A new connection: the peer has ``received`` messages, the others are sent again.

        Raises:
            FrameError: it was never sent that many.
        """
        self.acknowledge(received)
        self._sent = 0

    def restart(self) -> int:
        """The peer began anew: drop what was meant for its predecessor; returns how many."""
        dropped = len(self._entries)
        self._entries.clear()
        self._sent = self._last_number = self._last_sent = self.size_bytes = 0
        return dropped
