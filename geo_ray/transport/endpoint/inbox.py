"""Delivers a peer's messages to the user: in order, each once, one call at a time."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from geo_ray.transport.wire.message import LANES, Message

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Callbacks:
    """The callbacks of an endpoint's user; calls for one peer never overlap.

    Attributes:
        on_message: takes (peer's region, message), in order, each message once.
        on_peer: takes (peer's region, its epoch, whether it is connected now).
    """

    on_message: Callable[[str, Message], None]
    on_peer: Callable[[str, int, bool], None]


@dataclass(frozen=True, slots=True)
class _News:
    epoch: int
    message: Message | None = None
    is_up: bool = False


class Inbox:
    """Delivers a peer's messages over any number of its connections and incarnations.

    Args:
        peer: the peer's region.
        callbacks: the user's callbacks; an exception from one is logged and ends nothing.
        on_next: called with (epoch, message) of the message that comes next, before it counts as
            received: the peer may have sent another in its place when it does.
        on_taken: called with a message that counts as received, before the user's handler.
    """

    def __init__(
        self,
        peer: str,
        callbacks: Callbacks,
        on_next: Callable[[int, Message], None],
        on_taken: Callable[[Message], None],
    ) -> None:
        self._peer = peer
        self._callbacks = callbacks
        self._on_next = on_next
        self._on_taken = on_taken
        self._changed = threading.Condition()  # guards the rest; not held in a callback
        self._news: deque[_News] = deque()
        self._epoch = -1
        self._delivered = [0] * LANES
        self._closed = False

    @property
    def delivered(self) -> list[int]:
        """Return, by lane, the number of the last delivered message of the present incarnation."""
        with self._changed:
            return list(self._delivered)

    def begin_anew(self, epoch: int) -> None:
        """Count from 1 for a new incarnation of the peer, and drop its predecessor's messages."""
        with self._changed:
            self._epoch, self._delivered = epoch, [0] * LANES

    def add(self, epoch: int, messages: list[Message]) -> None:
        """Queue complete messages, in the order of their lane."""
        self._append([_News(epoch, message) for message in messages])

    def tell_peer(self, epoch: int, *, is_up: bool) -> None:
        """Queue the news that the peer is connected or disconnected."""
        self._append([_News(epoch, is_up=is_up)])

    def close(self) -> None:
        """End `run` once it has delivered what is queued."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def run(self) -> None:
        """Deliver messages until closed; only one thread may run it."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._news)
                if not self._news:
                    return
                news = self._news.popleft()
            if news.message is not None and not self._count(news.epoch, news.message):
                del news
                continue
            try:
                if news.message is not None:
                    self._on_taken(news.message)
                    self._callbacks.on_message(self._peer, news.message)
                else:
                    self._callbacks.on_peer(self._peer, news.epoch, news.is_up)
            except Exception:
                what = "a change" if news.message is None else f"message {news.message.kind!r}"
                _LOGGER.exception("the handler failed for %s of region %s", what, self._peer)
            del news  # not held while the next one is awaited: a payload may be a whole model

    def _count(self, epoch: int, message: Message) -> bool:
        """Count a message as received; return False for one that is not wanted any more."""
        self._on_next(epoch, message)
        with self._changed:
            is_wanted = epoch == self._epoch and not self._closed
            if is_wanted:
                self._delivered[message.lane] += 1
            return is_wanted

    def _append(self, news: list[_News]) -> None:
        with self._changed:
            self._news.extend(news)
            self._changed.notify_all()
