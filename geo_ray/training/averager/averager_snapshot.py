"""The averager's part of a checkpoint, and who was told of it.

A cut holds nobody up: the averager copies its state when a checkpoint begins, and marks every
region's next answer with its id. A region copies its own state before it merges a marked answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from geo_ray.strategies.base import Reply
from geo_ray.training.lazy_copy import LazyCopy


@dataclass(frozen=True, slots=True)
class AveragerSnapshot:
    """The averager's part of a checkpoint, as it was when that began."""

    id: int
    copies: dict[str, LazyCopy]
    control: dict[str, object]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The copies as tensors, for who does not write them."""
        return {name: copy.whole() for name, copy in self.copies.items()}


@dataclass(slots=True)
class _CutMark:
    """The newest checkpoint, and which regions had an answer that is marked with it."""

    id: int
    halt: bool
    told: set[str] = field(default_factory=set)


@dataclass(slots=True)
class SnapshotMarks:
    """Marks answers with the newest checkpoint.

    After a takeover none may begin until all regions are settled: one may hold answers of an
    averager that is lost, of which this one does not know yet.
    """

    _mark: _CutMark | None = None
    _unsettled: set[str] = field(default_factory=set)

    @property
    def may_begin(self) -> bool:
        """Whether every region is settled."""
        return not self._unsettled

    def begin(self, checkpoint: int, *, halt: bool) -> None:
        """Mark the next answer to every region with ``checkpoint``."""
        self._mark = _CutMark(checkpoint, halt)

    def marked(self, reply: Reply) -> Reply:
        """The answer, with the newest checkpoint if its region has not been told of it."""
        mark = self._mark
        if mark is None or reply.to in mark.told:
            return reply
        mark.told.add(reply.to)
        return replace(reply, checkpoint=mark.id, halt=mark.halt)

    def export(self) -> list[object] | None:
        """The newest checkpoint, and who was told of it, as plain values."""
        mark = self._mark
        return None if mark is None else [mark.id, mark.halt, sorted(mark.told)]

    def restore(self, mark: Sequence[Any] | None) -> None:
        """Become what `export` gave, with everybody settled."""
        self._unsettled = set()
        self._mark = None if mark is None else _CutMark(int(mark[0]), bool(mark[1]), set(mark[2]))

    def join(self, region: str, giver: str) -> None:
        """A newcomer is told of no checkpoint that began before."""
        if self._mark is not None:
            self._mark.told.add(region)

    def took_over(self, members: Iterable[str]) -> None:
        """The averager goes on for one that is lost: nobody is settled, and its mark is gone."""
        self._mark = None
        self._unsettled = set(members)

    def leave(self, region: str) -> None:
        """Nobody waits for a region that is gone to be settled."""
        self.settle(region)

    def settle(self, region: str) -> None:
        """A region holds only answers that are known here, or has left."""
        self._unsettled.discard(region)
