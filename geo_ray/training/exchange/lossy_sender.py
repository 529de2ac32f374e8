"""The sender's books of lossy blocks: which are neither taken in nor owed again yet. Pure.

With ``late: put_back`` every lossy block is settled once, in one of three ways: the averager
reports that it was taken in; it never left, because the next update came first; or the averager has
closed the books without it. The last two are put back and go with the next vector. With
``late: merge`` there are no books: what does not arrive is lost.

Shape legend: L = lossy blocks of one update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from geo_ray.codecs.base import Coded
from geo_ray.codecs.common.dgt_report import LossyReport, unpack_ranks
from geo_ray.codecs.differential import DifferentialCodec
from geo_ray.errors import CheckpointCorruptError
from geo_ray.training.exchange.saved import load_coded, save_coded


@dataclass(slots=True)
class _Sent:
    """What was sent loosely with one update; ``open_L`` (bool): not settled yet."""

    coded: Coded
    open_L: Tensor


@dataclass(slots=True)
class LossySender:
    """The books of one region; see the module's docstring.

    Attributes:
        codec: of both ends.
    """

    codec: DifferentialCodec
    _sent: dict[int, _Sent] = field(default_factory=dict)  # by seq

    def sent(self, seq: int, coded: Coded | None) -> None:
        """Update ``seq`` is on its way as ``coded``."""
        if coded is not None and coded.lossy is not None and self.codec.late == "put_back":
            count = coded.lossy.ids_L.numel()
            self._sent[seq] = _Sent(coded, torch.ones(count, dtype=torch.bool))

    def newest(self) -> int | None:
        """The newest update that has open blocks."""
        return max(self._sent, default=None)

    def unsent(self, seq: int, first_rank: int) -> list[Coded]:
        """Blocks of update ``seq`` from ``first_rank`` on have not left, and will not leave.

        Returns:
            What is to be put back.
        """
        entry = self._sent.get(seq)
        if entry is None:
            return []
        unsent_L = entry.open_L.clone()
        unsent_L[:first_rank] = False
        entry.open_L &= ~unsent_L
        return self._part(entry, unsent_L)

    def settle(self, seq: int, report: LossyReport | None) -> list[Coded]:
        """The reply to update ``seq`` has come; it closes the books of all updates before.

        Args:
            seq: the answered update.
            report: what came beside the reply; None from an averager that takes in nothing loose.

        Returns:
            What is to be put back.

        Raises:
            FrameError: if the report makes no sense.
        """
        if report is not None:
            self._taken(seq, report.now)
            if report.late_seq is not None:
                self._taken(report.late_seq, report.late)
        return self._close([before for before in self._sent if before < seq])

    def take_all(self) -> list[Coded]:
        """Close all books, because the next update tells the averager to forget lossy blocks.

        Returns:
            What is to be put back.
        """
        return self._close(list(self._sent))

    def forget(self, seq: int) -> None:
        """Update ``seq`` was dropped as a whole; somebody else puts it back."""
        self._sent.pop(seq, None)

    def export(self) -> tuple[dict[str, Tensor], list[dict[str, object]]]:
        """The books for a checkpoint, as tensors and plain values.

        Whoever resumes settles them with the next reply: blocks that are on their way at the cut do
        not arrive any more.
        """
        tensors: dict[str, Tensor] = {}
        rows: list[dict[str, object]] = []
        for seq, entry in self._sent.items():
            found, row = save_coded(entry.coded, str(seq))
            tensors |= found | {f"{seq}/open": entry.open_L.clone()}
            rows.append({"seq": seq, **row})
        return tensors, rows

    def restore(self, tensors: Mapping[str, Tensor], rows: object) -> None:
        """Become what `export` saved.

        Raises:
            CheckpointCorruptError: if tensors and values do not fit together.
        """
        self._sent.clear()
        try:
            for row in rows or []:  # type: ignore[attr-defined]
                seq = int(row["seq"])
                coded = load_coded(tensors, row, str(seq))
                self._sent[seq] = _Sent(coded, tensors[f"{seq}/open"].clone())
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointCorruptError(f"saved books of lossy blocks: {error!r}") from error

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
