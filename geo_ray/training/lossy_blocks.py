"""Accounting of lossy blocks at sender and receiver: each block is applied once or sent again.

With ``late: put_back`` the next update closes the accounts of the one before, and the report
with the reply says which blocks were applied; the sender returns all others to its residual.
With ``late: merge`` late blocks count for ``late_max`` updates and are lost after that. Blocks
that have not arrived count as zero. Pure: no clock, no socket.

Shape legend: P = parameters of the model; E = elements of a block; L = blocks of one update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geo_ray.base.errors import CheckpointCorruptError
from geo_ray.codecs.base import (
    Coded,
    DifferentialCodec,
    LossyBlocks,
    LossyReport,
    pack_ranks,
    unpack_ranks,
    wrong,
)
from geo_ray.codecs.dgt import DgtHeader, lossy_bytes, unpack_lossy
from geo_ray.training.checkpoint_parts import load_coded, save_coded
from geo_ray.training.messages import UpdateMessage


@dataclass(slots=True)
class _Sent:
    """Blocks sent lossily with one update; ``open_L`` (bool): not settled yet."""

    coded: Coded
    open_L: Tensor


@dataclass(slots=True)
class LossySender:
    """Sender's accounting for one region; see the module's docstring.

    Attributes:
        codec: codec of both ends.
    """

    codec: DifferentialCodec
    _sent: dict[int, _Sent] = field(default_factory=dict)  # by seq

    def sent(self, seq: int, coded: Coded | None) -> None:
        """Record that update ``seq`` is sent as ``coded``."""
        if coded is not None and coded.lossy is not None and self.codec.late == "put_back":
            count = coded.lossy.ids_L.numel()
            self._sent[seq] = _Sent(coded, torch.ones(count, dtype=torch.bool))

    def newest(self) -> int | None:
        """The newest update that has open blocks."""
        return max(self._sent, default=None)

    def unsent(self, seq: int, first_rank: int) -> list[Coded]:
        """Record that blocks of update ``seq`` from ``first_rank`` on will not be sent.

        Returns:
            What to put back.
        """
        entry = self._sent.get(seq)
        if entry is None:
            return []
        unsent_L = entry.open_L.clone()
        unsent_L[:first_rank] = False
        entry.open_L &= ~unsent_L
        return self._part(entry, unsent_L)

    def settle(self, seq: int, report: LossyReport | None) -> list[Coded]:
        """Handle the reply to update ``seq``, which closes all earlier updates.

        Args:
            seq: answered update.
            report: report of the reply; None from an averager without lossy blocks.

        Returns:
            What to put back.

        Raises:
            FrameError: the report is invalid.
        """
        if report is not None:
            self._taken(seq, report.now)
            if report.late_seq is not None:
                self._taken(report.late_seq, report.late)
        return self._close([before for before in self._sent if before < seq])

    def take_all(self) -> list[Coded]:
        """Close all updates, because the next update makes the averager forget lossy blocks.

        Returns:
            What to put back.
        """
        return self._close(list(self._sent))

    def forget(self, seq: int) -> None:
        """Forget update ``seq``, which was dropped and is put back elsewhere."""
        self._sent.pop(seq, None)

    def export(self) -> tuple[dict[str, Tensor], list[dict[str, object]]]:
        """Return the state for a checkpoint, as tensors and plain values.

        A resumed run settles it with the next reply: blocks in flight at the snapshot never arrive.
        """
        tensors: dict[str, Tensor] = {}
        rows: list[dict[str, object]] = []
        for seq, entry in self._sent.items():
            found, row = save_coded(entry.coded, str(seq))
            tensors |= found | {f"{seq}/open": entry.open_L.clone()}
            rows.append({"seq": seq, **row})
        return tensors, rows

    def restore(self, tensors: Mapping[str, Tensor], rows: object) -> None:
        """Restore the result of `export`.

        Raises:
            CheckpointCorruptError: tensors and values do not fit.
        """
        self._sent.clear()
        try:
            for row in rows or []:  # type: ignore[attr-defined]
                seq = int(row["seq"])
                coded = load_coded(tensors, row, str(seq))
                self._sent[seq] = _Sent(coded, tensors[f"{seq}/open"].clone())
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointCorruptError(f"saved state of lossy blocks: {error!r}") from error

    def _taken(self, seq: int, packed: bytes) -> None:
        entry = self._sent.get(seq)
        if entry is not None:
            entry.open_L[torch.from_numpy(unpack_ranks(packed, entry.open_L.numel()))] = False

    def _close(self, seqs: list[int]) -> list[Coded]:
        entries = [self._sent.pop(seq) for seq in sorted(seqs)]
        return [part for entry in entries for part in self._part(entry, entry.open_L)]

    def _part(self, entry: _Sent, which_L: Tensor) -> list[Coded]:
        places = which_L.nonzero().flatten()
        return [self.codec.subset(entry.coded, places)] if places.numel() else []


Block = tuple[int, bytes]
"""A block's number within the vector, and its bytes."""


