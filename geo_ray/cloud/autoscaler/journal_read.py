"""Reads a journal that may be unreadable, and the spending recorded next to it.

A torn journal, or one of another release, is put aside. A new one begins with the machines that
the clouds list and with the recorded costs, a few numbers that every release can read. If even
those are unknown, the budget counts as used up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from pydantic import TypeAdapter, ValidationError

from geo_ray.base.errors import RunDirectoryError
from geo_ray.cloud.autoscaler.journal import JOURNAL_KEY
from geo_ray.cloud.autoscaler.state import AutoscalerMemory, decode_memory, encode_memory, taken_in
from geo_ray.cloud.provider import Machine, MachineState
from geo_ray.storage.conditional_store import ConditionalStore

SPENT_KEY: Final = "spent.json"


@dataclass(frozen=True, slots=True)
class SpentRecord:
    """The cost of a cluster so far, noted beside its journal for when that cannot be read.

    It is a few numbers, which every release can read, so that a budget holds though the books are
    lost.

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


BEFORE: Final = "before the journal was lost"
_ALIVE: Final = (MachineState.PENDING, MachineState.RUNNING)


@dataclass(frozen=True, slots=True)
class JournalRead:
    """What a journal says.

    Attributes:
        memory: empty if there is none, or none that can be read.
        trouble: why it cannot be read; empty: it can.
    """

    memory: AutoscalerMemory = field(default_factory=AutoscalerMemory)
    trouble: str = ""


def read_journal(store: ConditionalStore) -> JournalRead:
    """Read the journal, if that can be done; never raises for what it holds.

    Raises:
        RunDirectoryError: its store does not answer.
    """
    found = store.read(JOURNAL_KEY)
    if found is None:
        return JournalRead()
    try:
        return JournalRead(decode_memory(found.data))
    except RunDirectoryError as error:
        return JournalRead(trouble=error.message)


def put_aside(
    store: ConditionalStore, begin: Callable[[], AutoscalerMemory] = AutoscalerMemory
) -> str | None:
    """Let another journal take the place of one that cannot be read, and keep that.

    Args:
        store: where it lies.
        begin: gives what the other one begins with; called only if it is needed.

    Returns:
        The key under which it lies now; None: it could be read, or there is none.

    Raises:
        RunDirectoryError: the store cannot be read or written.
    """
    found = store.read(JOURNAL_KEY)
    if found is None or not read_journal(store).trouble:
        return None
    memory = begin()
    for number in count(1):
        key = f"{JOURNAL_KEY}.unread-{number}"
        if store.write(key, found.data, None) is not None:
            break
        held = store.read(key)
        if held is not None and held.data == found.data:
            break  # whoever put it there did not come to the rest
    store.write(JOURNAL_KEY, encode_memory(memory), found.tag)  # refused: another one has mended it
    return key


def memory_of(
    machines: Sequence[Machine],
    prefix: str,
    now_unix_s: float,
    unreachable: Collection[str] = (),
    spent: SpentRecord | None = None,
) -> AutoscalerMemory:
    """Return what can be known without a journal: which machines there are, and since when.

    They go on with what they do. What they were rented at is not known.

    Args:
        machines: of the cluster, as listed.
        prefix: of the ids of the autoscaler's own requests.
        now_unix_s: the present time.
        unreachable: by the cloud's name, regions that do not say what there is.
        spent: what all have cost, as far as that was noted; None: it is not known, and machines
            are paid since they are there.
    """
    own = [m for m in machines if m.state in _ALIVE and (m.request_id or "").startswith(prefix)]
    memory = AutoscalerMemory(unreached=tuple(sorted(unreachable)))
    if spent is not None:
        memory.booked_unix_s = spent.until_unix_s
        memory.ledger.add("", BEFORE, 0.0, spent.paid_usd, spent.paid_usd)
        memory.pace.stopped_at_usd = spent.stopped_at_usd
    memory.instances |= {each.id: taken_in(memory, each, now_unix_s) for each in own}
    return memory


def all_spent(made: int, budget_usd: float, now_unix_s: float) -> SpentRecord:
    """Return what counts as spent where that is not known: all that might be."""
    return SpentRecord(made, budget_usd, now_unix_s, stopped_at_usd=budget_usd)
