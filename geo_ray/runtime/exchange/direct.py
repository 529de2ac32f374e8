"""Updates as single messages to an averager that has one home."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from geo_ray.base.errors import FrameError, GeoRayError, InvariantError
from geo_ray.runtime.exchange.base import Answers, AveragerOutput, LocalAverager, Routes, StageMaker
from geo_ray.runtime.exchange.messages import (
    payload_bytes,
    read_refusal,
    read_reply,
    read_update,
    refusal_meta,
    reply_meta,
    update_meta,
)
from geo_ray.training.averager import Averager
from geo_ray.training.command_log import (
    Begun,
    ChangeMembers,
    ChangePace,
    Leave,
    Op,
    Skip,
    TakeIn,
    TakeSum,
)
from geo_ray.training.membership import AveragerHome
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.frames import view_of
from geo_ray.transport.wire.message import Message

log = logging.getLogger(__name__)


class DirectPath:
    """See the module's docstring and `UpdatePath`.

    Args:
        endpoint: this region's.
        home: where the averager lives.
        averager: the averager, if that is here.
        output: takes what the averager leaves beside its answers.
        answers: where the own region's requests wait.
        stage: builds the stage of this path.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        home: AveragerHome,
        averager: Averager | None,
        output: AveragerOutput,
        answers: Answers,
        stage: StageMaker,
    ) -> None:
        self._endpoint = endpoint
        self._region = endpoint.identity.region
        self.home = home
        self.answers = answers
        if (averager is not None) != (self._region == home.region):
            raise InvariantError(f"'{self._region}': the averager belongs to '{home.region}'")
        self._local: LocalAverager | None = None
        if averager is not None:
            self._local = LocalAverager(averager, output, self._deliver_all, self)
        self._failure = output.failure
        self._arrived_s: dict[str, float] = {}
        self.stage = stage(self)

    # ------------------------------------------------------------------ for the own region

    def exchange(self, update: UpdateMessage) -> ReplyMessage:
        """See `UpdatePath`."""
        if self._local is not None:
            self._take_in(update)
        else:
            self.stage.depart(update, self._ship, again=False)
        return self.answers.wait(update.seq, lambda: self.home.region)

    def _ship(self, update: UpdateMessage) -> None:
        message = Message("update", update_meta(update), payload_bytes(update), "update")
        self.send(self.home.region, message)

    # ------------------------------------------------------------------ for the controller

    def request_stop(self) -> None:
        """See `UpdatePath`."""
        self._here().request_stop()

    def request_checkpoint(self, checkpoint: int, *, halt: bool) -> bool:
        """See `UpdatePath`."""
        return self._here().request_checkpoint(checkpoint, halt=halt)

    def report_dead(self, region: str, *, comes_back: bool = False) -> None:
        """See `UpdatePath`; whoever waited for it alone is answered."""
        if comes_back:  # the averager does not move here
            return
        log.warning("the run goes on without region '%s': its data are missing", region)
        self._tell(Leave(region))

    def tell_members(self, op: ChangeMembers | Begun | ChangePace) -> None:
        """See `UpdatePath`."""
        self._tell(op)

    def _tell(self, op: Op) -> None:
        outcome = self._here().carry_out(op)
        if outcome.error is not None:
            raise outcome.error
        self._deliver_all(outcome.replies)

    def status(self) -> dict[str, Any]:
        """See `UpdatePath`."""
        if self._local is None:
            return {"version": None}
        return {
            "version": self._local.version,
            "open": self._local.open_requests(),
            "view": self._local.view,
            "pace": self._local.pace,
        }

    def close(self) -> None:
        """See `UpdatePath`."""
        self.answers.close()
        if self._local is not None:
            self._local.close()

    # ------------------------------------------------------------------ other regions

    def routes(self) -> Routes:
        """See `UpdatePath`."""
        return {"update": self._on_update, "reply": self._on_reply, "refused": self._on_refused}

    def _on_update(self, peer: str, message: Message) -> None:
        try:
            update = read_update(message.meta, view_of(message.payload))
        except FrameError as error:  # who speaks otherwise ends itself, and nobody else
            log.error("an update of region '%s' cannot be read: %s", peer, error.message)
            told = refusal_meta(fields.count(message.meta, "seq"), error)
            self.send(peer, Message("refused", told, b"", "control"))
            return
        if update.region != peer:
            log.warning("region '%s' sent an update in the name of '%s'", peer, update.region)
            return
        self._take_in(update)

    def _on_reply(self, peer: str, message: Message) -> None:
        if peer == self.home.region:
            self.give(read_reply(message.meta, view_of(message.payload)))

    def _on_refused(self, peer: str, message: Message) -> None:
        if peer == self.home.region:
            self.answers.fail(*read_refusal(message.meta))

    # ------------------------------------------------------------------ for the stage

    def send(self, to: str, message: Message) -> None:
        """See `StagedPath`, as for all that follows."""
        self._endpoint.send(to, message)

    def give(self, reply: ReplyMessage) -> None:
        """Hand an answer to the own region."""
        self.answers.give(self.stage.answered(reply))

    def version(self) -> int:
        """Commits so far."""
        return self._here().version

    def skip(self, region: str, epoch: int, seq: int) -> None:
        """Answer an update without taking it in."""
        self._deliver_all(self._here().carry_out(Skip(region, epoch, seq)).replies)

    def take_sum(
        self, parts: tuple[UpdateMessage, ...], total_P: Tensor
    ) -> list[ReplyMessage] | None:
        """Take in a sum of updates."""
        outcome = self._here().carry_out(TakeSum(parts, total_P))
        if outcome.error is not None:
            raise outcome.error
        return outcome.replies if outcome.done else None

    def deliver(self, reply: ReplyMessage) -> None:
        """Send an answer on its way."""
        arrived_s = self._arrived_s.get(reply.to)
        if arrived_s is not None:
            reply = replace(reply, held_s=time.monotonic() - arrived_s)
        reply = self.stage.beside(reply)
        if reply.to == self._region:
            self.give(reply)
            return
        self.send(reply.to, Message("reply", reply_meta(reply), payload_bytes(reply), "reply"))

    def refuse(self, update: UpdateMessage, error: GeoRayError) -> None:
        """Tell an update's region that it was refused."""
        if update.region == self._region:
            self.answers.fail(update.seq, error)
            return
        meta = refusal_meta(update.seq, error)
        self.send(update.region, Message("refused", meta, b"", "control"))

    def fail(self, error: Exception, doing: str) -> None:
        """A thread of the stage has met an error."""
        self._failure.note(error, doing)

    # ------------------------------------------------------------------ at the averager's home

    def _here(self) -> LocalAverager:
        if self._local is None:
            raise InvariantError(f"region '{self._region}' does not host the averager")
        return self._local

    def _take_in(self, update: UpdateMessage) -> None:
        self._arrived_s[update.region] = time.monotonic()
        self.stage.arrive(update, self._commit, again=False)

    def _commit(self, update: UpdateMessage) -> None:
        outcome = self._here().carry_out(TakeIn(update))
        if outcome.error is not None:
            log.error("update %d of '%s' refused: %s", update.seq, update.region, outcome.error)
            self.refuse(update, outcome.error)
        self._deliver_all(outcome.replies)

    def _deliver_all(self, replies: Sequence[ReplyMessage]) -> None:
        for reply in replies:
            self.deliver(reply)
