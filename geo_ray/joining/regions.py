"""What the served side knows of each region: its ranks, its open update, its evaluations.

A region has sent its update once the headers of all its ranks and all slices are here. Rows are
those of all ranks, which must agree on everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Final

import torch
from torch import Tensor

from geo_ray.base.errors import FrameError, RanksDisagreeError
from geo_ray.joining.layout import Ranges, Slice
from geo_ray.joining.protocol import Hello, rank_name
from geo_ray.training.messages import UpdateMessage, no_buffers
from geo_ray.training.parameters import BufferLayout

MOST_OPEN: Final = 1024
"""Evaluations that may wait for the reports of ranks."""


@dataclass(slots=True)
class RegionRanks:
    """The ranks of a region, and the parts of its open update.

    Attributes:
        name: its name.
        attempt: incarnation of its training.
        world_size: its ranks.
        hellos: descriptions of ranks, by rank.
        since_s: time at which the first part of the open update arrived.
        steps: steps in all updates that were taken in.
        stepped_s: time of the newest of them.
        open: header of the update that is not answered yet.
        sent_bytes: payload of that update in all slices.
        headers: headers of the update that is being sent, with the rank's rows, by rank.
        finished: ranks that have ended.
        unreached: holders of slices to which a rank has no connection, and why, by rank.
    """

    name: str
    attempt: int
    world_size: int
    hellos: dict[int, Hello] = field(default_factory=dict)
    since_s: float = 0.0
    steps: int = 0
    stepped_s: float = 0.0
    open: UpdateMessage | None = None
    sent_bytes: int = 0
    headers: dict[int, tuple[UpdateMessage, int]] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    unreached: dict[int, Mapping[int, str]] = field(default_factory=dict)
    _parts: dict[int, StagedPart] = field(default_factory=dict)  # by slice
    _losses: dict[int, float] = field(default_factory=dict)  # of ranks that report one
    _buffers: dict[int, Tensor] = field(default_factory=dict)  # uint8 (E,), by rank

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have described themselves."""
        return len(self.hellos) == self.world_size

    @property
    def saves(self) -> bool:
        """Whether all ranks write parts of checkpoints."""
        return all(hello.saved is not None for hello in self.hellos.values())

    @property
    def shares(self) -> list[Ranges]:
        """The ranges that each rank exchanges."""
        return [self.hellos[rank].share for rank in range(self.world_size)]

    @property
    def peers(self) -> list[str]:
        """The endpoints of all ranks."""
        return [rank_name(self.name, rank) for rank in range(self.world_size)]

    def has(self, checkpoint: int) -> bool:
        """Return whether all ranks can load a checkpoint."""
        return all(checkpoint in (hello.saved or ()) for hello in self.hellos.values())

    def fits(self, slices: Sequence[Slice]) -> bool:
        """Return whether each rank has whole slices."""
        for rank in range(self.world_size):
            own = sorted(
                pair for each in slices if each.owners[self.name] == rank for pair in each.ranges
            )
            if _merged(own) != _merged(self.hellos[rank].share):
                return False
        return all(each.owners[self.name] < self.world_size for each in slices)

    def check_rank(self, hello: Hello) -> None:
        """Refuse a rank that counts other ranks than those that are known.

        Raises:
            RanksDisagreeError: it does.
        """
        if hello.world_size != self.world_size or not 0 <= hello.rank < self.world_size:
            raise RanksDisagreeError(
                f"region '{self.name}': rank {hello.rank} counts {hello.world_size} ranks, another "
                f"one {self.world_size}"
            )

    def add_rank(self, hello: Hello) -> None:
        """Record the description of a rank; see `check_rank`."""
        self.check_rank(hello)
        self.hellos[hello.rank] = hello

    # ------------------------------------------------------------------ the open update

    def add_header(
        self, rank: int, update: UpdateMessage, rows: int, loss: float | None, now_s: float
    ) -> None:
        """Record that a rank sends an update.

        Args:
            rank: the rank.
            update: the update; its payload is not used.
            rows: rows of this rank.
            loss: mean loss of this rank; None: not reported.
            now_s: present time.

        Raises:
            RanksDisagreeError: another rank sends another update.
        """
        for other, (known, _) in self.headers.items():
            mine, theirs = decided_by(update), decided_by(known)
            if mine != theirs:
                differs = ", ".join(
                    f"{key} {mine[key]} and {theirs[key]}"
                    for key in mine
                    if mine[key] != theirs[key]
                )
                raise RanksDisagreeError(
                    f"region '{self.name}': ranks {rank} and {other} differ in {differs}"
                )
        if not self.headers:
            self.since_s = now_s
        self.headers[rank] = update, rows
        if loss is not None:
            self._losses[rank] = loss

    def add_part(self, index: int, part: StagedPart) -> None:
        """Record that the update of a slice is staged."""
        self._parts[index] = part

    def add_buffers(self, rank: int, update: UpdateMessage) -> None:
        """Record the model buffers of a rank, if its update has them."""
        if update.buffers_E.numel():
            self._buffers[rank] = update.buffers_E

    def has_sent(self, slices: Sequence[Slice]) -> bool:
        """Return whether all ranks have sent the update, and all slices are staged."""
        return not self.missing(slices)

    def missing(self, slices: Sequence[Slice]) -> str:
        """Return what is missing of the open update; "": nothing."""
        ranks = sorted(set(range(self.world_size)) - self.headers.keys())
        if ranks:
            return f"ranks {ranks} have not"
        parts = sorted(set(range(len(slices))) - self._parts.keys())
        return f"slices {parts} are missing" if parts else ""

    def take_update(self, layout: BufferLayout) -> SentUpdate:
        """Return the update, which is sent; the region has none afterwards.

        Args:
            layout: the model buffers.

        Raises:
            FrameError: the model buffers of a rank have the wrong size.
            RanksDisagreeError: a slice is of another update.
        """
        headers = [header for header, _ in self.headers.values()]
        decided = decided_by(headers[0])
        for index, part in self._parts.items():
            if part.decided != decided:
                raise RanksDisagreeError(
                    f"region '{self.name}': slice {index} is of {part.decided}, not of {decided}"
                )
        rows = sum(count for _, count in self.headers.values())
        losses = [(self._losses[r], n) for r, (_, n) in self.headers.items() if r in self._losses]
        weight = sum(n for _, n in losses)
        loss = sum(loss * n for loss, n in losses) / weight if weight else None
        header = replace(
            headers[0],
            num_samples=rows,
            step_s=max(header.step_s for header in headers),
            exchange_s=max(header.exchange_s for header in headers),
            payload_P=torch.empty(0),
            coded=None,
            buffers_E=self._combined(layout),
        )
        size_bytes = sum(part.size_bytes for part in self._parts.values())
        self._parts.clear()
        self.headers.clear()
        self._losses.clear()
        self._buffers.clear()
        return SentUpdate(header, size_bytes, loss)

    def _combined(self, layout: BufferLayout) -> Tensor:
        """Return the model buffers of the region from those of its ranks, uint8 (E,)."""
        size = layout.exchanged_bytes
        ranks = range(self.world_size)
        vectors = [self._buffers.get(rank, no_buffers()) for rank in ranks]
        if any(vector.numel() != size for vector in vectors):
            found = [vector.numel() for vector in vectors]
            raise FrameError(
                f"region '{self.name}': model buffers of {found} bytes, not {size} each"
            )
        if not size:
            return no_buffers()
        rows = [float(self.headers[rank][1]) for rank in ranks]
        return layout.combine(vectors, rows if any(rows) else [1.0] * len(rows))


