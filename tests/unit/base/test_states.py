"""State tables: possible events, refusals, checks of the table, diagrams, and their page."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import pytest

from geo_ray.base.errors import InvariantError
from geo_ray.base.states import StateTable
from geo_ray.testing.reference_pages import TABLES

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "generated" / "states.md"


class Door(StrEnum):
    OPEN = "open"
    CLOSED = "closed"
    GONE = "gone"


STATES = {Door.OPEN: "Open.", Door.CLOSED: "Closed.", Door.GONE: "Removed."}
DOOR = StateTable(
    name="Door",
    states=STATES,
    moves={
        (Door.OPEN, "close"): Door.CLOSED,
        (Door.CLOSED, "close"): Door.CLOSED,
        (Door.CLOSED, "open"): Door.OPEN,
        (Door.OPEN, "remove"): Door.GONE,
        (Door.OPEN, "burn"): Door.GONE,
    },
)


def test_events_lead_from_state_to_state() -> None:
    assert DOOR.initial is Door.OPEN
    assert DOOR.after(Door.OPEN, "close") is Door.CLOSED
    assert DOOR.after(Door.CLOSED, "close") is Door.CLOSED


def test_an_impossible_event_is_refused_by_name() -> None:
    assert not DOOR.accepts(Door.GONE, "open")
    with pytest.raises(InvariantError, match="Door: 'open' is not possible while gone"):
        DOOR.after(Door.GONE, "open")


def test_a_table_describes_every_state() -> None:
    with pytest.raises(InvariantError, match="not described: closed, gone"):
        StateTable("Door", {Door.OPEN: "Open."}, DOOR.moves)


def test_every_state_of_a_table_is_reached() -> None:
    with pytest.raises(InvariantError, match="never reached: gone"):
        StateTable("Door", STATES, {(Door.OPEN, "close"): Door.CLOSED})


def test_the_diagram_has_one_arrow_for_each_pair_of_states() -> None:
    assert DOOR.mermaid().splitlines() == [
        "stateDiagram-v2",
        "    [*] --> open",
        "    open --> closed: close",
        "    closed --> open: open",
        "    open --> gone: remove, burn",
        "    gone --> [*]",
    ]


def test_the_page_names_the_file_of_each_table() -> None:
    for table, file in TABLES:
        assert table.name in (PAGE.parents[3] / file).read_text(encoding="utf-8")
