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
from geo_ray.cloud.autoscaler.state import AutoscalerState, adopted, decode_memory, encode_memory
from geo_ray.cloud.provider import Machine, MachineState
from geo_ray.storage.conditional_store import ConditionalStore

SPENT_KEY: Final = "spent.json"


@dataclass(frozen=True, slots=True)
class SpentRecord:
    """Cost of a cluster so far, recorded next to the journal as a fallback.

    It consists of a few numbers that every release can read, so the budget holds even if the
    journal is lost.

    Attributes:
        made: how many clusters of this name were created.
        paid_usd: cost of machines and head.
        until_unix_s: end of the accounted time.
        stopped_at_usd: budget at which everything was stopped; None: it was not.
    """

    made: int
    paid_usd: float
    until_unix_s: float
    stopped_at_usd: float | None = None


_READER: Final = TypeAdapter(SpentRecord)


def read_spent(store: ConditionalStore, made: int) -> SpentRecord | None:
    """Return the recorded cost; None: there is no readable record of this cluster.

    Raises:
        RunDirectoryError: the store does not answer.
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
    """Records the cost whenever it has grown.

    Args:
        store: store of the journal.
        made: how many clusters of this name were created.
    """

    def __init__(self, store: ConditionalStore, made: int) -> None:
        self._store, self._made = store, made
        self._tag: str | None = None
        self._last: SpentRecord | None = None

    def write(self, memory: AutoscalerState, now_unix_s: float) -> None:
        """Record the cost in the ledger. Call it after the journal is written.

        Raises:
            RunDirectoryError: the store cannot be written; the next call retries.
        """
        paid_usd, stopped_usd = memory.ledger.paid_usd, memory.required.stopped_at_usd
        last = self._last
        if last is not None and (last.paid_usd, last.stopped_at_usd) == (paid_usd, stopped_usd):
            return
        note = SpentRecord(self._made, paid_usd, now_unix_s, stopped_usd)
        tag, self._tag, self._last = self._tag, None, None
        if tag is None:
            found = self._store.read(SPENT_KEY)
            tag = None if found is None else found.tag
        self._tag = self._store.write(SPENT_KEY, _READER.dump_json(note), tag)
        if self._tag is not None:  # otherwise another autoscaler writes now
            self._last = note


BEFORE: Final = "before the journal was lost"
_ALIVE: Final = (MachineState.PENDING, MachineState.RUNNING)


@dataclass(frozen=True, slots=True)
class JournalRead:
    """A journal, as far as it is readable.

    Attributes:
        memory: the state; empty if there is no readable journal.
        trouble: why the journal is unreadable; empty: it is readable.
    """

    memory: AutoscalerState = field(default_factory=AutoscalerState)
    trouble: str = ""


def read_journal(store: ConditionalStore) -> JournalRead:
    """Read the journal. Its content never raises an error.

    Raises:
        RunDirectoryError: the store does not answer.
    """
    found = store.read(JOURNAL_KEY)
    if found is None:
        return JournalRead()
    try:
        return JournalRead(decode_memory(found.data))
    except RunDirectoryError as error:
        return JournalRead(trouble=error.message)


def put_aside(
    store: ConditionalStore, begin: Callable[[], AutoscalerState] = AutoscalerState
) -> str | None:
    """Save an unreadable journal under another key and begin a new one.

    Args:
        store: store of the journal.
        begin: returns the initial state; called only if needed.

    Returns:
        Key of the saved journal; None: the journal is readable or missing.

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
            break  # an earlier attempt saved it and did not finish
    store.write(
        JOURNAL_KEY, encode_memory(memory), found.tag
    )  # refused: another process has repaired it
    return key


def memory_of(
    machines: Sequence[Machine],
    prefix: str,
    now_unix_s: float,
    unreachable: Collection[str] = (),
    spent: SpentRecord | None = None,
) -> AutoscalerState:
    """Return the state that follows from the listed machines, without a journal.

    The machines keep working. Their price at launch is unknown.

    Args:
        machines: machines of the cluster, as listed.
        prefix: prefix of the ids of the autoscaler's own requests.
        now_unix_s: current time.
        unreachable: cloud names of regions that do not answer.
        spent: recorded cost; None: unknown, and machines are charged from their launch.
    """
    own = [m for m in machines if m.state in _ALIVE and (m.request_id or "").startswith(prefix)]
    memory = AutoscalerState(unreached=tuple(sorted(unreachable)))
    if spent is not None:
        memory.charged_unix_s = spent.until_unix_s
        memory.ledger.add("", BEFORE, 0.0, spent.paid_usd, spent.paid_usd)
        memory.required.stopped_at_usd = spent.stopped_at_usd
    memory.instances |= {each.id: adopted(memory, each, now_unix_s) for each in own}
    return memory


def all_spent(made: int, budget_usd: float, now_unix_s: float) -> SpentRecord:
    """Return the assumed cost if it is unknown: everything that may have been spent."""
    return SpentRecord(made, budget_usd, now_unix_s, stopped_at_usd=budget_usd)
