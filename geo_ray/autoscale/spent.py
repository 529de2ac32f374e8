"""What a cluster has cost so far, noted beside its journal: what is left if that cannot be read.

It is a few numbers, which every release can read, so that a budget holds though the books are lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydantic import TypeAdapter, ValidationError

from geo_ray.autoscale.memory import AutoscalerMemory
from geo_ray.lease.store import ConditionalStore

SPENT_KEY: Final = "spent.json"


@dataclass(frozen=True, slots=True)
class SpentRecord:
    """See the module's docstring.

    Attributes:
        made: of which cluster of the name: how often one was made.
        paid_usd: what machines and head have cost.
        until_unix_s: until when.
        stopped_at_usd: the budget at which all was stopped; None: it was not.
    """

    made: int
    paid_usd: float
    until_unix_s: float
    stopped_at_usd: float | None = None


_READER: Final = TypeAdapter(SpentRecord)


def read_spent(store: ConditionalStore, made: int) -> SpentRecord | None:
    """Return what was noted; None: nothing of this cluster that can be read.

    Raises:
        RunDirectoryError: its store does not answer.
    """
    found = store.read(SPENT_KEY)
    if found is None:
        return None
    try:
        note = _READER.validate_json(found.data)
    except ValidationError:
        return None
    return note if note.made == made else None


class SpentRecorder:
    """Writes what was spent, whenever it is more.

    Args:
        store: the journal's.
        made: how often a cluster of the name was made.
    """

    def __init__(self, store: ConditionalStore, made: int) -> None:
        self._store, self._made = store, made
        self._tag: str | None = None
        self._last: SpentRecord | None = None

    def write(self, memory: AutoscalerMemory, now_unix_s: float) -> None:
        """Note what is in the books, once they are written themselves.

        Raises:
            RunDirectoryError: it cannot be written; the next time says it as well.
        """
        paid_usd, stopped_usd = memory.ledger.paid_usd, memory.pace.stopped_at_usd
        last = self._last
        if last is not None and (last.paid_usd, last.stopped_at_usd) == (paid_usd, stopped_usd):
            return
        note = SpentRecord(self._made, paid_usd, now_unix_s, stopped_usd)
        tag, self._tag, self._last = self._tag, None, None
        if tag is None:
            found = self._store.read(SPENT_KEY)
            tag = None if found is None else found.tag
        self._tag = self._store.write(SPENT_KEY, _READER.dump_json(note), tag)
        if self._tag is not None:  # else another autoscaler writes it now
            self._last = note
