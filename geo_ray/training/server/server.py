"""A region's parameter server: who computes what, when a step is whole, when to send.

A pure state machine. Calls are events; what comes back are effects that the shell carries out:
`geo_ray.runtime` over sockets, `geo_ray.sim` on a virtual clock.

    join, push -> [Assignment ...]  new parameters and the next rows for a worker
               -> [SendUpdate]      an update for the averager
    leave      -> the same, for others, where a region goes on while workers are missing
    dismiss    -> the same; the worker goes home with its next push, and nothing is lost
    cut        -> [Snapshot]        the state that a checkpoint must hold is the present one

A checkpoint holds nobody up: the region copies what it has, its open request included, and goes on.
Whoever resumes from the copy repeats that request (`Server.resume`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from geo_ray.errors import InvariantError
from geo_ray.strategies.base import Border, Outgoing, Reply, Update, Wait, nothing_carried
from geo_ray.training.compute.noise import NoiseReading
from geo_ray.training.exchange.region_wire import RegionWire
from geo_ray.training.exchange.wire_plan import WirePlan
from geo_ray.training.server.effects import (
    HANDED,
    Effect,
    HandOver,
    SendUpdate,
    Snapshot,
    StepDone,
)
from geo_ray.training.server.ledger import Ledger
from geo_ray.training.server.plan import Phase, ServerPlan
from geo_ray.training.server.region_carry import RegionCarry
from geo_ray.training.server.region_ending import RegionEnding
from geo_ray.training.server.region_model import Concurrently, RegionModel, ShardPort
from geo_ray.training.server.region_noise import RegionNoise
from geo_ray.training.server.region_requests import RegionRequests, load_request
from geo_ray.training.server.region_work import RegionWork
from geo_ray.training.server.shard import Contribution
from geo_ray.types import StepReport
from geo_ray.util.together import in_turn


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
        refused_in_a_row: steps without a usable gradient.
        noise: what the workers' gradients say about each other.
        work: the workers, what they compute, and the sample books.
        requests: the open request, and what is said of the steps before it.
        loss: mean training loss of the last step that had one.
    """

    plan: ServerPlan
    model: RegionModel
    wire: RegionWire
    carry: RegionCarry | None = None
    version: int = 0
    phase: Phase = "training"
    refused_in_a_row: int = 0
    averager_version: int = 0
    requests: RegionRequests = field(default_factory=RegionRequests)
    noise: RegionNoise = field(init=False)
    work: RegionWork = field(init=False)
    loss: float | None = None
    _seen: int = 0
    _ending: RegionEnding = field(init=False)
    _newest_cut: int = -1
    _at_halt: dict[str, object] = field(default_factory=dict)  # what was exported then

    def __post_init__(self) -> None:
        self.noise = RegionNoise(self.plan.noise_every)
        self.work = RegionWork(self.plan, self._keep)
        self._ending = RegionEnding(self.plan)

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
        self.work.join(worker)
        return self._advance()

    def push(self, worker: int, report: StepReport) -> list[Effect]:
        """A worker's gradient lies in the shards; ``report`` says what is behind it."""
        self.work.push(worker, report)
        return self._advance()

    def share_of(self, worker: int) -> int:
        """Under which share the shards are to hold what ``worker`` pushes next."""
        return self.work.share_of(worker)

    def leave(self, worker: int) -> list[Effect]:
        """A worker is gone. The step waits for its replacement, or others compute its share."""
        self.work.leave(worker)
        return [] if self.plan.elastic is None else self._advance()

    def dismiss(self, worker: int) -> list[Effect]:
        """A worker is to go home once what it computes counts: its machine may be gone soon."""
        self.work.dismiss(worker)
        return self._advance()

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
        self.requests.answered(took_s - reply.held_s, dropped=reply.dropped)
        if self.carry is not None:
            self.carry.merge(reply)
        self.model.merge(replace(reply, carried_E=nothing_carried()))
        self.averager_version, self._seen = reply.version, reply.seen
        self.requests.view = max(self.requests.view, reply.view)
        told = reply.stop or self._ending.closing
        self._ending.closing = reply.closing
        if reply.stop:
            self.stop()
        elif reply.gather:
            self._ending.gather(self.version, self.requests.sent_at, computing=self._is_computing)
        if self.phase == "waiting":
            self.phase = "training"
        elif self.phase == "finishing":
            # Not final: others waited for this region, the final update is sent again.
            self.phase = "training"
            if reply.final:
                self._pass_end(told=told, at_border=reply.border is not None)
        handed = [] if reply.border is None else self._enter(reply.border)
        return handed + self._advance()

    def _enter(self, border: Border) -> list[Effect]:
        """All regions are equal, and members change."""
        if border.leaves:
            self.phase = "done"
            self.work.evals.skip_last()  # others go on without it
        if not border.donates:
            return []
        number = HANDED + border.view
        self.model.snapshot(number)
        return [HandOver(Snapshot(number, self.export(), self._tensors()), border.view)]

    def stop(self) -> None:
        """Finish after the step that is being computed, if any.

        A region that stands still for an answer finishes with it: one step more in one region
        would wait for the others for ever.
        """
        self._ending.stop(self.version, computing=self._is_computing)

    @property
    def _is_computing(self) -> bool:
        return self.work.is_computing and self.phase != "waiting"

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
        return [] if self.open_request is None else [self.open_request]

    @property
    def open_request(self) -> SendUpdate | None:
        """The request that waits for its answer."""
        return self.requests.request

    @property
    def link_busy(self) -> bool:
        """Whether a request is open."""
        return self.requests.is_open

    @property
    def seq(self) -> int:
        """The number of the newest request."""
        return self.requests.seq

    def carried(self, update: Update) -> None:
        """The open request goes on its way like this: nobody needs its uncoded payload any more."""
        if self.requests.carried(update):
            self.wire.reopen(update)

    @property
    def stands_still_for(self) -> int | None:
        """The number of the request without whose answer nothing happens here; None: something may.

        All workers are here and wait, and so does the region.
        """
        waits = self.phase in {"waiting", "must_send", "finishing"} and self.link_busy
        return self.seq if waits and self.work.is_still else None

    @property
    def ledger(self) -> Ledger:
        """The sample books."""
        return self.work.ledger

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
            return [
                *effects,
                *self.work.send_home(self.version, done=self.phase == "done"),
            ]
        effects += self.work.goers(self.version)
        changed = self.work.news(self.version)
        if changed is not None:
            effects.append(changed)
            if self.carry is not None:
                self.carry.num_workers = max(1, len(changed.ranks))
        stands = self.phase != "training" or (self.exhausted and self.plan.alone)
        return effects if stands else [*effects, *self.work.assign(self.version, self._seen)]

    def _next(self) -> list[Effect] | None:
        """The one thing to do next, or None if the region must wait for an event."""
        if self.phase == "must_send" and not self.link_busy:
            self.phase = "training"
            if not self._ending.stopped:
                return self._outgoing()
            return self._finish() if self._ending.is_over(self.version) else []
        if self.phase != "training":
            return None
        if self._ending.is_over(self.version):
            return self._finish()
        ready = self.work.ready()
        return self._step(ready) if ready else None

    def _step(self, shares: list[int]) -> list[Effect]:
        reports = {share: self.work.pushes[share] for share in shares}
        contributions = self.work.rule.contributions(reports)
        noise = self._apply(contributions, reports)
        samples, compute_s = self.work.settle(reports, contributions)
        self.version += 1
        self.refused_in_a_row = 0 if samples else self.refused_in_a_row + 1
        done = StepDone.of(self.version, samples, reports.values(), compute_s, noise)
        self.loss = self.loss if done.loss is None else done.loss
        self.requests.stepped(samples, done.compute_s)
        return [done, *self._outgoing()]

    def _apply(
        self, contributions: Sequence[Contribution], reports: Mapping[int, StepReport]
    ) -> NoiseReading | None:
        step = self.version + 1
        norms = self.noise.norms(step, contributions, reports)
        if self.carry is not None:
            self.carry.apply(contributions, together=self.plan.mode == "sync")
        mean_sq = self.model.apply(
            contributions,
            measure=len(norms) > 1,
            most_norm=self.plan.clip_mean_norm,
            rate=self.plan.rate_of(sum(c.num_samples for c in contributions)),
        )
        return self.noise.take(step, norms, mean_sq)

    def _keep(self, share: int) -> None:
        self.model.keep(share)
        if self.carry is not None:
            self.carry.keep(share)

    def _outgoing(self) -> list[Effect]:
        requests = self.requests
        if not self._ending.may_speak(self.version, requests.step_s, requests.exchange_s):
            return []
        out = self.model.outgoing()
        if isinstance(out, Wait):
            self.phase = "must_send"
            return []
        if out is None:
            return []
        final = self._ending.is_last_word(self.version)
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
            self._pass_end(told=self._ending.stopped)
            return []
        sent = self._send(out, final=True)
        self.phase = "finishing"
        return [sent]

    def _pass_end(self, *, told: bool, at_border: bool = False) -> None:
        is_over = self._ending.passed(self.version, told=told)
        # At a border others may go on: the last word is said again, and means it.
        self.phase = "done" if is_over and (told or not at_border) else "training"

    def _send(self, out: Outgoing, *, final: bool) -> SendUpdate:
        if out.wait:
            self.phase = "waiting"
        samples = self.requests.samples
        update = Update(
            region=self.plan.region,
            epoch=self.plan.epoch,
            seq=0,
            base_version=self.averager_version,
            num_samples=samples,
            payload_P=out.payload_P,
            final=final,
            fragment=out.fragment,
            loss=self.loss,
            grad_sq=self.noise.mean_sq(samples) if self.plan.tells_norms else None,
            carried_E=nothing_carried() if self.carry is None else self.carry.outgoing(),
        )
        return self.requests.send(update, version=self.version, blocking=out.wait)

    # -------------------------------------------------------------- checkpoints

    def export(self) -> dict[str, object]:
        """Plain values of the control state; the shards and the wire export the tensors."""
        return {
            "version": self.version,
            "phase": self.phase,
            "must_speak": self.phase == "must_send",
            "hub_version": self.averager_version,
            "ledger": self.ledger.export(),
            "wire": self.wire.export(),
            "noise": self.noise.meter.export(),
            "open": self.requests.export_request(self.wire.open_update)[1],
            **self.requests.export(),
        } | self._ending.export()

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
        self.requests.restore(data, self.version)
        self._reopen(data, tensors or {})
        self.work.restore(ledger, self.version)
        self.noise.meter.restore(data.get("noise"))

    def _tensors(self) -> dict[str, Tensor]:
        found = self.wire.tensors()
        if self.carry is not None:
            found |= self.carry.tensors()
        return found | self.requests.export_request(self.wire.open_update)[0]

    def _reopen(self, data: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
        """Phase and open request as they were saved, by the steps that the present plan has."""
        self.phase = "must_send" if data["must_speak"] else "training"
        phase = str(data.get("phase", self.phase))
        self._ending.restore(data, self.version, done=phase == "done")
        is_closed = self._ending.closing and phase == "finishing"
        has_more = self._ending.has_more(self.version) and not is_closed
        if phase == "waiting" or (phase == "done" and not has_more):
            self.phase = "waiting" if phase == "waiting" else "done"
        request = data.get("open")
        if not isinstance(request, Mapping):
            return
        if self.plan.alone:  # the others were lost, and with them who would answer
            self.phase = "training"
            return
        update = load_request(tensors, request)
        if phase == "finishing":  # of a run that was closing, it may be an ordinary one by now
            self.phase = "waiting" if has_more else "finishing"
        if update.final and has_more:
            update = replace(update, final=False)
        update = update if self.carry is None else self.carry.filled(update)
        if request["is_coded"]:
            self.wire.reopen(update)
        self.requests.reopen(update, blocking=bool(request["blocking"]))
