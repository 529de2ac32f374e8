"""Words and parts survive the wire, and what does not fit is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from geo_ray.base.errors import FrameError
from geo_ray.transport.overlay.messages import (
    CONTROL_MESSAGE,
    PART,
    Commit,
    ControlMessage,
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
    control_message,
    part_message,
    read_control,
    read_part,
)
from geo_ray.transport.overlay.plan import RESULT, SUM, SendOrder
from geo_ray.transport.wire.fields import Meta, decode_meta, encode_meta
from geo_ray.transport.wire.message import CONTROL, DATA, Message

WORDS: list[ControlMessage] = [
    Ready(3, {"region": "eu", "seq": 3, "final": False}),
    Orders(3, 1, (SendOrder(2, 0, SUM, 1, 4, 2**59), SendOrder(2, 1, RESULT, 0, 9))),
    Orders(3, 1, ()),
    SegmentAck(17),
    Sent(3, 0, SendOrder(1, 2, SUM, 0, 4, 6), 4096, 0.25, True),
    Whole(3),
    Stuck(3, 2),
    Starved(3),
    Fetch(3, 1),
    Want(3, ((0, 4), (9, 11))),
    Commit(3, 2, {"to": "eu", "version": 8, "checkpoint": None}),
]
PARTS = SegmentPart(3, 1, SUM, 7, 0b110, 2.5, True, b"\0" * 8, 5)


def carried(message: Message) -> Message:
    meta = decode_meta(encode_meta(message.meta))
    return Message(message.kind, meta, bytes(message.payload), message.traffic, message.lane)


@pytest.mark.parametrize("word", WORDS, ids=lambda word: type(word).__name__)
def test_messages_come_back_as_they_were(word: ControlMessage) -> None:
    message = carried(control_message(word))
    assert message.kind == CONTROL_MESSAGE and message.lane == CONTROL
    me = 2 if isinstance(word, Orders) else 0
    assert read_control(message, sender=1, me=me, num_regions=3) == word


def test_names_on_the_wire_are_not_those_of_classes() -> None:
    told = {control_message(word).meta["word"] for word in WORDS}
    assert told == {
        *("Ready", "Orders", "Ack", "Sent", "Whole"),
        *("Stuck", "Starved", "Fetch", "Want", "Commit"),
    }


@pytest.mark.parametrize(("phase", "traffic"), [(SUM, "update"), (RESULT, "reply")])
def test_parts_come_back_as_they_were_and_are_accounted(phase: int, traffic: str) -> None:
    part = replace(PARTS, phase=phase)
    message = carried(part_message(part))
    assert (message.kind, message.lane, message.traffic) == (PART, DATA, traffic)
    found = read_part(message)
    assert replace(found, data=bytes(found.data)) == part


BAD: list[Meta] = [
    {},
    {"word": "Obey", "rnd": 1},
    {"word": "Ack"},
    {"word": "Ack", "count": -1},
    {"word": "Ack", "count": "1"},
    {"word": "Ack", "count": True},
    {"word": "Whole", "rnd": 1.0},
    {"word": "Fetch", "rnd": 1, "source": 3},
    {"word": "Stuck", "rnd": 1, "dst": 3},
    {"word": "Want", "rnd": 1, "first": [0], "stop": [1, 2]},
    {"word": "Want", "rnd": 1, "first": [0], "stop": 1},
    {"word": "Want", "rnd": 1, "first": [-1], "stop": [1]},
    {"word": "Commit", "rnd": 1},
]


@pytest.mark.parametrize("meta", BAD, ids=str)
def test_words_that_do_not_fit_are_refused(meta: Meta) -> None:
    with pytest.raises(FrameError):
        read_control(Message(CONTROL_MESSAGE, meta, b"", "control"), sender=1, me=0, num_regions=3)


@pytest.mark.parametrize(
    "change",
    [
        {"dst": [3]},
        {"phase": [3]},
        {"first": [4]},
        {"need": [2**62]},
        {"dst": [0, 1]},
        {"busy_s": float("nan")},
        {"busy_s": -1.0},
        {"busy_s": "long"},
        {"bytes": -1},
    ],
    ids=str,
)
def test_reports_that_do_not_fit_are_refused(change: Meta) -> None:
    message = control_message(Sent(3, 0, SendOrder(1, 2, SUM, 0, 4, 6), 4096, 0.25))
    with pytest.raises(FrameError):
        read_control(replace(message, meta=message.meta | change), sender=1, me=0, num_regions=3)


@pytest.mark.parametrize(
    "change",
    [
        {"phase": 2},
        {"index": -1},
        {"mask": 2**62},
        {"weight": float("inf")},
        {"weight": -1.0},
        {"weight": True},
        {"attempt": None},
        {"acked": "all"},
    ],
    ids=str,
)
def test_parts_that_do_not_fit_are_refused(change: Meta) -> None:
    message = part_message(PARTS)
    with pytest.raises(FrameError):
        read_part(replace(message, meta=message.meta | change))
