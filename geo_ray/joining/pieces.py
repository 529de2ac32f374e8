"""Large payloads between a rank and the averagers, in pieces.

Neither end needs memory for a payload next to the vectors that it is computed from and merged into:
a piece is computed when it is sent, and merged when it arrives. A header names the number of
elements (``size``), and the pieces follow it in order. Encoded payloads are not divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from geo_ray.base.errors import FrameError
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.wire_format import as_bytes, as_tensor, payload_bytes
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.message import Message

PIECE: Final = "piece"
"""Kind of the messages that follow a header."""

SIZE: Final = "size"
"""Field of a header: elements that follow it."""

LAST: Final = "last"
"""Field of a payload's last piece."""

_LEAST: Final = 1 << 16  # elements of a piece
_MOST: Final = 256  # pieces of a payload; an endpoint queues a quarter of so many messages


def piece_ranges(size: int) -> Iterator[tuple[int, int]]:
    """Return the pieces of so many elements, as (start, stop)."""
    step = max(_LEAST, -(-size // _MOST))
    return ((start, min(size, start + step)) for start in range(0, size, step))


def divided(
    meta: Meta,
    message: UpdateMessage | ReplyMessage,
    values: Callable[[int, int], Tensor] | None = None,
) -> Iterator[Message]:
    """Return an update or an answer about a slice as messages, which are sent in this order.

    Args:
        meta: header with the number of the slice.
        message: update or answer.
        values: returns elements of the payload, when the message with them is asked for; None:
            those of ``message``.
    """
    kind = "update" if isinstance(message, UpdateMessage) else "reply"
    payload_Q = message.payload_P
    size = payload_Q.numel()
    if message.coded is None and size > _LEAST:
        header = replace(message, payload_P=torch.empty(0))
        yield Message(kind, {**meta, SIZE: size}, payload_bytes(header), kind)
        for start, stop in piece_ranges(size):
            piece = payload_Q[start:stop] if values is None else values(start, stop)
            last: Meta = {LAST: True} if stop == size else {}
            yield Message(PIECE, {"slice": meta["slice"], **last}, as_bytes(piece), kind)
        return
    if message.coded is None and values is not None:
        message = replace(message, payload_P=values(0, size))
    yield Message(kind, meta, payload_bytes(message), kind)


class Arriving:
    """Counts the elements of a payload of which the pieces arrive.

    Args:
        size: elements of the payload.
    """

    def __init__(self, size: int) -> None:
        self._size, self._count = size, 0

    @property
    def is_complete(self) -> bool:
        """Whether all pieces have arrived."""
        return self._count == self._size

    def take(self, message: Message) -> tuple[int, Tensor]:
        """Return the first element of the next piece, and its values.

        Raises:
            FrameError: the payload has fewer elements.
        """
        values, start = as_tensor(memoryview(message.payload)), self._count
        if not 0 < values.numel() <= self._size - start:
            raise FrameError(f"a piece of {values.numel()} elements at {start} of {self._size}")
        self._count += values.numel()
        return start, values


class ArrivingPart:
    """An update of a slice whose values arrive in pieces.

    Attributes:
        update: the update.
        meta: header.

    Args:
        update: the update without its values.
        meta: header.
        size: number of values.
    """

    def __init__(self, update: UpdateMessage, meta: Meta, size: int) -> None:
        self.update, self.meta = replace(update, payload_P=torch.empty(size)), meta
        self._arriving = Arriving(size)

    @property
    def is_complete(self) -> bool:
        """Whether all values have arrived."""
        return self._arriving.is_complete

    def add(self, message: Message) -> None:
        """Add the next piece.

        Raises:
            FrameError: it does not fit.
        """
        start, values = self._arriving.take(message)
        self.update.payload_P[start : start + values.numel()] = values


def size_of(message: Message) -> int | None:
    """Return the elements that follow a header; None if it has its payload itself."""
    return fields.count(message.meta, SIZE) if SIZE in message.meta else None
