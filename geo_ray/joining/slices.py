"""The averagers of the slices that one process holds, and the orders that they execute.

The averagers of a run may be in several processes (*holders*), each with one range of the model. An
update is taken in by all of them or by none: holders check and keep the parts that ranks send
(`SliceAveragers.stage`), and take them in when the service orders it. All holders execute the same
orders in the same order, so that all averagers agree on everything but the values of parameters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Final, Literal, TypeAlias

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor

from geo_ray.base.errors import (
    CheckpointMismatchError,
    ConfigChangedError,
    FrameError,
    GeoRayError,
    InvariantError,
    NonFiniteError,
)
from geo_ray.base.model import StrictModel
from geo_ray.codecs.feedback import all_finite
from geo_ray.joining.layout import (
    Layout,
    Ranges,
    Slice,
    common,
    gathered,
    holder_ranges,
    holder_starts,
    put,
    slices_of,
    within,
)
from geo_ray.joining.pieces import ArrivingPart
from geo_ray.joining.protocol import (
    JoinTerms,
    Outbound,
    payload_of,
    rank_name,
    read_copy,
    region_of,
)
from geo_ray.joining.rank import RankState
from geo_ray.strategies.base import Strategy
from geo_ray.training.averager import AVERAGER_WIRE, OPEN, Averager, interval_of, set_interval
from geo_ray.training.checkpoint_parts import AveragerSnapshot
from geo_ray.training.membership import MemberChange, View
from geo_ray.training.messages import ReplyMessage, UpdateMessage, no_buffers
from geo_ray.training.parameters import fragment_bounds
from geo_ray.training.wire_format import as_tensor
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.message import Message

_OF_FRAGMENT: Final = re.compile(r"outer(\d+)/")  # state of the outer optimizer of a fragment


@dataclass(frozen=True, slots=True)
class SavedSlice:
    """The averager's state of one slice in a checkpoint.

    Attributes:
        ranges: ranges of the slice.
        tensors: tensors by name.
        control: plain values.
    """

    ranges: Ranges
    tensors: Mapping[str, Tensor]
    control: Mapping[str, object]

    def is_within(self, start: int, stop: int) -> bool:
        """Return whether it has elements of a range."""
        return any(a < stop and b > start for a, b in self.ranges)


@dataclass(frozen=True, slots=True)
class SavedRun:
    """The server's part of a checkpoint.

    Attributes:
        id: of the checkpoint.
        layout: the model.
        slices: state of the averagers.
        steps: steps of each region.
        strategy: the strategy, as plain values.
    """

    id: int
    layout: Layout
    slices: tuple[SavedSlice, ...]
    steps: Mapping[str, int]
    strategy: Mapping[str, object]

    def check_strategy(self, strategy: Strategy) -> None:
        """Refuse another strategy than that of the checkpoint, or other options of it.

        Raises:
            ConfigChangedError: names the difference.
        """
        now = strategy.model_dump(mode="json")
        keys = [key for key in {**self.strategy, **now} if self.strategy.get(key) != now.get(key)]
        if not keys:
            return
        key = "kind" if "kind" in keys else keys[0]
        raise ConfigChangedError(
            f"strategy.{key} is {now.get(key)}, but that of checkpoint {self.id} is "
            f"{self.strategy.get(key)}",
            fix="Resume with the strategy of the checkpoint, or start a new run.",
        )


Answers: TypeAlias = dict[int, list[ReplyMessage]]
"""Answers of averagers by the number of the slice; all of them answer the same regions."""

Shares: TypeAlias = dict[str, list[Ranges]]
"""Ranges that each rank exchanges, by region."""


class BeginOrder(StrictModel):
    """Begin a run: each slice gets an averager."""

    kind: Literal["begin"] = "begin"
    layout: str
    shares: Shares
    attempts: dict[str, int]


class ResumeOrder(StrictModel):
    """Continue from a checkpoint, at its barrier.

    Attributes:
        members: regions at the checkpoint's barrier.
        loading: those that load their files of it; one at least.
        copying: regions that begin with a copy of the donor's state.
    """

    kind: Literal["resume"] = "resume"
    layout: str
    shares: Shares
    attempts: dict[str, int]
    members: tuple[str, ...]
    loading: tuple[str, ...]
    copying: tuple[str, ...]

    @property
    def donor(self) -> str:
        """The region that others copy."""
        return self.loading[0]

    @property
    def gone(self) -> tuple[str, ...]:
        """Members that do not load the checkpoint."""
        return tuple(sorted(set(self.members) - set(self.loading)))


class TakeOrder(StrictModel):
    """Take in the update of a region, of which all parts are staged.

    Attributes:
        seq: number of the update.
        rows: rows of all ranks.
        step_s: longest duration of a rank's steps.
        exchange_s: longest duration of a rank's last exchange.
    """

    kind: Literal["take"] = "take"
    region: str
    attempt: int
    seq: int
    rows: int
    step_s: float
    exchange_s: float
    now_s: float


class WakeOrder(StrictModel):
    """Let the averagers answer: the time has come that the strategy asked for."""

    kind: Literal["wake"] = "wake"
    now_s: float


class LeaveOrder(StrictModel):
    """Continue without a region."""

    kind: Literal["leave"] = "leave"
    region: str
    now_s: float


class ChangeOrder(StrictModel):
    """Change the members at the next barrier."""

    kind: Literal["change"] = "change"
    joins: tuple[str, ...] = ()
    now_s: float


class CopyOrder(StrictModel):
    """Pass the state of a region on to those that joined at this barrier.

    Attributes:
        donor: the region that sends its state.
        attempts: attempts of the regions that begin with it.
    """

    kind: Literal["copy"] = "copy"
    donor: str
    attempts: dict[str, int]


class FinishOrder(StrictModel):
    """Ask every region to finish with its next answer."""

    kind: Literal["finish"] = "finish"


class IntervalOrder(StrictModel):
    """Ask regions for their next exchange after so many steps, from their next answers on."""

    kind: Literal["interval"] = "interval"
    steps: int = Field(ge=1)


class DivideOrder(StrictModel):
    """Continue with other slices, at a barrier at which no update is under way."""

    kind: Literal["divide"] = "divide"
    shares: Shares
    now_s: float


class CollectOrder(StrictModel):
    """Expect the parameters of a region.

    Attributes:
        source: the region.
        shares: whether the other regions begin with them; otherwise they are the final ones.
    """

    kind: Literal["collect"] = "collect"
    source: str
    shares: bool


class SnapshotOrder(StrictModel):
    """Copy the state for a checkpoint, at its barrier."""

    kind: Literal["snapshot"] = "snapshot"
    checkpoint: int


class ForgetOrder(StrictModel):
    """Drop the newest copy of the state."""

    kind: Literal["forget"] = "forget"


Order: TypeAlias = (
    BeginOrder
    | ResumeOrder
    | TakeOrder
    | WakeOrder
    | LeaveOrder
    | ChangeOrder
    | CopyOrder
    | FinishOrder
    | IntervalOrder
    | DivideOrder
    | CollectOrder
    | SnapshotOrder
    | ForgetOrder
)
_ORDERS: Final[TypeAdapter[Order]] = TypeAdapter(Annotated[Order, Field(discriminator="kind")])


def order_json(order: Order) -> bytes:
    """Return an order as JSON."""
    return order.model_dump_json().encode()


def read_order(data: bytes) -> Order:
    """Read the result of `order_json`.

    Raises:
        FrameError: it is none.
    """
    try:
        return _ORDERS.validate_json(data)
    except ValueError as error:
        raise FrameError(f"an order cannot be read: {error}") from None


@dataclass(frozen=True, slots=True)
class Relayed:
    """A part of a region's state that is passed on.

    Attributes:
        index: number of the slice.
        size_bytes: its size.
        state: the part.
        messages: messages to the ranks that begin with it.
    """

    index: int
    size_bytes: int
    state: RankState
    messages: list[Outbound]


class SliceAveragers:
    """See the module. There are no averagers before `BeginOrder` or `ResumeOrder`.

    Attributes:
        slices: all slices of the run.
        averagers: averagers of those that this process holds, by number.
        attempts: attempt of each region that takes part.
        model_H: final parameters of the range that this process holds, fp32 (H,); empty before the
            end of the run.
        start: first position of that range.

    Args:
        terms: the run.
        holder: number of this process.
        saved: slices of a checkpoint for `ResumeOrder`, with everything in this process's range.
    """

    def __init__(self, terms: JoinTerms, holder: int = 0, saved: Sequence[SavedSlice] = ()) -> None:
        self._terms, self._holder, self._saved_slices = terms, holder, saved
        self.slices: tuple[Slice, ...] = ()
        self.averagers: dict[int, Averager] = {}
        self.attempts: dict[str, int] = {}
        self.model_H, self.start, self._stop = torch.empty(0), 0, 0
        self._layout = Layout(())
        self._starts: tuple[int, ...] = (0,)
        self._staged: dict[tuple[str, int], UpdateMessage] = {}  # by region and slice
        self._taken_s: dict[str, float] = {}  # time of the newest update of each region
        self._arriving: dict[tuple[str, int], ArrivingPart] = {}  # by rank and slice
        self._collect: CollectOrder | None = None
        self._values: dict[int, int] = {}  # parameters of each slice that have arrived
        self._copy = CopyOrder(donor="", attempts={})
        self._snapshots: list[tuple[Slice, AveragerSnapshot]] = []  # of the newest checkpoint

    # ------------------------------------------------------------------ state

    @property
    def _first(self) -> Averager:
        return next(iter(self.averagers.values()))

    @property
    def version(self) -> int:
        """Commits so far."""
        return self._first.state.version if self.averagers else 0

    @property
    def view(self) -> View:
        """The membership view."""
        return self._first.view

    @property
    def wakes_s(self) -> float | None:
        """Time at which the strategy asks for `on_wake`; None: it does not."""
        return self._first.wakes_s if self.averagers else None

    @property
    def is_changing(self) -> bool:
        """Whether a membership change is pending, or a joining region is not active yet."""
        return any(each.is_changing for each in self.averagers.values())

    @property
    def stopping(self) -> bool:
        """Whether regions are asked to finish."""
        return any(each.stopping for each in self.averagers.values())

    @property
    def failure(self) -> GeoRayError | None:
        """The error after which no averager continues; None: there is none."""
        found = (each.failure for each in self.averagers.values())
        return next((error for error in found if error is not None), None)

    @property
    def interval(self) -> int | None:
        """Steps between exchanges that regions were asked for; None: as configured."""
        return interval_of(self._first.state) if self.averagers else None

    @property
    def waiting(self) -> tuple[str, ...]:
        """The regions whose updates wait for those of the others."""
        return tuple(self._first.state.waiting) if self.averagers else ()

    def owned(self, region: str, rank: int) -> dict[int, Ranges]:
        """Return the ranges of the slices that a rank exchanges, by number."""
        return {i: e.ranges for i, e in enumerate(self.slices) if e.owners[region] == rank}

    # ------------------------------------------------------------------ orders

    def execute(self, order: Order) -> Answers:
        """Execute an order in all averagers of this process.

        Raises:
            CheckpointMismatchError: the strategy's state cannot be divided into these slices.
            ConfigChangedError: the checkpoint was saved with other codecs.
            GeoRayError: an averager has failed.
        """
        answers = self._execute(order)
        for averager in self.averagers.values():
            averager.forget_answers()  # ranks never repeat an update
        return answers

    def _execute(self, order: Order) -> Answers:
        match order:
            case BeginOrder():
                self._divide(order.layout, order.shares)
                self.attempts = dict(order.attempts)
                self.averagers = {i: self._averager(i) for i in self._own}
            case ResumeOrder():
                self._divide(order.layout, order.shares)
                self.attempts = dict(order.attempts)
                self._resume(order)
            case TakeOrder():
                return self._take(order)
            case WakeOrder():
                for averager in self.averagers.values():
                    averager.at(order.now_s)
                found = {i: averager.on_wake() for i, averager in self.averagers.items()}
                return self._timed(found, order.now_s)
            case LeaveOrder():
                for key in [key for key in self._staged if key[0] == order.region]:
                    del self._staged[key]
                for peer, index in list(self._arriving):
                    if region_of(peer) == order.region:
                        del self._arriving[peer, index]
                found = {i: each.leave(order.region) for i, each in self.averagers.items()}
                return self._timed(found, order.now_s)
            case ChangeOrder():
                change = MemberChange(joins=order.joins)
                found = {i: each.change(change) for i, each in self.averagers.items()}
                return self._timed(found, order.now_s)
            case CopyOrder():
                self._copy = order
                self.attempts |= order.attempts
            case FinishOrder():
                for averager in self.averagers.values():
                    averager.request_stop()
            case IntervalOrder():
                interval = self._terms.strategy.traits.exchange.interval
                for averager in self.averagers.values():
                    set_interval(averager.state, order.steps, interval)
            case DivideOrder():
                self._divide_again(order)
            case CollectOrder():
                self._collect, self._values = order, dict.fromkeys(self.averagers, 0)
                if not order.shares:
                    self.model_H = torch.empty(self._stop - self.start)
                    for averager in self.averagers.values():
                        averager.cancel_change()  # all regions have made their last exchange
            case SnapshotOrder():
                self._snapshots = []
                for i, averager in self.averagers.items():
                    averager.begin_checkpoint(order.checkpoint, halt=False)
                    self._snapshots.append((self.slices[i], averager.snapshots.pop()))
            case ForgetOrder():
                self._snapshots = []
        return {}

    @property
    def _own(self) -> list[int]:
        """The slices that this process holds."""
        return [i for i, each in enumerate(self.slices) if each.holder == self._holder]

    def _averager(self, index: int, members: Sequence[str] | None = None) -> Averager:
        return self._terms.averager(self._layout, self.slices[index], members)

    def _divide(self, layout: str, shares: Shares) -> None:
        self._layout = Layout.from_json(layout)
        self._starts = holder_starts(self._layout, self._terms.holders)
        self.slices = slices_of(self._layout, shares, self._starts)
        ranges = holder_ranges(self._layout, self._terms.holders)
        self.start, self._stop = ranges[self._holder]

    def _resume(self, order: ResumeOrder) -> None:
        found = {}
        saved = [each for each in self._saved_slices if each.is_within(self.start, self._stop)]
        self._saved_slices = ()
        for index in self._own:
            averager = self._averager(index, order.members)
            averager.restore(*_cut(saved, self.slices[index], averager, self._layout.size))
            for name in order.gone:
                averager.leave(name)
            if order.copying:
                change = MemberChange(joins=order.copying, preferred_donor=order.donor)
                averager.admit(change)
            found[index] = averager
        self.averagers = found
        attempts = {name: order.attempts[name] for name in order.copying}
        self._copy = CopyOrder(donor=order.donor, attempts=attempts)

    def _take(self, order: TakeOrder) -> Answers:
        found = {}
        for index, averager in self.averagers.items():
            part = self._staged.pop((order.region, index))
            if (part.attempt, part.seq) != (order.attempt, order.seq):
                raise InvariantError(
                    f"update {order.seq} of region '{order.region}' is ordered, update {part.seq} "
                    "is staged"
                )
            averager.at(order.now_s)
            part = replace(
                part, num_samples=order.rows, step_s=order.step_s, exchange_s=order.exchange_s
            )
            found[index] = averager.on_update(part)
        self._taken_s[order.region] = order.now_s
        return self._timed(found, order.now_s)

    def _timed(self, answers: Answers, now_s: float) -> Answers:
        """Return answers with the time for which the update has waited for them.

        An adaptive interval must not grow because one region waits for another.
        """
        return {
            index: [
                replace(each, held_s=max(0.0, now_s - self._taken_s.get(each.to, now_s)))
                for each in of_slice
            ]
            for index, of_slice in answers.items()
        }

    def _divide_again(self, order: DivideOrder) -> None:
        """Divide the range of this process again.

        References and coding errors are kept for slices that stay the same, and dropped for others.
        """
        before = []
        for index, averager in self.averagers.items():
            tensors, control = averager.export()
            kept = {k: v for k, v in tensors.items() if not k.startswith(OPEN)}
            ranges = self.slices[index].ranges
            before.append(SavedSlice(ranges, kept, {**control, "exchanges": {}}))
        view = self.view
        self._staged.clear()
        self.slices, self.averagers = slices_of(self._layout, order.shares, self._starts), {}
        for index in self._own:
            averager = self._averager(index, view.members)
            averager.restore(*_cut(before, self.slices[index], averager, self._layout.size))
            averager.view = view
            averager.at(order.now_s)
            self.averagers[index] = averager

    # ------------------------------------------------------------------ messages of ranks

    def begin_part(
        self, peer: str, index: int | None, update: UpdateMessage, meta: Meta, size: int
    ) -> None:
        """Record the header of a rank's update of a slice, whose values follow.

        Raises:
            FrameError: the slice is not one of the rank, or has fewer values.
        """
        self._check_owned(peer, update.region, index)
        if index is None or size > self.slices[index].size:
            raise FrameError(f"'{peer}' sends {size} values of slice {index}, which has fewer")
        self._arriving[peer, index] = ArrivingPart(update, meta, size)

    def add_piece(self, peer: str, message: Message) -> ArrivingPart | None:
        """Add values to the update of a slice; return it once they are complete.

        Values that follow no header are ignored: their update was refused.

        Raises:
            FrameError: they do not fit.
        """
        key = peer, fields.count(message.meta, "slice")
        part = self._arriving.get(key)
        if part is None:
            return None
        part.add(message)
        return self._arriving.pop(key) if part.is_complete else None

    def stage(self, peer: str, index: int, update: UpdateMessage) -> None:
        """Check a part of an update, and keep it until `TakeOrder`.

        Args:
            peer: the rank that has sent it.
            index: number of the slice.
            update: the part.

        Raises:
            FrameError: the slice is not one of the rank, or its previous update is open.
            GeoRayError: the averager would refuse the part.
        """
        self._check_owned(peer, update.region, index)
        known = self._staged.get((update.region, index))
        if known is not None and known.attempt == update.attempt and known.seq != update.seq:
            raise FrameError(f"'{peer}' sent update {update.seq} before {known.seq} was taken in")
        checked = self.averagers[index].checked(replace(update, buffers_E=no_buffers()))
        self._staged[update.region, index] = checked

    def _check_owned(self, peer: str, region: str, index: int | None) -> None:
        """Refuse a slice that is not here, or not one of the rank."""
        if index not in self.averagers or peer != rank_name(
            region, self.slices[index].owners.get(region, -1)
        ):
            raise FrameError(f"'{peer}' sent slice {index}, which is not its own")

    def on_state(self, peer: str, message: Message) -> tuple[int, list[Outbound], bool] | None:
        """Take in parameters of a slice, see `CollectOrder`.

        Returns:
            Number of the slice, messages to the ranks that begin with them, and whether the slice
            is complete; None if it was before.

        Raises:
            FrameError: the rank was not asked for them.
            NonFiniteError: they are not finite.
        """
        index, collect = fields.count(message.meta, "slice"), self._collect
        known = self._values.get(index)
        if collect is None or known is None or known == self.slices[index].size:
            return None
        each = self.slices[index]
        if peer != rank_name(collect.source, each.owners.get(collect.source, -1)):
            raise FrameError(f"'{peer}' sent parameters that it was not asked for")
        values = as_tensor(memoryview(message.payload))
        start = fields.count(message.meta, "start")
        stop = start + values.numel()
        if start != known or not start < stop <= each.size:
            raise FrameError(f"'{peer}' sent values {start} to {stop} of slice {index}")
        if not all_finite(values):
            raise NonFiniteError(f"the parameters of '{peer}' are not finite")
        self._values[index] = stop
        found: list[Outbound] = []
        if collect.shares:
            passed = Message(
                "state", {"slice": index, "start": start}, payload_of(values), "transfer"
            )
            owners = {name: rank for name, rank in each.owners.items() if name != collect.source}
            found = [Outbound(rank_name(*owner), passed) for owner in owners.items()]
        else:
            places = within(each.ranges, start, stop)
            put(self.model_H, tuple((a - self.start, b - self.start) for a, b in places), values)
        return index, found, stop == each.size

    def on_copy(self, peer: str, message: Message) -> Relayed | None:
        """Pass a donor's state on to the ranks that begin with it, see `CopyOrder`.

        Returns:
            The part; None if its slice is not here.

        Raises:
            FrameError: the rank was not asked for it, or it cannot be read.
        """
        if region_of(peer) != self._copy.donor:
            raise FrameError(f"'{peer}' sent a state that was not requested")
        index, state = read_copy(message)
        if index is None or index not in self.averagers:
            return None
        owners = self.slices[index].owners
        to = [name for name in self._copy.attempts if name in self.view.members]
        messages = [Outbound(rank_name(name, owners[name]), message) for name in to]
        return Relayed(index, len(message.payload), state, messages)

    # ------------------------------------------------------------------ checkpoints

    def saved(self) -> list[SavedSlice]:
        """Return what `SnapshotOrder` has copied.

        Raises:
            InvariantError: nothing.
        """
        if not self._snapshots:
            raise InvariantError("no checkpoint is being made")
        found = []
        for each, snapshot in self._snapshots:
            tensors = {
                name: copy.whole()
                for name, copy in snapshot.copies.items()
                if not name.startswith(OPEN)  # all regions have their answers
            }
            found.append(SavedSlice(each.ranges, tensors, {**snapshot.control, "exchanges": {}}))
        return found


def _cut(
    saved: Sequence[SavedSlice], part: Slice, averager: Averager, size: int
) -> tuple[Mapping[str, Tensor], Mapping[str, object]]:
    """Return the saved state of a slice, which the checkpoint may have in other slices.

    References and coding errors are kept for slices that are the same, and dropped for others.

    Args:
        saved: slices that contain everything in ``part``.
        part: the slice.
        averager: its averager.
        size: elements of the model.

    Raises:
        CheckpointMismatchError: the strategy's state cannot be cut again.
    """
    for each in saved:
        if each.ranges == part.ranges:
            return each.tensors, each.control
    names = {name for each in saved for name in each.tensors if not name.startswith(AVERAGER_WIRE)}
    fragments = fragment_bounds(size, averager.strategy.traits.exchange.fragments)
    tensors = {}
    for name in sorted(names):
        of_fragment = _OF_FRAGMENT.match(name)
        within = ((0, size),) if of_fragment is None else (fragments[int(of_fragment[1])],)
        pieces = [(common(each.ranges, within), each.tensors[name]) for each in saved]
        for ranges, vector in pieces:
            if vector.shape != (sum(stop - start for start, stop in ranges),):
                raise CheckpointMismatchError(
                    f"the averager's state '{name}' cannot be divided among other ranks",
                    fix="Resume with the sharding and the number of ranks of the checkpoint.",
                )
        tensors[name] = gathered(pieces, common(part.ranges, within))
    control = {k: v for k, v in saved[0].control.items() if k != "buffer_rows"}
    return tensors, {**control, "wire": averager.wire.export()[1]}
