"""Words and parts as messages; whatever arrives is checked before it is used."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Final, TypeVar

from geo_ray.errors import FrameError
from geo_ray.overlay.messages import (
    Commit,
    Fetch,
    Orders,
    Ready,
    SegmentAck,
    SegmentPart,
    Sent,
    Starved,
    Stuck,
    Want,
    Whole,
    Word,
)
from geo_ray.overlay.plan import PROBE, RESULT, SUM, SendOrder
from geo_ray.transport.wire.frames import view_of
from geo_ray.transport.wire.message import CONTROL, DATA, Message, natural, text
from geo_ray.transport.wire.meta import Meta, Scalar

WORD: Final = "overlay"
PART: Final = "overlay_part"

_ABOUT: Final = "a."  # begins the names of what a caller added
_MAX_MASK: Final = 2**62
T = TypeVar("T")


def part_message(part: SegmentPart) -> Message:
    """A part on its way; its bytes are not copied."""
    meta: Meta = {
        "rnd": part.rnd,
        "attempt": part.attempt,
        "phase": part.phase,
        "index": part.index,
        "mask": part.mask,
        "weight": part.weight,
        "ack": part.wants_ack,
        "acked": part.acked,
    }
    return Message(PART, meta, part.data, "update" if part.phase == SUM else "reply", DATA)


def read_part(message: Message) -> SegmentPart:
    """The inverse of `part_message`.

    Raises:
        FrameError: a field is missing, or of the wrong type or range.
    """
    meta = message.meta
    return SegmentPart(
        rnd=natural(meta, "rnd"),
        attempt=natural(meta, "attempt"),
        phase=_below(meta, "phase", RESULT + 1),
        index=natural(meta, "index"),
        mask=_below(meta, "mask", _MAX_MASK),
        weight=_number(meta, "weight"),
        wants_ack=meta.get("ack") is True,
        data=view_of(message.payload),
        acked=natural(meta, "acked"),
    )


def word_message(word: Word) -> Message:
    """A word on its way."""
    if isinstance(word, SegmentAck):
        return Message(WORD, {"word": "Ack", "count": word.count}, b"", "control", CONTROL)
    meta: Meta = {"word": type(word).__name__, "rnd": word.rnd}
    if isinstance(word, Ready | Commit):
        meta |= {_ABOUT + name: value for name, value in word.about.items()}
    if isinstance(word, Orders | Sent | Commit):
        meta["attempt"] = word.attempt
    if isinstance(word, Orders):
        meta |= _put_sends(word.sends)
    elif isinstance(word, Sent):
        meta |= _put_sends((word.send,))
        meta |= {"bytes": word.size_bytes, "busy_s": word.busy_s, "starved": word.starved}
    elif isinstance(word, Stuck):
        meta["dst"] = word.dst
    elif isinstance(word, Fetch):
        meta["source"] = word.source
    elif isinstance(word, Want):
        meta |= {"first": [a for a, _ in word.ranges], "stop": [b for _, b in word.ranges]}
    return Message(WORD, meta, b"", "control", CONTROL)


def read_word(message: Message, sender: int, me: int, num_regions: int) -> Word:
    """The inverse of `word_message`.

    Args:
        message: what arrived.
        sender: number of the region that sent it.
        me: number of this region.
        num_regions: N.

    Raises:
        FrameError: a field is missing, or of the wrong type or range.
    """
    meta = message.meta
    name = text(meta, "word")
    if name == "Ack":
        return SegmentAck(natural(meta, "count"))
    rnd = natural(meta, "rnd")
    plain: dict[str, Callable[[], Word]] = {
        "Ready": lambda: Ready(rnd, _about(meta)),
        "Commit": lambda: Commit(rnd, natural(meta, "attempt"), _about(meta)),
        "Orders": lambda: Orders(rnd, natural(meta, "attempt"), _sends(meta, me, num_regions)),
        "Sent": lambda: _sent(meta, rnd, sender, num_regions),
        "Whole": lambda: Whole(rnd),
        "Stuck": lambda: Stuck(rnd, _below(meta, "dst", num_regions)),
        "Starved": lambda: Starved(rnd),
        "Fetch": lambda: Fetch(rnd, _below(meta, "source", num_regions)),
        "Want": lambda: Want(rnd, tuple(zip(*_lists(meta, "first", "stop"), strict=True))),
    }
    if name not in plain:
        raise FrameError(f"a bridge says {name!r:.40}, which nobody knows")
    return plain[name]()


def _put_sends(sends: tuple[SendOrder, ...]) -> Meta:
    return {
        "dst": [send.dst for send in sends],
        "phase": [send.phase for send in sends],
        "first": [send.first for send in sends],
        "stop": [send.stop for send in sends],
        "need": [send.need for send in sends],
    }


def _sends(meta: Meta, src: int, num_regions: int) -> tuple[SendOrder, ...]:
    rows = zip(*_lists(meta, "dst", "phase", "first", "stop", "need"), strict=True)
    sends = tuple(SendOrder(src, *row) for row in rows)
    for send in sends:
        fits = send.dst < num_regions and send.phase <= PROBE and send.first < send.stop
        if not fits or send.need >= _MAX_MASK:
            raise FrameError(f"an order makes no sense: {send}")
    return sends


def _sent(meta: Meta, rnd: int, src: int, num_regions: int) -> Sent:
    sends = _sends(meta, src, num_regions)
    if len(sends) != 1:
        raise FrameError(f"a transfer of {len(sends)} orders")
    attempt, size_bytes = natural(meta, "attempt"), natural(meta, "bytes")
    busy_s, starved = _number(meta, "busy_s"), meta.get("starved") is True
    return Sent(rnd, attempt, sends[0], size_bytes, busy_s, starved)


def _about(meta: Meta) -> Meta:
    return {
        name.removeprefix(_ABOUT): value for name, value in meta.items() if name.startswith(_ABOUT)
    }


def _below(meta: Meta, name: str, limit: int) -> int:
    value = natural(meta, name)
    if value >= limit:
        raise FrameError(f"a frame's {name!r} is {value}, which is not below {limit}")
    return value


def _number(meta: Meta, name: str) -> float:
    value: Scalar | list[Scalar] = meta.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FrameError(f"a frame's {name!r} is {value!r:.100} instead of a number")
    if not isfinite(value) or value < 0:
        raise FrameError(f"a frame's {name!r} is {value}")
    return float(value)


def _lists(meta: Meta, *names: str) -> list[list[int]]:
    """Lists of natural numbers, all of one length."""
    lists = []
    for name in names:
        values = meta.get(name)
        if not isinstance(values, list):
            raise FrameError(f"a frame's {name!r} is no list")
        lists.append([natural({name: value}, name) for value in values])
    if len({len(values) for values in lists}) > 1:
        raise FrameError(f"lists {names} of unequal lengths")
    return lists
