"""What arrives from one peer: in order, each message once, one callback at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from geo_ray.errors import FrameError
from geo_ray.wan.connection import Connection
from geo_ray.wan.message import Message

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


class Inbox:
    """Delivers a peer's messages over any number of its connections and incarnations.

    Args:
        peer: the peer's region.
        callbacks: see there; an exception from one is logged and ends nothing.
    """

    def __init__(self, peer: str, callbacks: Callbacks) -> None:
        self._peer = peer
        self._callbacks = callbacks
        # Held from taking a number until its handler returned: keeps the order over reconnects.
        self._delivering = threading.Lock()
        self._lock = threading.Lock()  # guards the three below, only ever for a moment
        self._epoch = -1
        self._received = 0
        self._duplicates = 0
        self._told_up: tuple[Connection, int] | None = None  # guarded by _delivering

    @property
    def received(self) -> int:
        """Number of the last message of the peer's present incarnation."""
        with self._lock:
            return self._received

    @property
    def duplicates(self) -> int:
        """How many messages arrived more than once, so far."""
        with self._lock:
            return self._duplicates

    def begin_anew(self, epoch: int) -> None:
        """A new incarnation of the peer counts from 1; its predecessor's messages are void."""
        with self._lock:
            self._epoch, self._received = epoch, 0

    def deliver(
        self, epoch: int, number: int, message: Message, on_taken: Callable[[], None]
    ) -> bool:
        """Hand a message to the user, unless it was before.

        Args:
            epoch: of the incarnation that the message's connection belongs to.
            number: the message's.
            message: what to deliver.
            on_taken: called before the user's handler, when the message counts as received.

        Returns:
            False for a duplicate.

        Raises:
            FrameError: messages before this one are missing.
        """
        with self._delivering:
            with self._lock:
                if epoch != self._epoch or number <= self._received:
                    self._duplicates += 1
                    return False
                if number != self._received + 1:
                    raise FrameError(
                        f"message {number} of region {self._peer} follows {self._received}"
                    )
                self._received = number
            on_taken()
            try:
                self._callbacks.on_message(self._peer, message)
            except Exception:
                _LOGGER.exception(
                    "the handler failed for message %r of region %s", message.kind, self._peer
                )
        return True

    def tell_up(self, connection: Connection, epoch: int) -> None:
        """The peer is connected; an older connection of it that is not done yet went down."""
        with self._delivering:
            if self._told_up is not None:
                self._tell(self._told_up[1], is_up=False)
            self._told_up = (connection, epoch)
            self._tell(epoch, is_up=True)

    def tell_down(self, connection: Connection) -> None:
        """The connection ended."""
        with self._delivering:
            if self._told_up is not None and self._told_up[0] is connection:
                self._tell(self._told_up[1], is_up=False)
                self._told_up = None

    def _tell(self, epoch: int, *, is_up: bool) -> None:
        try:
            self._callbacks.on_peer(self._peer, epoch, is_up)
        except Exception:
            _LOGGER.exception("on_peer failed for region %s", self._peer)
