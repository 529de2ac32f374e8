"""Numbered messages, so that each is handled once although the server may be replaced.

The transport delivers each message once between two living processes. If a standby replaces the
server, messages that only the lost process had are sent again: the sender keeps a message until the
receiver has confirmed it, and the receiver drops what it has already. Numbers count the messages of
each lane from 1, because lanes overtake each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from geo_ray.base.errors import FrameError
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.message import LANES, Message

_NUMBER: Final = "link_number"
INCARNATION: Final = "link_incarnation"
HAVE: Final = "link_have"
"""Fields of a rank's messages: start of its process, and messages of the server that it has."""
_FIELDS: Final = (_NUMBER, INCARNATION, HAVE)


@dataclass(slots=True)
class UnconfirmedMessages:
    """The messages to one receiver that it has not confirmed.

    Attributes:
        keeps: whether unconfirmed messages are kept.
        confirmed: messages of each lane that the receiver has.
    """

    keeps: bool = True
    confirmed: list[int] = field(default_factory=lambda: [0] * LANES)
    _sent: list[int] = field(default_factory=lambda: [0] * LANES)
    _kept: list[deque[Message]] = field(default_factory=lambda: [deque() for _ in range(LANES)])

    def add(self, message: Message) -> Message:
        """Return the next message with its number."""
        self._sent[message.lane] += 1
        numbered = replace(message, meta={**message.meta, _NUMBER: self._sent[message.lane]})
        if self.keeps:
            self._kept[message.lane].append(numbered)
        return numbered

    def withdraw(self, message: Message) -> None:
        """Forget the newest message of a lane, which could not be sent."""
        self._sent[message.lane] -= 1
        if self.keeps:
            self._kept[message.lane].pop()

    def confirm(self, counts: Sequence[int]) -> None:
        """Forget the messages that the receiver has.

        Args:
            counts: messages of each lane that it has.

        Raises:
            FrameError: it cannot have so many.
        """
        if len(counts) != LANES or any(n > m for n, m in zip(counts, self._sent, strict=True)):
            raise FrameError(f"{[*counts]} messages are confirmed; {self._sent} were sent")
        for lane, number in enumerate(counts):
            kept = self._kept[lane]
            while kept and number_of(kept[0]) <= number:
                kept.popleft()
            self.confirmed[lane] = max(self.confirmed[lane], number)

    def copy_payloads(self) -> None:
        """Replace payloads, which may be views of memory, by bytes."""
        for kept in self._kept:
            for _ in range(len(kept)):
                kept.append(copied(kept.popleft()))

    @property
    def unconfirmed(self) -> list[Message]:
        """The messages to send again after the receiver was replaced; lanes in their order."""
        return [message for kept in self._kept for message in kept]


@dataclass(slots=True)
class ReceivedCounts:
    """What was received from one sender.

    Attributes:
        counts: messages of each lane.
    """

    counts: list[int] = field(default_factory=lambda: [0] * LANES)

    def take(self, message: Message) -> Message | None:
        """Return the next message of its lane without the fields of this module.

        None is returned for others: a duplicate, or one that overtook an earlier message, after
        which it will be sent again.

        Raises:
            FrameError: the message has no number.
        """
        if number_of(message) != self.counts[message.lane] + 1:
            return None
        self.counts[message.lane] += 1
        return replace(message, meta={k: v for k, v in message.meta.items() if k not in _FIELDS})


def copied(message: Message) -> Message:
    """Return a message with its own copy of the payload."""
    return replace(message, payload=bytes(message.payload))


def number_of(message: Message) -> int:
    """Return the number of a message.

    Raises:
        FrameError: it has none.
    """
    return fields.count(message.meta, _NUMBER)
