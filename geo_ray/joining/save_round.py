"""The making of one checkpoint of a run whose regions join, as the server coordinates it.

A pure state machine: messages of ranks in, messages to ranks out.

1. All regions meet at a barrier (`geo_ray.training.membership`), where they have the same model and
   no update is under way. Strategies with blocking rounds meet at the end of each round; others
   exchange once more.
2. There the server copies the averagers' state, and each rank its own.
3. Each rank writes its part and reports it. When all ranks of a region have, rank 0 commits the
   region's files.
4. When all regions have committed, the checkpoint is *ready*: the run loop writes the averagers'
   state and a manifest, which commits the whole.

A run that is stopped ends at the barrier: its ranks train no further, and wait until the checkpoint
is made. After the last step of a run, regions need not meet: they have the final model.

A region that fails or misses the deadline is left out. In a run that is resumed from the
checkpoint, it begins with a copy of another region's state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from geo_ray.base.errors import FrameError
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.message import CONTROL, Message

_COMMIT_S: Final = 60.0
_CAUSE_CHARS: Final = 500


class SaveStage(Enum):
    """Progress of a checkpoint."""

    MEETING = "meeting"
    """Regions are on their way to the barrier."""
    WRITING = "writing"
    """Ranks write their parts."""
    READY = "ready"
    """All regions that are left have committed theirs."""
    FAILED = "failed"
    """No region is left."""


def read_checkpoint(message: Message) -> int:
    """Return the checkpoint that a message is about.

    Raises:
        FrameError: it does not say.
    """
    return fields.count(message.meta, "checkpoint")


def unsaved_message(checkpoint: int, attempt: int, cause: str) -> Message:
    """Return the message of a rank that cannot save its part."""
    meta: Meta = {"checkpoint": checkpoint, "attempt": attempt, "cause": cause[:_CAUSE_CHARS]}
    return Message("unsaved", meta, b"", "control", CONTROL)


def commit_order(message: Message) -> tuple[list[str], list[int]]:
    """Return the records of the parts to commit, and the checkpoints that stay.

    Raises:
        FrameError: the message cannot be read.
    """
    try:
        body = json.loads(bytes(message.payload))
        return [str(each) for each in body["records"]], [int(each) for each in body["keep"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FrameError(f"an order to commit cannot be read: {error!r}") from None


@dataclass(slots=True)
class _Parts:
    """The parts of one region."""

    attempt: int
    world_size: int
    records: dict[int, str] = field(default_factory=dict)  # by rank
    is_ordered: bool = False
    is_committed: bool = False


@dataclass(slots=True)
class SaveRound:
    """See the module.

    Attributes:
        id: of the checkpoint.
        keep: committed checkpoints that stay.
        deadline_s: time of the run's clock at which regions that are late are left out.
        halts: whether training ends at the barrier.
        stage: progress.
        failed: why regions were left out, by region.
    """

    id: int
    keep: tuple[int, ...]
    deadline_s: float
    halts: bool = False
    stage: SaveStage = SaveStage.MEETING
    failed: dict[str, str] = field(default_factory=dict)
    _regions: dict[str, _Parts] = field(default_factory=dict)

    def shown(self) -> dict[str, object]:
        """Return the state as plain values."""
        return {
            "id": self.id,
            "stage": self.stage.value,
            "halts": self.halts,
            "failed": dict(self.failed),
            "saved": list(self.saved),
        }

    @property
    def saved(self) -> tuple[str, ...]:
        """The regions that have committed their parts."""
        return tuple(name for name, parts in self._regions.items() if parts.is_committed)

    def met(self, regions: Mapping[str, tuple[int, int]]) -> None:
        """Record that all regions are at the barrier.

        Args:
            regions: attempt and world size of the regions that save.
        """
        self.stage = SaveStage.WRITING
        self._regions = {name: _Parts(*each) for name, each in regions.items()}
        self._settle()

    def on_message(self, region: str, rank: int, message: Message) -> Message | None:
        """Handle ``part``, ``saved`` or ``unsaved`` of a rank.

        Returns:
            An order for rank 0 of the region, if all parts are written now.

        Raises:
            FrameError: a field is missing or invalid.
        """
        parts = self._regions.get(region)
        attempt = fields.count(message.meta, "attempt")
        if read_checkpoint(message) != self.id or parts is None or parts.attempt != attempt:
            return None  # late, or of an earlier process group
        if message.kind == "unsaved":
            return self.leave_out(region, fields.text(message.meta, "cause"))
        if message.kind == "saved":
            parts.is_committed = parts.is_ordered
            self._settle()
            return None
        if rank >= parts.world_size:
            raise FrameError(f"rank {rank} is not one of the region's {parts.world_size} ranks")
        parts.records[rank] = bytes(message.payload).decode("utf-8", "replace")
        if len(parts.records) < parts.world_size or parts.is_ordered:
            return None
        return self._order(parts)

    def check_deadline(self, now_s: float) -> list[tuple[str, Message]]:
        """Leave out regions that are late; those with some parts may still commit these.

        Parts that a late rank shares with others, as replicas do, are not missing.

        Args:
            now_s: time of the run's clock.

        Returns:
            Orders for rank 0 of regions.
        """
        found: list[tuple[str, Message]] = []
        if now_s < self.deadline_s or self.stage is not SaveStage.WRITING:
            return found
        self.deadline_s = now_s + _COMMIT_S
        for name, parts in list(self._regions.items()):
            missing = [rank for rank in range(parts.world_size) if rank not in parts.records]
            if missing and parts.records and not parts.is_ordered:
                found.append((name, self._order(parts)))
            elif not parts.is_committed:
                what = f"ranks {missing} have not written their parts" if missing else "no commit"
                order = self.leave_out(name, f"{what} in time")
                found += [] if order is None else [(name, order)]
        return found

    def leave_out(self, region: str, cause: str) -> Message | None:
        """Continue without a region that has not committed its files.

        Returns:
            An order for its rank 0 to remove them, if it is left out.
        """
        if region not in self._regions or self._regions[region].is_committed:
            return None
        del self._regions[region]
        self.failed[region] = cause
        self._settle()
        return Message("abandon", {"checkpoint": self.id}, b"", "control", CONTROL)

    def _order(self, parts: _Parts) -> Message:
        parts.is_ordered = True
        body = {"records": [parts.records[r] for r in sorted(parts.records)], "keep": self.keep}
        return Message(
            "commit", {"checkpoint": self.id}, json.dumps(body).encode(), "control", CONTROL
        )

    def _settle(self) -> None:
        if self.stage is not SaveStage.WRITING:
            return
        if not self._regions:
            self.stage = SaveStage.FAILED
        elif all(parts.is_committed for parts in self._regions.values()):
            self.stage = SaveStage.READY
