"""The averager: takes in every region's updates, exactly once, and answers them.

A pure state machine around a strategy's `on_update`. It adds what no strategy should care about:

- exactly once: an update that was already taken in gets its old answer again;
- refusal of what is not finite or has the wrong size;
- stopping all regions at the same exchange, also when they have seen enough rows together;
- checkpoints of one moment: from the request on, each region's next answer carries the id, and
  what a region sends after that answer is held until all regions have theirs. Then nothing is
  between the regions but what lies in the averager, which is saved in the same breath;
- codecs: a strategy sees vectors only; what is coded is decoded after the check for repetitions
  and before anything else, and an answer that is given again is the same to the byte;
- the end: final updates are held until every region's is in. A checkpoint that comes between
  takes those that wait as ordinary updates; their regions save, and send a final one again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from geo_ray.codecs.common.feedback import all_finite
from geo_ray.errors import InvariantError, NonFiniteError
from geo_ray.strategies.base import AveragerState, Reply, Strategy, Update
from geo_ray.strategies.common import additive
from geo_ray.training.averager.averager_noise import AveragerNoise
from geo_ray.training.compute.flat import fragment_cuts
from geo_ray.training.exchange.averager_wire import AveragerWire

_WIRE = "wire/"


@dataclass(slots=True)
class _Request:
    """An open checkpoint: which regions have their answer, and what is held back meanwhile."""

    id: int
    halt: bool
    told: set[str] = field(default_factory=set)
    held: list[tuple[Update, bool]] = field(default_factory=list)  # whether it is to be skipped


@dataclass(frozen=True, slots=True)
class AveragerSnapshot:
    """The averager's part of a checkpoint, copied at the right moment."""

    id: int
    tensors: dict[str, Tensor]
    control: dict[str, object]


