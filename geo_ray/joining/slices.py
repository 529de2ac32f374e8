"""The averagers of a run's slices, which take in an update in all slices or in none.

All averagers execute the same operations in the same order, so that they agree on everything but
the values of the parameters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from torch import Tensor

from geo_ray.base.errors import (
    CheckpointMismatchError,
    ConfigChangedError,
    GeoRayError,
    InvariantError,
)
from geo_ray.joining.layout import Layout, Ranges, Slice, common, gathered
from geo_ray.joining.protocol import JoinTerms
from geo_ray.strategies.base import Strategy
from geo_ray.training.averager import AVERAGER_WIRE, OPEN, Averager
from geo_ray.training.checkpoint_parts import AveragerSnapshot
from geo_ray.training.membership import MemberChange, View
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.parameters import fragment_bounds

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


Answers: TypeAlias = list[list[ReplyMessage]]
"""Answers of the averager of each slice; all of them answer the same regions."""


@dataclass(frozen=True, slots=True)
class RestartPoint:
    """How a run continues from a checkpoint.

    Attributes:
        members: regions at the checkpoint's barrier.
        loading: those that load their files of it; one at least.
        copying: regions that begin with a copy of the donor's state.
    """

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


class SliceAveragers:
    """See the module. There are none before `begin` or `resume`.

    Attributes:
        slices: the slices.
        averagers: one per slice.

    Args:
        terms: the run.
    """

    def __init__(self, terms: JoinTerms) -> None:
        self._terms = terms
        self.slices: tuple[Slice, ...] = ()
        self.averagers: list[Averager] = []
        self._snapshots: list[AveragerSnapshot] = []  # of the newest checkpoint
        self._snapshot_slices: tuple[Slice, ...] = ()  # at its barrier

    def begin(self, layout: Layout, slices: tuple[Slice, ...]) -> None:
        """Begin a run."""
        self.slices = slices
        self.averagers = [self._terms.averager(layout, each) for each in slices]

    def resume(
        self,
        layout: Layout,
        slices: tuple[Slice, ...],
        saved: Sequence[SavedSlice],
        restart: RestartPoint,
    ) -> None:
        """Continue from a checkpoint, at its barrier.

        Raises:
            CheckpointMismatchError: the strategy's state cannot be divided into these slices.
            ConfigChangedError: it was saved with other codecs.
        """
        self.slices, found = slices, []
        for each in slices:
            averager = self._terms.averager(layout, each, restart.members)
            averager.restore(*_cut(saved, each, averager))
            for name in restart.gone:
                averager.leave(name)
            if restart.copying:
                change = MemberChange(joins=restart.copying, preferred_donor=restart.donor)
                averager.admit(change)
            found.append(averager)
        self.averagers = found

    # ------------------------------------------------------------------ state

    @property
    def version(self) -> int:
        """Commits so far."""
        return self.averagers[0].state.version if self.averagers else 0

    @property
    def view(self) -> View:
        """The membership view."""
        return self.averagers[0].view

    @property
    def wakes_s(self) -> float | None:
        """Time at which the strategy asks for `on_wake`; None: it does not."""
        return self.averagers[0].wakes_s if self.averagers else None

    @property
    def is_changing(self) -> bool:
        """Whether a membership change is pending, or a joining region is not active yet."""
        return any(each.is_changing for each in self.averagers)

    @property
    def stopping(self) -> bool:
        """Whether regions are asked to finish."""
        return any(each.stopping for each in self.averagers)

    @property
    def failure(self) -> GeoRayError | None:
        """The error after which no averager continues; None: there is none."""
        return next((each.failure for each in self.averagers if each.failure is not None), None)

    @property
    def waiting(self) -> tuple[str, ...]:
        """The regions whose updates wait for those of the others."""
        return tuple(self.averagers[0].state.waiting) if self.averagers else ()

    def owned(self, region: str, rank: int) -> dict[int, Ranges]:
        """Return the ranges of the slices that a rank exchanges, by number."""
        return {i: e.ranges for i, e in enumerate(self.slices) if e.owners[region] == rank}

    # ------------------------------------------------------------------ operations

    def checked(self, parts: Sequence[UpdateMessage]) -> list[UpdateMessage]:
        """Return the update of each slice, decoded and checked; no averager has taken it in.

        Raises:
            GeoRayError: an averager would refuse its part.
        """
        return [
            averager.checked(part) for averager, part in zip(self.averagers, parts, strict=True)
        ]

    def take(self, parts: Sequence[UpdateMessage], now_s: float) -> Answers:
        """Take in an update, which is `checked`."""
        found = []
        for averager, part in zip(self.averagers, parts, strict=True):
            averager.at(now_s)
            found.append(averager.on_update(part))
        return found

    def on_wake(self, now_s: float) -> Answers:
        """Let the averagers answer when the time has come that the strategy asked for."""
        found = []
        for averager in self.averagers:
            averager.at(now_s)
            found.append(averager.on_wake())
        return found

    def leave(self, region: str) -> Answers:
        """Continue without a region."""
        return [averager.leave(region) for averager in self.averagers]

    def change(self, change: MemberChange) -> Answers:
        """Change the members at the next barrier."""
        return [averager.change(change) for averager in self.averagers]

    def request_stop(self) -> None:
        """Ask every region to finish with its next answer."""
        for averager in self.averagers:
            averager.request_stop()

    def forget_answers(self) -> None:
        """Free the newest answers: ranks never repeat an update."""
        for averager in self.averagers:
            averager.forget_answers()

    def divide(self, layout: Layout, slices: tuple[Slice, ...], now_s: float) -> None:
        """Continue with other slices, at a barrier at which no update is under way.

        References and coding errors are kept for slices that stay the same, and dropped for others.
        """
        before = []
        for each, averager in zip(self.slices, self.averagers, strict=True):
            tensors, control = averager.export()
            kept = {k: v for k, v in tensors.items() if not k.startswith(OPEN)}
            before.append(SavedSlice(each.ranges, kept, {**control, "exchanges": {}}))
        view = self.view
        self.slices, self.averagers = slices, []
        for each in slices:
            averager = self._terms.averager(layout, each, view.members)
            averager.restore(*_cut(before, each, averager))
            averager.view = view
            averager.at(now_s)
            self.averagers.append(averager)

    # ------------------------------------------------------------------ checkpoints

    def snapshot(self, checkpoint: int) -> None:
        """Copy the state for a checkpoint, at its barrier."""
        self._snapshot_slices = self.slices
        for averager in self.averagers:
            averager.begin_checkpoint(checkpoint, halt=False)
            self._snapshots.append(averager.snapshots.pop())

    def saved(self) -> list[SavedSlice]:
        """Return what `snapshot` has copied.

        Raises:
            InvariantError: nothing.
        """
        if not self._snapshots:
            raise InvariantError("no checkpoint is being made")
        found = []
        for each, snapshot in zip(self._snapshot_slices, self._snapshots, strict=True):
            tensors = {
                name: copy.whole()
                for name, copy in snapshot.copies.items()
                if not name.startswith(OPEN)  # all regions have their answers
            }
            found.append(SavedSlice(each.ranges, tensors, {**snapshot.control, "exchanges": {}}))
        return found

    def forget_snapshot(self) -> None:
        """Drop what `snapshot` has copied."""
        self._snapshots = []


def _cut(
    saved: Sequence[SavedSlice], part: Slice, averager: Averager
) -> tuple[Mapping[str, Tensor], Mapping[str, object]]:
    """Return the saved state of a slice, which the checkpoint may have in other slices.

    References and coding errors are kept for slices that are the same, and dropped for others.

    Raises:
        CheckpointMismatchError: the strategy's state cannot be cut again.
    """
    for each in saved:
        if each.ranges == part.ranges:
            return each.tensors, each.control
    names = {name for each in saved for name in each.tensors if not name.startswith(AVERAGER_WIRE)}
    size = max(stop for each in saved for _, stop in each.ranges)
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
