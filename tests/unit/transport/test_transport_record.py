"""A table of fields writes a header and reads it back; what does not fit is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from geo_ray.base.errors import FrameError
from geo_ray.transport.wire.fields import Meta, amount, below, count, text
from geo_ray.transport.wire.record import CountList, Field, Known, OneOf, Only, Record, Rows


@dataclass(frozen=True)
class Place:
    name: str
    floor: int | None = None


@dataclass(frozen=True)
class Move:
    who: str
    seq: int
    to: Place | None
    cost: float = 0.0
    attempt: int = 1


PLACE = Record(Place, "name=place floor")
MOVE = Record(
    Move,
    Known("who", "sender"),
    "seq",
    Field("to", PLACE, null=True),
    Field("cost", amount, "price"),
    Field("attempt", count, default=1),
)


def refused(match: str) -> Any:
    return pytest.raises(FrameError, match=match)


def test_fields_have_the_table_s_order_and_header_names() -> None:
    meta = MOVE.write(Move("a", 3, Place("hall", 2), 0.5, 7))
    assert list(meta.items()) == [
        *(("seq", 3), ("place", "hall"), ("floor", 2), ("price", 0.5), ("attempt", 7))
    ]
    assert MOVE.read(meta, sender="a") == Move("a", 3, Place("hall", 2), 0.5, 7)


def test_a_default_is_left_out_and_read_where_the_field_is_missing() -> None:
    meta = MOVE.write(Move("a", 3, Place("hall")))
    assert "attempt" not in meta
    assert MOVE.read(meta, sender="a").attempt == 1
    assert MOVE.read(meta | {"attempt": 2}, sender="a").attempt == 2
    with refused("'attempt' of a header is None"):
        MOVE.read(meta | {"attempt": None}, sender="a")


def test_none_is_none_in_all_fields_of_a_nested_record() -> None:
    meta = MOVE.write(Move("a", 3, None))
    assert (meta["place"], meta["floor"]) == (None, None)
    assert MOVE.read(meta, sender="a").to is None
    with refused("'place' of a header is None"):
        MOVE.read(meta | {"floor": 3}, sender="a")
    with refused("no field 'place'"):
        MOVE.read({"seq": 3, "floor": None, "price": 1}, sender="a")


def test_a_nested_record_may_be_left_out_as_a_whole_only() -> None:
    move = Record(Move, "who seq", Field("to", PLACE, default=None))
    assert move.write(Move("a", 3, None)) == {"who": "a", "seq": 3}
    assert move.read({"who": "a", "seq": 3}) == Move("a", 3, None)
    with refused("no field 'place'"):
        move.read({"who": "a", "seq": 3, "floor": None})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"seq": -1}, "'seq' of a header is -1, not a count"),
        ({"seq": 2**63}, "'seq'"),
        ({"seq": True}, "'seq'"),
        ({"seq": 1.0}, "'seq'"),
        ({"place": b"hall"}, "'place' of a header is b'hall', not a text"),
        ({"floor": "2"}, "'floor' of a header is '2', not a count or None"),
        ({"price": float("nan")}, "'price' of a header is nan, not an amount"),
        ({"price": float("inf")}, "'price'"),
        ({"price": -0.5}, "'price'"),
        ({"price": "x" * 1000}, "'price' of a header is 'x{99}, not"),
    ],
)
def test_a_wrong_value_is_refused_by_name(change: Meta, match: str) -> None:
    meta = MOVE.write(Move("a", 3, Place("hall", 2)))
    with refused(match):
        MOVE.read(meta | change, sender="a")


def test_a_count_may_have_a_limit_that_the_reader_knows() -> None:
    place = Record(Place, "name", Field("floor", count, limit="floors"))
    assert place.read({"name": "x", "floor": 2}, floors=3).floor == 2
    with refused("'floor' of a header is 3, not below 3"):
        place.read({"name": "x", "floor": 3}, floors=3)


ROWS = Rows(
    Record(Move, Known("who"), "seq=seqs", Known("to"), "cost=costs"),
    Field("who", text),
    most=3,
    distinct="seqs",
)


def test_rows_are_a_list_per_field_with_shared_fields_once() -> None:
    moves = tuple(Move("a", seq, None, seq / 2) for seq in (1, 2))
    meta = ROWS.write(moves)
    assert meta == {"seqs": [1, 2], "costs": [0.5, 1.0], "who": "a"}
    assert ROWS.read(meta, to=None) == moves


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"seqs": [1]}, "lengths: {'seqs': 1, 'costs': 2}"),
        ({"costs": []}, "lengths: {'seqs': 2, 'costs': 0}"),
        ({"seqs": [1, 2, 3, 4], "costs": [0.0] * 4}, "lengths: {'seqs': 4, 'costs': 4}"),
        ({"seqs": [1, 1]}, r"'seqs' of a header is \[1, 1\], not all different"),
        ({"seqs": [1, "2"]}, "'seqs' of a header is '2', not a count"),
        ({"seqs": [1, None]}, "'seqs'"),
        ({"seqs": 1}, "'seqs' of a header is 1, not a list"),
        ({"who": 1}, "'who'"),
    ],
)
def test_rows_that_do_not_fit_are_refused(change: Meta, match: str) -> None:
    with refused(match):
        ROWS.read({"seqs": [1, 2], "costs": [0.5, 1.0], "who": "a"} | change, to=None)


def test_a_sparse_list_is_empty_where_all_rows_lack_it() -> None:
    rows = Rows(PLACE, sparse="floor")
    for places in ((), (Place("a"), Place("b")), (Place("a", 1), Place("b", 2))):
        assert rows.read(rows.write(places)) == places
    assert rows.write([Place("a"), Place("b")]) == {"place": ["a", "b"], "floor": []}
    with refused("'floor' of a header"):
        rows.read({"place": ["a", "b"], "floor": [1, None]})
    with refused("lengths"):
        rows.read({"place": [], "floor": [1]})


def test_a_single_record_may_be_written_as_rows() -> None:
    only = Only(PLACE)
    assert only.write(Place("a", 1)) == {"place": ["a"], "floor": [1]}
    assert only.read({"place": ["a"], "floor": [1]}) == Place("a", 1)
    for places in ([], ["a", "b"]):
        with refused("lengths"):
            only.read({"place": places, "floor": [1] * len(places)})


def test_one_of_several_records_is_named_by_its_tag() -> None:
    move = Record(Move, "who seq", Known("to"))
    either: OneOf[Place | Move] = OneOf("kind", {"place": PLACE, "move": move})
    assert either.write(Place("a", 1)) == {"kind": "place", "place": "a", "floor": 1}
    assert either.read({"kind": "move", "who": "a", "seq": 1}, to=None) == Move("a", 1, None)
    with refused("'kind' of a header is 'jump', not one of place, move"):
        either.read({"kind": "jump"})
    with refused("no message for 7"):
        either.write(7)  # type: ignore[arg-type]


def test_counts_have_a_name_each() -> None:
    pair = CountList("first", "last")
    assert pair.read(pair.write((3, 4))) == (3, 4)
    with refused("no field 'last'"):
        pair.read({"first": 3})


def test_limits_of_kinds() -> None:
    assert below(3)({"x": 2}, "x") == 2
    with refused("'x' of a header is 3, not a count below 3"):
        below(3)({"x": 3}, "x")
