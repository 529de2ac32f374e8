"""The exchanges of one rank of a region that trains in a loop of the user.

A pure state machine: the loop reports steps, and the machine returns messages for the averagers and
merges their answers. All ranks of a region make the same decisions, because they count the same
steps and get the same control fields. So steps need no communication between ranks.

The optimizer runs outside: strategies never see a gradient. Between exchanges nothing is copied,
because a strategy's access to `RegionState.params_P` reads the module.

Shape legend: S = parameters that this rank exchanges; Q = parameters of one slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor

from geo_ray.base.errors import (
    CheckpointMismatchError,
    InvariantError,
    LoopMisuseError,
)
from geo_ray.joining.layout import Ranges, gathered, put, taken, within
from geo_ray.strategies.base import Strategy
from geo_ray.strategies.state import Outgoing, RegionState, Wait
from geo_ray.training.effects import SendUpdate
from geo_ray.training.messages import Barrier, ReplyMessage, UpdateMessage, no_buffers
from geo_ray.training.payload_encoding import REFERENCE, RegionWire
from geo_ray.training.region_exchange import RegionExchange

STRATEGIES: Final = (
    *("sma", "ama", "asgd_ga", "diloco", "diloco_streaming", "diloco_eager", "one_step_delay"),
    *("decoupled", "async_local_sgd", "halos", "sparseloco", "hfa", "nbsync"),
)
"""Strategies that train locally, and so can leave the optimizer to the loop."""


def strategy_problems(strategy: Strategy) -> Iterator[str]:
    """Yield why a strategy does not fit loops, which keep gradients and optimizer."""
    if strategy.kind not in STRATEGIES:
        yield (
            f"strategy.kind: '{strategy.kind}' needs every gradient of a region or its inner "
            "optimizer, which a loop of your own or a group keeps: use one of "
            f"{', '.join(STRATEGIES)}"
        )


class ShareVector(Protocol):
    """Access to a rank's share of the module; see `geo_ray.joining.vector.ParameterVector`."""

    size: int

    def read(self) -> Tensor:
        """Return the present parameters, fp32 (S,)."""

    def write(self, params_S: Tensor) -> None:
        """Set the parameters."""

    def release(self) -> bool:
        """Free memory until the next `read`; return whether the last result is the caller's now."""

    def part(self, ranges: Ranges) -> Tensor:
        """Return present parameters as a new tensor, if `release` has returned true."""


class _State(RegionState):
    """A region's state whose parameters are read from the module when a strategy uses them.

    With ``in_pieces`` a change and its answer are never in memory as a whole. Both are then meta
    tensors, which have a size and no values: `change` computes those of the change when they are
    sent, and `merge_piece` has merged those of the answer before `adopt`. The loop waits meanwhile,
    so that neither the parameters nor ``start_P`` change.
    """

    __slots__ = ("_fresh", "_in_pieces", "_params_S", "_start_S", "vector")

    def __init__(
        self, vector: ShareVector, fragments: tuple[tuple[int, int], ...], *, in_pieces: bool
    ) -> None:
        self.vector = vector
        self._params_S: Tensor | None = None
        self._fresh = -1
        self._in_pieces, self._start_S = in_pieces, torch.empty(0)
        RegionState.__init__(self, torch.empty(0), _no_gradient, fragments=fragments)

    @property
    def params_P(self) -> Tensor:
        """The module's present parameters, fp32 (S,)."""
        if self._params_S is None:
            self._params_S = self.vector.read()
            self._fresh = self._params_S._version
        return self._params_S

    @params_P.setter
    def params_P(self, value: Tensor) -> None:
        if value.numel():
            raise InvariantError("strategies change parameters in place")

    def change_since(self, start_P: Tensor) -> Tensor:
        """See `RegionState`; where possible, in the memory that has the parameters."""
        if self._in_pieces:
            self.settle()
            if not self._released():
                _ = self.params_P
            self._start_S = start_P
            return torch.empty_like(start_P, device="meta")
        params_S = self.snapshot()
        return torch.sub(start_P, params_S, out=params_S)

    def change(self, ranges: Ranges) -> Tensor:
        """Return values of the change of which `change_since` has returned the size."""
        params_S = self._params_S
        part = self.vector.part(ranges) if params_S is None else taken(params_S, ranges).clone()
        return torch.sub(taken(self._start_S, ranges), part, out=part)

    def merge_piece(self, ranges: Ranges, values: Tensor) -> None:
        """Subtract values of an answer from those that the change was computed from."""
        at = 0
        for start, stop in ranges:
            self._start_S[start:stop].sub_(values[at : at + stop - start])
            at += stop - start

    def snapshot(self) -> Tensor:
        """See `RegionState`; the vector itself, unless it is kept."""
        self.settle()
        params_S = self.params_P
        return params_S if self._released() else params_S.clone()

    def adopt(self, outer_P: Tensor, change_P: Tensor) -> None:
        """See `RegionState`; the parameters are not read."""
        self.continue_from(outer_P if change_P.is_meta else outer_P.sub_(change_P))

    def continue_from(self, start_P: Tensor) -> None:
        """See `RegionState`; the parameters are not read, unless the vector must have them."""
        if self._released():
            self.vector.write(start_P)
        else:
            RegionState.continue_from(self, start_P)

    def stored(self, payload_P: Tensor) -> Tensor:
        """See `RegionState`; a rank's replies have their own memory."""
        return payload_P

    def _released(self) -> bool:
        """Release the vector; return whether its memory is the caller's now."""
        is_released = self.vector.release()
        if is_released:
            self._params_S = None
        return is_released

    def stepped(self) -> None:
        """Record that the module has changed."""
        self.vector.release()
        self._params_S = None

    def settle(self) -> None:
        """Write the parameters to the module, if a strategy has changed them."""
        params_S = self._params_S
        if params_S is not None and params_S._version != self._fresh:
            self.vector.write(params_S)
            self._fresh = params_S._version


