"""A region's parameter server as a state machine: completes steps, sends updates and ends the run.

Calls are events and return effects (`training.effects`), carried out over sockets or on a virtual
clock. `training.region_exchange` decides when updates are sent and how the run ends. A checkpoint
copies the state, its open request included, and does not block training.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final

from torch import Tensor

from geo_ray.base.errors import InvariantError
from geo_ray.base.threads import in_turn
from geo_ray.base.types import Span, StepReport, unused_by_all
from geo_ray.training.assignment import Ledger, RegionWork, ServerPlan
from geo_ray.training.config import REPORT_EVERY_S
from geo_ray.training.effects import (
    FIRST_TRANSFER,
    Assignment,
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

_NEWEST: Final = 32  # steps of which the usual duration is the median


@dataclass(slots=True)
class Server(RegionExchange):
    """Parameter server of a region: assigns work, completes steps and sends updates.

    A pure state machine. Calls are events and return effects, which the shell executes:
    `geo_ray.runtime` over sockets, `geo_ray.simulator` on a virtual clock.

        join, push -> [Assignment ...]  new parameters and the next rows for a worker
                   -> [SendUpdate]      an update for the averager
        leave      -> as join, for the other workers, if steps do not need all workers
        drain      -> as join; the worker exits after its next push, and nothing is lost
        snapshot   -> [Snapshot]        the present state, for a checkpoint

    With `ServerPlan.state_every` the region's only worker keeps parameters and optimizer, and makes
    the steps that the server counts. It sends its state with the pushes that `needs_state` names.
    Between them the server has the state before the spans in `ahead`: it merges no answer and
    copies no state. A new worker starts from that state and repeats those spans, with the same
    bits.

    Several workers with optimizers of their own (`ServerPlan.averages`) train apart until the
    region's parameters are needed. All send theirs with that step (`lacks_state`), and the server
    takes the mean, weighted by the rows of each since the last mean. The change of a lost worker
    since then is lost; the others continue, and a new worker starts from the last mean.

    The optimizers of several workers, and those of workers that push changes of several steps
    (`ServerPlan.worker_steps`), stay with the workers. A checkpoint needs their states after the
    last step: it is taken once no worker is `lacking`.

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
        ahead: spans of the steps that the worker has made since it sent its state, or that several
            have made since their last mean.
        average_soon: whether several workers must send their parameters with the present step.
        between: whether they must send them before the next step.
        unsaved: workers whose optimizers have made steps since the shards got their states.
    """

    model: RegionModel
    wire: RegionWire = field(kw_only=True)
    refused_in_a_row: int = 0
    noise: RegionNoise = field(init=False)
    work: RegionWork = field(init=False)
    ahead: list[Span] = field(default_factory=list)
    average_soon: bool = False
    between: bool = False
    unsaved: set[int] = field(default_factory=set)
    _saved: set[int] = field(default_factory=set)  # since `begin_saving`
    _rows: dict[int, int] = field(default_factory=dict)  # since the last mean, by worker
    _sent: set[int] = field(default_factory=set)  # workers whose parameters are in the shards
    _has_state: bool = False  # the push that is handled came with the worker's state
    _new_workers: set[int] = field(default_factory=set)  # without an assignment yet
    _newest_snapshot: int = -1
    _took_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NEWEST))
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
        self._sent.discard(worker)  # in the memory of its predecessor
        self._lose(worker)
        self.unsaved.discard(worker)
        self.work.join(worker)
        self._new_workers.add(worker)
        return self._advance()

    def push(self, worker: int, report: StepReport, *, has_state: bool = False) -> list[Effect]:
        """Handle a worker's push: the gradient is in the shards, ``report`` describes it.

        Args:
            worker: its rank.
            report: the step.
            has_state: in the place of the gradient, the shards have the worker's state after it.
        """
        if not self.work.push(worker, report) and self.plan.reads_optimizers:
            self.unsaved.add(worker)
        self._has_state = has_state
        return self._advance()

    def needs_state(self, worker: int, report: StepReport) -> bool:
        """Tell whether a worker that makes the optimizer's steps must send its state with a push.

        Args:
            worker: its rank.
            report: the push.
        """
        if not self.plan.state_every:
            return False
        completion = self._completion
        return (
            len(self.ahead) + 1 >= self.plan.state_every
            or report.refused is not None
            or self.phase != "training"
            or worker in self.work.workers.leaving
            or completion.stopped
            or completion.is_over(self.version + 1)
            or not self.model.is_quiet()
        )

    def run_length(self) -> int:
        """Return how many steps the workers may make before they report them.

        Nothing but the last of them can need their state, an evaluation or an exchange. The caller
        handles other events no earlier than the last report (`training.worker_runs`).
        """
        plan, completion, work = self.plan, self._completion, self.work
        if not plan.state_every or self.phase != "training" or self.link_busy:
            return 1
        if completion.stopped or self.average_soon or self.between:
            return 1
        if work.workers.leaving or not work.is_in_order or (plan.averages and plan.alone):
            return 1
        if work.workers.idle:  # it has joined since the step began, and takes part in the next one
            return 1
        limits = [completion.total_steps - self.version]
        if not plan.averages:
            limits.append(plan.state_every - len(self.ahead))
        else:
            usual_s = median(self._took_s) if self._took_s else math.inf
            limits += [REPORT_EVERY_S // usual_s] if usual_s > 0 else []
        until = work.evals.steps_left(self.version, self._seen)
        limits += [] if until is None else [until]
        most = max(1, int(min(limits)))
        return next((n for n in range(1, most) if not self.model.is_quiet(n)), most)

    def lacks_state(self, worker: int) -> bool:
        """Tell whether one of several workers must send its parameters after its push."""
        if not self.plan.averages or worker in self._sent:
            return False
        if self.between:
            return worker in self._rows
        return worker in self.work.pushes and self._is_mean_due

    def average_now(self) -> None:
        """Take the mean of several workers that all wait between two steps, once they send theirs.

        The caller keeps them waiting until `between` is false.
        """
        self.between = bool(self.ahead)

    def on_state(self, worker: int) -> list[Effect]:
        """Handle the parameters, now in the shards, of a worker that `lacks_state` is true for."""
        if self.lacks_state(worker):
            self._sent.add(worker)
        return self._advance()

    def begin_saving(self) -> None:
        """Begin to save the states of the workers' optimizers for a checkpoint."""
        self._saved.clear()

    @property
    def lacking(self) -> set[int]:
        """Workers whose optimizers' states a checkpoint still needs.

        Each sends its state between two steps. If each push is a step, the checkpoint needs one
        state of each worker since `begin_saving`, as the others continue meanwhile.
        """
        found = self.unsaved & self.work.workers.joined
        return found - self._saved if self.plan.mode == "async" else found

    def ask_optimizer(self, worker: int, *, is_paused: bool = False) -> bool:
        """Tell whether a worker that waits must send its optimizer's state for a checkpoint.

        If its push is in no step yet, the state comes after the step. If the step waits for a
        missing worker, for an answer of the averager or for the end of a pause, the checkpoint does
        not: it gets the state from after the push, which is copied, since the state takes its
        memory.

        Args:
            worker: its rank.
            is_paused: workers begin no steps.
        """
        if worker not in self.lacking:
            return False
        workers = self.work.workers
        if worker in workers.uncopied:
            if not (is_paused or workers.awaited) and self.phase == "training":
                return False
            self._keep(workers.uncopied[worker])
        return True

    def on_optimizer(self, worker: int) -> None:
        """Take over the state of a worker's optimizer, which the shards have got."""
        self.model.take_moments(worker)
        self.unsaved.discard(worker)
        self._saved.add(worker)

    @property
    def _is_mean_due(self) -> bool:
        """Whether the present step of several workers ends with their mean."""
        completion = self._completion
        return (
            self.average_soon
            or completion.stopped
            or completion.is_over(self.version + 1)
            or bool(self.work.workers.leaving & self.work.workers.joined)
            or not self.model.is_quiet()
        )

    @property
    def _apart(self) -> set[int]:
        """Workers that have trained since the last mean, or are in the present step."""
        return {*self._rows, *self.work.pushes} if self.plan.averages else set()

    def _lose(self, worker: int) -> None:
        """Forget the steps of a lost worker since the last mean."""
        if not self.plan.averages or worker in self._sent:
            return
        rows = self._rows.pop(worker, 0)
        if rows:
            self.work.ledger.lose(rows)
            self.requests.lose(rows)
            self.model.lose_rows(rows)
        self.work.forget(worker)
        if not self._rows:  # no worker has parameters other than those of the last mean
            self.ahead.clear()
            self.between = False

    def take_state(self, worker: int) -> None:
        """Take over the state that a worker has sent between two steps."""
        self.model.take_state(worker)
        if self.model_buffers is not None:
            self.model_buffers.take_state(worker)
        self.ahead.clear()

    def partition_of(self, worker: int) -> int:
        """Return the partition under which the shards store the next push of ``worker``."""
        return self.work.partition_of(worker)

    def leave(self, worker: int) -> list[Effect]:
        """Remove a worker. The step waits for its replacement, or others compute its partition."""
        self._lose(worker)
        self.unsaved.discard(worker)
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
        self._check_state()
        self._merge(reply, took_s)
        transferred = [] if reply.barrier is None else self._transfer(reply.barrier)
        return transferred + self._advance()

    def _transfer(self, barrier: Barrier) -> list[Effect]:
        """Copy the state at a barrier, if joining regions start from this region's."""
        if barrier.leaves:
            self.work.evals.skip_last()  # the other regions make the last evaluation
        if not barrier.is_donor:
            return []
        number = FIRST_TRANSFER + barrier.view
        self.model.snapshot(number)
        return [StateTransfer(Snapshot(number, self.export(), self._tensors()), barrier.view)]

    @property
    def _is_computing(self) -> bool:
        return self.work.is_computing and self.phase != "waiting"

    def has_copied(self, checkpoint: int) -> bool:
        """Tell whether the state has been copied for a checkpoint, or for a later one."""
        return checkpoint <= self._newest_snapshot

    def snapshot(self, checkpoint: int, *, halt: bool) -> list[Effect]:
        """Copy the present state for a checkpoint.

        Call it before decoding any answer that the averager gave after the checkpoint began. A
        region may be notified twice; the second call has no effect. A paused region copies its
        state again, since the earlier checkpoint may have failed.

        Args:
            checkpoint: id, larger than all before.
            halt: pause afterwards.
        """
        if self.has_copied(checkpoint):
            return []
        self._check_state()
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
        departing = self.work.departing(self.version, self._apart)
        if self.plan.reads_optimizers:
            self.unsaved |= {each.worker for each in departing}
        effects += departing
        changed = self.work.changed_ranks(self.version)
        if changed is not None:
            effects.append(changed)
            if self.model_buffers is not None:
                self.model_buffers.num_workers = max(1, len(changed.ranks))
        stands = self.phase != "training" or (self.exhausted and self.plan.alone)
        return effects if stands else [*effects, *self._assign()]

    def _assign(self) -> list[Assignment]:
        assigned = self.work.assign(self.version, self._seen)
        repeats = () if self.plan.averages else tuple(self.ahead)
        new = self._new_workers & {each.worker for each in assigned}
        self._new_workers -= new
        if not repeats or not new:
            return assigned
        return [replace(each, repeats=repeats) if each.worker in new else each for each in assigned]

    def _check_state(self) -> None:
        if self.ahead:
            raise InvariantError(
                f"{self.plan.region} has the parameters before {len(self.ahead)} of its steps"
            )

    def _next(self) -> list[Effect] | None:
        """Return the effects of the next thing to do; None if the region must wait for an event."""
        if self.between:
            if not self._rows.keys() <= self._sent:
                return None
            self._take_mean([Contribution(*each) for each in sorted(self._rows.items())])
        found = self._next_request()
        if found is not None:
            return [*found]
        if self.phase != "training":
            return None
        ready = self.work.ready()
        if not ready or any(map(self.lacks_state, ready)):
            return None
        return self._step(ready)

    def _step(self, partitions: list[int]) -> list[Effect]:
        reports = {partition: self.work.pushes[partition] for partition in partitions}
        contributions = self.work.rule.contributions(reports)
        unused = unused_by_all(reports[c.worker].unused for c in contributions if c.num_samples > 0)
        noise = None
        if self.plan.averages:
            self._apply_apart(contributions, unused)
        else:
            noise = self._apply(contributions, reports, unused)
        if self.plan.state_every and not self._has_state:
            self.ahead += [report.span for report in reports.values()]
        if self.plan.reads_optimizers:
            self.unsaved |= self.work.workers.pushers(partitions)
        samples, compute_s = self.work.settle(reports, contributions)
        self._took_s.append(compute_s)
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
        self.requests.stepped(samples, done.compute_s, unused)
        sent = self._outgoing()
        if sent or self.phase != "training":
            self._check_state()  # or `Strategy.is_quiet` is wrong
        return [done, *sent]

    def _apply(
        self,
        contributions: Sequence[Contribution],
        reports: Mapping[int, StepReport],
        unused: Sequence[int],
    ) -> NoiseReading | None:
        step = self.version + 1
        norms = self.noise.norms(step, contributions, reports)
        if self.model_buffers is not None and self._has_state:
            self.model_buffers.take_state(contributions[0].worker)
        elif self.model_buffers is not None and not self.plan.state_every:
            self.model_buffers.apply(contributions, synchronous=self.plan.mode == "sync")
        mean_sq = self.model.apply(
            contributions,
            measure=len(norms) > 1,
            most_norm=self.plan.clip_mean_norm,
            rate=self.plan.rate_of(sum(c.num_samples for c in contributions)),
            unused=unused,
            has_state=self._has_state,
        )
        if self._has_state:
            self.ahead.clear()
        return self.noise.take(step, norms, mean_sq)

    def _apply_apart(self, contributions: Sequence[Contribution], unused: Sequence[int]) -> None:
        """Count a step that several workers have made, and take their mean if it is due."""
        self._has_state = self._is_mean_due
        self.model.apply(contributions, unused=unused)
        for each in contributions:
            self._rows[each.worker] = self._rows.get(each.worker, 0) + each.num_samples
        if self._has_state:
            workers = [each.worker for each in contributions]
            self._take_mean([Contribution(worker, self._rows[worker]) for worker in workers])

    def _take_mean(self, shares: Sequence[Contribution]) -> None:
        self.model.take_mean(shares)
        if self.model_buffers is not None:
            self.model_buffers.apply(shares, synchronous=True)
        self._rows.clear()
        self._sent.clear()
        self.ahead.clear()
        self.between = False

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
