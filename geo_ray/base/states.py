"""State machines: an enum of states, and one table of the events that lead from one to another.

    class DoorState(StrEnum):
        OPEN = "open"
        CLOSED = "closed"

    DOOR: Final = StateTable(
        name="Door",
        states={DoorState.OPEN: "Lets people through.", DoorState.CLOSED: "Lets nobody through."},
        moves={(DoorState.OPEN, "close"): DoorState.CLOSED},
    )
    self._state = DOOR.after(self._state, "close")

A table holds no data: the object that owns the state holds its data, and its transition function
returns the actions. `docs/reference/generated/states.md` shows all tables;
`geo_ray.testing.reference_pages` writes the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from geo_ray.base.errors import InvariantError

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=str)


@dataclass(frozen=True, slots=True)
class StateTable(Generic[S, E]):
    """The states of one kind of object, and the events that change them.

    Attributes:
        name: the object, as the title of its section in the docs.
        states: meaning of each state, the initial state first.
        moves: next state by state and event. An event may keep the state; a missing pair is a
            programming error.

    Raises:
        InvariantError: a state is not described, or no events lead to it.
    """

    name: str
    states: Mapping[S, str]
    moves: Mapping[tuple[S, E], S]

    def __post_init__(self) -> None:
        every = set(type(self.initial))
        undescribed = every - set(self.states)
        reached, waiting = set[S](), [self.initial]
        while waiting:
            state = waiting.pop()
            if state not in reached:
                reached.add(state)
                waiting += [to for (source, _), to in self.moves.items() if source is state]
        for problem, found in (
            ("not described", undescribed),
            ("never reached", every - reached),
        ):
            if found:
                names = ", ".join(sorted(str(state.value) for state in found))
                raise InvariantError(f"{self.name}: states are {problem}: {names}")

    @property
    def initial(self) -> S:
        """State of a new object."""
        return next(iter(self.states))

    def accepts(self, state: S, event: E) -> bool:
        """Return whether an event is possible in a state."""
        return (state, event) in self.moves

    def after(self, state: S, event: E) -> S:
        """Return the next state.

        Raises:
            InvariantError: the event is not possible in this state.
        """
        if not self.accepts(state, event):
            raise InvariantError(f"{self.name}: '{event}' is not possible while {state.value}")
        return self.moves[state, event]

    def mermaid(self) -> str:
        """Return the state diagram in Mermaid syntax."""
        arrows: dict[tuple[S, S], list[str]] = {}
        for (state, event), to in self.moves.items():
            if state is not to:
                arrows.setdefault((state, to), []).append(str(event))
        ends = set(self.states) - {state for state, _ in arrows}
        lines = [
            "stateDiagram-v2",
            f"    [*] --> {self.initial.value}",
            *(f"    {a.value} --> {b.value}: {', '.join(why)}" for (a, b), why in arrows.items()),
            *(f"    {state.value} --> [*]" for state in self.states if state in ends),
        ]
        return "\n".join(lines)
