"""The append-only journal of a queue: its entries, their encoding and their storage.

    journal-000001.z, journal-000002.z, ...
    journal-base.z                              the piece that a reader begins with

Entries are facts and decisions, in order, written before they are acted on. A piece is written
on condition that it is what was read, so a fenced writer writes nothing. `QueueJournal.compact`
writes a snapshot as further entries, lets readers begin there and removes the pieces before.
Readers need no lease.
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
    """Write a value as `unpack` reads it."""
    return zlib.compress(reader.dump_json(value))


def unpack(reader: TypeAdapter[T], data: bytes, where: str) -> T:
    """Read a value.

    Args:
        reader: of its kind.
        data: its bytes.
        where: they lie, for the message.

    Raises:
        QueueJournalError: they are nothing of the kind.
    """
    try:
        stream: Any = zlib.decompressobj()
        text = stream.decompress(data, _MOST_BYTES)
        if not stream.eof:
            raise ValueError("cut off, or too long")
        return reader.validate_json(text)
    except (ValidationError, ValueError, zlib.error) as error:
        first = str(error).splitlines()[0]
        raise QueueJournalError(f"{where} of the queue cannot be read: {first}") from None


Counts = dict[str, int]
LeaveWhy = Literal["preempted", "resized", "cancelled", "overran", "stalled"]
Outcome = Literal["finished", "cancelled", "turned away", "overran", "stalled", "failed"]


class OpenedEntry(StrictModel):
    """A queue begins to be served, by the holder of its lease with this number."""

    kind: Literal["opened"] = "opened"
    unix_s: float
    epoch: int
    queue_id: str = Field(min_length=1, description="random identity, made when first served")
    config: QueueConfig


class TakenEntry(StrictModel):
    """A request was taken in, or refused."""

    kind: Literal["taken"] = "taken"
    unix_s: float
    tenant: str
    request: AnyRequest
    code: str | None = Field(None, description="of the error; null: it was granted")
    refused: str | None = Field(None, description="why")


class ObservedJob(StrictModel):
    """A job as a policy was shown it at a slot's beginning."""

    left: float = Field(ge=0, le=1, description="share of its work")
    value: JobValue
    factor: float = Field(gt=0, description="of its speed, as observed")
    regions: tuple[str, ...] = Field((), description="of its data, those that are there")
    start_s: float = Field(0.0, ge=0, description="until it trains, once it has something")
    waited: int = Field(0, ge=0, description="slots in which it had nothing")
    service_s: float = Field(0.0, ge=0, description="seconds of workers that it has had")
    admitted: bool = Field(False, description="whether it was taken on before this slot")
    lost: bool = Field(
        False,
        description="whether it lost its processes or regions since the slot before, through no "
        "fault of its own",
    )


class GivenJob(StrictModel):
    """What a policy gave a job in a slot."""

    workers: Counts = Field(description="by region")
    servers: Counts = Field(description="by region")


class SlotEntry(StrictModel):
    """A slot begins: what was seen, and what the policy answered."""

    kind: Literal["slot"] = "slot"
    unix_s: float
    slot: int = Field(ge=0, description="of the era")
    capacity: dict[str, tuple[float, float]] = Field(description="GPUs and CPUs by region")
    arrived: tuple[str, ...] = ()
    gone: tuple[str, ...] = Field((), description="otherwise than by their plan")
    jobs: dict[str, ObservedJob] = Field({}, description="that have come and not ended, in order")
    given: dict[str, GivenJob] = Field({}, description="what each has from now on")
    surpluses: dict[str, float | None] = Field({}, description="of jobs that came")
    turned_away: tuple[str, ...] = ()
    held: dict[str, str] = Field({}, description="what was not done of that, and why")


class PolicyGenerationEntry(StrictModel):
    """The policy begins anew; slots count from here."""

    kind: Literal["generation"] = "generation"
    unix_s: float
    number: int = Field(ge=1)


class StartEntry(StrictModel):
    """A job is to be started, as the attempt with this number."""

    kind: Literal["start"] = "start"
    unix_s: float
    job: str
    attempt: int = Field(ge=1)
    workers: Counts
    averager: str


class ReshapeEntry(StrictModel):
    """Regions of a job that runs are to join or to leave it."""

    kind: Literal["reshape"] = "reshape"
    unix_s: float
    job: str
    workers: Counts


class LeaveEntry(StrictModel):
    """A job is to be saved and to give its machines back."""

    kind: Literal["leave"] = "leave"
    unix_s: float
    job: str
    why: LeaveWhy
    message: str


class GoneEntry(StrictModel):
    """An attempt is over."""

    kind: Literal["gone"] = "gone"
    unix_s: float
    job: str
    attempt: int
    how: Literal["saved", "finished", "failed", "lost"] = Field(
        description="lost: it failed through no fault of its own"
    )
    code: str | None = None
    message: str = ""