def _no_gradient(grad_P: Tensor) -> None:
    raise InvariantError("a strategy of a joined region has applied a gradient")


class JoinedModel:
    """The strategy's operations on the parameters that a rank exchanges.

    Args:
        strategy: strategy of the run; see `check_strategy`.
        vector: the rank's share of the module.
        fragments: positions of the model's fragments in the share.
        in_pieces: whether changes and answers are never in memory as a whole, see
            `RankExchange.values` and `RankExchange.merge_piece`. The strategy must have the trait
            `RegionTraits.in_pieces`, and there must be no codec.
    """

    def __init__(
        self,
        strategy: Strategy,
        vector: ShareVector,
        fragments: tuple[tuple[int, int], ...],
        *,
        in_pieces: bool = False,
    ) -> None:
        self._strategy = strategy
        self.traits = strategy.traits
        self.in_pieces = in_pieces
        self.state = _State(vector, fragments, in_pieces=in_pieces)

    def start(self) -> None:
        """Read the initial parameters, before the first step changes them."""
        self.state.stepped()
        _ = self.state.params_P

    def step(self, samples: int) -> None:
        """Count a step that the loop has made."""
        state = self.state
        self._strategy.on_gradient(state, None)
        state.step += 1
        state.since_send += 1
        state.samples += samples
        state.stepped()

    def outgoing(self) -> Outgoing | Wait | None:
        """Return the message after a step, if one is due."""
        return self._sent(self._strategy.after_step(self.state))

    def finish(self) -> Outgoing | None:
        """Return the final update after the last step."""
        return self._sent(self._strategy.on_finish(self.state))  # type: ignore[return-value]

    def merge(self, reply: ReplyMessage) -> None:
        """Merge an answer whose payload is that of this rank."""
        self.state.link_busy = False
        self.state.budget = reply.steps
        self._strategy.on_reply(self.state, reply.content())
        self.state.settle()

    def _sent(self, out: Outgoing | Wait | None) -> Outgoing | Wait | None:
        if isinstance(out, Outgoing):
            self.state.link_busy = True
            self.state.since_send = 0
            self.state.samples = 0
        self.state.settle()
        return out


@dataclass(slots=True)
class SliceWire:
    """One slice of a rank: its place in the rank's vector, and its codecs.

    Attributes:
        index: number of the slice in the run.
        ranges: ranges of the model.
        places: where its elements are in the rank's vector (S,).
        wire: encodes its updates and decodes its answers.
        holder: number of the process that has its averager; 0: the server.
    """

    index: int
    ranges: Ranges
    places: Ranges
    wire: RegionWire
    holder: int = 0


@dataclass(frozen=True, slots=True)
class RankState:
    """State of a slice at a membership barrier, from which a joining region begins.

    Attributes:
        tensors: fp32 vectors (Q,) by name.
        control: plain values, equal for all slices but for the codecs' (``wire``).
    """

    tensors: Mapping[str, Tensor]
    control: Mapping[str, object]