@dataclass(frozen=True, slots=True)
class StagedPart:
    """The update of a slice, as the process that holds the slice has staged it.

    Attributes:
        decided: what all ranks decide alike, see `decided_by`.
        size_bytes: size of its payload.
    """

    decided: Mapping[str, object]
    size_bytes: int

    @classmethod
    def of(cls, update: UpdateMessage) -> StagedPart:
        """Return what is known of an update."""
        return cls(decided_by(update), update.size_bytes)


@dataclass(frozen=True, slots=True)
class SentUpdate:
    """A region's update, of which all parts are staged.

    Attributes:
        header: the update without a payload, with the rows of all ranks and the region's model
            buffers.
        size_bytes: size of all payloads.
        loss: mean loss by rows; None: no rank has reported one.
    """

    header: UpdateMessage
    size_bytes: int
    loss: float | None


def decided_by(update: UpdateMessage) -> dict[str, object]:
    """Return the values that all ranks of a region decide alike."""
    return {
        "seq": update.seq,
        "base_version": update.base_version,
        "view": update.view,
        "steps": update.steps,
        "final": update.final,
        "fragment": update.fragment,
    }


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join neighbouring ranges."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


@dataclass(frozen=True, slots=True)
class SummedEvaluation:
    """Sums over held-out rows at one step.

    Attributes:
        region: the region; None: all regions.
        step: the step.
        final: whether it is the evaluation of the final parameters.
        rows: the held-out rows.
        sums: sums by name.
    """

    region: str | None
    step: int
    final: bool
    rows: int
    sums: Mapping[str, list[float]]

    @classmethod
    def of(
        cls,
        region: str | None,
        at: tuple[int, bool],
        parts: Iterable[tuple[int, Mapping[str, list[float]]]],
    ) -> SummedEvaluation:
        """Add up the rows and sums of several ranks."""
        found = list(parts)
        names = sorted({name for _, sums in found for name in sums})
        totals = {
            name: [
                sum(each)
                for each in zip_longest(*(s.get(name, ()) for _, s in found), fillvalue=0.0)
            ]
            for name in names
        }
        return cls(region, *at, sum(count for count, _ in found), totals)

    def event(self) -> dict[str, object]:
        """Return the fields of its event."""
        means = {name: sum(total) / self.rows for name, total in self.sums.items() if self.rows}
        return {
            "region": self.region,
            "step": self.step,
            "metrics": means,
            "samples": self.rows,
            "final": self.final,
            "sums": self.sums,
        }


