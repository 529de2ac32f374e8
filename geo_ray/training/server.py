"""A region's parameter server as a state machine: completes steps, sends updates and ends the run.

Calls are events and return effects (`training.effects`), carried out over sockets or on a virtual
clock. `training.region_exchange` decides when updates are sent and how the run ends. A checkpoint
copies the state, its open request included, and does not block training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from geo_ray.base.errors import InvariantError
from geo_ray.base.threads import in_turn
from geo_ray.base.types import StepReport
from geo_ray.training.assignment import Ledger, RegionWork, ServerPlan
from geo_ray.training.effects import (
    FIRST_TRANSFER,
    Effect,
    Snapshot,
    StateTransfer,
    StepDone,
)
from geo_ray.training.messages import Barrier, ReplyMessage, UpdateMessage
from geo_ray.training.model_buffers import RegionBuffers
from geo_ray.training.noise import NoiseReading, RegionNoise
from geo_ray.training.payload_encoding import RegionWire, WirePlan
from geo_ray.training.region_exchange import RegionExchange, load_request
from geo_ray.training.shard import Concurrently, Contribution, RegionModel, ShardPort


@dataclass(slots=True)
<<<<<<< HEAD
class Server(RegionExchange):
=======
class RegionRequests:
    """A region's open request, and measurements since the last update.

    A region has at most one request open at the averager. `Server` decides when to send.

    Attributes:
        seq: number of the newest request.
        is_open: whether it is unanswered.
        request: open request.
        samples: rows since the last update.
        compute_s: sum of the steps' compute seconds since the last update.
        step_s: seconds per step, over the steps before the last update.
        exchange_s: seconds of the last exchange, without the time at the averager.
        sent_at: steps applied before the newest request.
        view: generation of the newest view among the answers; 0: the first.
    """

    seq: int = 0
    is_open: bool = False
    request: SendUpdate | None = None
    samples: int = 0
    compute_s: float = 0.0
    step_s: float = 0.0
    exchange_s: float = 0.0
    sent_at: int = 0
    view: int = 0
    _sent_samples: int = 0  # rows of the open request

    def stepped(self, samples: int, compute_s: float) -> None:
        """Record an applied step."""
        self.samples += samples
        self.compute_s += compute_s

    def send(self, update: UpdateMessage, *, version: int, blocking: bool) -> SendUpdate:
        """Open the next request.

        Args:
            update: update without number and measurements.
            version: steps applied.
            blocking: whether training waits for the answer.
        """
        self.seq += 1
        self.is_open = True
        steps = version - self.sent_at
        if steps:
            self.step_s = self.compute_s / steps
        self.compute_s, self.sent_at = 0.0, version
        update = replace(
            update,
            seq=self.seq,
            num_samples=self.samples,
            steps=steps,
            step_s=self.step_s,
            exchange_s=self.exchange_s,
            view=self.view,
        )
        self._sent_samples, self.samples = self.samples, 0
        self.request = SendUpdate(update, blocking)
        return self.request

    def answered(self, took_s: float, *, dropped: bool) -> None:
        """Close the open request.

        Args:
            took_s: seconds of the exchange.
            dropped: the update was discarded; its rows count with the next one.
        """
        if dropped:
            self.samples += self._sent_samples
        self.is_open, self.request = False, None
        self.exchange_s = max(0.0, took_s)

    def record_encoded(self, update: UpdateMessage) -> bool:
        """Record the encoded update; returns whether it belongs to the open request."""
        if self.request is None or self.request.update.seq != update.seq:
            return False
        self.request = replace(self.request, update=update)
        return True

    def reopen(self, update: UpdateMessage, *, blocking: bool) -> None:
        """Restore an open request."""
        self.request, self.is_open = SendUpdate(update, blocking), True

    # -------------------------------------------------------------- checkpoints

    def export(self) -> dict[str, object]:
        """Return plain values, without the open request."""
        return {
            "seq": self.seq,
            "samples_since_send": self.samples,
            "sent_at": self.sent_at,
            "times_s": [self.compute_s, self.step_s, self.exchange_s],
            "sent_samples": self._sent_samples,
        } | ({"view": self.view} if self.view else {})

    def restore(self, data: Mapping[str, object], version: int) -> None:
        """Restore the result of `export`, with no request open.

        Args:
            data: plain values.
            version: steps applied.
        """
        self.seq = int(str(data["seq"]))
        self.samples = int(str(data["samples_since_send"]))
        self.sent_at = int(str(data.get("sent_at", version)))
        times_s = data.get("times_s")
        if isinstance(times_s, list):
            self.compute_s, self.step_s, self.exchange_s = map(float, times_s)
        self._sent_samples = int(str(data.get("sent_samples", 0)))
        self.view = int(str(data.get("view", 0)))

    def export_request(
        self, coded: UpdateMessage | None
    ) -> tuple[dict[str, Tensor], dict[str, object] | None]:
        """Return the open request as tensors and plain values; ``coded``: its encoded form."""
        if self.request is None:
            return {}, None
        tensors, rows = save_messages(_REQUEST, [coded or self.request.update])
        blocking, is_coded = self.request.blocking, coded is not None
        return tensors, {"blocking": blocking, "is_coded": is_coded, "update": rows}


def load_request(tensors: Mapping[str, Tensor], request: Mapping[str, object]) -> UpdateMessage:
    """Return the update saved by `RegionRequests.export_request`."""
    (update,) = load_messages(UpdateMessage, tensors, request["update"])
    return update


@dataclass(slots=True)
class RegionCompletion:
    """Decides when a region's run ends, and which of its requests is the final update.

    The final update contains everything that is left, including the remaining coding errors. A
    separate request shortly before it would only delay it. Therefore a request that is due at the
    last step becomes part of the final update; with strategies that never block, so does a request
    that would still be in flight at the last step.

    If a blocking round ends with the last step, no further exchange follows; with codecs that leave
    coding errors, the round's update is then the final update and includes them. Regions that do
    not know their last step (they end together, or at a target) are notified one round before: the
    run is *draining*.

    Before a membership change all regions *flush*: each sends an interim final update, which leads
    to the barrier (`geo_ray.training.membership`), and training continues.

    A run that is resumed with another goal first completes the previous goal: some regions may
    already have sent their final update for it, and final updates are only answered together.

    Attributes:
        plan: server's plan.
        stopped: whether the region was asked to finish.
        draining: whether the next request is the final update.
    """

    plan: ServerPlan
    stopped: bool = False
    draining: bool = False
    _ends: list[float] = field(init=False)  # last steps: of earlier goals, then of this one
    _continues: bool = False  # training may continue after `_ends[0]`

    def __post_init__(self) -> None:
        self._ends = [self._own_end]

    @property
    def total_steps(self) -> float:
        """Steps before the final update; infinite while unknown."""
        return self._ends[0]

    @property
    def _own_end(self) -> float:
        steps = self.plan.steps
        return math.inf if steps is None else steps * self.plan.steps_per_round

    def is_over(self, version: int) -> bool:
        """Tell whether ``version`` steps complete the present goal."""
        return version >= self.total_steps

    def stop(self, version: int, *, computing: bool) -> None:
        """Finish after ``version`` steps, or after the step in progress."""
        self._ends[0] = min(self.total_steps, version + (1 if computing else 0))
        self.stopped = True

    def flush(self, version: int, sent_at: int, *, computing: bool) -> None:
        """Stop for a barrier, and continue after it.

        Where rounds have the same number of steps in all regions, the region completes its round.

        Args:
            version: steps applied.
            sent_at: steps applied before the newest request.
            computing: whether a step is in progress.
        """
        end = version + (1 if computing else 0)
        if self.plan.round_steps is not None:
            end = max(version, sent_at + self.plan.round_steps)
        if not self.stopped and not self.draining and end < self.total_steps:
            self._ends.insert(0, end)
            self.stopped = self._continues = True

    def passed(self, version: int, *, still_stopping: bool) -> bool:
        """Record that the final update was answered or not needed; returns whether the run is over.

        Args:
            version: steps applied.
            still_stopping: whether regions are still asked to finish.
        """
        if not self._continues or still_stopping:
            return True
        self.stopped = False
        self._ends = [end for end in self._ends[1:] if end > version] or [self._own_end]
        self._continues = len(self._ends) > 1
        return self.is_over(version)

    def may_request(self, version: int, step_s: float, exchange_s: float) -> bool:
        """Tell whether a request other than the final update may be sent.

        Args:
            version: steps applied.
            step_s: recent seconds per step.
            exchange_s: seconds of the last exchange; 0 if there was none.
        """
        if self.stopped:  # the final update is next in all regions
            return False
        if not self.plan.has_final_update:
            return True
        pushes_at_once = 1 if self.plan.mode == "sync" else self.plan.num_workers
        left_s = (self.total_steps - version) * step_s / pushes_at_once
        too_late = self.plan.never_waits and left_s < exchange_s
        return not (self.is_over(version) or too_late)

    def is_final_update(self, version: int) -> bool:
        """Tell whether a round's request after ``version`` steps is the final update."""
        return self.plan.last_round_is_final and (self.draining or self.is_over(version))

    def has_more(self, version: int) -> bool:
        """Tell whether steps are left, as far as is known."""
        return not self.stopped and not self.is_over(version)

    def export(self) -> dict[str, object]:
        """Return plain values for a checkpoint."""
        goal, steps = self.plan.goal, [end for end in self._ends if math.isfinite(end)]
        return {
            "stops": [goal, self.total_steps] if self.stopped else None,
            "drains": goal if self.draining else None,
            "ends": {"goal": goal, "steps": steps, "continues": self._continues},
        }

    def restore(self, data: Mapping[str, object], version: int, *, done: bool) -> None:
        """Restore the result of `export`; a run with another goal continues after the previous one.

        Args:
            data: plain values.
            version: steps applied.
            done: whether the region had finished.
        """
        is_same = False
        known: list[float] = []
        ends = data.get("ends")
        if isinstance(ends, Mapping):
            is_same = ends["goal"] == self.plan.goal
            known = [float(end) for end in ends["steps"]]
        own_end, stops = self._own_end, data.get("stops")
        retained = {end for end in known if end < own_end and not (done and end <= version)}
        if isinstance(stops, list):
            for_this = stops[0] == self.plan.goal
            self.stopped = for_this or (self.plan.has_final_update and not done)
            retained |= {stops[1]} if self.stopped and stops[1] < own_end else set()
        self._ends = [*sorted(retained), own_end]
        self.draining = data.get("drains") == self.plan.goal
        was_to_go_on = isinstance(ends, Mapping) and bool(ends["continues"])
        self._continues = was_to_go_on if is_same else (not done or len(retained) > 0)


