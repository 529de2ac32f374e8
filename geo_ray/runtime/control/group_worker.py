"""One worker's place in a run, as who starts and watches workers sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray

Handle = Any  # a Ray actor handle; Ray gives it no useful type
Ref = Any


@dataclass(slots=True)
class GroupWorker:
    """One worker's place in the run.

    Attributes:
        region: its region.
        rank: its number there.
        epoch: its incarnation, from 1.
        handle: the actor.
        ref: the end of its work; None before it begins, and while it is not replaced.
        steps: steps it computed, once it has come home.
        node: where it runs, or what will tell.
    """

    region: str
    rank: int
    epoch: int
    handle: Handle
    ref: Ref = None
    steps: int | None = None
    node: str | Ref | None = None

    @property
    def is_out(self) -> bool:
        """Whether it works, or will as soon as it has a place."""
        return self.steps is None and self.ref is not None

    @property
    def has_begun(self) -> bool:
        """Whether it works: it has a place, as far as is known."""
        return self.node_id() is not None

    def node_id(self) -> str | None:
        """The node that it runs on; None if that is not known yet, or it does not work."""
        if not self.is_out or self.node is None:
            return None
        if isinstance(self.node, str):
            return self.node
        if not ray.wait([self.node], timeout=0)[0]:
            return None
        try:
            self.node = str(ray.get(self.node))
        except ray.exceptions.RayError:  # it is lost, which is heard of by its work
            self.node = None
        return self.node