@dataclass(slots=True)
class Averager:
    """See the module's docstring.

    Attributes:
        strategy: how to combine.
        num_params: P, the size that every payload must have.
        state: the strategy's state.
        snapshots: finished parts of checkpoints, for the shell to take and write.
        wire: decodes updates and encodes replies.
        enough: rows of all regions together after which they are told to finish; None: no limit.
        samples: rows behind all updates so far.
        noise: what the regions' gradients say about each other.
    """

    strategy: Strategy
    num_params: int
    state: AveragerState
    snapshots: list[AveragerSnapshot] = field(default_factory=list)
    wire: AveragerWire = field(default_factory=AveragerWire)
    enough: int | None = None
    samples: int = 0
    noise: AveragerNoise = field(default_factory=AveragerNoise)
    _last: dict[str, tuple[int, int]] = field(default_factory=dict)
    _answers: dict[str, Reply] = field(default_factory=dict)
    _finals: dict[str, Update] = field(default_factory=dict)
    _request: _Request | None = None

    def __post_init__(self) -> None:
        fragments = self.strategy.traits.exchange.fragments
        self.state.fragments = tuple(fragment_cuts(self.num_params, fragments))

    @property
    def stopping(self) -> bool:
        """Whether regions are told to finish."""
        return self.state.stopping

    def on_wake(self) -> list[Reply]:
        """The time that the strategy asked for (`AveragerState.wake_s`) has come."""
        self.state.wake_s = None
        on_wake = self.strategy.traits.averager.on_wake
        return [] if on_wake is None else self._publish(on_wake(self.state))

    def on_update(self, update: Update) -> list[Reply]:
        """Take in one update.

        Returns:
            Answers to this or to other regions' open requests; possibly none yet.

        Raises:
            InvariantError: for an unknown region or a payload of the wrong size.
            FrameError: if a coded payload makes no sense.
            ReferenceLostError: if it is a difference from something that is not here.
            NonFiniteError: if the payload has NaN or infinity. After any error the state is
                unchanged.
        """
        if update.region not in self.state.members:
            raise InvariantError(f"update of '{update.region}', which is no member of this run")
        if (update.epoch, update.seq) <= self._last.get(update.region, (0, 0)):
            return self._repeat(update)
        request = self._request
        if request is not None and update.region in request.told:
            if not self._holds(update.region):
                request.held.append((self._opened(update), False))
            return []
        update = self._opened(update)
        self._last[update.region] = (update.epoch, update.seq)
        self._answers.pop(update.region, None)
        self.samples += update.num_samples
        if self.enough is not None and self.samples >= self.enough:
            self.request_stop()
        if not update.final:
            return self._release_finals() + self._answer(update)
        self._finals[update.region] = update
        if request is not None or self.state.waiting:
            return self._release_finals()
        if any(region not in self._finals for region in self.state.members):
            return []
        finals = [self._finals[region] for region in self.state.members]
        return [reply for final in finals for reply in self._answer(final)]

    def on_sum(self, parts: Sequence[Update], total_P: Tensor) -> list[Reply] | None:
        """Take in the sum of several updates, of which only the headers are known.

        Returns:
            Answers; None if it cannot be taken in as a whole, then nothing has changed: the parts
            must come by themselves.

        Raises:
            InvariantError: if it has the wrong size or the strategy has no use for sums.
            NonFiniteError: if it has NaN or infinity; the state is unchanged.
        """
        combine = self.strategy.traits.averager.adds_up
        if combine is None:
            raise InvariantError(f"strategy {self.strategy} cannot take in a sum of updates")
        told = set() if self._request is None else self._request.told
        for part in parts:
            known = (part.epoch, part.seq) <= self._last.get(part.region, (0, 0))
            stranger = part.region not in self.state.members
            if known or stranger or part.final or part.region in told:
                return None
        self._check_vector(total_P, f"a sum of {[part.region for part in parts]}")
        for part in parts:
            self._last[part.region] = (part.epoch, part.seq)
            self.samples += part.num_samples
        return self._release_finals() + self._publish(
            additive.relay_sum(self.state, parts, total_P, combine)
        )

    def on_skip(self, region: str, epoch: int, seq: int) -> list[Reply]:
        """Answer an update that is too stale without taking it in.

        Returns:
            The answer; none yet if it is held back for a checkpoint.
        """
        skipped = Update(region, epoch, seq, 0, 0, torch.empty(0))
        if region not in self.state.members:
            raise InvariantError(f"update of '{region}', which is no member of this run")
        if (epoch, seq) <= self._last.get(region, (0, 0)):
            return self._repeat(skipped)
        request = self._request
        if request is not None and region in request.told:
            if not self._holds(region):
                request.held.append((skipped, True))
            return []
        self._last[region] = (epoch, seq)
        return self._release_finals() + self._publish(
            [additive.refresh(self.state, skipped, self.num_params)]
        )

    def last(self, region: str) -> tuple[int, int]:
        """Epoch and number of the newest update of ``region`` that was taken in or given up."""
        return self._last.get(region, (0, 0))

    @property
    def is_plain(self) -> bool:
        """Whether every update is answered by itself: no checkpoint is open, no final one waits."""
        return self._request is None and not self._finals

    def abandon_checkpoint(self) -> list[Reply]:
        """Give an open checkpoint up; what was held back for it goes on."""
        request, self._request = self._request, None
        return [] if request is None else self._release(request)

    def leave(self, region: str) -> list[Reply]:
        """Go on without a region; whoever waited for it alone is answered."""
        state = self.state
        over = len(self._finals) == len(state.members)  # the last exchange: all are answered
        state.members = tuple(name for name in state.members if name != region)
        for books in (self._finals, self._answers, state.waiting):
            books.pop(region, None)
        for memory in (state.memory, state.numbers):
            for name in [name for name in memory if name.endswith(f"/{region}")]:
                del memory[name]
        if self._request is not None:
            self._request.held = [h for h in self._request.held if h[0].region != region]
        replies = self.abandon_checkpoint()
        if over:
            return replies
        replies += self._release_waiting()
        if self._finals and state.waiting:
            return replies + self._release_finals()
        if self._finals and all(name in self._finals for name in state.members):
            finals = [self._finals[name] for name in state.members]
            return replies + [reply for final in finals for reply in self._answer(final)]
        if state.waiting and all(name in state.waiting for name in state.members):
            # It was the last one missing: whichever is handed in again completes the round.
            return replies + self._answer(state.waiting.pop(state.members[0]))
        return replies

    def request_stop(self) -> None:
        """Tell every region, with its next answer, to finish."""
        self.state.stopping = True

    def request_checkpoint(self, checkpoint: int, *, halt: bool) -> bool:
        """Begin a checkpoint.

        Args:
            checkpoint: its id.
            halt: the regions stand still after it.

        Returns:
            False if it cannot be: one is open, or the last exchange is over.
        """
        if self._request is not None or len(self._finals) == len(self.state.members):
            return False
        self._request = _Request(checkpoint, halt)
        return True

    def export(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """Tensors and plain values for a checkpoint."""
        tensors = {k: v.clone() for k, v in self.state.memory.items()}
        wire_tensors, wire = self.wire.export()
        tensors |= {_WIRE + k: v for k, v in wire_tensors.items()}
        return tensors, {
            "version": self.state.version,
            "numbers": dict(self.state.numbers),
            "samples": self.samples,
            "members": list(self.state.members),
            "last": {region: list(pair) for region, pair in self._last.items()},
            "wire": wire,
            "noise": self.noise.meter.export(),
        }

    def restore(self, tensors: Mapping[str, Tensor], control: Mapping[str, object]) -> None:
        """Become what `export` saved.

        Raises:
            ConfigDriftError: if it was saved with other codecs.
        """
        last, wire = control["last"], control.get("wire", {})
        numbers = control.get("numbers", {})
        if not (isinstance(last, dict) and isinstance(wire, dict) and isinstance(numbers, dict)):
            raise InvariantError("checkpoint without the averager's books")
        on_wire = {k: v for k, v in tensors.items() if k.startswith(_WIRE)}
        self.wire.restore({k.removeprefix(_WIRE): v for k, v in on_wire.items()}, wire)
        self.state.memory.clear()
        self.state.memory.update({k: v.clone() for k, v in tensors.items() if k not in on_wire})
        self.state.version = int(str(control["version"]))
        self.state.numbers.clear()
        self.state.numbers.update({str(k): float(v) for k, v in numbers.items()})
        self.samples = int(str(control.get("samples", 0)))
        self.noise.meter.restore(control.get("noise"))
        self._last = {str(r): (int(pair[0]), int(pair[1])) for r, pair in last.items()}

    # ------------------------------------------------------------------ inside

    def _opened(self, update: Update) -> Update:
        """The update as a vector that may be taken in."""
        update = self.wire.decode(update, self.num_params)
        what = f"update {update.seq} of region '{update.region}'"
        self._check_vector(update.payload_P, what, update.fragment)
        return update

    def _check_vector(self, vector_P: Tensor, what: str, fragment: int = 0) -> None:
        fragments = self.state.fragments
        if fragment >= len(fragments):
            raise InvariantError(f"{what} is about fragment {fragment} of {len(fragments)}")
        start, stop = fragments[fragment]
        if vector_P.shape != (stop - start,):
            raise InvariantError(
                f"{what} has {tuple(vector_P.shape)} parameters, not {stop - start} of the "
                f"model's {self.num_params}"
            )
        if not all_finite(vector_P):
            raise NonFiniteError(f"{what} is not finite; refused")

    def _repeat(self, update: Update) -> list[Reply]:
        newest = self._last[update.region] == (update.epoch, update.seq)
        answer = self._answers.get(update.region)
        return [answer] if answer is not None and newest else []

    def _answer(self, update: Update) -> list[Reply]:
        measured = self.noise.measured(self.strategy, self.state, update)
        answers = self.strategy.on_update(self.state, update)
        self.noise.take(self.state.version, measured, answers)
        replies = self._publish(answers)
        if update.final:  # the last words are all in, and answered together
            return replies
        if self._request is not None or self.state.stopping:
            replies += self._release_waiting()
        if self._finals and self.state.waiting:  # who has finished may be whom the others wait for
            replies += self._release_finals()
        return replies

    def _release_waiting(self) -> list[Reply]:
        """Nobody waits for others any more, if the strategy lets some wait."""
        on_release = self.strategy.traits.averager.on_release
        return [] if on_release is None else self._publish(on_release(self.state))

    def _publish(self, answers: list[Reply]) -> list[Reply]:
        replies = [self._mark(reply) for reply in self.wire.encode(answers)]
        for reply in replies:
            self._answers[reply.to] = reply
        request = self._request
        if request is not None and request.told.issuperset(self.state.members):
            self.snapshots.append(AveragerSnapshot(request.id, *self.export()))
            self._request = None
            replies += self._release(request)
        return replies

    def _release(self, request: _Request) -> list[Reply]:
        """What was held back goes on."""
        replies: list[Reply] = []
        for update, skip in request.held:
            if skip:
                replies += self.on_skip(update.region, update.epoch, update.seq)
            else:
                replies += self.on_update(update)
        return replies

    def _holds(self, region: str) -> bool:
        return self._request is not None and any(u.region == region for u, _ in self._request.held)

    def _mark(self, reply: Reply) -> Reply:
        request = self._request
        reply = replace(reply, stop=self.stopping, seen=self.samples)
        if request is None:
            return reply
        request.told.add(reply.to)
        return replace(reply, checkpoint=request.id, halt=request.halt)

    def _release_finals(self) -> list[Reply]:
        """Take final updates as ordinary ones, so that they are answered.

        During a checkpoint; and in an open round, where others came with what was a final one
        before a checkpoint took it for an ordinary one: they would wait for each other for ever.
        """
        if self._request is None and not self.state.waiting:
            return []
        finals, self._finals = list(self._finals.values()), {}
        return [r for final in finals for r in self._answer(replace(final, final=False))]