class Evaluations:
    """Adds up the evaluations of ranks: of each region, and of all regions at one step.

    A region may not evaluate at a step, or never. Of evaluations that are not complete, only the
    `MOST_OPEN` that were begun last are kept.
    """

    def __init__(self) -> None:
        # Rows and sums of each rank by region, at each (step, is the last one), until all are here.
        self._open: dict[
            tuple[int, bool], dict[str, dict[int, tuple[int, Mapping[str, list[float]]]]]
        ] = {}

    def add(
        self,
        at: tuple[int, bool],
        region: RegionRanks,
        rank: int,
        rows: int,
        sums: Mapping[str, list[float]],
    ) -> SummedEvaluation | None:
        """Record what a rank reports; return the region's evaluation if that completes it."""
        found = self._open.setdefault(at, {}).setdefault(region.name, {})
        found[rank] = rows, sums
        if len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]
        if len(found) < region.world_size:
            return None
        return SummedEvaluation.of(region.name, at, found.values())

    @property
    def num_open(self) -> int:
        """Evaluations that are not complete yet."""
        return len(self._open)

    def leave(self, region: str) -> None:
        """Forget what a region has reported."""
        for found in self._open.values():
            found.pop(region, None)

    def completed(self, regions: Mapping[str, RegionRanks]) -> list[SummedEvaluation]:
        """Return the evaluations that all regions have reported; earlier ones are dropped."""
        done = []
        for at, found in sorted(self._open.items()):
            if any(len(found.get(n, {})) < e.world_size for n, e in regions.items()):
                continue
            parts = [part for name in regions for part in found[name].values()]
            done.append(SummedEvaluation.of(None, at, parts))
            for each in [key for key in self._open if key <= at]:
                del self._open[each]  # earlier ones are not completed any longer
        return done
