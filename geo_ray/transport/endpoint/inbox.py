"""What arrives from one peer goes to the user: in order, each message once, one call at a time."""

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
    """What an endpoint's user wants to hear; never two at the same time for one peer.

    Attributes:
        on_message: (peer's region, message), in order, each once.
        on_peer: (peer's region, its epoch, whether it is connected now).
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
        callbacks: see there; an exception from one is logged and ends nothing.
        on_taken: called with a message that counts as received, before the user's handler.
    """

    def __init__(
        self, peer: str, callbacks: Callbacks, on_taken: Callable[[Message], None]
    ) -> None:
        self._peer = peer
        self._callbacks = callbacks
        self._on_taken = on_taken
        self._changed = threading.Condition()  # guards the rest; not held in a callback
        self._news: deque[_News] = deque()
        self._epoch = -1
        self._delivered = [0] * LANES
        self._closed = False

    @property
    def delivered(self) -> list[int]:
        """By lane, the number of the last message of the peer's present incarnation."""
        with self._changed:
            return list(self._delivered)

    def begin_anew(self, epoch: int) -> None:
        """A new incarnation of the peer counts from 1; its predecessor's messages are void."""
        with self._changed:
            self._epoch, self._delivered = epoch, [0] * LANES

    def add(self, epoch: int, messages: list[Message]) -> None:
        """Messages that are whole, in the order of their lane."""
        self._append([_News(epoch, message) for message in messages])

    def tell_peer(self, epoch: int, *, is_up: bool) -> None:
        """The peer is connected, or is so no more."""
        self._append([_News(epoch, is_up=is_up)])

    def close(self) -> None:
        """Let `run` end when it has delivered what is there."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def run(self) -> None:
        """Deliver until closed; one thread only."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._news)
                if not self._news:
                    return
                news = self._news.popleft()
                if news.message is not None:
                    if news.epoch != self._epoch or self._closed:
                        continue
                    self._delivered[news.message.lane] += 1
            try:
                if news.message is not None:
                    self._on_taken(news.message)
                    self._callbacks.on_message(self._peer, news.message)
                else:
                    self._callbacks.on_peer(self._peer, news.epoch, news.is_up)
            except Exception:
                what = "a change" if news.message is None else f"message {news.message.kind!r}"
                _LOGGER.exception("the handler failed for %s of region %s", what, self._peer)

    def _append(self, news: list[_News]) -> None:
        with self._changed:
            self._news.extend(news)
            self._changed.notify_all()
