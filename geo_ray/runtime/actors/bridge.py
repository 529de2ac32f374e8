"""A region's bridge over sockets: the only process that speaks to other regions.

The lead of the region's parameter server hands it one update at a time and waits for the answer.
If this region hosts the averager, updates of all regions end here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from geo_ray.errors import (
    DeadlineExceededError,
    GeoRayError,
    InvariantError,
    LinkDownError,
)
from geo_ray.runtime.actors.alarm import Alarm
from geo_ray.runtime.actors.event_buffer import EventBuffer
from geo_ray.runtime.actors.parts import write_hub_part
from geo_ray.runtime.messages.exchange import (
    dropped_meta,
    payload_bytes,
    read_refusal,
    read_reply,
    read_update,
    refusal_meta,
    reply_meta,
    update_meta,
)
from geo_ray.runtime.paths.differential import DifferentialPath
from geo_ray.runtime.paths.overlay_rounds import OverlayRounds
from geo_ray.runtime.paths.standby import StandbyPath
from geo_ray.runtime.paths.transfers import TransfersPath
from geo_ray.strategies.base import Reply, Update
from geo_ray.training.averager.averager import Averager, AveragerSnapshot
from geo_ray.training.averager.log import LogOutcome, Op, Skip, TakeIn, TakeSum, Wake, carry_out
from geo_ray.transport.endpoint.endpoint import Endpoint
from geo_ray.transport.lan.server import LanConnection
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.frames import view_of
from geo_ray.transport.wire.message import Message
from geo_ray.transport.wire.meta import Meta

log = logging.getLogger(__name__)


class Bridge:
    """Forwards updates to the averager, or is its home.

    Args:
        region: this region.
        hub: the region that hosts the averager.
        averager: the averager, if ``hub`` is this region.
        event_buffer: takes events for the controller.
        parts_dir: where parts of checkpoints go.
        timeout_s: longest wait of the lead for an answer.
    """

    def __init__(
        self,
        region: str,
        hub: str,
        averager: Averager | None,
        event_buffer: EventBuffer,
        parts_dir: str,
        timeout_s: float,
    ) -> None:
        if (region == hub) != (averager is not None):
            raise InvariantError(f"bridge of '{region}': the averager belongs to '{hub}'")
        self._region = region
        self._hub = hub
        self._averager = averager
        self._event_buffer = event_buffer
        self._parts_dir = parts_dir
        self._timeout_s = timeout_s
        self._endpoint: Endpoint | None = None
        self._lossy: DifferentialPath | None = None
        self._overlay: OverlayRounds | None = None
        self._transfers: TransfersPath | None = None
        self._standby: StandbyPath | None = None
        self._lock = threading.Lock()
        self._answered = threading.Condition(self._lock)
        self._answers: dict[int, Reply | GeoRayError | None] = {}  # None: dropped
        self._closed = False
        self._arrived_s: dict[str, float] = {}
        self._alarm = Alarm(self._on_wake)
        self._routes: dict[str, Callable[[str, Message], None]] = {
            "update": self._on_update,
            "reply": self._on_reply,
            "refused": self._on_refused,
        }

    def use(self, endpoint: Endpoint) -> None:
        """Speak to other regions through ``endpoint``, whose messages go to `on_message`."""
        self._endpoint = endpoint

    def use_lossy(self, road: DifferentialPath | None) -> None:
        """Let lossy blocks of updates take ``road``, if there is one; the bridge closes it."""
        self._lossy = road
        self._routes |= {} if road is None else road.routes()

    def use_overlay(self, rounds: OverlayRounds) -> None:
        """Let rounds of updates and replies take an overlay; the bridge closes it."""
        self._overlay = rounds
        self._routes |= rounds.routes()

    def use_transfers(self, road: TransfersPath) -> None:
        """Let updates take turns on their way; the bridge closes ``road``."""
        self._transfers = road
        self._routes |= road.routes()

    def use_standby(self, road: StandbyPath) -> None:
        """Let the averager have a standby, which may take over; the bridge closes ``road``."""
        self._standby = road
        self._routes |= road.routes()

    # -------------------------------------------------------------- for the controller

    def request_stop(self) -> None:
        """Let the averager tell all regions to finish."""
        if self._standby is not None:
            self._standby.request_stop()
            return
        with self._lock:
            self._hub_state().request_stop()

    def request_checkpoint(self, checkpoint: int, *, halt: bool) -> bool:
        """Let the averager begin a checkpoint; False if it cannot be now."""
        if self._standby is not None:
            return self._standby.request_checkpoint(checkpoint, halt=halt)
        with self._lock:
            return self._hub_state().request_checkpoint(checkpoint, halt=halt)

    def report_dead(self, region: str) -> None:
        """Tell the standby that ``region`` is dead and will not come back."""
        if self._standby is not None:
            self._standby.on_report_dead(region)

    def status(self) -> dict[str, Any]:
        """Links and rounds: plain values."""
        links = {} if self._endpoint is None else self._endpoint.stats()
        version = None if self._averager is None else self._averager.state.version
        status: dict[str, Any] = {"links": links, "version": version}
        if self._lossy is not None:
            self._lossy.count_into(links)
            status["loose"] = self._lossy.status()
        if self._overlay is not None:
            status["overlay"] = self._overlay.status()
        return status if self._standby is None else status | self._standby.status()

    def close(self) -> None:
        """Release a lead that waits; sockets belong to their owner."""
        with self._answered:
            self._closed = True
            self._answered.notify_all()
        self._alarm.set(None)
        for road in (self._lossy, self._overlay, self._transfers, self._standby):
            if road is not None:
                road.close()

    def _hub_state(self) -> Averager:
        if self._averager is None:
            raise InvariantError(f"region '{self._region}' does not host the averager")
        return self._averager

    # -------------------------------------------------------------- for the lead

    def handle(
        self, conn: LanConnection, meta: Meta, payload: memoryview | None
    ) -> tuple[Meta, memoryview | None]:
        """One update of the own region; blocks until the averager's answer is here."""
        if fields.text(meta, "op") == "recall":
            return ({"seq": None} if self._lossy is None else self._lossy.recall()), None
        update = read_update(meta, payload)
        if update.region != self._region:
            raise InvariantError(f"bridge of '{self._region}' got an update of '{update.region}'")
        if self._overlay is not None:
            reply = self._overlay.exchange(update)
            return reply_meta(reply), payload_bytes(reply)
        if self._standby is not None:
            self._standby.submit(update)
        elif self._averager is not None:
            self._take_in(update)
        elif self._lossy is not None:
            self._lossy.send(update, self._send)
        else:
            self._send(update)
        answer = self._await(update.seq)
        if answer is None:
            return dropped_meta(update.seq), None
        return reply_meta(answer), payload_bytes(answer)

    def _send(self, update: Update) -> None:
        if self._transfers is None:
            self._ship(update)
        else:
            self._transfers.send(update, lambda: self._ship(update))

    def _ship(self, update: Update) -> None:
        message = Message("update", update_meta(update), payload_bytes(update), "update")
        self._wan().send(self._hub, message)

    def drop(self, seq: int) -> None:
        """Tell the lead that nobody took in, or will take in, its open update ``seq``."""
        with self._answered:
            self._answers.setdefault(seq, None)
            self._answered.notify_all()

    def _await(self, seq: int) -> Reply | None:
        deadline_s = time.monotonic() + self._timeout_s
        with self._answered:
            while seq not in self._answers:
                if self._closed:
                    raise LinkDownError(f"the bridge of region '{self._region}' is closing")
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._answered.wait(left_s):
                    raise DeadlineExceededError(
                        f"region '{self._region}': the averager in '{self._hub}' did not answer "
                        f"update {seq} within train.step_timeout_s = {self._timeout_s:g} s; on a "
                        "slow link a large model may need longer"
                    )
            answer = self._answers.pop(seq)
        if isinstance(answer, GeoRayError):
            raise answer
        return answer

    # -------------------------------------------------------------- from other regions

    def on_message(self, peer: str, message: Message) -> None:
        """Hand a message of another region to whoever takes that kind."""
        route = self._routes.get(message.kind)
        if route is None:
            log.warning("region '%s' sent an unexpected '%s'", peer, message.kind)
            return
        route(peer, message)

    def _on_update(self, peer: str, message: Message) -> None:
        update = read_update(message.meta, view_of(message.payload))
        if update.region != peer:
            log.warning("region '%s' sent an update in the name of '%s'", peer, update.region)
            return
        self._take_in(update)

    def _on_reply(self, peer: str, message: Message) -> None:
        if peer == self._hub:
            self.give(read_reply(message.meta, view_of(message.payload)))

    def _on_refused(self, peer: str, message: Message) -> None:
        if peer == self._hub:
            self.fail(*read_refusal(message.meta))

    def _take_in(self, update: Update) -> None:
        self._arrived_s[update.region] = time.monotonic()
        if self._transfers is not None:
            self._transfers.uploads.arrived(update, lambda: self._commit(update))
        elif self._lossy is None:
            self._commit(update)
        else:
            self._lossy.sink.arrive(update, self._commit)

    def _commit(self, update: Update) -> None:
        outcome = self._do(TakeIn(update))
        if outcome.error is not None:
            log.error("update %d of '%s' refused: %s", update.seq, update.region, outcome.error)
            self.refuse(update, outcome.error)
        for reply in outcome.replies:
            self.deliver(reply)

    def _do(self, op: Op) -> LogOutcome:
        averager = self._hub_state()
        with self._lock:
            averager.state.now_s = time.monotonic()
            outcome = carry_out(averager, op)
            snapshots, averager.snapshots = averager.snapshots, []
            self._alarm.set(averager.state.wake_s)
            self._tell_noise(averager)
        self.save(snapshots)
        return outcome

    def _tell_noise(self, averager: Averager) -> None:
        for reading in averager.noise.news():  # of all regions together
            self._event_buffer.add("noise", **{**reading.fields(), "region": None})

    def _on_wake(self) -> None:
        for reply in self._do(Wake()).replies:
            self.deliver(reply)

    def version(self) -> int:
        """Commits of the averager; for the desk of transfers, as what follows."""
        return self._hub_state().state.version

    def skip(self, region: str, epoch: int, seq: int) -> None:
        """Answer an update without taking it in."""
        for reply in self._do(Skip(region, epoch, seq)).replies:
            self.deliver(reply)

    def take_sum(self, parts: tuple[Update, ...], total_P: Tensor) -> list[Reply] | None:
        """Take in a sum of updates; None if it must come in parts.

        Raises:
            GeoRayError: the averager refuses it.
        """
        outcome = self._do(TakeSum(parts, total_P))
        if outcome.error is not None:
            raise outcome.error
        return outcome.replies if outcome.done else None

    def take_in_round(self, updates: Sequence[Update]) -> list[Reply]:
        """Hand the averager all updates of a round that was summed on the way.

        Raises:
            GeoRayError: it refuses them.
        """
        averager = self._hub_state()
        with self._lock:
            replies = [reply for update in updates for reply in averager.on_update(update)]
            snapshots, averager.snapshots = averager.snapshots, []
            self._tell_noise(averager)
        self.save(snapshots)
        return replies

    def save(self, snapshots: Sequence[AveragerSnapshot]) -> None:
        """Write the averager's part of a checkpoint."""
        for snapshot in snapshots:  # disks are slow, and this may be the link's receiving thread
            threading.Thread(target=self._write, args=(snapshot,), daemon=True).start()

    def _write(self, snapshot: AveragerSnapshot) -> None:
        try:
            part = write_hub_part(self._parts_dir, snapshot)
        except GeoRayError as error:
            self._event_buffer.add("part_failed", id=snapshot.id, error=error)
        else:
            self._event_buffer.add("parts", id=snapshot.id, step=0, parts=[part])

    def deliver(self, reply: Reply) -> None:
        """Send an answer on its way."""
        arrived_s = self._arrived_s.get(reply.to)
        if arrived_s is not None:
            reply = replace(reply, held_s=time.monotonic() - arrived_s)
        if self._lossy is not None:
            reply = self._lossy.sink.beside(reply)
        if reply.to == self._region:
            self.give(reply)
            return
        message = Message("reply", reply_meta(reply), payload_bytes(reply), "reply")
        self._wan().send(reply.to, message)

    def refuse(self, update: Update, error: GeoRayError) -> None:
        """Tell an update's region that it was refused."""
        if update.region == self._region:
            self.fail(update.seq, error)
            return
        meta = refusal_meta(update.seq, error)
        self._wan().send(update.region, Message("refused", meta, b"", "control"))

    def give(self, reply: Reply) -> None:
        """Hand an answer to the lead, which waits for it."""
        if self._transfers is not None:
            reply = self._transfers.answered(reply)
        with self._answered:
            self._answers[reply.seq] = reply
            self._answered.notify_all()

    def fail(self, seq: int, error: GeoRayError) -> None:
        """Tell the lead that its update was refused."""
        with self._answered:
            self._answers[seq] = error
            self._answered.notify_all()
        if self._overlay is not None:
            self._overlay.fail(error)

    def _wan(self) -> Endpoint:
        if self._endpoint is None:
            raise InvariantError(f"bridge of '{self._region}' has no endpoint yet")
        return self._endpoint
