"""A journal that cannot be read: torn, of another release, or not one at all.

What it said is lost, and nothing may depend on that: machines are what the clouds list. So it is
put aside, for whoever wants to look at it, and another one begins with the machines that are there,
and with what all have cost, which is noted beside it, too. Where even that is not known a budget
counts as used up: it is a promise, and nobody can say any more that it is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from geo_ray.autoscale.journal import JOURNAL_KEY
from geo_ray.autoscale.memory import AutoscalerMemory, decode_memory, encode_memory, taken_in
from geo_ray.autoscale.spent import SpentRecord
from geo_ray.errors import RunDirectoryError
from geo_ray.lease.store import ConditionalStore
from geo_ray.providers.base import Machine, MachineState

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
    silent: Collection[str] = (),
    spent: SpentRecord | None = None,
) -> AutoscalerMemory:
    """Return what can be known without a journal: which machines there are, and since when.

    They go on with what they do. What they were rented at is not known.

    Args:
        machines: of the cluster, as listed.
        prefix: of the ids of the autoscaler's own requests.
        now_unix_s: the present time.
        silent: by the cloud's name, regions that do not say what there is.
        spent: what all have cost, as far as that was noted; None: it is not known, and machines
            are paid since they are there.
    """
    own = [m for m in machines if m.state in _ALIVE and (m.request_id or "").startswith(prefix)]
    memory = AutoscalerMemory(unseen=tuple(sorted(silent)))
    if spent is not None:
        memory.booked_unix_s = spent.until_unix_s
        memory.ledger.add("", BEFORE, 0.0, spent.paid_usd, spent.paid_usd)
        memory.pace.stopped_at_usd = spent.stopped_at_usd
    memory.duties |= {each.id: taken_in(memory, each, now_unix_s) for each in own}
    return memory


def all_spent(made: int, budget_usd: float, now_unix_s: float) -> SpentRecord:
    """Return what counts as spent where that is not known: all that might be."""
    return SpentRecord(made, budget_usd, now_unix_s, stopped_at_usd=budget_usd)