@dataclass(slots=True)
class LossyCounts:
    """Counts of received lossy blocks.

    Attributes:
        on_time: taken in with their own update.
        late: taken in with a later update.
        too_late: not taken in.
        double: duplicates.
        refused: of an unexpected update, or with a wrong number or size.
    """

    on_time: int = 0
    late: int = 0
    too_late: int = 0
    double: int = 0
    refused: int = 0


@dataclass(slots=True)
class _Page:
    """Blocks of one update: those waiting by rank, and the ranks that were taken in."""

    limit: int
    is_complete: bool = False
    waiting: dict[int, Block] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)

    def take(self) -> dict[int, Block]:
        found, self.waiting = self.waiting, {}
        self.taken |= found.keys()
        return found


@dataclass(slots=True)
class LossyReceiver:
    """Receiver's accounting for one region; see the module's docstring.

    Attributes:
        codec: codec of both ends.
        num: P.
        counts: counts of received blocks.
    """

    codec: DifferentialCodec
    num: int
    counts: LossyCounts = field(default_factory=LossyCounts)
    _done: tuple[int, int] | None = None
    _begun: tuple[int, int] | None = None
    _ahead: tuple[int, int] | None = None  # whose first blocks came before anything else of it
    _pages: dict[int, _Page] = field(default_factory=dict)  # by seq
    _page_ahead: _Page = field(default_factory=partial(_Page, 0))
    _reports: dict[int, LossyReport] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        """Number of blocks in a vector."""
        return -(-self.num // self.codec.elements)

    def on_blocks(
        self,
        attempt: int,
        seq: int,
        first_rank: int,
        ids: Sequence[int],
        blocks: Sequence[bytes | memoryview],
    ) -> int:
        """Some lossy blocks of an update have arrived, in any order, perhaps once more.

        Args:
            attempt: of the sender.
            seq: the update's number.
            first_rank: rank of the first block; the others follow.
            ids: their numbers within the vector.
            blocks: their bytes.

        Returns:
            How many of them are news.
        """
        if not self._expects(attempt, seq):
            self.counts.refused += len(ids)
            return 0
        page = self._page_of(attempt, seq)
        if page is None:
            self.counts.too_late += len(ids)
            return 0
        before = len(page.waiting)
        size = lossy_bytes(self.codec.loose_values, self.codec.elements)
        for rank, (block, data) in enumerate(zip(ids, blocks, strict=True), first_rank):
            if rank >= page.limit or not 0 <= block < self.blocks or len(data) != size:
                self.counts.refused += 1
            elif rank in page.taken or rank in page.waiting:
                self.counts.double += 1
            else:
                page.waiting[rank] = (block, bytes(data))
        return len(page.waiting) - before

    def begin(self, update: UpdateMessage) -> int:
        """Handle the reliable part of an update that waits for lossy blocks.

        Returns:
            Number of missing blocks.

        Raises:
            FrameError: the update is invalid.
        """
        coded = update.coded
        if coded is None or coded.lossy is not None or self._is_old(update):
            return 0
        self._open(update.attempt, update.seq)
        self._begun = (update.attempt, update.seq)
        page = self._pages.setdefault(update.seq, _Page(self.blocks))
        return DgtHeader(coded).lossy - len(page.waiting)

    def complete(self, update: UpdateMessage) -> UpdateMessage:
        """Return the update as a vector: its reliable part plus the lossy blocks that arrived.

        A completed update is returned unchanged, so that the averager recognizes the duplicate.

        Raises:
            FrameError: the update is invalid.
        """
        if self._is_old(update):
            return update
        attempt, seq = update.attempt, update.seq
        self._open(attempt, seq)
        payload_P, page = self._own(update)
        late_P, late_seq, late = self._late(update)
        if late_P is not None:
            payload_P = payload_P + late_P
        if page.limit:
            self._pages[seq] = page
        self._done = (attempt, seq)
        self._pages.pop(seq + 1, None)
        self._reports = {seq: LossyReport(pack_ranks(page.taken), late_seq, pack_ranks(late))}
        return replace(update, payload_P=payload_P, coded=None, against=None)

    def report(self, seq: int) -> LossyReport | None:
        """Return the report for the reply to update ``seq``, the newest; None if there is none."""
        return self._reports.get(seq) if self.codec.late == "put_back" else None

    def export(self, last: tuple[int, int]) -> dict[str, object] | None:
        """Return plain values for a checkpoint; None if there are none.

        Waiting blocks are forgotten, since their sender owes them again. Reports are saved, since
        blocks would count twice otherwise.

        Args:
            last: attempt and number of the newest update that the averager has taken in.
        """
        if self._done != last:  # updates completed since then are sent again
            return None
        report = self._reports.get(last[1])
        reported = (
            None if report is None else [report.now.hex(), report.late_seq, report.late.hex()]
        )
        return {"done": list(last), "report": reported}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the result of `export`."""
        attempt, seq = saved["done"]
        self._done = (int(attempt), int(seq))
        if saved["report"] is not None:
            now, late_seq, late = saved["report"]
            report = LossyReport(bytes.fromhex(now), late_seq, bytes.fromhex(late))
            self._reports = {self._done[1]: report}

    def void(self, seq: int) -> None:
        """Update ``seq`` was not taken in after all; its sender owes it as a whole."""
        self._pages.pop(seq, None)
        self._reports.pop(seq, None)

    def _open(self, attempt: int, seq: int) -> None:
        """Begin a new incarnation of the sender, and forget the previous one."""
        if (attempt, seq) == self._begun or (self._done is not None and self._done[0] == attempt):
            return
        self._pages.clear()
        self._done = None
        if self._ahead == (attempt, seq):
            self._pages[seq] = self._page_ahead
        self._ahead = None

    def _expects(self, attempt: int, seq: int) -> bool:
        """Tell whether blocks of this update may arrive, even too late."""
        if (attempt, seq) == self._begun or self._done is None or attempt > self._done[0]:
            return True
        return attempt == self._done[0] and seq <= self._done[1] + 1

    def _page_of(self, attempt: int, seq: int) -> _Page | None:
        """Return the storage of an expected update's blocks; None if they are too late.

        Datagrams may overtake the reliable part. Those of a sender's first update are stored
        separately, for at most one update, since its number is known only with the reliable part.
        """
        if (attempt, seq) != self._begun and (self._done is None or attempt > self._done[0]):
            if self._ahead != (attempt, seq):
                self._ahead, self._page_ahead = (attempt, seq), _Page(self.blocks)
            return self._page_ahead
        if seq not in self._pages and self._done is not None and seq > self._done[1]:
            self._pages[seq] = _Page(self.blocks)
        return self._pages.get(seq)

    def _is_old(self, update: UpdateMessage) -> bool:
        return self._done is not None and (update.attempt, update.seq) <= self._done

    def _own(self, update: UpdateMessage) -> tuple[Tensor, _Page]:
        """The update's vector with its own blocks, and its page from now on."""
        coded = update.coded
        if coded is None:
            return update.payload_P, _Page(0, is_complete=True)
        if coded.kind != self.codec.kind or coded.num != self.num:
            raise wrong(coded.kind, f"{coded.num} elements, {self.num} were expected")
        head = DgtHeader(coded)
        if head.elements != self.codec.elements or head.lossy_format != self.codec.loose_values:
            raise wrong(coded.kind, "other blocks than were agreed on")
        page = _Page(head.lossy, is_complete=True)
        if coded.lossy is not None:  # from the own region: nothing can be lost in flight
            payload_P = self.codec.decode(coded)
            page.taken = set(range(coded.lossy.ids_L.numel()))
            return payload_P, page
        early = self._pages.get(update.seq)
        if early is not None:
            page.waiting = {r: b for r, b in early.waiting.items() if r < page.limit}
        found = page.take()
        lossy = _as_lossy(found) if found else None
        payload_P = self.codec.decode(Coded(coded.kind, coded.num, coded.data_B, lossy))
        self.counts.on_time += len(found)
        return payload_P, page

    def _late(self, update: UpdateMessage) -> tuple[Tensor | None, int | None, set[int]]:
        """Take in late blocks of earlier updates, and close the updates that are due.

        Returns:
            What to add; the update that is closed, and its ranks.
        """
        put_back = self.codec.late == "put_back"
        # A last update has all that is owed in it; one without samples has no weight in a round.
        forget = update.final or (put_back and update.num_samples == 0)
        total_P: Tensor | None = None
        closed: tuple[int | None, set[int]] = (None, set())
        for seq in sorted(seq for seq in self._pages if seq < update.seq):
            page, delay = self._pages[seq], update.seq - seq
            if forget or not page.is_complete:
                self.counts.too_late += len(page.waiting)
            elif update.num_samples > 0 or not put_back:
                found = page.take()
                self.counts.late += len(found)
                if found:
                    total_P = torch.zeros(self.num) if total_P is None else total_P
                    total_P += self._vector(found, delay)
                closed = (seq, set(found))
            if put_back or forget or delay >= self.codec.late_max or not page.is_complete:
                self._pages.pop(seq)
        return total_P, *closed

    def _vector(self, found: dict[int, Block], delay: int) -> Tensor:
        """Late blocks as a vector (P,)."""
        elements, lossy = self.codec.elements, _as_lossy(found)
        values_LE = unpack_lossy(self.codec.loose_values, lossy.blocks_LK, elements)
        if self.codec.late_scaled:
            values_LE = values_LE / (delay + 1)
        total_P = torch.zeros(self.blocks * elements)
        total_P.view(-1, elements).index_add_(0, lossy.ids_L.to(torch.int64), values_LE)
        return total_P[: self.num]


def _as_lossy(found: dict[int, Block]) -> LossyBlocks:
    ids = torch.tensor([block for block, _ in found.values()], dtype=torch.int32)
    data = np.frombuffer(b"".join(data for _, data in found.values()), dtype=np.uint8)
    return LossyBlocks(ids, torch.from_numpy(data.copy()).view(len(found), -1))
