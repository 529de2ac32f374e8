"""The primary shard of a region over sockets: carries out the effects of `training.server`.

Workers push over the LAN and block until answered; one thread sends to the bridge. One lock
guards the state machine and is never held while waiting for the network. Checkpoint parts and
copies for joining regions are written on other threads (`RegionWriter`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from geo_ray.base.errors import (
    DeadlineExceededError,
    GeoRayError,
    InvariantError,
    LinkDownError,
    ReferenceLostError,
)
from geo_ray.base.threads import ThreadPoolMap
from geo_ray.runtime.bridge import BridgeAnswer, BridgeClient, ReconnectingBridgeClient
from geo_ray.runtime.exchange.messages import (
    answer_meta,
    as_bytes,
    pull_meta,
    read_pull,
    read_report,
    read_stats,
)
from geo_ray.runtime.remote_shard import RemoteShard, parameters_for, pushed_gradient, slice_for
from geo_ray.storage.manifest import PartInfo
from geo_ray.telemetry.event_buffer import EventBuffer
from geo_ray.training.checkpoint_parts import HeldShard, typed
from geo_ray.training.config import exchange_s
from geo_ray.training.effects import (
    ActiveWorkersChanged,
    Assignment,
    Effect,
    SendUpdate,
    Snapshot,
    StateTransfer,
    StepDone,
)
from geo_ray.training.lazy_copy import Unread
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.server import Server
from geo_ray.training.state_guard import CHANGE_KINDS
from geo_ray.training.stragglers import WorkTimes
from geo_ray.transport.lan import LanClient, LanConnection
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Meta


class RegionLog:
    """Steps and exchanges of one region, with their times.

    Args:
        event_buffer: takes the events.
    """

    def __init__(self, event_buffer: EventBuffer) -> None:
        self._buffer = event_buffer
        self._began_s = self._applied_s = event_buffer.now_s()

    def begin(self) -> None:
        """Workers are given a step."""
        self._began_s = self._buffer.now_s()

    def step(self, done: StepDone) -> None:
        """A step is applied."""
        now_s = self._buffer.now_s()
        self._buffer.add("step", **done.event(self._began_s, self._applied_s, now_s))
        self._applied_s = now_s
        for cause in done.refused:
            self._buffer.add("step_refused", step=done.step, cause=cause)
        if done.noise is not None:
            self._buffer.add("noise", **done.noise.fields())

    def exchange(
        self, send: SendUpdate, reply: ReplyMessage, began_s: float, num_params: int
    ) -> None:
        """An answer is here.

        Args:
            send: the request.
            reply: the answer.
            began_s: when the request began.
            num_params: of what was exchanged.
        """
        if reply.dropped:
            self._buffer.add("update_dropped", seq=reply.seq, bytes_sent=0)
            return
        event = send.event(send.update, reply, began_s, 4 * num_params)
        self._buffer.add("exchange", **event)


Written = Snapshot | StateTransfer
"""What is copied at once, and written when there is time."""


class RegionWriter:
    """Writes a region's parts of checkpoints, and copies for newcomers, on other threads.

    Disks are slow, and whoever takes a copy has an exchange to carry on, or a controller that
    waits.

    Args:
        held: the primary shard.
        others: the region's other shards, in order, on connections of their own: what writes their
            parts holds up nothing else.
        event_buffer: takes what has become of it.
    """

    def __init__(
        self, held: HeldShard, others: Sequence[RemoteShard], event_buffer: EventBuffer
    ) -> None:
        self._held = held
        self._others = others
        self._event_buffer = event_buffer
        self._pool = ThreadPoolMap(1 + len(others), "write-parts")

    def write_in_background(self, copies: Sequence[Written]) -> None:
        """Begin to write; events tell of the parts, or why there are none."""
        if copies:
            threading.Thread(target=self._write, args=(tuple(copies),), daemon=True).start()

    def close(self) -> None:
        """End its threads."""
        self._pool.close()

    def _write(self, copies: Sequence[Written]) -> None:
        for copy in copies:
            is_transfer = isinstance(copy, StateTransfer)
            snapshot = copy.snapshot if isinstance(copy, StateTransfer) else copy
            try:
                parts = self._write_parts(snapshot)
            except Exception as error:  # whatever it is: the controller waits for the part
                kind = "state_transfer_failed" if is_transfer else "part_failed"
                self._event_buffer.add(kind, id=snapshot.id, error=typed(error))
                continue
            about = {"id": snapshot.id, "step": snapshot.step, "parts": parts}
            if is_transfer:
                self._event_buffer.add("state_transferred", **about, round=snapshot.round)
            else:
                self._event_buffer.add("parts", **about)

    def _write_parts(self, snapshot: Snapshot) -> list[PartInfo]:
        own = partial(self._held.write_primary_part, snapshot)
        others = [partial(each.ask, HeldShard.write_part, snapshot.id) for each in self._others]
        return self._pool([own, *others])


log = logging.getLogger(__name__)

_LOOK_S = 1.0  # between two looks at whether the region has failed


class PrimaryShard:
    """Serves a region's workers and its exchanges.

    Args:
        server: the state machine, over this shard and the others.
        held: this shard.
        writers: the region's other shards, in order, on connections of their own: what writes their
            parts of a checkpoint holds up nothing else.
        bridge: the region's bridge; None if the region is alone.
        event_buffer: takes events for the controller.
        limit_s: longest wait of a worker for its answer, and of a request to the bridge.
    """

    def __init__(
        self,
        server: Server,
        held: HeldShard,
        writers: Sequence[RemoteShard],
        bridge: LanClient | None,
        event_buffer: EventBuffer,
        limit_s: float,
    ) -> None:
        self.server = server
        self._held = held
        self._shard = held.shard
        self._writer = RegionWriter(held, writers, event_buffer)
        self._line = (
            None if bridge is None else ReconnectingBridgeClient(server.plan.region, bridge)
        )
        self._unread = Unread()  # payloads of open requests, which checkpoints hold
        if not server.model.is_cut and server.wire.plan.up is None:
            self._shard.state.allocate = self._payload_buffer
        self._event_buffer, self._log = event_buffer, RegionLog(event_buffer)
        self._timeout_s = limit_s
        self._changed = threading.Condition(threading.Lock())
        # Held while something is coded or decoded, and taken before `_changed`: a checkpoint copies
        # what is owed to other regions, and the model, either before a message counts or after.
        self._coding = threading.Lock()
        self._times, self._times_lock = WorkTimes(), threading.Lock()
        self._answers: dict[int, Assignment] = {}
        self._attempts: dict[int, int] = {}
        # What is carried beside the version that a worker was told to fetch.
        self._announced_B: dict[int, Tensor | None] = {}
        self._sends: SimpleQueue[bool] = SimpleQueue()  # whether there is an open request
        self._failure: GeoRayError | None = None
        self._exhausted = self._is_paused = False
        self._asking = False  # a request is at the bridge, not being coded or merged
        self._status: dict[str, Any] = {}
        with self._changed:
            self._execute(server.resume())
        self._exchanger = threading.Thread(target=self._exchange, name="exchange", daemon=True)
        self._exchanger.start()

    # -------------------------------------------------------------- for the controller

    def status(self) -> dict[str, Any]:
        """What the region was doing when it last went on: plain values.

        The lock is not asked for: a large model's step takes long, and the controller does not wait
        for it.
        """
        status = self._status
        away_s = None if self._line is None else self._line.away_s
        if away_s is not None:
            status = {**status, "bridge_away_s": away_s}
        with self._times_lock:
            computing = self._times.computing(time.monotonic())
            status = {**status, "computing": computing, "usual_s": self._times.usual_s}
        return status if self._asking else {**status, "blocked_on": None}

    def stop(self) -> None:
        """Finish after the present step; for a region that is alone."""
        with self._changed:
            self.server.stop()

    def lose(self, worker: int, attempt: int) -> None:
        """A worker's process has ended, though its connection may not have told."""
        with self._changed:
            if self._attempts.get(worker, 0) <= attempt:
                self._attempts[worker] = attempt + 1  # what it still sends is refused
                with self._times_lock:
                    self._times.forget(worker)
                self.server.model.pulls.heard(worker)
                self._execute(self.server.leave(worker))

    def drain(self, worker: int) -> None:
        """A worker is to go home between two steps."""
        with self._changed:
            self._execute(self.server.drain(worker))

    def pause(self, is_paused: bool) -> None:
        """Let workers begin no more steps, or again."""
        with self._changed:
            self._is_paused = is_paused
            self._changed.notify_all()

    def use_bridge(self, client: LanClient) -> None:
        """The region has a new bridge; an open request is said again through it."""
        if self._line is not None:
            self._line.use(client)

    def cut(self, checkpoint: int, *, halt: bool) -> None:
        """A checkpoint has begun: copy the region's state; it is written on a thread of its own.

        Args:
            checkpoint: its id.
            halt: stand still afterwards.
        """
        with self._coding:
            snapshots = self._cut(checkpoint, halt=halt)
        self._writer.write_in_background(snapshots)

    def use_statistics(self, model_buffers: bytes) -> None:
        """What the final model carries, with statistics over all regions."""
        with self._changed:
            if self.server.model_buffers is not None:
                self.server.model_buffers.note_precise(model_buffers)
            self._changed.notify_all()

    def close(self) -> None:
        """Release waiting workers, stop the exchange thread; connections belong to their owners."""
        with self._changed:
            closing = f"the parameter server of region '{self.server.plan.region}' is closing"
            self._failure = self._failure or LinkDownError(closing)
            self._go_on()
            if self._line is not None:
                self._line.end(self._failure)
        self._sends.put(False)
        self._exchanger.join(timeout=5.0)
        self._writer.close()

    # -------------------------------------------------------------- for the workers

    def handle(
        self, conn: LanConnection, meta: Meta, payload: memoryview | None
    ) -> tuple[Meta, memoryview | None]:
        """One request of a worker; a join or a push blocks until there is work."""
        worker = fields.count(conn.hello, "worker")
        operation = fields.text(meta, "op")
        self._note_time(worker, operation)
        with self._changed:
            self._admit(conn, worker, joins=operation == "join")
        if operation == "stats":
            self._event_buffer.add(
                "stats",
                step=fields.count(meta, "version"),
                rows=fields.count(meta, "rows"),
                final=fields.flag(meta, "final"),
                model=fields.optional_text(meta, "model"),
                stats=read_stats(meta, payload),
            )
            with self._changed:
                self.server.work.evals.reported(final=fields.flag(meta, "final"))
                self._go_on()
            return {}, None
        if operation == "state_changed":
            step, names = fields.count(meta, "version"), fields.text(meta, "names")
            how = fields.one_of(CHANGE_KINDS)(meta, "how")
            self._event_buffer.add("state_changed", step=step, how=how, names=names)
            return {}, None
        if operation == "precise":
            return {}, self._await_statistics(bytes(payload or b""))
        if operation in {"pull", "fetch"}:
            with self._changed:
                return self._pulled(conn, worker, meta, payload)
        with self._changed:
            self.server.model.pulls.heard(worker)
            if operation == "join":
                self._answers.pop(worker, None)
                self._execute(self.server.join(worker))
            else:
                self._admit(conn, worker)
                if operation == "put" or not self.server.model.is_cut:
                    self._put(worker, conn, payload)
                if operation == "put":
                    return {}, None
                # Kept by no name: an update in there would be held until the worker's answer.
                self._execute(self.server.push(worker, read_report(meta)))
        return self._await_answer(conn, worker, payload)

    def _note_time(self, worker: int, operation: str) -> None:
        """A worker's request has come; the lock may be held for as long as a step is applied."""
        with self._times_lock:
            if operation in {"put", "push"}:
                self._times.end(worker, time.monotonic())
            elif operation == "stats":
                self._times.evaluated(worker, time.monotonic())
            elif operation in {"join", "precise"}:
                self._times.forget(worker)

    def on_close(self, conn: LanConnection) -> None:
        """A worker's connection ended; only the newest incarnation of a rank counts."""
        worker = fields.count(conn.hello, "worker")
        with self._changed:
            if self._attempts.get(worker) == fields.count(conn.hello, "attempt"):
                with self._times_lock:
                    self._times.forget(worker)
                self.server.model.pulls.heard(worker)
                self._execute(self.server.leave(worker))

    def _pulled(
        self, conn: LanConnection, worker: int, meta: Meta, payload: memoryview | None
    ) -> tuple[Meta, memoryview | None]:
        """The parameters of this shard; or, with others, which version to fetch from all."""
        model = self.server.model
        if fields.text(meta, "op") == "fetch":
            fetched_S = self._shard.fetch(read_pull(worker, meta))
            return {}, slice_for(conn, fetched_S, self._announced_B.get(worker))
        judged = fields.flag(meta, "judged")
        if model.is_cut:
            return self._tell(worker, judged=judged), None
        found_S = self._shard.eval_params_S if judged else self._shard.params_S
        return {}, parameters_for(conn, found_S, payload, self._model_buffers(judged=judged))

    def _admit(self, conn: LanConnection, worker: int, *, joins: bool = False) -> None:
        """Refuse an incarnation that was replaced; it may only have been cut off for a while."""
        attempt = fields.count(conn.hello, "attempt")
        newest = self._attempts.get(worker, 0)
        if attempt < newest or (attempt > newest and not joins):
            raise LinkDownError(
                f"attempt {attempt} of worker {worker} of region '{self.server.plan.region}' was "
                f"replaced by attempt {newest}"
            )
        if attempt > newest:
            self._attempts[worker] = attempt
            self._changed.notify_all()  # who waits in the name of the old one must not take answers

    def _await_answer(
        self, conn: LanConnection, worker: int, payload: memoryview | None
    ) -> tuple[Meta, memoryview | None]:
        deadline_s = time.monotonic() + self._timeout_s
        with self._changed:
            self._admit(conn, worker)
            while self._is_paused or worker not in self._answers:
                if self._failure is not None:
                    raise self._failure
                # An open exchange has a deadline of its own, and its error says more than ours.
                if self._is_paused:
                    deadline_s = time.monotonic() + self._timeout_s
                left_s = None if self.server.link_busy else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise DeadlineExceededError(
                        f"region '{self.server.plan.region}': worker {worker} got no answer within "
                        f"train.step_timeout_s = {self._timeout_s} s (phase {self.server.phase})"
                    )
                self._changed.wait(left_s)
                self._admit(conn, worker)
            answer = self._answers.pop(worker)
            self._begin_time(conn, worker, answer)
            if self.server.model.is_cut:
                return answer_meta(answer) | self._tell(worker, judged=False), None
            # The gradient is used by now: its buffer takes the parameters, and no new pages.
            buffers_B = self._model_buffers(judged=False)
            return answer_meta(answer), parameters_for(
                conn, self._shard.params_S, payload, buffers_B
            )

    def _begin_time(self, conn: LanConnection, worker: int, answer: Assignment) -> None:
        attempt, now_s = fields.count(conn.hello, "attempt"), time.monotonic()
        with self._times_lock:
            if answer.span is not None:
                self._times.begin(worker, attempt, now_s, evaluates=answer.evaluate)

    def _await_statistics(self, own: bytes) -> memoryview:
        """The final model buffers, once all regions have reported their statistics."""
        model_buffers = self.server.model_buffers
        if model_buffers is None:
            raise InvariantError(f"the model of '{self.server.plan.region}' carries nothing")
        with self._changed:
            if model_buffers.precise_B is None:
                self._event_buffer.add("precise", model_buffers=own)
            while model_buffers.precise_B is None:
                if self._failure is not None:
                    raise self._failure
                self._changed.wait(_LOOK_S)
            return as_bytes(model_buffers.precise_B)

    def _put(self, worker: int, conn: LanConnection, payload: memoryview | None) -> None:
        """Hold what a worker pushed: the model buffers after its step, then the gradient."""
        model_buffers, count = self.server.model_buffers, self._shard.params_S.numel()
        partition = self.server.partition_of(worker)
        before = 0 if model_buffers is None else model_buffers.layout.size_floats
        pushed = pushed_gradient(conn, payload, before + count)
        if model_buffers is not None:
            model_buffers.put(partition, pushed[:before].view(torch.uint8))
        self._shard.put(partition, pushed[before:])

    def _tell(self, worker: int, *, judged: bool) -> Meta:
        """Let a worker fetch the present version, and its model buffers."""
        self._announced_B[worker] = self._model_buffers(judged=judged)
        return pull_meta(self.server.model.pulls.tell(worker, judged=judged))

    def _model_buffers(self, *, judged: bool) -> Tensor | None:
        """What a worker gets before the parameters: the live values, or those all regions know."""
        model_buffers = self.server.model_buffers
        if model_buffers is None:
            return None
        return model_buffers.agreed_B if judged else model_buffers.present_B

    # -------------------------------------------------------------- effects

    def _cut(self, checkpoint: int, *, halt: bool) -> list[Written]:
        with self._changed:
            return self._execute(self.server.cut(checkpoint, halt=halt))

    def _execute(self, effects: list[Effect]) -> list[Written]:
        """Under the lock: everything but writing, which is returned for after."""
        snapshots: list[Written] = []
        for effect in effects:
            if isinstance(effect, Assignment):
                self._answers[effect.worker] = effect
                self._log.begin()
            elif isinstance(effect, SendUpdate):
                self._sends.put(True)
            elif isinstance(effect, StepDone):
                self._log.step(effect)
                self._exhausted |= self.server.exhausted  # remembered until somebody asks
            elif isinstance(effect, StateTransfer):  # nothing of it lies where a payload is put
                snapshots.append(effect)
            elif isinstance(effect, ActiveWorkersChanged):
                self._event_buffer.add("active_workers", **effect.event())
            else:
                snapshots.append(self._lasting(effect))
        self._go_on()
        return snapshots

    def _lasting(self, snapshot: Snapshot) -> Snapshot:
        """The same, though the next payload is put where that of its open request lies."""
        if self._line is None:
            return snapshot
        lies_there = self._line.client.lies_there
        placed = {k: v for k, v in snapshot.tensors.items() if lies_there(v)}
        return replace(snapshot, lazy=self._unread.copy(placed))

    def _go_on(self) -> None:
        """Under the lock: something has changed, which those that wait, or ask, are to know."""
        self._status = {
            "version": self.server.version,
            "phase": self.server.phase,
            "blocked_on": self.server.blocked_on,
            "exhausted": self._exhausted,
            "applied": self.server.work.ledger.applied,
            "rows": self.server.work.ledger.export(),
            "here": {w: self._attempts.get(w, 1) for w in sorted(self.server.work.workers.joined)},
            "judged": self.server.work.evals.last == "reported",
            "failure": self._failure,
        }
        self._changed.notify_all()

    # -------------------------------------------------------------- exchanges

    def _exchange(self) -> None:
        while self._sends.get():
            try:
                self._exchange_one()
            except Exception as error:  # whatever it is: the workers must get it
                with self._changed:
                    if self.server.phase == "halted":
                        return  # its request is in the checkpoint
                    log.warning("exchange of %s failed", self.server.plan.region, exc_info=error)
                    self._failure = _typed(error)
                    self._go_on()
                return

    def _exchange_one(self) -> None:
        """Carry the open request to the averager, and its answer back; no payload is kept long."""
        began_s, send, line = self._event_buffer.now_s(), self.server.open_request, self._line
        if send is None or line is None:
            raise InvariantError(f"region '{self.server.plan.region}' has nobody to send to")
        bridge = line.client
        with self._coding:  # it takes its time; only this thread is in `wire`
            self._recall(bridge)
            send = self._on_its_way(bridge, send, self.server.wire.encode(send.update))
        while True:
            if bridge is line.client:
                line.drop_old()
            try:
                send, answer = self._exchanged(bridge, send)
                with self._coding:
                    if answer.reply.checkpoint is not None:  # the state before the answer is in it
                        cut = self._cut(answer.reply.checkpoint, halt=answer.reply.halt)
                        self._writer.write_in_background(cut)
                    if self.server.phase != "halted":  # checkpoints have the request open
                        self._writer.write_in_background(self._merge(bridge, answer, send, began_s))
                return
            except LinkDownError:
                if not bridge.is_lost:
                    raise
            # The averager knows by the request's number whether it has had it, and what it said.
            bridge = line.await_next()
            with self._coding:
                send = self._on_its_way(bridge, send, send.update)

    def _exchanged(self, bridge: BridgeClient, send: SendUpdate) -> tuple[SendUpdate, BridgeAnswer]:
        """The open request as it was understood in the end, and what the averager answer."""
        try:
            return send, self._ask(bridge, send.update)
        except ReferenceLostError as error:
            log.warning("%s; sent in full", error.message)
            with self._coding:
                send = self._on_its_way(bridge, send, self.server.wire.in_full(send.update))
            return send, self._ask(bridge, send.update)

    def _merge(
        self, bridge: BridgeClient, answer: BridgeAnswer, send: SendUpdate, began_s: float
    ) -> list[Written]:
        reply = self._fetched(bridge, answer)
        self._log.exchange(send, reply, began_s, self.server.wire.num_of(send.update.fragment))
        decoded = self.server.wire.decode(reply)
        took_s = self._event_buffer.now_s() - began_s
        with self._changed:
            return self._execute(self.server.on_reply(decoded, took_s))

    def _on_its_way(
        self, bridge: BridgeClient, send: SendUpdate, update: UpdateMessage
    ) -> SendUpdate:
        """The open request as it goes on its way, where the bridge reads it if it can."""
        self._unread.secure()
        update = bridge.place(update)
        with self._changed:
            self.server.record_encoded(update)
        return replace(send, update=update)

    def _payload_buffer(self, count: int) -> Tensor:
        """Where the next payload is made: where the bridge reads it, if no update lies there."""
        line = None if self.server.link_busy else self._line
        buffer_P = None if line is None else line.client.buffer(count)
        if buffer_P is None:
            return torch.empty(count)
        self._unread.secure()
        return buffer_P

    def _fetched(self, bridge: BridgeClient, answer: BridgeAnswer) -> ReplyMessage:
        """The answer's payload, in the place of the update if that is not needed any more."""
        wire = self.server.wire
        in_place = not answer.reply.dropped and not wire.plan.keeps_reference
        if in_place:
            self._unread.secure()
        return bridge.fetch(answer, exchange_s(self._timeout_s), in_place=in_place)

    def _recall(self, bridge: BridgeClient) -> None:
        """Lossy blocks of the last update that have not left yet go with the next one."""
        wire = self.server.wire
        if wire.flowing() is None:
            return
        meta, _ = bridge.request({"op": "recall"}, exchange_s(self._timeout_s))
        seq = fields.optional_count(meta, "seq")
        if seq is not None:
            wire.unsent(seq, fields.count(meta, "first_rank"))

    def _ask(self, bridge: BridgeClient, update: UpdateMessage) -> BridgeAnswer:
        """Send an update to the averager through the bridge and return what that tells."""
        self._asking = True
        try:
            return bridge.ask(update, exchange_s(self._timeout_s))
        finally:
            self._asking = False


def _typed(error: Exception) -> GeoRayError:
    if isinstance(error, GeoRayError):
        return error
    return InvariantError(f"an exchange failed: {type(error).__name__}: {error}")
