"""What a node may know of where it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from geo_ray.errors import ProgramError
from geo_ray.program.clock import ProgramClock

_HERE: ContextVar[NodeSurroundings] = ContextVar("geo_ray program node")


@dataclass(frozen=True, slots=True)
class NodeSurroundings:
    """Where a node runs; `here` gives it.

    Attributes:
        name: of the instance.
        region: of its group.
        replica: its number among the node's instances.
        on: threads, processes, ray or virtual.
        clock: to tell the time by and to sleep, so that it works on the virtual clock, too.
    """

    name: str
    region: str
    replica: int
    on: str
    clock: ProgramClock

    def takes_s(self, duration_s: float) -> None:
        """Say how long what is computed here takes; on the virtual clock, that much time passes.

        Elsewhere computing has taken its time already, and this does nothing.
        """
        if self.clock.is_virtual:
            self.clock.sleep_s(duration_s)


def here() -> NodeSurroundings:
    """The surroundings of the node whose code calls this.

    Raises:
        ProgramError: it is called outside a node, or in a thread that a node has made.
    """
    found = _HERE.get(None)
    if found is None:
        raise ProgramError("here() was called outside a node", fix="Call it in a node's methods.")
    return found


def name_here() -> str:
    """The name of the instance whose code calls this; empty outside of nodes."""
    found = _HERE.get(None)
    return "" if found is None else found.name


@contextmanager
def being_at(surroundings: NodeSurroundings) -> Iterator[None]:
    """Let `here` give these."""
    token = _HERE.set(surroundings)
    try:
        yield
    finally:
        _HERE.reset(token)