class ObservationEntry(StrictModel):
    """What was observed of jobs that run."""

    kind: Literal["observed"] = "observed"
    unix_s: float
    done: dict[str, float] = Field({}, description="share of its work, by job")
    factors: dict[str, float] = Field({}, description="of their speed")
    expected: dict[str, float] = Field(
        {}, description="share that they would have done by their own numbers, since they came"
    )
    problems: dict[str, str] = Field(
        {}, description="what went wrong with a job and with no other; empty: it is over"
    )


class EndedEntry(StrictModel):
    """A job is over."""

    kind: Literal["ended"] = "ended"
    unix_s: float
    job: str
    outcome: Outcome
    code: str | None = None
    message: str = ""


class SnapshotEntry(StrictModel):
    """A part of all that the queue remembers; see `QueueState.snapshot`.

    The last part replaces the state, if all parts came without any other entry in between.
    """

    kind: Literal["snapshot"] = "snapshot"
    unix_s: float
    part: int = Field(ge=0)
    is_last: bool = False
    head: dict[str, JsonValue] | None = Field(None, description="all but the following, in part 0")
    job: dict[str, JsonValue] | None = None
    slot: SlotEntry | None = None
    answers: dict[str, JsonValue] = Field({})


AnyEntry = Annotated[
    OpenedEntry
    | TakenEntry
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


_FULL_BYTES: Final = 40_000  # of a piece, packed


class _Full(StrictModel):
    """The last of a piece: what follows is in the next one."""

    kind: Literal["full"] = "full"


_PIECE: Final[TypeAdapter[list[AnyEntry | _Full]]] = TypeAdapter(
    list[Annotated[AnyEntry | _Full, Field(discriminator="kind")]]
)


class _Base(StrictModel):
    """Where readers begin."""

    first: int = Field(ge=1, description="first piece of the newest whole snapshot")
    last: int = Field(ge=0, description="its last piece; 0: there is no snapshot")
    oldest: int = Field(ge=1, description="pieces from here to the first may not be removed yet")


BASE_KEY: Final = "journal-base.z"
_BASE: Final[TypeAdapter[_Base]] = TypeAdapter(_Base)
_LEAST_PIECES: Final = 8  # behind a snapshot until the next one


def piece_key(number: int) -> str:
    """Return the key of a piece."""
    return f"journal-{number:06d}.z"


class QueueJournal:
    """See the module.

    Args:
        store: where it lies.
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
        """Return the entries that are new since the last call.

        Raises:
            QueueJournalError: they cannot be understood, or a piece is gone.
            RunDirectoryError: they cannot be read.
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
            if not self._is_full:  # written between the two looks
                self._look(found)
            self._go_to(self._number + 1)

    def _begin(self) -> bool:
        """Look where readers begin, and go there if this one is behind; whether it was."""
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
        """Whether a snapshot would make it much shorter."""
        base = self._base or _Base(first=1, last=0, oldest=1)
        return self._number - base.last > max(_LEAST_PIECES, base.last - base.first + 1)

    def compact(self, snapshot: Sequence[AnyEntry]) -> None:
        """Write a snapshot and remove what comes before it.

        It may be interrupted anywhere: readers begin at the old place until the snapshot is whole,
        and what is not removed yet is removed with the next one.

        Args:
            snapshot: entries that replace all that were read or added so far.

        Raises:
            LeaseLostError: somebody else has written since.
            RunDirectoryError: it cannot be written.
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
        """Write entries, all of them or none.

        Raises:
            LeaseLostError: somebody else has written since.
            RunDirectoryError: it cannot be written; the next write finds out what came of it.
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
        if self._begin():  # it was removed already, and has just been written once more
            raise _overtaken()

    def _look(self, found: list[AnyEntry]) -> bool:
        """Take in what the newest piece has now; whether it is there."""
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
        """Write a piece; gives its tag."""
        tag = self._store.write(piece_key(number), data, expected)
        if tag is not None:
            return tag
        found = self._store.read(piece_key(number))
        if found is None or found.data != data:
            raise _overtaken()
        return found.tag  # the answer to this very write got lost


def is_there(store: ConditionalStore) -> bool:
    """Whether a store has the journal of a queue."""
    return any(store.read(key) is not None for key in (piece_key(1), BASE_KEY))


def _grouped(entries: Sequence[AnyEntry]) -> list[list[AnyEntry]]:
    """Return entries in groups, each of which is a full piece."""
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
        "another process has written the journal of this queue; this one decides and does nothing "
        "any more"
    )


def _packed(entries: Sequence[AnyEntry | _Full]) -> bytes:
    return pack(_PIECE, list(entries))


def _check_size(data: bytes) -> None:
    if len(data) > MOST_PACKED_BYTES:
        raise RunDirectoryError(
            f"what is to be written of the queue at once has {len(data)} bytes",
            fix="Submit fewer jobs at once, with smaller configurations.",
        )


def _gone(number: int) -> QueueJournalError:
    return QueueJournalError(f"{piece_key(number)} of the queue is gone, and others are there")
