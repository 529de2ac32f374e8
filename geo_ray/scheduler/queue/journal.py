"""The append-only journal of a queue: its entries, their encoding and their storage.

    journal-000001.z, journal-000002.z, ...
    journal-base.z                              the piece that a reader begins with

Entries are facts and decisions in order, written before they are acted on. A segment is written
only if it has not changed since it was read, so a fenced writer cannot write.
`QueueJournal.compact` writes a snapshot as further entries, lets readers begin there and removes
earlier segments. Readers need no lease.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import Field, JsonValue, TypeAdapter, ValidationError

from geo_ray.base.errors import LeaseLostError, QueueJournalError, RunDirectoryError
from geo_ray.base.model import StrictModel
from geo_ray.scheduler.queue.config import QueueConfig
from geo_ray.scheduler.queue.job_spec import AnyRequest, JobValue
from geo_ray.storage.conditional_store import ConditionalStore

T = TypeVar("T")
MOST_PACKED_BYTES: Final = 60_000
_MOST_BYTES: Final = 16 * 1024 * 1024


def pack(reader: TypeAdapter[T], value: T) -> bytes:
    """Encode a value for `unpack`."""
    return zlib.compress(reader.dump_json(value))


def unpack(reader: TypeAdapter[T], data: bytes, where: str) -> T:
    """Decode a value.

    Args:
        reader: adapter of the type.
        data: encoded value.
        where: location, for the message.

    Raises:
        QueueJournalError: the data is invalid.
    """
    try:
        stream: Any = zlib.decompressobj()
        text = stream.decompress(data, _MOST_BYTES)
        if not stream.eof:
            raise ValueError("truncated, or too long")
        return reader.validate_json(text)
    except (ValidationError, ValueError, zlib.error) as error:
        first = str(error).splitlines()[0]
        raise QueueJournalError(f"{where} of the queue cannot be read: {first}") from None


Counts = dict[str, int]
LeaveWhy = Literal["preempted", "resized", "cancelled", "overran", "stalled"]
Outcome = Literal["finished", "cancelled", "rejected", "overran", "stalled", "failed"]


class OpenedEntry(StrictModel):
    """A process begins to serve the queue, with the fencing token of its lease."""

    kind: Literal["opened"] = "opened"
    unix_s: float
    token: int
    queue_id: str = Field(min_length=1, description="random id, generated when first served")
    config: QueueConfig


class RequestEntry(StrictModel):
    """A request was accepted or refused."""

    kind: Literal["taken"] = "taken"
    unix_s: float
    tenant: str
    request: AnyRequest
    code: str | None = Field(None, description="error code; null: accepted")
    refused: str | None = Field(None, description="why")


class ObservedJob(StrictModel):
    """A job as shown to the policy at the start of a slot."""

    left: float = Field(ge=0, le=1, description="remaining fraction of its work")
    value: JobValue
    factor: float = Field(gt=0, description="observed speed relative to the declared one")
    regions: tuple[str, ...] = Field((), description="available regions of its data")
    start_s: float = Field(0.0, ge=0, description="seconds from allocation to training")
    waited: int = Field(0, ge=0, description="slots without an allocation")
    service_s: float = Field(0.0, ge=0, description="attained worker seconds")
    admitted: bool = Field(False, description="whether it was admitted before this slot")
    lost: bool = Field(
        False,
        description="whether it lost its processes or regions since the previous slot without "
        "being at fault",
    )


class GivenJob(StrictModel):
    """Allocation of a job in a slot."""

    workers: Counts = Field(description="by region")
    servers: Counts = Field(description="by region")


class SlotEntry(StrictModel):
    """Start of a slot: observations and the decision of the policy."""

    kind: Literal["slot"] = "slot"
    unix_s: float
    slot: int = Field(ge=0, description="number of the slot in its policy generation")
    capacity: dict[str, tuple[float, float]] = Field(description="GPUs and CPUs by region")
    arrived: tuple[str, ...] = ()
    gone: tuple[str, ...] = Field((), description="jobs that ended other than by their plan")
    jobs: dict[str, ObservedJob] = Field({}, description="active jobs, in order")
    given: dict[str, GivenJob] = Field({}, description="allocations from now on")
    surpluses: dict[str, float | None] = Field({}, description="surplus of arrived jobs")
    rejected: tuple[str, ...] = ()
    held: dict[str, str] = Field(
        {}, description="allocations that were not applied, with the reason"
    )


class PolicyGenerationEntry(StrictModel):
    """A new policy begins; slots are counted from here."""

    kind: Literal["generation"] = "generation"
    unix_s: float
    number: int = Field(ge=1)


class StartEntry(StrictModel):
    """Starts a job, as the attempt with this number."""

    kind: Literal["start"] = "start"
    unix_s: float
    job: str
    attempt: int = Field(ge=1)
    workers: Counts
    averager: str


class ReshapeEntry(StrictModel):
    """Lets regions join or leave a running job."""

    kind: Literal["reshape"] = "reshape"
    unix_s: float
    job: str
    workers: Counts


class LeaveEntry(StrictModel):
    """Saves a job and releases its machines."""

    kind: Literal["leave"] = "leave"
    unix_s: float
    job: str
    why: LeaveWhy
    message: str


class GoneEntry(StrictModel):
    """An attempt has ended."""

    kind: Literal["gone"] = "gone"
    unix_s: float
    job: str
    attempt: int
    how: Literal["saved", "finished", "failed", "lost"] = Field(
        description="lost: the attempt failed without being at fault"
    )
    code: str | None = None
    message: str = ""


class ObservationEntry(StrictModel):
    """Observations of running jobs."""

    kind: Literal["observed"] = "observed"
    unix_s: float
    done: dict[str, float] = Field({}, description="completed fraction of the work, by job")
    factors: dict[str, float] = Field({}, description="relative speed, by job")
    expected: dict[str, float] = Field(
        {}, description="fraction expected by the declared speed, by job"
    )
    problems: dict[str, str] = Field({}, description="current problem of a job; empty: resolved")


class EndedEntry(StrictModel):
    """A job has ended."""

    kind: Literal["ended"] = "ended"
    unix_s: float
    job: str
    outcome: Outcome
    code: str | None = None
    message: str = ""


class SnapshotEntry(StrictModel):
    """A part of a snapshot; see `QueueState.snapshot`.

    The last part replaces the state if all parts were written without other entries in between.
    """

    kind: Literal["snapshot"] = "snapshot"
    unix_s: float
    part: int = Field(ge=0)
    is_last: bool = False
    head: dict[str, JsonValue] | None = Field(None, description="all other fields, in part 0")
    job: dict[str, JsonValue] | None = None
    slot: SlotEntry | None = None
    answers: dict[str, JsonValue] = Field({})


AnyEntry = Annotated[
    OpenedEntry
    | RequestEntry
    | SlotEntry
    | PolicyGenerationEntry
    | StartEntry
    | ReshapeEntry
    | LeaveEntry
    | GoneEntry
    | ObservationEntry
    | EndedEntry
    | SnapshotEntry,
    Field(discriminator="kind"),
]
ENTRIES: TypeAdapter[list[AnyEntry]] = TypeAdapter(list[AnyEntry])


_FULL_BYTES: Final = 40_000  # of a segment, compressed


class _Full(StrictModel):
    """Last entry of a full segment: the journal continues in the next one."""

    kind: Literal["full"] = "full"


_PIECE: Final[TypeAdapter[list[AnyEntry | _Full]]] = TypeAdapter(
    list[Annotated[AnyEntry | _Full, Field(discriminator="kind")]]
)


class _Base(StrictModel):
    """Start position of readers."""

    first: int = Field(ge=1, description="first segment of the newest complete snapshot")
    last: int = Field(ge=0, description="its last segment; 0: there is no snapshot")
    oldest: int = Field(ge=1, description="segments from here to the first may not be removed yet")


BASE_KEY: Final = "journal-base.z"
_BASE: Final[TypeAdapter[_Base]] = TypeAdapter(_Base)
_LEAST_PIECES: Final = 8  # after a snapshot until the next one


def piece_key(number: int) -> str:
    """Return the key of a segment."""
    return f"journal-{number:06d}.z"


class QueueJournal:
    """The journal of a queue; see the module.

    Args:
        store: store of the queue.
    """

    def __init__(self, store: ConditionalStore) -> None:
        self._store = store
        self._base: _Base | None = None
        self._base_tag: str | None = None
        self._number = 1
        self._tag: str | None = None
        self._newest: list[AnyEntry] = []
        self._is_full = False

    def read(self) -> list[AnyEntry]:
        """Return the entries since the last call.

        Raises:
            QueueJournalError: entries are invalid, or a segment is missing.
            RunDirectoryError: the store cannot be read.
        """
        found: list[AnyEntry] = []
        if self._base is None:
            self._begin()
        while True:
            if not self._look(found):
                if self._begin():
                    continue
                if self._number > 1 or self._tag is not None or self._has(2):
                    raise _gone(self._number)
                return found
            if not self._has(self._number + 1):
                if self._is_full and self._begin():
                    continue
                if self._is_full and self._has(self._number + 2):
                    raise _gone(self._number + 1)
                return found
            if not self._is_full:  # written between the two reads
                self._look(found)
            self._go_to(self._number + 1)

    def _begin(self) -> bool:
        """Read the start position and move there if this reader is behind.

        Return whether it was.
        """
        stored = self._store.read(BASE_KEY)
        if stored is None:
            self._base = _Base(first=1, last=0, oldest=1)
        else:
            self._base = unpack(_BASE, stored.data, BASE_KEY)
            self._base_tag = stored.tag
        is_behind = self._base.first > self._number
        if is_behind:
            self._go_to(self._base.first)
        return is_behind

    def _go_to(self, number: int) -> None:
        self._number = number
        self._tag, self._newest, self._is_full = None, [], False

    @property
    def is_long(self) -> bool:
        """Whether a snapshot would shorten it considerably."""
        base = self._base or _Base(first=1, last=0, oldest=1)
        return self._number - base.last > max(_LEAST_PIECES, base.last - base.first + 1)

    def compact(self, snapshot: Sequence[AnyEntry]) -> None:
        """Write a snapshot and remove everything before it.

        It may be interrupted anywhere: readers use the old start position until the snapshot is
        complete, and remaining segments are removed with the next one.

        Args:
            snapshot: entries that replace all entries so far.

        Raises:
            LeaseLostError: another process has written.
            RunDirectoryError: the store cannot be written.
        """
        if not self._is_full:
            full = _packed([*self._newest, _Full()])
            self._tag, self._is_full = self._write(self._number, full, self._tag), True
        first, groups = self._number + 1, _grouped(snapshot)
        for index, group in enumerate(groups):
            is_last = index == len(groups) - 1
            data = _packed(group if is_last else [*group, _Full()])
            _check_size(data)
            tag = self._write(self._number + 1, data, None)
            self._go_to(self._number + 1)
            self._tag, self._newest, self._is_full = tag, list(group), not is_last
        before = self._base or _Base(first=1, last=0, oldest=1)
        base = _Base(first=first, last=self._number, oldest=before.oldest)
        tag_now = self._store.write(BASE_KEY, pack(_BASE, base), self._base_tag)
        if tag_now is None:
            raise _overtaken()
        self._base, self._base_tag = base, tag_now
        for number in range(base.oldest, first):
            self._store.remove(piece_key(number))
        self._base = base.model_copy(update={"oldest": first})

    def add(self, entries: Sequence[AnyEntry]) -> None:
        """Write entries atomically.

        Raises:
            LeaseLostError: another process has written.
            RunDirectoryError: the outcome of the write is unknown; the next write finds out.
        """
        if not entries:
            return
        data = _packed([*self._newest, *entries])
        if not self._is_full and (len(data) <= _FULL_BYTES or not self._newest):
            _check_size(data)
            self._tag = self._write(self._number, data, self._tag)
            self._newest = [*self._newest, *entries]
            return
        alone = _packed(entries)
        _check_size(alone)
        if not self._is_full:
            full = _packed([*self._newest, _Full()])
            self._tag, self._is_full = self._write(self._number, full, self._tag), True
        self._tag = self._write(self._number + 1, alone, None)
        self._number, self._newest, self._is_full = self._number + 1, list(entries), False
        if self._begin():  # it was removed already, and has just been written again
            raise _overtaken()

    def _look(self, found: list[AnyEntry]) -> bool:
        """Read the current content of the newest segment; return whether it exists."""
        key = piece_key(self._number)
        stored = self._store.read(key)
        if stored is None:
            return False
        if stored.tag != self._tag:
            read = unpack(_PIECE, stored.data, key)
            entries = [each for each in read if not isinstance(each, _Full)]
            found += entries[len(self._newest) :]
            self._newest, self._tag = entries, stored.tag
            self._is_full = len(entries) < len(read)
        return True

    def _has(self, number: int) -> bool:
        return self._store.read(piece_key(number)) is not None

    def _write(self, number: int, data: bytes, expected: str | None) -> str:
        """Write a segment; return its tag."""
        tag = self._store.write(piece_key(number), data, expected)
        if tag is not None:
            return tag
        found = self._store.read(piece_key(number))
        if found is None or found.data != data:
            raise _overtaken()
        return found.tag  # the reply to this write was lost


def is_there(store: ConditionalStore) -> bool:
    """Whether a store contains the journal of a queue."""
    return any(store.read(key) is not None for key in (piece_key(1), BASE_KEY))


def _grouped(entries: Sequence[AnyEntry]) -> list[list[AnyEntry]]:
    """Group entries so that each group fills one segment."""
    groups: list[list[AnyEntry]] = [[]]
    size = 0
    for entry in entries:
        more = len(_packed([entry]))  # together they take less
        if groups[-1] and size + more > _FULL_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += more
    return groups


def _overtaken() -> LeaseLostError:
    return LeaseLostError(
        "another process has written the journal of this queue; this one makes no more decisions"
    )


def _packed(entries: Sequence[AnyEntry | _Full]) -> bytes:
    return pack(_PIECE, list(entries))


def _check_size(data: bytes) -> None:
    if len(data) > MOST_PACKED_BYTES:
        raise RunDirectoryError(
            f"an entry of the queue's journal would have {len(data)} bytes",
            fix="Submit fewer jobs at once, with smaller configurations.",
        )


def _gone(number: int) -> QueueJournalError:
    return QueueJournalError(f"{piece_key(number)} of the queue is missing")
