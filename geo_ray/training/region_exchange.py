"""A region's exchanges with the averager: when it sends, how it ends, and what a reply changes.

`RegionExchange` is the common part of the two ways to train a region. `training.server.Server`
adds workers that push gradients. `geo_ray.joining.rank.RankExchange` adds a training loop of the
user.

A region has at most one request open at the averager (`RegionRequests`). The final update includes
the remaining coding errors; with blocking rounds and lossy codecs, the last round is the final
update (`RegionCompletion`). At a membership change all regions send an interim final update and
then continue.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from torch import Tensor

from geo_ray.base.errors import InvariantError
from geo_ray.base.types import unused_by_all
from geo_ray.strategies.state import Outgoing, Wait
from geo_ray.training.assignment import Phase, ServerPlan
from geo_ray.training.checkpoint_parts import load_messages, save_messages
from geo_ray.training.effects import SendUpdate
from geo_ray.training.messages import Barrier, ReplyMessage, UpdateMessage, no_buffers
from geo_ray.training.model_buffers import RegionBuffers

_REQUEST: Final = "request"  # prefix of the open request's tensors


@dataclass(slots=True)
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
        unused: parameters that had no gradient since the last update; None: no step had one.
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
    unused: Sequence[int] | None = None
    _sent_samples: int = 0  # rows of the open request

    def stepped(self, samples: int, compute_s: float, unused: Sequence[int] = ()) -> None:
        """Record an applied step.

        Args:
            samples: rows of its gradients.
            compute_s: compute seconds.
            unused: parameters for which no worker had a gradient.
        """
        self.samples += samples
        self.compute_s += compute_s
        if samples:
            earlier = unused if self.unused is None else self.unused
            self.unused = unused_by_all([earlier, unused])

    def lose(self, samples: int) -> None:
        """Record that rows since the last update were lost with their worker."""
        self.samples -= samples

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
            unused=self.unused or (),
        )
        self._sent_samples, self.samples, self.unused = self.samples, 0, None
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
            "unused": None if self.unused is None else list(self.unused),
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
        unused = data.get("unused")
        self.unused = tuple(map(int, unused)) if isinstance(unused, list) else None

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


class ExchangedModel(Protocol):
    """The model of a region, or the part of it that one process exchanges."""

    def outgoing(self) -> Outgoing | Wait | None:
        """Return the message after a step, if one is due."""

    def finish(self) -> Outgoing | None:
        """Return the final update after the last step."""

    def merge(self, reply: ReplyMessage) -> None:
        """Merge a decoded answer."""


@dataclass(slots=True)
class RegionExchange:
    """Sends a region's updates when they are due, merges the answers, and ends the run.

    A pure state machine; see the module.

    Attributes:
        plan: plan of the region.
        model: the model that is exchanged.
        model_buffers: model buffers; None if the model has none.
        version: steps applied.
        phase: what the region waits for, if anything.
        averager_version: averager's version that the region has merged.
        requests: open request and measurements since the last update.
        loss: mean training loss of the last step that had one.
    """

    plan: ServerPlan
    model: ExchangedModel
    model_buffers: RegionBuffers | None = None
    version: int = 0
    phase: Phase = "training"
    averager_version: int = 0
    requests: RegionRequests = field(default_factory=RegionRequests)
    loss: float | None = None
    _seen: int = 0
    _completion: RegionCompletion = field(init=False)

    def __post_init__(self) -> None:
        self._completion = RegionCompletion(self.plan)

    @property
    @abstractmethod
    def _is_computing(self) -> bool:
        """Whether a step is in progress that will be applied."""

    @property
    def link_busy(self) -> bool:
        """Whether a request is open."""
        return self.requests.is_open

    @property
    def seq(self) -> int:
        """The number of the newest request."""
        return self.requests.seq

    @property
    def open_request(self) -> SendUpdate | None:
        """The request that waits for its answer."""
        return self.requests.request

    def stop(self) -> None:
        """Finish after the step in progress, if any.

        A region that waits for an answer finishes when the answer arrives. If it took a further
        step, its next exchange would wait for the other regions forever.
        """
        self._completion.stop(self.version, computing=self._is_computing)

    def _merge(self, reply: ReplyMessage, took_s: float) -> None:
        """Merge the answer to the open request.

        Raises:
            InvariantError: another answer is awaited.
        """
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
        if reply.barrier is not None:
            self._enter(reply.barrier)

    def _enter(self, barrier: Barrier) -> None:
        """Handle a barrier: all regions have the same model, and the members change."""
        if barrier.leaves:
            self.phase = "done"

    def _next_request(self) -> list[SendUpdate] | None:
        """Send what has become due; None if nothing has."""
        if self.phase == "must_send" and not self.link_busy:
            self.phase = "training"
            if not self._completion.stopped:
                return self._outgoing()
            return self._finish() if self._completion.is_over(self.version) else []
        if self.phase == "training" and self._completion.is_over(self.version):
            return self._finish()
        return None

    def _outgoing(self) -> list[SendUpdate]:
        """Send the update that the strategy wants after a step, if any."""
        requests = self.requests
        if not self._completion.may_request(self.version, requests.step_s, requests.exchange_s):
            return []
        out = self.model.outgoing()
        if isinstance(out, Wait):
            self.phase = "must_send"
            return []
        if out is None:
            return []
        final = self._completion.is_final_update(self.version)
        sent = self._send(out, final=final)
        if final:
            self.phase = "finishing"
        return [sent]

    def _finish(self) -> list[SendUpdate]:
        """Send the final update."""
        if self.link_busy:  # merge the answer in flight before the final update
            self.phase = "waiting"
            return []
        out = self.model.finish()
        if out is None:
            self._pass_end(still_stopping=self._completion.stopped)
            return []
        sent = self._send(out, final=True)
        self.phase = "finishing"
        return [sent]

    def _pass_end(self, *, still_stopping: bool, at_barrier: bool = False) -> None:
        is_over = self._completion.passed(self.version, still_stopping=still_stopping)
        # After a barrier the run may continue; the final update is then sent again.
        self.phase = "done" if is_over and (still_stopping or not at_barrier) else "training"

    def _send(self, out: Outgoing, *, final: bool) -> SendUpdate:
        if out.wait:
            self.phase = "waiting"
        samples = self.requests.samples
        update = UpdateMessage(
            region=self.plan.region,
            attempt=self.plan.attempt,
            seq=0,
            base_version=self.averager_version,
            num_samples=samples,
            payload_P=out.payload_P,
            final=final,
            fragment=out.fragment,
            loss=self.loss,
            grad_sq=self._mean_grad_sq(samples),
            buffers_E=no_buffers() if self.model_buffers is None else self.model_buffers.outgoing(),
        )
        return self.requests.send(update, version=self.version, blocking=out.wait)

    def _mean_grad_sq(self, samples: int) -> float | None:
        """Return the squared norm of the mean gradient of the update, if it is measured."""
        return None