@dataclass(slots=True)
class Server:
>>>>>>> main
    """Parameter server of a region: assigns work, completes steps and sends updates.

    A pure state machine. Calls are events and return effects, which the shell executes:
    `geo_ray.runtime` over sockets, `geo_ray.simulator` on a virtual clock.

        join, push -> [Assignment ...]  new parameters and the next rows for a worker
                   -> [SendUpdate]      an update for the averager
        leave      -> as join, for the other workers, if steps do not need all workers
        drain      -> as join; the worker exits after its next push, and nothing is lost
        snapshot   -> [Snapshot]        the present state, for a checkpoint

    A checkpoint does not block training: the region copies its state, the open request included. A
    run that resumes from the copy repeats that request (`Server.resume`).

    Attributes:
        plan: plan.
        model: region's shards.
        wire: encodes updates and decodes replies. The shell calls it without a lock: a region has
            one open request, and only the thread that sends it uses the codecs.
        model_buffers: model buffers; None if the model has none.
        version: steps applied.
        phase: what the region waits for, if anything.
        refused_in_a_row: consecutive steps without a usable gradient.
        noise: gradient noise across workers.
        work: workers, their work and the sample ledger.
        requests: open request and measurements since the last update.
        loss: mean training loss of the last step that had one.
    """

    model: RegionModel
    wire: RegionWire = field(kw_only=True)
    refused_in_a_row: int = 0
    noise: RegionNoise = field(init=False)
    work: RegionWork = field(init=False)
    _newest_snapshot: int = -1
    _at_halt: dict[str, object] = field(default_factory=dict)  # control state at the pause

    def __post_init__(self) -> None:
        RegionExchange.__post_init__(self)  # `super()` does not work in a class with slots
        self.noise = RegionNoise(self.plan.noise_every)
        self.work = RegionWork(self.plan, self._keep)

    @classmethod
    def over(
        cls,
        shards: Sequence[ShardPort],
        num_params: int,
        plan: ServerPlan,
        codecs: WirePlan,
        in_parallel: Concurrently = in_turn,
        model_buffers: RegionBuffers | None = None,
    ) -> Server:
        """The server of a region of ``num_params`` parameters over its shards in order."""
        model = RegionModel(shards, num_params, codecs.fragments, in_parallel)
        wire = RegionWire(codecs, plan.region, num_params)
        return cls(plan, model, model_buffers, wire=wire)

    # -------------------------------------------------------------- events

    def join(self, worker: int) -> list[Effect]:
        """Add a worker, new or replaced; it inherits its predecessor's rows."""
        if not 0 <= worker < self.plan.num_workers:
            raise InvariantError(f"{self.plan.region} has no worker {worker}")
        self.work.join(worker)
        return self._advance()

    def push(self, worker: int, report: StepReport) -> list[Effect]:
        """Handle a worker's push: the gradient is in the shards, ``report`` describes it."""
        self.work.push(worker, report)
        return self._advance()

    def partition_of(self, worker: int) -> int:
        """Return the partition under which the shards store the next push of ``worker``."""
        return self.work.partition_of(worker)

    def leave(self, worker: int) -> list[Effect]:
        """Remove a worker. The step waits for its replacement, or others compute its partition."""
        self.work.leave(worker)
        return [] if self.plan.elastic is None else self._advance()

    def drain(self, worker: int) -> list[Effect]:
        """Let a worker exit after its next push; its machine may be terminated soon."""
        self.work.drain(worker)
        return self._advance()

    def on_reply(self, reply: ReplyMessage, took_s: float = 0.0) -> list[Effect]:
        """The averager answered the open request.

        Args:
            reply: the answer, decoded by `wire`.
            took_s: seconds since the request.
        """
        if self.phase == "halted":  # the checkpoint contains the open request: ignore
            return []