_PARAMS: Final = "params"
_MEMORY: Final = "memory/"
_WIRE: Final = "wire/"
_BUFFERS: Final = "buffers/"


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return copies of the tensors whose names begin with a prefix, by the rest of the name."""
    return {k.removeprefix(prefix): v.clone() for k, v in tensors.items() if k.startswith(prefix)}


def states_of(
    saved: Sequence[tuple[Ranges, RankState]],
    slices: Sequence[Ranges],
    wires: Sequence[RegionWire],
) -> list[RankState]:
    """Return the states of a rank's slices from those of a checkpoint, whose slices may differ.

    What lossy codecs had not sent yet is kept for slices that are the same, and dropped for others.

    Args:
        saved: ranges and state of slices that contain everything in ``slices``; not empty.
        slices: ranges of each slice of the rank.
        wires: new encoders of the slices.

    Raises:
        CheckpointMismatchError: some elements are missing.
    """
    same, control = dict(saved), saved[0][1].control
    names = {name for _, state in saved for name in state.tensors if not name.startswith(_WIRE)}
    found = []
    for ranges, wire in zip(slices, wires, strict=True):
        if ranges in same:
            found.append(same[ranges])
            continue
        tensors = {
            name: gathered([(have, state.tensors[name]) for have, state in saved if have], ranges)
            for name in sorted(names)
        }
        found.append(RankState(tensors, {**control, "wire": wire.export()}))
    return found or [RankState({}, control)]


@dataclass(slots=True)
class RankExchange(RegionExchange):
    """One rank of a joined region.

    Attributes:
        model: the parameters that this rank exchanges.
        slices: its slices.
        local_steps: steps of the loop that count as one step of the strategy.
        eval_every: steps between evaluations; 0: only the last one.
    """

    model: JoinedModel
    slices: Sequence[SliceWire] = field(kw_only=True)
    local_steps: int = 1
    eval_every: int = 0
    is_donor: bool = False  # a joining region begins with a copy of this rank's state
    is_halted: bool = False
    _local: int = 0  # steps of the loop since the last step of the strategy
    _rows: int = 0
    _seconds: float = 0.0

    @property
    def _is_computing(self) -> bool:
        return False  # the loop asks between two steps

    @property
    def is_done(self) -> bool:
        """Whether the region has finished."""
        return self.phase == "done"

    @property
    def waits(self) -> bool:
        """Whether the loop must wait for an answer before it continues."""
        return self.phase in ("waiting", "must_send", "finishing")

    def halt(self) -> None:
        """End the training at a barrier; a resumed run continues there."""
        self.phase, self.is_halted = "done", True

    def advance(self) -> list[SendUpdate]:
        """Return what is due after answers were merged, or before the first step.

        A region that joins at the end of a run has something to send before its first step.
        """
        return self._advance([])

    def step(self, rows: int, seconds: float) -> list[SendUpdate]:
        """Handle a step of the loop.

        Args:
            rows: rows of this rank in the step.
            seconds: duration of the step.

        Returns:
            The update that is due, with the payload of this rank; see `encoded`.

        Raises:
            LoopMisuseError: the region has finished, or waits for an answer.
        """
        if self.is_done:
            raise LoopMisuseError(
                f"region '{self.plan.region}' called step after the run's last step"
            )
        if self.waits:
            raise LoopMisuseError("step was called while an answer is awaited")
        self._local += 1
        self._rows += rows
        self._seconds += seconds
        if self._local < self.local_steps:
            return []
        self.model.step(self._rows)
        self.version += 1
        self.requests.stepped(self._rows, self._seconds)
        self._local, self._rows, self._seconds = 0, 0, 0.0
        return self._advance(self._outgoing())

    def on_replies(self, replies: Sequence[ReplyMessage], took_s: float) -> None:
        """Merge the decoded answers of all slices to the open request; `advance` comes next.

        After a barrier, the state can be copied in between (`copies`).

        Args:
            replies: the answers, in the order of `slices`.
            took_s: seconds since the request.
        """
        whole = replies[0]
        is_first = ((0, whole.payload_P.numel()),)  # a rank without elements has no slice
        if len(replies) > 1 or (self.slices and self.slices[0].places != is_first):
            size = sum(reply.payload_P.numel() for reply in replies)
            payload_S = torch.empty(size, device="meta" if self.model.in_pieces else None)
            for each, reply in zip(self._fragment_places(whole.fragment), replies, strict=True):
                put(payload_S, each, reply.payload_P)
            whole = replace(whole, payload_P=payload_S)
        self._merge(whole, took_s)

    def _enter(self, barrier: Barrier) -> None:
        """See `RegionExchange._enter`; a donor's state must be copied before the next step."""
        RegionExchange._enter(self, barrier)
        self.is_donor = barrier.is_donor

    def copies(self, *, whole: bool = False) -> list[RankState]:
        """Return the state of each slice at a barrier, in the order of `slices`.

        A rank without a slice has one state without tensors.

        Args:
            whole: for a checkpoint of this rank; otherwise for a joining region, without what only
                this region has. The tensors are not copied: they must be used before `advance`.
        """
        self.is_donor = False
        state = self.model.state
        unsent = () if whole else self.model.traits.region.unsent
        vectors = {_MEMORY + k: v for k, v in state.memory.items() if k not in unsent}
        size = state.params_P.numel()
        if wrong := [name for name, vector_S in vectors.items() if vector_S.numel() != size]:
            raise InvariantError(f"the strategy's {wrong} do not have the size of the parameters")
        vectors[_PARAMS] = state.params_P
        control: dict[str, object] = {
            "version": self.version,
            "averager_version": self.averager_version,
            "numbers": dict(state.numbers),
            "counts": [state.step, state.since_send, state.samples, state.budget],
            "requests": self.requests.export(),
            "completion": self._completion.export(),
            "done": self.is_done,
        }
        found = []
        for each in self.slices:
            own = {name: taken(vector_S, each.places) for name, vector_S in vectors.items()}
            on_wire = each.wire.tensors()
            own |= {_WIRE + k: v for k, v in on_wire.items() if whole or k == REFERENCE}
            found.append(RankState(own, {**control, "wire": each.wire.export()}))
        return found or [RankState({}, control)]

    def restore(self, states: Sequence[RankState]) -> None:
        """Begin with the states of `copies`, in the order of `slices`."""
        state, first = self.model.state, states[0].control
        vectors: dict[str, Tensor] = {}
        for each, copied in zip(self.slices, states, strict=False):
            on_wire: dict[str, Tensor] = {}
            for name, values_Q in copied.tensors.items():
                if name.startswith(_WIRE):
                    on_wire[name.removeprefix(_WIRE)] = values_Q
                else:
                    vector_S = vectors.setdefault(name, torch.empty(state.vector.size))
                    put(vector_S, each.places, values_Q)
            each.wire.restore(on_wire, cast(Mapping[str, object], copied.control["wire"]))
        params_S = vectors.pop(_PARAMS, torch.empty(0))
        state.memory.update({k.removeprefix(_MEMORY): v for k, v in vectors.items()})
        numbers = cast(Mapping[str, float], first["numbers"])
        state.numbers.update({name: float(value) for name, value in numbers.items()})
        step, since_send, samples, budget = cast(list[int], first["counts"])
        state.step, state.since_send, state.samples = step, since_send, samples
        state.budget = budget
        self.version = int(str(first["version"]))
        self.averager_version = int(str(first["averager_version"]))
        self.requests.restore(cast(Mapping[str, object], first["requests"]), self.version)
        completion = cast(Mapping[str, object], first["completion"])
        done = bool(first.get("done", False))
        self._completion.restore(completion, self.version, done=done)
        if done and not self._completion.has_more(self.version):
            self.phase = "done"  # the run has no other goal than before
        state.vector.write(params_S)
        self.model.start()

    def export(self) -> RankState:
        """Return a copy of the state between any two steps; tensors of any size.

        In contrast to `copies`, it includes a round that has begun, and can only be restored with
        the same slices.
        """
        state, requests = self.model.state, self.requests
        tensors = {_MEMORY + name: vector.clone() for name, vector in state.memory.items()}
        tensors[_PARAMS] = state.params_P.clone()
        state.stepped()  # frees the vector that was read
        if self.model_buffers is not None:
            tensors |= {_BUFFERS + k: v.clone() for k, v in self.model_buffers.tensors().items()}
        for number, each in enumerate(self.slices):
            tensors |= {f"{_WIRE}{number}/{k}": v for k, v in each.wire.tensors().items()}
        control: dict[str, object] = {
            "version": self.version,
            "averager_version": self.averager_version,
            "open": requests.seq if requests.is_open else None,
            "phase": self.phase,
            "numbers": dict(state.numbers),
            "counts": [state.step, state.since_send, state.samples, state.budget],
            "requests": requests.export(),
            "completion": self._completion.export(),
            "local": [self._local, self._rows, self._seconds],
            "slices": [[list(pair) for pair in each.ranges] for each in self.slices],
            "wires": [each.wire.export() for each in self.slices],
        }
        return RankState(tensors, control)

    def restore_export(self, saved: RankState) -> None:
        """Restore a result of `export` of the present round.

        Raises:
            CheckpointMismatchError: it is of another round, or of other slices. The state is then
                unchanged.
        """
        control: Any = saved.control
        state, requests = self.model.state, self.requests
        self._check_same_round(control)
        slices = [[list(pair) for pair in each.ranges] for each in self.slices]
        if control["slices"] != slices:
            raise CheckpointMismatchError(
                "the state of `sync` was saved with another number of ranks or another sharding",
                fix="Load it with those, or without `sync`: the loop then continues with the state "
                "that it has.",
            )
        for number, (each, wire) in enumerate(zip(self.slices, control["wires"], strict=True)):
            each.wire.restore(_below(saved.tensors, f"{_WIRE}{number}/"), wire)
        state.memory.clear()
        state.memory.update(_below(saved.tensors, _MEMORY))
        state.numbers.clear()
        state.numbers.update({name: float(value) for name, value in control["numbers"].items()})
        state.step, state.since_send, state.samples, state.budget = control["counts"]
        self.version, self.phase = int(control["version"]), control["phase"]
        seq, view = requests.seq, requests.view  # of the present connection
        requests.restore(control["requests"], self.version)
        requests.seq, requests.view = seq, max(view, requests.view)
        self._completion.restore(control["completion"], self.version, done=False)
        self._local, self._rows, self._seconds = control["local"]
        if self.model_buffers is not None:
            self.model_buffers.restore(_below(saved.tensors, _BUFFERS))
        state.vector.write(saved.tensors[_PARAMS])
        state.stepped()

    def _check_same_round(self, control: Mapping[str, object]) -> None:
        """Refuse a state of another round.

        Raises:
            CheckpointMismatchError: it is one.
        """
        mine = self.requests.seq if self.requests.is_open else None
        saved, version = control["averager_version"], self.averager_version
        if saved == version and control["open"] == mine:
            return
        what = f"of round {saved}, but the run is at round {version} for this region"
        if saved == version:
            what = "saved during another exchange than the one that is in flight now"
        raise CheckpointMismatchError(
            f"the state of `sync` is {what}",
            fix="Load a state that was saved since the region's last exchange, or load without "
            "`sync`: the loop then continues with the state that it has.",
        )

    def encoded(self, update: UpdateMessage) -> list[UpdateMessage]:
        """Return the encoded message of each slice, in the order of `slices`.

        The first one has the model buffers.
        """
        found: list[UpdateMessage] = []
        for each, places in zip(self.slices, self._fragment_places(update.fragment), strict=True):
            part = replace(update, payload_P=taken(update.payload_P, places))
            found.append(each.wire.encode(replace(part, buffers_E=no_buffers()) if found else part))
        return found

    def values(self, each: SliceWire, payload: Tensor, start: int, stop: int) -> Tensor:
        """Return elements ``start`` to ``stop`` of a slice's payload, as `encoded` has returned it.

        Until the update is answered, they may be computed in another thread.
        """
        if not payload.is_meta:
            return payload[start:stop]
        return self.model.state.change(within(each.places, start, stop))

    def merge_piece(self, each: SliceWire, start: int, values: Tensor) -> None:
        """Merge elements of the answer about a slice, from ``start`` on.

        The answer itself is passed to `on_replies` after all of them, as a meta tensor.
        """
        places = within(each.places, start, start + values.numel())
        self.model.state.merge_piece(places, values)

    def forget_sent(self) -> None:
        """Free the open update's payload, which the transport has now, if it is never sent again.

        An update may only be dropped, and sent again later, if the strategy has no rounds.
        """
        request = self.requests.request
        if request is not None and self.model.traits.in_rounds:
            update = replace(request.update, payload_P=torch.empty(0))
            self.requests.request = replace(request, update=update)
            for each in self.slices:
                each.wire.forget_sent()

    def _fragment_places(self, fragment: int) -> list[Ranges]:
        """Return where each slice's elements are in the payload of a fragment."""
        start, stop = self.model.state.fragments[fragment]
        found = []
        for each in self.slices:
            inside = ((max(a, start), min(b, stop)) for a, b in each.places)
            found.append(tuple((a - start, b - start) for a, b in inside if a < b))
        return found

    def _advance(self, sent: list[SendUpdate]) -> list[SendUpdate]:
        while (more := self._next_request()) is not None:
            sent += more
        return sent
