"""A region's parameter server: who computes what, when a step is whole, when to send.

A pure state machine. Calls are events; what comes back are effects that the shell carries out:
`geo_ray.runtime` over sockets, `geo_ray.sim` on a virtual clock.

    join, push -> [Assignment ...]  new parameters and the next rows for a worker
               -> [SendUpdate]      an update for the averager
    cut        -> [Snapshot]        the state that a checkpoint must hold is the present one

A checkpoint holds nobody up: the region copies what it has, its open request included, and goes on.
Whoever resumes from the copy repeats that request (`Server.resume`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from torch import Tensor

from geo_ray.errors import InvariantError
from geo_ray.strategies.base import Outgoing, Reply, Update, Wait, nothing_carried
from geo_ray.training.compute.noise import NoiseReading
from geo_ray.training.exchange.region_wire import RegionWire
from geo_ray.training.exchange.saved import load_messages, save_messages
from geo_ray.training.exchange.wire_plan import WirePlan
from geo_ray.training.server.effects import Assignment, Effect, SendUpdate, Snapshot, StepDone
from geo_ray.training.server.eval_times import EvalTimes
from geo_ray.training.server.ledger import Ledger
from geo_ray.training.server.plan import Phase, ServerPlan
from geo_ray.training.server.region_carry import RegionCarry
from geo_ray.training.server.region_model import Concurrently, RegionModel, ShardPort
from geo_ray.training.server.region_noise import RegionNoise
from geo_ray.training.server.shard import Contribution
from geo_ray.training.server.stragglers import Stragglers
from geo_ray.types import Span, StepReport
from geo_ray.util.together import in_turn

_REQUEST: Final = "request"  # prefix of the open request's tensors


@dataclass(slots=True)
class Server:
    """See the module's docstring.

    Attributes:
        plan: what to do.
        model: the region's shards.
        wire: encodes updates and decodes replies. The shell does both, and needs no lock for it: a
            region has one request open, so only who carries that one is in there.
        carry: what the model carries beside its parameters; None if it does not.
        version: steps applied.
        phase: what the region is waiting for, if anything.
        ledger: the sample books.
        refused_in_a_row: steps without a usable gradient.
        noise: what the workers' gradients say about each other.
        evals: when worker 0 evaluates.
        loss: mean training loss of the last step that had one.
        compute_s: seconds of computing in the steps since the last update, one after another.
        step_s: of one step, over those before the last update.
        exchange_s: of the last exchange, without what the averager held it.
    """

    plan: ServerPlan
    model: RegionModel
    wire: RegionWire
    carry: RegionCarry | None = None
    version: int = 0
    phase: Phase = "training"
    ledger: Ledger = field(default_factory=Ledger)
    refused_in_a_row: int = 0
    averager_version: int = 0
    seq: int = 0
    link_busy: bool = False
    samples_since_send: int = 0
    noise: RegionNoise = field(init=False)
    evals: EvalTimes = field(init=False)
    loss: float | None = None
    compute_s: float = 0.0
    step_s: float = 0.0
    exchange_s: float = 0.0
    _sent_at: int = 0
    _sent_samples: int = 0  # behind the open request
    _seen: int = 0
    _stopped: bool = False
    _total_steps: float = math.inf
    _joined: set[int] = field(default_factory=set)
    _idle: set[int] = field(default_factory=set)
    _pushes: dict[int, StepReport] = field(default_factory=dict)
    _late: dict[int, Span] = field(default_factory=dict)  # what the step was made without
    _open: SendUpdate | None = None
    _newest_cut: int = -1
    _at_halt: dict[str, object] = field(default_factory=dict)  # what was exported then
    _rule: Stragglers = field(init=False)

    def __post_init__(self) -> None:
        self.noise = RegionNoise(self.plan.noise_every)
        self._rule = Stragglers.of(self.plan.stragglers, self.plan.num_workers)
        self.evals = EvalTimes.of(self.plan)
        if self.plan.steps is not None:
            self._total_steps = self.plan.steps * self.plan.steps_per_round

    @classmethod
    def over(
        cls,
        shards: Sequence[ShardPort],
        num_params: int,
        plan: ServerPlan,
        codecs: WirePlan,
        together: Concurrently = in_turn,
        carry: RegionCarry | None = None,
    ) -> Server:
        """The server of a region of ``num_params`` parameters over its shards in order."""
        model = RegionModel(shards, num_params, codecs.fragments, together)
        return cls(plan, model, RegionWire(codecs, plan.region, num_params), carry)

    # -------------------------------------------------------------- events

    def join(self, worker: int) -> list[Effect]:
        """A worker, new or replaced, is ready. What its predecessor held is its own now."""
        if not 0 <= worker < self.plan.num_workers:
            raise InvariantError(f"{self.plan.region} has no worker {worker}")
        self._pushes.pop(worker, None)
        self._late.pop(worker, None)
        if worker == 0:
            self.evals.lost()
        self._joined.add(worker)
        self._idle.add(worker)
        return self._advance()

    def push(self, worker: int, report: StepReport) -> list[Effect]:
        """A worker's gradient lies in the shards; ``report`` says what is behind it."""
        if self._late.pop(worker, None) == report.span:
            self._idle.add(worker)
            return self._advance()
        held = self.ledger.in_flight.get(worker)
        if held != report.span:
            raise InvariantError(f"worker {worker} pushed {report.span}, it was assigned {held}")
        self._pushes[worker] = report
        return self._advance()

    def leave(self, worker: int) -> None:
        """A worker is gone; the step waits for its replacement."""
        self._idle.discard(worker)
        self._joined.discard(worker)

    def on_reply(self, reply: Reply, took_s: float = 0.0) -> list[Effect]:
        """The averager answered the open request.

        Args:
            reply: the answer, decoded by `wire`.
            took_s: seconds since the request.
        """
        if self.phase == "halted":  # the checkpoint has the request open
            return []
        if reply.seq != self.seq or not self.link_busy:
            raise InvariantError(f"{self.plan.region} got answer {reply.seq}, awaits {self.seq}")
        if reply.dropped:
            self.samples_since_send += self._sent_samples
        self.link_busy, self._open = False, None
        self.exchange_s = max(0.0, took_s - reply.held_s)
        if self.carry is not None:
            self.carry.merge(reply)
        self.model.merge(replace(reply, carried_E=nothing_carried()))
        self.averager_version, self._seen = reply.version, reply.seen
        if reply.stop:
            self.stop()
        if self.phase == "waiting":
            self.phase = "training"
        elif self.phase == "finishing":
            # Not final: others waited for this region, the final update is sent again.
            self.phase = "done" if reply.final else "training"
        return self._advance()

    def stop(self) -> None:
        """Finish after the step that is being computed, if any.

        A region that stands still for an answer finishes with it: one step more in one region
        would wait for the others for ever.
        """
        busy = self._joined - self._idle - set(self._pushes) - set(self._late)
        computing = bool(busy) and self.phase != "waiting"
        self._total_steps = min(self._total_steps, self.version + (1 if computing else 0))
        self._stopped = True

    def cut(self, checkpoint: int, *, halt: bool) -> list[Effect]:
        """A checkpoint has begun: copy the present state.

        It must come before an answer is decoded that the averager gave since then. A region may
        hear of a checkpoint in two ways; the second time nothing happens. One that stands still
        copies the same state again: the checkpoint before may have come to nothing.

        Args:
            checkpoint: its id, larger than those before.
            halt: stand still afterwards.
        """
        if checkpoint <= self._newest_cut:
            return []
        self._newest_cut = checkpoint
        self.model.snapshot(checkpoint)
        control = self.export()
        if self.phase == "halted":  # rows that came back since then are still to be computed
            control = self._at_halt | {name: control[name] for name in ("wire", "open")}
        taken = Snapshot(checkpoint, control, self._tensors())
        if not halt or self.phase in {"done", "halted"}:  # nothing more to stand still for
            return [taken]
        self.phase, self._at_halt = "halted", control
        return [taken, *self._advance()]

    def resume(self) -> list[Effect]:
        """What a restored region has to do first: repeat the request that was open, if one was."""
        return [] if self._open is None else [self._open]

    @property
    def open_request(self) -> SendUpdate | None:
        """The request that waits for its answer."""
        return self._open

    def carried(self, update: Update) -> None:
        """The open request goes on its way like this: nobody needs its uncoded payload any more."""
        if self._open is not None and self._open.update.seq == update.seq:
            self._open = replace(self._open, update=update)
            self.wire.reopen(update)

    @property
    def stands_still_for(self) -> int | None:
        """The number of the request without whose answer nothing happens here; None: something may.

        All workers are here and wait, and so does the region.
        """
        computing = self._joined - self._idle - set(self._pushes)
        waits = self.phase in {"waiting", "must_send", "finishing"} and self.link_busy
        is_whole = len(self._joined) == self.plan.num_workers
        return self.seq if waits and is_whole and not computing else None

    @property
    def exhausted(self) -> bool:
        """Whether too many steps in a row had no usable gradient."""
        return self.refused_in_a_row >= self.plan.max_refused

    # -------------------------------------------------------------- what follows from them

    def _advance(self) -> list[Effect]:
        """Do all that can be done now; the order of effects is the order of events."""
        effects: list[Effect] = []
        while (more := self._next()) is not None:
            effects += more
        if self.phase in {"done", "halted"}:
            return effects + self._dismiss()
        return effects + (self._assign() if self.phase == "training" else [])

    def _next(self) -> list[Effect] | None:
        """The one thing to do next, or None if the region must wait for an event."""
        if self.phase == "must_send" and not self.link_busy:
            self.phase = "training"
            return self._finish() if self._stopped else self._outgoing()
        if self.phase != "training":
            return None
        if self.version >= self._total_steps:
            return self._finish()
        ready = self._ready()
        return self._step(ready) if ready else None

    def _ready(self) -> list[int]:
        """The workers whose gradients make the next step, lowest rank first; empty if not yet."""
        if self.plan.mode == "async":
            return sorted(self._pushes)[:1]
        return sorted(self._pushes) if self._rule.is_enough(self._pushes) else []

    def _step(self, workers: list[int]) -> list[Effect]:
        reports = {worker: self._pushes.pop(worker) for worker in workers}
        contributions = self._rule.contributions(reports)
        noise = self._apply(contributions, reports)
        whole = self._rule.holds_all_rows(contributions)
        samples = 0
        for worker, report in reports.items():
            refused = None if whole else report.refused
            span = self.ledger.settle(worker, refused)
            samples += 0 if refused else span.count
            self._idle.add(worker)
        if self.plan.mode == "sync":
            samples += self._do_without(None if whole else "late")
        self.version += 1
        self.samples_since_send += samples
        self.refused_in_a_row = 0 if samples else self.refused_in_a_row + 1
        done = StepDone.of(self.version, samples, reports.values(), noise)
        self.loss = self.loss if done.loss is None else done.loss
        self.compute_s += done.compute_s
        return [done, *self._outgoing()]

    def _apply(
        self, contributions: Sequence[Contribution], reports: Mapping[int, StepReport]
    ) -> NoiseReading | None:
        step = self.version + 1
        norms = self.noise.norms(step, contributions, reports)
        if self.carry is not None:
            self.carry.apply(contributions, together=self.plan.mode == "sync")
        mean_sq = self.model.apply(
            contributions, measure=len(norms) > 1, most_norm=self.plan.clip_mean_norm
        )
        return self.noise.take(step, norms, mean_sq)

    def _do_without(self, lost: str | None) -> int:
        """Book what workers hold that the step did not wait for; how many rows are in it anyway."""
        samples = 0
        for worker in sorted(self.ledger.in_flight):
            span = self.ledger.settle(worker, lost)
            samples += 0 if lost else span.count
            if worker in self._joined - self._idle:
                self._late.setdefault(worker, span)
        return samples

    def _outgoing(self) -> list[Effect]:
        if self._stopped:  # all regions send their final update next, or rounds would not match
            return []
        out = self.model.outgoing()
        if isinstance(out, Wait):
            self.phase = "must_send"
            return []
        if out is None:
            return []
        final = self.plan.last_round_is_last_word and self.version >= self._total_steps
        sent = self._send(out, final=final)
        if final:
            self.phase = "finishing"
        return [sent]

    def _finish(self) -> list[Effect]:
        if self.link_busy:  # merge what is on its way before the final update
            self.phase = "waiting"
            return []
        out = self.model.finish()
        if out is None:
            self.phase = "done"
            return []
        sent = self._send(out, final=True)
        self.phase = "finishing"
        return [sent]

    def _send(self, out: Outgoing, *, final: bool) -> SendUpdate:
        self.seq += 1
        self.link_busy = True
        if out.wait:
            self.phase = "waiting"
        steps = self.version - self._sent_at
        if steps:
            self.step_s = self.compute_s / steps
        self.compute_s, self._sent_at = 0.0, self.version
        update = Update(
            region=self.plan.region,
            epoch=self.plan.epoch,
            seq=self.seq,
            base_version=self.averager_version,
            num_samples=self.samples_since_send,
            payload_P=out.payload_P,
            final=final,
            fragment=out.fragment,
            loss=self.loss,
            steps=steps,
            step_s=self.step_s,
            exchange_s=self.exchange_s,
            grad_sq=self.noise.mean_sq(self.samples_since_send) if self.plan.tells_norms else None,
            carried_E=nothing_carried() if self.carry is None else self.carry.outgoing(),
        )
        self._sent_samples, self.samples_since_send = self.samples_since_send, 0
        self._open = SendUpdate(update, out.wait)
        return self._open

    def _assign(self) -> list[Effect]:
        """Next rows for idle workers; in sync mode to all together, so that ranks get their own."""
        if self.plan.mode == "sync" and len(self._joined) < self._rule.needed:
            return []
        if self.exhausted and self.plan.alone:
            return []
        answers: list[Effect] = []
        takers, rows_of = sorted(self._idle & self._joined), self.plan.rows_per_push
        spans = {w: self.ledger.assign(w, rows_of(w)) for w in self._rule.readers(takers)}
        for worker in takers:
            evaluate = worker == 0 and self.evals.is_due(self.version, self._seen)
            judged = evaluate and self.plan.evaluates_outer
            span, parts = spans[worker], self._rule.parts_of(worker, spans)
            work = Assignment(worker, self.version, span, evaluate, eval_params=judged, parts=parts)
            answers.append(work)
        self._idle -= self._joined
        return answers

    def _dismiss(self) -> list[Effect]:
        """Send workers home: those that wait, and those that come back too late to count."""
        answers: list[Effect] = []
        for worker in sorted(self._pushes):
            self.ledger.settle(worker, "after_end")
        for worker in sorted((self._idle | set(self._pushes)) & self._joined):
            last = worker == 0 and self.phase == "done"
            answers.append(Assignment(worker, self.version, None, evaluate=last, done=True))
        self._idle.clear()
        self._pushes.clear()
        return answers

    # -------------------------------------------------------------- checkpoints

    def export(self) -> dict[str, object]:
        """Plain values of the control state; the shards and the wire export the tensors."""
        return {
            "version": self.version,
            "phase": self.phase,
            "must_speak": self.phase == "must_send",
            "hub_version": self.averager_version,
            "seq": self.seq,
            "samples_since_send": self.samples_since_send,
            "sent_at": self._sent_at,
            "times_s": [self.compute_s, self.step_s, self.exchange_s],
            "ledger": self.ledger.export(),
            "wire": self.wire.export(),
            "noise": self.noise.meter.export(),
            "open": self._open_request(),
            "sent_samples": self._sent_samples,
            "stops": [self.plan.goal, self._total_steps] if self._stopped else None,
        }

    def restore(
        self, data: Mapping[str, object], tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        """Become what `export` saved.

        Workers join anew and get the rows that were in flight; those of ranks that are no more go
        to whoever asks first. `resume` tells what to do then.

        Args:
            data: the control state.
            tensors: the wire's.

        Raises:
            ConfigDriftError: if it was saved with other codecs.
        """
        ledger, wire = data["ledger"], data.get("wire", {})
        if not isinstance(ledger, dict) or not isinstance(wire, dict):
            raise InvariantError("checkpoint without sample books")
        self.wire.restore(tensors or {}, wire)
        if self.carry is not None:
            self.carry.restore(tensors or {})
        self.version = int(str(data["version"]))
        self.averager_version = int(str(data["hub_version"]))
        self.seq = int(str(data["seq"]))
        self.samples_since_send = int(str(data["samples_since_send"]))
        self._sent_at = int(str(data.get("sent_at", self.version)))
        times_s = data.get("times_s")
        if isinstance(times_s, list):
            self.compute_s, self.step_s, self.exchange_s = map(float, times_s)
        self._sent_samples = int(str(data.get("sent_samples", 0)))
        self._reopen(data, tensors or {})
        self.ledger = Ledger.restore(ledger)
        for worker in [w for w in self.ledger.in_flight if w >= self.plan.num_workers]:
            self.ledger.take_back(worker)
        self.evals.resume(self.version)
        self.noise.meter.restore(data.get("noise"))

    def _open_request(self) -> dict[str, object] | None:
        """Plain values of the open request; its tensors are in `_tensors`."""
        if self._open is None:
            return None
        sent = self.wire.open_update
        _, rows = save_messages(_REQUEST, [sent or self._open.update])
        return {"blocking": self._open.blocking, "is_coded": sent is not None, "update": rows}

    def _tensors(self) -> dict[str, Tensor]:
        found = self.wire.tensors()
        if self.carry is not None:
            found |= self.carry.tensors()
        if self._open is None:
            return found
        return found | save_messages(_REQUEST, [self.wire.open_update or self._open.update])[0]

    def _reopen(self, data: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
        """Phase and open request as they were saved, by the steps that the present plan has."""
        stops = data.get("stops")
        if isinstance(stops, list) and stops[0] == self.plan.goal:
            self._stopped, self._total_steps = True, stops[1]
        has_more = not self._stopped and self.version < self._total_steps
        self.phase = "must_send" if data["must_speak"] else "training"
        phase = str(data.get("phase", self.phase))
        if phase == "waiting" or (phase == "done" and not has_more):
            self.phase = "waiting" if phase == "waiting" else "done"
        request = data.get("open")
        if not isinstance(request, Mapping):
            return
        if self.plan.alone:  # the others were lost, and with them who would answer
            self.phase = "training"
            return
        (update,) = load_messages(Update, tensors, request["update"])
        if phase == "finishing":  # what was the final update may be an ordinary one by now
            self.phase = "waiting" if has_more else "finishing"
        if update.final and has_more:
            update = replace(update, final=False)
        update = update if self.carry is None else self.carry.filled(update)
        if request["is_coded"]:
            self.wire.reopen(update)
        self._open = SendUpdate(update, bool(request["blocking"]))
        self.link_busy = True