<<<<<<< HEAD
        self._merge(reply, took_s)
        transferred = [] if reply.barrier is None else self._transfer(reply.barrier)
        return transferred + self._advance()

    def _transfer(self, barrier: Barrier) -> list[Effect]:
        """Copy the state at a barrier, if joining regions start from this region's."""
        if barrier.leaves:
            self.work.evals.skip_last()  # others continue without it
=======
        if reply.seq != self.seq or not self.link_busy:
            raise InvariantError(f"{self.plan.region} got answer {reply.seq}, awaits {self.seq}")
        self.requests.answered(took_s - reply.held_s, dropped=reply.dropped)
        if self.model_buffers is not None:
            self.model_buffers.merge(reply)
        self.model.merge(replace(reply, buffers_E=no_buffers()))
        self.averager_version, self._seen = reply.version, reply.seen
        self.requests.view = max(self.requests.view, reply.view)
        still_stopping = reply.stop or self._completion.draining
        self._completion.draining = reply.draining
        if reply.stop:
            self.stop()
        elif reply.flush:
            self._completion.flush(
                self.version, self.requests.sent_at, computing=self._is_computing
            )
        if self.phase == "waiting":
            self.phase = "training"
        elif self.phase == "finishing":
            # An answer that is not final only served to release other regions: send the final
            # update again.
            self.phase = "training"
            if reply.final:
                self._pass_end(still_stopping=still_stopping, at_barrier=reply.barrier is not None)
        transferred = [] if reply.barrier is None else self._enter(reply.barrier)
        return transferred + self._advance()

    def _enter(self, barrier: Barrier) -> list[Effect]:
        """Handle a barrier: all regions have the same model, and the members change."""
        if barrier.leaves:
            self.phase = "done"
            self.work.evals.skip_last()  # the other regions make the last evaluation
