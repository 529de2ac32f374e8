"""The served side of a run whose regions join from their own training loops.

A pure state machine: calls are messages of ranks, and return messages for ranks. `JoinService`

1. waits until every rank of every expected region has described its model and its share of it;
2. cuts the model into slices (`geo_ray.joining.layout`), with one averager each;
3. distributes the initial parameters, those of the first region by name;
4. takes in a region's update once all its slices are staged, so that a round commits in all slices
   or in none; each answer goes to the rank that owns the slice;
5. collects the final parameters.

Slices may be in other processes (`geo_ray.joining.holder`), which execute the service's orders.
Messages to ranks wait until all of them have executed what was ordered before.

Steps and rows of a region are those of all its ranks. Ranks that disagree end the region.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, Final, cast

import torch
from torch import Tensor

from geo_ray.base.errors import (
    CheckpointMissingError,
    FrameError,
    GeoRayError,
    InvariantError,
    JoinRefusedError,
    ModelMismatchError,
    NonFiniteError,
    RanksDisagreeError,
    RegionLostError,
    ServerLostError,
)
from geo_ray.joining.holder import RANK_FIELDS, Holders, read_sizes, read_staged, reply_bytes
from geo_ray.joining.layout import Layout, holder_starts, slices_of
from geo_ray.joining.link import UNREACHED
from geo_ray.joining.pieces import PIECE, divided, size_of
from geo_ray.joining.protocol import (
    SERVER,
    Hello,
    JoinTerms,
    Outbound,
    Welcome,
    copy_message,
    number_of,
    process_words,
    rank_name,
    rank_of,
    refusal_to,
    region_of,
)
from geo_ray.joining.rank import RankState
from geo_ray.joining.regions import Evaluations, RegionRanks, StagedPart
from geo_ray.joining.save_round import SaveRound, SaveStage
from geo_ray.joining.slices import (
    Answers,
    BeginOrder,
    ChangeOrder,
    CollectOrder,
    CopyOrder,
    DivideOrder,
    FinishOrder,
    ForgetOrder,
    IntervalOrder,
    LeaveOrder,
    Order,
    Relayed,
    ResumeOrder,
    SavedRun,
    SavedSlice,
    Shares,
    SliceAveragers,
    SnapshotOrder,
    TakeOrder,
    WakeOrder,
)
from geo_ray.training.messages import ReplyMessage, UpdateMessage, no_buffers
from geo_ray.training.model_buffers import AVERAGER_PREFIX, REGION_PREFIX, AveragerBuffers
from geo_ray.training.parameters import BufferLayout
from geo_ray.training.wire_format import (
    payload_bytes,
    read_refusal,
    read_stats,
    read_update,
    reply_meta,
)
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.message import CONTROL, Message

_LOGGER: Final = logging.getLogger(__name__)

ABSENT: Final = "not there"  # of a region of which no rank has connected
_BUFFERS: Final = -1  # stands for the model buffers among the numbers of slices


class Stage(Enum):
    """Progress of a run."""

    GATHERING = "gathering"
    """Not all ranks of all regions are there."""
    STARTING = "starting"
    """The initial parameters are on their way."""
    TRAINING = "training"
    """Regions exchange updates."""
    ENDING = "ending"
    """All regions have finished; the final parameters are on their way."""
    DONE = "done"
    """The final parameters are here."""
    STOPPED = "stopped"
    """The run has ended at a checkpoint, from which it can continue."""


class JoinService:
    """See the module.

    Attributes:
        terms: the run.
        stage: its progress.
        layout: its model; None until the first rank has described it.
        averagers: the averagers of the slices that this process holds.
        buffer_layout: its model buffers; they do not depend on slices.
        buffers_B: the final model buffers, uint8 (B,), or the initial ones before `ENDING`.
        failure: the error that ends the run; None: there is none.
        save: the checkpoint that is being made; None: there is none.

    Args:
        terms: the run.
        now_s: returns the time of the run's clock.
        resumed: the checkpoint from which the run continues; None: it begins.
        least: with fewer regions, the others wait for one that was lost to join again.
    """

    def __init__(
        self,
        terms: JoinTerms,
        now_s: Callable[[], float],
        resumed: SavedRun | None = None,
        least: int = 1,
    ) -> None:
        self.terms = terms
        self._least = least
        self._held: dict[str, tuple[float, str]] = {}  # lost regions that the others wait for
        self.stage = Stage.GATHERING
        self.layout: Layout | None = None
        self.averagers = SliceAveragers(terms, saved=() if resumed is None else resumed.slices)
        self._holders = Holders(terms.holders)
        self._exchanges: list[tuple[int, dict[str, Any]]] = []  # events, by the newest order
        self.buffer_layout = BufferLayout(())
        self._same: Mapping[str, str] = {}  # of the first rank, see `Hello.same`
        self.buffers_B = no_buffers()
        self.failure: GeoRayError | None = None
        self.save: SaveRound | None = None
        self._resumed = resumed
        self._halted = self._is_over = False  # `_is_over`: ranks were told that they may leave
        self._newest_save = -1  # id of the newest checkpoint that was begun
        self._saved_steps: dict[str, int] = {}  # steps of regions at its barrier
        self._saved_buffers: tuple[dict[str, Tensor], dict[str, float]] = {}, {}
        self._now_s = now_s
        self._buffers = AveragerBuffers()
        self._regions: dict[str, RegionRanks] = {}
        self._missing: set[int] = set()  # slices whose parameters are on their way, or `_BUFFERS`
        self._joining: dict[str, RegionRanks] = {}  # regions that wait for the next barrier
        self._donor = ""  # whose state regions copy
        self._copiers: tuple[str, ...] = ()  # which do
        self._copied: dict[int, int] = {}  # bytes of each slice of that state that has arrived
        self._barrier_s = 0.0  # time of the barrier at which it joined
        self._events: list[dict[str, Any]] = []
        self._evaluations = Evaluations()

    def news(self) -> list[dict[str, Any]]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    @property
    def version(self) -> int:
        """Commits so far."""
        return self.averagers.version

    @property
    def model_P(self) -> Tensor:
        """The final parameters, fp32 (P,), in stage `DONE`; empty before `ENDING`.

        With other holders, those of the range that this process holds.
        """
        return self.averagers.model_H

    @property
    def waiting(self) -> tuple[str, ...]:
        """The regions that wait for the next barrier to join the run again."""
        return tuple(name for name, region in self._joining.items() if region.is_complete)

    def missing(self) -> dict[str, str]:
        """Return what is missing for the start, by region or holder."""
        found = self._holders.missing()
        for name in self.terms.regions:
            region = self._regions.get(name)
            if region is None:
                found[name] = ABSENT
            elif not region.is_complete:
                found[name] = f"{len(region.hellos)} of {region.world_size} ranks"
        return found

    # ------------------------------------------------------------------ messages of ranks

    def on_message(self, peer: str, message: Message) -> list[Outbound]:
        """Handle a message of a rank or of a holder.

        Args:
            peer: name of its endpoint, which the transport has verified.
            message: the message.

        Returns:
            Messages to ranks. If a message is refused, its region gets the error, and the others
            continue without the region.
        """
        return self._gated(self._handle(peer, message))

    def _gated(self, found: list[Outbound]) -> list[Outbound]:
        """Return what may be sent now: orders, and messages that wait for no holder."""
        may = self._holders.gated(found)
        while self._exchanges and self._exchanges[0][0] <= self._holders.confirmed:
            self._emit("exchange", **self._exchanges.pop(0)[1])
        return may

    def _execute(self, order: Order) -> Answers:
        """Execute an order here, and send it to the other holders."""
        self._holders.order(order)
        return self.averagers.execute(order)

    def _handle(self, peer: str, message: Message) -> list[Outbound]:
        """See `on_message`."""
        if self.failure is not None and message.kind == "join":
            return self._refuse_late(peer, message, self.failure)
        if self._holders.is_stopped:
            return []
        try:
            if region_of(peer) == SERVER:
                return self._on_holder(rank_of(peer), message)
            if self._has_ended and message.kind != "join":
                return []  # the ranks know it, or take no further message
            if message.kind == "join":
                return self._on_join(peer, Hello.read(message))
            self._check_peer(peer)
            if message.kind == "state":
                return self._on_state(peer, message)
            if message.kind == "buffers":
                return self._on_buffers(peer, message)
            if message.kind == "update":
                return self._on_update(peer, message)
            if message.kind == PIECE:
                return self._on_piece(peer, message)
            if message.kind == "copy":
                return self._on_copy(peer, message)
            if message.kind == "evaluation":
                self._on_evaluation(peer, message)
                return []
            if message.kind == "finished":
                return self._on_finished(peer)
            if message.kind == UNREACHED:
                self._on_unreached(peer, message.meta)
                return []
            if message.kind in ("part", "saved", "unsaved"):
                return self._on_save(peer, message)
            if message.kind == "failed":
                return self._on_failed(peer, message.meta)
            raise FrameError(f"unknown message '{message.kind}'")
        except GeoRayError as error:
            return self._refused(peer, message.meta.get("attempt"), error)

    def _refused(self, peer: str, attempt: object, error: GeoRayError) -> list[Outbound]:
        """Handle a message that is refused: its sender may ignore that, so its region is lost."""
        if self.averagers.failure is not None:
            return self._end_run(self.averagers.failure)
        name = region_of(peer)
        region = self._joining.get(name) or self._regions.get(name)
        if region is None or attempt not in (None, region.attempt):  # of another process group
            return [refusal_to(peer, error, attempt if isinstance(attempt, int) else 0)]
        found = self._refuse(name, error, [peer])
        ends = self.stage is not Stage.GATHERING and not isinstance(error, JoinRefusedError)
        if ends and 0 <= number_of(peer) < region.world_size:
            found += self._on_lost(name, error.message)
        return found

    def _end_run(self, error: GeoRayError) -> list[Outbound]:
        """End the run, which no region can continue."""
        if self.failure is not None:
            return []
        self.failure = error
        return [each for name in self._regions for each in self._refuse(name, error)]

    def _check_peer(self, peer: str) -> None:
        """Refuse ranks that the region does not have.

        Raises:
            FrameError: there is no such rank.
        """
        region, rank = self._regions.get(region_of(peer)), rank_of(peer)
        if region is not None and rank >= region.world_size:
            raise FrameError(f"'{peer}' is not one of the region's {region.world_size} ranks")

    @property
    def _has_ended(self) -> bool:
        """Whether all ranks were told that the run is over, or has failed."""
        return self._is_over or self.failure is not None

    def on_wake(self) -> list[Outbound]:
        """Let the averagers answer when the time has come that the strategy asked for."""
        wakes_s, now_s = self.averagers.wakes_s, self._now_s()
        if self._has_ended or wakes_s is None or now_s < wakes_s:
            return []
        try:
            return self._gated(self._answers(self._execute(WakeOrder(now_s=now_s))))
        except GeoRayError as error:
            if self.averagers.failure is None:
                raise
            return self._end_run(error)

    def on_lost(self, region: str, cause: str) -> list[Outbound]:
        """Continue without a region."""
        return self._gated(self._on_lost(region, cause))

    def _on_lost(self, region: str, cause: str) -> list[Outbound]:
        if self.stage in (Stage.DONE, Stage.STOPPED):
            return self._leave_out(region, cause)
        if self.averagers.failure is not None:
            return []
        if self.failure is not None:
            self._joining.pop(region, None)
            self._regions.pop(region, None)
            return []
        self._stop_joining(region)
        was_source = bool(self._regions) and region == self._source
        if self._regions.pop(region, None) is None or self.stage is Stage.GATHERING:
            return []
        self._emit("region_lost", region=region, cause=cause)
        self._buffers.leave(region)
        self._evaluations.leave(region)
        if not self._regions:
            self.failure = RegionLostError(f"all regions are lost; the last one: {cause}")
            return []
        if self.stage is Stage.ENDING:  # another region has the same parameters
            if not was_source:
                return []
            return self._collect()
        if self.stage is Stage.STARTING and was_source:
            self.failure = RegionLostError(
                f"region '{region}' was lost before it had sent the initial parameters: {cause}"
            )
            return [each for name in self._regions for each in self._refuse(name, self.failure)]
        self._emit_completed()
        found = self._leave_out(region, cause)
        if len(self._regions) < self._least and not (self.averagers.stopping or self._halted):
            _LOGGER.warning("the run waits for region '%s'", region)
            self._held[region] = self._now_s(), cause
            what = f"{len(self._regions)} regions take part, members.min is {self._least}"
            self._emit("run_paused", cause=f"{what}; lost: {', '.join(self._held)}")
        else:
            found += self._answers(self._leave(region))
        if region == self._donor and not all(self._copied.values()):
            for name in [name for name in self._copiers if name != region]:
                error = RegionLostError(
                    f"region '{region}' was lost while region '{name}' copied its state",
                    fix="Start the region again.",
                )
                found += self._refuse(name, error) + self._on_lost(name, error.message)
        return found + (self._ended() if self.stage is Stage.TRAINING else [])

    def _stop_joining(self, region: str) -> None:
        """Forget that a region waits for the next barrier."""
        if self._joining.pop(region, None) is not None:
            self._leave(region)  # it is no member yet, so that nothing is answered

    def _leave(self, region: str) -> Answers:
        return self._execute(LeaveOrder(region=region, now_s=self._now_s()))

    def lose(self, region: str, cause: str) -> list[Outbound]:
        """Continue without a region, and tell its ranks, which may be connected again."""
        error = RegionLostError(
            f"the run continues without region '{region}': {cause}",
            fix="Start its loop again, where it reaches the run's address and all its holders.",
        )
        told = [] if self._has_ended else self._refuse(region, error)
        return self._gated(told + self._on_lost(region, cause))

    def check_held(self, longest_s: float) -> list[Outbound]:
        """End the run if it has waited too long for enough regions.

        Args:
            longest_s: longest wait.
        """
        if not self._held or self.failure is not None:
            return []
        since_s = min(at_s for at_s, _ in self._held.values())
        if self._now_s() - since_s < longest_s:
            return []
        causes = "; ".join(f"region '{n}': {cause}" for n, (_, cause) in self._held.items())
        self.failure = RegionLostError(
            f"fewer than members.min = {self._least} regions for {longest_s:g} s: {causes}"
        )
        refused = [each for name in self._regions for each in self._refuse(name, self.failure)]
        return self._gated(refused)

    def _release(self) -> list[Outbound]:
        """Continue without the lost regions that the others have waited for."""
        found: list[Outbound] = []
        if self._has_ended:
            return found
        if self._held:
            self._emit("run_resumed")
        for name in list(self._held):
            del self._held[name]
            found += self._answers(self._leave(name))
        return found

    def awaited(self) -> dict[str, tuple[float, str | None]]:
        """Return the regions that all others wait for.

        Returns:
            By region, since when, and why it was lost; None: it takes part, but has not sent the
            update that others have sent.
        """
        found: dict[str, tuple[float, str | None]] = dict(self._held)
        if found or self.stage is not Stage.TRAINING or self._halted:
            return found
        sent = self.averagers.waiting
        since_s = min((self._regions[n].since_s for n in sent if n in self._regions), default=None)
        if since_s is not None:
            found = {name: (since_s, None) for name in self._regions if name not in sent}
        return found

    @property
    def is_settled(self) -> bool:
        """Whether no message to a rank waits for another process that holds slices."""
        return self._holders.is_settled

    def copy_payloads(self) -> None:
        """Replace payloads of messages that wait, which may be views of memory, by bytes."""
        self._holders.copy_payloads()

    def is_awaited(self, peer: str) -> bool:
        """Return whether an endpoint is a holder, or a rank of a region that takes part."""
        name = region_of(peer)
        if name == SERVER:
            return self._holders.is_known(number_of(peer))
        region = self._joining.get(name) or self._regions.get(name)
        return region is not None and 0 <= number_of(peer) < region.world_size

    def unreached(self) -> dict[tuple[str, int], str]:
        """Return what is missing between ranks and the other processes that hold slices.

        Returns:
            Descriptions, by endpoint of the rank and number of the holder. Only while that keeps
            back an exchange or the end of the run.
        """
        if self.failure is not None or self.stage in (Stage.DONE, Stage.STOPPED):
            return {}
        found = {}
        for region in {**self._regions, **self._joining}.values():
            for rank, holders in region.unreached.items():
                for holder, cause in holders.items():
                    host, port = self._holders.address(holder)
                    what = f"{process_words(holder)} at {host}:{port}"
                    peer = rank_name(region.name, rank)
                    found[peer, holder] = what + (f" ({cause})" if cause else "")
        return found

    def check_late(self, longest_s: float) -> list[Outbound]:
        """Continue without regions whose ranks do not all send an update that others have sent.

        Args:
            longest_s: largest time between the first and the last rank of a region.
        """
        found: list[Outbound] = []
        if self._has_ended:
            return found
        for name, region in list(self._regions.items()):
            if not region.headers or self._now_s() - region.since_s < longest_s:
                continue
            sent, (update, _) = next(iter(region.headers.items()))
            error = RanksDisagreeError(
                f"region '{name}': rank {sent} sent update {update.seq} {longest_s:g} s ago; "
                + region.missing(self.averagers.slices)
            )
            found += self._refuse(name, error) + self._on_lost(name, error.message)
        return self._gated(found)

    def request_stop(self) -> list[Outbound]:
        """Ask every region to finish with its next answer.

        It has no effect before all regions are there.
        """
        if self.stage is not Stage.GATHERING and not self._has_ended:
            self._execute(FinishOrder())
        return self._gated(self._release())

    def on_end(self, cause: str) -> list[Outbound]:
        """End the run at once, and tell all ranks that have described themselves."""
        if self._is_over or self.failure is not None:
            return []
        self.failure = ServerLostError(
            f"the run has ended: {cause}",
            fix="Start the region again when the run is served again.",
        )
        names = dict.fromkeys((*self._regions, *self._joining))
        return self._gated([each for n in names for each in self._refuse(n, self.failure)])

    def set_interval(self, steps: int) -> list[Outbound]:
        """Change the steps between exchanges, from the next answer to each region on.

        All ranks of a region get it with the same answer, and with rounds all regions do. It has no
        effect before the run trains.
        """
        if self.stage is Stage.TRAINING and self.failure is None:
            self._execute(IntervalOrder(steps=steps))
        return self._gated([])

    # ------------------------------------------------------------------ holders

    def on_holder_lost(self, holder: int, cause: str) -> list[Outbound]:
        """End the run: a part of the averagers' state is lost with the process that held it.

        No answer leaves that was not taken in by all holders, so that the run can continue from its
        newest checkpoint.
        """
        error = RegionLostError(f"{process_words(holder)} is lost: {cause}")
        return self._gated(self._fail(error))

    def _fail(self, error: GeoRayError) -> list[Outbound]:
        """End the run by an error of a holder."""
        if self.failure is not None or self.stage is Stage.DONE:
            return []
        self.failure = error
        self._holders.stop()
        told = _lost_server(error)
        return [
            each for name in {**self._regions, **self._joining} for each in self._refuse(name, told)
        ]

    def _refuse_late(self, peer: str, message: Message, failure: GeoRayError) -> list[Outbound]:
        """Refuse a region that comes after the run has failed."""
        attempt = message.meta.get("attempt")
        error: GeoRayError = JoinRefusedError(
            f"run '{self.terms.name}' has failed: {failure.message}"
        )
        if self._holders.is_stopped:
            error = _lost_server(failure)
        return [refusal_to(peer, error, attempt if isinstance(attempt, int) else 0)]

    def _on_holder(self, holder: int, message: Message) -> list[Outbound]:
        """Handle a message of another process that holds slices."""
        meta, kind = message.meta, message.kind
        if self._has_ended and kind != "executed":  # which releases what ranks are told
            return []
        if kind == "holder":
            address = fields.text(meta, "host"), fields.count(meta, "port")
            if not self._holders.add(holder, address):
                return self._fail(RegionLostError(f"holder {holder} was replaced"))
            if self.missing() or self.layout is None or self.stage is not Stage.GATHERING:
                return []
            try:
                return self._start(self.layout)
            except GeoRayError as error:
                return self._fail(error)
        if not self._holders.is_known(holder):
            return []  # of an earlier start of the run
        if kind == "broken":
            return self._fail(read_refusal(meta)[1])
        if kind == "executed":
            order = fields.count(meta, "order")
            self._holders.on_executed(holder, order)
            for region, size in read_sizes(message).items():
                for ordered, values in self._exchanges:
                    if ordered == order and values["region"] == region:
                        values["bytes_received"] += size
            return []
        if kind == "arrived":
            index = fields.count(meta, "slice")
            return self._arrived(index) if index in self._missing else []
        if kind == "copied":
            sizes = (fields.count(meta, name) for name in ("slice", "size", "version"))
            self._note_copy(*sizes)
            return []
        if kind == "refused":
            own = {k: v for k, v in meta.items() if k not in ("peer", "attempt")}
            peer, attempt = fields.text(meta, "peer"), fields.count(meta, "attempt")
            return self._refused(peer, attempt or None, read_refusal(own)[1])
        if kind == "staged":
            return self._on_staged(message)
        raise FrameError(f"unknown message '{kind}' of holder {holder}")

    def _on_staged(self, message: Message) -> list[Outbound]:
        """Record that a holder has staged a part of an update."""
        name, attempt, index, part = read_staged(message)
        region = self._regions.get(name)
        if region is None or region.attempt != attempt:
            return []  # of a region that is lost, or of an earlier process group
        region.add_part(index, part)
        try:
            return self._take(name, region) if region.has_sent(self.averagers.slices) else []
        except GeoRayError as error:
            return self._refused(region.peers[0], attempt, error)

    # ------------------------------------------------------------------ checkpoints

    def begin_save(
        self, checkpoint: int, keep: Sequence[int], timeout_s: float, *, halt: bool = False
    ) -> list[Outbound]:
        """Begin a checkpoint, if that is possible now; see `save`.

        Once the run is over, regions do not meet for it.

        A region may have committed files of a checkpoint that the run has not: its id is not used
        again.

        Args:
            checkpoint: lowest id.
            keep: committed checkpoints that stay.
            timeout_s: time for the parts of ranks, from the barrier on.
            halt: whether training ends there. Regions do not wait for lost ones any longer, and a
                checkpoint for which they have not met yet becomes such a one.
        """
        is_over = self.stage is Stage.DONE
        found = self._release() if halt else []
        if halt and self.save is not None and self.save.stage is SaveStage.MEETING:
            self.save.halts = True
        may_begin = (
            (is_over or (self.stage is Stage.TRAINING and not self.averagers.stopping))
            and self.failure is None
            and self.save is None
            and self.saves
            and not (self.averagers.is_changing or self._halted)
        )
        if not may_begin:
            return self._gated(found)
        known = [hello.saved or () for e in self._regions.values() for hello in e.hellos.values()]
        used = max((each for saved in known for each in saved), default=-1)
        self._newest_save = max(checkpoint, used + 1, self._newest_save + 1)
        self.save = SaveRound(self._newest_save, tuple(keep), timeout_s, halt and not is_over)
        if is_over:
            about = self._met()
            names = [name for name, region in self._regions.items() if region.saves]
            return self._gated(found + self._all("save", names, about))
        return self._gated(found + self._answers(self._change()))

    @property
    def saves(self) -> bool:
        """Whether a region writes parts of checkpoints."""
        return any(region.saves for region in self._regions.values())

    def end_save(self, checkpoint: int | None) -> list[Outbound]:
        """Forget a checkpoint that was being made.

        Ranks may leave after a checkpoint at which training ends, and after an order for any.

        Args:
            checkpoint: its id; None: any, and no other one follows. An order that comes late, while
                another checkpoint is being made, has no effect.
        """
        if checkpoint is not None and self.save is not None and self.save.id != checkpoint:
            return []
        self.save = None
        if self.stage is not Stage.GATHERING:
            self._execute(ForgetOrder())
        if self._halted:
            self.stage = Stage.STOPPED
        if not self._halted and (self.stage is not Stage.DONE or checkpoint is not None):
            return self._gated([])
        return self._gated(self._over() + self._refuse_joining("was stopped"))

    @property
    def saved_run(self) -> SavedRun:
        """This process's part of `save`, which is past its barrier.

        Raises:
            InvariantError: there is none.
        """
        save, layout = self.save, self.layout
        if save is None or layout is None:
            raise InvariantError("no checkpoint is being made")
        found = self.averagers.saved()
        buffers, rows = self._saved_buffers
        first = found[0]
        found[0] = SavedSlice(
            first.ranges, {**first.tensors, **buffers}, {**first.control, "buffer_rows": rows}
        )
        strategy = self.terms.strategy.model_dump(mode="json")
        return SavedRun(save.id, layout, tuple(found), self._saved_steps, strategy)

    @property
    def steps(self) -> dict[str, int]:
        """Steps of each region in all updates that were taken in."""
        return {name: region.steps for name, region in self._regions.items()}

    def check_save(self) -> list[Outbound]:
        """Leave out regions that are late with their parts of a checkpoint."""
        save = self.save
        if save is None:
            return []
        if save.stage is SaveStage.MEETING and not self.averagers.is_changing:
            return self.end_save(save.id)  # the run was asked to finish before the barrier
        orders = save.check_deadline(self._now_s())
        return self._gated([Outbound(rank_name(name, 0), order) for name, order in orders])

    def _on_save(self, peer: str, message: Message) -> list[Outbound]:
        if self.save is None:
            return []
        name = region_of(peer)
        order = self.save.on_message(name, rank_of(peer), message)
        return [] if order is None else [Outbound(rank_name(name, 0), order)]

    def _leave_out(self, region: str, cause: str) -> list[Outbound]:
        """Continue a checkpoint without a lost region."""
        order = None if self.save is None else self.save.leave_out(region, cause)
        return [] if order is None else [Outbound(rank_name(region, 0), order)]

    def _met(self) -> Meta:
        """Copy the averagers' state at the barrier of a checkpoint; return a field for ranks."""
        save = self.save
        if save is None or save.stage is not SaveStage.MEETING:
            return {}
        save.deadline_s += self._now_s()
        save.met(
            {n: (each.attempt, each.world_size) for n, each in self._regions.items() if each.saves}
        )
        self._saved_steps, self._saved_buffers = self.steps, self._buffers.export()
        self._execute(SnapshotOrder(checkpoint=save.id))
        self._halted = save.halts
        return {"save": save.id, **({"halts": True} if save.halts else {})}

    # ------------------------------------------------------------------ start

    def _on_join(self, peer: str, hello: Hello) -> list[Outbound]:
        name, terms = hello.region, self.terms
        if peer != rank_name(name, hello.rank):
            raise FrameError(f"'{peer}' describes itself as rank {hello.rank} of '{name}'")
        if name not in terms.regions:
            raise JoinRefusedError(
                f"run '{terms.name}' has no region '{name}'; it has {', '.join(terms.regions)}"
            )
        known = self._regions.get(name)
        if known is not None and hello.attempt < known.attempt:
            raise JoinRefusedError(f"region '{name}': a newer process group has joined")
        if self.stage is Stage.TRAINING:
            return self._on_rejoin(name, hello)
        if self.stage is not Stage.GATHERING:
            raise JoinRefusedError(
                f"run '{terms.name}' is {self.stage.value}: region '{name}' cannot join now"
            )
        if known is None or hello.attempt > known.attempt:
            known = self._regions[name] = RegionRanks(name, hello.attempt, hello.world_size)
        known.check_rank(hello)
        if not any(each.hellos for each in self._regions.values()):
            try:
                holder_starts(hello.layout, terms.holders)
            except GeoRayError as error:
                self.failure = error
                raise
            self.layout, self.buffer_layout = hello.layout, BufferLayout(hello.buffers)
            self._same = hello.same
            self._buffers = AveragerBuffers(self.buffer_layout)
        elif self.layout is not None:
            first = next(each for each, region in self._regions.items() if region.hellos)
            self._check_model(hello, self.layout, f"region '{first}'")
        known.add_rank(hello)
        if self.missing() or self.layout is None:
            return []
        return self._start(self.layout)

    def _check_model(self, hello: Hello, layout: Layout, whose: str) -> None:
        """Refuse another model.

        Raises:
            ModelMismatchError: names what differs.
        """
        who = f"region '{hello.region}' (rank {hello.rank})"
        layout.check_same(hello.layout, who, whose)
        for each in sorted({*self._same, *hello.same}):
            if self._same.get(each) != hello.same.get(each):
                raise ModelMismatchError(
                    f"'{each}' of {who} is not that of {whose}",
                    fix="Pass the same `same` to `site.training` everywhere: for a tokenizer, use "
                    "the same files and release.",
                )
        mine, theirs = self.buffer_layout.entries, hello.buffers
        if mine != theirs:
            names = sorted({each.name for each in set(mine) ^ set(theirs)})
            what = f"'{names[0]}' first" if names else "their order"
            raise ModelMismatchError(
                f"the model buffers of {who} are not those of {whose}: {what} differs",
                fix="Use the same modules and the same `buffers` of `site.training` everywhere.",
            )

    def _on_rejoin(self, name: str, hello: Hello) -> list[Outbound]:
        """Handle a rank of a region that was lost, or that restarted before anybody noticed."""
        found: list[Outbound] = []
        before = self._regions.get(name)
        if before is not None:
            if hello.attempt == before.attempt:
                raise JoinRefusedError(f"region '{name}' trains already")
            found += self._on_lost(name, "its process group was replaced")
            if self.failure is not None:
                raise JoinRefusedError(
                    f"region '{name}' was the only one; its state is lost with its processes"
                )
        region = self._joining.get(name)
        if region is not None and hello.attempt < region.attempt:
            raise JoinRefusedError(f"region '{name}': a newer process group has joined")
        try:
            return found + self._on_return(name, hello)
        except GeoRayError as error:  # the others get their answers all the same
            found += self._refuse(name, error, [rank_name(name, hello.rank)])
            self._stop_joining(name)
            return found

    def _on_return(self, name: str, hello: Hello) -> list[Outbound]:
        """Handle a rank of a region that is no member.

        Raises:
            GeoRayError: the region cannot join.
        """
        layout, region = self.layout, self._joining.get(name)
        if layout is None:
            raise InvariantError("a run trains without a model")
        self._check_model(hello, layout, "the run")
        if region is None or hello.attempt > region.attempt:
            self._stop_joining(name)
            region = self._joining[name] = RegionRanks(name, hello.attempt, hello.world_size)
        region.add_rank(hello)
        if not region.is_complete:
            return []
        slices_of(layout, {name: region.shares})  # refuses ranks that do not cover the model
        if not region.fits(self.averagers.slices):
            found = []  # the slices are cut again at the barrier, and the ranks learn them there
        else:
            found = self._welcomed(name, Welcome(self.terms, {}, copies=True))
        if len(self._regions) + len(self.waiting) >= self._least:
            found += self._release()
        return found + self._admit_next()

    def _divide_again(self) -> list[Outbound]:
        """Divide the model again, for a region that has joined with other ranks or shards.

        This happens at its barrier, after the answers: no update is under way.
        """
        layout, joined = self.layout, [n for n in self._copiers if n in self._regions]
        if layout is None or all(self._regions[n].fits(self.averagers.slices) for n in joined):
            return []
        self._execute(DivideOrder(shares=self._shares, now_s=self._now_s()))
        self._copied = dict.fromkeys(range(len(self.averagers.slices)), 0)
        found = []
        for name, region in self._regions.items():
            if name in joined:
                found += self._welcomed(name, Welcome(self.terms, {}, copies=True))
                continue
            for rank in range(region.world_size):
                own = [[i, ranges] for i, ranges in self.averagers.owned(name, rank).items()]
                # In the class of answers, which it must not overtake.
                message = Message("slices", {}, json.dumps(own).encode(), "reply")
                found.append(Outbound(rank_name(name, rank), message))
        return found

    def _admit_next(self) -> list[Outbound]:
        """Let the next waiting region join at the next barrier, if none is joining now."""
        ready = [name for name, region in self._joining.items() if region.is_complete]
        ready = [name for name in ready if name not in self._held]
        if not ready or self.averagers.is_changing or self.averagers.stopping or self._halted:
            return []
        return self._answers(self._change(min(ready)))

    def _change(self, *joins: str) -> Answers:
        return self._execute(ChangeOrder(joins=joins, now_s=self._now_s()))

    def _at_barrier(self, replies: Sequence[ReplyMessage]) -> None:
        """Make the joining regions members."""
        view = self.averagers.view
        for name in view.joining:
            if name in self._joining:
                self._regions[name] = self._joining.pop(name)
                self._copiers = view.joining
                self._copied = dict.fromkeys(range(len(self.averagers.slices)), 0)
                self._barrier_s = self._now_s()
        donors = [r.to for r in replies if r.barrier is not None and r.barrier.is_donor]
        self._donor = donors[0] if donors else self._donor
        for name in view.joining:
            self._buffers.join(name, self._donor)
        if view.joining:
            attempts = {n: self._regions[n].attempt for n in view.joining if n in self._regions}
            self._execute(CopyOrder(donor=self._donor, attempts=attempts))

    def _on_copy(self, peer: str, message: Message) -> list[Outbound]:
        """Pass a donor's state on to the ranks that begin with it."""
        relayed = self.averagers.on_copy(peer, message)
        if relayed is None:
            return []
        found = relayed.messages
        if relayed.index == 0:  # ranks without a slice need the plain values
            found = found + self._plain_values(relayed)
        version = int(str(relayed.state.control["version"]))
        self._note_copy(relayed.index, relayed.size_bytes, version)
        return found

    def _plain_values(self, relayed: Relayed) -> list[Outbound]:
        """Return the plain values of a donor's state, for ranks that have no slice."""
        state, found = relayed.state, []
        tensors = {k: v for k, v in state.tensors.items() if k.startswith(REGION_PREFIX)}
        empty = copy_message(None, RankState(tensors, state.control))
        for name in self._copiers:
            region = self._regions.get(name)
            if region is not None:
                owners = {each.owners[name] for each in self.averagers.slices}
                idle = set(range(region.world_size)) - owners
                found += [Outbound(rank_name(name, rank), empty) for rank in sorted(idle)]
        return found

    def _note_copy(self, index: int, size_bytes: int, version: int) -> None:
        """Record that a part of a donor's state was passed on."""
        if index not in self._copied:
            return
        self._copied[index] = size_bytes
        if not all(self._copied.values()):
            return
        for name in self._copiers:
            if name in self._regions:
                self._regions[name].steps = version
                self._emit(
                    "region_joined",
                    region=name,
                    view=self.averagers.view.generation,
                    round=self.version,
                    step=version,
                    bytes=sum(self._copied.values()),
                    took_s=self._now_s() - self._barrier_s,
                )

    def _start(self, layout: Layout) -> list[Outbound]:
        shares = self._shares
        slices_of(layout, shares)  # refuses ranks that do not cover the model
        if self._resumed is not None:
            try:
                return self._resume(layout, self._resumed)
            except GeoRayError as error:  # no region could continue
                self.failure = error
                return [each for name in self._regions for each in self._refuse(name, error)]
        self._execute(BeginOrder(layout=layout.to_json(), shares=shares, attempts=self._attempts))
        self.stage, self._missing = Stage.STARTING, self._everything()
        self._execute(CollectOrder(source=self._source, shares=True))
        welcome = Welcome(self.terms, {})
        return [
            each
            for name in self._regions
            for each in self._welcomed(name, replace(welcome, is_source=name == self._source))
        ]

    @property
    def _shares(self) -> Shares:
        """The ranges that each rank exchanges, by region."""
        return {name: region.shares for name, region in self._regions.items()}

    @property
    def _attempts(self) -> dict[str, int]:
        return {name: region.attempt for name, region in self._regions.items()}

    def _welcomed(self, name: str, welcome: Welcome) -> list[Outbound]:
        """Return an answer for all ranks of a region, each with its slices."""
        found = []
        for rank in range((self._joining.get(name) or self._regions[name]).world_size):
            own = self.averagers.owned(name, rank)
            message = replace(welcome, slices=own, holders=self._holders.addresses).message()
            found.append(Outbound(rank_name(name, rank), message))
        return found

    def _has(self, name: str, checkpoint: int) -> bool:
        region = self._regions.get(name)
        return region is not None and region.has(checkpoint)

    def _resume(self, layout: Layout, saved: SavedRun) -> list[Outbound]:
        """Continue from a checkpoint, at its barrier."""
        saved.check_strategy(self.terms.strategy)
        layout.check_same(saved.layout, f"checkpoint {saved.id}", "the regions")
        members = [str(name) for name in cast(list[object], saved.slices[0].control["members"])]
        loading = [name for name in sorted(members) if self._has(name, saved.id)]
        if not loading:
            raise CheckpointMissingError(
                f"no region has its files of checkpoint {saved.id}",
                fix="Pass the folder of the run's checkpoints to `site.training`, or resume from "
                "another checkpoint.",
            )
        copying = tuple(sorted(self._regions.keys() - set(loading)))
        restart = ResumeOrder(
            layout=layout.to_json(),
            shares=self._shares,
            attempts=self._attempts,
            members=tuple(members),
            loading=tuple(loading),
            copying=copying,
        )
        donor = restart.donor
        self._execute(restart)
        first = saved.slices[0]
        of_buffers = {k: v for k, v in first.tensors.items() if k.startswith(AVERAGER_PREFIX)}
        self._buffers.restore(of_buffers, first.control.get("buffer_rows"))
        for gone in restart.gone:
            self._buffers.leave(gone)
        for name in copying:
            self._buffers.join(name, donor)
        self.stage = Stage.TRAINING
        steps = saved.steps.get(donor, 0)
        for name, region in self._regions.items():
            region.steps = saved.steps.get(name, steps) if name in loading else steps
        self._donor, self._copiers = donor, copying
        self._copied = dict.fromkeys(range(len(self.averagers.slices)), 0) if copying else {}
        welcome = Welcome(self.terms, {}, view=self.averagers.view.wire_generation)
        return [
            each
            for name in self._regions
            for each in self._welcomed(
                name,
                replace(
                    welcome,
                    copies=name in copying,
                    checkpoint=saved.id if name in loading else None,
                    is_donor=name == donor and bool(copying),
                ),
            )
        ]

    def _on_state(self, peer: str, message: Message) -> list[Outbound]:
        found = self.averagers.on_state(peer, message)
        if found is None:
            return []
        index, shared, is_complete = found
        return shared + (self._arrived(index) if is_complete else [])

    def _on_buffers(self, peer: str, message: Message) -> list[Outbound]:
        """Handle the model buffers that come with the initial or the final parameters."""
        if _BUFFERS not in self._missing:
            return []
        layout, first = self.buffer_layout, rank_name(self._source, 0)
        if peer != first:
            raise FrameError(f"'{peer}' sent model buffers that it was not asked for")
        if len(message.payload) != layout.size_bytes:
            raise FrameError(f"the model buffers of '{peer}' have {len(message.payload)} bytes")
        values_B = torch.frombuffer(bytearray(message.payload), dtype=torch.uint8)
        if not layout.is_finite(values_B):
            raise NonFiniteError(f"the model buffers of '{peer}' are not finite")
        self.buffers_B = values_B
        if self.stage is Stage.ENDING:
            return self._arrived(_BUFFERS)
        self._arrived(_BUFFERS)
        shared = Message("buffers", {}, bytes(message.payload), "transfer")
        ranks = (rank_name(n, r) for n, each in self._regions.items() for r in each.hellos)
        return [Outbound(rank, shared) for rank in ranks if rank != first]

    def _everything(self) -> set[int]:
        """Return the parts of the model that the source must send."""
        buffers = [_BUFFERS] if self.buffer_layout.entries else []
        return {*range(len(self.averagers.slices)), *buffers}

    def _arrived(self, part: int) -> list[Outbound]:
        """Note a part of the model; the run continues, or ends, once all of them are here."""
        self._missing.discard(part)
        if self._missing:
            return []
        if self.stage is not Stage.ENDING:
            self.stage = Stage.TRAINING
            return []
        self.stage = Stage.DONE
        waits = self.terms.saves_at_end and self.saves
        return [] if waits else self._over()

    def _over(self) -> list[Outbound]:
        """Let the ranks leave, once: one that has left takes no further message."""
        if self._is_over:
            return []
        self._is_over = True
        return self._all("over", list(self._regions))

    # ------------------------------------------------------------------ updates

    def _on_update(self, peer: str, message: Message) -> list[Outbound]:
        name = region_of(peer)
        region = self._regions.get(name)
        if region is None or self.stage not in (Stage.TRAINING, Stage.STARTING):
            raise JoinRefusedError(f"region '{name}' takes no part in the run")
        rank = rank_of(peer)
        index = fields.optional_count(message.meta, "slice")
        own = {k: v for k, v in message.meta.items() if k not in RANK_FIELDS}
        update = read_update(own, message.payload)
        if update.region != name:
            raise FrameError(f"'{peer}' sent an update of region '{update.region}'")
        if update.attempt < region.attempt:
            raise JoinRefusedError(f"region '{name}': a newer process group has joined")
        if update.attempt > region.attempt:
            raise FrameError(f"'{peer}' sent an update of a process group that has not joined")
        size = size_of(message)
        if size is None:
            return self._sent(region, rank, message.meta, update)
        self.averagers.begin_part(peer, index, update, message.meta, size)
        return []

    def _on_piece(self, peer: str, message: Message) -> list[Outbound]:
        """Handle values of an update that was begun; after a refusal, the rest of them arrives."""
        region, rank = self._regions.get(region_of(peer)), rank_of(peer)
        if region is None:
            return []
        part = self.averagers.add_piece(peer, message)
        return [] if part is None else self._sent(region, rank, part.meta, part.update)

    def _sent(
        self, region: RegionRanks, rank: int, meta: Meta, update: UpdateMessage
    ) -> list[Outbound]:
        """Handle the update of a slice, or of a rank without one, which is complete."""
        loss = fields.number(meta, "rank_loss") if "rank_loss" in meta else None
        rows = fields.count(meta, "rank_rows")
        region.add_header(rank, update, rows, loss, self._now_s())
        index = fields.optional_count(meta, "slice")
        if index is not None:
            self.averagers.stage(rank_name(region.name, rank), index, update)
            region.add_part(index, StagedPart.of(update))
        region.add_buffers(rank, update)
        return self._take(region.name, region) if region.has_sent(self.averagers.slices) else []

    def _take(self, name: str, region: RegionRanks) -> list[Outbound]:
        """Take in a region's update, which is complete."""
        sent = region.take_update(self.buffer_layout)
        first = sent.header
        self._buffers.check(first)
        self._buffers.take(first)
        now_s = self._now_s()
        order = TakeOrder(
            region=name,
            attempt=first.attempt,
            seq=first.seq,
            rows=first.num_samples,
            step_s=first.step_s,
            exchange_s=first.exchange_s,
            now_s=now_s,
        )
        answers = self._execute(order)
        region.open, region.sent_bytes = first, sent.size_bytes
        region.steps += first.steps
        compute_s = first.steps * first.step_s
        before_s, region.stepped_s = region.stepped_s or now_s - compute_s, now_s
        self._emit(
            "step",
            region=name,
            step=region.steps,
            steps=first.steps,
            samples=first.num_samples,
            loss=sent.loss,
            exchange_s=first.exchange_s,
            compute_s=compute_s,
            wait_s=max(0.0, now_s - before_s - compute_s),
            start_s=now_s - compute_s,
        )
        return self._answers(answers)

    def _answers(self, replies: Answers) -> list[Outbound]:
        """Return the answers of this process's averagers, for the ranks that own the slices.

        Ranks whose slices are all elsewhere, or that have none, get an answer without a slice.
        """
        found: list[Outbound] = []
        ordered = self._holders.newest
        first = {reply.to: reply for reply in replies[0]} if replies else {}
        with_buffers = {each.to: each for each in self._buffers.attach(list(first.values()))}
        has_buffers: set[str] = set()  # ranks whose answer has them
        save: Meta = {}
        at_barrier = any(reply.barrier is not None for reply in first.values())
        cuts = False
        if at_barrier:
            self._at_barrier(list(first.values()))
            save = self._met()
            joined = [n for n in self.averagers.view.joining if n in self._regions]
            cuts = not all(self._regions[n].fits(self.averagers.slices) for n in joined)
            save |= {"cuts": True} if cuts else {}
        for index, of_slice in replies.items():
            if {reply.to for reply in of_slice} != first.keys():
                raise InvariantError("the averagers of two slices answer different regions")
            for reply in of_slice:
                owner = rank_name(reply.to, self.averagers.slices[index].owners[reply.to])
                own = reply if owner in has_buffers else _with(reply, with_buffers[reply.to])
                has_buffers.add(owner)
                meta = {**reply_meta(own), **save, "slice": index}
                found += [Outbound(owner, each) for each in divided(meta, own)]
        for name, reply in first.items():
            region = self._regions.get(name)
            if region is None:
                continue
            owners = {self.averagers.slices[i].owners[name] for i in replies}
            empty = replace(reply, payload_P=torch.empty(0), coded=None, against=None)
            empty = _with(empty, with_buffers[name])
            for rank in set(range(region.world_size)) - owners:
                meta = {**reply_meta(empty), **save, "slice": None}
                message = Message("reply", meta, payload_bytes(empty), "reply")
                found.append(Outbound(rank_name(name, rank), message))
            self._note_exchange(ordered, name, region, reply, reply_bytes(replies).get(name, 0))
        found += self._divide_again() if cuts else []
        return found + (self._admit_next() if self._joining else [])

    def _note_exchange(
        self,
        ordered: int,
        name: str,
        region: RegionRanks,
        reply: ReplyMessage,
        received_bytes: int,
    ) -> None:
        """Record the answer to a region's update, once all holders have it.

        Args:
            ordered: number of the order that has caused it.
            name: the region.
            region: its ranks.
            reply: the answer of a slice.
            received_bytes: size of the answers of this process.
        """
        update, layout = region.open, self.layout
        if update is None or layout is None:
            return
        start, stop = self.terms.bounds_in(((0, layout.size),), layout.size)[reply.fragment]
        values = {
            "region": name,
            "seq": reply.seq,
            "start_s": region.since_s,
            "bytes_sent": region.sent_bytes,
            "bytes_received": received_bytes,
            "bytes_before": 4 * (stop - start),
            "blocking": self.terms.strategy.traits.exchange.blocking == "always",
            "held_s": self._now_s() - region.since_s,
            "staleness": max(0, reply.version - update.base_version - 1),
            "round": reply.version,
        }
        self._exchanges.append((ordered, values))
        region.open = None

    def _on_evaluation(self, peer: str, message: Message) -> None:
        """Add up the sums of all ranks of a region, and of all regions, at one step."""
        name, step = region_of(peer), fields.count(message.meta, "version")
        if name not in self._regions:
            return
        is_final = fields.flag(message.meta, "final")
        rows, sums = fields.count(message.meta, "rows"), read_stats(message.meta, message.payload)
        region, rank = self._regions[name], rank_of(peer)
        found = self._evaluations.add((step, is_final), region, rank, rows, sums)
        if found is not None:
            self._emit("eval", **found.event())
            self._emit_completed()

    def _emit_completed(self) -> None:
        """Record the evaluations that all regions have reported."""
        for each in self._evaluations.completed(self._regions):
            self._emit("eval", **each.event())

    def _on_finished(self, peer: str) -> list[Outbound]:
        """Handle the end of a rank's training; collect the model once all ranks have ended."""
        region = self._regions.get(region_of(peer))
        if region is None or self.stage is not Stage.TRAINING:
            return []
        region.finished.add(peer)
        return self._ended()

    def _ended(self) -> list[Outbound]:
        """Collect the model, if all regions have finished."""
        if not self._regions:
            return []  # all are lost
        if not all(len(each.finished) == each.world_size for each in self._regions.values()):
            return []
        if self._halted:
            return []  # they wait until the checkpoint is made
        self.stage = Stage.ENDING
        return self._collect() + self._refuse_joining("ended")

    def _refuse_joining(self, what: str) -> list[Outbound]:
        """Refuse the regions that wait to join again; ``what``: what has happened to the run."""
        found: list[Outbound] = []
        for name in list(self._joining):
            error = JoinRefusedError(f"run '{self.terms.name}' {what} before '{name}' could join")
            found += self._refuse(name, error)
            self._stop_joining(name)
        return found

    def _collect(self) -> list[Outbound]:
        """Ask a region for the final parameters."""
        self._missing = self._everything()
        self._execute(CollectOrder(source=self._source, shares=False))
        return self._all("collect", [self._source])

    @property
    def _source(self) -> str:
        """The region that sends the initial and the final parameters."""
        return min(self._regions)

    def _all(self, kind: str, names: Sequence[str], about: Meta | None = None) -> list[Outbound]:
        """Return a message for all ranks of some regions."""
        message = Message(kind, about or {}, b"", "control", CONTROL)
        return [Outbound(peer, message) for name in names for peer in self._regions[name].peers]

    def _on_unreached(self, peer: str, meta: Meta) -> None:
        """Record to which holders a rank has no connection now.

        Raises:
            FrameError: there is no such holder.
        """
        name, rank = region_of(peer), rank_of(peer)
        holders, causes = fields.counts(meta, "holders"), fields.texts(meta, "causes")
        known = all(self._holders.is_known(holder) for holder in holders)
        if not known or len(holders) != len(causes):
            raise FrameError(f"'{peer}' misses holders {[*holders]}, with {len(causes)} causes")
        region = self._joining.get(name) or self._regions.get(name)
        if region is not None and rank < region.world_size:
            region.unreached[rank] = dict(zip(holders, causes, strict=True))

    def _on_failed(self, peer: str, meta: Meta) -> list[Outbound]:
        """Handle the end of a rank's loop by an error: the other ranks cannot continue."""
        name, cause = region_of(peer), fields.text(meta, "cause")
        region = self._joining.get(name) or self._regions.get(name)
        if region is None or fields.count(meta, "attempt") != region.attempt:
            return []  # of an earlier process group
        error = RegionLostError(f"rank '{peer}' has failed: {cause}")
        told = [each for each in self._refuse(name, error) if each.peer != peer]
        return told + self._on_lost(name, error.message)

    def _refuse(self, name: str, error: GeoRayError, peers: Sequence[str] = ()) -> list[Outbound]:
        """Tell all ranks of a region why it cannot continue.

        Args:
            name: the region.
            error: the reason.
            peers: further endpoints to tell.
        """
        _LOGGER.warning("region '%s' is refused: %s", name, error.message)
        region = self._joining.get(name) or self._regions.get(name)
        ranks = [] if region is None else [rank_name(name, rank) for rank in region.hellos]
        attempt = 0 if region is None else region.attempt
        return [refusal_to(peer, error, attempt) for peer in dict.fromkeys((*ranks, *peers))]

    def _emit(self, kind: str, **values: Any) -> None:
        self._events.append({"kind": kind, "t_s": self._now_s(), **values})


def _lost_server(error: GeoRayError) -> ServerLostError:
    return ServerLostError(
        f"a process that served the run is lost: {error.message}",
        fix="Start the region again: the run continues from its newest checkpoint.",
    )


def _with(reply: ReplyMessage, other: ReplyMessage) -> ReplyMessage:
    """Return an answer with the model buffers of another one."""
    return replace(reply, buffers_E=other.buffers_E, buffers_weight=other.buffers_weight)
