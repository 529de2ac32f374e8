"""A region's end of its exchanges when the averager may move.

The region repeats its open request at the averager's new home. And it undoes what the new home does
not know: an answer that the old home gave before the standby had the entry may be missing there. So
a region keeps its part of such exchanges (the update, and what it merged) until it hears that the
standby has them. After a takeover it repeats those that are missing, in their order. The new
answers hold what the new home knows; the difference to what was merged goes with the next answer.
So every change counts once in the end, and all regions agree, whatever was lost with the old home.

Only strategies that send changes need this: models that are sent again and again need no undoing.

Shape legend: P = parameters of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from geo_ray.strategies.base import Reply, Update
from geo_ray.training.averager.log import Skip, TakeIn

Opener = Callable[[Update | Reply], Tensor]
"""The payload of a message as a vector (P,), decoded if it is coded."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """An exchange that the standby may not know: what was sent, and what was merged."""

    update: Update
    merged_P: Tensor
    dropped: bool
    number: int

    @property
    def op(self) -> TakeIn | Skip:
        """What makes the averager do it again; what was given up must not be taken in now."""
        update = self.update
        return Skip(update.region, update.epoch, update.seq) if self.dropped else TakeIn(update)


@dataclass(slots=True)
class Caller:
    """See the module's docstring; it is told only what comes from the averager's present home.

    Attributes:
        opener: makes vectors of payloads.
        keeps: whether missing exchanges are repeated (strategies that send changes).
    """

    opener: Opener
    keeps: bool
    _open: Update | None = None
    _kept: dict[int, _Kept] = field(default_factory=dict)
    _repeated: dict[int, _Kept] = field(default_factory=dict)
    _owed_P: Tensor | None = None

    @property
    def open(self) -> Update | None:
        """The request that is not answered yet."""
        return self._open

    def find(self, epoch: int, seq: int) -> Update | None:
        """An update that is open, or was answered before the standby had it."""
        kept = [k.update for k in (*self._kept.values(), *self._repeated.values())]
        mine = kept if self._open is None else [self._open, *kept]
        return next((u for u in mine if (u.epoch, u.seq) == (epoch, seq)), None)

    def submit(self, update: Update) -> list[TakeIn]:
        """The region has a new request; there is none open.

        Returns:
            What to ask now: nothing while exchanges are repeated.
        """
        self._open = update
        return [] if self._repeated else [TakeIn(update)]

    def on_moved(self, last: tuple[int, int]) -> list[TakeIn | Skip]:
        """The averager has a new home.

        Args:
            last: epoch and number of this region's newest update that is known there.

        Returns:
            What to ask there, in order. The open request waits for the answers to those that are
            repeated: whoever is answered it owes nothing any more.
        """
        self._repeated = {
            seq: kept
            for seq, kept in sorted((self._kept | self._repeated).items())
            if (kept.update.epoch, kept.update.seq) > last
        }
        self._kept = {}
        asked: list[TakeIn | Skip] = [kept.op for kept in self._repeated.values()]
        if asked or self._open is None:
            return asked
        return [TakeIn(self._open)]

    def on_reply(self, reply: Reply, number: int, stable: int) -> Reply | TakeIn | None:
        """The averager answered.

        Args:
            reply: the answer.
            number: the newest entry of the averager's log that the reply may depend on.
            stable: up to which entry the standby has everything.

        Returns:
            The answer for the region; or what to ask now; None if there is neither.
        """
        self._kept = {seq: kept for seq, kept in self._kept.items() if kept.number > stable}
        missing = self._repeated.pop(reply.seq, None)
        if missing is not None:
            merged_P = self._vector(reply, missing.update)
            self._owe(merged_P - missing.merged_P)
            if number > stable:  # the next standby may not know it either
                self._kept[reply.seq] = replace(missing, merged_P=merged_P, number=number)
            return None if self._repeated or self._open is None else TakeIn(self._open)
        if self._open is None or reply.seq != self._open.seq:
            return None
        return self._finish(reply, number, stable)

    def refused(self, seq: int) -> bool:
        """The averager refused ``seq``; whether that concerns the open request."""
        if self._open is None or self._open.seq != seq:
            return False
        self._open = None
        return True

    def _finish(self, reply: Reply, number: int, stable: int) -> Reply:
        update, self._open = self._open, None
        if update is None:  # cannot be: whoever finishes has seen it
            return reply
        keep = self.keeps and number > stable
        if not (keep or reply.own or self._owed_P is not None):
            return reply
        merged_P = self._vector(reply, update)
        if self._owed_P is not None:
            merged_P, self._owed_P = merged_P + self._owed_P, None
        if keep:
            sent = replace(update, payload_P=self.opener(update).clone(), coded=None)
            self._kept[reply.seq] = _Kept(sent, merged_P, reply.dropped, number)
        return replace(reply, payload_P=merged_P, coded=None, own=False)

    def _vector(self, reply: Reply, update: Update) -> Tensor:
        vector_P = self.opener(reply)
        return torch.sub(vector_P, self.opener(update)) if reply.own else vector_P

    def _owe(self, difference_P: Tensor) -> None:
        self._owed_P = difference_P if self._owed_P is None else self._owed_P + difference_P
