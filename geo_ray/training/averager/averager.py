"""The averager: takes in every region's updates, exactly once, and answers them.

A pure state machine around a strategy's `on_update`. It adds what no strategy should care about:

- exactly once: an update that was already taken in gets its old answer again;
- refusal of what is not finite or has the wrong size;
- stopping all regions at the same exchange, also when they have seen enough rows together;
- checkpoints as consistent cuts that hold nobody up: the averager copies its state when one begins,
  with the open round and the newest answers in it, and marks every region's next answer with the
  id. A region copies its state before it merges a marked answer, or earlier if it is told of the
  checkpoint by other ways. What was on its way between the two cuts needs no record: a region
  that resumes repeats its open request, and the averager has it, or has answered it, or takes it
  in;
- codecs: a strategy sees vectors only; what is coded is decoded after the check for repetitions
  and before anything else, and an answer that is given again is the same to the byte;
- what models carry beside their parameters goes past strategy and codec (`AveragerCarry`);
- the end: final updates are held until every region's is in. A region that was to finish, and has
  more to do after a resume, repeats its final update as an ordinary one;
- an end with a reason: what is raised while the state changes leaves it torn. It becomes `failure`,
  and whatever is asked from then on raises that.

Source of the cut: Chandy and Lamport, "Distributed Snapshots" (1985); reconstructed.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import torch
from torch import Tensor

from geo_ray.codecs.common.feedback import all_finite
from geo_ray.errors import AveragerFailedError, GeoRayError, InvariantError, NonFiniteError
from geo_ray.strategies.base import AveragerState, Reply, Strategy, Update
from geo_ray.strategies.common import additive
from geo_ray.training.averager.averager_carry import PREFIX as _CARRIED
from geo_ray.training.averager.averager_carry import AveragerCarry
from geo_ray.training.averager.averager_noise import AveragerNoise
from geo_ray.training.compute.flat import fragment_cuts
from geo_ray.training.exchange.averager_wire import AveragerWire
from geo_ray.training.exchange.saved import load_messages, save_messages
from geo_ray.training.lazy_copy import LazyCopy, Unread
from geo_ray.util.blame import summary

log = logging.getLogger(__name__)

_WIRE: Final = "wire/"
_OPEN: Final = "open/"  # messages that were open, or answered, at the cut


@dataclass(slots=True)
class _CutMark:
    """The newest checkpoint, and which regions had an answer that is marked with it."""

    id: int
    halt: bool
    told: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class AveragerSnapshot:
    """The averager's part of a checkpoint, as it was when that began."""

    id: int
    copies: dict[str, LazyCopy]
    control: dict[str, object]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The copies as tensors, for who does not write them."""
        return {name: copy.whole() for name, copy in self.copies.items()}


@dataclass(slots=True)
class Averager:
    """See the module's docstring.

    Attributes:
        strategy: how to combine.
        num_params: P, the size that every payload must have.
        state: the strategy's state.
        snapshots: finished parts of checkpoints, for the shell to take and write.
        wire: decodes updates and encodes replies.
        goal: what the run is to do, in words; at a resume with another goal it goes on, although it
            was told to finish.
        enough: rows of all regions together after which they are told to finish; None: no limit.
        samples: rows behind all updates so far.
        noise: what the regions' gradients say about each other.
        failure: what ended it; None while it works.
        carry: what their models carry.
    """

    strategy: Strategy
    num_params: int
    state: AveragerState
    snapshots: list[AveragerSnapshot] = field(default_factory=list)
    wire: AveragerWire = field(default_factory=AveragerWire)
    enough: int | None = None
    goal: str = ""
    samples: int = 0
    noise: AveragerNoise = field(default_factory=AveragerNoise)
    carry: AveragerCarry = field(default_factory=AveragerCarry)
    failure: GeoRayError | None = None
    _last: dict[str, tuple[int, int]] = field(default_factory=dict)
    _answers: dict[str, Reply] = field(default_factory=dict)
    _finals: dict[str, Update] = field(default_factory=dict)
    _mark: _CutMark | None = None
    _unsettled: set[str] = field(default_factory=set)
    _ahead_s: float = 0.0  # of the averager's clock before that of its host
    _saved_s: float | None = None  # the averager's clock at the cut that it was restored from
    _unread: Unread = field(default_factory=Unread)  # of the newest checkpoint

    def __post_init__(self) -> None:
        fragments = self.strategy.traits.exchange.fragments
        self.state.fragments = tuple(fragment_cuts(self.num_params, fragments))

    @property
    def stopping(self) -> bool:
        """Whether regions are told to finish."""
        return self.state.stopping

    def at(self, host_s: float) -> None:
        """The present event is at ``host_s`` of its host's clock.

        The averager's own clock goes on, after a resume, from where the checkpoint was taken.
        """
        if self._saved_s is not None:
            self._ahead_s, self._saved_s = self._saved_s - host_s, None
        self.state.now_s = host_s + self._ahead_s

    @property
    def wakes_s(self) -> float | None:
        """When the strategy wants to be woken, by the host's clock; None: not at all."""
        wake_s = self.state.wake_s
        return None if wake_s is None else wake_s - self._ahead_s

    def on_wake(self) -> list[Reply]:
        """The time that the strategy asked for (`AveragerState.wake_s`) has come."""
        self._unread.secure()
        with self._changing():
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
            NonFiniteError: if the payload has NaN or infinity. After any of these the state is
                unchanged.
            GeoRayError: the averager has failed, see `failure`.
        """
        self._check_works()
        if update.region not in self.state.members:
            raise InvariantError(f"update of '{update.region}', which is no member of this run")
        self._unread.secure()
        if (update.epoch, update.seq) <= self._last.get(update.region, (0, 0)):
            return self._repeat(update)
        with self._changing(may_refuse=True):
            self.carry.check(update)
            update = self._opened(update)
        with self._changing():
            return self._take_in(update)

    def _take_in(self, update: Update) -> list[Reply]:
        self.carry.take(update)
        self._last[update.region] = (update.epoch, update.seq)
        self._answers.pop(update.region, None)
        self._count(update)
        if not update.final:
            return self._release_finals() + self._answer(update)
        self._finals[update.region] = update
        if self.state.waiting:
            return self._release_finals()
        if any(region not in self._finals for region in self.state.members):
            return []
        return self._finish()

    def on_sum(self, parts: Sequence[Update], total_P: Tensor) -> list[Reply] | None:
        """Take in the sum of several updates, of which only the headers are known.

        Returns:
            Answers; None if it cannot be taken in as a whole, then nothing has changed: the parts
            must come by themselves.

        Raises:
            InvariantError: if it has the wrong size or the strategy has no use for sums.
            NonFiniteError: if it has NaN or infinity; the state is unchanged.
        """
        self._check_works()
        combine = self.strategy.traits.averager.adds_up
        if combine is None:
            raise InvariantError(f"strategy {self.strategy} cannot take in a sum of updates")
        for part in parts:
            known = (part.epoch, part.seq) <= self._last.get(part.region, (0, 0))
            stranger = part.region not in self.state.members
            if known or stranger or part.final:
                return None
        self._check_vector(total_P, f"a sum of {[part.region for part in parts]}")
        self._unread.secure()
        with self._changing():
            for part in parts:
                self._last[part.region] = (part.epoch, part.seq)
                self._count(part)
            return self._release_finals() + self._publish(
                additive.relay_sum(self.state, parts, total_P, combine)
            )

    def on_skip(self, region: str, epoch: int, seq: int) -> list[Reply]:
        """Answer an update that is too stale without taking it in."""
        self._check_works()
        skipped = Update(region, epoch, seq, 0, 0, torch.empty(0))
        if region not in self.state.members:
            raise InvariantError(f"update of '{region}', which is no member of this run")
        if (epoch, seq) <= self._last.get(region, (0, 0)):
            return self._repeat(skipped)
        self._unread.secure()
        with self._changing():
            self._last[region] = (epoch, seq)
            return self._release_finals() + self._publish(
                [additive.refresh(self.state, skipped, self.num_params)]
            )

    def last(self, region: str) -> tuple[int, int]:
        """Epoch and number of the newest update of ``region`` that was taken in or given up."""
        return self._last.get(region, (0, 0))

    @property
    def unanswered(self) -> dict[str, int]:
        """The numbers of the updates that were taken in and not answered yet, by region."""
        answered = {region: reply.seq for region, reply in self._answers.items()}
        return {
            region: seq
            for region, (_, seq) in self._last.items()
            if region in self.state.members and answered.get(region) != seq
        }

    @property
    def is_plain(self) -> bool:
        """Whether every update is answered by itself: no final one waits for others."""
        return not self._finals

    def leave(self, region: str) -> list[Reply]:
        """Go on without a region; whoever waited for it alone is answered."""
        self._unread.secure()
        with self._changing():
            return self._leave(region)

    def _leave(self, region: str) -> list[Reply]:
        state = self.state
        state.members = tuple(name for name in state.members if name != region)
        for books in (self._finals, self._answers, state.waiting):
            books.pop(region, None)
        self._unsettled.discard(region)
        self.carry.leave(region)
        for memory in (state.memory, state.numbers):
            for name in [name for name in memory if name.endswith(f"/{region}")]:
                del memory[name]
        replies = self._release_waiting()
        if self._finals and state.waiting:
            return replies + self._release_finals()
        if self._finals and all(name in self._finals for name in state.members):
            return replies + self._finish()
        if state.waiting and all(name in state.waiting for name in state.members):
            # It was the last one missing: whichever is handed in again completes the round.
            return replies + self._answer(state.waiting.pop(state.members[0]))
        return replies

    def request_stop(self) -> None:
        """Tell every region, with its next answer, to finish."""
        self.state.stopping = True

    def begin_checkpoint(self, checkpoint: int, *, halt: bool) -> bool:
        """Copy the present state for a checkpoint, and mark the next answer to every region.

        Args:
            checkpoint: its id, larger than those before.
            halt: the regions stand still once they have copied theirs.

        Returns:
            False if it cannot be: a region may hold answers of an averager that is lost, of which
            this one does not know yet, or this one has failed.
        """
        if self._unsettled or self.failure is not None:
            return False
        changing, fixed, control = self._live()
        copies = self._unread.copy(changing, fixed)
        self.snapshots.append(AveragerSnapshot(checkpoint, copies, control))
        self._mark = _CutMark(checkpoint, halt)
        return True

    def took_over(self) -> None:
        """This averager goes on for one that is lost, and may have answered more than is known."""
        self._mark = None
        self._unsettled = set(self.state.members)

    def settle(self, region: str) -> None:
        """A region holds no answers of an averager that is lost but those that are known here."""
        self._unsettled.discard(region)

    def export(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """Copies of tensors, and plain values, for a checkpoint."""
        changing, fixed, control = self._live()
        return fixed | {name: value.clone() for name, value in changing.items()}, control

    def _live(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, object]]:
        """Tensors that will change, tensors that will not, and plain values.

        Open requests lie in their senders' buffers until they are answered. Answers are as they
        were sent, and never change.
        """
        state = self.state
        changing = dict(state.memory)
        wire_tensors, wire = self.wire.export()
        carried, carried_rows = self.carry.export()
        fixed = {_WIRE + k: v for k, v in wire_tensors.items()} | carried
        exchanges: dict[str, object] = {}
        for name, messages in (("waiting", state.waiting), ("finals", self._finals)):
            found, exchanges[name] = save_messages(_OPEN + name, list(messages.values()))
            changing |= found
        found, exchanges["answers"] = save_messages(_OPEN + "answers", list(self._answers.values()))
        control: dict[str, object] = {
            "version": state.version,
            "numbers": dict(state.numbers),
            "samples": self.samples,
            "members": list(state.members),
            "last": {region: list(pair) for region, pair in self._last.items()},
            "wire": wire,
            "noise": self.noise.meter.export(),
            "exchanges": exchanges,
            "stops": self.goal if state.stopping else None,
            "now_s": state.now_s,
            "wake_s": state.wake_s,
        }
        control |= {"carried_rows": carried_rows} if carried else {}
        return changing, fixed | found, control

    def restore(self, tensors: Mapping[str, Tensor], control: Mapping[str, object]) -> None:
        """Become what `export` saved.

        Raises:
            ConfigDriftError: if it was saved with other codecs.
            CheckpointCorruptError: if open requests or answers cannot be read.
        """
        last, wire = control["last"], control.get("wire", {})
        numbers, exchanges = control.get("numbers", {}), control.get("exchanges", {})
        books = (last, wire, numbers, exchanges)
        if not all(isinstance(book, Mapping) for book in books):
            raise InvariantError("checkpoint without the averager's books")
        last, wire, numbers, exchanges = (dict(cast(Mapping[str, Any], book)) for book in books)
        apart = {k: v for k, v in tensors.items() if k.startswith((_WIRE, _OPEN, _CARRIED))}
        on_wire = {k.removeprefix(_WIRE): v for k, v in apart.items() if k.startswith(_WIRE)}
        self.wire.restore(on_wire, wire)
        self.carry.restore(apart, control.get("carried_rows"))
        state = self.state
        state.memory.clear()
        state.memory.update({k: v.clone() for k, v in tensors.items() if k not in apart})
        state.version = int(str(control["version"]))
        state.numbers.clear()
        state.numbers.update({str(k): float(v) for k, v in numbers.items()})
        state.waiting.clear()
        waiting = load_messages(Update, apart, exchanges.get("waiting"))
        state.waiting.update({update.region: update for update in waiting})
        finals = load_messages(Update, apart, exchanges.get("finals"))
        self._finals = {update.region: update for update in finals}
        self.samples = int(str(control.get("samples", 0)))
        self.noise.meter.restore(control.get("noise"))
        self._last = {str(r): (int(pair[0]), int(pair[1])) for r, pair in last.items()}
        now_s, wake_s = control.get("now_s"), control.get("wake_s")
        self._saved_s = None if now_s is None else float(str(now_s))
        state.wake_s = None if wake_s is None else float(str(wake_s))
        state.stopping = control.get("stops") == self.goal
        # What answers asked of regions is over, but for the end, if that is still meant.
        self._answers.clear()
        for reply in load_messages(Reply, apart, exchanges.get("answers")):
            stop = reply.stop and state.stopping
            self._answers[reply.to] = replace(reply, stop=stop, checkpoint=None, halt=False)

    # ------------------------------------------------------------------ inside

    def _check_works(self) -> None:
        if self.failure is not None:
            raise self.failure

    @contextmanager
    def _changing(self, *, may_refuse: bool = False) -> Iterator[None]:
        """The state may change in here: whatever is raised ends the averager, but refusals."""
        self._check_works()
        try:
            yield
        except Exception as error:
            if may_refuse and isinstance(error, GeoRayError):
                raise
            log.exception("the averager failed")
            self.failure = _failure_of(self.strategy, error)
            raise self.failure from error

    def _count(self, update: Update) -> None:
        self.samples += update.num_samples
        if self.enough is not None and self.samples >= self.enough:
            self.request_stop()

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
        answer, final = self._answers.get(update.region), self._finals.get(update.region)
        if newest and final is not None and not update.final:
            with self._changing():
                del self._finals[update.region]  # after a resume its region has more to do
                return self._answer(replace(final, final=False))
        return [answer] if answer is not None and newest else []

    def _finish(self) -> list[Reply]:
        """Every region's final update is in: the last exchange."""
        finals, self._finals = self._finals, {}
        return [reply for name in self.state.members for reply in self._answer(finals[name])]

    def _answer(self, update: Update) -> list[Reply]:
        measured = self.noise.measured(self.strategy, self.state, update)
        answers = self.strategy.on_update(self.state, update)
        self.noise.take(self.state.version, measured, answers)
        replies = self._publish(answers)
        if update.final:  # the last words are all in, and answered together
            return replies
        if self.state.stopping:
            replies += self._release_waiting()
        if self._finals and self.state.waiting:  # who has finished may be whom the others wait for
            replies += self._release_finals()
        return replies

    def _release_waiting(self) -> list[Reply]:
        """Nobody waits for others any more, if the strategy lets some wait."""
        on_release = self.strategy.traits.averager.on_release
        return [] if on_release is None else self._publish(on_release(self.state))

    def _publish(self, answers: list[Reply]) -> list[Reply]:
        replies = [self._marked(reply) for reply in self.carry.beside(self.wire.encode(answers))]
        for reply in replies:
            self._answers[reply.to] = reply
        return replies

    def _marked(self, reply: Reply) -> Reply:
        mark = self._mark
        reply = replace(reply, stop=self.stopping, seen=self.samples)
        if mark is None or reply.to in mark.told:
            return reply
        mark.told.add(reply.to)
        return replace(reply, checkpoint=mark.id, halt=mark.halt)

    def _release_finals(self) -> list[Reply]:
        """Take final updates as ordinary ones, so that they are answered.

        In an open round, where others wait for whoever has finished: they would wait for each other
        for ever.
        """
        if not self.state.waiting:
            return []
        finals, self._finals = list(self._finals.values()), {}
        return [r for final in finals for r in self._answer(replace(final, final=False))]


def _failure_of(strategy: Strategy, error: Exception) -> GeoRayError:
    """The typed error of whatever a strategy, or what lies around it, has raised."""
    if isinstance(error, GeoRayError):
        return error
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return AveragerFailedError(
        f"strategy '{strategy.kind}' failed in the averager: {summary(error)} "
        f"({frame.filename}:{frame.lineno})"
    )
