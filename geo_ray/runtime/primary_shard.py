"""The primary shard of a region over sockets: executes the effects of `training.server`.

Workers push over the LAN and block until answered; one thread sends to the bridge. One lock
guards the state machine and is never held while waiting for the network. Checkpoint parts and
copies for joining regions are written on other threads (`RegionWriter`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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
from geo_ray.base.types import StepReport
from geo_ray.runtime.bridge import BridgeAnswer, BridgeClient, ReconnectingBridgeClient
from geo_ray.runtime.remote_shard import (
    MOMENT_OPERATIONS,
    RemoteShard,
    handle_moment,
    parameters_for,
    pushed_gradient,
    slice_for,
)
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
from geo_ray.training.wire_format import (
    WantedState,
    answer_meta,
    as_bytes,
    pull_meta,
    read_pull,
    read_reports,
    read_stats,
    state_meta,
)
from geo_ray.training.worker_runs import Reported, WorkerRuns
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

    def begin(self, ago_s: float = 0.0) -> None:
        """Record that workers are given a step, or were some time ago."""
        self._began_s = self._buffer.now_s() - ago_s

    def step(self, done: StepDone, ago_s: float = 0.0) -> None:
        """Record an applied step, which may have ended some time ago."""
        now_s = self._buffer.now_s() - ago_s
        self._buffer.add("step", **done.event(self._began_s, self._applied_s, now_s))
        self._applied_s = now_s
        for cause in done.refused:
            self._buffer.add("step_refused", step=done.step, cause=cause)
        if done.noise is not None:
            self._buffer.add("noise", **done.noise.fields())

    def exchange(
        self, send: SendUpdate, reply: ReplyMessage, began_s: float, num_params: int
    ) -> None:
        """Record an exchange whose answer has arrived.

        Args:
            send: the request.
            reply: the answer.
            began_s: when the request began.
            num_params: number of exchanged parameters.
        """
        if reply.dropped:
            self._buffer.add("update_dropped", seq=reply.seq, bytes_sent=0)
            return
        event = send.event(send.update, reply, began_s, 4 * num_params)
        self._buffer.add("exchange", **event)


Written = Snapshot | StateTransfer
"""Copied at once, and written later."""


class RegionWriter:
    """Writes a region's parts of checkpoints, and copies for joining regions, on other threads.

    Disks are slow, and the thread that takes a copy must continue its exchange or answer the
    controller.

    Args:
        held: the primary shard.
        others: the region's other shards, in order, on separate connections, so that writing their
            parts delays nothing else.
        event_buffer: receives the results.
    """

    def __init__(
        self, held: HeldShard, others: Sequence[RemoteShard], event_buffer: EventBuffer
    ) -> None:
        self._held = held
        self._others = others
        self._event_buffer = event_buffer
        self._pool = ThreadPoolMap(1 + len(others), "write-parts")

    def write_in_background(self, copies: Sequence[Written]) -> None:
        """Start to write; events report the parts, or why there are none."""
        if copies:
            threading.Thread(target=self._write, args=(tuple(copies),), daemon=True).start()

    def close(self) -> None:
        """End the threads."""
        self._pool.close()

    def _write(self, copies: Sequence[Written]) -> None:
        for copy in copies:
            is_transfer = isinstance(copy, StateTransfer)
            snapshot = copy.snapshot if isinstance(copy, StateTransfer) else copy
            try:
                parts = self._write_parts(snapshot)
            except Exception as error:  # report every class: the controller waits for the part
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

_LOOK_S = 1.0  # between two checks for a failure of the region
_MEAN_WITHIN_S = 120.0  # for which a checkpoint waits for the next mean of several workers


class PrimaryShard:
    """Serves a region's workers and its exchanges.

    Args:
        server: the state machine, over this shard and the others.
        held: this shard.
        writers: the region's other shards, in order, on separate connections, so that writing their
            parts of a checkpoint delays nothing else.
        bridge: the region's bridge; None if there is one region only.
        event_buffer: receives events for the controller.
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
        self._unread = Unread()  # payloads of open requests, which are part of checkpoints
        if not server.model.is_sharded and server.wire.plan.up is None:
            self._shard.state.allocate = self._payload_buffer
        self._event_buffer, self._log = event_buffer, RegionLog(event_buffer)
        self._timeout_s = limit_s
        self._changed = threading.Condition(threading.Lock())
        # Held while a message is encoded or decoded, and taken before `_changed`: a checkpoint
        # copies the model and the data owed to other regions either before a message counts or
        # after it.
        self._coding = threading.Lock()
        self._times, self._times_lock = WorkTimes(), threading.Lock()
        self._answers: dict[int, Assignment] = {}
        # Of a worker that makes the optimizer's steps: whether it continues from its own state, and
        # how many threads need that state to merge an answer or to copy it.
        self._released: set[int] = set()
        self._waiting_for_state = 0
        self._runs = WorkerRuns(server)
        self._attempts: dict[int, int] = {}
        # Model buffers of the version that a worker was told to fetch.
        self._announced_B: dict[int, Tensor | None] = {}
        self._sends: SimpleQueue[bool] = SimpleQueue()  # whether there is an open request
        self._failure: GeoRayError | None = None
        self._exhausted = self._is_paused = False
        self._asking = False  # a request is at the bridge, not being encoded or merged
        self._status: dict[str, Any] = {}
        with self._changed:
            self._execute(server.resume())
        self._exchanger = threading.Thread(target=self._exchange, name="exchange", daemon=True)
        self._exchanger.start()

    # -------------------------------------------------------------- for the controller

    def status(self) -> dict[str, Any]:
        """Return the region's state after its last event: plain values.

        The lock is not taken: a step of a large model takes long, and the controller must not wait
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
        """Finish after the current step; for a single region."""
        with self._changed:
            self._execute(self._runs.handle(self._stop))

    def _stop(self) -> list[Effect]:
        self.server.stop()
        return []

    def lose(self, worker: int, attempt: int) -> None:
        """Record that a worker's process has ended, even if its connection is still open."""
        with self._changed:
            if self._attempts.get(worker, 0) <= attempt:
                self._attempts[worker] = attempt + 1  # later messages are refused
                with self._times_lock:
                    self._times.forget(worker)
                self._lose(worker, partial(self.server.leave, worker))

    def _lose(self, worker: int, event: Callable[[], list[Effect]]) -> None:
        """Handle the loss of a worker, or that a new one of its rank is here."""
        self.server.model.pulls.note_received(worker)
        self._released.discard(worker)
        for each, report in self._reported(self._runs.lose(worker, event)).items():
            self._execute(self.server.push(each, report))

    def _reported(self, found: Reported) -> Mapping[int, StepReport]:
        """Handle what workers have reported but the last step, whose reports are returned."""
        for earlier in found.earlier:
            self._exhausted |= earlier.exhausted
            self._execute(earlier.effects, earlier.ago_s)
            self._log.begin(earlier.ago_s)
        self._execute(found.effects)
        return found.last

    def drain(self, worker: int) -> None:
        """Ask a worker to end between two steps."""
        with self._changed:
            self._execute(self._runs.handle(partial(self.server.drain, worker)))

    def pause(self, is_paused: bool) -> None:
        """Stop workers from beginning steps, or allow it again."""
        with self._changed:
            self._is_paused = is_paused
            self._changed.notify_all()

    def use_bridge(self, client: LanClient) -> None:
        """Use a new bridge of the region; an open request is repeated through it."""
        if self._line is not None:
            self._line.use(client)

    def snapshot(self, checkpoint: int, *, halt: bool) -> None:
        """Copy the region's state for a checkpoint; a separate thread writes it.

        Args:
            checkpoint: its id.
            halt: pause afterwards.
        """
        plan = self.server.plan
        if not plan.state_every and not plan.reads_optimizers:
            self._copy_and_write(checkpoint, halt=halt)
            return
        # Workers may have the state until the end of their step.
        copy = partial(self._copy_and_write, checkpoint, halt=halt)
        threading.Thread(target=copy, name="snapshot", daemon=True).start()

    def _copy_and_write(self, checkpoint: int, *, halt: bool) -> None:
        with self._coding:
            snapshots = self._snapshot(checkpoint, halt=halt)
        self._writer.write_in_background(snapshots)

    def use_statistics(self, model_buffers: bytes) -> None:
        """Set the final model buffers, with statistics over all regions."""
        with self._changed:
            if self.server.model_buffers is not None:
                self.server.model_buffers.note_precise(model_buffers)
            self._changed.notify_all()

    def close(self) -> None:
        """Release waiting workers and stop the exchange thread; connections have other owners."""
        with self._changed:
            closing = f"the parameter server of region '{self.server.plan.region}' is closing"
            self._failure = self._failure or LinkDownError(closing)
            self._notify()
            if self._line is not None:
                self._line.end(self._failure)
        self._sends.put(False)
        self._exchanger.join(timeout=5.0)
        self._writer.close()

    # -------------------------------------------------------------- for the workers

    def handle(
        self, conn: LanConnection, meta: Meta, payload: memoryview | None
    ) -> tuple[Meta, memoryview | None]:
        """Handle one request of a worker; a join or a push blocks until there is work."""
        worker = fields.count(conn.hello, "worker")
        operation = fields.text(meta, "op")
        self._note_time(worker, operation)
        with self._changed:
            self._admit(conn, worker, joins=operation in {"join", "moments"})
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
                self._notify()
            return {}, None
        if operation == "state_changed":
            step, names = fields.count(meta, "version"), fields.text(meta, "names")
            how = fields.one_of(CHANGE_KINDS)(meta, "how")
            self._event_buffer.add("state_changed", step=step, how=how, names=names)
            return {}, None
        if operation == "device":
            self._event_buffer.add(
                "device",
                worker=worker,
                device=fields.text(meta, "device"),
                share=fields.number(meta, "share"),
                peak_bytes=fields.count(meta, "peak_bytes"),
                total_bytes=fields.count(meta, "total_bytes"),
            )
            return {}, None
        if operation == "precise":
            return {}, self._await_statistics(bytes(payload or b""))
        if operation in {"pull", "fetch"}:
            with self._changed:
                return self._pulled(conn, worker, meta, payload)
        if operation in MOMENT_OPERATIONS:
            with self._changed:
                return handle_moment(self._shard, conn, meta, payload)
        if operation == "join":
            with self._changed:
                self._answers.pop(worker, None)
                self._lose(worker, partial(self.server.join, worker))
            return self._await_answer(conn, worker, payload, moves=True)
        return self._pushed(conn, worker, meta, payload)

    def _pushed(
        self, conn: LanConnection, worker: int, meta: Meta, payload: memoryview | None
    ) -> tuple[Meta, memoryview | None]:
        """Handle a push, a part of it for this shard, or the state of a worker between steps."""
        operation, server = fields.text(meta, "op"), self.server
        has_state = operation in {"state", "optimizer"} or "has_state" in meta
        moves = has_state or not server.plan.state_every
        with self._changed:
            server.model.pulls.note_received(worker)
            self._admit(conn, worker)
            brings = operation != "optimizer" and moves
            if operation == "put" or (brings and not server.model.is_sharded):
                self._put(worker, conn, payload)
            if operation == "put":
                return {}, None
            self._released.discard(worker)
            if operation == "optimizer":
                server.on_optimizer(worker)
                self._notify()
            elif operation == "state" and server.plan.averages:
                self._execute(server.on_state(worker))
            elif operation == "state":
                server.take_state(worker)
                self._notify()
            else:
                found = self._runs.report(worker, read_reports(meta))
                may_need = not (moves or server.plan.averages)
                for each, report in self._reported(found).items():
                    if may_need and (self._waiting_for_state or server.needs_state(each, report)):
                        return state_meta("push"), None
                    # Not bound to a name: an update would be retained until the worker's answer.
                    self._execute(server.push(each, report, has_state=has_state))
        return self._await_answer(conn, worker, payload, moves=moves)

    def _note_time(self, worker: int, operation: str) -> None:
        """Record the arrival of a worker's request; the lock may be held for a whole step."""
        with self._times_lock:
            if operation in {"put", "push"}:
                self._times.end(worker, time.monotonic())
            elif operation == "stats":
                self._times.evaluated(worker, time.monotonic())
            elif operation in {"join", "precise"}:
                self._times.forget(worker)

    def on_close(self, conn: LanConnection) -> None:
        """Handle the end of a worker's connection; only the newest attempt of a rank counts."""
        worker = fields.count(conn.hello, "worker")
        with self._changed:
            if self._attempts.get(worker) == fields.count(conn.hello, "attempt"):
                with self._times_lock:
                    self._times.forget(worker)
                self._lose(worker, partial(self.server.leave, worker))

    def _pulled(
        self, conn: LanConnection, worker: int, meta: Meta, payload: memoryview | None
    ) -> tuple[Meta, memoryview | None]:
        """Return the parameters of this shard; with others, the version to fetch from all."""
        model = self.server.model
        if fields.text(meta, "op") == "fetch":
            fetched_S = self._shard.fetch(read_pull(worker, meta))
            return {}, slice_for(conn, fetched_S, self._announced_B.get(worker))
        judged = fields.flag(meta, "judged")
        if model.is_sharded:
            return self._announce(worker, judged=judged), None
        found_S = self._shard.eval_params_S if judged else self._shard.params_S
        return {}, parameters_for(conn, found_S, payload, self._model_buffers(judged=judged))

    def _admit(self, conn: LanConnection, worker: int, *, joins: bool = False) -> None:
        """Refuse an attempt that was replaced, even if it was only unreachable for a while."""
        attempt = fields.count(conn.hello, "attempt")
        newest = self._attempts.get(worker, 0)
        if attempt < newest or (attempt > newest and not joins):
            raise LinkDownError(
                f"attempt {attempt} of worker {worker} of region '{self.server.plan.region}' was "
                f"replaced by attempt {newest}"
            )
        if attempt > newest:
            self._attempts[worker] = attempt
            self._changed.notify_all()  # waiting requests of the replaced attempt end

    def _await_answer(
        self, conn: LanConnection, worker: int, payload: memoryview | None, *, moves: bool
    ) -> tuple[Meta, memoryview | None]:
        """Return a worker's next assignment, and the parameters if it ``moves`` them."""
        deadline_s = time.monotonic() + self._timeout_s
        with self._changed:
            self._admit(conn, worker)
            while True:
                waits = self._holds_workers or worker not in self._answers or self.server.between
                waits |= self.server.plan.state_every > 0 and self._needs_present_state
                if waits and self._failure is not None:
                    raise self._failure
                wanted = self._wanted_state(worker, moves=moves)
                if wanted is not None:
                    return state_meta(wanted), None
                if not waits:
                    break
                # An open exchange has its own deadline, and its error is more specific.
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
            self._released.discard(worker)
            if self.server.plan.state_every and answer.span is not None:
                self._released.add(worker)
                answer = self._runs.begin(answer)
            if not moves:
                return answer_meta(answer), None
            if self.server.model.is_sharded:
                return answer_meta(answer) | self._announce(worker, judged=False), None
            # The gradient is applied: its buffer is reused for the parameters, without new pages.
            buffers_B = self._model_buffers(judged=False)
            return answer_meta(answer), parameters_for(
                conn, self._shard.params_S, payload, buffers_B
            )

    def _wanted_state(self, worker: int, *, moves: bool) -> WantedState | None:
        """Return what a waiting worker must send that has an optimizer, if anything."""
        server = self.server
        if not server.plan.reads_optimizers:
            is_wanted = self._waiting_for_state and self._is_behind and not moves
            return "between" if is_wanted else None
        if server.lacks_state(worker):
            return "model"
        answer = self._answers.get(worker)
        is_last = answer is not None and answer.span is None and server.phase != "halted"
        is_wanted = is_last and worker in server.unsaved
        is_wanted |= self._needs_present_state and server.ask_optimizer(
            worker, is_paused=self._is_paused
        )
        return "optimizer" if is_wanted else None

    @property
    def _is_behind(self) -> bool:
        """Whether the server has older parameters than its workers, as far as is known."""
        if not self.server.plan.averages:
            return bool(self.server.ahead or self._runs.in_progress)
        return bool(self.server.ahead or self._is_in_step)

    @property
    def _is_in_step(self) -> bool:
        """Whether some of several workers have begun a step that is not complete."""
        return bool(self.server.work.pushes or self._released or self._runs.in_progress)

    @property
    def _needs_present_state(self) -> bool:
        """Whether a thread is about to use the state that the server has now."""
        return self._waiting_for_state > 0 and not self._is_behind

    def _begin_time(self, conn: LanConnection, worker: int, answer: Assignment) -> None:
        attempt, now_s = fields.count(conn.hello, "attempt"), time.monotonic()
        with self._times_lock:
            if answer.span is not None:
                self._times.begin(worker, attempt, now_s, evaluates=answer.evaluate)

    def _await_statistics(self, own: bytes) -> memoryview:
        """Return the final model buffers, once all regions have reported their statistics."""
        model_buffers = self.server.model_buffers
        if model_buffers is None:
            raise InvariantError(f"region '{self.server.plan.region}' has no model buffers")
        with self._changed:
            if model_buffers.precise_B is None:
                self._event_buffer.add("precise", model_buffers=own)
            while model_buffers.precise_B is None:
                if self._failure is not None:
                    raise self._failure
                self._changed.wait(_LOOK_S)
            return as_bytes(model_buffers.precise_B)

    def _put(self, worker: int, conn: LanConnection, payload: memoryview | None) -> None:
        """Store what a worker pushed: the model buffers after its step, then the gradient."""
        model_buffers, count = self.server.model_buffers, self._shard.params_S.numel()
        partition = self.server.partition_of(worker)
        before = 0 if model_buffers is None else model_buffers.layout.size_floats
        pushed = pushed_gradient(conn, payload, before + count)
        if model_buffers is not None:
            model_buffers.put(partition, pushed[:before].view(torch.uint8))
        self._shard.put(partition, pushed[before:])

    def _announce(self, worker: int, *, judged: bool) -> Meta:
        """Let a worker fetch the current version, and its model buffers."""
        self._announced_B[worker] = self._model_buffers(judged=judged)
        return pull_meta(self.server.model.pulls.tell(worker, judged=judged))

    def _model_buffers(self, *, judged: bool) -> Tensor | None:
        """Return a worker's model buffers: the live values, or those shared by all regions."""
        model_buffers = self.server.model_buffers
        if model_buffers is None:
            return None
        return model_buffers.agreed_B if judged else model_buffers.present_B

    # -------------------------------------------------------------- effects

    def _snapshot(self, checkpoint: int, *, halt: bool) -> list[Written]:
        with self._changed:
            if self.server.has_copied(checkpoint):
                return []
            self._await_state(is_merge=False, soon=halt)
            return self._execute(self.server.snapshot(checkpoint, halt=halt))

    def _await_state(self, *, is_merge: bool, soon: bool = False) -> None:
        """Wait for the state of workers that keep it; under the lock.

        The server has the parameters of workers that push changes, and lacks at most the states of
        their optimizers, which a checkpoint needs.

        Several other workers take an additional mean for it if an answer must be merged, or if it
        is needed ``soon``. Otherwise, a checkpoint would change the result: it waits until the next
        exchange, but not much longer than `_MEAN_WITHIN_S`.

        Args:
            is_merge: the state will change, so that the workers must wait for it.
            soon: the run halts.
        """
        self._waiting_for_state += 1
        if not is_merge:
            self.server.begin_saving()
        late_s = time.monotonic() + _MEAN_WITHIN_S
        try:
            while self._is_behind or self._lacks_for(is_merge=is_merge):
                if self._failure is not None:
                    raise self._failure
                soon |= self.server.link_busy or time.monotonic() >= late_s
                self.server.average_soon = soon
                if soon and self._is_paused and self._all_wait:
                    self.server.average_now()
                self._changed.notify_all()  # a worker that waits sends its state
                self._changed.wait(_LOOK_S)
        finally:
            self._waiting_for_state -= 1
            self.server.average_soon = False
            self._changed.notify_all()

    @property
    def _holds_workers(self) -> bool:
        """Whether a pause keeps workers from the next step.

        A step that some of several workers with optimizers have begun is completed: a checkpoint
        can only have their mean between two steps.
        """
        return self._is_paused and (self._all_wait or not self.server.plan.averages)

    @property
    def _all_wait(self) -> bool:
        """Whether several workers that keep their state wait between two steps."""
        return self.server.plan.averages and not self._is_in_step

    def _lacks_for(self, *, is_merge: bool) -> bool:
        if not self.server.plan.reads_optimizers:
            return is_merge and bool(self._released)
        return not is_merge and bool(self.server.lacking)

    def _execute(self, effects: Sequence[Effect], ago_s: float = 0.0) -> list[Written]:
        """Execute effects under the lock, except writing; return the copies to be written.

        Args:
            effects: effects.
            ago_s: seconds since the event that they are of.
        """
        snapshots: list[Written] = []
        for effect in effects:
            if isinstance(effect, Assignment):
                self._answers[effect.worker] = effect
                self._log.begin(ago_s)
            elif isinstance(effect, SendUpdate):
                self._sends.put(True)
            elif isinstance(effect, StepDone):
                self._log.step(effect, ago_s)
                self._exhausted |= self.server.exhausted  # stays set until the controller polls
            elif isinstance(effect, StateTransfer):  # it refers to no payload memory
                snapshots.append(effect)
            elif isinstance(effect, ActiveWorkersChanged):
                self._event_buffer.add("active_workers", **effect.event())
            else:
                snapshots.append(self._lasting(effect))
        self._notify()
        return snapshots

    def _lasting(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot, detached from memory that the next payload overwrites."""
        if self._line is None:
            return snapshot
        is_shared = self._line.client.is_shared
        placed = {k: v for k, v in snapshot.tensors.items() if is_shared(v)}
        return replace(snapshot, lazy=self._unread.copy(placed))

    def _notify(self) -> None:
        """Notify waiting requests and polls of a change; under the lock."""
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
            except Exception as error:  # report every class: the workers wait
                with self._changed:
                    if self.server.phase == "halted":
                        return  # the checkpoint contains the request, which a resume repeats
                    log.warning("exchange of %s failed", self.server.plan.region, exc_info=error)
                    self._failure = _typed(error)
                    self._notify()
                return

    def _exchange_one(self) -> None:
        """Carry out one exchange: send the open request to the averager and merge its answer."""
        began_s, send, line = self._event_buffer.now_s(), self.server.open_request, self._line
        if send is None or line is None:
            raise InvariantError(f"region '{self.server.plan.region}' has no bridge")
        bridge = line.client
        with self._coding:  # slow; only this thread uses `wire`
            self._recall(bridge)
            send = self._on_its_way(bridge, send, self.server.wire.encode(send.update))
        while True:
            if bridge is line.client:
                line.drop_old()
            try:
                send, answer = self._exchanged(bridge, send)
                with self._coding:
                    # The checkpoint must have the state before the answer.
                    if answer.reply.checkpoint is not None:
                        snapshot = self._snapshot(answer.reply.checkpoint, halt=answer.reply.halt)
                        self._writer.write_in_background(snapshot)
                    if self.server.phase != "halted":  # checkpoints contain the open request
                        self._writer.write_in_background(self._merge(bridge, answer, send, began_s))
                return
            except LinkDownError:
                if not bridge.is_lost:
                    raise
            # The averager recognizes a repeated request by its number and repeats its answer.
            bridge = line.await_next()
            with self._coding:
                send = self._on_its_way(bridge, send, send.update)

    def _exchanged(self, bridge: BridgeClient, send: SendUpdate) -> tuple[SendUpdate, BridgeAnswer]:
        """Return the request as finally sent, and the averager's answer."""
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
            self._await_state(is_merge=True)
            return self._execute(self.server.on_reply(decoded, took_s))

    def _on_its_way(
        self, bridge: BridgeClient, send: SendUpdate, update: UpdateMessage
    ) -> SendUpdate:
        """Return the open request as it is sent, placed where the bridge can read it."""
        self._unread.secure()
        update = bridge.place(update)
        with self._changed:
            self.server.record_encoded(update)
        return replace(send, update=update)

    def _payload_buffer(self, count: int) -> Tensor:
        """Return memory for the next payload: where the bridge reads it, unless occupied."""
        line = None if self.server.link_busy else self._line
        buffer_P = None if line is None else line.client.buffer(count)
        if buffer_P is None:
            return torch.empty(count)
        self._unread.secure()
        return buffer_P

    def _fetched(self, bridge: BridgeClient, answer: BridgeAnswer) -> ReplyMessage:
        """Return the answer's payload, written over the update if that is no longer needed."""
        wire = self.server.wire
        in_place = not answer.reply.dropped and not wire.plan.keeps_reference
        if in_place:
            self._unread.secure()
        return bridge.fetch(answer, exchange_s(self._timeout_s), in_place=in_place)

    def _recall(self, bridge: BridgeClient) -> None:
        """Recall unsent lossy blocks of the last update; they are sent with the next one."""
        wire = self.server.wire
        if wire.flowing() is None:
            return
        meta, _ = bridge.request({"op": "recall"}, exchange_s(self._timeout_s))
        seq = fields.optional_count(meta, "seq")
        if seq is not None:
            wire.unsent(seq, fields.count(meta, "first_rank"))

    def _ask(self, bridge: BridgeClient, update: UpdateMessage) -> BridgeAnswer:
        """Send an update to the averager through the bridge, and return its answer."""
        self._asking = True
        try:
            return bridge.ask(update, exchange_s(self._timeout_s))
        finally:
            self._asking = False


def _typed(error: Exception) -> GeoRayError:
    if isinstance(error, GeoRayError):
        return error
    return InvariantError(f"an exchange failed: {type(error).__name__}: {error}")
