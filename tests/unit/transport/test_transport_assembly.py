"""Chunks become messages, whatever comes twice, late or wrong."""

from __future__ import annotations

import numpy as np
import pytest

from geo_ray.base.errors import FrameError, TransportError
from geo_ray.transport.session import Assembly, HeldBytes
from geo_ray.transport.wire.message import DATA, Message, Piece


def _piece(number: int, offset: int, size_bytes: int, lane: int = DATA) -> Piece:
    message = Message("test", {"n": number}, b"", "update", lane) if not offset else None
    return Piece(lane, number, offset, size_bytes, "update", message)


def _give(assembly: Assembly, piece: Piece, data: bytes) -> tuple[bool, list[int]]:
    place = assembly.place(piece, len(data), lambda: None)
    place[:] = data
    is_new, messages = assembly.complete(piece, place)
    return is_new, [int(str(message.meta["n"])) for message in messages]


def test_messages_come_in_order_whatever_order_their_chunks_have() -> None:
    assembly = Assembly(8, 4000, 1000, HeldBytes())
    assert _give(assembly, _piece(2, 0, 3), b"two") == (True, [])
    assert _give(assembly, _piece(1, 4, 6), b"EF") == (True, [])
    assert _give(assembly, _piece(3, 0, 0), b"") == (True, [])
    assert _give(assembly, _piece(1, 0, 6, lane=0), b"CTRL!!") == (True, [1])
    place = assembly.place(_piece(1, 0, 6), 4, lambda: None)
    place[:] = b"abcd"
    is_new, messages = assembly.complete(_piece(1, 0, 6), place)
    assert is_new and [bytes(m.payload) for m in messages] == [b"abcdEF", b"two", b""]


def test_a_chunk_that_comes_twice_counts_once() -> None:
    assembly = Assembly(8, 4000, 1000, HeldBytes())
    for _ in range(2):
        _give(assembly, _piece(1, 4, 8), b"wxyz")
    assert assembly.duplicates == 1
    assert _give(assembly, _piece(1, 0, 8), b"abcd") == (True, [1])
    assert _give(assembly, _piece(1, 0, 8), b"????") == (False, [])
    assert assembly.duplicates == 2


def test_the_copy_that_is_complete_first_counts_and_the_other_writes_elsewhere() -> None:
    assembly = Assembly(8, 4000, 1000, HeldBytes())
    diverted: list[str] = []
    slow = assembly.place(_piece(1, 0, 4), 4, lambda: diverted.append("slow"))
    fast = assembly.place(_piece(1, 0, 4), 4, lambda: diverted.append("fast"))
    assert not np.shares_memory(np.asarray(slow), np.asarray(fast))
    fast[:] = b"good"
    is_new, messages = assembly.complete(_piece(1, 0, 4), fast)
    assert is_new and bytes(messages[0].payload) == b"good" and diverted == ["slow"]


def test_a_stream_that_dies_leaves_the_place_to_another() -> None:
    assembly = Assembly(8, 4000, 1000, HeldBytes())

    def divert() -> None:
        raise AssertionError("nobody is to be diverted")

    first = assembly.place(_piece(1, 0, 4), 4, divert)
    first[:2] = b"ba"
    assembly.abandon(_piece(1, 0, 4), divert)
    second = assembly.place(_piece(1, 0, 4), 4, divert)
    second[:] = b"good"
    assert bytes(assembly.complete(_piece(1, 0, 4), second)[1][0].payload) == b"good"


@pytest.mark.parametrize(
    ("piece", "size_bytes", "words"),
    [
        (_piece(1, 0, 3), 4, "a chunk of 4 bytes at 0 of a payload of 3"),
        (_piece(1, 2**62, 2**62), 4, "a payload of"),
        (_piece(1, 0, 2000), 4, "limit 1000"),
        (_piece(10, 0, 4), 4, "message 10 of lane 1 follows 0"),
        (_piece(1, 0, 9), 4, "disagree on the length of message 1"),
        (_piece(2, 0, 5), 0, "a chunk of 0 bytes"),
    ],
)
def test_chunks_that_do_not_fit_are_refused(piece: Piece, size_bytes: int, words: str) -> None:
    assembly = Assembly(8, 4000, 1000, HeldBytes())
    _give(assembly, _piece(1, 0, 8), b"abcd")
    with pytest.raises(FrameError, match=words):
        assembly.place(piece, size_bytes, lambda: None)


def test_chunks_that_overlap_are_refused() -> None:
    assembly = Assembly(8, 4000, 1000, HeldBytes())
    _give(assembly, _piece(1, 0, 6), b"abcd")
    with pytest.raises(FrameError, match="overlapping"):
        _give(assembly, _piece(1, 3, 6), b"xy")


def test_a_partial_message_is_held_until_its_handler_is_called() -> None:
    held = HeldBytes()
    assembly = Assembly(8, 100, 1000, held)
    assert _give(assembly, _piece(2, 0, 60), bytes(60)) == (True, [])  # complete, after a gap
    assert _give(assembly, _piece(1, 0, 40), bytes(40)) == (True, [1, 2])
    with pytest.raises(FrameError, match="101 bytes under way in lane 1; limit 100"):
        assembly.place(_piece(3, 0, 1), 1, lambda: None)
    assert held.held_bytes == 100
    assembly.place(_piece(1, 0, 1000, lane=DATA + 1), 4, lambda: None)  # one always passes
    assembly.delivered(DATA, 40)
    assert _give(assembly, _piece(3, 0, 40), bytes(40)) == (True, [3])
    assert held.held_bytes == 1100
    assembly.restart()
    assert held.held_bytes == 0


def test_messages_that_wait_for_their_handlers_are_counted_however_small() -> None:
    assembly = Assembly(8, 100, 1000, HeldBytes())
    for number in range(1, 9):
        _give(assembly, _piece(number, 0, 0), b"")
    with pytest.raises(FrameError, match="message 9 of lane 1 follows 0"):
        _give(assembly, _piece(9, 0, 0), b"")
    assembly.delivered(DATA, 0)
    _give(assembly, _piece(9, 0, 0), b"")


def test_all_peers_together_have_a_bound() -> None:
    held = HeldBytes(1500)
    one, other = (Assembly(8, 4000, 4000, held) for _ in range(2))
    one.place(_piece(1, 0, 1000), 4, lambda: None)
    with pytest.raises(TransportError, match="2000 bytes would wait for their handlers"):
        other.place(_piece(1, 0, 1000), 4, lambda: None)
    assert HeldBytes().held_bytes == 0
    one.restart()
    other.place(_piece(1, 0, 3000), 4, lambda: None)  # one always passes


def test_a_new_incarnation_begins_from_nothing() -> None:
    assembly = Assembly(8, 4000, 1000, HeldBytes())
    _give(assembly, _piece(1, 0, 2), b"ab")
    _give(assembly, _piece(2, 0, 4), b"ab")
    assembly.restart()
    assert _give(assembly, _piece(1, 0, 2), b"cd") == (True, [1])