>>>>>>> main
        if not barrier.is_donor:
            return []
        number = FIRST_TRANSFER + barrier.view
        self.model.snapshot(number)
        return [StateTransfer(Snapshot(number, self.export(), self._tensors()), barrier.view)]

<<<<<<< HEAD
=======
    def stop(self) -> None:
        """Finish after the step in progress, if any.

        A region that waits for an answer finishes when the answer arrives. If it took a further
        step, its next exchange would wait for the other regions forever.
        """
        self._completion.stop(self.version, computing=self._is_computing)

>>>>>>> main
    @property
    def _is_computing(self) -> bool:
        return self.work.is_computing and self.phase != "waiting"

    def snapshot(self, checkpoint: int, *, halt: bool) -> list[Effect]:
        """Copy the present state for a checkpoint.

        Call it before decoding any answer that the averager gave after the checkpoint began. A
        region may be notified twice; the second call has no effect. A paused region copies its
        state again, since the earlier checkpoint may have failed.

        Args:
            checkpoint: id, larger than all before.
            halt: pause afterwards.
        """
        if checkpoint <= self._newest_snapshot:
            return []
        self._newest_snapshot = checkpoint
        self.model.snapshot(checkpoint)
        control = self.export()
        if self.phase == "halted":  # rows that returned since the pause are computed again
            control = self._at_halt | {name: control[name] for name in ("wire", "open")}
        taken = Snapshot(checkpoint, control, self._tensors())
        if not halt or self.phase in {"done", "halted"}:  # nothing left to wait for
            return [taken]
        self.phase, self._at_halt = "halted", control
        return [taken, *self._advance()]

    def resume(self) -> list[Effect]:
        """Return the first effects of a restored region: it repeats the open request, if any."""
        return [] if self.open_request is None else [self.open_request]

    def record_encoded(self, update: UpdateMessage) -> None:
        """Record the encoded form of the open request; the original payload may be released."""
        if self.requests.record_encoded(update):
            self.wire.reopen(update)

    @property
    def blocked_on(self) -> int | None:
        """Number of the open request that blocks this region; None: it can still make progress.

        If it is not None, all workers are present and wait.
        """
        waits = self.phase in {"waiting", "must_send", "finishing"} and self.link_busy
        return self.seq if waits and self.work.is_still else None

    @property
    def ledger(self) -> Ledger:
        """Sample ledger."""
        return self.work.ledger

    @property
    def exhausted(self) -> bool:
        """Whether too many consecutive steps had no usable gradient."""
        return self.refused_in_a_row >= self.plan.max_refused

    # ------------------------------------------------------------- consequences

    def _advance(self) -> list[Effect]:
        """Do everything that is possible now; the order of effects is the order of events."""
        effects: list[Effect] = []
        while (more := self._next()) is not None:
            effects += more
        if self.phase in {"done", "halted"}:
            return [
                *effects,
                *self.work.finish_all(self.version, done=self.phase == "done"),
            ]
        effects += self.work.departing(self.version)
        changed = self.work.changed_ranks(self.version)
        if changed is not None:
            effects.append(changed)
            if self.model_buffers is not None:
                self.model_buffers.num_workers = max(1, len(changed.ranks))
        stands = self.phase != "training" or (self.exhausted and self.plan.alone)
        return effects if stands else [*effects, *self.work.assign(self.version, self._seen)]

    def _next(self) -> list[Effect] | None:
        """Return the effects of the next thing to do; None if the region must wait for an event."""
        found = self._next_request()
        if found is not None:
            return [*found]
        if self.phase != "training":
            return None
        ready = self.work.ready()
        return self._step(ready) if ready else None

    def _step(self, partitions: list[int]) -> list[Effect]:
        reports = {partition: self.work.pushes[partition] for partition in partitions}
        contributions = self.work.rule.contributions(reports)
        noise = self._apply(contributions, reports)
        samples, compute_s = self.work.settle(reports, contributions)
        self.version += 1
        self.refused_in_a_row = 0 if samples else self.refused_in_a_row + 1
        done = StepDone.of(
            self.version,
            samples,
            reports.values(),
            compute_s,
            noise,
            self.model.learning_rate(),
        )
        self.loss = self.loss if done.loss is None else done.loss
        self.requests.stepped(samples, done.compute_s)
        return [done, *self._outgoing()]

    def _apply(
        self, contributions: Sequence[Contribution], reports: Mapping[int, StepReport]
    ) -> NoiseReading | None:
        step = self.version + 1
        norms = self.noise.norms(step, contributions, reports)
        if self.model_buffers is not None:
            self.model_buffers.apply(contributions, synchronous=self.plan.mode == "sync")
        mean_sq = self.model.apply(
            contributions,
            measure=len(norms) > 1,
            most_norm=self.plan.clip_mean_norm,
            rate=self.plan.rate_of(sum(c.num_samples for c in contributions)),
        )
        return self.noise.take(step, norms, mean_sq)

    def _keep(self, partition: int) -> None:
        self.model.keep(partition)
        if self.model_buffers is not None:
            self.model_buffers.keep(partition)

    def _mean_grad_sq(self, samples: int) -> float | None:
        return self.noise.mean_sq(samples) if self.plan.reports_norms else None

    # -------------------------------------------------------------- checkpoints

    def export(self) -> dict[str, object]:
        """Return plain values of the control state; shards and wire export the tensors."""
        return {
            "version": self.version,
            "phase": self.phase,
            "must_speak": self.phase == "must_send",
            "averager_version": self.averager_version,
            "ledger": self.ledger.export(),
            "wire": self.wire.export(),
            "noise": self.noise.meter.export(),
            "open": self.requests.export_request(self.wire.open_update)[1],
            **self.requests.export(),
        } | self._completion.export()

    def restore(
        self, data: Mapping[str, object], tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        """Restore the result of `export`.

        Workers join again and get the rows that were in flight; rows of removed ranks go to the
        first workers that ask. Call `resume` afterwards.

        Args:
            data: control state.
            tensors: wire's tensors.

        Raises:
            ConfigChangedError: the state was saved with other codecs.
        """
        ledger, wire = data["ledger"], data.get("wire", {})
        if not isinstance(ledger, dict) or not isinstance(wire, dict):
            raise InvariantError("checkpoint without a sample ledger")
        self.wire.restore(tensors or {}, wire)
        if self.model_buffers is not None:
            self.model_buffers.restore(tensors or {})
        self.version = int(str(data["version"]))
        self.averager_version = int(str(data["averager_version"]))
        self.requests.restore(data, self.version)
        self._reopen(data, tensors or {})
        self.work.restore(ledger, self.version)
        self.noise.meter.restore(data.get("noise"))

    def _tensors(self) -> dict[str, Tensor]:
        found = self.wire.tensors()
        if self.model_buffers is not None:
            found |= self.model_buffers.tensors()
        return found | self.requests.export_request(self.wire.open_update)[0]

    def _reopen(self, data: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
        """Restore phase and open request, adjusted to the number of steps in the present plan."""
        self.phase = "must_send" if data["must_speak"] else "training"
        phase = str(data.get("phase", self.phase))
        self._completion.restore(data, self.version, done=phase == "done")
        is_draining = self._completion.draining and phase == "finishing"
        has_more = self._completion.has_more(self.version) and not is_draining
        if phase == "waiting" or (phase == "done" and not has_more):
            self.phase = "waiting" if phase == "waiting" else "done"
        request = data.get("open")
        if not isinstance(request, Mapping):
            return
        if self.plan.alone:  # the other regions are lost, and with them the leader
            self.phase = "training"
            return
        update = load_request(tensors, request)
        if phase == "finishing":  # it was the final update of the saved run
            self.phase = "waiting" if has_more else "finishing"
        if update.final and has_more:
            update = replace(update, final=False)
        update = update if self.model_buffers is None else self.model_buffers.filled(update)
        if request["is_coded"]:
            self.wire.reopen(update)
        self.requests.reopen(update, blocking=bool(request["blocking"]))
